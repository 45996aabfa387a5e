"""Translates requests into prompts and parameters, and samples into nodes.

No code here waits for an engine or changes a session.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from penstock.checks import whole_number
from penstock.gateway.graph import Node, Place, Session, extended, new_id
from penstock.gateway.messages import (
    TOO_LONG,
    UNKNOWN_THREAD,
    ChatMessage,
    ChatRequest,
    GatewayError,
    Tool,
    ToolCall,
    merged,
    with_names,
)
from penstock.rollout.call_form import CallForm, after_reasoning, structured_outputs
from penstock.rollout.chat_template import ChatTemplate
from penstock.rollout.output_parser import OutputParser
from penstock.rollout.vllm_parser import VllmOutputParser
from penstock.types import Sample, SamplingParams

log = logging.getLogger(__name__)
Policy = Literal["extend", "faithful"]


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Options of a gateway's answers.

    Attributes:
        max_model_len: context length of the engines, in tokens.
        policy: `extend` keeps sampled tokens; `faithful` renders each prompt as the template would.
        sampling: parameters that replace the harness's own, such as `temperature`.
        max_tokens: maximum number of tokens per turn; None: as many as fit.
        force_calls: sample under a grammar if `tool_choice` forces a call.
    """

    model: str
    max_model_len: int
    policy: Policy = "extend"
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    max_sessions: int = 100_000
    force_calls: bool = True


