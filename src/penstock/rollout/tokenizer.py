"""Converts text to token ids and back."""

# transformers ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import check_on_hub
from penstock.errors import ConfigError, RequestError

_CHARACTERS = 32
"""Characters per allowed token beyond which a text is refused unread. English has four per token."""


class PromptTooLongError(RequestError):
    """A prompt has more tokens than the engine's context."""


class Tokenizer:
    """The part of a Hugging Face tokenizer that rollouts need. Build it with `load_tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def huggingface(self) -> Any:
        return self._tokenizer

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Return a prompt's token ids, with the special tokens that the model expects."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Spaces before punctuation stay, so the text matches the tokens."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode_exact(self, text: str, most: int | None = None) -> list[int]:
        """Return the token ids of the text, with none added. The text of a special token becomes its id.

        A text of far more than `most` tokens is refused by its length, because encoding takes about 300 bytes of memory
        per character. A text a few times longer than `most` may still pass.

        Raises:
            PromptTooLongError: the text has far more than `most` tokens.
        """
        if most is not None and len(text) > _CHARACTERS * most:
            limit = f"at most {_CHARACTERS * most} are read where {most} tokens fit"
            raise PromptTooLongError(f"the prompt has {len(text)} characters; {limit}")
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def token_id(self, token: str) -> int | None:
        """Return the id of a whole token, such as `<think>`, or None without such a token."""
        found = self._tokenizer.convert_tokens_to_ids(token)
        return found if isinstance(found, int) and found != self._tokenizer.unk_token_id else None

    def is_added(self, token_id: int) -> bool:
        """Whether the id is an added token, such as `<|im_end|>`, not one of the base."""
        return token_id in self._tokenizer.added_tokens_decoder

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        opening: bool = True,
    ) -> str:
        """Render a conversation with the model's chat template.

        Messages and tools are in OpenAI's form; arguments of tool calls are objects. `opening`: end with the beginning
        of the assistant's next message.

        Raises:
            RequestError: the template refuses the messages.
        """
        from jinja2 import TemplateError  # noqa: PLC0415 - comes with transformers' templates

        given = list(tools) or None
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=given, tokenize=False, add_generation_prompt=opening
            )
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        # Arguments of a call may hold half a surrogate pair, which is no valid text. It is escaped as JSON does.
        return text.encode("utf-8", "backslashreplace").decode()


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Load a tokenizer from a folder, or from a hub name that transformers can find.

    Raises:
        ConfigError: no tokenizer there, or transformers is not installed.
        UserError: the hub has no such name.
    """
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds and is not a dependency of the core
    except ImportError as error:
        raise ConfigError("a tokenizer needs `pip install 'penstock[train]'`") from error
    if not Path(path).expanduser().is_dir():
        if str(path).startswith(("/", ".", "~")) or str(path).count("/") > 1:
            raise ConfigError(f"no tokenizer in {path}: there is no such folder")
        check_on_hub(str(path), "model", "tokenizer_config.json", "config.json")
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(str(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {path}: {' '.join(str(error).split())}") from error
