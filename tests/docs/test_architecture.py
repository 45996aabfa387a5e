"""ARCHITECTURE.md is true to the code: what each room imports, and what the core does without."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "penstock"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
HEAVY = ("torch", "vllm", "ray", "transformers", "matplotlib")


def named(text: str) -> list[str]:
    """Files and rooms in backquotes."""
    return re.findall(r"`([\w/]+(?:\.py|/))`", text)


def table() -> dict[str, list[str]]:
    """Each room (a folder with a slash at its end, or a file of the base) to what it may import besides the base."""
    section = PAGE.partition("## Rooms")[2].partition("## Files")[0]
    rows = re.findall(r"^\| (`.+?) \| .+ \| (.+) \|$", section, re.MULTILINE)
    return {room: named(imports) for rooms, imports in rows for room in named(rooms)}


def files() -> list[str]:
    """Every file but those of the package itself (public names, `python -m penstock`), by its path in the package."""
    found = (file.relative_to(SOURCE).as_posix() for file in SOURCE.rglob("*.py"))
    return sorted(name for name in found if name not in {"__init__.py", "__main__.py"})


def room_of(file: str, rooms: list[str]) -> str:
    return max((room for room in rooms if file.startswith(room)), key=len)


def imports(file: str) -> Iterator[str]:
    """The files of ours that a file imports anywhere in it; names of the package itself are the base's."""
    for node in ast.walk(ast.parse((SOURCE / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if not name.startswith("penstock."):
                continue
            path = name.removeprefix("penstock.").replace(".", "/")
            if (SOURCE / f"{path}.py").is_file():
                yield f"{path}.py"
            elif (SOURCE / path).is_dir():
                yield f"{path}/__init__.py"


def test_rooms_import_what_the_table_says_and_nothing_else() -> None:
    rooms = table()
    base = {room for room in rooms if room.endswith(".py")}
    used: dict[str, set[str]] = {room: set() for room in rooms}
    for file in files():
        room = room_of(file, list(rooms))
        for target in imports(file):
            if target in base or room_of(target, list(rooms)) == room:
                continue
            allowed = [entry for entry in rooms[room] if target.startswith(entry)]
            assert allowed, f"{file} imports {target}, which ARCHITECTURE.md does not allow {room}"
            used[room].update(allowed)
    assert used == {room: set(entries) for room, entries in rooms.items()}, "the table allows what nobody imports"


def test_the_core_imports_without_heavy_packages() -> None:
    said = re.search(r"Everything but (.+?) imports without (.+?)\.\n", PAGE)
    assert said
    assert re.findall(r"\w+", said[2].lower().replace(" and ", " ")) == list(HEAVY)
    core = [file for file in files() if not file.startswith(tuple(named(said[1]))) and not file.endswith("__main__.py")]
    lines = [f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))"]
    lines += [
        f"import penstock.{file.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}" for file in core
    ]
    code = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
