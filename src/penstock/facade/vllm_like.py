"""`AsyncVLLM`: a fleet with the blocking interface of vLLM's `LLM`, and with vLLM's own types.

Names and arguments match `torchrl.modules.llm.AsyncVLLM` (TorchRL 0.14), so its users only change an import.
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

from penstock.aio import all_or_first_error
from penstock.checks import reading
from penstock.control_types import UpdateReport
from penstock.engine.client import DataClient
from penstock.engine.command import resolve_profile
from penstock.engine.openai import OpenAICalls
from penstock.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    EngineHTTPError,
    RequestError,
    UserError,
)
from penstock.facade.balancer import LoadBalancer
from penstock.facade.forms import (
    Prompt,
    changed_fields,
    completion_fields,
    launch_options,
    model_metadata,
    params_of,
    prompts_of,
    request_output,
)
from penstock.facade.loop_thread import LoopThread
from penstock.fleet.adapters import stamp_of
from penstock.fleet.fleet import Fleet
from penstock.fleet.lifecycle import SERVABLE, State
from penstock.rollout.tokenizer import Tokenizer, load_tokenizer
from penstock.router.state import RouterAdmin
from penstock.settings import EngineConfig

if TYPE_CHECKING:
    import torch
    from vllm import AsyncEngineArgs, RequestOutput, SamplingParams

T = TypeVar("T")

RPC_S = 60.0
"""Default deadline of `collective_rpc` in seconds."""
LOAD_S = 120.0
"""Deadline in seconds for one adapter on one engine: a few hundred megabytes from a slow disk."""
NOT_FOUND = 404
_NO_COMPILATION = '{"mode": 0}'
_AWAY = frozenset({State.DEAD, State.LAUNCHING, State.SYNCING, State.STOPPED})
"""States in which an engine holds no request and no cache."""


class GenerationTimeoutError(DeadlineError, TimeoutError):
    """`timeout_seconds` passed. The engines have cancelled the requests."""


class AsyncVLLM:
    """Engines on this machine behind one router, for blocking code. Create with `from_pretrained` or `launch`.

    Every method blocks, and any thread may call it: an event loop in its own thread does the work. Every error is a
    `PenstockError`; a timeout is also a `TimeoutError`. The engines end with `shutdown`, with the program, or with the
    last reference to this object.

    Attributes:
        engine_args: configuration with which each engine was launched.
        num_replicas: number of engines launched.
        fleet: the fleet itself. Its coroutines run on this object's event loop: use `call`.
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
        self._decode = lru_cache(maxsize=None)(partial(_text_of, tokenizer))
        self._direct: dict[str, DataClient] = {}
        self._adapters: dict[str, tuple[str, Any]] = {}
        """By adapter name: its path, and the stamp of its loaded files. Unchanged files need no call to an engine."""
        self._loading = asyncio.Lock()
        self._end = weakref.finalize(self, _end, loop, fleet, self._direct)

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
        """Start engines. Returns once they serve.

        Args:
            model_name: checkpoint path or hub name.
            num_devices: GPUs per engine, for tensor parallelism.
            num_replicas: number of engines.
            verbose: ignored; engines write to their logs (`log_dir=...`).
            compile: False turns off vLLM's compilation (its CPU profile never compiles).
            enable_fp32_output: compute logits in fp32 if the model has lower precision.
            api_key: key that the router requires from clients.
            kwargs: fields of vLLM's AsyncEngineArgs, and of `EngineConfig`, `FleetConfig` and `RouterConfig`.

        Raises:
            ConfigError: an unknown option or a wrong value. No process was started.
            EngineStartError: an engine failed to start. No process is left running.
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
        """Start engines with vLLM's own arguments that differ from its defaults.

        `options` are like `kwargs` of `from_pretrained`, and override `engine_args`.
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
        tokenizer = _tokenizer(config)  # loaded before the engines start, since an error here would leave them running
        loop = LoopThread("penstock-facade")

        async def start() -> Fleet:
            return await opening

        with ExitStack() as on_failure:
            on_failure.callback(loop.close)
            fleet = loop.run(start())
            on_failure.pop_all()
        return cls(loop, fleet, config, num_replicas, tokenizer)

    def shutdown(self) -> None:
        """End engines and router. A second call is harmless. Calls in progress fail."""
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
            prompts: a string, token ids, a TextPrompt or TokensPrompt, or a list of these.
            sampling_params: vLLM's SamplingParams, one for all prompts or one per prompt. Default: `SamplingParams()`,
                16 tokens. `logprobs` are vLLM's `processed_logprobs`; see `GenerateOutput.response_logprobs`.
            prompt_token_ids: ids `[P]` or ragged `[B][P_i]`, instead of `prompts`.
            use_tqdm: ignored.
            lora_request: vLLM's LoRARequest, which engines load at its first use. They need `enable_lora=True`.
            prompt_adapter_request: refused, because vLLM has removed it.
            guided_options_request: refused; see `SamplingParams(structured_outputs=...)`.
            timeout_seconds: time limit of the whole call, after which the engines cancel it. Without a positive value,
                only `request_timeout_s` applies.
            actor_index: index of the engine that must serve the call. Default: the router chooses for each prompt.

        Returns:
            vLLM's RequestOutput, or for a batch a list of them in the batch's order. `n` samples are in `outputs`.

        Raises:
            RequestError: prompts or parameters of an unknown form. No request was sent.
            GenerationTimeoutError: `timeout_seconds` passed. It is a `TimeoutError`.
            EngineHTTPError: an engine refused a prompt. The other prompts are cancelled.
        """
        del use_tqdm
        if prompt_adapter_request is not None or guided_options_request is not None:
            raise RequestError(
                "prompt_adapter_request and guided_options_request are gone from vLLM; for the latter use "
                "SamplingParams(structured_outputs=...)"
            )
        return self.call(
            self._generate(prompts, sampling_params, prompt_token_ids, lora_request, timeout_seconds, actor_index)
        )

    async def _generate(
        self, prompts: Any, sampling_params: Any, ids: Any, lora: Any, timeout_s: float | None, index: int | None
    ) -> RequestOutput | list[RequestOutput]:
        given, batch = prompts_of(prompts, ids)
        params = params_of(sampling_params, len(given))
        sampling = {id(one): completion_fields(one) for one in params}
        # TorchRL's convention: zero or negative seconds mean no limit.
        with reading("timeout_seconds"):
            limit = timeout_s if timeout_s is not None and timeout_s > 0 else None
        try:
            async with asyncio.timeout(limit):
                items = [self.tokenized(prompt) for prompt in given]
                target = self.fleet if index is None else await self._engine(index)
                served = self.engine_args.served_model_name or self.engine_args.model
                model = served if lora is None else await self._load(lora)
                base = {"model": model, "return_token_ids": True, "return_tokens_as_token_ids": True}
                bodies = (
                    {**base, "prompt": p.text or "" if p.ids is None else list(p.ids), **sampling[id(one)]}
                    for p, one in zip(items, params, strict=True)
                )
                answers = await all_or_first_error(self._completion(target, body, lora) for body in bodies)
        except TimeoutError as error:
            seconds = limit or 0.0
            raise GenerationTimeoutError(
                f"{len(given)} prompts were not answered within timeout_seconds={seconds:g}; they have been cancelled",
                seconds=seconds,
            ) from error
        outputs = [request_output(*each, lora, self._decode) for each in zip(answers, items, params, strict=True)]
        return outputs if batch else outputs[0]

    async def _completion(self, target: Any, body: Mapping[str, Any], lora: Any) -> dict[str, Any]:
        try:
            return await target.completion(body)
        except EngineHTTPError as error:
            if lora is None or error.status != NOT_FOUND:
                raise
            self._adapters.pop(lora.lora_name, None)  # evicted or unloaded since
            return await target.completion({**body, "model": await self._load(lora)})

    async def _load(self, lora: Any) -> str:
        """Load a `vllm.lora.request.LoRARequest` if its files changed.

        Files that this process cannot see are loaded once per `lora_int_id`.

        Returns:
            The model name for requests.

        Raises:
            RequestError: it is not a LoRARequest, or its name already stands for another path.
            MissingCapabilityError: an engine was launched without `enable_lora`.
            WeightsError: the engines refused the adapter.
        """
        name, path = getattr(lora, "lora_name", None), getattr(lora, "lora_path", None)
        if not isinstance(name, str) or not isinstance(path, str):
            raise RequestError(f"lora_request must be vLLM's LoRARequest, got {type(lora).__name__}")
        async with self._loading:
            # If this process cannot see the files, reload them under the same condition as vLLM: another id.
            now = path, stamp_of(path) or getattr(lora, "lora_int_id", None)
            known = self._adapters.get(name)
            if known is not None and known[0] != path:
                raise RequestError(f"adapter {name!r} is {known[0]}; give {path} another name")
            if known != now:
                await self.fleet.load_adapter(name, path, timeout_s=LOAD_S)
                self._adapters[name] = now
        return name

    def tokenized(self, prompt: Prompt) -> Prompt:
        """Return a prompt with its ids for the router, if there is a tokenizer here."""
        if prompt.ids is not None or prompt.text is None or self._tokenizer is None:
            return prompt
        # An empty text may have no ids; the engine's own error is the clearest.
        return Prompt(prompt.text, self._tokenizer.encode(prompt.text) or None)

    async def _engine(self, index: int) -> Any:
        engines = await self.fleet.engines(stats=False)
        if not 0 <= index < len(engines):
            raise UserError(f"there is no engine {index}; the fleet has engines 0 to {len(engines) - 1}")
        engine = engines[index]
        if engine.state not in SERVABLE:  # a direct call has no router to hold it back from unconfirmed weights
            raise EngineDeadError(f"it is {engine.state}: {engine.reason}", engine=engine.name)
        if engine.url not in self._direct:
            self._direct[engine.url] = DataClient(
                engine.url,
                api_key=self.fleet.key_of(engine.name),
                request_timeout_s=self.engine_args.request_timeout_s,
                name=engine.name,
                routed=False,
            )
        return OpenAICalls(self._direct[engine.url])

    def get_tokenizer(self) -> Any:
        """Return transformers' tokenizer. ConfigError: simulated engines have none."""
        if self._tokenizer is None:
            raise ConfigError(f"{self.engine_args.model} has no tokenizer here")
        return self._tokenizer

    # --- stats and control -------------------------------------------------------------------------------------------

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int]:
        """Return the number of unfinished requests on an engine, or on each engine."""
        if actor_index is not None:
            return self.call(self.fleet.get_num_unfinished_requests(actor_index))
        return [requests for requests, _ in self.engine_stats()]

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Return the fraction of KV blocks in use on an engine, or for each engine."""
        if actor_index is not None:
            return self.call(self.fleet.get_cache_usage(actor_index))
        return [usage for _, usage in self.engine_stats()]

    def engine_stats(self) -> list[tuple[int, float]]:
        """Return each engine's unfinished requests and KV usage; 0 if it is away."""
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
        """Call a method on every worker. Return results by engine and rank, no futures."""
        return self.call(self.fleet.collective_rpc(method, RPC_S if timeout is None else timeout, args, kwargs))

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes on every engine. `update_weights` does this by itself."""
        self.call(self.fleet.reset_prefix_cache())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the fleet's loop: `call(service.fleet.drain("e0"))`."""
        return self._loop.run(work)

    def create_load_balancer(self, strategy: str | Sequence[str] | None = None, **kwargs: Any) -> LoadBalancer:
        """Place requests by other policies from now on, with `LoadBalancer`.

        Before the first call, `RouterConfig` applies: `bounded-sticky`, or the launch option `policy=...`.
        """
        return LoadBalancer(self, strategy, **kwargs)

    def ask_router(self, ask: Callable[[RouterAdmin], Coroutine[Any, Any, T]]) -> T:

        async def answer() -> T:
            admin = self.fleet.router_admin
            if not isinstance(admin, RouterAdmin):
                raise UserError("vllm-router has no placement that can be asked or changed; keep router.kind=penstock")
            return await ask(admin)

        return self.call(answer())

    def engine_names(self) -> list[str]:
        """Return the engines' names by index."""
        return [engine.name for engine in self.call(self.fleet.engines(stats=False))]

    # --- weights, in the form that TorchRL's vLLMUpdaterV2 requires --------------------------------------------------

    def get_tp_size(self) -> int:
        return self.fleet.tp_size

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return dtype and shape of the tensors that `update_weights` expects, by name."""
        return model_metadata(self.engine_args, self.fleet.dtype)

    def get_master_address(self) -> str:
        """Return the router's host, for TorchRL. Weights use no process group here."""
        return urlsplit(self.fleet.url).hostname or ""

    def get_master_port(self) -> int:
        """Return the router's port; see `get_master_address`."""
        return urlsplit(self.fleet.url).port or 0

    def init_weight_update_group(self) -> None:
        """Do nothing, because `update_weights` needs no set-up. TorchRL's callers call it."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> UpdateReport:
        """Put new weights in force during generation; see `Fleet.update_weights`."""
        return self.call(self.fleet.update_weights(weights))


def _tokenizer(config: EngineConfig) -> Tokenizer | None:
    return None if resolve_profile(config) == "sim" else load_tokenizer(config.tokenizer or config.model)


def _text_of(tokenizer: Tokenizer | None, token: int) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)


def _end(loop: LoopThread, fleet: Fleet, direct: Mapping[str, DataClient]) -> None:
    """End connections, fleet and loop. Garbage collection may call it, too."""

    async def end() -> None:
        try:
            for client in direct.values():
                await client.close()
        finally:
            await fleet.teardown()

    loop.close(end())
