"""Run one scenario and check it. The result is printed as one row."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.config import RunConfig
from penstock.control_types import UpdateReport
from penstock.engine.command import server_command
from penstock.engine.launch import EngineProcess
from penstock.errors import UserError
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter, Summary, package_versions
from penstock.train.run import run
from penstock.train.scenarios.fleets import LOGPROB_BARS, Check, http_generator, native_sync, pause_keep
from penstock.train.scenarios.table import Scenario

RESULTS = "scenarios.jsonl"
"""File in the runs' folder, with one row for each scenario that was run."""
MARK = "scenario"
"""File in the folder of a scenario's run. The next scenario may replace such a folder."""
GAIN = 0.10
"""Increase of held-out accuracy that the sorter must reach, a fraction."""
ROUNDED_BARS = {"fp8": 0.03}
ROUNDED_BAR = 0.01
"""Largest mean of |learner - engine logprob| in a step at equal weights, in nats. `ROUNDED_BAR` is for engines that
compute in int8 or bfloat16, `ROUNDED_BARS` for those that round more. docs/scenarios.md has measured values: int8 up to
0.006; weights that are one version old, 0.08 in the second step. A single unlikely token may differ by 2 nats."""
EQUAL_MEAN = "learner/logprob_diff_staleness/0"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a scenario. `shape`: parts that are smaller than planned; empty: none."""

    scenario: str
    profile: str
    checks: Sequence[Check]
    seconds: float
    shape: str = ""

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def row(self) -> str:
        points = ", ".join(f"{'' if check.ok else 'FAILED '}{check.name} {check.figure}" for check in self.checks)
        kind = f"{self.profile}, {self.shape}" if self.shape else self.profile
        return f"{self.scenario} ({kind}): {'ok' if self.ok else 'FAILED'} in {self.seconds:.0f} s: {points}"

    def to_json(self) -> dict[str, Any]:
        """Return the row of scenarios.jsonl, with the versions of packages."""
        return {**asdict(self), "ok": self.ok, "versions": package_versions()}


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


# --- checklists ------------------------------------------------------------------------------------------------------


class UpdateRecorder(Reporter):
    """Keeps the reports of all updates."""

    def __init__(self) -> None:
        self.reports: list[UpdateReport] = []

    def on_update(self, report: UpdateReport) -> None:
        self.reports.append(report)


def training_checks(
    config: RunConfig, summary: Summary, reports: Sequence[UpdateReport], *, engines: int, gains: bool
) -> list[Check]:
    """Check a run: engines, versions, checksums, staleness, experts, logprobs, gain."""
    rows = RunFolder.open(config.run_dir / config.name).metrics()
    made_it = [len(report.engines) for report in reports]
    versions = [report.version for report in reports]
    adapter = config.train.lora is not None and not config.train.lora.merge
    first = 2 if adapter or config.engines_may_differ else 1
    oldest = max(row["staleness_max"] for row in rows)
    checks = [
        Check("engines", made_it == [engines] * config.train.steps, f"{min(made_it, default=0)} of {engines}"),
        Check(
            "versions",
            versions == list(range(first, first + config.train.steps)),
            f"{min(versions, default=0)}-{max(versions, default=0)}",
        ),
        *([] if adapter else [checksum_check(reports)]),  # an adapter's update has no checksums
        Check("staleness", oldest <= config.train.staleness, f"{oldest:.0f} of {config.train.staleness}"),
    ]
    if config.engine.enable_return_routed_experts:
        least = min(row["replayed_share"] for row in rows)
        checks.append(Check("replayed", least > 0, f"{least:.1%} of tokens at least"))
    if config.engine.profile in LOGPROB_BARS:
        checks.append(_logprob_check(config, summary, rows))
    before, after = summary.accuracy_before or 0.0, summary.accuracy_after or 0.0
    if gains and config.engine.profile in LOGPROB_BARS:
        checks.append(Check("accuracy", after - before >= GAIN, f"{before:.1%} to {after:.1%}"))
    return checks


def _logprob_check(config: RunConfig, summary: Summary, rows: Sequence[Mapping[str, float]]) -> Check:
    """Check that learner and engines agree at equal weights. If engines round, the mean counts."""
    gap, bar, kind = summary.logprob_difference, LOGPROB_BARS[config.engine.profile], ""
    if config.engine.quantization or config.engine.dtype != "float32":
        means = [row[EQUAL_MEAN] for row in rows if EQUAL_MEAN in row]
        gap, bar = max(means, default=None), ROUNDED_BARS.get(config.engine.quantization or "", ROUNDED_BAR)
        kind = " on average"
    return Check("logprobs", gap is not None and gap <= bar, "none" if gap is None else f"{gap:.1e}{kind}")


def checksum_check(reports: Sequence[UpdateReport]) -> Check:
    """Check that all engines report equal checksums after each update."""
    said = [{engine.checksum for engine in report.engines} for report in reports]
    equal = sum(len(checksums) == 1 and all(checksums) for checksums in said)
    return Check("checksums", equal == len(reports) > 0, f"{equal} of {len(reports)} equal")
