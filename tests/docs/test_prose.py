"""README, ARCHITECTURE and docs/ are short, plain sentences; README and ARCHITECTURE are short themselves."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MEDIAN_WORDS, MOST_WORDS = 15, 35
PAGE_WORDS = {"README.md": 600, "ARCHITECTURE.md": 1300}
"""Longest these may be, as `wc -w` counts."""
ALL_WORDS = 10_000
"""The same of docs/ together, without code and without the pages of figures, of wire formats, of file formats and of
directives that take the text from docstrings."""
_FORMATS_AND_FIGURES = ("benchmarks", "protocol", "reference/api", "reference/run-folder", "scenarios", "tinker")
NOT_COUNTED = tuple(f"docs/{name}.md" for name in _FORMATS_AND_FIGURES)
BAD_OPENING = re.compile(r"[^\w`]*(?:Who|What|Of|That)\b")
BAD_WORD = re.compile(r"\b(?:somebody|nobody|whoever|told|anew|besides|VLLM)\b")
NOT_PROSE = re.compile(r"\||#|:::|--8<--|<!--|-{3,}$|\[[^\]]+\]: ")
"""Beginnings of lines that are tables, headings, directives and link targets."""
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')*]*\s+(?=[\"'(*]*[A-Z0-9`]|vLLM)")


def sentences(text: str) -> list[str]:
    """Sentences of a Markdown text without code, tables, headings and link targets. A list item ends its sentence."""
    text = FENCED.sub("\n", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    paragraphs, lines = [""], text.splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        is_code = line.startswith("    ") and (not before.strip() or before.startswith("    "))
        if not line.strip() or NOT_PROSE.match(line) or is_code:
            paragraphs.append("")
        elif ITEM.match(line):
            paragraphs.append(ITEM.sub("", line, count=1))
        else:
            paragraphs[-1] += f" {line.strip()}"
    found = [part.strip(" *[]") for paragraph in paragraphs for part in SENTENCE_END.split(paragraph)]
    return [sentence for sentence in found if re.search(r"\w", sentence)]


def words(text: str) -> int:
    """Words of a text; code in backquotes counts as well, the bars of tables do not."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def faults(text: str) -> list[str]:
    """What is wrong with the sentences of a text."""
    found = sentences(text)
    wrong = [f"{words(s)} words: {s}" for s in found if words(s) > MOST_WORDS]
    wrong += [f"opening: {s}" for s in found if BAD_OPENING.match(s) and not s.endswith("?")]
    wrong += [f"word {match[0]!r}: {s}" for s in found if (match := BAD_WORD.search(re.sub(r"`[^`]*`", "", s)))]
    if found and (median := statistics.median(map(words, found))) > MEDIAN_WORDS:
        wrong.append(f"the median sentence has {median:g} words")
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short_and_plain(document: Path) -> None:
    assert not faults(document.read_text())


@pytest.mark.parametrize("name", PAGE_WORDS)
def test_first_pages_are_short(name: str) -> None:
    assert len((ROOT / name).read_text().split()) <= PAGE_WORDS[name]


def test_docs_are_short_together() -> None:
    counted = [path for path in (ROOT / "docs").rglob("*.md") if str(path.relative_to(ROOT)) not in NOT_COUNTED]
    assert sum(words(FENCED.sub("", path.read_text())) for path in counted) <= ALL_WORDS
