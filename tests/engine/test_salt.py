"""Salts differ wherever KV must not be shared."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

from penstock.plugin.kept_kv import KeptKV, salt_of


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


def test_a_request_is_salted_as_it_looks_for_kv_and_keeps_its_callers_salt() -> None:
    loads: dict[str, int | None] = {"x": 1}
    looked: list[str | None] = []

    def look_up(request: Any) -> None:
        looked.append(request.cache_salt)

    def preprocess(request: Any) -> Any:
        assert request.cache_salt == salt_of("mine", None, "x", 1), "before its blocks are hashed"
        return SimpleNamespace(**vars(request), block_hashes=["old"], update_block_hashes=lambda: None), 0

    manager = SimpleNamespace(get_computed_blocks=look_up)
    scheduler = SimpleNamespace(kv_cache_manager=manager, update_from_output=None)
    core: Any = SimpleNamespace(scheduler=scheduler, preprocess_add_request=preprocess)
    kv = KeptKV(core, lambda lora: loads[lora.lora_name])
    kv.salt()
    kv.salt()
    tuned = SimpleNamespace(lora_name="x")
    request, _ = core.preprocess_add_request(SimpleNamespace(cache_salt="mine", lora_request=tuned))
    manager.get_computed_blocks(request)
    assert request.block_hashes == ["old"], "nothing has changed since"
    kv.version = 7
    manager.get_computed_blocks(request)
    assert request.block_hashes == []
    loads["x"] = 2
    manager.get_computed_blocks(request)
    assert looked == [salt_of("mine", None, "x", 1), salt_of("mine", 7, "x", 1), salt_of("mine", 7, "x", 2)]
