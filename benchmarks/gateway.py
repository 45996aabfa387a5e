"""The gateway beside verifiers' interception server and tinker-cookbook's capture proxy; interleaved.

python benchmarks/gateway.py [--rounds 5] [--parts peers,sessions,policies,cache]

`peers`: processor time of each gateway's process a turn, 32 sessions of 10 turns at once over chat completions. Ours
and verifiers stand before one simulated engine, the capture proxy before a Tinker service that answers at once. A peer
without its environment is left out (`_gateway_sides.py`). Every answer has 32 tokens.
`sessions`: 1,000 sessions of 10 turns at once, three waves: latency over that of the same requests straight to the
engine, memory after each wave, and the sampled tokens that clients were told of by those in the rows. A session begins
a turn every four seconds. The engine answers in 0.13 s, in steps of 4 ms, and a tool takes the rest. With `--gateways`
several share the sessions, each session at one of them.
`policies`: rows a rollout of 10 questions whose answers think. Five call a tool, with white space that no template
writes, so that `faithful` begins a row there too.
`cache`: prompt tokens that a real vLLM engine found in its cache, by those of vLLM's own chat completions.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _common
import _gateway_cache
import _gateway_sides
import aiohttp
from _gateway_sides import ANSWER_TOKENS, CONTEXT, KEY, MODEL, Side

CPU_BAR, ADDED_BAR_MS, MEMORY_BAR = 0.5, 5.0, 1.1
TURNS = 10
AT_ONCE = 32
MANY = 1_000
WAVES = 3
TURN_TOKENS_S = 250.0
"""Rate of the engine in `sessions`; its steps are short, since a delay shows as whole steps."""
TURN_S = 4.0
"""From the beginning of a session's turn to that of its next one, as an agent with tools has it."""
TIMEOUT_S = 300.0
WORDS = ("engine", "router", "weights", "version", "update", "prompt", "token", "session", "policy", "row")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Call {name} with a path and a text.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    }
    for name in ("read", "write", "run")
]


