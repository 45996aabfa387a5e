"""The folder of control sockets, and who gets the keys there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sim_fleets import SIM, check_serves

from penstock import Fleet
from penstock.errors import EngineError, UserError
from penstock.fleet.remote import FleetClient
from penstock.fleet.service import folder, refuse_second, shown, socket_of, state_of
from penstock.router.admin_client import RouterAdmin


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(path))
    return path


def test_a_folder_that_others_may_enter_or_that_lies_elsewhere_is_refused(runtime: Path, tmp_path: Path) -> None:
    name = f"penstock-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (runtime / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="must be a folder of this user that nobody else can enter"):
        folder()
    (runtime / name).unlink()
    (runtime / name).mkdir()
    (runtime / name).chmod(0o750)
    for call in (folder, lambda: socket_of("http://127.0.0.1:1"), lambda: refuse_second(None)):
        with pytest.raises(UserError, match="chmod 700"):
            call()
    (runtime / name).chmod(0o700)
    assert folder() == runtime / name


async def test_a_process_of_the_same_user_gets_the_keys_and_nothing_shows_them() -> None:
    async with Fleet.launch("sim-model", engines=2, api_key="of-clients", **SIM) as fleet:
        async with FleetClient.to(fleet.url) as link:
            state = await link.state()
        key = state.admin_key
        assert {m.name: m.api_key for m in state.members} == {
            s.name: fleet.key_of(s.name) for s in await fleet.engines()
        }
        assert key is not None
        assert key == fleet.key_of("e0")
        assert key not in f"{state}{shown(state)}"
        admin = RouterAdmin(fleet.url, key)
        await admin.set_policy("round-robin")
        await admin.close()
        async with Fleet.connect(fleet.url) as adopted:  # without the clients' key too
            await adopted.add_engines()
            await check_serves(adopted, engines=3)
            assert adopted.key_of("e2") == key


def test_a_state_that_cannot_be_read_shows_no_key() -> None:
    with pytest.raises(EngineError, match=r"cannot be read \(.*admin_key.*\)") as refused:
        state_of({"admin_key": ["secret"]})
    assert "secret" not in str(refused.value)
