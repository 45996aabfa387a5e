"""Follows requests through an engine's API server: the version of every token, progress, and resumed samples.

Four methods are wrapped, because vLLM (0.26 to 0.33) has no extension point (its issue 54443 asks for versions):

- `OutputProcessor.add_request` adds the samples of an HTTP request, and resumes a sample that was cut (`resume.py`).
- `OutputProcessor.process_outputs` reads the cores' marks, which say what made later tokens.
- `make_request_output` of each sample's state counts tokens, because vLLM calls it with every output.
- `EngineCoreClient.add_request_async` keeps samples that have already ended away from the core.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import json
import re
import time
from typing import Any

from penstock.plugin.progress import CURRENT, RequestProgress, SampleProgress, serve
from penstock.plugin.resume import emit, part_of, seed
from penstock.wire import GENERATE, PROGRESS_HEADER, RESUME_ARG, Notes, version_of_tokens

GENERATION = frozenset({GENERATE, "/v1/completions", "/v1/chat/completions"})
MARK = "penstock:"
"""Prefix of the id of an output that belongs to no request. JSON follows, which applies to later outputs."""
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
        self.versions.install(processor)

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
        part = None
        if RESUME_ARG in (request.sampling_params.extra_args or ()):
            part = part_of(request, request_index, 1 if parent_req is None else parent_req.n, self._model)
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


class TokenVersions:
    """The weights that make the tokens of one API server's engine.

    vLLM 0.32 labels every token. The marks of the cores (`marks.py`) say the rest.
    """

    def __init__(self) -> None:
        self.version = 0
        """The last version that was set, for an engine without labels."""
        self.adapters: dict[tuple[int, str], Notes] = {}
        """Labels of an adapter's tokens, by the core's number and the adapter's name."""
        self._kept: set[str] = set()
        """Requests with KV of older weights."""

    def install(self, processor: Any) -> None:
        processor.process_outputs = functools.partial(self._process, processor, processor.process_outputs)

    def _process(self, processor: Any, process_outputs: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        # A mark comes alone and belongs to no request. vLLM ignores it.
        if len(outputs) == 1 and outputs[0].request_id.startswith(MARK):
            said = json.loads(outputs[0].request_id.removeprefix(MARK))
            self.version = said.get("version", self.version)
            if "adapter" in said:
                self.adapters[said.pop("engine_index"), said["adapter"]] = said
            if "kept" in said:
                self._kept = {name for name in (*self._kept, *said["kept"]) if name in processor.request_states}
            self._kept.difference_update(said.get("anew", ()))
        return process_outputs(outputs, *args, **kwargs)

    def notes_of(self, state: Any, core: int) -> Notes | None:
        """Return further notes on a RequestState's newest tokens on this core."""
        notes = Notes(kv_kept=True) if state.request_id in self._kept else Notes()
        if (name := state.lora_name) is not None:
            notes |= self.adapters.get((core, name)) or {"adapter": name}
        return notes or None

    def of_newest(self, state: Any) -> int:
        labels = getattr(state, "weight_version_starts", None)
        return version_of_tokens(labels[-1][0]) if labels else self.version