def question(session: int, turn: int, words: int) -> str:
    """A message of so many words."""
    rng = random.Random(session * 1000 + turn)
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def episode(
    http: aiohttp.ClientSession, side: Side, number: int, turns: int, words: int, turn_s: float = 0.0
) -> tuple[int, list[float]]:
    """Play a session with so many seconds a turn; tokens that its client was told of, and the seconds of each turn."""
    url, key = side.address(number)
    messages: list[Any] = [{"role": "system", "content": question(0, 0, 150)}]
    told, took = 0, list[float]()
    for turn in range(turns):
        messages.append({"role": "user", "content": question(number, turn, words)})
        body = {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": ANSWER_TOKENS, "temperature": 1.0}
        began = time.perf_counter()
        async with http.post(url, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            text = await answer.text()
        took.append(time.perf_counter() - began)
        if answer.status != 200:
            raise _common.Unmeasured(f"{side.name} answered {answer.status}: {text[:300]}")
        given = json.loads(text)
        told += given["usage"]["completion_tokens"]
        messages.append(given["choices"][0]["message"])
        await asyncio.sleep(max(0.0, turn_s - took[-1]))
    return told, took


def client() -> aiohttp.ClientSession:
    """Connections of the load."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), read_bufsize=2**18
    )


# --- processor time beside the peers ---------------------------------------------------------------------------------


async def peers(folder: Path, tokenizer: Path, rounds: int, *, quick: bool) -> list[_common.Row]:
    """Rows of processor time a turn."""
    sessions, turns = (8, 3) if quick else (AT_ONCE, TURNS)
    figures: dict[str, list[float]] = defaultdict(list)
    order = random.Random(0)
    with ExitStack() as stack:
        engine = stack.enter_context(_gateway_sides.engine(tokens_per_second=2000))
        sides = [stack.enter_context(_gateway_sides.penstock(engine, tokenizer))]
        if "PENSTOCK_VERIFIERS_PYTHON" in os.environ:
            sides.append(stack.enter_context(_gateway_sides.verifiers(engine, tokenizer, sessions * (rounds + 1))))
        if "PENSTOCK_COOKBOOK_PATH" in os.environ:
            sides.append(stack.enter_context(_gateway_sides.cookbook(tokenizer, folder)))
        for number in range(-1, rounds):  # the first warms up
            for side in order.sample(sides, len(sides)):
                first = (number + 1) * sessions
                before = side.cpu_s()
                async with client() as http:
                    await asyncio.gather(*(episode(http, side, first + i, turns, 60) for i in range(sessions)))
                if number >= 0:
                    figures[side.name].append((side.cpu_s() - before) / (sessions * turns) * 1e3)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    _common.note(f"processor ms a turn: {medians}")
    ours = medians.pop("penstock")
    return [
        _common.compare(f"processor ms a turn, by {name}", ours, theirs, bar=CPU_BAR, want="at most")
        for name, theirs in medians.items()
    ]


# --- many sessions ---------------------------------------------------------------------------------------------------


async def straight(
    http: aiohttp.ClientSession, url: str, number: int, turns: int, words: int, turn_s: float
) -> list[float]:
    """Seconds of the same turns, in tokens, straight to the engine."""
    rng = random.Random(number)
    ids = [rng.randrange(20, 4000) for _ in range(words)]
    took: list[float] = []
    for _ in range(turns):
        ids += [rng.randrange(20, 4000) for _ in range(words + 10)]
        params = {"max_tokens": ANSWER_TOKENS, "temperature": 1.0, "logprobs": 0, "stop_token_ids": [2]}
        began = time.perf_counter()
        headers = {"X-Penstock-Progress": "0"}
        async with http.post(
            f"{url}/inference/v1/generate", json={"token_ids": ids, "sampling_params": params}, headers=headers
        ) as answer:
            await answer.read()
        took.append(time.perf_counter() - began)
        ids += [rng.randrange(20, 4000) for _ in range(ANSWER_TOKENS)]
        await asyncio.sleep(max(0.0, turn_s - took[-1]))
    return took


async def spread(http: aiohttp.ClientSession, count: int, seconds: float, play: Any) -> list[Any]:
    """Begin so many sessions over the time of a turn, as sessions of a training run are spread."""

    async def later(number: int) -> Any:
        await asyncio.sleep(seconds * number / count)
        return await play(http, number)

    return await asyncio.gather(*(later(number) for number in range(count)))


async def trained(sides: Sequence[Side], numbers: Iterable[int]) -> int:
    """Finish sessions; the number of tokens that their rows train."""
    found = 0
    async with client() as http:
        for number in numbers:
            base = sides[number % len(sides)].address(number)[0].partition("/s/")[0]
            headers = {"Authorization": f"Bearer {KEY}"}
            async with http.post(f"{base}/sessions/n{number}/finish", headers=headers) as answer:
                rows = [json.loads(line) for line in (await answer.text()).splitlines()]
            found += sum(sum(row["loss_mask"]) for row in rows)
    return found


async def sessions(tokenizer: Path, *, quick: bool, waves: int = WAVES, gateways: int = 1) -> list[_common.Row]:
    """Rows of many sessions at once."""
    many, turns, waves = (50, 3, 2) if quick else (MANY, TURNS, waves)
    turn_s = TURN_S
    told = in_rows = 0
    memory: list[float] = []
    times: dict[str, list[float]] = defaultdict(list)
    options = {
        "tokens_per_second": TURN_TOKENS_S,
        "max_num_seqs": many,
        "kv_blocks": 131_072,
        "max_num_batched_tokens": 65_536,
    }
    with ExitStack() as stack:
        engine = stack.enter_context(_gateway_sides.engine(**options))
        sides = [stack.enter_context(_gateway_sides.penstock(engine, tokenizer)) for _ in range(gateways)]
        async with client() as http:
            for wave in range(waves):
                _common.note(f"wave {wave}")

                async def play(http: aiohttp.ClientSession, number: int, wave: int = wave) -> tuple[int, list[float]]:
                    number += wave * many
                    return await episode(http, sides[number % len(sides)], number, turns, 20, turn_s)

                before = sum(side.cpu_s() for side in sides)
                for one, took in await spread(http, many, turn_s, play):
                    told += one
                    times["gateway"] += took
                used = sum(side.cpu_s() for side in sides) - before
                in_rows += await trained(sides, range(wave * many, (wave + 1) * many))
                memory.append(sum(side.resident_mib() for side in sides))
                _common.note(f"{used / many / turns * 1e3:.2f} processor ms a turn, resident {memory[-1]:.0f} MiB")
                _common.note(f"{told} tokens told, {in_rows} in rows")

                async def plain(http: aiohttp.ClientSession, number: int) -> list[float]:
                    return await straight(http, engine, number, turns, 20, turn_s)

                for took in await spread(http, many, turn_s, plain):
                    times["straight"] += took
    p50 = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    p90 = {name: statistics.quantiles(values, n=10)[-1] * 1e3 for name, values in times.items()}
    _common.note(f"ms of a turn: p50 {p50}, p90 {p90}")
    by = "" if gateways == 1 else f", {gateways} gateways"
    return [
        _common.single(
            f"added p50 ms, {many} sessions of {turns} turns{by}", p50["gateway"] - p50["straight"], bar=ADDED_BAR_MS,
            want="at most",
        ),
        _common.compare("resident MiB, last wave by first", memory[-1], memory[0], bar=MEMORY_BAR, want="at most"),
        _common.compare("sampled tokens in rows, by those told to clients", in_rows, told, bar=1.0, want="at least"),
    ]  # fmt: skip


# --- policies --------------------------------------------------------------------------------------------------------


async def policies(folder: Path) -> list[_common.Row]:
    """Rows of each policy for ten questions, with thinking in each answer and a tool in every other."""
    from chat_model import chat_tokenizer  # noqa: PLC0415 - _gateway_sides puts tests on the path
    from gateway_rig import CALL, THOUGHT, Rig  # noqa: PLC0415

    made: list[_common.Row] = []
    for policy in ("extend", "faithful"):
        rig = Rig(chat_tokenizer(folder / "characters"), policy=policy, max_model_len=CONTEXT)
        tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
        messages: list[Any] = []
        for turn in range(TURNS):
            rig.engine.texts = [f"{THOUGHT}calling\n{CALL}"] * (turn % 2) + [f"{THOUGHT}so {turn}"]
            messages.append({"role": "user", "content": f"question {turn}"})
            while rig.engine.texts:
                answer = await rig.post("/v1/chat/completions", {"messages": messages, "tools": [tool]})
                message = answer["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or ()
                messages += [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in calls]
        rows = await rig.rows()
        bar = 1.0 if policy == "extend" else 1.5 * TURNS
        made.append(
            _common.single(f"rows a rollout of {TURNS} questions, {policy}", len(rows), bar=bar, want="at most")
        )
    return made


async def main() -> int:
    """Measure and print."""
    options = _common.parser((__doc__ or "").partition("\n")[0])
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--parts", default="peers,sessions,policies,cache", help="comma-separated")
    options.add_argument("--waves", type=int, default=WAVES, help="of `sessions`; one takes about 90 s")
    options.add_argument("--gateways", type=int, default=1, help="of `sessions`")
    args = options.parse_args()
    parts: list[str] = args.parts.split(",")
    rows: list[_common.Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = _gateway_sides.save_tokenizer(folder / "tokenizer")
        if "peers" in parts:
            rows += await peers(folder, tokenizer, 1 if args.quick else args.rounds, quick=args.quick)
        if "sessions" in parts:
            rows += await sessions(tokenizer, quick=args.quick, waves=args.waves, gateways=args.gateways)
        if "policies" in parts:
            rows += await policies(folder)
        if "cache" in parts:
            rows += await _gateway_cache.rows(folder, quick=args.quick)
    return _common.report("gateway", rows, peers={"verifiers": "0.4.0", "tinker-cookbook": "0.6.1"})


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
