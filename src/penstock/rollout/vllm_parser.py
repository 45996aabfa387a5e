"""Reasoning and tool calls by vLLM's parsers, for models unknown to `OutputParser`.

vLLM's parsers read text. A marker spelled with other tokens, for example in a quotation, looks like the real marker
there. A hidden character is inserted into such text while they read it.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from penstock.errors import ConfigError
from penstock.rollout.call_form import CallForm, Reasoning
from penstock.rollout.output_parser import OutputParser, Parsed
from penstock.rollout.tokenizer import Tokenizer

log = logging.getLogger(__name__)
_HIDDEN = "\ufdd0"
"""A character that occurs in no text: Unicode reserves it for use within programs."""
_TAIL = 8
"""Tokens at the end of a prompt that are searched for the start or end of reasoning."""
_FAILURES = (ImportError, LookupError, AttributeError, RuntimeError, TypeError, ValueError)
"""Errors of vLLM's parsers on a tokenizer or a text of another model family."""


def output_parser(
    tokenizer: Tokenizer, *, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> OutputParser | VllmOutputParser:
    """Return vLLM's parsers of these names. Without a name, return Penstock's own parser.

    Raises:
        ConfigError: see `VllmOutputParser`.
    """
    if tool_parser or reasoning_parser:
        return VllmOutputParser(tokenizer, tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    if tokenizer.token_id("<tool_call>") is None:
        log.warning(
            "tool calls stay text: this tokenizer has no <tool_call>; name one of vLLM's parsers (--tool-parser, "
            "rollout.agent.tool_parser)"
        )
    return OutputParser(tokenizer)


class VllmOutputParser:
    """vLLM's parsers for one tokenizer: for tool calls, for reasoning, or for both.

    Their names are those of vLLM's `--tool-call-parser` and `--reasoning-parser`. Without one, its part stays text.

    Raises:
        ConfigError: vLLM is not installed, has no parser of that name, or the parser does not fit the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, *, tool_parser: str | None, reasoning_parser: str | None) -> None:
        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415
            from vllm.parser.parser_manager import ParserManager  # noqa: PLC0415
            from vllm.reasoning import ReasoningParserManager  # noqa: PLC0415
            from vllm.tokenizers.hf import get_cached_tokenizer  # noqa: PLC0415
            from vllm.tool_parsers import ToolParserManager  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                "--tool-parser and --reasoning-parser need vLLM beside the gateway: pip install 'penstock[vllm]' "
                f"({error})"
            ) from error
        _check_name("tool parser", tool_parser, ToolParserManager.list_registered())
        _check_name("reasoning parser", reasoning_parser, ReasoningParserManager.list_registered())
        self._tokenizer: Any = get_cached_tokenizer(tokenizer.huggingface)
        added: Mapping[int, Any] = self._tokenizer.added_tokens_decoder
        self._markers: dict[int, str] = {i: token.content for i, token in added.items()}
        self._special_ids = {i for i, token in added.items() if token.special}
        self._literal = re.compile("|".join(map(re.escape, self._markers.values())) or "(?!)")
        self._special = re.compile("|".join(re.escape(self._markers[i]) for i in self._special_ids) or "(?!)")
        self._request: Any = ChatCompletionRequest
        self._skips_special = True
        try:
            self._classes: dict[tuple[bool, bool], Any] = {
                (tools, reasoning): ParserManager.get_parser(
                    tool_parser_name=tool_parser if tools else None,
                    reasoning_parser_name=reasoning_parser if reasoning else None,
                    enable_auto_tools=True,
                )
                for tools in (False, True)
                for reasoning in (False, True)
            }
            parser, request = self._parser({"f": {"type": "object"}}, reasoning=True)
            self._skips_special = bool(parser.adjust_request(request).skip_special_tokens)
            marked = parser.reasoning_parser
            self._start, self._end = (marked.reasoning_start_str, marked.reasoning_end_str) if marked else (None, None)
            parser.parse("text", request, enable_auto_tools=True)
        except _FAILURES as error:
            names = ", ".join(name for name in (tool_parser, reasoning_parser) if name)
            raise ConfigError(f"vLLM's parser {names} does not fit this model's tokenizer: {error}") from error

    def parse(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        tools: Mapping[str, Mapping[str, Any]],
        forced: CallForm | None = None,
    ) -> Parsed:
        """Split a sample, with the same arguments as `OutputParser.parse`."""
        tail = self._tail(prompt_ids)
        reasoning = not (self._end and tail.endswith(self._end.strip()))
        opening = self._start if self._start and tail.endswith(self._start.strip()) else ""
        answer = self._text(token_ids)
        text = opening + answer
        try:
            parsed = self._read(text, tools if forced is None else {}, token_ids, reasoning=reasoning)
            if not tools.keys() >= {name for name, _ in parsed.calls}:  # a call of a tool that was not given
                parsed = self._read(text, {}, token_ids, reasoning=reasoning)
        except _FAILURES as error:
            log.warning("vLLM's parser failed, so the answer stays text: %r", error)
            parsed = Parsed(self._shown(answer), None, ())
        if forced is None:
            return parsed
        answer, calls = forced.read(parsed.text, tools)
        return Parsed(answer, parsed.reasoning, calls)

    def reasoning_before_calls(self, prompt_ids: Sequence[int]) -> Reasoning | None:
        """Return how reasoning is marked. Or None: there are no markers, or the prompt closed the reasoning."""
        tail = self._tail(prompt_ids)
        if not self._start or not self._end or tail.endswith(self._end.strip()):
            return None
        return Reasoning(self._start, self._end, is_open=tail.endswith(self._start.strip()))

    def _parser(self, tools: Mapping[str, Mapping[str, Any]], *, reasoning: bool) -> tuple[Any, Any]:
        """Return a parser for one answer, and the request from which it reads the tools."""
        functions = [{"type": "function", "function": {"name": n, "parameters": dict(p)}} for n, p in tools.items()]
        request = self._request(messages=[{"role": "user", "content": ""}], tools=functions or None)
        made = self._classes[bool(tools), reasoning]
        return (made(self._tokenizer, request.tools) if made else None), request

    def _read(
        self, text: str, tools: Mapping[str, Mapping[str, Any]], token_ids: Sequence[int], *, reasoning: bool
    ) -> Parsed:
        parser, request = self._parser(tools, reasoning=reasoning)
        if parser is None:
            return Parsed(self._shown(text), None, ())
        thought, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=list(token_ids)
        )
        found = tuple((call.name, call.arguments.replace(_HIDDEN, "").replace("\\ufdd0", "")) for call in calls or ())
        thought = None if thought is None else self._shown(thought).strip("\n")
        shown = self._shown(content or "")
        return Parsed(shown.strip("\n") if found or thought is not None else shown, thought, found)

    def _tail(self, prompt_ids: Sequence[int]) -> str:
        return self._decoded(prompt_ids[-_TAIL:], skip_special=False).rstrip()

    def _text(self, token_ids: Sequence[int]) -> str:
        """Decode a sample. A marker spelled with other tokens gets the hidden character."""
        text = self._decoded(token_ids, skip_special=self._skips_special)
        skipped = self._special_ids if self._skips_special else set[int]()
        shown = Counter(token for token in token_ids if token not in skipped)
        if all(text.count(marker) <= shown[token] for token, marker in self._markers.items()):
            return text
        parts: list[str] = []
        for is_marker, tokens in groupby(token_ids, self._markers.__contains__):
            part = self._decoded(list(tokens), skip_special=self._skips_special)
            parts.append(part if is_marker else self._literal.sub(lambda m: m[0][0] + _HIDDEN + m[0][1:], part))
        return "".join(parts)

    def _shown(self, text: str) -> str:
        return self._special.sub("", text).replace(_HIDDEN, "")

    def _decoded(self, ids: Sequence[int], *, skip_special: bool) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


def _check_name(kind: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise ConfigError(f"vLLM has no {kind} {name!r}; it has {', '.join(known)}")
