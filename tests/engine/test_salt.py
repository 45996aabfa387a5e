"""Salts differ wherever KV must not be shared."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

from penstock.plugin.salt import resalt, salt_of


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


def test_a_request_keeps_its_callers_salt_and_the_part_that_does_not_change() -> None:
    hashed: list[str | None] = []
    request = SimpleNamespace(cache_salt="mine", lora_request=SimpleNamespace(lora_name="x"), block_hashes=["old"])
    request.update_block_hashes = lambda: (hashed.append(request.cache_salt), request.block_hashes.append("new"))
    resalt(request, adapter=1)
    resalt(request, weights=7)
    resalt(request, adapter=2)
    assert request.cache_salt == salt_of("mine", 7, "x", 2)
    assert request.block_hashes == ["new"]
    assert hashed == [salt_of("mine", None, "x", 1), salt_of("mine", 7, "x", 1), salt_of("mine", 7, "x", 2)]
    resalt(request, adapter=2)
    assert len(hashed) == 3, "nothing changed, and its blocks were hashed again"
