"""The table of scenarios: description, needs, and keys over the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from penstock.config import RunConfig, apply_override, read_override, read_yaml
from penstock.errors import UserError
from penstock.options import validate

MODEL = Path("examples/models/sorter-0.8m")
"""The policy that has half learned to sort, from a checkout."""
WHOLE = 3
"""GPUs for the base's two engines and a learner."""
_TABLE: Mapping[str, Any] = cast("Any", read_yaml(Path(__file__).with_name("scenarios.yaml").read_text()))
BASE: Mapping[str, Mapping[str, Any]] = _TABLE["base"]
"""Configuration of every scenario, which is the demo's."""
SIM: Mapping[str, Any] = _TABLE["sim"]
"""Options of the simulated engine, which reads no model."""
_INSTEAD = {
    "name": "the scenario's NAME",
    "run_dir": "--run-dir",
    "engine.model": "--model",
    "engine.profile": "--cpu, --sim or neither",
    "train.schedule": "the scenario of that schedule",
}
"""Keys that `Scenario.config` sets from its arguments or its name, and what a user gives instead."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario. `scenarios.yaml` explains the fields."""

    name: str
    what: str
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, "Mapping[str, Any]"])
    on_gpu: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, "Mapping[str, Any]"])
    gpus: int = 0
    fewer: Mapping[int, Mapping[str, Mapping[str, Any]]] = field(default_factory=lambda: _TABLE["shared"])
    kind: str = "train"
    missing: str = ""
    gains: bool = True

    @property
    def least_gpus(self) -> int:
        """Fewest GPUs on which a smaller shape runs, if the engines use GPUs."""
        return min(self.fewer, default=self.gpus)

    def config(
        self, *, profile: str, run_dir: Path, model: Path = MODEL, overrides: Sequence[str] = (), gpus: int = 0
    ) -> RunConfig:
        """Return the configuration, in a smaller shape for too few `gpus` (0: the plan's).

        Raises:
            UserError: no such model, or a wrong override.
        """
        if not model.is_dir():
            raise UserError(f"no model in {model}: run from a checkout of Penstock, or give --model FOLDER")
        if self.name == "moe" and model == MODEL:
            model = random_experts(run_dir / "moe-stand-in")
        tree: dict[str, Any] = {"name": self.name, "run_dir": run_dir}
        layers = [BASE, self.keys, *([self.on_gpu] if profile == "gpu" else []), self._fewer(gpus)]
        for section in BASE:
            tree[section] = deepcopy({k: v for layer in layers for k, v in layer.get(section, {}).items()})
        tree["engine"] |= {"model": str(model), "profile": profile}
        if profile != "gpu":
            tree["train"]["threads"] = 1
        if profile == "sim":
            tree["engine"]["extra_args"] = dict(SIM)
        for override in overrides:
            if instead := _INSTEAD.get(read_override(override)[0]):
                raise UserError(f"{override}: a scenario depends on it; give {instead} instead")
            apply_override(tree, override)
        return validate(RunConfig, tree)

    def _fewer(self, gpus: int) -> Mapping[str, Mapping[str, Any]]:
        """Return the keys of the smaller shape for `gpus` GPUs; empty for the plan's shape."""
        fitting = [count for count in self.fewer if count <= gpus]
        enough = not gpus or gpus >= (self.gpus or WHOLE)
        return {} if enough or not fitting else self.fewer[max(fitting)]

    def smaller_shape(self, config: RunConfig) -> str:
        """Return what a configuration has less of than the plan, such as "1 of 4 engines"; empty if nothing."""
        planned = {**BASE["fleet"], **self.keys.get("fleet", {})}["engines"]
        tensor = self.keys.get("engine", {}).get("tensor_parallel_size", 1)
        said = [
            f"{config.fleet.engines} of {planned} engines" if config.fleet.engines < planned else "",
            f"TP{config.engine.tensor_parallel_size} of TP{tensor}"
            if config.engine.tensor_parallel_size < tensor
            else "",
            "colocated" if config.train.schedule == "colocated" != self.keys.get("train", {}).get("schedule") else "",
        ]
        return ", ".join(filter(None, said))


SCENARIOS: Mapping[str, Scenario] = {name: Scenario(name, **given) for name, given in _TABLE["scenarios"].items()}
"""Scenarios by name, in the order of the plan."""


def random_experts(folder: Path) -> Path:
    """Write a small Qwen3-MoE of random weights with the sorter's tokenizer. Return the folder."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed  # noqa: PLC0415 - seconds

    config = Qwen3MoeConfig(
        vocab_size=100, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_experts=4, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, eos_token_id=2,
    )  # fmt: skip
    set_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)  # pyright: ignore[reportUnknownMemberType]
    return folder


def scenario_named(name: str) -> Scenario:
    """Return the scenario of that name. UserError: there is none."""
    if name not in SCENARIOS:
        raise UserError(f"there is no scenario {name!r}; known: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def check_machine(scenario: Scenario, profile: str) -> int:
    """Refuse a scenario that this machine or Penstock cannot run. Return the GPUs, 0 for engines on CPUs.

    Raises:
        UserError: something is missing; the message names it in one line.
    """
    if scenario.missing:
        raise UserError(
            f"scenario {scenario.name} needs {scenario.missing}, which is not there yet (and {needs(scenario)})"
        )
    if scenario.gpus and profile != "gpu":
        raise UserError(f"scenario {scenario.name} needs {needs(scenario)}: vLLM's CPU build cannot run it")
    if profile != "gpu":
        return 0
    import torch  # noqa: PLC0415 - takes seconds

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < scenario.least_gpus:
        advice = "" if scenario.gpus else "; give --cpu"
        has = f"this machine has {gpus} GPU{'s' * (gpus != 1)}"
        raise UserError(f"scenario {scenario.name} needs {needs(scenario)}; {has}{advice}")
    return gpus


def needs(scenario: Scenario) -> str:
    """Return the hardware that a scenario needs, in words."""
    least, most = scenario.least_gpus, scenario.gpus
    if not most:
        return "a CPU, or an NVIDIA GPU" if least == 1 else f"a CPU, or {least} NVIDIA GPUs"
    return f"{least}-{most} NVIDIA GPUs" if least < most else f"{most} NVIDIA GPU{'s' if most > 1 else ''}"
