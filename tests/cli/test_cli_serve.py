"""`penstock serve`, `status`, `sim` and `plot` do what they say, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from openai import APIConnectionError, AuthenticationError, OpenAI

from patience import WAIT_S
from penstock.config import RunConfig
from penstock.observe.run_folder import RunFolder
from penstock.settings import EngineConfig
from run_cli import (
    PENSTOCK,
    Server,
    environment,
    penstock,
    python_without,
    serving,
    wait_for_children,
    wait_for_text,
)

ENGINES = 2
ROUTER = 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two simulated engines behind a key."""
    log = tmp_path_factory.mktemp("serve") / "log"
    args = ("serve", "some-model", "--sim", "--engines", str(ENGINES), "--port", "0", "max_model_len=256")
    with serving(log, *args, PENSTOCK_API_KEY="secret") as ready:
        yield ready


def test_what_listens_everywhere_is_called_at_an_address_of_this_machine(tmp_path: Path) -> None:
    args = ("serve", "m", "--sim", "--port", "0", "--host", "0.0.0.0", "max_model_len=256")
    with serving(tmp_path / "log", *args, PENSTOCK_API_KEY="secret") as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.process.stdout is not None
        assert server.process.stdout.readline() == "listening on all addresses of this machine\n"
        assert f"{server.url}: weight version 0" in penstock("status", server.url).stdout


def test_the_key_is_asked_for(server: Server, tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
    done = penstock("status", server.url, PENSTOCK_RUNTIME_DIR=str(tmp_path))  # else its holder tells the key
    assert done.returncode == 1
    assert "set PENSTOCK_API_KEY" in done.stderr


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGKILL, -signal.SIGKILL)],
    ids=str,
)
def test_nothing_is_left_behind(number: signal.Signals, status: int, tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and a server inherits that
    (folder := tmp_path / "tmp").mkdir()
    command = ("serve", "m", "--sim", "--engines", str(ENGINES), "--port", "0")
    with serving(tmp_path / "log", *command, TMPDIR=str(folder)) as server:
        assert len(server.family) == 1 + ENGINES + ROUTER
        assert server.signal(number) == status
    if number is not signal.SIGKILL:  # which nobody hears; what it leaves are logs, to see why
        assert list(folder.iterdir()) == []


def test_a_ctrl_c_that_comes_twice_at_once_is_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("from penstock.cli import common\ncommon.SAME_S = 600.0\n")
    found = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    with serving(log := tmp_path / "log", "serve", "m", "--sim", "--port", "0", **found) as server:
        [engine] = [process for process in server.family if "penstock.sim" in process.cmdline()]
        engine.suspend()  # so that the fleet's end waits for the second signal
        server.process.send_signal(signal.SIGINT)
        wait_for_text(log, "torn down")
        server.process.send_signal(signal.SIGINT)
        engine.resume()
        assert server.process.wait(timeout=WAIT_S) == 0
    assert "Traceback" not in log.read_text()


def test_no_request_reaches_an_engine_that_ends(tmp_path: Path) -> None:
    """vLLM's server ends after its engine, and answers 500 in between."""
    with serving(tmp_path / "log", "serve", "m", "--sim", "--port", "0", f"fleet.stop_timeout_s={WAIT_S}") as server:
        [engine] = [process for process in server.family if "penstock.sim" in process.cmdline()]
        engine.suspend()
        server.process.send_signal(signal.SIGTERM)
        router = OpenAI(base_url=server.url, api_key="none", max_retries=0)
        with suppress(APIConnectionError):
            while True:
                router.get("/router/health", cast_to=object)
        assert engine.is_running()
        engine.resume()
        assert server.process.wait(timeout=WAIT_S) == 0


def test_an_impatient_second_ctrl_c_leaves_nothing_behind_either(tmp_path: Path) -> None:
    with serving(log := tmp_path / "log", "serve", "m", "--sim", "--engines", str(ENGINES), "--port", "0") as server:
        [engine, *_] = [process for process in server.family if "penstock.sim" in process.cmdline()]
        engine.suspend()  # so that the fleet takes its time
        server.process.send_signal(signal.SIGINT)
        end = time.monotonic() + WAIT_S
        while server.process.poll() is None:  # those that come with the first one are none of their own
            assert time.monotonic() < end
            time.sleep(0.1)
            server.process.send_signal(signal.SIGINT)
        assert server.process.returncode == -signal.SIGINT
        engine.resume()
        _, alive = psutil.wait_procs(server.family, timeout=WAIT_S)
    assert not alive
    assert "Traceback" not in log.read_text()


def test_interrupted_while_it_starts(tmp_path: Path) -> None:
    argv = [PENSTOCK, "serve", "m", "--sim", "--engines", "2", "--port", "0"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(argv, stdout=log, stderr=log, env=environment()) as process,
    ):
        family = wait_for_children(process.pid, ROUTER)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=WAIT_S) == 128 + signal.SIGINT
        _, alive = psutil.wait_procs(family, timeout=WAIT_S)
    assert not alive
    assert "ready:" not in (tmp_path / "log").read_text()


def test_attached_servers_are_all_there_is_and_need_neither_vllm_nor_the_model_here(tmp_path: Path) -> None:
    with serving(tmp_path / "sim", "sim", "--port", "0") as other:
        args = ("serve", "./not-here", "--attach", other.url, "--port", "0")
        with serving(tmp_path / "log", *args, **python_without(tmp_path, "vllm")) as server:
            assert len(server.family) == 1 + ROUTER
            (engine,) = json.loads(penstock("status", server.url, "--json").stdout)["engines"]
            assert (engine["url"], engine["state"]) == (other.url, "serving")


def test_sim_is_one_engine(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "sim", "--port", "0", "served_model_name=tiny", "--api-key", "k") as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="k")
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert server.signal(signal.SIGTERM) == 0


def test_plot_draws_a_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, RunConfig(engine=EngineConfig(model="m")))
    assert "no step to plot yet" in penstock("plot", tmp_path).stderr
    seconds = {"seconds/training": 1.0, "seconds/waiting": 0.1, "seconds/update": 0.1, "seconds/step": 1.3}
    row = {"step": 1, "version": 1, "reward_mean": 0.5, "staleness/0": 9, "staleness_mean": 0.0}
    folder.append_metrics({**row, "tokens_per_second": 7, "update/bubble": 0.05, **seconds})
    done = penstock("plot", tmp_path)
    assert done.returncode == 0
    assert done.stdout.split() == [str(tmp_path / name) for name in ("plots.png", "trace.json")]
    assert (tmp_path / "plots.png").stat().st_size > 1000
