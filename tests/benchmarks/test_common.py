from __future__ import annotations

import json

import _common as common
import pytest


@pytest.mark.parametrize(
    ("ours", "bar", "want", "ok"),
    [
        (97.0, 0.97, "at least", True),
        (96.9, 0.97, "at least", False),
        (60.0, 0.6, "at most", True),
        (61, 0.6, "at most", False),
    ],
)
def test_the_bar_is_for_the_ratio(ours: float, bar: float, want: str, *, ok: bool) -> None:
    row = common.compare("64 requests", ours, 100.0, bar=bar, want=want)
    assert row.ratio == pytest.approx(ours / 100)
    assert row.ok is ok


def test_report_prints_one_document_and_says_whether_all_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    good = common.compare("a", 1.0, 1.0, bar=0.97, want="at least")
    bad = common.compare("b", 0.5, 1.0, bar=0.97, want="at least")
    assert common.report("fleet_tax", [good]) == 0
    capsys.readouterr()
    assert common.report("fleet_tax", [good, bad]) == 1
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["benchmark", "machine", "versions", "rows"]
    assert [list(row) for row in document["rows"]] == [["case", "ours", "peer", "ratio", "bar", "ok"]] * 2
    assert [row["ok"] for row in document["rows"]] == [True, False]
    assert "python" in document["versions"]
