"""State has one owner: an object's attributes are assigned by its own methods, with few exceptions that are counted."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from conftest import HERE

ROOT = HERE.parent

# Most assignments to attributes of other objects in the product.  What is left is mostly the interface of others: ``.data``,
# ``.__class__`` and ``.meta`` of torch's objects, ``.argtypes`` of ctypes.
FOREIGN = 140


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns or deletes, taken out of tuples."""
    todo: list[ast.expr | None] = []
    if isinstance(node, ast.Assign | ast.Delete):
        todo += node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor | ast.NamedExpr | ast.comprehension):
        todo.append(node.target)
    elif isinstance(node, ast.With | ast.AsyncWith):
        todo += [item.optional_vars for item in node.items]
    while todo:
        target = todo.pop()
        if isinstance(target, ast.Tuple | ast.List):
            todo += target.elts
        elif isinstance(target, ast.Starred):
            todo.append(target.value)
        elif target is not None:
            yield target


def called(function: ast.expr) -> str:
    """A function as it is written, if that is a name, or an attribute of one."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def foreign_writes(source: str) -> list[str]:
    """The attributes of other objects than ``self`` and ``cls`` that a module assigns or deletes.

    An object that a function has just made is another object, too, and so is one that ``self`` only refers to
    (``self.step.seconds``).  ``setattr`` and ``delattr`` on others count as assignments.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        written = [target.value for target in targets(node) if isinstance(target, ast.Attribute)]
        if isinstance(node, ast.Call) and called(node.func) in ("setattr", "delattr", "object.__setattr__"):
            written += node.args[:1]
        found += [ast.unparse(owner) for owner in written if ast.unparse(owner) not in ("self", "cls")]
    return found


def test_what_counts_as_an_assignment_to_another_object() -> None:
    assert foreign_writes("self.a = cls.b = x.a = 1") == ["x"]
    assert foreign_writes("self.step.a += 1\nself.a: int = 1\nx.b: int = 1") == ["self.step", "x"]
    assert foreign_writes("a, (x.a, *y.b) = z\ndel x.a, x[0]") == ["y", "x", "x"]
    assert (
        foreign_writes("for x.a in y: pass\nwith y as x.b: pass\nsetattr(x, 'a', 1)\nsetattr(self, 'a', 1)")
        == ["x"] * 3
    )
    assert foreign_writes("x.a[0] = 1\nx.a.append(1)\nx.a == 1") == []


def test_few_attributes_are_assigned_by_other_objects() -> None:
    paths = [path for package in ("chunkflow_compile", "passes") for path in (ROOT / package).rglob("*.py")]
    count = Counter[Path]()
    for path in dict.fromkeys(path.resolve() for path in paths):
        count[path.relative_to(ROOT)] += len(foreign_writes(path.read_text()))
    ranking = "\n".join(f"{number} {path}" for path, number in count.most_common(20))
    assert count.total() <= FOREIGN, f"{count.total()} assignments to attributes of other objects:\n{ranking}"
