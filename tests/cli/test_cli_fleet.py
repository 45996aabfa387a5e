"""`penstock fleet`, and a fleet under `nohup`, as a person uses them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from openai import OpenAI
from run_cli import END_S, PENSTOCK, Server, environment, penstock, serving, wait_for_text

from penstock.cli.status import _since

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
    assert fleet("drain", "e0", "--timeout", "20") == "e0 is drained"
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
        assert (
            "warning: engine e4 serves 'sim-model', and engine e2 serves 'm': if these are two models" in added.stderr
        )
        assert fleet("remove", "e4") == "e4 has left"
        assert OpenAI(base_url=f"{other.url}/v1", api_key="secret").models.list().data, "it runs on"
    client = OpenAI(base_url=f"{server.url}/v1", api_key="secret")
    assert client.completions.create(model="m", prompt="Hello", max_tokens=5).usage


def test_status_says_from_when_on_requests_are_counted() -> None:
    """A router worker that ended took its count along."""
    began = datetime(2026, 11, 26, 13, 0, 12).astimezone()
    one = {"workers": (7,), "counted_since": began.timestamp()}
    assert _since(one) == "since 2026-11-26 13:00:12"
    of_two = "so far, the newest of 2 router workers counting since 2026-11-26 13:00:12"
    assert _since({**one, "workers": (7, 8)}) == of_two
    assert _since({"workers": (), "counted_since": 0.0}) == "so far"


def test_an_interrupted_order_is_said_to_go_on(tmp_path: Path) -> None:
    with serving(tmp_path / "log", *SERVE, PENSTOCK_RUNTIME_DIR=str(tmp_path)) as server:
        OpenAI(base_url=f"{server.url}/v1", api_key="none").completions.create(
            model="m", prompt="Hello", max_tokens=3, extra_headers={"X-Session-ID": "s"}
        )
        loads = json.loads(penstock("status", server.url, "--json").stdout)["engines"]
        [home] = [engine["name"] for engine in loads if engine["sessions"]]
        drain = subprocess.Popen(
            [PENSTOCK, "fleet", "drain", home], stderr=subprocess.PIPE, text=True,
            env=environment(PENSTOCK_RUNTIME_DIR=str(tmp_path)),
        )  # fmt: skip
        wait_for_text(tmp_path / "log", "takes no new session")
        drain.send_signal(signal.SIGINT)
        assert drain.communicate(timeout=END_S)[1].startswith(f"draining {home} goes on in the fleet; ")
        assert drain.returncode == 128 + signal.SIGINT
        assert states(str(tmp_path))[home] == "draining"


def test_status_shows_an_engine_that_starts(tmp_path: Path) -> None:
    kept = {"PENSTOCK_RUNTIME_DIR": str(tmp_path)}
    with serving(tmp_path / "log", *SERVE, "fleet.restart_backoff_s=120", **kept) as server:
        url = json.loads(penstock("status", "--json", **kept).stdout)["engines"][1]["url"]
        [victim] = [process for process in server.family if f"port={url.rpartition(':')[2]}" in process.cmdline()]
        victim.kill()
        wait_for_text(tmp_path / "log", "engine e1: serving -> dead")
        status = penstock("status", server.url, "--json", **kept)
        shown = {engine["name"]: engine["state"] for engine in json.loads(status.stdout)["engines"]}
        assert shown.keys() == {"e0", "e1"}
        assert shown["e1"] != "serving"
        said = penstock("status", server.url, **kept).stdout
        assert "e1 dead: its process exited with status -9 (it is started again)" in said
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert client.completions.create(model="m", prompt="Hello", max_tokens=3).usage, "the other one serves"


def test_what_cannot_be_done_is_one_line(server: Server, runtime: str, tmp_path: Path) -> None:
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
    elsewhere = tmp_path / "r"
    elsewhere.mkdir()
    for command in (["status"], ["fleet", "stop"]):
        done = penstock(*command, PENSTOCK_RUNTIME_DIR=str(elsewhere))
        assert done.returncode == 2
        assert "no process of yours on this machine owns a fleet; known here: none" in done.stderr


@pytest.mark.parametrize("args", ["status", "fleet stop", "fleet remove e0", "fleet drain e0", "fleet add"])
def test_of_several_fleets_none_is_guessed(args: str, tmp_path: Path) -> None:
    """Not even the one at the port that `penstock serve` takes by default."""
    with several(tmp_path, 8000, 9000) as asked:
        done = penstock(*args.split(), PENSTOCK_RUNTIME_DIR=str(tmp_path))
        assert done.returncode == 2
        assert done.stderr == (
            "penstock: several fleets are here: http://127.0.0.1:8000, http://127.0.0.1:9000; give the address of one\n"
        )
        assert not asked()


@contextmanager
def several(runtime: Path, *ports: int) -> Iterator[Callable[[], bool]]:
    """The control sockets of fleets at these ports; gives a function that tells whether anyone asked for anything."""
    folder = runtime / f"penstock-{os.getuid()}"
    folder.mkdir(mode=0o700)
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in ports]
        for one, port in zip(sockets, ports, strict=True):
            one.bind(str(folder / f"fleet-{port}.sock"))
            one.listen()
            one.settimeout(0)
        yield lambda: any(_was_asked(one) for one in sockets)


def _was_asked(listening: socket.socket) -> bool:
    """Whether a connection came with something to read; one that was only opened was a look at who lives."""
    while True:
        try:
            connection, _ = listening.accept()
        except BlockingIOError:
            return False
        with connection:
            if connection.recv(1):
                return True


def test_stop_ends_a_fleet_that_is_served_in_a_shell(server: Server, runtime: str) -> None:
    family = [process for process in server.family if process.is_running()]
    done = penstock("fleet", "stop", PENSTOCK_RUNTIME_DIR=runtime)
    assert (done.returncode, done.stdout) == (0, "stopped\n")
    assert server.process.wait(timeout=END_S) == 0
    _, alive = psutil.wait_procs(family, timeout=END_S)
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
        _, alive = psutil.wait_procs(family, timeout=END_S)
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
