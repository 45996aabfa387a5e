"""Launching an engine: readable failures, and nothing left behind."""

from __future__ import annotations

import os

import psutil
import pytest

from penstock.engine.command import server_command
from penstock.engine.launch import EngineProcess, ServerCommand
from penstock.errors import ConfigError, EngineStartError
from penstock.options import validate
from penstock.settings import EngineConfig
from penstock.start_report import telling_lines

NEVER_READY = ServerCommand(("sh", "-c", "sleep 600"), {}, "a server", start_timeout_s=0.05)
"""A simulated engine may be ready while the machine lets the test stand still."""


def test_options_reach_vllm_and_the_key_stays_off_the_command_line(nano_path):
    config = EngineConfig(
        model=str(nano_path), profile="gpu", tensor_parallel_size=2, enable_lora=True, max_loras=4, max_lora_rank=32,
        enable_prefix_caching=False, enable_sleep_mode=True, quantization="fp8", fp32_lm_head=True,
        extra_args={"max_num_batched_tokens": 4096, "hf_overrides": '{"rope_theta": 5}'},
    )  # fmt: skip
    command = server_command(config, api_key="secret")
    line = " ".join(command.argv)
    for option in (
        "--tensor-parallel-size 2", "--enable-lora", "--max-loras 4", "--max-lora-rank 32", "--enable-sleep-mode",
        "--no-enable-prefix-caching", "--max-num-batched-tokens 4096", "--logprobs-mode processed_logprobs",
        "--load-format penstock_quantising",
        '--hf-overrides {"rope_theta":5,"head_dtype":"float32","quantization_config":{',
    ):  # fmt: skip
        assert option in line
    assert "secret" not in line
    assert command.env["VLLM_API_KEY"] == "secret"
    assert server_command(config, api_key=None).env["VLLM_API_KEY"] == "", "none is inherited"
    plain = server_command(EngineConfig(model=str(nano_path), profile="gpu"), api_key=None).argv
    assert not {"--max-loras", "--max-lora-rank", "--enable-sleep-mode", "--hf-overrides"} & set(plain)
    broken = config.model_copy(update={"extra_args": {"hf-overrides": "rope"}})
    with pytest.raises(ConfigError, match="hf-overrides 'rope' is not valid JSON"):
        server_command(broken, api_key=None)


def test_fp32_on_gpus_is_fp32_in_attention_too(nano_path, monkeypatch):
    monkeypatch.delenv("TRITON_F32_DEFAULT", raising=False)
    config = EngineConfig(model=str(nano_path), profile="gpu", dtype="float32")
    assert server_command(config, api_key=None).env["TRITON_F32_DEFAULT"] == "ieee"
    lower = config.model_copy(update={"dtype": "bfloat16"})
    assert "TRITON_F32_DEFAULT" not in server_command(lower, api_key=None).env
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    assert server_command(config, api_key=None).env["TRITON_F32_DEFAULT"] == "tf32x3", "the user's own"


def test_an_option_of_several_values_has_them_one_by_one(nano_path):
    config = validate(
        EngineConfig, {"model": str(nano_path), "extra_args": {"lora-target-modules": ["q_proj", "o_proj"]}}
    )
    argv = server_command(config.model_copy(update={"profile": "gpu"}), api_key=None).argv
    at = argv.index("--lora-target-modules")
    assert argv[at + 1 : at + 3] == ("q_proj", "o_proj")


def test_a_server_of_vllms_own_transfer_has_nothing_of_ours(nano_path):
    argv = server_command(EngineConfig(model=str(nano_path)), api_key=None, native="nccl").argv
    assert argv[argv.index("--weight-transfer-config") + 1] == '{"backend":"nccl"}'
    assert not {"--middleware", "--worker-extension-cls"} & set(argv)


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
        await EngineProcess.launch(server_command(config), name="truncated", log_dir=tmp_path / "logs")


async def test_a_server_that_never_gets_ready_is_ended_at_the_deadline(tmp_path):
    before = set(psutil.Process().children(recursive=True))  # other tests' shared servers among them
    with pytest.raises(EngineStartError, match="was not ready within"):
        await EngineProcess.launch(NEVER_READY, name="slow", log_dir=tmp_path)
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_a_server_that_cannot_write_its_log_ends_with_the_reason(tmp_path, monkeypatch):
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real(path)[:4], 0, *real(path)[5:])))
    with pytest.raises(EngineStartError, match=f"the disk is full: {tmp_path}"):
        await EngineProcess.launch(NEVER_READY, name="mute", log_dir=tmp_path)
