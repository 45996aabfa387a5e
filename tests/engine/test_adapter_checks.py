"""What an engine refuses of an adapter before it loads it: vLLM compares nothing with the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.errors import WeightsError
from penstock.plugin.adapters import check_adapter

MODULE = "model.layers.0.self_attn.q_proj"
SPEC: Any = SimpleNamespace(shapes={f"{MODULE}.weight": (6, 4)})
A, B = f"base_model.model.{MODULE}.lora_A.weight", f"base_model.model.{MODULE}.lora_B.weight"


def saved(folder: Path, rank: int = 2, *left_out: str) -> Path:
    tensors = {A: torch.ones(rank, 4), B: torch.ones(6, rank)}
    save_file(
        {name: tensor for name, tensor in tensors.items() if name not in left_out}, folder / "adapter_model.safetensors"
    )
    return folder / "adapter_model.safetensors"


@pytest.mark.parametrize("by", ["file", "path"])
def test_a_rank_that_the_configuration_does_not_name_is_refused(tmp_path: Path, by: str) -> None:
    """Otherwise it would be served with the factor alpha / r of another rank."""

    def source(config: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        return {"path": str(tmp_path)} if by == "path" else {"file": str(saved(tmp_path)), "config": config}

    saved(tmp_path)
    check_adapter(source({"r": 2}), SPEC)
    check_adapter(source({"r": 16, "rank_pattern": {"q_proj": 2}}), SPEC)
    with pytest.raises(WeightsError, match=r"lora_A.weight' has shape \(2, 4\), and its configuration says r=16"):
        check_adapter(source({"r": 16}), SPEC)


@pytest.mark.parametrize("left_out", [A, B])
def test_half_of_a_matrix_is_refused(tmp_path: Path, left_out: str) -> None:
    with pytest.raises(WeightsError, match=f"has one of lora_A and lora_B for '{MODULE}', and not both"):
        check_adapter({"file": str(saved(tmp_path, 2, left_out)), "config": {"r": 2}}, SPEC)
