"""`AsyncVLLM`: a fleet behind the blocking interface of vLLM's `LLM`, with vLLM's own types.

Names and arguments are those of `torchrl.modules.llm.AsyncVLLM` (TorchRL 0.14), so that its users change an import.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from penstock.engine.launch import resolve_profile
from penstock.errors import ConfigError, EngineError, RequestError, StateError, UserError
from penstock.facade.calls import Requests
from penstock.facade.engine_args import changed_fields, launch_options, model_metadata
from penstock.facade.loop_thread import LoopThread
from penstock.fleet.fleet import Fleet
from penstock.fleet.member import RANK, State
from penstock.rollout.tokenizer import Tokenizer, load_tokenizer
from penstock.router.admin_client import RouterAdmin
from penstock.settings import EngineConfig
from penstock.types import UpdateReport
from penstock.wire import prefix_hashes

if TYPE_CHECKING:
    import torch
    from vllm import AsyncEngineArgs, RequestOutput, SamplingParams

T = TypeVar("T")

RPC_S = 60.0
"""Deadline of `collective_rpc` where none is given."""
_NO_COMPILATION = '{"mode": 0}'
_AWAY = frozenset({State.DEAD, State.LAUNCHING, State.SYNCING, State.STOPPED})
"""States in which an engine has no request and no cache."""


class AsyncVLLM:
    """Engines on this machine behind one router, for blocking code; get one with `from_pretrained` or `launch`.

    Every method but `generate_async` blocks, and any thread may call it: an event loop in its own thread does the work.
    Errors are `PenstockError`; a timeout is a `TimeoutError` too. `shutdown` ends the engines, as does the end of the
    program or of the last reference.

    Attributes:
        engine_args: what each engine was launched with.
        num_replicas: engines that were launched.
        fleet: the fleet itself, whose coroutines belong to the loop of this object: use `call`.
    """

    def __init__(
        self,
        loop: LoopThread,
        fleet: Fleet,
        config: EngineConfig,
        num_replicas: int,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.engine_args = config
        self.num_replicas = num_replicas
        self.fleet = fleet
        self._loop = loop
        self._tokenizer = tokenizer
        model = config.served_model_name or config.model
        self._requests = Requests(fleet, model, self._tokenizer, config.request_timeout_s)
        self._end = weakref.finalize(self, _end, loop, fleet, self._requests)

    # --- starting and ending -----------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | Path,
        num_devices: int | None = None,
        num_replicas: int = 1,
        verbose: bool = True,  # noqa: FBT001, FBT002 - TorchRL's signature
        compile: bool = True,  # noqa: A002, FBT001, FBT002 - the same
        enable_fp32_output: bool = False,  # noqa: FBT001, FBT002 - the same
        *,
        api_key: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Start engines; returns when they serve.

        Args:
            model_name: checkpoint path or hub name.
            num_devices: GPUs of each engine, by tensor parallelism.
            num_replicas: engines.
            verbose: ignored; engines write to their logs (`log_dir=...`).
            compile: off, vLLM's compilation is (its CPU profile never compiles).
            enable_fp32_output: logits in fp32 under a model of less.
            api_key: what the router asks of clients from now on.
            kwargs: fields of vLLM's AsyncEngineArgs, and of `EngineConfig`, `FleetConfig` and `RouterConfig`.

        Raises:
            ConfigError: an unknown option or a wrong value; nothing was started.
            EngineStartError: an engine does not start; nothing is left running.
        """
        del verbose
        options = launch_options(kwargs)
        if num_devices is not None and options.setdefault("tensor_parallel_size", num_devices) != num_devices:
            raise ConfigError(
                f"num_devices={num_devices} and tensor_parallel_size={options['tensor_parallel_size']} are two numbers "
                "for one thing; give one of them"
            )
        if enable_fp32_output:
            options["fp32_lm_head"] = True
        if not compile and options.get("profile") != "sim":
            options["extra_args"] = {"compilation-config": _NO_COMPILATION, **options.get("extra_args", {})}
        return cls._start({**options, "model": str(model_name)}, num_replicas, api_key)

    @classmethod
    def launch(
        cls, engine_args: AsyncEngineArgs, num_replicas: int = 1, *, api_key: str | None = None, **options: Any
    ) -> Self:
        """Start engines with vLLM's own arguments; returns when they serve. Raises as `from_pretrained`.

        Args:
            engine_args: what is not as vLLM has it by default is taken over.
            num_replicas: engines.
            api_key: what the router asks of clients from now on.
            options: as `kwargs` of `from_pretrained`; they go before `engine_args`.
        """
        given, more = launch_options(changed_fields(engine_args)), launch_options(options)
        extra = {**given.get("extra_args", {}), **more.get("extra_args", {})}
        return cls._start({**given, **more, **({"extra_args": extra} if extra else {})}, num_replicas, api_key)

    @classmethod
    def _start(cls, options: dict[str, Any], num_replicas: int, api_key: str | None) -> Self:
        model = options.pop("model")
        opening = Fleet.launch(model, num_replicas, api_key=api_key, **options)
        of_engine = {name: value for name, value in options.items() if name in EngineConfig.model_fields}
        config = EngineConfig(model=model, **of_engine)
        tokenizer = _tokenizer(config)  # before there are engines, which would outlive its error
        loop = LoopThread("penstock-facade")

        async def start() -> Fleet:
            return await opening

        with ExitStack() as on_failure:
            on_failure.callback(loop.close)
            fleet = loop.run(start())
            on_failure.pop_all()
        return cls(loop, fleet, config, num_replicas, tokenizer)

    def shutdown(self) -> None:
        """End engines and router; again is harmless. Calls under way fail."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # --- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        guided_options_request: Any = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Complete one prompt or a batch.

        Args:
            prompts: a string, token ids, a TextPrompt or TokensPrompt, or a list of those.
            sampling_params: of vLLM; one, or one for each prompt. Default: `SamplingParams()`, 16 tokens. `logprobs`
                are vLLM's `processed_logprobs`; see `GenerateOutput.response_logprobs`.
            prompt_token_ids: instead of `prompts`, ids `[P]` or ragged `[B][P_i]`.
            use_tqdm: ignored.
            lora_request: vLLM's LoRARequest; engines need `enable_lora=True`. They load it at its first use.
            prompt_adapter_request: refused, as vLLM no longer has it.
            guided_options_request: refused; see `SamplingParams(structured_outputs=...)`.
            timeout_seconds: for the whole call; then the engines cancel it. None or not positive: only
                `request_timeout_s` applies.
            actor_index: the engine that must serve it; default: the router chooses for each prompt.

        Returns:
            vLLM's RequestOutput, or for a batch a list of them in its order; `n` samples are its `outputs`.

        Raises:
            RequestError: prompts or parameters of an unknown form; nothing was sent.
            GenerationTimeoutError: `timeout_seconds` passed. It is a `TimeoutError`.
            EngineHTTPError: an engine refused a prompt; the others are cancelled.
        """
        del use_tqdm
        if prompt_adapter_request is not None or guided_options_request is not None:
            raise RequestError(
                "prompt_adapter_request and guided_options_request are gone from vLLM; for the latter use "
                "SamplingParams(structured_outputs=...)"
            )
        return self.call(
            self._requests.generate(
                prompts,
                sampling_params,
                prompt_token_ids=prompt_token_ids,
                lora_request=lora_request,
                timeout_seconds=timeout_seconds,
                actor_index=actor_index,
            )
        )

    async def generate_async(
        self, prompts: Any = None, sampling_params: Any = None, **options: Any
    ) -> RequestOutput | list[RequestOutput]:
        """`generate` for coroutines of any event loop; its cancellation is one on the engines too.

        Args:
            prompts: as in `generate`.
            sampling_params: as in `generate`.
            options: `prompt_token_ids`, `lora_request`, `timeout_seconds` and `actor_index` of `generate`.
        """
        return await self._loop.result(self._requests.generate(prompts, sampling_params, **options))

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, of transformers. ConfigError: simulated engines have none."""
        if self._tokenizer is None:
            raise ConfigError(f"{self.engine_args.model} has no tokenizer here")
        return self._tokenizer

    # --- stats and control -----------------------------------------------------------------------------------------

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int]:
        """Requests running or waiting on an engine, or for each engine; see `Fleet.get_num_unfinished_requests`."""
        if actor_index is not None:
            return self.call(self.fleet.get_num_unfinished_requests(actor_index))
        return [requests for requests, _ in self.engine_stats()]

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Fraction of KV blocks in use on an engine, or for each engine."""
        if actor_index is not None:
            return self.call(self.fleet.get_cache_usage(actor_index))
        return [usage for _, usage in self.engine_stats()]

    def engine_stats(self) -> list[tuple[int, float]]:
        """Unfinished requests and share of KV blocks in use, by engine index; 0 for an engine that does not serve."""
        stats: list[tuple[int, float]] = []
        for engine in self.call(self.fleet.engines()):
            if engine.stats is not None:
                stats.append((engine.stats.running + engine.stats.waiting, engine.stats.kv_cache_usage))
            elif engine.state in _AWAY:
                stats.append((0, 0.0))
            else:
                raise EngineError(f"it is {engine.state} and does not say how full it is", engine=engine.name)
        return stats

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method on every worker: the results, engine by engine, in each by rank (no Ray futures)."""
        return self.call(self.fleet.collective_rpc(method, RPC_S if timeout is None else timeout, args, kwargs))

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes on every engine. `update_weights` does so by itself."""
        self.call(self.fleet.reset_prefix_cache())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of `fleet` where it belongs, and wait for it: `service.call(service.fleet.drain("e0"))`."""
        return self._loop.run(work)

    # --- placement ---------------------------------------------------------------------------------------------------

    def create_load_balancer(self, strategy: str | Sequence[str] | None = None, **kwargs: Any) -> LoadBalancer:
        """Place requests by other policies from now on; see `LoadBalancer`, whose arguments these are.

        Before the first one, those of `RouterConfig` hold: `bounded-sticky`, or what `policy=...` said at the launch.
        """
        return LoadBalancer(self, strategy, **kwargs)

    def ask_router(self, ask: Callable[[RouterAdmin], Coroutine[Any, Any, T]]) -> T:
        """Ask the router's admin API."""

        async def answer() -> T:
            admin = self.fleet.router_admin
            if not isinstance(admin, RouterAdmin):
                raise UserError("vllm-router has no placement that can be asked or changed; keep router.kind=penstock")
            return await ask(admin)

        return self.call(answer())

    def engine_names(self) -> list[str]:
        """Names by index."""
        return [engine.name for engine in self.call(self.fleet.engines(stats=False))]

    def token_ids(self, prompt: str | Sequence[int]) -> Sequence[int] | None:
        """Ids of a prompt; None for text without a tokenizer here (simulated engines)."""
        if not isinstance(prompt, str):
            return prompt
        return None if self._tokenizer is None else self._tokenizer.encode(prompt)

    # --- weights, as TorchRL's vLLMUpdaterV2 asks for them -----------------------------------------------------------

    def get_tp_size(self) -> int:
        """Tensor-parallel ranks of an engine."""
        return self.fleet.tp_size

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Names, dtypes and shapes of the tensors that `update_weights` wants."""
        return model_metadata(self.engine_args, self.fleet.dtype)

    def get_master_address(self) -> str:
        """Host of the router. TorchRL asks for it; weights use no process group here."""
        return urlsplit(self.fleet.url).hostname or ""

    def get_master_port(self) -> int:
        """Port of the router; see `get_master_address`."""
        return urlsplit(self.fleet.url).port or 0

    def init_weight_update_group(self) -> None:
        """Do nothing: `update_weights` needs no set-up. TorchRL's callers call it."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> UpdateReport:
        """Put new weights in force on every engine while requests are in flight; see `Fleet.update_weights`."""
        return self.call(self.fleet.update_weights(weights))


