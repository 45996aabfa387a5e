from __future__ import annotations

import pytest

from chat_model import chat_tokenizer
from gateway_rig import Rig
from penstock.rollout.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def rig(tokenizer: Tokenizer) -> Rig:
    """A gateway over an engine that says what the test tells it."""
    return Rig(tokenizer)
