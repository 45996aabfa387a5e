"""Every layout that the GPUs at hand allow, in one fleet: an update in flight, and all answer as the model itself does.

Run it with `TRITON_F32_DEFAULT=ieee` (fp32 attention without TF32, so that 1e-4 means something). Further options for
the engines come by `PENSTOCK_TEST_ENGINE`, as in `tests/conftest.py`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from http_engine import HTTPEngine
from nano_models import History, changed, save_biased, save_dense, save_moe, save_routed
from penstock import Fleet
from penstock.engine.command import server_command
from penstock.engine.launch import EngineProcess
from penstock.settings import EngineConfig
from penstock.types import SamplingParams
from penstock.weights.checkpoint_names import checkpoint_tensors
from sim_fleets import samples_of, stepped

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(540),
]

GREEDY = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, detokenize=False)
LONG = replace(GREEDY, max_tokens=400)
Layout = tuple[int, int, int, bool]
"""TP, PP, DP ranks and whether experts are spread."""
DENSE: list[Layout] = [
    (1, 1, 1, False), (2, 1, 1, False), (1, 2, 1, False), (1, 1, 2, False), (4, 1, 1, False), (2, 2, 1, False),
]  # fmt: skip
MOE: list[Layout] = [
    (1, 1, 1, False), (2, 1, 1, False), (2, 1, 1, True), (1, 1, 2, False), (1, 1, 2, True), (1, 2, 1, False),
]  # fmt: skip
FEW: list[Layout] = [(1, 1, 1, False), (2, 1, 1, False)]
KINDS = {
    "dense": (save_dense, DENSE), "moe": (save_moe, MOE), "biased": (save_biased, FEW), "routed": (save_routed, FEW),
}  # fmt: skip


def engine_config(model: Path, layout: Layout) -> EngineConfig:
    """Small enough that all layouts share the GPUs; they start at the same time, so memory is not measured."""
    tp, pp, dp, spread = layout
    given = json.loads(os.environ.get("PENSTOCK_TEST_ENGINE", '{"extra_args": {"attention-backend": "TRITON_ATTN"}}'))
    options = {
        "model": str(model), "profile": "gpu", "dtype": "float32", "max_model_len": 512, "enforce_eager": True,
        "kv_cache_memory_bytes": 256 * 2**20,
    }  # fmt: skip
    ranks = {
        "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp,
        "enable_expert_parallel": spread, "gpu_memory_utilization": 0.05,
    }  # fmt: skip
    return EngineConfig(**{**options, **given, **ranks})


async def launch_all(model: Path, layouts: list[Layout], logs: Path, owned: AsyncExitStack) -> dict[str, EngineProcess]:
    """The layouts that the GPUs allow, by name; those that do not start fail the test, each with its reason."""
    gpus = torch.cuda.device_count()
    possible = {_name(layout): layout for layout in layouts if layout[0] * layout[1] * layout[2] <= gpus}
    started = await asyncio.gather(
        *(
            EngineProcess.launch(server_command(engine_config(model, layout)), name=name, log_dir=logs)
            for name, layout in possible.items()
        ),
        return_exceptions=True,
    )
    processes = dict(zip(possible, started, strict=True))
    for process in started:
        if isinstance(process, EngineProcess):
            owned.push_async_callback(process.stop)
    failed = {name: str(error) for name, error in processes.items() if isinstance(error, BaseException)}
    assert not failed, failed
    return {name: process for name, process in processes.items() if isinstance(process, EngineProcess)}


def _name(layout: Layout) -> str:
    tp, pp, dp, spread = layout
    return f"tp{tp}pp{pp}dp{dp}{'ep' if spread else ''}"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_update_in_flight_reaches_every_rank_of_every_layout(kind: str, tmp_path: Path) -> None:
    if kind in {"moe", "routed"} and importlib.util.find_spec("vllm._moe_C_stable_libtorch") is None:
        pytest.skip("this vLLM was installed without its kernels for experts")
    save, layouts = KINDS[kind]
    path = save(tmp_path / kind)
    history = History.of(path)
    model = changed(history.latest, 1, scale=0.1 if kind in {"moe", "routed"} else 0.02)
    async with AsyncExitStack() as owned:
        processes = await launch_all(path, layouts, tmp_path, owned)
        fleet = await owned.enter_async_context(Fleet.connect([process.url for process in processes.values()]))
        prompts = [[5, 6, 7 + i] for i in range(8 * len(processes))]
        running = asyncio.create_task(fleet.generate(prompt_token_ids=prompts, sampling_params=LONG))
        await stepped(fleet, 8)
        report = await fleet.update_weights(checkpoint_tensors(model).items())
        history.models[report.version] = model
        assert report.failures == {}
        for name, update in zip(processes, report.engines, strict=True):
            _check_ranks(name, kind, update.checksum.split("-"))
        out = await running
        assert any(len(spans) > 1 for spans in out.response_spans), "the update missed every request"
        worst: dict[str, float] = {"in flight": 0.0}
        for prompt, sample in zip(prompts, samples_of(out), strict=True):
            worst["in flight"] = max(worst["in flight"], history.worst_difference(prompt, sample))
        for name, process in processes.items():
            worst[name] = await _worst_of(process.url, history, prompts[:8])
        assert max(worst.values()) < 1e-4, worst
        logs = {name: (tmp_path / f"{name}.log").read_text() for name in processes}
        assert [name for name, log in logs.items() if "are copied to their places" not in log] == [], "slow updates"
        assert [name for name, log in logs.items() if "layerwise reload" in log] == [], "some ranks are slow"


def _check_ranks(name: str, kind: str, checksums: list[str]) -> None:
    tp, pp, dp = (int(name[place]) for place in (2, 5, 8))
    assert len(checksums) == tp * pp * dp, f"{name}: a checksum for each rank"
    if kind == "dense":  # experts are spread over replicas
        assert len(set(checksums)) == tp * pp, f"{name}: shards differ, replicas do not: {checksums}"


async def _worst_of(url: str, history: History, prompts: list[list[int]]) -> float:
    async with HTTPEngine.connected(url) as engine:
        answers = await asyncio.gather(*(engine.sample(prompt, 1, GREEDY) for prompt in prompts))
    assert all(sample.versions() == (1,) * 60 for (sample,) in answers)
    return max(history.worst_difference(prompt, sample) for prompt, (sample,) in zip(prompts, answers, strict=True))
