from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import TrainConfig
from penstock.train.grpo import ADVANTAGES, group_indices, leave_one_out

batches = st.lists(st.tuples(st.integers(0, 4), st.floats(-5, 5).map(lambda x: round(x, 2))), min_size=1, max_size=40)


def by_loops(name: str, groups: list[str], rewards: list[float]) -> list[float]:
    result = []
    for i, (group, reward) in enumerate(zip(groups, rewards, strict=True)):
        members = [r for g, r in zip(groups, rewards, strict=True) if g == group]
        others = [r for j, (g, r) in enumerate(zip(groups, rewards, strict=True)) if g == group and j != i]
        if len(set(members)) == 1:
            result.append(0.0)
        elif name == "leave_one_out":
            result.append(reward - statistics.fmean(others))
        else:
            centred = reward - statistics.fmean(members)
            result.append(centred / statistics.pstdev(members) if name == "group_norm" else centred)
    return result


def computed(name: str, groups: list[str], rewards: list[float]) -> torch.Tensor:
    return ADVANTAGES[name](torch.tensor(rewards, dtype=torch.float64), group_indices(groups))


def test_every_advantage_of_the_config_is_here():
    assert set(ADVANTAGES) == set(TrainConfig.model_fields["advantage"].annotation.__args__)


@given(name=st.sampled_from(sorted(ADVANTAGES)), batch=batches)
def test_they_are_those_of_the_loops(name: str, batch: list[tuple[int, float]]):
    groups, rewards = [f"g{g}" for g, _ in batch], [r for _, r in batch]
    want = torch.tensor(by_loops(name, groups, rewards), dtype=torch.float64)
    torch.testing.assert_close(computed(name, groups, rewards), want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_group_of_equal_rewards_is_exactly_zero(name: str, dtype: torch.dtype):
    # The mean of seven times 0.1 is not 0.1 in floats; the difference must not be blown up to +-1.
    rewards_N = torch.tensor([0.1] * 7 + [0.0, 1.0], dtype=dtype)
    advantages_N = ADVANTAGES[name](rewards_N, group_indices(["a"] * 7 + ["b"] * 2))
    assert (advantages_N[:7] == 0).all()
    assert advantages_N[7] < 0 < advantages_N[8]
    assert ADVANTAGES[name](torch.tensor([3.0]), group_indices(["alone"])).item() == 0


@pytest.mark.parametrize("name", ADVANTAGES)
def test_rewards_that_differ_by_rounding_alone_teach_nothing(name: str):
    assert computed(name, ["a"] * 4, [0.1 + 0.2, 0.3, 0.3, 0.3]).tolist() == [0.0] * 4
    assert computed(name, ["a"] * 2, [1e6 + 1e-3, 1e6]).tolist() == [0.0] * 2
    assert computed(name, ["a"] * 2, [1e-4, 0.0])[0] > 0, "small, and no rounding"


@given(name=st.sampled_from(sorted(ADVANTAGES)), batch=batches, data=st.data())
def test_more_leaves_of_an_episode_change_no_advantage(name: str, batch: list[tuple[int, float]], data: st.DataObject):
    leaves = data.draw(st.lists(st.integers(1, 5), min_size=len(batch), max_size=len(batch)))
    rows = [i for i, n in enumerate(leaves) for _ in range(n)]
    groups, rewards = [f"g{g}" for g, _ in batch], torch.tensor([r for _, r in batch], dtype=torch.float64)
    found = ADVANTAGES[name](rewards[rows], group_indices([groups[i] for i in rows]), torch.tensor(rows))
    torch.testing.assert_close(found, computed(name, groups, rewards.tolist())[rows], rtol=1e-6, atol=1e-9)


def test_leaving_one_out_leaves_out_its_whole_episode():
    rewards, groups = torch.tensor([1.0, 0.0, 2.0]), torch.zeros(3, dtype=torch.long)
    assert leave_one_out(rewards, groups, torch.tensor([0, 0, 1])).tolist() == [-1.0, -2.0, 1.5]
