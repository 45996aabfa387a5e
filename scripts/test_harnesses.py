"""Play an episode with each harness of `examples/agents`, and hold its rows against what the engine saw.

Each harness has an environment of its own in a cache folder (PENSTOCK_HARNESSES, default ~/.cache/penstock/harnesses),
because their packages exclude each other. The engine is scripted: it thinks, calls a tool with odd white space in the
arguments, and then answers. Each harness must give one row without a break: all sampled tokens trained, each logprob
that of exactly the context before it. What a harness asks beside the conversation, such as a title, is a row as well.

    python scripts/test_harnesses.py                  those of the Python index
    python scripts/test_harnesses.py codex claude_code     of the npm registry: 640 MB
    python scripts/test_harnesses.py --real                      all of the Python index

With `--real` there are two vLLM engines on the CPU with a model of noise. Its first turn is forced to call `add`, as
`tool_choice: required` does it, where the harness has that tool. Weights change in the middle of a turn, and an engine
is killed in a later one. A row is replayed: a token's logprob is that of the model of its version, under a grammar at
least that.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from chat_model import chat_tokenizer  # noqa: E402
from gateway_rig import THOUGHT, Rig, logprob  # noqa: E402
from penstock.errors import PenstockError  # noqa: E402
from penstock.gateway.agent import AgentGenerator  # noqa: E402
from penstock.gateway.app import serving  # noqa: E402
from penstock.gateway.graph import Limits  # noqa: E402
from penstock.rollout.environment import Environment, Task  # noqa: E402
from penstock.rollout.generator import GeneratorInput, Trajectory  # noqa: E402

CACHE = Path(os.environ.get("PENSTOCK_HARNESSES") or Path.home() / ".cache" / "penstock" / "harnesses")
CONTEXT = 131_072
"""Tokens; the model's are characters, and some harnesses write long prompts."""
NEAR = 1e-4
TIMEOUT_S = float(os.environ.get("PENSTOCK_HARNESS_S", "300"))
INSTALL_S = 1200
EPISODES = 3
"""Of each harness with `--real`."""
MIDDLE_S = 0.2
EXAMPLES = ROOT / "examples" / "agents"


