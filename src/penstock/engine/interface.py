"""The interface of one engine, which a fleet of engines shares (R1, R5): code written for one runs on many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    from penstock.types import NamedTensors


class Engine(ABC):
    """One inference engine, or many seen as one. All methods are coroutines but the sizes and `weight_version`.

    No request is cut short: through pauses and sleeps it waits in the engine, and one whose engine dies goes on on
    another engine from the tokens it had. Only `abort_generation` ends requests early, with the finish reason `abort`.

    Every method raises `DeadlineError` when the other side does not answer in time, `EngineDeadError` when it is gone,
    and `EngineHTTPError` with its status and type when it answers with an error.
    """

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
    ) -> GenerateOutput:
        """Complete a batch; the answers are in input order (R2).

        Args:
            prompts: chats or plain strings. Or a whole batch, and then nothing else: a `GenerateBatch`, or a mapping
                of its fields (`prompts` or `prompt_token_ids`, `sampling_params`, `session_ids`).
            sampling_params: for every prompt; `SamplingParams` or a mapping.
            prompt_token_ids: instead of `prompts`, ragged `[B][P_i]`.
            session_ids: one for each prompt; equal ids go to the same engine.

        Raises:
            RequestError: both or neither of prompts and ids, an empty batch, ids outside the vocabulary, an unknown
                sampling parameter or key, a session list of another length. Nothing was sent.
        """
        if isinstance(prompts, (GenerateBatch, Mapping)):
            besides = {
                "sampling_params": sampling_params, "prompt_token_ids": prompt_token_ids, "session_ids": session_ids
            }  # fmt: skip
            if twice := [name for name, value in besides.items() if value is not None]:
                raise RequestError(f"a whole batch was given, and {', '.join(twice)} beside it; put all in the batch")
            return await self.generate_batch(GenerateBatch.of(prompts))
        batch = GenerateBatch(
            prompts=prompts, prompt_token_ids=prompt_token_ids, sampling_params=sampling_params, session_ids=session_ids
        )
        return await self.generate_batch(batch)

    @abstractmethod
    async def generate_batch(self, batch: GenerateBatch) -> GenerateOutput:
        """Complete a batch (R2); see `generate`."""

    @abstractmethod
    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        session_id: SessionId | None = None,
    ) -> list[Sample]:
        """`num_samples` independent samples of one prompt, tokens in and tokens out, as one n-way request (R3)."""

    @abstractmethod
    async def completion(self, body: Mapping[str, Any], session_id: SessionId | None = None) -> dict[str, Any]:
        """OpenAI `/v1/completions`: the body as the API has it, the answer as it came (R7)."""

    @abstractmethod
    async def chat_completion(self, body: Mapping[str, Any], session_id: SessionId | None = None) -> dict[str, Any]:
        """OpenAI `/v1/chat/completions`: the body as the API has it, the answer as it came."""

    @abstractmethod
    def completion_stream(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """OpenAI `/v1/completions` as chunks, in OpenAI's form; the last of each choice has its `weight_versions`.

        Through pauses and deaths of engines a reader sees one stream: nothing twice, nothing missing.
        """

    @abstractmethod
    def chat_completion_stream(
        self, body: Mapping[str, Any], session_id: SessionId | None = None
    ) -> AsyncGenerator[dict[str, Any]]:
        """OpenAI `/v1/chat/completions` as chunks; see `completion_stream`."""

    # --- pause, resume, memory ---------------------------------------------------------------------------------------

    @abstractmethod
    async def pause_generation(
        self, mode: PauseMode = PauseMode.KEEP, *, clear_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Stop making tokens; returns when none is being made (R22, R23). New requests wait.

        Args:
            mode: what happens to requests in flight.
            clear_cache: recompute KV at resume, so that no cached block outlives its weights (G5).
            timeout_s: seconds after which the pause is given up, and generation goes on as before. Default: the
                deadline of a request for the mode `wait`, which takes as long as the longest one in flight, and of a
                control call for the others.

        Raises:
            StateError: already paused.
            DeadlineError: not within `timeout_s`.
        """

    @abstractmethod
    async def resume_generation(self) -> None:
        """Go on after `pause_generation`. Raises StateError when not paused."""

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
        """VLLM's native `/init_weight_transfer_engine` on every engine (R18)."""

    @abstractmethod
    async def update_named_weights(self, update_info: Mapping[str, Any], *, version: int) -> None:
        """One round of vLLM's native start, update, finish on paused engines, labelled `version` (R18)."""

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
                engine needs this version and no copy of it was kept (docs/weights.md).
            version: label of the new weights, greater than the present one; default: the present one + 1. A resumed
                run uses it to take up its count.
            kv: `recompute`: what is in flight attends to nothing of older weights, at the price of its prefill.
                `keep`: it goes on at once, and cached prefixes stay; the spans of tokens made so say `kv_kept`, until
                the next update that recomputes. Their logprobs are those of no version alone.

        Raises:
            WeightsError: a missing, extra or misshapen tensor, a wrong dtype, or NaN; nothing was changed.
            StateError: another update is under way.
            UpdateError: it did not commit on enough engines; the old version is still served.
        """

    # --- figures and escape hatch ------------------------------------------------------------------------------------

    @abstractmethod
    async def get_num_unfinished_requests(self, index: int | None = None) -> int:
        """Requests running or waiting, on engine `index` or on all (R10)."""

    @abstractmethod
    async def get_cache_usage(self, index: int | None = None) -> float:
        """Fraction of KV blocks in use, on engine `index` or the mean of all (R10)."""

    @abstractmethod
    async def collective_rpc(
        self, method: str, timeout_s: float = 60.0, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a worker method on every worker of every engine, in rank order (R11). `timeout_s` in seconds."""

    @abstractmethod
    async def teardown(self) -> None:
        """Close connections, and end what this object launched."""
