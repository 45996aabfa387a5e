"""Starting and ending: options, failed starts, deaths of processes, and nothing left behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import torch

from patience import WAIT_S, eventually, give_up
from penstock import Fleet
from penstock.engine.client import DataClient
from penstock.errors import ConfigError, EngineHTTPError, EngineStartError, StateError
from penstock.fleet.member import State
from penstock.http import HttpTransport
from penstock.router.membership import Membership
from penstock.router.state import RouterAdmin
from penstock.router_settings import RouterConfig
from penstock.settings import EngineConfig, FleetConfig
from sim_fleets import SIM, check_serves, children

FEW_FILES = """
import asyncio, resource
import penstock
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

async def main():
    async with penstock.Fleet.launch("sim-model", profile="sim") as fleet:
        out = await fleet.generate(
            prompt_token_ids=[[1]] * 200, sampling_params={"max_tokens": 200, "detokenize": False}
        )
        print(len(out.response_ids))

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def logs_go_to(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary log folders are made here, so that it can be seen which are left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path_factory.mktemp("r")))  # where control sockets lie
    return tmp_path


@pytest.fixture(autouse=True)
async def ours() -> AsyncIterator[set[int]]:
    """No process that a test started is left when it ends."""
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    yield before
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


async def test_options_whole_or_by_name_and_a_teardown_that_may_be_repeated(ours: set[int], logs_go_to: Path) -> None:
    engine = EngineConfig(model="sim-model", profile="sim", max_model_len=128)
    router = RouterConfig(policy="round-robin")
    opening = Fleet.launch(engine, fleet=FleetConfig(engines=3), engines=2, router=router, api_key="k", seed=3)
    fleet = await opening
    lines = [process.cmdline() for process in children("sim") if process.pid not in ours]
    assert len(lines) == 2
    assert all({"max_model_len=128", "seed=3"} <= set(line) for line in lines)
    (line,) = [p.cmdline() for p in children("router") if p.pid not in ours]
    assert any('"policy":"round-robin"' in word for word in line)
    assert not any("k" in line for line in [*lines, line]), "the key is on no command line"
    assert len(await fleet.sample([1], 2, {"max_tokens": 2})) == 2
    for url in (fleet.url, (await fleet.engines())[0].url):
        stranger = DataClient(url)
        with pytest.raises(EngineHTTPError) as caught:
            await stranger.sample([1], 1)
        assert caught.value.status == 401
        await stranger.close()
    with pytest.raises(StateError, match="opened already"):
        await opening
    await asyncio.gather(fleet.teardown(), fleet.teardown())
    await fleet.teardown()
    assert [member.state for member in fleet._roster.members] == [State.STOPPED] * 2
    assert list(logs_go_to.iterdir()) == []
    for call in (fleet.sample([1], 1), fleet.pause_generation(), fleet.engines(), fleet.update_weights([])):
        with pytest.raises(StateError, match="torn down"):
            await call


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_paralel_size": 2}, "unknown option 'tensor_paralel_size'; did you mean 'tensor_parallel_size'"),
        ({"engines": 0}, "engines is 0 and there is nothing to attach"),
        ({"policy": "best"}, "'policy'"),
        ({"engines": 2, "min_engines": 3}, "min_engines is 3, more than the 2 engines"),
        ({"attach": "http://127.0.0.1:9"}, "'attach': .*, got 'http://127.0.0.1:9'"),
        ({"attach": 9}, "'attach': .*, got 9"),
        ({"api_key": 5}, "api_key must be a string, not of type int"),
        ({"api_key": "of a file\n"}, "api_key has a line break or another control character in it"),
        ({"host": "0.0.0.0"}, "router.host '0.0.0.0' opens the router to other machines and there is no API key"),
        ({"profile": "cpu"}, r"model path \./nowhere does not exist"),
        ({"ray_address": "auto"}, "'ray_address': has an effect with the launcher 'ray' only, got 'auto'"),
        ({"ray_cpus": 0}, "'ray_cpus': has an effect with the launcher 'ray' only"),
        ({"fleet": 3}, "give a FleetConfig, not 3; or its fields as options of their own"),
    ],
)
async def test_wrong_options_are_said_at_once(options, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fleet.launch("./nowhere", **{"profile": "sim"} | options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "model must be a checkpoint folder, a hub name or an EngineConfig, got None"),
        (5, "got 5"),
        ("  ", "config key 'model': give a checkpoint folder or a hub name such as Qwen/Qwen3-0.6B, got '  '"),
        ("runs/demo/model", "model path runs/demo/model does not exist"),
    ],
)
def test_a_model_that_is_none_starts_no_engine(model, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fleet.launch(model, profile="cpu")


@pytest.mark.parametrize("model", ["s3://bucket/models/one", "gs://bucket/one"])
def test_a_model_in_a_bucket_is_left_to_vllm(model: str) -> None:
    Fleet.launch(model, profile="cpu")


def test_a_fleet_that_was_not_opened_says_how() -> None:
    fleet = Fleet.launch("any-name", profile="sim")
    with pytest.raises(AttributeError, match=r"not open yet, so it has no 'generate'; open it by `async with"):
        fleet.generate(["a"])  # type: ignore[attr-defined]


async def test_a_key_in_the_environment_that_was_not_given_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "somebodys-key")
    async with Fleet.launch("sim-model", **SIM) as fleet:
        await check_serves(fleet, engines=1)


