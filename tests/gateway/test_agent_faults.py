"""An agent's fault is its episode's alone, and nothing that it started outlives the episode."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway_rig import Rig, auth
from patience import WAIT_S
from penstock.aio import cancelled
from penstock.errors import ConfigError, PenstockError
from penstock.gateway import agent as agent_room
from penstock.gateway.agent import AgentGenerator, Episode
from penstock.gateway.app import serving
from penstock.rollout.environment import Environment, Task
from penstock.rollout.generator import GeneratorInput, GeneratorOutput
from penstock.rollout.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
TURN = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers))
"""


class Scored(Environment):
    def __init__(self, prompts: Sequence[str] = ("say 0", "say 1")) -> None:
        self.prompts = prompts

    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", self.prompts[index], {"n": index})

    def heldout_tasks(self, n: int) -> list[Task]:
        raise NotImplementedError

    def reward(self, task: Task, response_text: str) -> float:
        del task
        return float(response_text == "42")


@pytest.fixture
async def play(tokenizer: Tokenizer) -> AsyncIterator[Callable[..., Awaitable[GeneratorOutput]]]:
    """Plays an episode of each task."""
    rig = Rig(tokenizer)
    async with serving(rig.gateway) as base:

        async def played(agent: Any, environment: Environment | None = None, n: int = 2, **options: Any) -> Any:
            given = environment or Scored()
            made = AgentGenerator(rig.gateway, base, rig.tenant, given, agent, **options)
            return await made.generate(GeneratorInput([given.train_task(i) for i in range(n)]))

        played.rig = rig  # type: ignore[attr-defined]
        yield played


def asking(rig: Rig, then: Callable[[Episode], Awaitable[Any]]) -> Callable[[Episode], Awaitable[Any]]:
    """An agent that takes a turn, and ends as `then` does."""

    async def agent(episode: Episode) -> Any:
        await rig.post(CHAT, {"messages": [{"role": "user", "content": "x"}]}, **auth(episode.api_key))
        return await then(episode)

    return agent


async def not_a_number(episode: Episode) -> float:
    return float("nan") if episode.task.id == "t0" else 1.0


async def exits(episode: Episode) -> float:
    if episode.task.id == "t0":
        raise SystemExit(3)
    return 1.0


async def breaks(episode: Episode) -> float:
    if episode.task.id == "t0":
        raise KeyError("a bug")
    return 1.0


