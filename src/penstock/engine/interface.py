"""Generation by one engine or by many seen as one (R1, R5); `fleet.fleet.Fleet` adds what controls them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import RequestError
from penstock.types import GenerateBatch, GenerateOutput, Message, Sample, SamplingParams, SessionId

if TYPE_CHECKING:
    from penstock.engine.client import DataClient

Body = Mapping[str, Any]
T = TypeVar("T")


class Engine:
    """One inference engine, or many seen as one.

    No request is cut short. Through pauses and sleeps it waits in the engine; if its engine dies, another engine
    continues it from the tokens it had. Only `abort_generation` ends requests early, with the finish reason `abort`.

    Every method raises `DeadlineError` when the other side does not answer in time, `EngineDeadError` when it is gone,
    and `EngineHTTPError` with its status and type when it answers with an error.

    Attributes:
        data: the client that generates, at the engine or at the router in front of many.
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
