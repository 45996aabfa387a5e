"""Layouts that vLLM cannot run are refused before launch, with the reason and the numbers."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from penstock import Fleet
from penstock.engine import layouts
from penstock.engine.command import server_command
from penstock.engine.layouts import ModelShape, check, read_shape
from penstock.errors import ConfigError
from penstock.plugin import compat
from penstock.settings import EngineConfig

DENSE = {"num_hidden_layers": 2, "num_attention_heads": 12}
MOE = {**DENSE, "num_experts": 4}


def config(tp: int = 1, pp: int = 1, dp: int = 1, *, ep: bool = False, **more: Any) -> EngineConfig:
    ranks = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    return EngineConfig(model="m", enable_expert_parallel=ep, **ranks, **more)


@pytest.mark.parametrize(
    ("given", "model", "reason"),
    [
        (config(pp=2), DENSE, "with more than one stage vLLM's CPU build dies of the first request"),
        (config(tp=2, ep=True), MOE, "experts would be spread over 2 ranks, and vLLM's CPU build dies"),
        (config(dp=2, ep=True), MOE, "experts would be spread over 2 ranks, and vLLM's CPU build dies"),
        (config(dp=2), {"num_local_experts": 8}, "which the 2 data-parallel replicas would share, and vLLM's CPU"),
        (config(dp=2), {"text_config": {"n_routed_experts": 8}}, "which the 2 data-parallel replicas would share"),
        (config(enable_sleep_mode=True), DENSE, "answers that it sleeps but frees no memory"),
    ],
)
def test_what_only_gpus_run_is_refused_on_the_cpu(given: EngineConfig, model: dict[str, Any], reason: str) -> None:
    shape = ModelShape.of(model)
    check(given, "gpu", shape)
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        check(given, "cpu", shape)
    tp, pp, dp = given.tensor_parallel_size, given.pipeline_parallel_size, given.data_parallel_size
    assert str(caught.value).startswith(f"model m cannot be served with TP {tp}, PP {pp}, DP {dp}")


@pytest.mark.parametrize(
    ("given", "model"), [(config(tp=2), DENSE), (config(dp=2), DENSE), (config(tp=2), MOE), (config(ep=True), MOE)]
)
def test_what_the_cpu_runs(given: EngineConfig, model: dict[str, Any]) -> None:
    check(given, "cpu", ModelShape.of(model))


def test_more_ranks_than_the_machine_has_memory_for_are_refused_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    monkeypatch.setattr(layouts, "machine_bytes", lambda: 24 * 2**30)
    with pytest.raises(
        ConfigError, match=r"DP 1000: its 1000 ranks .* need 250\.0 GiB .* has 24\.0 GiB .* ask for fewer"
    ):
        Fleet.launch(str(tmp_path), profile="cpu", data_parallel_size=1000)
    shape = ModelShape.of(DENSE)
    check(config(dp=96), "cpu", shape)
    check(config(dp=1000), "gpu", shape)  # GPUs are counted where they are given out
    with pytest.raises(ConfigError, match="its 100 ranks"):
        check(config(tp=4, dp=25), "cpu", shape)


def test_every_reason_is_given_at_once() -> None:
    with pytest.raises(ConfigError, match=r"more than one stage.*second model runner.*no experts.*several stages"):
        check(config(pp=4, enable_return_routed_experts=True), "cpu", ModelShape.of(DENSE))


@pytest.mark.parametrize(
    "option",
    ["tensor-parallel-size", "--data_parallel_size", "api_server_count", "enable-sleep-mode", "port", "--middleware"],
)
def test_what_penstock_has_to_know_or_sets_itself_cannot_be_smuggled_in(option: str) -> None:
    with pytest.raises(ConfigError, match=r"extra_args: .* cannot be passed by: "):
        check(config(extra_args={option: 2}), "gpu", None)


def test_a_hub_name_is_checked_as_far_as_no_model_is_needed() -> None:
    assert read_shape("Qwen/Qwen3-0.6B") == ModelShape()
    with pytest.raises(ConfigError, match="with more than one stage"):
        server_command(EngineConfig(model="Qwen/Qwen3-0.6B", profile="cpu", pipeline_parallel_size=2), api_key=None)


def test_a_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON that can be read"):
        server_command(EngineConfig(model=str(tmp_path), profile="gpu"), api_key=None)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold an object, not list"):
        read_shape(str(tmp_path))


def test_the_simulated_engine_is_found_where_its_launcher_says_too() -> None:
    sim = EngineConfig(model="any", profile="sim", extra_args={"port": 1})
    with pytest.raises(ConfigError, match=r"extra_args: 'port' cannot be passed by"):
        server_command(sim, api_key=None)


def test_a_simulated_engine_has_the_vocabulary_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    config = EngineConfig(model=str(tmp_path), profile="sim")
    assert "vocab_size=100" in server_command(config, api_key=None).argv
    other = config.model_copy(update={"extra_args": {"vocab-size": 7}})
    argv = server_command(other, api_key=None).argv
    assert [option for option in argv if option.startswith("vocab_size")] == ["vocab_size=7"]
    argv = server_command(EngineConfig(model="a/b", profile="sim"), api_key=None).argv
    assert not any(option.startswith("vocab_size") for option in argv)


EXPERTS = {"enable_return_routed_experts": True}


@pytest.mark.parametrize(
    ("device", "keys", "shape", "message"),
    [
        ("cpu", {"quantization": "int8"}, MOE, "'int8' cannot be had for a mixture of experts on CPUs"),
        ("cpu", {"quantization": "fp8_per_tensor"}, DENSE, "'fp8_per_tensor' cannot be had on CPUs.*; choose int8$"),
        ("gpu", {"quantization": "fp8", "dtype": "float32"}, DENSE, "cannot be had in float32 on GPUs.* bfloat16"),
        ("gpu", {"quantization": "fp8", "load_format": "dummy"}, DENSE, "'fp8' cannot be had with load_format 'dummy'"),
        ("gpu", {"quantization": "int8"}, {**DENSE, "quantization_config": {}}, "are quantised already; leave the key"),
        (
            "gpu",
            {"enable_lora": True, "dtype": "float32"},
            DENSE,
            "LoRA kernels for GPUs need engine.dtype bfloat16 or",
        ),
        ("cpu", EXPERTS, MOE, "by its second model runner alone, which needs Triton and so a GPU"),
        ("gpu", EXPERTS, DENSE, "enable_return_routed_experts is set, and it has no experts"),
        ("gpu", EXPERTS | {"pipeline_parallel_size": 2}, MOE, "vLLM reports no experts of several stages"),
        ("gpu", EXPERTS | {"enable_prefix_caching": False}, MOE, "with prefix caching alone"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    device: Any, keys: dict[str, Any], shape: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(ConfigError, match=message) as caught:
        server_command(EngineConfig(model=str(tmp_path), profile=device, **keys), api_key=None)
    assert "\n" not in str(caught.value)


def test_experts_are_spread_and_reported_by_the_second_model_runner(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    options = EXPERTS | {"enable_expert_parallel": True, "tensor_parallel_size": 2}
    command = server_command(EngineConfig(model=str(tmp_path), profile="gpu", **options), api_key=None)
    assert {"--enable-return-routed-experts", "--enable-expert-parallel"} <= set(command.argv)
    assert command.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_a_method_of_vllms_and_a_quantised_checkpoint_are_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    own = EngineConfig(model=str(tmp_path), profile="gpu", quantization="fp8_per_tensor")
    assert "--quantization fp8_per_tensor" in " ".join(server_command(own, api_key=None).argv)


def test_vllm_026_reports_experts_by_its_first_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr("sys.argv", ["server", "--enable-return-routed-experts"])
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("runpy.run_module", lambda *_, **__: found.append(os.environ["VLLM_USE_V2_MODEL_RUNNER"]))
    compat.run_server()
    assert found == ["0"]
