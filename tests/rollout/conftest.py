from __future__ import annotations

import pytest

from chat_model import chat_tokenizer
from penstock.rollout.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("chat"))
