from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from char_tokenizer import ALPHABET, SPECIAL_TOKENS, save_char_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    assert save_char_tokenizer(folder, max_length=64) == len(ALPHABET) + len(SPECIAL_TOKENS) == 100
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text(alphabet=ALPHABET))
def test_text_survives_the_round_trip_one_token_a_character(tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.model_max_length == 64
    assert tokenizer.encode("é√") == [3, 3]
    assert tokenizer.decode([*tokenizer.encode("1 2"), 2, 0, 0], skip_special_tokens=True) == "1 2"
    assert tokenizer.encode("1<eos>")[-1] == 2


def test_a_chat_of_one_message_is_the_plain_prompt(tokenizer):
    chat = [{"role": "user", "content": "<3 1 2="}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert rendered == tokenizer.encode("<3 1 2=")
