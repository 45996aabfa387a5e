"""Launching an engine: readable failures, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from penstock.engine.launch import EngineProcess, server_command, telling_lines
from penstock.errors import ConfigError, EngineStartError
from penstock.settings import EngineConfig, validate


def test_a_wrong_model_path_starts_nothing(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; give a checkpoint folder"):
        server_command(EngineConfig(model=str(tmp_path / "nowhere"), profile="cpu"), port=1, api_key=None)
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        server_command(EngineConfig(model=str(tmp_path), profile="cpu"), port=1, api_key=None)


def test_options_reach_vllm_and_the_key_stays_off_the_command_line(nano_path):
    config = EngineConfig(
        model=str(nano_path),
        profile="gpu",
        tensor_parallel_size=2,
        enable_lora=True,
        fp32_lm_head=True,
        enable_prefix_caching=False,
        enable_sleep_mode=True,
        extra_args={"max_num_batched_tokens": 4096},
    )
    command = server_command(config, port=1234, api_key="secret")
    line = " ".join(command.argv)
    for option in (
        "--tensor-parallel-size 2",
        "--enable-lora",
        '{"head_dtype":"float32"}',
        "--no-enable-prefix-caching",
        "--max-num-batched-tokens 4096",
        "--enable-sleep-mode",
        "--logprobs-mode processed_logprobs",
        "penstock_shm",
    ):
        assert option in line
    assert "secret" not in line
    assert command.env["VLLM_API_KEY"] == "secret"
    assert server_command(config, port=1234, api_key=None).env["VLLM_API_KEY"] == "", "none is inherited"


def test_fp32_on_gpus_is_fp32_in_attention_too(nano_path, monkeypatch):
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    config = EngineConfig(model=str(nano_path), profile="gpu", dtype="float32")
    assert server_command(config, port=1, api_key=None).env["TRITON_F32_DEFAULT"] == "ieee"
    lower = config.model_copy(update={"dtype": "bfloat16"})
    assert "TRITON_F32_DEFAULT" not in server_command(lower, port=1, api_key=None).env
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert server_command(config, port=1, api_key=None).env["TRITON_F32_DEFAULT"] == "tf32x3", "the user's own"


def test_an_option_of_several_values_has_them_one_by_one(nano_path):
    config = validate(
        EngineConfig, {"model": str(nano_path), "extra_args": {"lora-target-modules": ["q_proj", "o_proj"]}}
    )
    argv = server_command(config.model_copy(update={"profile": "gpu"}), port=1, api_key=None).argv
    at = argv.index("--lora-target-modules")
    assert argv[at + 1 : at + 3] == ("q_proj", "o_proj")


def test_a_server_of_vllms_own_transfer_has_nothing_of_ours(nano_path):
    argv = server_command(EngineConfig(model=str(nano_path)), port=1, api_key=None, native="nccl").argv
    assert argv[argv.index("--weight-transfer-config") + 1] == '{"backend":"nccl"}'
    assert not {"--middleware", "--worker-extension-cls"} & set(argv)


def test_adapters_in_fp32_are_refused_on_gpus(nano_path):
    config = EngineConfig(model=str(nano_path), profile="gpu", enable_lora=True, dtype="float32")
    with pytest.raises(ConfigError, match=r"LoRA kernels for GPUs need engine\.dtype bfloat16 or float16, got float32"):
        server_command(config, port=1, api_key=None)
    server_command(config.model_copy(update={"profile": "cpu"}), port=1, api_key=None)


def test_telling_lines_are_the_errors_not_the_traceback():
    log = """Found ulimit of 20000. This can cause errors like `OSError: [Errno 24] Too many open files`.
