"""Kinds of blocks: modules of one class and one structure, which are compiled once.

The repeated blocks of a model are the elements of its outermost ``ModuleList``s.  Dynamo's guards decide at run time
whether two blocks share a compilation; the kinds here are how many to expect.

A step cache of diffusers puts hooks around blocks, or around modules inside.  A hook has a state of its own in each block,
which Dynamo would compile into it, again and again.  So hooks stay eager, and what they call is compiled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.traced import Repeats
from chunkflow_compile.placed.index import elements, is_called
from chunkflow_compile.weights.leaves import leaves_of
from chunkflow_compile.weights.modules import hook_registry

_PLAIN_TYPES = (bool, int, float, str, type(None))
_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# With more of these layers, a part may have enough to fuse: embeddings of diffusers have up to seven.
_MOST_LAYERS = 8


@dataclass(frozen=True)
class Kind:
    """Modules that are compiled once.

    ``name``: of their class.  ``members``: name -> module, in the model's order.  ``counters``: attributes that each of
    several members has with another value and that its code reads, so that Dynamo compiles each by itself.
    """

    name: str
    members: Mapping[str, nn.Module]
    counters: tuple[str, ...] = ()


def repeated_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks: name -> module.  Of a list, those are the elements of a class that it has twice or more, with
    weights."""
    repeated: dict[str, nn.Module] = {}
    for prefix, blocks in _lists(root, ""):
        count = Counter(type(block) for block in blocks.values())
        repeated |= {
            f"{prefix}.{name}": block
            for name, block in blocks.items()
            if count[type(block)] > 1 and any(True for _ in leaves_of(block))
        }
    return repeated


def repeats_of(root: nn.Module, weights: Collection[str], goal: Goal) -> Repeats | None:
    """The blocks of the structure of the one that holds these weights of a model; None if none holds them all.

    ``goal``: of the model.
    """
    blocks = repeated_blocks(root)
    mine = next((b for name, b in blocks.items() if all(w.startswith(f"{name}.") for w in weights)), None)
    if mine is None or not weights:
        return None
    structure = structure_of(mine)
    alike = [block for block in blocks.values() if structure_of(block) == structure]
    share = sum(leaf.nbytes for block in alike for leaf in leaves_of(block)) / sum(
        leaf.nbytes for leaf in leaves_of(root)
    )
    return Repeats(count=len(alike), goal=goal, share=share)


def parts_of(root: nn.Module, blocks: Collection[nn.Module], min_bytes: int) -> dict[str, nn.Module]:
    """The outermost modules with large weights outside the blocks, which have no block inside: name -> module."""
    inside = {id(block) for block in blocks}

    def walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if id(child) in inside or not _large(child, min_bytes):
                continue
            if is_called(child) and not any(id(m) in inside for m in child.modules()):
                yield prefix + name, child
            else:
                yield from walk(child, f"{prefix}{name}.")

    return dict(walk(root, ""))


def runs_op_by_op(part: nn.Module, min_bytes: int) -> bool:
    """Whether a part of a model is not worth Inductor's time: a few layers of torch have all its large weights."""
    own = {m: [*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in part.modules()}
    large = [m for m, tensors in own.items() if any(t.nbytes >= min_bytes for t in tensors)]
    return len(large) <= _MOST_LAYERS and all(isinstance(m, _LAYERS) for m in large)


def caching_hook(module: nn.Module) -> Any:
    """The innermost hook around a module that decides at each call whether it runs; None if there is none."""
    registry = hook_registry(module)
    hooks = () if registry is None else (registry.get_hook(name) for name in registry._hook_order)
    return next((hook for hook in hooks if _decides(hook)), None)


def calls_of_hooks(module: nn.Module) -> Sequence[Any]:
    """What diffusers' hooks around a module call, ``forward`` and ``original_forward`` of each."""
    registry = hook_registry(module)
    return () if registry is None else registry._fn_refs


def _decides(hook: Any) -> bool:
    forward = getattr(hook, "new_forward", None)
    keeps = hook._is_stateful or hasattr(hook, "state_manager") or hasattr(forward, "_torchdynamo_disable")
    return forward is not None and keeps


def _hooks_inside(module: nn.Module) -> bool:
    return any(caching_hook(m) is not None for m in module.modules() if m is not module)


def between_hooks(blocks: Mapping[str, nn.Module], min_bytes: int) -> dict[str, nn.Module]:
    """What to compile of the blocks: each whole, or its parts if one inside has a caching hook: name -> module."""
    compiled = dict[str, nn.Module]()
    for name, block in blocks.items():
        hooked = {n: m for n, m in block.named_modules() if n and caching_hook(m) is not None and not _hooks_inside(m)}
        if not hooked:
            compiled[name] = block
            continue
        inside = {n: m for n, m in hooked.items() if _large(m, min_bytes)}
        inside |= parts_of(block, hooked.values(), min_bytes)
        compiled |= {f"{name}.{n}": m for n, m in inside.items()}
    return compiled


def kinds_of(modules: Mapping[str, nn.Module]) -> list[Kind]:
    """The modules by class and structure, in the order of the first of each."""
    groups: dict[object, dict[str, nn.Module]] = {}
    for name, module in modules.items():
        groups.setdefault(structure_of(module), {})[name] = module
    return [Kind(type(next(iter(g.values()))).__name__, g, _counters([*g.values()])) for g in groups.values()]


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, Mapping[str, nn.Module]]]:
    """The outermost lists with modules of one class: name, and the elements by theirs.  A stage may hold such lists."""
    for name, child in module.named_children():
        blocks = dict(elements(child))
        if isinstance(child, nn.ModuleList) and len({type(m) for m in blocks.values()}) < len(blocks):
            yield prefix + name, blocks
        else:
            yield from _lists(child, f"{prefix}{name}.")


def _large(module: nn.Module, min_bytes: int) -> bool:
    return any(leaf.nbytes >= min_bytes for leaf in leaves_of(module))


def structure_of(module: nn.Module) -> object:
    """Class, sizes and types of everything inside.  Modules that differ in it are compiled apart."""
    inside = tuple((name, type(m)) for name, m in module.named_modules())
    tensors = tuple((name, tuple(t.shape), t.dtype) for name, t in module.named_parameters())
    return inside, tensors


def _counters(modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """The attributes with another value in each of the modules, or in most, that their code reads."""
    read = {name for m in modules[0].modules() for name in names_read(type(m))}
    attributes = [dict(_attributes(m)) for m in modules]
    values = {name: {repr(of_one.get(name)) for of_one in attributes} for name in attributes[0]}
    return tuple(n for n, v in values.items() if n.rpartition(".")[2] in read and 2 * len(v) > len(modules) > 2)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The plain attributes of a module, of its modules, and of what helps them, such as an attention processor."""
    for prefix, inner in module.named_modules():
        for name, value in inner.__dict__.items():
            path = f"{prefix}.{name}".lstrip(".")
            if isinstance(value, _PLAIN_TYPES):
                yield path, value
            elif not name.startswith("_") and hasattr(value, "__dict__") and not isinstance(value, type):
                yield from ((f"{path}.{n}", v) for n, v in vars(value).items() if isinstance(v, _PLAIN_TYPES))


def names_read(cls: type) -> Iterator[str]:
    """The names of attributes and variables that the methods of a class use; none of torch's own."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for method in vars(base).values():
            if isinstance(method, FunctionType) and method.__name__ != "__init__":
                yield from method.__code__.co_names
