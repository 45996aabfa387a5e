"""Generation by one engine, or by many engines that appear as one (R1, R5). `fleet.fleet.Fleet` adds control."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import RequestError
from penstock.types import GenerateBatch, GenerateOutput, Message, Sample, SamplingParams, SessionId

if TYPE_CHECKING:
    from penstock.engine.client import DataClient

T = TypeVar("T")


class Engine:
    """One inference engine, or many that appear as one.

    No request is cut short. It waits in the engine through pauses and sleeps. If its engine dies, another engine
    continues from its tokens. Only `abort_generation` ends requests early, with the finish reason `abort`.

    Every method raises `DeadlineError` if the other side does not answer in time, `EngineDeadError` if it is gone, and
    `EngineHTTPError` with status and type if it answers with an error.

    Attributes:
        data: client for generation, connected to the engine or to the router of many engines.
    """

    data: DataClient

    async def generate(
        self,
        prompts: GenerateBatch | Mapping[str, Any] | Sequence[Sequence[Message] | str] | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        session_ids: Sequence[SessionId] | None = None,
        adapter: str | None = None,
    ) -> GenerateOutput:
        """Complete a batch. The answers are in input order (R2).

        Args:
            prompts: chats or plain strings. Or a whole batch, without other arguments: a `GenerateBatch`, or a mapping
                of its fields (`prompts` or `prompt_token_ids`, `sampling_params`, `session_ids`).
            sampling_params: `SamplingParams` or a mapping, for every prompt.
            prompt_token_ids: ragged ids `[B][P_i]` instead of `prompts`.
            session_ids: one per prompt. Requests with equal ids go to the same engine.
            adapter: name of the LoRA adapter to use. Default: the base model.

        Raises:
            RequestError: both or neither of prompts and ids, an empty batch, ids outside the vocabulary, an unknown
                parameter or key, or a wrong number of session ids. No request was sent.
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
        """Draw `num_samples` samples of one prompt as token ids, as one request (R3)."""
        work = self.data.sample(prompt_token_ids, num_samples, sampling_params, session_id, adapter=adapter)
        return await self.while_serving(work)

    async def while_serving(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. EngineDeadError: no engine is left for it."""
        return await work
