"""Router replay: a mixture of experts trains with its engine's (arXiv 2510.11370).

Engine and learner round differently. Near a tie, their routers choose different experts, and logprobs jump. The learner
uses the engine's choice of experts but computes their weights itself, so that the router still learns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError

UNKNOWN = -1
"""Expert of a token without a report from the engine. The learner's own router chooses."""
_NORMALISED = {"Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter"}
_ALWAYS_NORMALISED = {"MixtralTopKRouter"}
"""Router classes with a softmax over experts. The first kind normalises the chosen if `norm_topk_prob`."""


class RouterReplay:
    """Replays experts in one model. Layers without experts are skipped."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._layers = len(layers)
        self._experts_L_N_K: Tensor | None = None
        self._others: set[str] = set()
        self._top_k: int | None = None
        self._experts = 0
        for index, layer in enumerate(layers):
            for module in layer.modules():
                kind = type(module).__name__
                if kind in _NORMALISED | _ALWAYS_NORMALISED:
                    router: Any = module
                    self._top_k, self._experts = int(router.top_k), int(router.weight.shape[0])
                    normalised = kind in _ALWAYS_NORMALISED or bool(router.norm_topk_prob)
                    module.register_forward_hook(self._hook(index, normalised=normalised))
                elif kind.endswith("Router"):
                    self._others.add(kind)

    def begin(self, experts_L_N_K: Tensor | None) -> None:
        """Replay these experts from now on, also when a backward pass recomputes layers; None: replay nothing.

        They are ids, `[tokens, layers, experts a token]`; `UNKNOWN` where the engine reported none.
        """
        self._experts_L_N_K = experts_L_N_K

    def check(self, experts_L_N_K: Tensor) -> None:
        """Raise ConfigError if the model cannot replay experts, or lacks these."""
        if self._others or self._top_k is None:
            has = f"has the routers {', '.join(sorted(self._others))}" if self._others else "has no experts"
            known = ", ".join(sorted(_NORMALISED | _ALWAYS_NORMALISED))
            raise ConfigError(f"experts cannot be replayed: the learner's model {has}; known routers are {known}")
        wanted, shape = (self._layers, self._top_k), tuple(experts_L_N_K.shape)
        if shape[1:] != wanted:
            raise ConfigError(
                f"the engine's experts are {shape[1:]} (layers, experts a token), and the learner's model has "
                f"{wanted}: they are not of one model"
            )
        if (most := int(experts_L_N_K.max())) >= self._experts:
            raise ConfigError(
                f"the engine reports the expert {most}, and the learner's model has the experts 0 to "
                f"{self._experts - 1}: they are not of one model"
            )

    def _hook(self, index: int, *, normalised: bool) -> Any:
        def replay(_router: nn.Module, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            if self._experts_L_N_K is None:
                return output
            logits, scores, own = output
            given = self._experts_L_N_K[:, index].to(own)
            experts = torch.where(given == UNKNOWN, own, given)
            weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, experts)
            if normalised:
                weights = weights / weights.sum(dim=-1, keepdim=True)
            return logits, weights.to(scores.dtype), experts

        return replay
