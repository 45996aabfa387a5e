"""A real vLLM server without our middleware and worker extension in a fleet, once with two data-parallel ranks.

New weights reach it by vLLM's own calls. VLLM brings no transfer backend that runs on a CPU, so it is started with
ours, which any vLLM beside an installed Penstock knows.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from hold import Hold
from nano_models import History, changed
from penstock import Fleet, SamplingParams
from penstock.control_types import PauseMode
from penstock.errors import MissingCapabilityError
from penstock.fleet.member import State
from penstock.weights.shared_memory import SharedMemoryStore
from plain_server import plain_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

LONG = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)
PROMPTS = [[5 + i, 6, 7] for i in range(12)]


def plain_vllm(model: Path, log: Path, ranks: int, hold: Hold) -> AbstractAsyncContextManager[str]:
    """The address of plain vLLM, started as docs/how-to/other-servers.md says (but for what its CPU build needs)."""
    env = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if ranks > 1 else "0",
    }  # fmt: skip
    options = {
        "model": model, "max-model-len": 512, "dtype": "float32", "block-size": 32,
        "kv-cache-memory-bytes": 64 << 20, "data-parallel-size": ranks, "logprobs-mode": "processed_logprobs",
        "weight-transfer-config": '{"backend": "tests_shm"}', **hold.extra_args,
    }  # fmt: skip
    return plain_server(options, ["--enable-scale-out", "--enforce-eager", "--no-enable-chunked-prefill"], env, log)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_plain_vllm_serves_in_a_fleet_and_takes_weights_in_flight(
    nano_path: Path, history: History, hold: Hold, tmp_path: Path, ranks: int
) -> None:
    store, timeouts = SharedMemoryStore(), {"control_timeout_s": 60.0, "request_timeout_s": 200.0}
    async with (
        plain_vllm(nano_path, tmp_path / "log", ranks, hold) as url,
        Fleet.connect([url], **timeouts) as fleet,
    ):
        assert fleet.dp_size == ranks
        with pytest.raises(MissingCapabilityError, match="sleep: engine e0 lacks sleep mode; start it with"):
            await fleet.sleep()
        with pytest.raises(MissingCapabilityError, match="update_weights: engine e0 lacks Penstock's plugin"):
            await fleet.update_weights(history.latest.named_parameters())
        await fleet.init_weight_update_communicator({})
        asked = [(prompt, 1) for prompt in PROMPTS] + [([40, 41], 3)]
        with hold.at(20):
            tasks = [asyncio.create_task(fleet.sample(prompt, n, LONG)) for prompt, n in asked]
            for version, mode in ((1, PauseMode.ABORT), (2, PauseMode.KEEP)):
                await hold.reached(15)
                await fleet.pause_generation(mode)
                model = changed(history.latest, version)
                manifest = store.publish(version, model.named_parameters())
                await fleet.update_named_weights({"manifest": manifest.to_json()}, version=version)
                store.commit(manifest)
                history.models[version] = model
                hold.move(60)
                await fleet.resume_generation()
        for (prompt, _), task in zip(asked, tasks, strict=True):
            for sample in await task:
                assert len(sample.token_ids) == 200
                assert [span.version for span in sample.spans] == [0, 1, 2]
                assert history.worst_difference(prompt, sample) < 1e-4
        assert fleet.counters.continued >= 1
        assert fleet.counters.wasted_tokens == 0
        engines = (await fleet.router_admin.engines()).engines
        places = [("e0", None)] if ranks == 1 else [(f"e0.dp{rank}", rank) for rank in range(ranks)]
        assert [(e.name, e.dp_rank) for e in engines] == places
        assert {e.weight_version for e in engines} == {2}
        assert all(e.requests > 0 and e.kv_capacity > 0 for e in engines)
        assert {status.state for status in await fleet.engines()} == {State.SERVING}
        chat = await fleet.completion({"prompt": [5, 6], "max_tokens": 4, "ignore_eos": True})
        assert chat["choices"][0]["weight_versions"] is None
    store.close()
