"""Engines of vLLM before 0.32 label nothing; their versions are as exact."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest

from penstock.plugin import compat


def test_a_core_that_labels_its_weights_is_asked() -> None:
    core = SimpleNamespace(label="0")
    core.set_weight_version = lambda label: setattr(core, "label", label)
    core.get_weight_version = lambda: core.label
    compat.label_core(core, 7)
    assert (core.label, compat.core_version(core)) == ("7", 7)


@pytest.mark.vllm
def test_the_version_of_one_that_does_not_is_kept_and_marked_among_its_outputs_to_every_client() -> None:
    core = SimpleNamespace(output_queue=queue.Queue(), addresses=SimpleNamespace(outputs=["a", "b"]))
    assert compat.core_version(core) == 0
    compat.label_core(core, 7)
    assert compat.core_version(core) == 7
    told = [core.output_queue.get_nowait() for _ in "ab"]
    assert [client for client, _ in told] == [0, 1]

    passed: list[str] = []
    versions = compat.TokenVersions()
    processor = SimpleNamespace(process_outputs=lambda outputs: passed.extend(o.request_id for o in outputs))
    versions.install(SimpleNamespace(output_processor=processor))
    processor.process_outputs(told[0][1].outputs)
    assert (versions.version, passed) == (7, [f"{compat.VERSION_MARK}7"])
    assert versions.of_newest(SimpleNamespace()) == 7
    assert versions.of_newest(SimpleNamespace(weight_version_starts=[("default", 0), ("3", 5)])) == 3


def test_the_older_name_of_a_pause_that_waits_is_understood() -> None:
    assert [compat.pause_mode("keep", wait) for wait in (None, False, True)] == ["keep", "keep", "wait"]
