"""One call of `generate` as requests to a fleet, and their answers."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.engine.concurrent import all_or_first_error
from penstock.engine.data import DataClient
from penstock.errors import DeadlineError, EngineDeadError, EngineHTTPError, RequestError, UserError
from penstock.facade.adapters import Adapters
from penstock.facade.prompts import Prompt, Prompts
from penstock.facade.sampling import completion_fields
from penstock.fleet.fleet import Fleet
from penstock.fleet.member import SERVABLE
from penstock.rollout.tokenizer import Tokenizer

NOT_FOUND = 404


class GenerationTimeoutError(DeadlineError, TimeoutError):
    """`timeout_seconds` passed; the engines have been told to stop."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one `generate` asks for.

    Attributes:
        prompts: as given.
        params: vLLM's SamplingParams, one for each prompt.
        bodies: of the completions, without model and prompt.
        lora: a LoRARequest, or None.
        timeout_s: seconds for all of it; None: the fleet's `request_timeout_s` for each.
        replica: index of the only engine that may serve it; None: the router chooses.
    """

    prompts: Prompts
    params: tuple[Any, ...]
    bodies: tuple[Mapping[str, Any], ...]
    lora: Any = None
    timeout_s: float | None = None
    replica: int | None = None

    @classmethod
    def of(
        cls,
        prompts: Any,
        params: Any,
        prompt_token_ids: Any,
        *,
        lora: Any = None,
        timeout_s: float | None = None,
        replica: int | None = None,
    ) -> Call:
        """Read the arguments of `generate`; nothing is sent yet.

        Raises:
            RequestError: prompts or sampling parameters of an unknown form, or not one for each prompt.
        """
        given = Prompts.of(prompts, prompt_token_ids)
        count = len(given.items)
        each = tuple(cast("Sequence[Any]", params)) if isinstance(params, (list, tuple)) else (params,) * count
        if len(each) != count:
            raise RequestError(
                f"sampling_params has {len(each)} entries for {count} prompts; give one, or one for each"
            )
        bodies = {id(one): completion_fields(one) for one in each}
        # TorchRL's own: no or negative seconds are no limit.
        limit = timeout_s if timeout_s is not None and timeout_s > 0 else None
        return cls(given, each, tuple(bodies[id(one)] for one in each), lora, limit, replica)


class Requests:
    """Sends calls to a fleet.

    Args:
        fleet: it.
        model: name that the base model goes by.
        tokenizer: of the model, so that the router sees which prompts begin alike; None: engines tokenize.
        api_key: what engines and router ask for.
        request_timeout_s: deadline of a request to a single engine, as the fleet has one for its own.
    """

    def __init__(
        self, fleet: Fleet, model: str, tokenizer: Tokenizer | None, api_key: str | None, request_timeout_s: float
    ) -> None:
        self._fleet = fleet
        self._model = model
        self._tokenizer = tokenizer
        self._api_key = api_key
        self._request_s = request_timeout_s
        self._adapters = Adapters(fleet)
        self._direct: dict[str, DataClient] = {}

    async def send(self, call: Call) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """The prompts, with their ids where a tokenizer is here, and for each the answer of `/v1/completions`.

        Raises:
            GenerationTimeoutError: not all of them came in time; what was under way has been cancelled.
            PenstockError: of the first that failed; the others are cancelled.
        """
        try:
            async with asyncio.timeout(call.timeout_s):
                return await self._send(call)
        except TimeoutError as error:
            seconds = call.timeout_s or 0.0
            raise GenerationTimeoutError(
                f"{len(call.prompts.items)} prompts were not answered within timeout_seconds={seconds:g}; they have "
                "been cancelled",
                seconds=seconds,
            ) from error

    async def close(self) -> None:
        """Close the connections to single engines."""
        for client in self._direct.values():
            await client.close()

    async def _send(self, call: Call) -> tuple[list[Prompt], list[dict[str, Any]]]:
        prompts = [self._tokenized(prompt) for prompt in call.prompts.items]
        target = self._fleet if call.replica is None else await self._engine(call.replica)
        model = self._model if call.lora is None else await self._adapters.load(call.lora)

        async def one(prompt: Prompt, fields: Mapping[str, Any]) -> dict[str, Any]:
            body = {
                "model": model,
                "prompt": prompt.sent,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                **fields,
            }
            try:
                return await target.completion(body)
            except EngineHTTPError as error:
                if call.lora is None or error.status != NOT_FOUND:
                    raise
                self._adapters.forget(call.lora)
                await self._adapters.load(call.lora)
                return await target.completion(body)

        pairs = zip(prompts, call.bodies, strict=True)
        return prompts, await all_or_first_error(one(prompt, fields) for prompt, fields in pairs)

    def _tokenized(self, prompt: Prompt) -> Prompt:
        if prompt.ids is not None or prompt.text is None or self._tokenizer is None:
            return prompt
        # An empty text may have no ids; the engine's own error is the clearest.
        return Prompt(prompt.text, self._tokenizer.encode(prompt.text) or None)

    async def _engine(self, index: int) -> DataClient:
        engines = await self._fleet.engines(stats=False)
        if not 0 <= index < len(engines):
            raise UserError(f"there is no engine {index}; the fleet has engines 0 to {len(engines) - 1}")
        engine = engines[index]
        if engine.state not in SERVABLE:  # no router keeps a request from weights that it has not confirmed
            raise EngineDeadError(f"it is {engine.state}: {engine.reason}", engine=engine.name)
        if engine.url not in self._direct:
            self._direct[engine.url] = DataClient(
                engine.url,
                api_key=self._api_key,
                request_timeout_s=self._request_s,
                name=engine.name,
                routed=False,
            )
        return self._direct[engine.url]
