"""Text to token ids and back."""

# transformers ships partial types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError


class Tokenizer:
    """A Hugging Face tokenizer folder: the little of it that rollouts need. Build it with `load_tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a response, where there is one."""
        return self._tokenizer.eos_token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects around one."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; spaces before punctuation stay, so that the text is what the tokens spell."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Load a tokenizer from a folder (or a hub name that transformers has at hand).

    Raises:
        ConfigError: no tokenizer there, or transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds and is not a dependency of the core
    except ImportError as error:
        raise ConfigError("a tokenizer needs `pip install 'penstock[train]'`") from error
    if str(path).startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise ConfigError(f"no tokenizer in {path}: there is no such folder")
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(str(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in {path}: {' '.join(str(error).split())}") from error
