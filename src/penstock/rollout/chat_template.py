"""A chat template in token space: renders conversations and suffixes of samples.

A whole conversation is rendered once. Sampled tokens are never rendered again. Later, only new messages are rendered,
as the template writes them after an assistant's message. To find that text, the new messages are rendered after an
assistant's message that holds a mark; the text behind the mark is the suffix. This works for any template.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from secrets import token_hex
from typing import Any

from penstock.errors import ConfigError, RequestError
from penstock.rollout.tokenizer import Tokenizer

Message = Mapping[str, Any]
_MARK = "penstock7mark3"
_CALLED = "penstock7called3"
_TEXT = "one {2}\nthree."
"""Text of the histories on which a template is tried."""
_ID_SIZES = (24, 9)
"""Lengths of call ids: ours, and the only one that Mistral's templates accept."""


class ChatTemplate:
    """Renders conversations of one model. It keeps no state of a conversation, so it can be shared.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.has_chat_template:
            raise ConfigError("the tokenizer has no chat template, so conversations cannot be rendered")
        self.tokenizer = tokenizer
        self._repeats: dict[tuple[str, ...], bool] = {}
        self._id_size = next((size for size in _ID_SIZES if self._takes_ids(size)), _ID_SIZES[0])
        self._closing = self.after((_MARK,), [_question(), {"role": "assistant", "content": _MARK}], (), opening=False)
        self._closing_ids = tokenizer.encode_exact(self._closing)
        self._end_id = self._find_end()

    def _find_end(self) -> int | None:
        """Return the added token that ends an assistant's message. Skip white space, which answers contain too."""
        for token in self._closing_ids:
            if self.tokenizer.decode([token], skip_special_tokens=False).strip():
                return token if self.tokenizer.is_added(token) else None
        return None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant's message. They are the EOS and the added token that the template writes."""
        ids = (self.tokenizer.eos_token_id, self._end_id)
        return tuple(dict.fromkeys(token for token in ids if token is not None))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, most: int | None = None
    ) -> list[int]:
        """Return the ids of a conversation, up to the opening of the next message (`most`: see `encode_exact`)."""
        return self.tokenizer.encode_exact(self._chat(messages, tools, opening=True), most)

    def suffix(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, last_id: int, most: int | None = None
    ) -> list[int] | None:
        """Return the ids that new messages add after a sample, up to the next opening.

        If the sample's `last_id` does not end a message (a cut-off sample), the suffix adds the end. None: the template
        allows no suffix, and the whole conversation must be rendered.
        """
        text = self._suffix_text(messages, tools)
        if text is None or (tools and self._repeats_tools(messages)):
            return None
        ids = self.tokenizer.encode_exact(self._closing + text, most)
        return ids[ids.index(last_id) + 1 :] if last_id == self._end_id else ids

    def faults(self) -> list[str]:
        """Try the suffix on histories of several shapes; return where it differs from the whole rendering.

        A template with faults cannot be extended, for example one that renders a message by what follows it.
        """
        found: list[str] = []
        last_id = -1 if self._end_id is None else self._end_id
        for has_system, earlier, calls, has_tools in itertools.product((0, 1), (0, 2), (0, 1, 2), (0, 1)):
            history = _history(has_system, earlier, calls)
            new = [_result(call["id"], "add", f"{_TEXT} 3") for call in history[-1].get("tool_calls", ())]
            new, tools = new or [{"role": "user", "content": f"{_TEXT} 4"}], [_tool("look_up")] * has_tools
            try:
                whole, suffix = self.render([*history, *new], tools), self.suffix(new, tools, last_id=last_id)
            except RequestError:  # the model does not have one of these roles
                continue
            if tools and self._repeats_tools(new):  # such a turn is rendered whole
                continue
            if suffix is None or whole[-len(suffix) :] != suffix:
                found.append(f"{new[0]['role']} messages after {len(history)} others are not rendered as a suffix")
        return found

    def _chat(self, messages: Sequence[Message], tools: Sequence[Message], *, opening: bool) -> str:
        shown = [_with_ids(message, self._id_size) for message in messages]
        return self.tokenizer.chat(shown, tools, opening=opening)

    def _takes_ids(self, size: int) -> bool:
        """Whether the template accepts call ids of `size` characters."""
        result = _result("0" * size, "f", "x")
        called = {"role": "assistant", "content": "x", "tool_calls": [_call(result, "x")]}
        try:
            self.tokenizer.chat([_question(), called, result])
        except RequestError:
            return False
        return True

    def _repeats_tools(self, messages: Sequence[Message]) -> bool:
        """Whether new messages of these roles repeat the tools. Mistral's template does so for user messages."""
        roles = tuple(sorted({str(message.get("role")) for message in messages}, key=lambda role: role != "tool"))
        if roles not in self._repeats:
            new = [_result("0" * 9, "f", "x") if role == "tool" else {"role": role, "content": "x"} for role in roles]
            self._repeats[roles] = _MARK in (self._suffix_text(new, [_tool(_MARK)]) or "")
        return self._repeats[roles]

    def _suffix_text(self, messages: Sequence[Message], tools: Sequence[Message]) -> str | None:
        """Return the text from the previous message's end to the next opening, or None."""
        leading = next((i for i, m in enumerate(messages) if m.get("role") != "tool"), len(messages))
        mark, called = _marks_outside(f"{messages} {tools}")
        calls = [_call(message, called if i == leading - 1 else "x") for i, message in enumerate(messages[:leading])]
        before: dict[str, Any] = {"role": "assistant", "content": mark, **({"tool_calls": calls} if calls else {})}
        context = [_question(), before]
        try:
            closing = self.after((called, mark), context, tools, opening=False) if calls else self._closing
            text = self.after((called, mark) if calls else (mark,), [*context, *messages], tools, opening=True)
        except ValueError:  # the template omitted the mark, or refuses the messages here
            return None
        return text[len(closing) :] if text.startswith(closing) else None

    def after(
        self, marks: Sequence[str], messages: Sequence[Message], tools: Sequence[Message] = (), *, opening: bool
    ) -> str:
        """Return the text behind the first mark that the template shows. ValueError: it shows no mark."""
        text = self._chat(messages, tools, opening=opening)
        mark = marks[0] if marks[0] in text else marks[-1]  # some templates show no calls
        return text[text.rindex(mark) + len(mark) :]


