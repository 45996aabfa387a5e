"""A tokenizer of one token a character, for policies small enough to be trained on a CPU."""

# The tokenizers library ships no complete types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAD, BOS, EOS, UNK = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Their ids are 0 to 3."""

ALPHABET = "\n " + string.digits + string.ascii_letters + string.punctuation
"""Printable ASCII and the newline; any other character becomes `<unk>`."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The messages' text and nothing else: a chat of one message is that message as a plain prompt."""


def save_char_tokenizer(folder: Path, *, max_length: int, alphabet: str = ALPHABET) -> int:
    """Write `tokenizer.json` and `tokenizer_config.json`, as Hugging Face's fast tokenizers and vLLM load them.

    No special token is added to a prompt; a response ends with `<eos>`.

    Args:
        folder: of the model; it must exist.
        max_length: longest sequence of the model, in tokens.
        alphabet: the characters, in the order of their ids from 4 on.

    Returns:
        Size of the vocabulary.
    """
    tokens = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": UNK}
    return save_tokenizer(
        folder, SPECIAL_TOKENS, (), alphabet, {**tokens, "model_max_length": max_length, "chat_template": CHAT_TEMPLATE}
    )


def save_tokenizer(
    folder: Path, special: Sequence[str], markers: Sequence[str], alphabet: str, config: dict[str, Any]
) -> int:
    """Write a tokenizer of one token a character, behind those of `special` and `markers`; the unknown is `<unk>`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate((*special, *markers, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole, indent=2) + "\n")
    return len(vocabulary)
