"""Checklists of scenarios, and the result that is printed as one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.config import RunConfig
from penstock.control_types import UpdateReport
from penstock.observe.run_folder import RunFolder
from penstock.observe.summary import Reporter, Summary, package_versions

GAIN = 0.10
"""Increase of held-out accuracy that the sorter must reach, a fraction."""
LOGPROB_BARS = {"cpu": 1e-4, "gpu": 2e-2}
"""Largest |learner - engine logprob| at equal weights, nats, by the engines' profile. GPUs round fp32 products."""
ROUNDED_BARS = {"fp8": 0.03}
ROUNDED_BAR = 0.01
"""Largest mean of |learner - engine logprob| in a step at equal weights, in nats. `ROUNDED_BAR` is for engines that
compute in int8 or bfloat16, `ROUNDED_BARS` for those that round more. docs/scenarios.md has measured values: int8 up to
0.006; weights that are one version old, 0.08 in the second step. A single unlikely token may differ by 2 nats."""
EQUAL_MEAN = "learner/logprob_diff_staleness/0"


@dataclass(frozen=True, slots=True)
class Check:
    """One point of a checklist: whether it holds, and the figure that shows it."""

    name: str
    ok: bool
    figure: str


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


def length_check(lengths: Mapping[int, int], wanted: int) -> Check:
    """Check that every answer has all its tokens. `lengths` counts answers by their number of tokens."""
    return Check("tokens", set(lengths) == {wanted}, ", ".join(f"{n} answers of {size}" for size, n in lengths.items()))