async def cancels(episode: Episode) -> float:
    if episode.task.id == "t0":
        raise asyncio.CancelledError
    return 1.0


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (not_a_number, "the agent's reward of task 't0' must be a finite number, got nan"),
        (exits, "the agent exited with 3"),
        (breaks, "the agent failed: KeyError: 'a bug'"),
        (cancels, "it was cancelled"),
    ],
)
async def test_a_callables_fault_is_its_episodes_alone_and_is_logged(
    fault: Callable[[Episode], Awaitable[Any]], why: str, play: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        output = await play(asking(play.rig, fault))
    assert [t.reward for t in output.trajectories] == [0.0, 1.0]
    assert f"the agent of task 't0' failed after 1 turns: {why}" in caplog.text


@pytest.mark.parametrize(("prompt", "why"), [("a\0b", "null byte"), ("a\ud800b", "surrogates not allowed")])
async def test_a_prompt_that_no_program_can_be_given_is_its_episodes_fault(
    prompt: str, why: str, play: Any, caplog: pytest.LogCaptureFixture
) -> None:
    command = [sys.executable, "-c", TURN + "ask('x')", "{prompt}"]
    output = await play(command, Scored([prompt, "fine"]))
    assert [t.group_id for t in output.trajectories] == ["t1"]
    assert "the agent of task 't0' asked for no turn: " in caplog.text
    assert why in caplog.text


async def test_places_are_filled_inside_words_and_a_shells_own_are_left(play: Any, tmp_path: Path) -> None:
    words = ["--task={prompt}", "{model}/{base_url}", "${prompt}", '{"a": {b}}']
    prompt = "say {model}"
    await play(
        [sys.executable, "-c", "import sys; print(sys.argv[1:])" + TURN + "ask('x')", *words],
        Scored([prompt]),
        n=1,
        log_dir=tmp_path,
    )
    (log,) = tmp_path.iterdir()
    task, url, *others = ast.literal_eval(log.read_text().splitlines()[0])
    assert task == "--task=say {model}"
    assert url.startswith("m/http://127.0.0.1:")
    assert others == ["${prompt}", '{"a": {b}}']


@pytest.mark.parametrize(("word", "why"), [("--key={api_key}", "OPENAI_API_KEY"), ("{promt}", "known: {prompt}")])
async def test_a_key_on_a_command_line_and_unknown_places_are_refused(word: str, why: str, play: Any) -> None:
    with pytest.raises(ConfigError, match=why):
        await play(["agent", word])


async def test_a_harness_that_still_asks_at_the_end_of_its_episode_harms_no_other(play: Any) -> None:
    rig: Rig = play.rig
    late: list[asyncio.Task[int]] = []

    async def sample(*args: Any) -> Any:
        if len(rig.engine.seen) < 2:
            return await rig.engine.sample(*args)
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # an engine's abort takes its time
            raise

    rig.gateway._sample = sample

    async def ask(episode: Episode, i: int) -> int:
        await asyncio.sleep(0.01 * i)
        body = {"messages": [{"role": "user", "content": f"late {i}"}]}
        return (await rig.http.post(CHAT, json=body, headers=auth(episode.api_key))).status_code

    async def leaves_behind(episode: Episode) -> float:
        await until(lambda: len(rig.engine.seen) == 2)  # so that no late request comes before the other's turn
        late.extend(asyncio.create_task(ask(episode, i)) for i in range(8))
        await asyncio.sleep(0.02)
        return 1.0

    output = await play(asking(rig, leaves_behind))
    assert [t.reward for t in output.trajectories] == [1.0, 1.0]
    assert set(await asyncio.gather(*late)) <= {401, 404, 503}
    assert rig.gateway.sessions(rig.tenant) == []


async def test_a_callable_that_swallows_its_end_does_not_hold_up_the_others(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_room, "STOP_S", 0.2)
    over = asyncio.Event()

    async def swallows(episode: Episode) -> float:
        while episode.task.id != "t1" and not over.is_set():
            try:
                await over.wait()
            except asyncio.CancelledError:
                if episode.task.id == "t2":
                    break
        return 1.0

    async with asyncio.timeout(60):
        output = await play(asking(play.rig, swallows), Scored(["x"] * 3), n=3, timeout_s=6.0)
    over.set()
    assert [t.reward for t in output.trajectories] == [0.0, 1.0, 0.0]


def test_an_agent_gets_no_hidden_answer() -> None:
    task = Task("t", "x", {"answer": "hidden"})
    assert "hidden" not in str(Episode(task, "http://127.0.0.1:1", "key", "m", "s").environment())


async def test_a_command_that_is_ended_can_end_what_it_started(play: Any, tmp_path: Path) -> None:
    """SIGKILL came at once after SIGTERM."""
    program = """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # so that none is lost before the wait
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
time.sleep(1)
print("cleaned", flush=True)
"""
    playing = asyncio.create_task(play([sys.executable, "-c", program], n=1, log_dir=tmp_path))
    await until(lambda: any("ready" in log.read_text() for log in tmp_path.glob("*.log")))
    await cancelled(playing)
    assert "cleaned" in next(tmp_path.iterdir()).read_text()


DETACHED = """
import signal, subprocess, sys, time
sleep = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}], start_new_session=True)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True).wait()
subprocess.Popen(["sleep", "600"], start_new_session=True)
"""
"""Both in sessions of their own; the parent of the first has ended."""


def with_variable(name: str) -> list[psutil.Process]:
    """Processes of an episode, by their environment."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MARK") == name:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("end", ["by itself", "ended"])
async def test_what_a_command_detaches_ends_with_its_episode(
    end: str, play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", str(tmp_path))
    program = TURN + DETACHED + "ask('x')" + ("" if end == "by itself" else "; time.sleep(600)")
    playing = asyncio.create_task(play([sys.executable, "-c", program], n=1, log_dir=tmp_path))
    if end == "ended":
        await until(lambda: len(with_variable(str(tmp_path))) == 4)  # the wrapper, the command and both
        await cancelled(playing)
    else:
        await playing
    assert with_variable(str(tmp_path)) == []


async def test_what_a_late_command_detaches_ends_although_its_run_is_ended_meanwhile(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", str(tmp_path))
    late, stop = asyncio.Event(), agent_room.ChildProcess.stop

    async def stopped(child: Any, timeout_s: float) -> None:
        late.set()
        await stop(child, timeout_s)

    monkeypatch.setattr(agent_room.ChildProcess, "stop", stopped)
    command = [sys.executable, "-c", DETACHED + "time.sleep(600)"]
    playing = asyncio.create_task(play(command, n=1, log_dir=tmp_path, timeout_s=2.0))
    await late.wait()
    await cancelled(playing)
    assert with_variable(str(tmp_path)) == []


async def test_a_sigterm_just_before_a_wait_ends_a_command_that_ignores_it() -> None:
    """The signal arrives in one call of C with the wait, so that no handler of Python runs in between."""
    program = """
import ctypes, functools, operator, os, signal, sys, types
from penstock.gateway import agent_process
def signalled(wait):
    def first(*given):
        agent_process.os.read, agent_process.os.waitpid = os.read, os.waitpid
        sigterm = functools.partial(getattr(ctypes.CDLL(None), "raise"), signal.SIGTERM)
        return list(map(operator.call, [sigterm, functools.partial(wait, *given)]))[1]
    return first
agent_process.os = types.SimpleNamespace(**{**vars(os), "read": signalled(os.read), "waitpid": signalled(os.waitpid)})
agent_process.GRACE_S = 1
sys.exit(agent_process.main())
"""
    words = [sys.executable, "-c", program, "sh", "-c", "trap '' TERM; exec sleep 600"]
    process = await asyncio.create_subprocess_exec(*words, start_new_session=True)
    try:
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 128 + signal.SIGKILL
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def test_what_a_command_detaches_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    launcher = f"""
import asyncio, sys
from pathlib import Path
from penstock.process import ChildProcess
async def main():
    command = [sys.executable, "-c", {"import os; os.setsid()" + DETACHED + "time.sleep(600)"!r}]
    words = [sys.executable, "-m", "penstock.gateway.agent_process", *command]
    await (await ChildProcess.start(words, name="agent", log=Path({str(tmp_path / "log")!r}))).wait()
asyncio.run(main())
"""
    environment = {**os.environ, "MARK": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", launcher, env=environment)
    await until(lambda: len(with_variable(str(tmp_path))) == 5)
    process.kill()
    await process.wait()
    await until(lambda: with_variable(str(tmp_path)) == [])


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not reached():  # noqa: ASYNC110 - processes send no event
            await asyncio.sleep(0.05)


async def test_an_agents_words_are_the_end_of_its_output_alone(play: Any, tmp_path: Path) -> None:
    program = "print('begin'); print('x' * 5000); raise SystemExit('the reason')"
    with pytest.raises(PenstockError, match=r"(?s)status 1; .*the reason") as caught:
        await play([sys.executable, "-c", program], n=1, log_dir=tmp_path)
    assert "begin" not in str(caught.value)
    assert len(str(caught.value)) < 2500
