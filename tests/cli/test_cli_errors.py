"""A wrong invocation is one clear line on stderr, exit status 2, and nothing was started."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import __version__
from run_cli import environment, forked, penstock, python_without

MODEL = Path(__file__).parents[2] / "examples" / "models" / "sorter-0.8m"
SIM = "engine: {model: any-name, profile: sim}\n"


def one_line(done: subprocess.CompletedProcess[str], status: int = 2) -> str:
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("penstock: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_help_names_every_command_and_is_what_no_command_shows() -> None:
    assert penstock("--version").stdout == f"penstock {__version__}\n"
    done = penstock("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("serve", "gateway", "tinker", "status", "train", "plot", "sim", "fleet", "scenario"):
        assert f" {command} " in done.stdout
    assert penstock().stdout == done.stdout
    for group in ("fleet", "scenario"):
        done = penstock(group)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"Usage: penstock {group}" in done.stdout


@pytest.mark.parametrize("command", ["serve", "gateway", "tinker", "status", "train", "plot", "sim"])
def test_help_of_a_command_teaches_by_examples(command: str, tmp_path: Path) -> None:
    done = forked(command, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "Examples" in done.stdout
    assert f"penstock {command}" in done.stdout.partition("Examples")[2]


def test_help_loads_nothing_heavy() -> None:
    heavy = ("torch", "vllm", "transformers", "matplotlib", "aiohttp", "pydantic", "yaml")
    code = f"import sys, penstock.cli.main; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train"], "Missing argument 'CONFIG'. `penstock train --help` shows how."),
        (["train", "run.yaml", "--resum"], "--resume"),
        (["train", "nowhere.yaml"], "no such config file: nowhere.yaml"),
        (["train", "run.yaml", "train.stepz=3"], "'train.stepz'; did you mean 'steps'?"),
        (["train", "run.yaml", "steps=3"], "'steps'; did you mean 'train.steps'?"),
        (["train", "run.yaml", "--group-size", "4"], "--group-size; as a key it is SECTION.group_size=VALUE"),
        (["train", "empty.yaml"], "empty.yaml is empty; it must hold sections with keys"),
        (["train", "run.yaml", "name=../elsewhere"], "'name': must be a name and no path: letters, digits"),
        (["train", "twice.yaml"], "config line 2: 'engine' is given twice"),
        (["train", "run.yaml", "engine.profile=cpu", "engine.model=./nowhere"], "./nowhere does not exist in /"),
        (["train", "run.yaml", "environment.name=own:Sums"], "'own:Sums' is not a subclass of"),
        (["train", "run.yaml", "--resume", "--fresh"], "give one of them"),
        (["gateway", "http://127.0.0.1:1", "--tokenizer", "."], "set PENSTOCK_GATEWAY_KEY, or give --tenants FILE"),
        (["gateway", "http://127.0.0.1:1", "--tokenizer", ".", "--policy", "both"], "extend or faithful, got 'both'"),
        (
            ["gateway", "http://127.0.0.1:1", "--tokenizer", ".", "--tenants", "broken.yaml"],
            "can be read by other users",
        ),
        (["gateway", "127.0.0.1:1", "--tokenizer", "."], "'127.0.0.1:1' is not an address; give one such as"),
        (["tinker", ".", "--cpu", "--gpu"], "--cpu and --gpu exclude each other"),
        (["plot", "nowhere"], "nowhere holds no run"),
        (["scenario", "run", "nothing"], "there is no scenario 'nothing'; known: colocated-tp1"),
        (["scenario", "run", "async", "--cpu"], "no model in examples/models/sorter-0.8m: run from a checkout"),
        (["status", "nowhere"], "'nowhere' is not an address"),
        (["status", "http://user:pass@127.0.0.1:9"], "a router's address has no user, query or fragment"),
        (["serve", "", "--sim"], "engine.model"),
        (["serve", "m", "n", "--sim"], "penstock: 'n' is not of the form KEY=VALUE"),
        (["serve", "m", "--sim", "max_modellen=3"], "did you mean 'max_model_len'?"),
        (["serve", "m", "--sim", "engine.workers=4"], "'engine.workers'; did you mean 'router.workers'?"),
        (["train", "run.yaml", "engine.hang_timeout_s=9"], "did you mean 'fleet.hang_timeout_s' or 'start_timeout_s'?"),
        (["serve", "m", "--sim", "train.steps=3"], "a server has no section 'train'"),
        (["serve", "m", "--sim", "steps=3"], "unknown config key 'engine.steps'; known here: model, tokenizer"),
        (
            ["serve", "m", "--sim", "--engines", "two"],
            "unable to parse string as an integer, got 'two'",
        ),
        (["serve", "m", "--sim", "--engines", "3", "fleet.engines=2"], "--engines and fleet.engines=2 contradict"),
        (["serve", "m", "--sim", "profile=cpu"], "--sim and profile=cpu contradict each other; give one of them"),
        (["serve", "m", "--sim", "--port", "0", "router.port=9"], "--port and router.port=9 contradict each other"),
        (["serve", "m", "--sim", "model=x"], "MODEL and model=x contradict each other"),
        (["tinker", ".", "--cpu", "engine.profile=gpu"], "--cpu and engine.profile=gpu contradict each other"),
        (["serve", "m", "--attach", "localhost:80"], "http://HOST:PORT, got 'localhost:80'\n"),
        (["serve", "m", 'fleet.attach=[{"url": "http://h:1", "rank": 2}]'], "known here: url, dp"),
        (["serve", "m", "--sim", "--engines", "0"], "engines is 0 and there is nothing to attach"),
        (["serve", "m", "--sim", "--port", "70000"], "--port"),
        (["serve", "m", "--sim", "--host", "0.0.0.0"], "PENSTOCK_API_KEY"),
        (["serve", "m", "--sim", "--host", "192.0.2.1", "--api-key", "k"], "cannot listen on 192.0.2.1"),
        (["serve", "m", "--sim", "router.kind=vllm-router"], "router.url"),
        (["serve", "m", "--sim", "--router", "envoy"], "'penstock' or 'vllm-router'"),
        (["serve", ".", "--cpu"], "has no config.json"),
        (["serve", "run.yaml", "--cpu"], "model path run.yaml is no folder"),
        (["serve", "m", "--sim", "--max-model-len", "512"], "--max-model-len; as a key it is max_model_len=VALUE"),
        (["serve", "no-such-org/no-such-model", "--cpu"], "no model 'no-such-org/no-such-model'"),
        (["sim", "tokens_per_secnd=3"], "did you mean 'tokens_per_second'?"),
        (["sim", "--fault", "explode"], "explode"),
    ],
    ids=" ".join,
)
def test_a_wrong_invocation_is_one_line(args: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SIM)
    (tmp_path / "broken.yaml").write_text("engine: [")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "twice.yaml").write_text("engine: {model: a}\nengine: {model: b}\n")
    (tmp_path / "own.py").write_text("class Sums:\n    pass\n")  # found, as it lies where the command was started
    assert says in one_line(forked(*args, cwd=tmp_path))
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"broken.yaml", "empty.yaml", "own.py", "run.yaml", "twice.yaml"}


@pytest.mark.parametrize("command", [["serve", "m", "--sim"], ["sim"]], ids=["serve", "sim"])
def test_a_port_in_use_is_one_line(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in one_line(penstock(*command, "--port", str(port)))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_control_port_in_use_is_named_as_such(workers: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        keys = [f"router.control_port={taken.getsockname()[1]}", f"router.workers={workers}"]
        said = one_line(forked("serve", "m", "--sim", "--port", "0", *keys, cwd=tmp_path))
    assert "Address already in use; choose another router.control_port, or 0" in said


def test_engines_of_others_need_no_vllm_here(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("engine: {model: ./m, profile: cpu}\n")
    of_others = ("fleet.engines=0", "fleet.attach=[http://127.0.0.1:9]")
    said = one_line(penstock("train", "run.yaml", *of_others, cwd=tmp_path, **python_without(tmp_path, "vllm")))
    assert "environment.options" in said, "what is looked at next"


def test_a_missing_extra_is_one_line(tmp_path: Path) -> None:
    without = python_without(tmp_path, "torch", "vllm", "matplotlib", "ray", "peft")
    (tmp_path / "run.yaml").write_text(SIM)
    said = one_line(penstock("train", "run.yaml", cwd=tmp_path, **without))
    assert "not installed: torch, matplotlib; pip install 'penstock[train]'" in said
    assert "penstock[vllm]" in one_line(penstock("serve", "any/model", "--cpu", **without))
    assert "penstock[train]" in one_line(penstock("plot", str(tmp_path), **without))
    assert "not installed: peft; pip install 'penstock[train]'" in one_line(penstock("tinker", "m", **without))
    assert "penstock[ray]" in one_line(penstock("serve", "m", "--sim", "--launcher", "ray", **without))


def test_nobody_there_is_one_line_and_status_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    said = one_line(penstock("status", f"http://127.0.0.1:{port}"), status=1)
    assert f"nothing answers at http://127.0.0.1:{port}" in said
    done = penstock("gateway", f"http://127.0.0.1:{port}", "--tokenizer", MODEL, PENSTOCK_GATEWAY_KEY="secret")
    last = f"nothing answers at http://127.0.0.1:{port}: start a fleet, such as `penstock serve MODEL`, and give the"
    assert (done.returncode, done.stderr.count(str(port))) == (1, 1)
    assert last in done.stderr


def test_debug_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    done = penstock("train", "nowhere.yaml", cwd=tmp_path, PENSTOCK_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "no such config file" in done.stderr
