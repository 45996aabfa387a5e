"""Recipes of the cookbook, unmodified, on a real vLLM CPU engine; one outlives the death of the API process."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sdk_rig import MODEL, service_of

from penstock.tinker.service import Service

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("tinker_cookbook") is None,
        reason="needs tinker_cookbook on PYTHONPATH; `make test-tinker` puts it there",
    ),
]

NAME = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows; the service serves our own model under it."""


@pytest.fixture(scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with service_of(tmp_path_factory.mktemp("cookbook"), "cpu", name=NAME) as running:
        yield running


async def recipe(service: Service, folder: Path, module: str, *options: str) -> asyncio.subprocess.Process:
    (folder / NAME).mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, folder / NAME)
    env = {"TINKER_BASE_URL": service.url, "TINKER_API_KEY": "tml-of-a-test", "HF_HUB_OFFLINE": "1"}
    always = (f"model_name={NAME}", "behavior_if_log_dir_exists=delete", f"log_path={folder / 'log'}")
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"tinker_cookbook.recipes.{module}", *options, *always, cwd=folder, env=os.environ | env
    )


def metrics(folder: Path, name: str) -> list[float]:
    file = folder / "log" / "metrics.jsonl"
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row[name] for row in rows if name in row]


async def test_reinforcement_learning_goes_on_after_the_api_process_died(service: Service, tmp_path: Path) -> None:
    running = await recipe(
        service, tmp_path, "math_rl.train", "env=arithmetic", "groups_per_batch=4", "group_size=4", "max_tokens=5",
        "max_steps=4", "loss_fn=importance_sampling",
    )  # fmt: skip
    async with asyncio.timeout(600.0):
        while not metrics(tmp_path, "optim/kl_sample_train_v1"):
            assert running.returncode is None, "it ended before its first step"
            await asyncio.sleep(0.05)
        os.kill(service.api.pid, signal.SIGKILL)
        assert await running.wait() == 0
    for name in ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2"):
        found = metrics(tmp_path, name)
        assert len(found) == 4
        assert max(map(abs, found)) < 1e-4, found


async def test_supervised_learning_lowers_the_loss(service: Service, tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    rows = [
        [{"role": "user", "content": f"<{a} {b}="}, {"role": "assistant", "content": f"{a} {b}"}]
        for a in range(10, 26)
        for b in range(30, 38)
    ]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    running = await recipe(
        service, tmp_path, "chat_sl.train", f"dataset={data}", "batch_size=16", "max_length=256", "lora_rank=8",
        "learning_rate=3e-3", "save_every=4", "eval_every=0",
    )  # fmt: skip
    async with asyncio.timeout(300.0):
        assert await running.wait() == 0
    losses = metrics(tmp_path, "train_mean_nll")
    assert len(losses) == 8
    assert losses[-1] < 0.7 * losses[0], losses
