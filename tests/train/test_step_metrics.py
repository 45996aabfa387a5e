"""Ages of the tokens that a step trains on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config import load_config
from penstock.errors import ConfigError, StateError
from penstock.rollout.generator import Trajectory
from penstock.train.ranks import address_towards
from penstock.train.step_metrics import (
    LogprobAlarm,
    batch_metrics,
    learner_metrics,
    replayed_share,
    token_ages,
)


def trajectory(versions: tuple[int, ...], loss_mask: tuple[int, ...]) -> Trajectory:
    n = len(versions)
    return Trajectory((1,), (2,) * n, loss_mask, (0.0,) * n, versions, 1.0, "length", "g")


def test_ages_are_of_the_policys_tokens_alone() -> None:
    assert token_ages([trajectory((3, 3, 4), (1, 0, 1)), trajectory((4,), (1,))], 5, 2) == {2: 1, 1: 2}


def test_figures_of_a_batch_count_episodes_not_their_leaves() -> None:
    leaf = trajectory((3,), (1,))
    figures = batch_metrics([*[replace(leaf, episode_id="a")] * 3, replace(leaf, episode_id="b", reward=0.0)], {0: 4})
    assert (figures["reward_mean"], figures["solved_share"], figures["samples"]) == (0.5, 0.5, 4)


def test_turns_that_add_up_to_one_solve_an_episode() -> None:
    """Ten turns of 0.1 are 0.9999999999999999 in floats."""
    figures = batch_metrics([replace(trajectory((3,), (1,)), reward=sum([0.1] * 10))], {0: 1})
    assert figures["solved_share"] == 1.0


def test_tokens_of_a_version_that_is_not_there_yet_are_refused() -> None:
    for age in (-1, 3):
        with pytest.raises(StateError, match=f"3 tokens are {age} versions old where 0 to 2 is possible"):
            token_ages([trajectory((5, 5, *[5 - age] * 3), (1,) * 5)], 5, 2)


def test_the_replayed_share_counts_the_policys_tokens_with_experts() -> None:
    plain, replayed = trajectory((3, 3), (1, 0)), trajectory((3, 3, 3), (1, 1, 1))
    assert replayed_share([plain, replace(replayed, routed_experts=[[[0]]] * 3)]) == 0.75
    assert replayed_share([plain]) == 0.0


def test_a_token_without_a_version_is_refused_however_stale_tokens_may_be() -> None:
    """Trainer version 1 less the mark of an unknown one would be 2, as of a token that is only old."""
    with pytest.raises(StateError, match="2 tokens have no weight version"):
        token_ages([trajectory((-1, -1, 1), (1, 1, 1))], 1, 2)


def test_a_run_that_cannot_compare_trainer_and_engine_says_so_once() -> None:
    alarm = LogprobAlarm(0.1)
    older = {"logprob_diff_staleness/1": 3.0, "logprob_diff_equal_tokens": 0.0}
    assert [alarm.warning(older) for _ in range(5)] == [None] * 5
    assert alarm.warning({"logprob_diff_staleness/0": 0.0}) is None  # a single step of an asynchronous run is usual
    warnings = [alarm.warning(older) for _ in range(30)]
    assert [step for step, warning in enumerate(warnings, 1) if warning] == [10]
    assert "train.logprob_alarm measures nothing" in (warnings[9] or "")
    assert "disagree by 0.5 nats" in (alarm.warning({"logprob_diff_staleness/0": 0.5}) or "")


def test_a_simulated_run_says_once_that_its_logprobs_are_invented() -> None:
    alarm = LogprobAlarm(0.1, simulated=True)
    assert "simulated engines" in (alarm.warning({"logprob_diff_staleness/0": 4.0}) or "")
    assert alarm.warning({"logprob_diff_staleness/0": 4.0}) is None
    learned = {"logprob_diff_max_equal": 4.0}
    assert "logprob_difference" not in learner_metrics(learned, simulated=True)
    assert learner_metrics(learned)["logprob_difference"] == 4.0


def test_a_ray_cluster_for_one_rank_is_refused_and_so_is_one_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="ray_address is for ranks beside the first"):
        load_config(None, ["engine.model=m", "train.ray_address=127.0.0.1:6379"])
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 127.0.0.1:1 \(train.ray_address\)"):
        address_towards("127.0.0.1:1")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("train.kl_coefficient=0.1", "train.kl_coefficient needs a second model"),
        ("fleet.weight_transport=cuda_ipc", "cuda_ipc shows engines weights that stay where they are"),
    ],
)
def test_what_several_ranks_cannot_do_does_not_start(given: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(None, ["engine.model=m", "train.ranks=2", given])
    assert reason in (load_config(None, ["engine.model=m", given]).refused_ranks(2) or ""), "ranks of torchrun"
