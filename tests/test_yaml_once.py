"""Configurations: YAML in which a key is given once, and messages that show no more than they must."""

from __future__ import annotations

import pytest

from penstock.config import RunConfig, read_yaml
from penstock.errors import ConfigError
from penstock.options import validate


def test_a_key_that_overrides_what_is_merged_is_given_once():
    text = "base: &base {k: 0}\nx:\n  own: &own\n    <<: *base\n    k: 1\nc:\n  <<: *own\n"
    assert read_yaml(text) == {"base": {"k": 0}, "x": {"own": {"k": 1}}, "c": {"k": 1}}


def test_a_number_and_its_text_are_two_keys():
    assert read_yaml("1: a\n'1': b\n") == {1: "a", "1": "b"}


def test_a_key_that_is_given_twice_is_refused_wherever_it_is():
    with pytest.raises(ConfigError, match="config line 3: 'k' is given twice"):
        read_yaml("a:\n- k: 0\n  k: 1\n")


def test_a_check_across_keys_does_not_print_the_whole_config() -> None:
    with pytest.raises(ConfigError, match=r"train\.lora sends engines an adapter") as failed:
        validate(RunConfig, {"engine": {"model": "m", "enable_lora": False}, "train": {"lora": {}}})
    assert "'model'" not in str(failed.value)
    assert "got" not in str(failed.value)
