"""What the plugin relies on of vLLM is written in one table, and the installed vLLM has it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "src" / "penstock" / "plugin"
sys.path.insert(0, str(ROOT / "scripts"))

import check_vllm  # noqa: E402 - a script

VLLMS = {
    "core", "_core", "EngineCore", "EngineCoreProc", "engine", "client", "scheduler", "processor", "state", "request",
    "params", "parent", "config", "model_config", "parallel", "worker", "_worker", "model_runner", "layer", "module",
    "impl", "info", "manager", "of_worker", "method", "child", "output", "completion", "layerwise", "engine_core",
    "sampling_params", "detokenizer", "logprobs_processor", "parent_req", "output_processor", "vllm_config",
    "parallel_config", "MultiprocExecutor",
}  # fmt: skip
"""What the plugin's code calls objects of vLLM's, and their attributes that are such objects."""
OTHERS = {
    "modules", "named_modules", "named_parameters", "named_children", "parameters", "weight", "load_weights",  # torch
    "_non_persistent_buffers_set", "_parameters", "_buffers", "register_parameter", "register_buffer",
    "get", "items", "put_nowait", "append", "empty", "spec", "type", "data", "__name__", "__wrapped__", "__dict__",
    "tie_word_embeddings", "to", "startswith",
}  # fmt: skip
"""Attributes that torch and Python give such objects."""
USES = check_vllm.read_table(check_vllm.TABLE.read_text())
TABLE = {name.partition("(")[0] for use in USES for name in use.names}


@cache
def trees() -> dict[str, ast.Module]:
    return {path.name: ast.parse(path.read_text()) for path in sorted(PLUGIN.glob("*.py"))}


def imported() -> Iterator[tuple[str, str]]:
    """Each name that the plugin and the gateway's parsers import from vLLM, as the table writes it, and the file."""
    parsers = PLUGIN.parent / "rollout" / "vllm_parser.py"
    for file, tree in {**trees(), parsers.name: ast.parse(parsers.read_text())}.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((file, f"{node.module}:{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((file, alias.name) for alias in node.names if alias.name.split(".")[0] == "vllm")


def own_names() -> set[str]:
    """Methods, functions, fields and attributes that Penstock's own code defines."""
    found: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                found.add(ast.unparse(node.target).removeprefix("self."))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def attributes() -> Iterator[tuple[str, str]]:
    """Each attribute that the plugin reads or sets of what it names as vLLM does, and the file."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            owner: ast.expr | None = None
            name: object = None
            match node:
                case ast.Attribute(value=owner, attr=name):
                    pass
                case ast.Call(
                    func=ast.Name(id="hasattr" | "getattr" | "setattr"), args=[owner, ast.Constant(name), *_]
                ):
                    pass
            if owner is not None and ast.unparse(owner).rpartition(".")[2] in VLLMS and isinstance(name, str):
                yield file, name


def test_every_import_from_vllm_is_in_the_table():
    missing = {(file, name) for file, name in imported() if not any(f"{n}.".startswith(f"{name}.") for n in TABLE)}
    assert missing == set()


def test_every_attribute_of_vllms_objects_is_in_the_table():
    known = {part for name in TABLE for part in name.replace("~", ":").partition(":")[2].split(".")}
    ours = own_names() | OTHERS
    missing = {(file, name) for file, name in attributes() if name not in known | ours and "penstock_" not in name}
    assert missing == set()


def test_every_name_of_the_table_is_used():
    files = list(PLUGIN.parent.rglob("*.py"))
    found = [word for path in files for word in re.split(r"[^\w/]+", path.read_text().replace("-", "_"))]
    words = {*found, *(word.lstrip("_") for word in found)}
    unused = {
        name for name in TABLE if re.split(r"[.:~]", name.strip('"'))[-1].strip('"-').replace("-", "_") not in words
    }
    assert unused == {"vllm.plugins:load_general_plugins"}, "the one that calls us"


@pytest.mark.vllm
def test_the_installed_vllm_has_every_name_of_the_table():
    assert check_vllm.check(check_vllm.Sources.installed(), USES) == []


SOURCE = {
    "vllm/__init__.py": "from .engine import Engine as Core",
    "vllm/engine.py": """
from vllm.base import Base
if True:
    class Engine(Base[int]):
        size: int
        def __init__(self): self.queue = []
        def step(self, first, second=None, *, third=None): "a route: '/step'"
""",
    "vllm/base.py": "class Base:\n    def stop(self): ...",
    "vllm/lazy.py": "def __getattr__(name):\n    if name == 'platform': return 1",
}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vllm:Core.size", None),
        ("vllm:Core.queue", None),
        ("vllm.engine:Engine.stop", None),
        ("vllm:Core.step(first,third)", None),
        ("vllm:engine", None),
        ("vllm.lazy:platform", None),
        ("vllm~'/step'", None),
        ("vllm.nothing:x", "no module vllm.nothing"),
        ("vllm:Core.missing", "no vllm:Core.missing"),
        ("vllm.lazy:missing", "no vllm.lazy:missing"),
        ("vllm:Core.step(fourth)", "vllm:Core.step does not take fourth"),
        ("vllm:Core.step(second,first)", "vllm:Core.step does not take (second,first) in this order"),
        ("vllm~/stop", "vllm does not contain /stop"),
    ],
)
def test_the_check_says_what_a_version_lacks_and_what_for(tmp_path: Path, name: str, problem: str | None):
    for file, text in SOURCE.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    sources = check_vllm.Sources("0.40.1+cpu", {file: tmp_path / file for file in SOURCE})
    owner, mark, rest = name.partition(":") if ":" in name else name.partition("~")
    table = f"# a table\n[steps | since 0.40]\n{owner}{mark}\n    {rest}\n"
    table += "[newer | since 0.41]\nvllm:New\n[old | until 0.40]\nx:Y"
    uses = check_vllm.read_table(table)
    assert check_vllm.check(sources, uses) == ([] if problem is None else [f"{problem}: steps"])
