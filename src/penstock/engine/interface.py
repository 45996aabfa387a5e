"""The interface of one engine, which a fleet of engines shares (R1, R5): code written for one runs on many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import RequestError
from penstock.types import (
    KV,
    GenerateBatch,
    GenerateOutput,
    Message,
    PauseMode,
    Sample,
    SamplingParams,
    SessionId,
    UpdateReport,
)

if TYPE_CHECKING:
    from penstock.engine.client import DataClient
    from penstock.types import NamedTensors

Body = Mapping[str, Any]
T = TypeVar("T")


class Engine(ABC):
    """One inference engine, or many seen as one.

    No request is cut short. Through pauses and sleeps it waits in the engine; if its engine dies, another engine
    continues it from the tokens it had. Only `abort_generation` ends requests early, with the finish reason `abort`.

    Every method raises `DeadlineError` when the other side does not answer in time, `EngineDeadError` when it is gone,
    and `EngineHTTPError` with its status and type when it answers with an error.

    Attributes:
        data: the client that generates, at the engine or at the router in front of many.
    """

    data: DataClient

    # --- sizes -------------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""

    @property
    @abstractmethod
    def pp_size(self) -> int:
        """Pipeline-parallel ranks."""

    @property
    @abstractmethod
    def dp_size(self) -> int:
        """Data-parallel ranks."""

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """Version of the weights in force: 0 as loaded, +1 for each committed update."""

    # --- generation --------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: GenerateBatch | Mapping[str, Any] | Sequence[Sequence[Message] | str] | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        session_ids: Sequence[SessionId] | None = None,
        adapter: str | None = None,
    ) -> GenerateOutput:
        """Complete a batch; the answers are in input order (R2).

        Args:
            prompts: chats or plain strings. Or a whole batch, and then nothing else: a `GenerateBatch`, or a mapping
                of its fields (`prompts` or `prompt_token_ids`, `sampling_params`, `session_ids`).
            sampling_params: for every prompt; `SamplingParams` or a mapping.
            prompt_token_ids: instead of `prompts`, ragged `[B][P_i]`.
            session_ids: one for each prompt; equal ids go to the same engine.
            adapter: name of the LoRA adapter that answers; default: the base model.

        Raises:
            RequestError: both or neither of prompts and ids, an empty batch, ids outside the vocabulary, an unknown
                sampling parameter or key, a session list of another length. Nothing was sent.
        """
        given = {
            "sampling_params": sampling_params, "prompt_token_ids": prompt_token_ids, "session_ids": session_ids,
            "adapter": adapter,
        }  # fmt: skip
        if not isinstance(prompts, (GenerateBatch, Mapping)):
            return await self.generate_batch(GenerateBatch.of({"prompts": prompts, **given}))
        if twice := [name for name, value in given.items() if value is not None]:
            raise RequestError(f"a whole batch was given, and {', '.join(twice)} beside it; put all in the batch")
        return await self.generate_batch(GenerateBatch.of(prompts))

    async def generate_batch(self, batch: GenerateBatch) -> GenerateOutput:
        """Complete a batch (R2); see `generate`."""
        return await self.while_serving(self.data.generate_batch(batch))

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        session_id: SessionId | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Sample]:
        """Draw `num_samples` samples of one prompt, tokens in and tokens out, as one n-way request (R3)."""
        work = self.data.sample(prompt_token_ids, num_samples, sampling_params, session_id, adapter=adapter)
        return await self.while_serving(work)

    async def completion(self, body: Body, session_id: SessionId | None = None) -> dict[str, Any]:
        """Call OpenAI's `/v1/completions` (R7); see `openai.OpenAICalls.completion`."""
        return await self.while_serving(self.data.openai.completion(body, session_id))

    async def chat_completion(self, body: Body, session_id: SessionId | None = None) -> dict[str, Any]:
        """Call OpenAI's `/v1/chat/completions`: the body as the API has it, the answer as it came."""
        return await self.while_serving(self.data.openai.chat_completion(body, session_id))

    def completion_stream(self, body: Body, session_id: SessionId | None = None) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of `/v1/completions`; the last chunk of each choice has its `weight_versions`.

        Through pauses and deaths of engines a reader sees one stream: nothing twice, nothing missing.
        """
        return self.each_while_serving(self.data.openai.completion_stream(body, session_id))

    def chat_completion_stream(self, body: Body, session_id: SessionId | None = None) -> AsyncGenerator[dict[str, Any]]:
        """Yield the chunks of `/v1/chat/completions`; see `completion_stream`."""
        return self.each_while_serving(self.data.openai.chat_completion_stream(body, session_id))

    async def while_serving(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a request of `data` does; raise EngineDeadError as soon as no engine is left for it."""
        return await work

    def each_while_serving(self, items: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """Yield what a stream of `data` does; raise as `while_serving`."""
        return items

    # --- pause, resume, memory ---------------------------------------------------------------------------------------

    @abstractmethod
    async def pause_generation(
        self,
        mode: PauseMode = PauseMode.KEEP,
        *,
        clear_cache: bool = True,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> None:
        """Stop making tokens; return when none is being made (R22, R23). New requests wait.

        Args:
            mode: what happens to requests in flight.
            clear_cache: recompute KV at resume, so that no cached block outlives its weights (G5).
            timeout_s: seconds after which the pause is given up and generation goes on. Default: of the mode `wait`,
                which lasts as long as the longest request in flight, a request's deadline; else a control call's.
            adapter: pause the requests of this LoRA adapter alone (R25). They stop at a token, keep their tokens and
                are computed again at resume, under the version that is in force then; the other arguments do not
                matter. All other requests go on.

        Raises:
            StateError: already paused.
            DeadlineError: not within `timeout_s`.
        """

    @abstractmethod
    async def resume_generation(self, *, adapter: str | None = None) -> None:
        """Resume after `pause_generation` with the same `adapter`. Raises StateError when not paused."""

    @abstractmethod
    async def wait_until_resumed(self, adapter: str, *, timeout_s: float) -> None:
        """Return when an adapter is not paused. DeadlineError: it still is after `timeout_s` seconds."""

    @abstractmethod
    async def abort_generation(self) -> None:
        """End every request in flight with the tokens it has and the finish reason `abort`; new ones are served."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget cached prefixes; running requests are recomputed."""

    @abstractmethod
    async def sleep(self, level: int = 1) -> None:
        """Free memory for a colocated trainer (R26): level 1 keeps the weights in host memory, level 2 drops them."""

    @abstractmethod
    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back; `tags` (`weights`, `kv_cache`) restricts what."""

    # --- weights -----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def init_weight_update_communicator(self, init_info: Mapping[str, Any]) -> None:
        """Call vLLM's native `/init_weight_transfer_engine` on every engine (R18)."""

    @abstractmethod
    async def update_named_weights(self, update_info: Mapping[str, Any], *, version: int) -> None:
        """Do one round of vLLM's native start, update, finish on paused engines, labelled `version` (R18)."""

    @abstractmethod
    async def update_weights(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        kv: KV = "recompute",
    ) -> UpdateReport:
        """Put new weights in force while requests are in flight; version + 1.

        Args:
            named_tensors: `(checkpoint name, tensor)` for every tensor of the model, as `model.named_parameters()`
                gives them; tied weights once. A module, or a function that returns the pairs, is asked again when an
                engine needs this version and no copy of it was kept (docs/how-to/weights.md).
            version: label of the new weights, greater than the present one; default: the present one + 1. A resumed
                run passes the version that it had reached.
            kv: `recompute`: requests in flight attend to nothing of older weights, at the price of their prefill.
                `keep`: they go on at once, and cached prefixes stay. Until the next update that recomputes, the spans
                of new tokens say `kv_kept`, and their logprobs are of no version alone.
                `keep_in_flight`: those that are making tokens go on at once and say `kv_kept`, until they are preempted
                or continue on another engine. All others compute under the new weights alone, and new requests reuse
                nothing of older ones.

        Raises:
            WeightsError: a missing, extra or misshapen tensor, a wrong dtype, or NaN; nothing was changed.
            StateError: another update is under way.
            UpdateError: it did not commit on enough engines; the old version is still served.
        """

    @abstractmethod
    async def recovered(self, report: UpdateReport, *, timeout_s: float = 60.0) -> UpdateReport:
        """Return the report of an update with its `tokens_lost`, as soon as all engines make tokens as before it.

        The next update ends the wait too, and so do `timeout_s` seconds; then the loss so far is reported.
        """

    # --- LoRA adapters -----------------------------------------------------------------------------------------------

    @abstractmethod
    async def update_adapter(
        self,
        name: str,
        tensors: Iterable[tuple[str, Any]],
        *,
        config: Mapping[str, Any],
        version: int | None = None,
        kv: KV = "recompute",
    ) -> UpdateReport:
        """Put a version of a LoRA adapter in force while requests are in flight, the first or a new one.

        Only these tensors travel. The adapter's requests in flight go on under the new version; the spans of their
        tokens name adapter and version. No new request finds KV of an older version.

        Args:
            name: what requests ask for as `model`, or as `adapter`.
            tensors: `(PEFT's checkpoint name, torch tensor or numpy array)`.
            config: PEFT's `adapter_config` as a mapping: `r`, `lora_alpha`, `target_modules`, ...
            version: greater than any that this name has had; default: the last one + 1, first 1.
            kv: of the adapter's requests in flight: `recompute`, or, as for `update_weights`, `keep_in_flight`; `keep`
                does the same here.

        Raises:
            WeightsError: it does not fit the model, or holds NaN; what was in force stays.
            MissingCapabilityError: an engine takes no adapters.
            StateError: no room for another name.
        """

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter. StateError: it has requests in flight; it stays."""

    # --- statistics and escape hatch ---------------------------------------------------------------------------------

    @abstractmethod
    async def get_num_unfinished_requests(self, index: int | None = None) -> int:
        """Return the requests running or waiting, on engine `index` or on all (R10)."""

    @abstractmethod
    async def get_cache_usage(self, index: int | None = None) -> float:
        """Return the fraction of KV blocks in use, on engine `index` or the mean of all (R10)."""

    @abstractmethod
    async def collective_rpc(
        self, method: str, timeout_s: float = 60.0, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a worker method on every worker of every engine, in rank order (R11). `timeout_s` in seconds."""

    @abstractmethod
    async def teardown(self) -> None:
        """Close connections, and end what this object launched."""
