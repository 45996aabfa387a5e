"""A Ray cluster of the fleet's own, on this machine: nothing of it is in reach of others, and nothing of it is left."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from patience import WAIT_S
from penstock import Fleet
from penstock.engine.launch import reserved_port
from penstock.errors import ConfigError
from ray_nodes import ignore_present, processes
from sim_fleets import SIM, check_serves


@pytest.fixture(scope="module", autouse=True)
def _only_ours() -> None:
    ignore_present()


def living() -> set[psutil.Process]:
    return {p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


async def test_a_cluster_of_its_own_listens_on_loopback_and_ends_with_the_fleet() -> None:
    before = living()
    async with Fleet.launch("sim-model", engines=2, launcher="ray", **SIM) as fleet:
        await check_serves(fleet, engines=2)
        assert len(processes("sim")) == 2
        ours = living() - before
        heard = {c.laddr.ip.removeprefix("::ffff:") for p in ours for c in p.net_connections() if c.status == "LISTEN"}
        assert heard == {"127.0.0.1"}
        (raylet,) = [p for p in ours if p.name() == "raylet"]
        (socket,) = [a.partition("=")[2] for a in raylet.cmdline() if a.startswith("--raylet_socket_name")]
        folder = Path(socket).parents[2]
        assert folder.name.startswith("ray-")
    assert not folder.exists()
    await asyncio.to_thread(psutil.wait_procs, ours, 20.0)
    assert living() <= before


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files of child processes go where they are removed; a test's usual folder is too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.mark.slow
async def test_a_killed_launcher_leaves_nothing_of_its_cluster(short_folder: Path) -> None:
    serve = ("serve", "any-name", "--sim", "--engines", "2", "--launcher", "ray", "--port", "0")
    argv = (Path(sys.executable).parent / "penstock", *serve)
    launcher = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert launcher.stdout is not None
    try:
        assert (await asyncio.wait_for(launcher.stdout.readline(), WAIT_S)).startswith(b"ready: 2 engines")
        below = psutil.Process(launcher.pid).children(recursive=True)
        assert {"raylet", "gcs_server"} <= {p.name() for p in below}
        assert len(processes("sim")) == 2
    finally:
        launcher.kill()
        await launcher.wait()
    _, left = await asyncio.to_thread(psutil.wait_procs, below, 30.0)
    assert left == []
    assert not list(short_folder.glob("ray-*"))


async def test_an_engine_ends_with_the_ray_of_its_node() -> None:
    before = living()
    async with Fleet.launch("sim-model", launcher="ray", max_restarts=0, **SIM):
        (engine,) = processes("sim")
        (raylet,) = [p for p in living() - before if p.name() == "raylet"]
        raylet.kill()
        await asyncio.to_thread(psutil.wait_procs, [engine], 30.0)
        assert not engine.is_running()


async def test_a_cluster_that_is_not_there_is_said_at_once() -> None:
    with reserved_port() as port, pytest.raises(ConfigError, match=f"no Ray cluster is at 127.0.0.1:{port}"):
        async with asyncio.timeout(WAIT_S):
            await Fleet.launch("sim-model", launcher="ray", ray_address=f"127.0.0.1:{port}", **SIM)
    assert processes("fleet.ray_driver") == []
