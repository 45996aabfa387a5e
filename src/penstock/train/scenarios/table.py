"""The table of scenarios: description, needs, and keys over the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config import RunConfig, apply_override
from penstock.errors import UserError
from penstock.options import validate

MODEL = Path("examples/models/sorter-0.8m")
"""The policy that has half learned to sort, from a checkout."""
STEPS = 40
"""Steps of a training scenario, in which the sorter gains 10 points."""

BASE: Mapping[str, Mapping[str, Any]] = {
    "engine": {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 256},
    "fleet": {"engines": 2},
    "environment": {
        "name": "reasoning_gym",
        "options": {
            "dataset": "number_sorting", "compact": True, "min_numbers": 3, "max_numbers": 5, "min_value": 0,
            "max_value": 99, "min_decimals": 0, "max_decimals": 0,
        },
    },
    "rollout": {"groups_per_batch": 64, "group_size": 8, "max_tokens": 24},
    "train": {
        "steps": STEPS, "learning_rate": 2e-4, "max_staleness": 1, "micro_batch_tokens": 2048, "dtype": "float32",
        "checkpoint_every": 20,
    },
    "eval": {"size": 512},
}  # fmt: skip
"""Configuration of every scenario, which is the demo's."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario.

    Attributes:
        name: name on the command line.
        what: description of one line.
        keys: keys over `BASE`, by section.
        gpus: GPUs of the plan's shape; 0: vLLM's CPU build can run it.
        on_gpu: keys over `keys` for engines on GPUs.
        fewer: further keys for machines with this many GPUs, or more but fewer than the next entry.
        kind: `train`, or the name of a check in `fleets.py`.
        missing: part of Penstock that the scenario needs and that does not exist yet.
        gains: whether the sorter's accuracy must rise by `GAIN`.
    """

    name: str
    what: str
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, "Mapping[str, Any]"])
    on_gpu: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, "Mapping[str, Any]"])
    gpus: int = 0
    fewer: Mapping[int, Mapping[str, Mapping[str, Any]]] = field(default_factory=lambda: SHARED)
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


SHARED = {
    1: {"fleet": {"engines": 1}, "engine": {"gpu_memory_utilization": 0.4}},
    2: {"fleet": {"engines": 1}},
}
"""Smaller shapes by number of GPUs: on one, engine and learner share it; on two, each has its own."""
APART = {2: SHARED[2]}
"""Smaller shape for schedules whose learner needs its own GPU."""
WHOLE = 3
"""GPUs for the base's two engines and a learner."""
SIM = {"vocab-size": 100, "eos-token-id": 2, "eos-share": 0.1, "tokens-per-second": 5000.0}
"""Options of the simulated engine, which reads no model."""
SLEEPING = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.5}
LORA = {"enable_lora": True, "max_lora_rank": 16}
LORA_ON_GPU = {
    "dtype": "bfloat16", "extra_args": {"lora-target-modules": (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )},
}  # fmt: skip
"""vLLM's LoRA kernels for GPUs do not take float32. Its warm-up fails on adapters of embeddings if the vocabulary is
smaller than the hidden size; no scenario trains embeddings."""

SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "colocated-tp1", "4 engines of TP1 and an FSDP2 learner of 4 ranks take turns on 4 GPUs",
            {"train": {"schedule": "colocated", "ranks": 4}, "fleet": {"engines": 4}, "engine": SLEEPING}, gpus=4,
            fewer={count: {"train": {"ranks": count}, "fleet": {"engines": count}} for count in (1, 2)},
        ),
        Scenario("non-colocated", "learner and engines apart, in turns", {"train": {"schedule": "sync"}}, fewer=APART),
        Scenario(
            "remote-server", "a vLLM server that another process started, attached by its address",
            {"fleet": {"engines": 0}}, kind="remote_server",
            fewer={1: {"engine": SHARED[1]["engine"]}, 2: {}},
        ),
        Scenario(
            "one-step-off", "batch N + 1 is generated while the learner trains on batch N",
            {"train": {"schedule": "one_step_off"}}, fewer=APART,
        ),
        Scenario("async", "weights change in flight, at most one version of staleness"),
        Scenario(
            "multi-turn", "two turns, tokens in and tokens out",
            {
                "environment": {"name": "penstock.train.scenarios.twice:SortTwice", "options": {}},
                "rollout": {"groups_per_batch": 32, "max_tokens": 20, "max_turns": 2, "max_episode_tokens": 64},
                "train": {"steps": 20},
            },
            gains=False,
        ),
        Scenario(
            "http-generator", "OpenAI's completions over HTTP give the tokens of the token interface", kind="http"
        ),
        Scenario(
            "colocated-tp2", "2 engines of TP2 and a learner of 4 ranks take turns on 4 GPUs",
            {
                "train": {"schedule": "colocated", "ranks": 4}, "fleet": {"engines": 2},
                "engine": {**SLEEPING, "tensor_parallel_size": 2},
            },
            gpus=4, fewer={2: {"train": {"ranks": 2}, "fleet": {"engines": 1}}},
        ),
        Scenario(
            "megatron", "a Megatron learner of TP2 x PP2 beside engines", gpus=5, fewer={},
            missing="a Megatron learner",
        ),
        Scenario(
            "moe", "an engine of experts in parallel; the learner replays the experts that it chose",
            {
                "engine": {
                    "tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_return_routed_experts": True,
                },
                "fleet": {"engines": 1},
            },
            gpus=3, gains=False,
            fewer={
                1: {"engine": {**SLEEPING, "tensor_parallel_size": 1}, "train": {"schedule": "colocated"}},
                2: {"engine": SLEEPING, "train": {"schedule": "colocated"}},
            },
            # a small Qwen3-MoE of random weights stands in for a model, unless --model
        ),
        Scenario(
            "lora", "an adapter is trained and served beside the base", {"train": {"lora": {"rank": 16},
            "learning_rate": 2e-3}, "engine": LORA},
            on_gpu={"engine": LORA_ON_GPU},
        ),
        Scenario(
            "quantised", "int8 engines under a learner in floats, corrected",
            {"engine": {"quantization": "int8"}, "train": {"correction": "tis"}},
            on_gpu={"engine": {"dtype": "bfloat16"}},
            # engine.quantization=fp8 is the other kind; GPUs compute it in bfloat16
        ),
        Scenario("pause-keep", "a pause keeps requests in flight, and they go on", kind="pause_keep"),
        Scenario(
            "native-sync", "vLLM's own weight transfer over NCCL to a server without Penstock's plugin",
            {"fleet": {"engines": 1}}, gpus=2, fewer={}, kind="native",
        ),
        Scenario(
            "cuda-ipc", "weights by CUDA IPC to an engine on the learner's GPU",
            {
                "fleet": {"engines": 1, "weight_transport": "cuda_ipc"},
                "engine": {"gpu_memory_utilization": 0.4},
            },
            gpus=1, fewer={},
        ),
        Scenario(
            "gsm8k", "GSM8K's own files and reward",
            {
                "environment": {"name": "penstock.rollout.gsm8k:GSM8K", "options": {}},
                "engine": {"max_model_len": 512},
                "rollout": {"groups_per_batch": 4, "group_size": 2, "max_tokens": 64},
                "train": {"steps": 2},
                "eval": {"size": 8},
            },
            gains=False,
            # the sorter stands in for a model that can solve it, and a generated data set for GSM8K unless --data
        ),
    )
}  # fmt: skip
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
        raise UserError(f"scenario {scenario.name} needs {needs(scenario)}, and this machine has {gpus}{advice}")
    return gpus


def needs(scenario: Scenario) -> str:
    """Return the hardware that a scenario needs, in words."""
    least, most = scenario.least_gpus, scenario.gpus
    if not most:
        return "a CPU, or an NVIDIA GPU" if least == 1 else f"a CPU, or {least} NVIDIA GPUs"
    return f"{least}-{most} NVIDIA GPUs" if least < most else f"{most} NVIDIA GPU{'s' if most > 1 else ''}"
