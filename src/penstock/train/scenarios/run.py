"""Run one scenario and check it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from penstock.config import RunConfig
from penstock.engine.command import server_command
from penstock.engine.launch import EngineProcess
from penstock.errors import UserError
from penstock.train.run import run
from penstock.train.scenarios.checks import Check, Result, UpdateRecorder, training_checks
from penstock.train.scenarios.fleets import http_generator, native_sync, pause_keep
from penstock.train.scenarios.table import Scenario

RESULTS = "scenarios.jsonl"
"""File in the runs' folder, with one row for each scenario that was run."""
MARK = "scenario"
"""File in the folder of a scenario's run. The next scenario may replace such a folder."""


async def run_scenario(scenario: Scenario, config: RunConfig, *, data: Path | None = None) -> Result:
    """Run a scenario and check it. The result is appended to `RESULTS` in `config.run_dir`.

    `data` is a folder of GSM8K's form for `gsm8k`; None: a generated stand-in.

    Raises:
        PenstockError: the scenario did not run to its end.
    """
    began = time.monotonic()
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {config.run_dir}: {error}; give another --run-dir") from error
    if scenario.name == "gsm8k":
        options = {"instruction": "", **config.environment.options}
        if data is not None or "path" not in options:
            options["path"] = str(data or stand_in(config.run_dir / "gsm8k-stand-in"))
        config = config.model_copy(update={"environment": config.environment.model_copy(update={"options": options})})
    checks = await KINDS[scenario.kind](scenario, config)
    result = Result(
        scenario.name, config.engine.profile, checks, time.monotonic() - began, scenario.smaller_shape(config)
    )
    with (config.run_dir / RESULTS).open("a") as out:
        out.write(json.dumps(result.to_json()) + "\n")
    return result


async def _train(scenario: Scenario, config: RunConfig) -> list[Check]:
    recorder, path = UpdateRecorder(), config.run_dir / config.name
    if path.exists() and not (path / MARK).exists():
        raise UserError(
            f"{path} would be replaced, and no scenario made it, or a kill ended it; remove it, or give another "
            "--run-dir"
        )
    try:
        summary = await run(config, resume=False, fresh=True, reporter=recorder)
    finally:
        if path.exists():
            (path / MARK).touch()
    engines = config.fleet.engines + len(config.fleet.attach)
    checks = training_checks(config, summary, recorder.reports, engines=engines, gains=scenario.gains)
    if scenario.name == "async":
        older = sum(tokens for age, tokens in summary.staleness.items() if age) / sum(summary.staleness.values())
        busy = f"{summary.updates_in_flight} of {summary.updates} updates in flight"
        checks.append(Check("ahead", older > 0, f"{older:.0%} of tokens of an older version, {busy}"))
    return checks


async def _remote_server(scenario: Scenario, config: RunConfig) -> list[Check]:
    log_dir = config.run_dir / "remote-server-logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    server = await EngineProcess.launch(server_command(config.engine), name="remote", log_dir=log_dir)
    try:
        tree = config.model_dump()
        tree["fleet"]["attach"] = [{"url": server.url}]
        checks = await _train(scenario, RunConfig.model_validate(tree))
        ended = asyncio.create_task(server.wait())
        await asyncio.sleep(0)
        checks.append(Check("server", not ended.done(), "ended with the run" if ended.done() else "lives on"))
    finally:
        await server.stop(10.0)
    return checks


KINDS: Mapping[str, Callable[[Scenario, RunConfig], Awaitable[list[Check]]]] = {
    "train": _train,
    "remote_server": _remote_server,
    "pause_keep": lambda _, config: pause_keep(config),
    "native": lambda _, config: native_sync(config),
    "http": lambda _, config: http_generator(config),
}


def stand_in(folder: Path) -> Path:
    """Write a small data set in GSM8K's form, made of sums in words. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = random.Random(0).sample([(one, other) for one in range(2, 30) for other in range(2, 30)], 80)
    for split, its in (("train", sums[:64]), ("test", sums[64:])):
        tasks = [(f"Ann has {a} nuts and finds {b} more. How many?", f"{a}+{b}={a + b}\n#### {a + b}") for a, b in its]
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in tasks]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder
