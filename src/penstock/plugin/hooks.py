"""Follows requests through an engine's API server: the version of every token, progress, and resumed samples.

Three methods are wrapped, because vLLM (0.26 to 0.33) has no extension point (its issue 54443 asks for versions):

- `OutputProcessor.add_request` adds the samples of an HTTP request, and resumes a sample that was cut.
- `make_request_output` of each sample's state counts tokens, because vLLM calls it with every output.
- `EngineCoreClient.add_request_async` keeps samples that have already ended away from the core.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import copy
import functools
import re
import time
from typing import Any

from penstock.errors import RequestError
from penstock.plugin.progress import CURRENT, RequestProgress, SampleProgress, serve
from penstock.plugin.resume import check_part, parts_of
from penstock.plugin.token_versions import TokenVersions, seed_versions
from penstock.wire import GENERATE, PROGRESS_HEADER, RESUME_ARG

GENERATION = frozenset({GENERATE, "/v1/completions", "/v1/chat/completions"})
BEAM = re.compile("-[0-9a-f]{16}-beam-[0-9]+$")
"""Ids of vLLM's beam search, which makes a request per token and beam. No versions or progress are reported."""


class RequestHooks:
    """The requests in flight on one API server."""

    def __init__(self) -> None:
        self.versions = TokenVersions()
        self._installed = False
        self.adapters_used: dict[str, float] = {}
        """Time of the last request per adapter, by `time.monotonic`."""
        self._model: Any = None
        self._in_flight: set[RequestProgress] = set()

    def install(self, engine: Any) -> None:
        if self._installed:
            return
        self._installed = True
        processor, core = engine.output_processor, engine.engine_core
        self._model = engine.vllm_config.model_config
        processor.add_request = functools.partial(self._add, processor, processor.add_request)
        core.add_request_async = functools.partial(self._add_to_core, processor, core, core.add_request_async)
        self.versions.install(engine)

    async def pass_on(self, app: Any, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Serve a request for vLLM, and report its progress (`progress.py`)."""
        posted = scope["path"] if scope["type"] == "http" and scope["method"] == "POST" else None
        if posted not in GENERATION:
            await app(scope, receive, send)
            return
        self.install(scope["app"].state.engine_client)
        wanted = dict(scope["headers"]).get(PROGRESS_HEADER.lower().encode())
        in_lines = wanted is not None and wanted.isdigit()
        request = RequestProgress(int(wanted or 0) if in_lines else 0, streamed=in_lines and posted == GENERATE)
        self._in_flight.add(request)
        token = CURRENT.set(request)
        try:
            await serve(app, scope, receive, send, request, wanted)
        finally:
            CURRENT.reset(token)
            self._in_flight.discard(request)

    def note_aborts(self, names: frozenset[str] | None) -> None:
        """Note that a client asked to end these requests; None: all requests."""
        for request in self._in_flight:
            request.asked |= names is None or not names.isdisjoint(request.names)

    def _add(
        self, processor: Any, add_request: Any, request: Any, prompt: Any, parent_req: Any = None,
        request_index: int = 0, queue: Any = None,
    ) -> None:  # fmt: skip
        in_flight = CURRENT.get()
        if request.lora_request is not None:
            self.adapters_used[request.lora_request.lora_name] = time.monotonic()
        if in_flight is None or request.sampling_params is None or BEAM.search(request.external_req_id):
            add_request(request, prompt, parent_req, request_index, queue)
            return
        samples = 1 if parent_req is None else parent_req.n
        part = part_of(request, request_index, samples, self._model)
        add_request(request, prompt, parent_req, request_index, queue)
        state = processor.request_states[request.request_id]
        sample = in_flight.add(request, state)
        if part is not None:
            seed(request, state, part)
            sample.begin(part["versions"])
            if part["finish"] is not None:
                in_flight.to_finish[request.request_id] = (sample, part)
            else:
                emit(state, part)
        state.make_request_output = functools.partial(self._count, in_flight, sample, state.make_request_output)

    def _count(
        self, in_flight: RequestProgress, sample: SampleProgress, make_request_output: Any,
        new_token_ids: Any, pooling_output: Any, finish_reason: Any, stop_reason: Any, *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        made_by = self.versions.of_newest(sample.state), self.versions.notes_of(sample.state, sample.core)
        in_flight.count(sample, made_by, finish_reason, stop_reason)
        output = make_request_output(new_token_ids, pooling_output, finish_reason, stop_reason, *args, **kwargs)
        return in_flight.lighten(output)

    async def _add_to_core(self, processor: Any, core: Any, add_request_async: Any, request: Any) -> None:
        in_flight = CURRENT.get()
        if in_flight is None or request.request_id not in in_flight.samples:
            await add_request_async(request)
            return
        sample = in_flight.samples[request.request_id]
        state = sample.state
        if request.request_id not in in_flight.to_finish:
            await add_request_async(request)
            chosen = getattr(core, "reqs_in_flight", {}).get(request.request_id)  # for data-parallel replicas
            sample.core = 0 if chosen is None else int.from_bytes(chosen, "little")
        parent = state.parent_req
        if parent is not None and state.request_index < parent.n - 1:
            return
        # vLLM now has all samples of this prompt, so it does not take an ended sample for the last one.
        for request_id, (sample, part) in tuple(in_flight.to_finish.items()):
            if sample.state.parent_req is parent and (parent is not None or sample.state is state):
                del in_flight.to_finish[request_id]
                emit(sample.state, part)
                processor._finish_request(sample.state)  # noqa: SLF001 - as vLLM does at the end of a request


# --- Resumed samples -------------------------------------------------------------------------------------------------
#
# A sample that another engine or an abort left continues here, with the answer of one undisturbed request. The core
# gets prompt and partial as its prompt, and the remaining limits. vLLM's state of the request in the API server
# (detokenizer, stop strings, logprobs, versions) is fed the partial.


def part_of(request: Any, index: int, samples: int, config: Any) -> dict[str, Any] | None:
    """Extract a sample's earlier progress from an EngineCoreRequest's arguments.

    Raises:
        VLLMValidationError: it is inconsistent or does not fit this model. vLLM answers 400; its core would die of it.
    """
    params = request.sampling_params
    extra = getattr(params, "extra_args", None)
    if not extra or RESUME_ARG not in extra:
        return None
    # Copied, because the samples of one request may share their parameters.
    request.sampling_params = params = copy.copy(params)
    params.extra_args = {key: value for key, value in extra.items() if key != RESUME_ARG} or None
    try:
        return _checked(extra[RESUME_ARG], request, index, samples, config)
    except RequestError as error:
        from vllm.exceptions import VLLMValidationError  # noqa: PLC0415 - only inside vLLM

        raise VLLMValidationError(str(error)) from error


def _checked(text: Any, request: Any, index: int, samples: int, config: Any) -> dict[str, Any] | None:
    params, prompt = request.sampling_params, request.prompt_token_ids
    if prompt is None:
        raise RequestError(f"{RESUME_ARG}: the prompt is no list of token ids")
    parts = parts_of(text, samples)
    fits = {
        "room": min(config.max_model_len - len(prompt), params.max_tokens),
        "vocab_size": config.get_vocab_size(),
        "logprobs": getattr(params, "num_logprobs", params.logprobs) is not None,
    }
    # The first sample checks all parts. Otherwise earlier samples would continue after a later one is refused.
    for part in parts if index == 0 else ():
        check_part(part, **fits)
    if index >= len(parts) or not parts[index]["ids"]:
        return None
    return {**parts[index], "logprobs": check_part(parts[index], **fits)}


def seed(request: Any, state: Any, part: dict[str, Any]) -> None:
    """Give the partial to the core's request as prompt, to the state as output."""
    from vllm.logprobs import Logprob  # noqa: PLC0415 - only inside vLLM

    ids = part["ids"]
    params = request.sampling_params
    params.max_tokens = max(1, params.max_tokens - len(ids))
    params.min_tokens = max(0, params.min_tokens - len(ids))
    request.prompt_token_ids = [*request.prompt_token_ids, *ids]
    by_token = part["finish"] == "stop" and not isinstance(part["stop_reason"], str)
    for i, token in enumerate(ids):
        state.detokenizer.update([token], by_token and i == len(ids) - 1)
    processor = state.logprobs_processor
    if processor.logprobs is not None:
        for position in part["logprobs"]:
            processor.logprobs.append({token: Logprob(value, rank, text) for token, value, rank, text in position})
            processor.cumulative_logprob += position[0][1]
    seed_versions(state, part["versions"])


def emit(state: Any, part: dict[str, Any]) -> None:
    """Send the partial to the request's reader: at once in a stream, else as part of the whole answer."""
    from vllm.v1.engine import FINISH_REASON_STRINGS, FinishReason  # noqa: PLC0415 - only inside vLLM

    finish = part["finish"]
    reason = None if finish is None else FinishReason(FINISH_REASON_STRINGS.index(finish))
    output = state.make_request_output(list(part["ids"]), None, reason, part["stop_reason"])
    if output is not None:
        state.queue.put(output)