DEFAULT_STRATEGIES = ("prefix-aware", "requests")
"""As in TorchRL."""


class LoadBalancer:
    """TorchRL's load balancer: sets the policies of the service's router, and places single requests by them.

    The balancer made last applies to every request of the service, also after a restart of the router.

    Attributes:
        strategies: in order; a policy without a preference leaves the choice to the next, at last to `requests`.

    Args:
        service: an `AsyncVLLM`.
        strategy: a policy of `RouterConfig.policy`, or several; default: `prefix-aware`, then `requests`.
        prefix_length: shortest shared prefix, in tokens, for which `prefix-aware` prefers an engine. Prefixes are
            compared in steps of 64 tokens, of prompts of at least 128.
        overload_threshold: `prefix-aware` skips an engine with more than this many times the mean of requests.

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
        self.strategies = (
            [strategy] if isinstance(strategy, str) else list(DEFAULT_STRATEGIES if strategy is None else strategy)
        )
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
            request_context: ignored, as in TorchRL.

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
        """Return the policies in force, the load of each engine, and the placements of each policy so far."""
        state = self._service.ask_router(lambda admin: admin.engines())
        stats = self._service.engine_stats()
        return {
            "strategies": str(state.policy["policy"]).split(","),
            "primary_strategy": str(state.policy["policy"]).partition(",")[0],
            "num_actors": len(stats),
            "prefix_length": state.policy["prefix_length"],
            "overload_threshold": state.policy["overload_threshold"],
            "placements": dict(state.placements),
            "actor_stats": [
                {"actor_index": i, "pending_requests": requests, "cache_usage": share}
                for i, (requests, share) in enumerate(stats)
            ],
        }


def _tokenizer(config: EngineConfig) -> Tokenizer | None:
    return None if resolve_profile(config) == "sim" else load_tokenizer(config.tokenizer or config.model)


def _end(loop: LoopThread, fleet: Fleet, requests: Requests) -> None:
    """End loop, fleet and requests; the last reference's end calls it too, in any thread."""

    async def end() -> None:
        try:
            await requests.close()
        finally:
            await fleet.teardown()

    loop.close(end())
