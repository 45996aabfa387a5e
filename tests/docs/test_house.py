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

from penstock.rooms import PLACES, plugged_in

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
FILES = {
    ("penstock." + ".".join(file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): file
    for file in SOURCE.rglob("*.py")
}
ROOTS = (
    "fleet.serving", "fleet.supervise", "fleet.engines", "router.server",
    "plugin", "plugin.server", "plugin.middleware", "plugin.worker",
)  # fmt: skip
SIDE_ROOMS = tuple(
    f"penstock.{room}"
    for room in (
        "cli", "options", "engine.command", "engine.verbs",
        "engine.experts", "engine.lacking", "engine.layouts", "engine.openai", "engine.vanilla",
        "facade",
        "fleet.adapters", "fleet.attach", "fleet.calls", "fleet.delivery", "fleet.elastic", "fleet.fleet", "fleet.gpus",
        "fleet.launch", "fleet.native", "fleet.pausing", "fleet.ray", "fleet.remote", "fleet.router_process",
        "fleet.running_router", "fleet.service", "fleet.skyrl_paths", "fleet.transports", "gateway", "observe",
        "plugin.adapter_worker", "plugin.adapters", "plugin.answers", "plugin.compat", "plugin.cores", "plugin.direct",
        "plugin.kept_kv", "plugin.marks",
        "plugin.quantised", "plugin.routes", "plugin.served_adapters", "plugin.sleeping", "plugin.spec",
        "plugin.token_meter", "plugin.worker_replies",
        "prefix_hash", "rollout",
        "router.__main__", "router.figures", "router.kv", "router.memory", "router.other_calls",
        "router.other_policies", "router.state", "router.unserved", "router.workers",
        "settings", "sim", "start_report", "train",
        "weights.broadcast", "weights.checkpoint_names", "weights.cuda_ipc", "weights.delta", "weights.disk",
        "weights.group", "weights.sum_kernel", "weights.transfer",
    )
)  # fmt: skip
SPINE_FILES, SPINE_LINES = 60, 10_000
"""The most that the spine may have."""
LATER_ROOMS = tuple(
    f"penstock.{room}"
    for room in (
        "asgi", "cli.gateway", "cli.tinker", "cli.train", "config", "gateway", "observe", "rollout", "tinker", "train",
    )
)  # fmt: skip
"""Rooms for agents, learners and the Tinker service, which came after the fleet and its engines."""
SOURCE_FILES, SOURCE_LINES = 236, 45_239
"""The most that `src` has now; the target is 230 files and 38,000 lines."""


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


@cache
def classes() -> dict[str, ast.ClassDef]:
    found = (node for module in FILES for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef))
    return {node.name: node for node in found}


def base_names(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).partition("[")[0] for base in node.bases]


def own_members(node: ast.ClassDef) -> set[str]:
    """Methods, fields, and what methods set on `self`."""
    found = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self":
            found.add(part.attr)
    for part in node.body:
        targets = (
            part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(part, ast.AnnAssign) else []
        )
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def members(node: ast.ClassDef) -> set[str]:
    bases = [classes()[name] for name in base_names(node) if name in classes()]
    return own_members(node).union(*map(members, bases))


def implementations(protocol: ast.ClassDef) -> list[str]:
    wanted = members(protocol)
    return [name for name, node in classes().items() if "Protocol" not in base_names(node) and wanted <= members(node)]


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


def test_the_source_does_not_grow() -> None:
    assert len(FILES) <= SOURCE_FILES
    assert sum(map(lines, FILES)) <= SOURCE_LINES


def test_protocols_have_several_implementations() -> None:
    protocols = {name: node for name, node in classes().items() if "Protocol" in base_names(node)}
    found = {name: implementations(node) for name, node in protocols.items() if "__call__" not in own_members(node)}
    assert found
    assert {name: of for name, of in found.items() if len(of) <= 1} == {}


def test_the_rooms_of_fleet_and_engines_are_small() -> None:
    rooms = [module for module in FILES if not module.startswith(LATER_ROOMS)]
    assert len(rooms) <= 150
    assert sum(map(lines, rooms)) <= 27_000


def test_the_spine_imports_no_side_room() -> None:
    found = {module: {target for target in imports(module) if target.startswith(SIDE_ROOMS)} for module in spine()}
    assert {module: targets for module, targets in found.items() if targets} == {}


def test_every_place_of_a_side_room_is_asked_for_and_filled() -> None:
    asked = [place for file in FILES.values() for place in re.findall(r'plugged_in\(f?"(.+?)"\)', file.read_text())]
    patterns = [re.escape(re.sub(r"{.+?}", "ANY", place)).replace("ANY", ".+") for place in asked]
    assert {place for place in PLACES if any(re.fullmatch(pattern, place) for pattern in patterns)} == set(PLACES)
    assert [place for place in PLACES if not callable(plugged_in(place))] == []
    of_spine = {module for name in PLACES.values() if not (module := name.partition(":")[0]).startswith(SIDE_ROOMS)}
    assert of_spine == {"penstock.router.policies", "penstock.weights.shared_memory"}


def test_the_walks_of_the_architecture_name_files_of_the_spine() -> None:
    page = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text()
    walks = page.partition("## Walks")[2].partition("## States")[0]
    named = {
        f"penstock.{name.replace('/', '.').removesuffix('.__init__')}"
        for name in re.findall(r"`(?!tests/)([\w/]+)\.py`", walks)
    }
    assert len(named) > 30
    assert named <= spine()