def call(name: str, arguments: str) -> str:
    """What the model writes to call a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ADD = call("add", '{"a":  1,"b":\n2}')
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@dataclass(frozen=True)
class Harness:
    """A harness: its packages, its forms, and what the engine says, call first."""

    packages: tuple[str, ...]
    forms: tuple[str, ...] = ("",)
    says: tuple[str, ...] = (ADD, "3")
    npm: str = ""
    """Its program, if it is one of the npm registry."""


HARNESSES = {
    "openai_agents": Harness(("openai-agents==0.24.0",), ("", "chat")),
    "pydantic_ai": Harness(("pydantic-ai-slim[openai]==2.68.0",), ("", "chat")),
    "langgraph": Harness(("langgraph==1.2.22", "langchain-openai==1.7.3"), ("", "stream")),
    "smolagents": Harness(("smolagents[openai]==1.26.0",), says=(ADD, call("final_answer", '{"answer":  "3"}'))),
    "mini_swe_agent": Harness(
        ("mini-swe-agent==2.4.6", "mcp"),  # its litellm imports mcp and does not name it
        says=(call("bash", '{"command":  "echo 3"}'), call("bash", f'{{"command":\n"{DONE}\\necho 3"}}')),
    ),
    "anthropic_sdk": Harness(("anthropic==2.12.0",)),
    "codex": Harness(("@openai/codex@0.169.0",), says=(call("exec_command", '{"cmd":  "echo 3"}'), "3"), npm="codex"),
    "claude_code": Harness(
        ("@anthropic-ai/claude-code@2.1.197",), says=(call("Bash", '{"command":  "echo 3"}'), "3"), npm="claude"
    ),
}


class Sum(Environment):
    """One task; the reward is 1 for its answer."""

    def train_task(self, index: int) -> Task:
        """The task."""
        return Task(f"t{index}", "What is 1 + 2?")

    def heldout_tasks(self, n: int) -> list[Task]:
        """The same."""
        return [self.train_task(i) for i in range(n)]

    def reward(self, task: Task, response_text: str) -> float:
        """1 for an answer; some give it in a call."""
        del task
        return float(response_text in {"3", ""})


def command_of(name: str, harness: Harness) -> list[str]:
    """Build the harness's environment, if it is not there, and return the words that run its example."""
    folder = CACHE / name
    python, ready, wanted = folder / "bin" / "python", folder / ".ready", " ".join(harness.packages)
    if not ready.exists() or ready.read_text() != wanted:
        if harness.npm:
            installs = [["npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), *harness.packages]]
        else:
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *harness.packages]
            installs = [[sys.executable, "-m", "venv", "--clear", str(folder)], pip]
        for words in installs:
            subprocess.run(words, check=True, timeout=INSTALL_S)
        ready.write_text(wanted)
    if not harness.npm:
        return [str(python), str(EXAMPLES / f"with_{name}.py")]
    path = f"PATH={folder / 'node_modules' / '.bin'}:{os.environ['PATH']}"
    return ["env", path, "sh", str(EXAMPLES / f"with_{name}.sh")]


async def play(harness: Harness, command: list[str], folder: Path) -> list[str]:
    """Play one episode; return what is wrong."""
    tokenizer = chat_tokenizer(folder / "tokenizer")
    rig = Rig(tokenizer, max_model_len=1_000_000)
    rig.engine.texts = [f"{THOUGHT}{said}" for said in harness.says]
    async with serving(rig.gateway) as base:
        made = AgentGenerator(
            rig.gateway, base, rig.tenant, Sum(), command, timeout_s=TIMEOUT_S, log_dir=folder, limits=None
        )
        try:
            output = await made.generate(GeneratorInput([Sum().train_task(0)]))
        except PenstockError as error:
            return [f"{error}; its output: {said_in(folder)}"]
    if (rewards := [t.reward for t in output.trajectories]) != [1.0]:
        return [f"{len(rewards)} rows with rewards {rewards}; its output: {said_in(folder)}"]
    (row,) = output.trajectories
    wrong: list[str] = []
    ids, start = [*row.prompt_ids, *row.response_ids], len(row.prompt_ids)
    trained = [i for i, mask in enumerate(row.loss_mask) if mask]
    if len(trained) != sum(map(len, rig.engine.made)):
        wrong.append(f"{len(trained)} tokens train of {sum(map(len, rig.engine.made))} sampled")
    wrong += [
        f"token {i} has another context's logprob" for i in trained if row.logprobs[i] != logprob(ids[: start + i + 1])
    ]
    text = tokenizer.decode(row.response_ids, skip_special_tokens=False)
    if harness.says[0] not in text or text.count("let me see") != len(rig.engine.made):
        wrong.append("the sampled call or thinking is not in the row as it was sampled")
    return wrong


def said_in(folder: Path) -> str:
    """The end of the commands' output."""
    return "".join(log.read_text()[-1500:] for log in folder.glob("*.log"))


class Watched:
    """A fleet that says when turns are under way."""

    def __init__(self, fleet: Any) -> None:
        self.fleet = fleet
        self.asked = asyncio.Event()

    async def sample(self, ids: Any, n: int, params: Any, session_id: Any = None) -> Any:
        """Sample, once those who wait for a turn know of it."""
        self.asked.set()
        return await self.fleet.sample(ids, n, params, session_id)

    async def next_turn(self) -> None:
        """Wait for a turn that begins now, and into the middle of it."""
        self.asked.clear()
        await asyncio.wait_for(self.asked.wait(), TIMEOUT_S)
        await asyncio.sleep(MIDDLE_S)


def forcing(submit: Any) -> Any:
    """Let the first turn of a session call `add`, which a model of noise would not do by itself."""

    def forced(session: Any, request: Any, digest: bytes, **given: Any) -> Any:
        if not session.nodes and any(tool.name == "add" for tool in request.tools):
            request = replace(request, forced=("add",), single_call=True)
        return submit(session, request, digest, **given)

    return forced


async def play_real(harnesses: dict[str, list[str]], folder: Path) -> dict[str, list[str]]:
    """Play harnesses on two vLLM engines; weights change in a turn, and an engine is killed in a later one.

    Returns:
        What is wrong with the rows of each.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - the scripted engine needs none of these

    from chat_model import save_chat_tokenizer  # noqa: PLC0415
    from nano_models import changed, save_dense  # noqa: PLC0415
    from penstock import Fleet  # noqa: PLC0415
    from penstock.config import EngineConfig, FleetConfig  # noqa: PLC0415
    from penstock.gateway.service import Gateway, Tenant  # noqa: PLC0415
    from penstock.gateway.turn import GatewayOptions  # noqa: PLC0415
    from penstock.rollout.chat_template import ChatTemplate  # noqa: PLC0415
    from penstock.rollout.tokenizer import load_tokenizer  # noqa: PLC0415

    path = save_chat_tokenizer(save_dense(folder))
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": CONTEXT}))
    models = {0: AutoModelForCausalLM.from_pretrained(path, dtype="float32")}
    tenant, options = Tenant("a", "key"), GatewayOptions("m", CONTEXT, max_tokens=400)
    found: dict[str, list[str]] = {}
    engine = EngineConfig(model=str(path), profile="cpu", max_model_len=CONTEXT, kv_cache_memory_bytes=1 << 29)
    async with Fleet.launch(engine, fleet=FleetConfig(engines=2)) as fleet:
        watched = Watched(fleet)
        gateway = Gateway(watched, ChatTemplate(load_tokenizer(path)), options, [tenant])
        gateway.submit = forcing(gateway.submit)

        async def disturb() -> None:
            await watched.next_turn()
            model = changed(models[0], 5)
            models[(await fleet.update_weights(model.named_parameters())).version] = model
            await watched.next_turn()
            os.killpg(fleet._roster.members[0].process.pid, signal.SIGKILL)  # noqa: SLF001

        async def one(name: str, command: list[str]) -> None:
            at_once = EPISODES if len(harnesses) > 1 else 1  # so that turns begin after the update, too
            made = AgentGenerator(
                *(gateway, base, tenant, Sum(), command),
                concurrency=at_once,
                timeout_s=TIMEOUT_S,
                log_dir=folder,
                limits=Limits(max_turns=4),
            )
            try:
                output = await made.generate(GeneratorInput([Sum().train_task(0)], num_samples=EPISODES))
                found[name] = replayed(models, output.trajectories)
                if HARNESSES[name].says[0] == ADD and not any(any(row.constrained) for row in output.trajectories):
                    found[name].append("no call was forced")
            except PenstockError as error:
                found[name] = [f"{error}; its output: {said_in(folder)}"]

        async with serving(gateway) as base, asyncio.TaskGroup() as group:
            disturbing = group.create_task(disturb())
            playing = [group.create_task(one(name, command)) for name, command in harnesses.items()]
            await asyncio.wait(playing)
            disturbing.cancel()
    if disturbing.cancelled():
        found["the engines"] = ["all episodes were over before weights had changed and an engine was killed"]
    return found


def replayed(models: dict[int, Any], rows: Sequence[Trajectory]) -> list[str]:
    """Hold the logprobs of rows against those of the model of each token's version; return what is wrong."""
    from nano_models import logprobs_of  # noqa: PLC0415

    wrong: list[str] = []
    for row in rows:
        free = {v: logprobs_of(models[v], row.prompt_ids, row.response_ids) for v in set(row.versions)}
        for i in (i for i, mask in enumerate(row.loss_mask) if mask):
            expected = free[row.versions[i]][i]
            more = row.logprobs[i] - expected
            under_grammar = bool(row.constrained) and row.constrained[i]
            if more < -NEAR or (more > NEAR and not under_grammar):
                wrong.append(f"token {i} has logprob {row.logprobs[i]:.5f}, and the model says {expected:.5f}")
    versions = sorted({version for row in rows for version in row.versions})
    forced = sum(any(row.constrained) for row in rows)
    print(f"{len(rows)} rows of versions {versions}, {forced} with forced calls", flush=True)
    return wrong


async def real(names: list[str]) -> int:
    """Play the first form of the harnesses named on vLLM; return the number that failed."""
    names = names or [name for name, harness in HARNESSES.items() if not harness.npm]
    commands = {name: await asyncio.to_thread(command_of, name, HARNESSES[name]) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        found = await play_real(commands, Path(folder))
    for name, wrong in found.items():
        print(f"{name} on vLLM: {'; '.join(wrong[:4]) or 'exact rows through an update and a death'}", flush=True)
    return sum(map(bool, found.values()))


def environments_of_verifiers() -> int:
    """Run the tests of `environment.name: verifiers:ID` beside the real package; return the number that failed."""
    tests = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "psutil")
    made = Harness(("verifiers==0.4.0", f"{ROOT}[gateway]", *tests))
    python, _ = command_of("verifiers", made)
    words = [python, "-m", "pytest", "-q", str(ROOT / "tests" / "rollout" / "test_verifiers.py")]
    failed = subprocess.run(words, check=False, cwd=ROOT, timeout=INSTALL_S).returncode != 0
    print(f"verifiers: {'its tests failed' if failed else 'its environments are played, exact rows'}", flush=True)
    return int(failed)


async def main(names: list[str]) -> int:
    """Play all forms of the harnesses named; return the number that failed."""
    failed = await asyncio.to_thread(environments_of_verifiers) if names in ([], ["verifiers"]) else 0
    for name in names or [name for name, harness in HARNESSES.items() if not harness.npm]:
        if name == "verifiers":
            continue
        command = await asyncio.to_thread(command_of, name, HARNESSES[name])
        for form in HARNESSES[name].forms:
            with tempfile.TemporaryDirectory() as folder:
                wrong = await play(HARNESSES[name], [*command, *([form] if form else [])], Path(folder))
            print(f"{name} {form}: {'; '.join(wrong) or 'one row, exact'}", flush=True)
            failed += bool(wrong)
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(real(sys.argv[2:]) if sys.argv[1:2] == ["--real"] else main(sys.argv[1:])))
