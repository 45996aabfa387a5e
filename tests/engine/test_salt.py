"""Salts differ wherever KV must not be shared."""

from __future__ import annotations

from itertools import product

from penstock.plugin.kept_kv import salt_of


def test_each_argument_separates() -> None:
    given = list(product((None, "", "a", '["a"]'), (None, 0, 1), (None, "x", "y/../z"), (None, 1, 11)))
    salted = [one for one in given if one[1] is not None or one[3] is not None]
    salts = {one: salt_of(*one) for one in given}
    assert len({salts[one] for one in salted}) == len(salted)
    assert not {salts[one] for one in salted} & {caller for caller, *_ in given}
    assert all((salts[one] or "").isalnum() for one in salted), "vLLM refuses @, /, backslash and NUL"


def test_without_versions_the_callers_salt_stays() -> None:
    assert salt_of("mine", None, "x", None) == "mine"
    assert salt_of(None, None, None, None) is None
