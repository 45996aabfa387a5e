"""Play an episode with each harness of `examples/agents`, and hold its rows against what the engine saw.

Each harness has an environment of its own in a cache folder (PENSTOCK_HARNESSES, default ~/.cache/penstock/harnesses),
because their packages exclude each other. The engine is scripted: it thinks, calls a tool with odd white space in the
arguments, and then answers. Each harness must give one row without a break: all sampled tokens trained, each logprob
that of exactly the context before it. What a harness asks beside the conversation, such as a title, is a row as well.

    python scripts/test_harnesses.py                  those of the Python index
    python scripts/test_harnesses.py codex claude_code     of the npm registry: 640 MB
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from chat_model import chat_tokenizer  # noqa: E402
from gateway_rig import THOUGHT, Rig, logprob  # noqa: E402
from penstock.errors import PenstockError  # noqa: E402
from penstock.gateway.agent import AgentGenerator  # noqa: E402
from penstock.gateway.server import serving  # noqa: E402
from penstock.rollout.environment import Environment, Task  # noqa: E402
from penstock.rollout.generator import GeneratorInput  # noqa: E402

CACHE = Path(os.environ.get("PENSTOCK_HARNESSES") or Path.home() / ".cache" / "penstock" / "harnesses")
TIMEOUT_S = float(os.environ.get("PENSTOCK_HARNESS_S", "120"))
INSTALL_S = 1200
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
    if output.rewards != [1.0]:
        return [f"{len(output.trajectories)} rows with rewards {output.rewards}; its output: {said_in(folder)}"]
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


async def main(names: list[str]) -> int:
    """Play all forms of the harnesses named; return the number that failed."""
    failed = 0
    for name in names or [name for name, harness in HARNESSES.items() if not harness.npm]:
        command = await asyncio.to_thread(command_of, name, HARNESSES[name])
        for form in HARNESSES[name].forms:
            with tempfile.TemporaryDirectory() as folder:
                wrong = await play(HARNESSES[name], [*command, *([form] if form else [])], Path(folder))
            print(f"{name} {form}: {'; '.join(wrong) or 'one row, exact'}", flush=True)
            failed += bool(wrong)
    return failed


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
