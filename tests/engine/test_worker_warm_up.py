"""What sums weights on a GPU is compiled as an engine starts, beside its steps."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


def on(device: str) -> Any:
    from penstock.plugin.worker import WorkerExtension

    made = WorkerExtension()
    made.__dict__["device"] = torch.device(device)
    return made


def test_the_step_that_comes_does_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.plugin import worker

    compiled, may, ended = list[torch.device](), threading.Event(), threading.Event()

    def compile_(device: torch.device) -> None:
        may.wait(30)
        compiled.append(device)
        ended.set()

    monkeypatch.setattr(worker, "warm_up", compile_)
    on("cpu").penstock_warm_up()
    on("cuda:1").penstock_warm_up()
    assert compiled == []
    may.set()
    assert ended.wait(30)
    assert compiled == [torch.device("cuda:1")]


async def test_an_engine_is_told_once_as_its_launcher_asks_what_it_is() -> None:
    from penstock.plugin.middleware import PenstockMiddleware

    told = list[str]()

    async def collective_rpc(method: str, **_: Any) -> list[Any]:
        told.append(method)
        return [None]

    async def utility(*_: Any) -> int:
        return 0

    async def is_paused() -> bool:
        return False

    kept = {"max_model_len": 8, "logprobs_mode": "raw_logprobs", "enable_sleep_mode": False, "dtype": torch.float32}
    model = SimpleNamespace(get_vocab_size=int, **kept)
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=2)
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=model,
        lora_config=None,
        device_config=SimpleNamespace(device_type="cuda"),
    )
    engine = SimpleNamespace(
        vllm_config=config, collective_rpc=collective_rpc, is_paused=is_paused,
        engine_core=SimpleNamespace(call_utility_async=utility),
        output_processor=SimpleNamespace(process_outputs=None, request_states={}),
    )  # fmt: skip
    middleware = PenstockMiddleware(None)
    middleware._spans.install = lambda _: None
    for _ in range(2):
        await middleware._info([], engine, None)
    assert told == ["penstock_warm_up"]
