"""The examples of TorchRL's documentation of AsyncVLLM and LoadBalancer (0.14, MIT), with the import changed.

Besides the import this is changed, as there is no hub and no GPU here: models have any name, and engines are simulated.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("vllm")

from vllm import RequestOutput

FIRST = """
from penstock import AsyncVLLM
from vllm import SamplingParams

# Simple usage - single GPU, single replica
service = AsyncVLLM.from_pretrained("Qwen/Qwen2.5-3B")

# Advanced usage - multi-GPU tensor parallel with multiple replicas
service = AsyncVLLM.from_pretrained(
    "Qwen/Qwen2.5-7B",
    num_devices=2,  # Use 2 GPUs for tensor parallelism
    num_replicas=2,  # Create 2 replicas for higher throughput
    max_model_len=4096
)

# Generate text
sampling_params = SamplingParams(temperature=0.7, max_tokens=100)
result = service.generate("Hello, world!", sampling_params)
print(result.outputs[0].text)

# Alternative: using AsyncEngineArgs directly for advanced configuration
from vllm import AsyncEngineArgs
engine_args = AsyncEngineArgs(
    model="Qwen/Qwen2.5-3B",
    tensor_parallel_size=2
)
service = AsyncVLLM.launch(engine_args, num_replicas=2)
"""


LOAD_BALANCER = """
from penstock import AsyncVLLM
from penstock.facade.vllm_like import LoadBalancer

service = AsyncVLLM.from_pretrained("Qwen/Qwen2.5-3B", num_replicas=3)

# Simple strategy
lb = LoadBalancer(service, "requests")
actor_idx = lb.select_actor()
chosen.append(actor_idx)

# Strategy hierarchy: try prefix-aware first, fall back to requests, then round-robin
lb = LoadBalancer(service, ["prefix-aware", "requests", "round-robin"])
actor_idx = lb.select_actor(prompt="Hello world")  # Uses prefix routing
actor_idx = lb.select_actor()  # Falls back to requests (no prompt)
chosen.append(actor_idx)

# Custom configuration
lb = LoadBalancer(
    service,
    ["prefix-aware", "kv-cache"],
    prefix_length=16,
    overload_threshold=2.0
)
"""
# `chosen.append` is the test's own: it wants to see what was selected.
EXAMPLES = {"first": FIRST, "class": LOAD_BALANCER}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_simulated_engines(name, capsys):
    code = EXAMPLES[name].replace("launch(engine_args", 'launch(engine_args, profile="sim"')
    code = re.sub(r'(?<!model=)"Qwen/[^"]+"', '"any-name", profile="sim"', code)
    names = {"chosen": []}
    exec(compile(code, "example", "exec"), names)  # noqa: S102 - an example of the documentation
    with names["service"] as service:
        assert service.engine_args.model
        if "result" in names:
            assert isinstance(names["result"], RequestOutput)
            assert names["result"].outputs[0].text
        assert all(index in range(3) for index in names["chosen"])
        assert len(service.get_num_unfinished_requests()) == service.num_replicas

    assert name != "first" or capsys.readouterr().out.strip()