async def test_an_engine_that_does_not_start_ends_the_others_and_says_why(logs_go_to: Path) -> None:
    with pytest.raises(EngineStartError, match=r"unknown config key 'no_such_option'") as caught:
        await Fleet.launch("sim-model", engines=2, profile="sim", extra_args={"no-such-option": 1})
    (folder,) = logs_go_to.iterdir()
    assert str(folder) in str(caught.value), "its log is kept"


async def test_a_start_that_is_cancelled_leaves_nothing(ours: set[int], logs_go_to: Path) -> None:
    start = asyncio.ensure_future(Fleet.launch("sim-model", engines=2, profile="sim").__aenter__())
    await eventually(lambda: len([p for p in children("sim") if p.pid not in ours]) >= 2)
    await give_up(start)
    assert list(logs_go_to.iterdir()) == []


async def test_a_folder_for_logs(tmp_path: Path) -> None:
    logs = tmp_path / "my" / "logs"
    for _ in range(2):  # the second run appends to the first one's logs, and must not read the first one's port
        async with Fleet.launch("sim-model", profile="sim", log_dir=logs) as fleet:
            await check_serves(fleet, engines=1)
    assert {log.name for log in logs.iterdir()} == {"e0.log", "router.log"}


async def test_more_requests_than_a_shells_limit_of_open_files() -> None:
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FEW_FILES, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(launcher.communicate(), WAIT_S)
    assert (out, launcher.returncode) == (b"200\n", 0), err.decode()


@pytest.mark.parametrize("workers", [1, 2])
async def test_engines_and_router_obey_their_fleet_alone(tmp_path: Path, workers: int) -> None:
    """Another user of the machine has no key, and a client's key is no key to an engine."""
    options = {**SIM, "api_key": "of-clients", "log_dir": tmp_path, "workers": workers}
    async with Fleet.launch("sim-model", engines=1, **options) as fleet:
        (engine,) = await fleet.engines()
        key = fleet.key_of(engine.name)
        assert key is not None
        assert len(key) >= 43
        await check_serves(fleet, engines=1)
        await fleet.update_weights([("w", torch.ones(4))])
        for given in (None, "of-clients"):
            stranger = HttpTransport(engine.url, api_key=given)
            for path in ("/pause", "/collective_rpc", "/penstock/weights/prepare", "/sim/fault", "/v1/completions"):
                with pytest.raises(EngineHTTPError) as refused:
                    await stranger.post(path, {}, timeout_s=WAIT_S)
                assert refused.value.status == 401, (path, given)
            await stranger.close()
        for given, status in (("of-clients", 401), ("wrong", 401)):
            admin = RouterAdmin(fleet.url, given)
            with pytest.raises(EngineHTTPError) as refused:
                await admin.announce(Membership(10**6, ()))
            assert refused.value.status == status
            await admin.close()
        reader = RouterAdmin(fleet.url, "of-clients")
        assert key not in str(await reader.engines())
        await reader.close()
        http = HttpTransport(fleet.url, api_key="of-clients")
        if workers == 1:
            for path in ("/router/engines", "/router/metrics"):
                assert key.encode() not in await http.call("GET", path, None, timeout_s=WAIT_S)
        await http.close()
        family = psutil.Process().children(recursive=True)
        assert key not in str([process.cmdline() for process in family])
        assert key not in f"{fleet._roster.members}{fleet._roster.members[0].entries()}{await fleet.engines()}"
    assert [file.name for file in tmp_path.rglob("*") if file.is_file() and key in file.read_text()] == []