def _marks_outside(shown: str) -> tuple[str, str]:
    """Return two marks that do not occur in `shown`."""
    mark, called = _MARK, _CALLED
    while mark in shown or called in shown:
        mark, called = f"{_MARK}{token_hex(4)}", f"{_CALLED}{token_hex(4)}"
    return mark, called


def _question() -> dict[str, Any]:
    return {"role": "user", "content": "x"}


def _call(message: Message, argument: str) -> dict[str, Any]:
    function = {"name": str(message.get("name") or "f"), "arguments": {"x": argument}}
    return {"id": str(message.get("tool_call_id") or "call00000"), "type": "function", "function": function}


def _result(call_id: str, name: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": name}


def _tool(name: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


def _with_ids(message: Message, size: int) -> Message:
    """Return a message whose call ids the template accepts."""
    if size == _ID_SIZES[0] or not ("tool_calls" in message or "tool_call_id" in message):
        return message
    made = dict(message)
    if "tool_call_id" in made:
        made["tool_call_id"] = _short(str(made["tool_call_id"]), size)
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [{**call, "id": _short(str(call.get("id")), size)} for call in calls]
    return made


def _short(call_id: str, size: int) -> str:
    fits = re.fullmatch(rf"[A-Za-z0-9]{{{size}}}", call_id)
    return call_id if fits else hashlib.blake2b(call_id.encode()).hexdigest()[:size]


def _history(has_system: int, earlier: int, calls: int) -> list[dict[str, Any]]:
    """Return a conversation that ends with an assistant's message with `calls`, after `earlier` exchanges."""
    history: list[dict[str, Any]] = [{"role": "system", "content": _TEXT}] * has_system
    for number in range(earlier + 1):
        history += [{"role": "user", "content": f"{number} {_TEXT}"}, {"role": "assistant", "content": _TEXT}]
    if calls:
        made = [_call({"name": "add", "tool_call_id": f"{number:024x}"}, _TEXT) for number in range(calls)]
        history[-1] = {**history[-1], "tool_calls": made}
    return history
