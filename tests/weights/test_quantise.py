"""Matrices in int8 and fp8 are those of compressed-tensors, and what an update cannot bring is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engine.layouts import quantization_config
from penstock.errors import WeightsError
from penstock.plugin.quantised import Scheme, find_schemes, quantised

INT8 = quantization_config("int8", on_cpu=False)
ENTRIES = [
    ("model.embed_tokens.weight", "bfloat16", (9, 4)),
    ("model.layers.0.self_attn.q_proj.weight", "bfloat16", (8, 4)),
    ("model.layers.0.self_attn.q_proj.bias", "bfloat16", (8,)),
    ("lm_head.weight", "bfloat16", (9, 4)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "number"), [("int", torch.int8), ("float", torch.float8_e4m3fn)])
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_numbers_are_those_of_compressed_tensors(
    dtype: torch.dtype, kind: str, number: torch.dtype, strategy: Any
) -> None:
    library = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(48, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] = 0
    values, scale = Scheme(number, strategy).quantise(weight)
    args = library.QuantizationArgs(num_bits=8, type=kind, strategy=strategy, symmetric=True)
    exact = weight.float()
    dims = (1,) if strategy == "channel" else (0, 1)
    least, most = exact.amin(dims, keepdim=True), exact.amax(dims, keepdim=True)
    known, zero = calculate_qparams(least, most, args)
    used = weight.any(dim=1)  # of rows of zeros each has its own smallest scale
    rows = used if strategy == "channel" else slice(None)
    assert torch.equal(scale.reshape(known.shape)[rows], known[rows])
    again = quantize(exact, known, zero, args, dtype=number)
    assert torch.equal(values[used].float(), again[used].float())
    assert not values[3].float().any()


def test_blocks_have_a_scale_each_and_edges_are_whole() -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    values, scale = Scheme(torch.float8_e4m3fn, "block", "weight_scale_inv", (2, 4)).quantise(weight)
    assert (values.shape, scale.shape) == (weight.shape, (3, 2))
    spread = scale.repeat_interleave(2, 0)[:5].repeat_interleave(4, 1)[:, :7]
    assert torch.allclose(values.float() * spread, weight, rtol=0.07, atol=1e-6)
    assert scale[2, 1] == weight[4:, 4:].abs().max() / 448


def test_matrices_of_layers_are_quantised_and_the_rest_is_left() -> None:
    schemes = find_schemes(INT8, ENTRIES)
    assert list(schemes) == ["model.layers.0.self_attn.q_proj.weight"]
    given = {name: torch.ones(shape) for name, _, shape in ENTRIES}
    found = dict(quantised(schemes, given.items()))
    assert found.keys() - given.keys() == {"model.layers.0.self_attn.q_proj.weight_scale"}
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    assert found["lm_head.weight"] is given["lm_head.weight"]


@pytest.mark.parametrize(
    ("config", "more", "message"),
    [
        ({"quant_method": "awq"}, (), "cannot be quantised by 'awq'"),
        ({"quant_method": "fp8"}, (), "cannot be quantised by 'fp8'"),
        (INT8, [("model.layers.0.self_attn.q_proj.input_scale", "float32", (1,))], r"such as '.*q_proj\.input_scale'"),
        (INT8, [("model.layers.0.mlp.up_proj.weight_packed", "int32", (1, 1))], "updates need int8 or fp8 matrices"),
    ],
)
def test_what_an_update_cannot_bring_is_refused(config: Any, more: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        find_schemes(config, [*ENTRIES, *more])


def test_four_bits_are_refused() -> None:
    config = quantization_config("int8", on_cpu=False)
    config["config_groups"]["group_0"]["weights"]["num_bits"] = 4
    with pytest.raises(WeightsError, match="to 4 bits of int by 'channel'"):
        find_schemes(config, ENTRIES)
