"""Imports keep to the order of packages that docs/architecture.md states, and no module is in a cycle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
from conftest import HERE

ROOT = HERE.parent
PACKAGE = ROOT / "chunkflow_compile"
PACKAGES = re.search(r"```packages\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S)[1].split("\n")
LEVEL = {package: i for i, line in enumerate(PACKAGES) for package in line.split()}


def modules() -> dict[str, Path]:
    """Dotted name below ``chunkflow_compile`` -> file; a package's ``__init__`` goes by the name of the package."""
    found = {}
    for path in (p for top in (PACKAGE, ROOT / "passes") for p in top.rglob("*.py")):
        inside = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT)
        found[".".join(inside.with_suffix("").parts).removesuffix("__init__").rstrip(".")] = path
    return {name: path for name, path in found.items() if name and name != "passes"}


def imports(name: str, path: Path) -> Iterator[str]:
    """Names below the package that a module imports, wherever the import stands, also for type checkers."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        todo.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            for alias in node.names:
                yield ".".join([*base, *([node.module] if node.module else [alias.name])])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "chunkflow_compile":
            for alias in node.names:
                yield f"{node.module}.{alias.name}".partition(".")[2]
        elif isinstance(node, ast.Import):
            yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith("chunkflow_compile."))


@cache
def edges() -> list[tuple[str, str]]:
    """(module, module that it imports); a name that is no module stands for the module that defines it."""
    known, found = modules(), []
    for name, path in known.items():
        for target in imports(name, path):
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target:
                found.append((name, target))
    return found


def package_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "passes" else 1])


def test_every_module_belongs_to_a_package_that_is_stated() -> None:
    assert {package_of(m) for m in modules()} == LEVEL.keys()


def test_imports_keep_to_the_stated_directions() -> None:
    assert len(edges()) > 300, "imports are found"
    wrong = [
        f"{a} imports {b}"
        for a, b in edges()
        if package_of(a) != package_of(b) and LEVEL[package_of(a)] <= LEVEL[package_of(b)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_is_in_a_cycle() -> None:
    assert list(nx.simple_cycles(nx.DiGraph(edges()))) == []


def test_every_package_says_what_it_is_in_at_most_six_lines() -> None:
    """What comes in, what goes out, in which order to read it."""
    for name, path in modules().items():
        if path.name == "__init__.py":
            said = ast.get_docstring(ast.parse(path.read_text()))
            assert said is not None and 1 < len(said.splitlines()) <= 6, name
