"""Ages of the tokens that a step trains on."""

from __future__ import annotations

import pytest

from penstock.errors import StateError
from penstock.train.step_metrics import token_ages
from penstock.types import Trajectory


def trajectory(versions: tuple[int, ...], loss_mask: tuple[int, ...]) -> Trajectory:
    n = len(versions)
    return Trajectory((1,), (2,) * n, loss_mask, (0.0,) * n, versions, 1.0, "length", "g")


def test_ages_are_of_the_policys_tokens_alone() -> None:
    assert token_ages([trajectory((3, 3, 4), (1, 0, 1)), trajectory((4,), (1,))], 5) == {2: 1, 1: 2}


def test_a_token_without_a_version_is_refused_however_stale_tokens_may_be() -> None:
    """Trainer version 1 less the mark of an unknown one would be 2, as of a token that is only old."""
    with pytest.raises(StateError, match="2 tokens have no weight version"):
        token_ages([trajectory((-1, -1, 1), (1, 1, 1))], 1)
