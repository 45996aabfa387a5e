"""VLLM's real front end (output processor, detokenizer, n-way requests) over a core that says given tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists

from penstock.plugin.hooks import RequestHooks
from penstock.plugin.progress import CURRENT, RequestProgress

EOS = 256
NATIVE = "weight_version" in inspect.signature(OutputProcessor.process_outputs).parameters
"""This vLLM labels tokens itself: not 0.26."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, so that a character may lie on both sides of a seam; and an end-of-sequence token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


class FrontEnd:
    """One engine. Its core makes, for sample `i`, the tokens of `script[i]`, all under the version in force.

    Where a request was taken up, it goes on in the script where the partial ends, as a model would.
    """

    def __init__(self, tokenizer: Any, script: Sequence[Sequence[int]], prompt: Sequence[int], *, labels: bool) -> None:
        self.processor = OutputProcessor(tokenizer, log_stats=False)
        self.engine_core = SimpleNamespace(add_request_async=self._to_core)
        self.output_processor = self.processor
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=100, get_vocab_size=lambda: 257))
        self.running: dict[str, EngineCoreRequest] = {}
        self.in_flight = RequestProgress()
        self.spans = RequestHooks()
        self.spans.install(self)
        self.version = 0
        self._labels = labels
        self._script = script
        self._prompt = list(prompt)
        self._asked: dict[str, int] = {}

    async def _to_core(self, request: EngineCoreRequest) -> None:
        self.running[request.request_id] = request
        self._asked[request.request_id] = 0

    async def submit(self, params: SamplingParams) -> RequestOutputCollector:
        """As AsyncLLM.add_request does it."""
        request = EngineCoreRequest("r", list(self._prompt), None, params, None, 0.0, None, None, None)
        request.external_req_id = "cmpl-name-0"
        queue = RequestOutputCollector(params.output_kind, "r")
        token = CURRENT.set(self.in_flight)
        try:
            if params.n == 1:
                self.processor.add_request(request, None, None, 0, queue)
                await self.engine_core.add_request_async(request)
                return queue
            parent, children = ParentRequest(request), []
            for i in range(params.n):
                child = copy(request)
                child.request_id, child.sampling_params = parent.get_child_info(i)
                children.append(child)
            for i, child in enumerate(children):
                self.processor.add_request(child, None, parent, i, queue)
                if not NATIVE:
                    await self.engine_core.add_request_async(child)
            for child in children if NATIVE else ():
                await self.engine_core.add_request_async(child)
        finally:
            CURRENT.reset(token)
        return queue

    def step(self) -> bool:
        """One token for every running sample; False where none runs."""
        outputs = [self._output(request_id, request) for request_id, request in tuple(self.running.items())]
        if not outputs:
            return False
        done = self._process(outputs)
        for request_id in done.reqs_to_abort:
            self.running.pop(request_id, None)
        return True

    def abort(self) -> None:
        """What a pause with mode `abort` does: the core ends each request with no new token."""
        outputs = [EngineCoreOutput(i, [], finish_reason=FinishReason.ABORT) for i in self.running]
        self.running.clear()
        self._process(outputs)

    def _process(self, outputs: list[EngineCoreOutput]) -> Any:
        self.spans.versions.version = self.version
        if not NATIVE:
            return self.processor.process_outputs(outputs)
        label = str(self.version) if self.version else "default"
        return self.processor.process_outputs(outputs, weight_version=label if self._labels else None)

    def _output(self, request_id: str, request: EngineCoreRequest) -> EngineCoreOutput:
        params = request.sampling_params
        assert params is not None
        assert request.prompt_token_ids is not None
        index = int(request_id.partition("_")[0]) if "_" in request_id else 0
        made = self._asked[request_id]
        position = len(request.prompt_token_ids) - len(self._prompt) + made
        token = self._script[index][position]
        self._asked[request_id] = made = made + 1
        finish = FinishReason.LENGTH if made >= params.max_tokens else None
        if token == EOS and made > params.min_tokens:
            finish = FinishReason.STOP
        if finish is not None:
            del self.running[request_id]
        logprobs = LogprobsLists(
            np.array([[token, (token + 1) % EOS]]), np.array([[-1.0 - position / 7, -9.0]]), np.array([1 + position])
        )
        return EngineCoreOutput(request_id, [token], new_logprobs=logprobs, finish_reason=finish)


class Reader:
    """What a client of one front end after another gets."""

    def __init__(self, n: int) -> None:
        self.choices: list[dict[str, Any]] = [{"text": "", "ids": [], "logprobs": []} for _ in range(n)]

    def read(self, queue: RequestOutputCollector, *, deltas: bool) -> None:
        """Take what there is."""
        output = queue.get_nowait()
        if output is None:
            return
        if isinstance(output, BaseException):
            raise output
        for one in output.outputs:
            choice = self.choices[one.index]
            if not deltas:
                choice.update(text="", ids=[], logprobs=[])
            choice["text"] += one.text
            choice["ids"] += one.token_ids
            choice["logprobs"] += [
                {i: (e.logprob, e.rank, e.decoded_token) for i, e in p.items()} for p in one.logprobs
            ]
            choice |= {
                "finish": one.finish_reason,
                "stop": one.stop_reason,
                "versions": getattr(one, "weight_versions", None),
            }