(EngineCore pid=1) INFO 11-21 15:08:45 [core.py:1] starting
(EngineCore pid=1) ERROR 11-21 15:09:06 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=1) ERROR 11-21 15:09:06 [core.py:1512]   File "core.py", line 676, in step
(EngineCore pid=1) ERROR 11-21 15:09:06 [core.py:1512] RuntimeError: Unsupported CPU attention configuration
"""
    assert telling_lines(log) == "RuntimeError: Unsupported CPU attention configuration"
    worker = "(VllmWorker-0 pid=9) ERROR 11-21 16:22:02 [multiproc_executor.py:953] ValueError: too little memory"
    assert telling_lines(worker) == "ValueError: too little memory"
    refused = (
        "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, max_model_len is too long"
    )
    assert telling_lines(refused).endswith("\nValue error, max_model_len is too long")


@pytest.mark.vllm
@pytest.mark.slow
async def test_an_engine_that_cannot_start_says_why(nano_path, tmp_path):
    for file in nano_path.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    config = EngineConfig(model=str(tmp_path), profile="cpu", max_model_len=512)
    with pytest.raises(EngineStartError, match="SafetensorError"):
        await EngineProcess.launch(config, name="truncated", log_dir=tmp_path / "logs")


async def test_a_server_that_never_gets_ready_is_ended_at_the_deadline(tmp_path):
    config = EngineConfig(model="sim", profile="sim", start_timeout_s=0.05)
    before = set(psutil.Process().children(recursive=True))  # other tests' shared servers among them
    with pytest.raises(EngineStartError, match="was not ready within"):
        await EngineProcess.launch(config, name="slow", log_dir=tmp_path)
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_a_server_that_cannot_write_its_log_ends_with_the_reason(tmp_path, monkeypatch):
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real(path)[:4], 0, *real(path)[5:])))
    config = EngineConfig(model="sim", profile="sim", start_timeout_s=0.05)
    with pytest.raises(EngineStartError, match=f"the disk is full: {tmp_path}"):
        await EngineProcess.launch(config, name="mute", log_dir=tmp_path)


MARK = "PENSTOCK_TEST"
"""A variable that all processes of one test inherit."""

LAUNCHER = """
import asyncio, sys
from pathlib import Path
from penstock.settings import EngineConfig, validate
from penstock.engine.launch import EngineProcess

async def main():
    config = EngineConfig(model=sys.argv[1], profile="cpu", max_model_len=512)
    engine = await EngineProcess.launch(config, name="orphan", log_dir=Path(sys.argv[2]))
    print(engine.pid, flush=True)
    await engine.wait()

asyncio.run(main())
"""


@pytest.mark.vllm
async def test_sigkill_of_the_launcher_leaves_no_process_no_shared_memory_and_no_socket(nano_path, tmp_path):
    """Invariant 5 on a real engine."""
    before = _named()
    mark = uuid.uuid4().hex
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCHER, str(nano_path), str(tmp_path),
        stdout=asyncio.subprocess.PIPE, env={**os.environ, MARK: mark},
    )  # fmt: skip
    assert launcher.stdout is not None
    group = int(await asyncio.wait_for(launcher.stdout.readline(), 120))
    members = [p for p in psutil.process_iter() if _group(p.pid) == group]
    assert len(members) >= 2, "expected the API server and the engine core"
    launcher.send_signal(signal.SIGKILL)
    await launcher.wait()
    # They end with their launcher by an event, far within 5 s; but a machine that stands still counts for them too.
    deadline = time.monotonic() + 60
    while any(_group(p.pid) == group and p.status() != psutil.STATUS_ZOMBIE for p in members if p.is_running()):
        assert time.monotonic() < deadline, "engine processes outlived their launcher by a minute"
        await asyncio.sleep(0.05)
    while left := _named() - before - _of_others(mark):  # Python's resource tracker cleans up after the dead
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


def _named() -> set[Path]:
    """Shared memory, and what lies directly in /tmp as the sockets of vLLM's processes do by default."""
    return {*Path("/dev/shm").iterdir(), *Path("/tmp").glob("????????-????-*"), *Path("/tmp").glob("penstock-e-*")}  # noqa: S108 - listed, not written


def _of_others(mark: str) -> set[Path]:
    """What living processes without our mark have mapped, or have for a folder: other tests run at the same time."""
    found: set[Path] = set()
    for process in psutil.process_iter(["environ"]):
        env = process.info["environ"] or {}
        if env.get(MARK) == mark:
            continue
        found |= {Path(value) for value in env.values() if value.startswith("/tmp/penstock-e-")}  # noqa: S108
        with suppress(psutil.Error):
            found |= {Path(mapped.path) for mapped in process.memory_maps() if mapped.path.startswith("/dev/shm/")}  # noqa: S108
    return found


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1
