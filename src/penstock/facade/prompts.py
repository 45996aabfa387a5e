"""What callers of vLLM give as prompts: one or a batch, text or token ids, in the forms of `LLM.generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.errors import RequestError

FORMS = "a string, token ids, a TextPrompt or TokensPrompt, or a list of those"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text, ids, or both where the ids are those of the text."""

    text: str | None = None
    ids: Sequence[int] | None = None

    @property
    def sent(self) -> str | list[int]:
        """What an engine gets: the ids, where they are known."""
        return list(self.ids) if self.ids is not None else self.text or ""


@dataclass(frozen=True, slots=True)
class Prompts:
    """At least one prompt, and whether they were given as one (`batch` is false) or as a list."""

    items: tuple[Prompt, ...]
    batch: bool

    @classmethod
    def of(cls, prompts: Any, prompt_token_ids: Any) -> Prompts:
        """Read what was given for either argument of `generate`; a flat list of integers is one prompt.

        Raises:
            RequestError: both or neither, an empty list, or none of the known forms.
        """
        if (prompts is None) == (prompt_token_ids is None):
            which = "neither" if prompts is None else "both"
            raise RequestError(f"give exactly one of prompts and prompt_token_ids; got {which}")
        name = "prompts" if prompt_token_ids is None else "prompt_token_ids"
        given = prompts if prompt_token_ids is None else prompt_token_ids
        if isinstance(given, (str, Mapping)) or _is_ids(given):
            return cls((_one(given, name),), batch=False)
        if not isinstance(given, Sequence):
            raise RequestError(f"{name} must be {FORMS}, got {type(given).__name__}")
        items = cast("Sequence[Any]", given)
        if not items:
            raise RequestError(f"{name} is empty; give at least one prompt")
        return cls(tuple(_one(item, f"{name}[{i}]") for i, item in enumerate(items)), batch=True)


def _one(given: Any, where: str) -> Prompt:
    if isinstance(given, str):
        return Prompt(text=given)
    if _is_ids(given):
        return Prompt(ids=given)
    if isinstance(given, Mapping):
        fields = cast("Mapping[str, Any]", given)
        text, ids = fields.get("prompt"), fields.get("prompt_token_ids")
        unknown = sorted(name for name in fields if name not in {"prompt", "prompt_token_ids"} and fields[name])
        if unknown:
            raise RequestError(f"{where} has {', '.join(unknown)}, which engines are not sent; give text or token ids")
        if (_is_ids(ids) or ids is None) and (isinstance(text, str) or (text is None and ids is not None)):
            return Prompt(text=text, ids=ids)
    raise RequestError(f"{where} is {_short(given)}; it must be text, token ids, a TextPrompt or a TokensPrompt")


def _is_ids(given: Any) -> bool:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Sequence):
        return False
    ids = cast("Sequence[Any]", given)
    return len(ids) > 0 and all(type(i) is int for i in ids)


def _short(given: Any, most: int = 80) -> str:
    text = repr(given)
    return text if len(text) <= most else f"{text[:most]}..."
