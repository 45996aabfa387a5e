"""A name on the hub is asked for once: its own libraries try for a minute."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from penstock.config import check_on_hub
from penstock.errors import UserError


@pytest.mark.parametrize(
    ("name", "offline", "says"),
    [
        ("some/model", False, "the Hugging Face hub gives none \\(.*Connection refused"),
        ("some/model", True, "unset the `HF_HUB_OFFLINE`"),
        ("not a name", False, "Repo id must use alphanumeric"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused_at_once(
    name: str, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, offline: bool
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(UserError, match=says):
        check_on_hub(name, "model")
    assert "etry" not in caplog.text
