"""The code's own measures: sizes of files and functions, broad excepts, circles of imports, and the spine.

The spine is what one generate, one update and one death need, on engines launched here. It is computed from the
imports: everything that the fleet, the router and the plugin reach without passing through a side room.
"""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
FILES = {
    ("penstock." + ".".join(file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in SOURCE.rglob("*.py")
}
ROOTS = ("fleet.fleet", "router.__main__", "plugin", "plugin.server", "plugin.middleware", "plugin.worker")
SIDE_ROOMS = tuple(
    f"penstock.{room}"
    for room in (
        "cli", "engine.vanilla", "facade", "fleet.adapters", "fleet.attach", "fleet.calls", "fleet.detach",
        "fleet.native", "fleet.owner", "fleet.ray", "fleet.remote", "fleet.service", "fleet.vllm_router", "observe",
        "plugin.delta", "plugin.ipc", "plugin.native", "rollout", "router.workers", "sim", "train", "weights.cuda_ipc",
        "weights.delta",
    )
)  # fmt: skip
SPINE_FILES, SPINE_LINES = 83, 19_900
"""The most that the spine has now; the target is 60 files and 10,000 lines."""
PLUGGED_IN = {
    "fleet.fleet": {"fleet.service"},
    "fleet.launch": {
        "fleet.attach", "fleet.detach", "fleet.ray_engines", "fleet.remote", "fleet.service", "fleet.vllm_router",
    },
    "fleet.operations": {"fleet.adapters", "fleet.native"},
    "fleet.router_process": {"fleet.vllm_router"},
    "fleet.stores": {"weights.cuda_ipc", "weights.delta"},
    "plugin.core": {"plugin.delta", "weights.delta"},
    "router.__main__": {"router.workers"},
}  # fmt: skip
"""Where side rooms are imported; the target is nowhere."""


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def lines(module: str) -> int:
    return len(FILES[module].read_text().splitlines())


@cache
def imports(module: str) -> frozenset[str]:
    """Modules of ours that a module imports anywhere in it, for types alone too."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name if (name := f"{node.module}.{alias.name}") in FILES else node.module for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found & FILES.keys() - {module})


def functions() -> Iterator[tuple[str, int]]:
    for module in FILES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno
                yield f"{module}.{node.name}", node.end_lineno - node.lineno + 1


def reached(module: str) -> set[str]:
    """Everything that a module imports, directly or not."""
    found: set[str] = set()
    todo = [module]
    while todo:
        new = imports(todo.pop()) - found
        found |= new
        todo += new
    return found


def spine() -> set[str]:
    found: set[str] = set()
    todo = [f"penstock.{root}" for root in ROOTS]
    while todo:
        module = todo.pop()
        if module not in found and not module.startswith(SIDE_ROOMS):
            found.add(module)
            todo += imports(module)
    return found


def test_files_and_functions_are_short() -> None:
    assert {module: size for module in FILES if (size := lines(module)) > 500} == {}
    sizes = dict(functions())
    assert {name: size for name, size in sizes.items() if size > 60} == {}
    assert statistics.median(sizes.values()) <= 8


def test_errors_are_caught_by_their_type() -> None:
    broad = [
        f"{module}:{node.lineno}"
        for module in FILES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"})
    ]
    assert len(broad) <= 5, broad


def test_no_circle_of_imports_has_more_than_three_files() -> None:
    reach = {module: reached(module) for module in FILES}
    circles = {frozenset({b for b in reach[a] if a in reach[b]}) for a in FILES}
    assert [sorted(circle) for circle in circles if len(circle) > 3] == []


def test_the_spine_does_not_grow() -> None:
    modules = spine()
    assert len(modules) <= SPINE_FILES, sorted(modules)
    assert sum(map(lines, modules)) <= SPINE_LINES


def test_side_rooms_are_plugged_in_at_these_places_alone() -> None:
    places = {
        module.removeprefix("penstock."): {
            target.removeprefix("penstock.") for target in imports(module) if target.startswith(SIDE_ROOMS)
        }
        for module in spine()
    }
    assert {module: targets for module, targets in places.items() if targets} == PLUGGED_IN


def test_the_walks_of_the_architecture_name_files_of_the_spine() -> None:
    page = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text()
    walks = page.partition("## Walks")[2].partition("## States")[0]
    named = {f"penstock.{name.replace('/', '.')}" for name in re.findall(r"`([\w/]+)\.py`", walks)}
    assert len(named) > 30
    assert named <= spine()
