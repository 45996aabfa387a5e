"""TorchRL's load balancer for an `AsyncVLLM`. It uses the policies of the router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import RequestError, StateError
from penstock.facade.forms import Prompt
from penstock.fleet.member import RANK
from penstock.prefix_hash import prefix_hashes

if TYPE_CHECKING:
    from penstock.facade.vllm_like import AsyncVLLM


class LoadBalancer:
    """TorchRL's load balancer. It sets the policies of the service's router, and places single requests.

    The balancer made last applies to every request of the service, even after the router restarts.

    Attributes:
        strategies: policies in order. A policy without a preference defers to the next one, the last one to `requests`.

    Args:
        service: an `AsyncVLLM`.
        strategy: one or several policies of `RouterConfig.policy`. Default: `prefix-aware`, then `requests`.
        prefix_length: shortest shared prefix, in tokens, for which `prefix-aware` prefers an engine. Prefixes are
            compared in steps of 64 tokens, and only for prompts of at least 128 tokens.
        overload_threshold: `prefix-aware` skips an engine with more than this multiple of the mean number of requests.

    Raises:
        RequestError: `service` is not an `AsyncVLLM`.
        UserError: there is no such policy, or a value is out of range. The policy is unchanged.
    """

    def __init__(
        self,
        service: AsyncVLLM,
        strategy: str | Sequence[str] | None = None,
        prefix_length: int = 8,
        overload_threshold: float = 1.5,
    ) -> None:
        if not hasattr(service, "ask_router"):
            raise RequestError(f"a LoadBalancer needs a penstock.AsyncVLLM, got {type(service).__name__}")
        self.strategies = [strategy] if isinstance(strategy, str) else list(strategy or ("prefix-aware", "requests"))
        self._service = service
        service.call(
            service.fleet.set_policy(
                self.strategies, prefix_length=prefix_length, overload_threshold=overload_threshold
            )
        )

    def select_actor(
        self, prompt: str | Sequence[int] | None = None, request_context: Mapping[str, Any] | None = None
    ) -> int:
        """Return an engine's index for a request, as `actor_index` of `generate`.

        The router counts the choice, so `round-robin` names each engine in turn. The context is ignored.

        StateError: the request would have to wait, because generation is paused or no engine is up.
        """
        del request_context
        asked = Prompt(prompt) if isinstance(prompt, str) else Prompt(ids=prompt)
        ids = self._service.tokenized(asked).ids or ()
        hashes = prefix_hashes(ids)
        name = self._service.ask_router(lambda admin: admin.choose(prompt_tokens=len(ids), prefix_hashes=hashes))
        names = self._service.engine_names()
        engine = (name or "").partition(RANK)[0]  # the router treats each data-parallel rank as an engine
        if engine not in names:
            raise StateError("a request would have to wait now: generation is paused, or no engine is up")
        return names.index(engine)

    def get_stats(self) -> dict[str, Any]:
        """Return the policies in force, each engine's load, and the placements so far."""
        state = self._service.ask_router(lambda admin: admin.engines())
        stats = self._service.engine_stats()
        strategies = str(state.policy["policy"]).split(",")
        return {
            "strategies": strategies,
            "primary_strategy": strategies[0],
            "num_actors": len(stats),
            "prefix_length": state.policy["prefix_length"],
            "overload_threshold": state.policy["overload_threshold"],
            "placements": dict(state.placements),
            "actor_stats": [
                {"actor_index": i, "pending_requests": requests, "cache_usage": share}
                for i, (requests, share) in enumerate(stats)
            ],
        }
