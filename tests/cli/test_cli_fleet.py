"""`penstock fleet`, and a fleet under `nohup`, as a person uses them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI

from patience import WAIT_S
from run_cli import PENSTOCK, Server, environment, penstock, serving, wait_for_text

SERVE = ("serve", "m", "--sim", "--engines", "2", "--port", "0")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("r"))


@pytest.fixture(scope="module")
def server(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(
        tmp_path_factory.mktemp("serve") / "log", *SERVE, PENSTOCK_RUNTIME_DIR=runtime, PENSTOCK_API_KEY="secret"
    ) as ready:
        yield ready


def states(runtime: str, *args: str) -> dict[str, str]:
    done = penstock("status", "--json", *args, PENSTOCK_RUNTIME_DIR=runtime)
    assert done.returncode == 0, done.stderr
    return {engine["name"]: engine["state"] for engine in json.loads(done.stdout)["engines"]}


def test_engines_are_added_drained_and_removed_without_a_key(server: Server, runtime: str, tmp_path: Path) -> None:
    assert states(runtime, server.url) == {"e0": "serving", "e1": "serving"}

    def fleet(*args: str) -> str:
        done = penstock("fleet", *args, PENSTOCK_RUNTIME_DIR=runtime)
        assert done.returncode == 0, done.stderr
        assert not re.search("^penstock: |Traceback", done.stderr, re.MULTILINE), done.stderr  # a warning may be
        return done.stdout.strip()

    assert fleet("add") == "serving: e2"
    done = penstock("fleet", "drain", "e0", "--timeout", "20", PENSTOCK_RUNTIME_DIR=runtime)
    assert (done.returncode, done.stdout) == (0, "e0 is drained\n"), done.stderr
    assert done.stderr == "draining e0: its requests and sessions have 20 s to end\n"
    assert states(runtime) == {"e0": "draining", "e1": "serving", "e2": "serving"}
    assert "e0      drained " in penstock("status", PENSTOCK_RUNTIME_DIR=runtime).stdout
    assert fleet("remove", "e0") == "e0 has left"
    assert fleet("add") == "serving: e3"
    assert fleet("remove", "e1") == "e1 has left"
    table = penstock("status", f"{server.url}/v1", PENSTOCK_RUNTIME_DIR=runtime).stdout.strip()
    assert "weight version 0, owned by process" in table
    assert re.search(r"; \d requests since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d, 0 held$", table.splitlines()[0])
    assert [line.split()[:2] for line in table.splitlines()[2:]] == [["e2", "serving"], ["e3", "serving"]]
    with serving(tmp_path / "log", "sim", "--port", "0", PENSTOCK_API_KEY="secret") as other:
        added = penstock("fleet", "add", "--attach", f"{other.url}#dp=1", PENSTOCK_RUNTIME_DIR=runtime)
        assert (added.returncode, added.stdout) == (0, "serving: e4\n"), added.stderr
        assert fleet("remove", "e4") == "e4 has left"
        assert OpenAI(base_url=f"{other.url}/v1", api_key="secret").models.list().data, "it runs on"
    client = OpenAI(base_url=f"{server.url}/v1", api_key="secret")
    assert client.completions.create(model="m", prompt="Hello", max_tokens=5).usage


def test_status_shows_an_engine_that_starts(tmp_path: Path) -> None:
    kept = {"PENSTOCK_RUNTIME_DIR": str(tmp_path)}
    with serving(tmp_path / "log", *SERVE, "fleet.restart_backoff_s=120", **kept) as server:
        engine = json.loads(penstock("status", "--json", **kept).stdout)["engines"][1]
        [victim] = [process for process in server.family if process.pid == engine["pid"]]
        assert f"port={engine['url'].rpartition(':')[2]}" in victim.cmdline()
        assert str(victim.pid) in penstock("status", **kept).stdout
        victim.kill()
        wait_for_text(tmp_path / "log", "engine e1: serving -> dead")
        status = penstock("status", server.url, "--json", **kept)
        shown = {engine["name"]: engine for engine in json.loads(status.stdout)["engines"]}
        assert shown.keys() == {"e0", "e1"}
        assert (shown["e1"]["state"] != "serving", shown["e1"]["pid"]) == (True, None)
        said = penstock("status", server.url, **kept).stdout
        ends = r"its process exited with status -9|health check failed: .*"  # whichever is noticed first
        assert re.search(rf"e1 dead: ({ends}) \(it is started again\)", said), said
        refused = penstock("fleet", "drain", "e1", **kept)
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), "nothing is announced before it is refused"
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert client.completions.create(model="m", prompt="Hello", max_tokens=3).usage, "the other one serves"


def test_what_cannot_be_done_is_one_line(server: Server, runtime: str) -> None:
    for args, says in (
        (("drain", "e9"), "there is no engine 'e9'; the fleet has e"),
        (("drain", "e0", "--url", "http://127.0.0.1:1"), f"known here: {server.url}"),
        (("add", "0"), "'N'"),
        (("add", "2", "--attach", "http://127.0.0.1:9"), "2 to start and servers to --attach are two calls"),
        (("dance",), "No such command 'dance'"),
    ):
        done = penstock("fleet", *args, PENSTOCK_RUNTIME_DIR=runtime)
        assert done.returncode == 2
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
    elsewhere = Path(runtime) / "not" / "yet"  # short, as a socket's path has 107 bytes at most
    for command in (["status"], ["fleet", "stop"]):
        done = penstock(*command, PENSTOCK_RUNTIME_DIR=str(elsewhere))
        assert done.returncode == 2
        assert "no process of yours on this machine owns a fleet; known here: none" in done.stderr


def test_status_of_a_control_port_says_which_address_to_give(server: Server, runtime: str) -> None:
    [port] = httpx.get(f"{server.url}/router/health", timeout=WAIT_S).json()["control_ports"]
    done = penstock("status", f"http://127.0.0.1:{port}", PENSTOCK_RUNTIME_DIR=runtime, PENSTOCK_API_KEY="secret")
    assert done.returncode == 1
    assert f"http://127.0.0.1:{port} is a control port, an engine or another server: give the address" in done.stderr
    assert f"known here: {server.url}" in done.stderr


def test_of_several_fleets_none_is_guessed(tmp_path: Path) -> None:
    """Not even the one at the port that `penstock serve` takes by default."""
    folder = tmp_path / f"penstock-{os.getuid()}"
    folder.mkdir(mode=0o700)
    with ExitStack() as stack:
        for port in (8000, 9000):
            one = stack.enter_context(socket.socket(socket.AF_UNIX))
            one.bind(str(folder / f"fleet-{port}.sock"))
            one.listen()
        for args in ("status", "fleet stop"):
            done = penstock(*args.split(), PENSTOCK_RUNTIME_DIR=str(tmp_path))
            assert done.returncode == 2
            assert "several fleets are here: http://127.0.0.1:8000, http://127.0.0.1:9000; give" in done.stderr


def test_stop_ends_a_fleet_that_is_served_in_a_shell(server: Server, runtime: str) -> None:
    family = [process for process in server.family if process.is_running()]
    done = penstock("fleet", "stop", PENSTOCK_RUNTIME_DIR=runtime)
    assert (done.returncode, done.stdout) == (0, "stopped\n")
    assert server.process.wait(timeout=WAIT_S) == 0
    _, alive = psutil.wait_procs(family, timeout=WAIT_S)
    assert not alive


def test_under_nohup_it_outlives_the_shell_until_it_is_stopped(tmp_path: Path) -> None:
    kept = {"PENSTOCK_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / "log").touch()
    shell = f"nohup {PENSTOCK} {' '.join(SERVE)} >{tmp_path}/log 2>&1 & echo $!"
    started = subprocess.run(
        ["bash", "-c", shell], env=environment(**kept), check=True, start_new_session=True, stdout=subprocess.PIPE
    )
    holder = psutil.Process(int(started.stdout))
    try:
        wait_for_text(tmp_path / "log", "stops everything.")
        state = json.loads(penstock("status", "--json", **kept).stdout)
        assert state["pid"] == holder.pid
        family = [holder, *holder.children(recursive=True)]
        os.killpg(os.getpgid(holder.pid), signal.SIGHUP)  # as of a terminal that closes
        client = OpenAI(base_url=f"{state['url']}/v1", api_key="none")
        assert client.completions.create(model="m", prompt="Hi", max_tokens=3).usage
        assert penstock("fleet", "stop", "--url", state["url"], **kept).stdout == "stopped\n"
        _, alive = psutil.wait_procs(family, timeout=WAIT_S)
        assert not alive
        assert list((tmp_path / f"penstock-{os.getuid()}").iterdir()) == []
    finally:
        if holder.is_running():
            holder.kill()  # its engines and router end with it


def test_what_does_not_start_is_an_error_of_status_1(tmp_path: Path) -> None:
    options = ("extra_args.no-such-option=1", f"fleet.log_dir={tmp_path}")
    done = penstock(*SERVE, *options, PENSTOCK_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "no_such_option" in done.stderr
    assert "Traceback" not in done.stderr
