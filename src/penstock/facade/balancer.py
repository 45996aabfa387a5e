"""TorchRL's load balancer over our router: the strategies are the router's policies, and it is they that are set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import RequestError, StateError
from penstock.fleet.member import RANK
from penstock.wire import prefix_hashes

if TYPE_CHECKING:
    from penstock.facade.vllm_like import AsyncVLLM

DEFAULT = ("prefix-aware", "requests")
"""TorchRL's."""


class LoadBalancer:
    """Sets by which policies the router of a service places requests, and places single requests by them.

    Every request of the service goes by the balancer that was made last, also after a restart of the router.

    Attributes:
        strategies: in order; who has no opinion leaves the choice to the next, and `requests` is the last resort.

    Args:
        service: an `AsyncVLLM`.
        strategy: a policy of `RouterConfig.policy`, or several; default: `prefix-aware`, then `requests`.
        prefix_length: shortest shared beginning, in tokens, for which `prefix-aware` prefers an engine. Beginnings are
            told apart in steps of 64 tokens, of prompts of at least 128.
        overload_threshold: `prefix-aware` passes over an engine that has more than so many times the mean of requests.

    Raises:
        RequestError: `service` is something else.
        UserError: there is no such policy, or a value is out of range; the policy stays as it was.
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
        self.strategies = [strategy] if isinstance(strategy, str) else list(DEFAULT if strategy is None else strategy)
        self._service = service
        service.ask_router(
            lambda admin: admin.set_policy(
                self.strategies, prefix_length=prefix_length, overload_threshold=overload_threshold
            )
        )

    def select_actor(
        self,
        prompt: str | Sequence[int] | None = None,
        request_context: Mapping[str, Any] | None = None,
    ) -> int:
        """Place a request: the index of the engine to send it to, as `actor_index` of `generate`.

        The router counts the choice, so the next one follows from it: `round-robin` names each engine in turn.

        Args:
            prompt: of the request: text or token ids.
            request_context: taken and not looked at, as in TorchRL.

        Raises:
            StateError: it would have to wait: a gate is closed, or no engine is up.
        """
        del request_context
        ids = self._service.token_ids(prompt) if prompt else None
        count, hashes = (0, None) if ids is None else (len(ids), prefix_hashes(ids))
        name = self._service.ask_router(lambda admin: admin.choose(prompt_tokens=count, prefix_hashes=hashes))
        names = self._service.engine_names()
        engine = (name or "").partition(RANK)[0]  # to the router, each data-parallel rank is one
        if engine not in names:
            raise StateError("a request would have to wait now: generation is paused, or no engine is up")
        return names.index(engine)

    def get_stats(self) -> dict[str, Any]:
        """What is in force and how it goes.

        `actor_stats` has for each engine its unfinished requests and its share of KV blocks in use, as it says itself;
        `placements` how many requests each policy has placed since the router started.
        """
        state = self._service.ask_router(lambda admin: admin.engines())
        figures = self._service.figures()
        return {
            "strategies": str(state.policy["policy"]).split(","),
            "primary_strategy": str(state.policy["policy"]).partition(",")[0],
            "num_actors": len(figures),
            "prefix_length": state.policy["prefix_length"],
            "overload_threshold": state.policy["overload_threshold"],
            "placements": dict(state.placements),
            "actor_stats": [
                {"actor_index": i, "pending_requests": requests, "cache_usage": share}
                for i, (requests, share) in enumerate(figures)
            ],
        }