class TurnCodec:
    """Translates the turns of one model. It keeps no state of a session, so it can be shared.

    Attributes:
        policy: policy in force.
        template_faults: reasons why the template cannot be extended.
    """

    def __init__(
        self, template: ChatTemplate, options: GatewayOptions, parser: OutputParser | VllmOutputParser
    ) -> None:
        self.template = template
        self.options = options
        self.template_faults = template.faults()
        self.policy: Policy = "faithful" if self.template_faults else options.policy
        self._parser = parser
        self._call_form = CallForm.of(template)
        self._most_id = max(template.tokenizer.huggingface.get_vocab().values())
        self._has_warned = False

    def prompt_of(self, session: Session, request: ChatRequest) -> tuple[Node | None, list[int], Place]:
        """Return the turn that a request extends, the ids to add, and its `Place`.

        The call changes no state. It is slow for long conversations, so a thread runs it.

        Raises:
            PromptTooLongError: the prompt is much longer than the context.
            GatewayError: it continues an unknown answer.
        """
        request = self.whole(session, request)
        given = with_names(merged(request.messages))
        place = session.find(given, request.tools)
        most = self.options.max_model_len
        if self.policy == "faithful":
            return (*self._rendered(place, request.tools), place)
        tools = [tool.for_template() for tool in request.tools]
        messages = [message.for_template() for message in place.messages]
        if (parent := place.parent) is not None:
            last = parent.sample.token_ids[-1:] or (-1,)
            suffix = self.template.suffix(messages[place.seen :], tools, last_id=last[0], most=most)
            if suffix is not None:
                return parent, suffix, place
            place = replace(place, cause="template")
        return None, self.template.render(messages, tools, most=most), place

    def whole(self, session: Session, request: ChatRequest) -> ChatRequest:
        """Return the request with its whole conversation, if it names an earlier answer."""
        if not request.previous:
            return request
        node = session.nodes.get(request.previous)
        if node is None:
            code = UNKNOWN_THREAD if request.thread else "not_found"
            raise GatewayError(f"session {session.id} has no response {request.previous!r}", status=404, code=code)
        if request.thread:
            messages = (*node.history(), *request.messages)
            return replace(request, messages=messages, tools=node.tools, previous="")
        before, given = node.history(), request.messages
        if request.has_instructions:
            before = (given[0], *(before[1:] if before[0].role == "system" else before))
            given = given[1:]
        return replace(request, messages=(*before, *given), previous="")

    def _rendered(self, place: Place, tools: Sequence[Tool]) -> tuple[Node | None, list[int]]:
        """Render the whole conversation. Find the latest turn whose tokens it begins with."""
        messages = [message.for_template() for message in place.messages]
        most = self.options.max_model_len
        ids = self.template.render(messages, [tool.for_template() for tool in tools], most=most)
        for node in reversed(place.parent.path() if place.parent else []):
            if node.length < len(ids) and ids[: node.length] == node.context():
                return node, ids[node.length :]
        return None, ids

    def params(self, request: ChatRequest, context: Sequence[int], sampling: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a turn.

        Args:
            request: request of the turn.
            context: prompt of the turn.
            sampling: parameters of the session, which override all others.

        Raises:
            GatewayError: the prompt fills the context, or a parameter is malformed.
        """
        room = self.options.max_model_len - len(context)
        if room < 1:
            raise GatewayError(
                f"the prompt has {len(context)} tokens, and the context length is {self.options.max_model_len}",
                code=TOO_LONG,
            )
        limits = [room] if self.options.max_tokens is None else [room, self.options.max_tokens]
        if request.max_tokens is not None:
            limits.append(whole_number(request.max_tokens, "the limit of tokens", least=1, error=GatewayError))
        if "max_tokens" in sampling:
            limits.append(sampling["max_tokens"])
        given = {**request.sampling, **self.options.sampling, **sampling}
        if request.forced and self.options.force_calls:
            given["structured_outputs"] = self._grammar(request, context)
        params = SamplingParams.of({**given, "max_tokens": min(limits), "detokenize": False})
        return replace(params, stop_token_ids=tuple({*params.stop_token_ids, *self.template.end_ids}))

    def _grammar(self, request: ChatRequest, context: Sequence[int]) -> dict[str, Any]:
        """Return the grammar that makes the engine call a forced tool after its reasoning."""
        if self._call_form is None:
            raise GatewayError("tool_choice cannot force a call: this model's chat template shows no calls as JSON")
        tools = {tool.name: tool.parameters for tool in request.tools if tool.name in request.forced}
        calls = self._call_form.grammar(tools, single=request.single_call)
        reasoning = self._parser.reasoning_before_calls(context)
        if reasoning is not None:
            calls = after_reasoning(calls, reasoning)
        return structured_outputs(calls)

    def node(
        self,
        parent: Node | None,
        added: Sequence[int],
        sample: Sample,
        request: ChatRequest,
        place: Place,
        params: SamplingParams,
        node_id: str,
    ) -> Node:
        """Return the node of a sample that extends `parent` by the tokens `added`."""
        prompt = added if parent is None else (*parent.sample.token_ids[-4:], *added)
        message = replace(self._message(prompt, sample, request.tools, params), minted=(node_id,))
        cause = place.cause or ("template" if place.parent is not parent else "")
        return Node(
            id=node_id,
            parent=parent,
            added=tuple(added),
            sample=sample,
            message=message,
            inputs=place.messages[parent.seen if parent else 0 :],
            seen=len(place.messages) + 1,
            digest=extended(place.digest, message),
            length=(parent.length if parent else 0) + len(added) + len(sample.token_ids),
            params=params,
            cause=cause,
            tools=parent.tools if parent is not None and parent.tools == request.tools else request.tools,
        )

    def _message(
        self, prompt: Sequence[int], sample: Sample, tools: Sequence[Tool], params: SamplingParams
    ) -> ChatMessage:
        ids = sample.token_ids
        if not self._has_warned and max(ids, default=0) > self._most_id:
            self._has_warned = True
            why = "such tokens have no text; is the tokenizer that of the engines' model?"
            log.warning("an engine sampled id %d, and the tokenizer's last is %d: %s", max(ids), self._most_id, why)
        if sample.finish_reason == "stop" and ids and ids[-1] in params.stop_token_ids:
            ids = ids[:-1]
        form = None if params.structured_outputs is None else self._call_form
        parsed = self._parser.parse(prompt, ids, {tool.name: tool.parameters for tool in tools}, form)
        text = parsed.text
        if sample.finish_reason == "stop":
            found = [at for stop in params.stop if (at := text.rfind(stop)) >= 0]
            text = text[: min(found)] if found else text
        custom = {tool.name for tool in tools if tool.custom}
        made = (ToolCall(new_id(), name, arguments) for name, arguments in parsed.calls)
        calls = tuple(call.as_custom() if call.name in custom else call for call in made)
        return ChatMessage("assistant", text, parsed.reasoning, calls)
