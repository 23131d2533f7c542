"""Block types: groups of modules with the same class and structure.  Each block type is compiled once.

The repeated blocks of a model are the elements of its outermost ``ModuleList``s.  This module predicts which blocks share a
compilation; at run time, Dynamo's guards decide it.

A step cache in diffusers puts hooks around blocks, or around modules inside blocks.  Each hook keeps its own state.  If
Dynamo compiled the hooks, it would recompile for every block.  Therefore the hooks run eagerly, and only the functions that
the hooks call are compiled.
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
# The maximum number of large layers in a part of a model that runs op by op.  A part with more layers may have enough ops for
# fusion to pay off.  The embedding modules of models in diffusers have up to seven layers.
_MOST_LAYERS = 8


@dataclass(frozen=True)
class Kind:
    """A block type: modules that share one compilation.

    ``name``: the name of the modules' class.  ``members``: the modules by their names, in the order of the model.
    ``counters``: the names of attributes that the modules' methods read and whose values differ between the modules, such as
    a block index.  Because of such an attribute, Dynamo compiles each of the modules separately.
    """

    name: str
    members: Mapping[str, nn.Module]
    counters: tuple[str, ...] = ()


def repeated_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by their names.

    An element of a ModuleList is a repeated block if it has weights, and if the list contains another element of the same
    class.
    """
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
    """Find the block that contains ``weights``, and describe all blocks with the same structure: their number, and their
    share of the model's weights.  Return None if no block contains all of ``weights``.

    ``weights``: the names of weights.  ``goal``: the goal of the model.
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
    """Return the parts of a model outside its blocks, by their names.

    A part is a module that has a forward method and that contains large weights, but no block.  If a part contains another
    part, only the outer one is returned.
    """
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
    """Whether a part of a model should run op by op, because compiling it with Inductor is not worth the time.

    A part runs op by op if at most ``_MOST_LAYERS`` of its layers have large weights, and if all of these layers are standard
    layers of torch (``_LAYERS``).
    """
    own = {m: [*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in part.modules()}
    large = [m for m, tensors in own.items() if any(t.nbytes >= min_bytes for t in tensors)]
    return len(large) <= _MOST_LAYERS and all(isinstance(m, _LAYERS) for m in large)


def caching_hook(module: nn.Module) -> Any:
    """Return the innermost *caching hook* around a module, or None if there is no such hook.  A caching hook decides in each
    call whether the module runs."""
    registry = hook_registry(module)
    hooks = () if registry is None else (registry.get_hook(name) for name in registry._hook_order)
    return next((hook for hook in hooks if _decides(hook)), None)


def calls_of_hooks(module: nn.Module) -> Sequence[Any]:
    """Return the objects in which diffusers' hooks around a module keep the functions that these hooks call.

    Each object has the attributes ``forward`` and ``original_forward``.
    """
    registry = hook_registry(module)
    return () if registry is None else registry._fn_refs


def _decides(hook: Any) -> bool:
    forward = getattr(hook, "new_forward", None)
    keeps = hook._is_stateful or hasattr(hook, "state_manager") or hasattr(forward, "_torchdynamo_disable")
    return forward is not None and keeps


def _hooks_inside(module: nn.Module) -> bool:
    return any(caching_hook(m) is not None for m in module.modules() if m is not module)


def between_hooks(blocks: Mapping[str, nn.Module], min_bytes: int) -> dict[str, nn.Module]:
    """Return the modules to compile in ``blocks``, by their names.

    If no module inside a block has a caching hook (:func:`caching_hook`), the whole block is compiled.  Otherwise the modules
    with caching hooks are compiled separately, and so are the parts of the block between these modules (:func:`parts_of`).
    """
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
    """Group ``modules`` into block types.  Return the block types in the order of their first members."""
    groups: dict[object, dict[str, nn.Module]] = {}
    for name, module in modules.items():
        groups.setdefault(structure_of(module), {})[name] = module
    return [Kind(type(next(iter(g.values()))).__name__, g, _counters([*g.values()])) for g in groups.values()]


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, Mapping[str, nn.Module]]]:
    """Yield the outermost ModuleLists in which two elements have the same class, as (name of the list, elements by name).

    A list in which all elements have different classes, such as a list of stages, is searched for further lists instead.
    """
    for name, child in module.named_children():
        blocks = dict(elements(child))
        if isinstance(child, nn.ModuleList) and len({type(m) for m in blocks.values()}) < len(blocks):
            yield prefix + name, blocks
        else:
            yield from _lists(child, f"{prefix}{name}.")


def _large(module: nn.Module, min_bytes: int) -> bool:
    return any(leaf.nbytes >= min_bytes for leaf in leaves_of(module))


def structure_of(module: nn.Module) -> object:
    """Return the structure of a module: the classes of its submodules, and the shapes and dtypes of its parameters.

    Modules with different structures are compiled separately.
    """
    inside = tuple((name, type(m)) for name, m in module.named_modules())
    tensors = tuple((name, tuple(t.shape), t.dtype) for name, t in module.named_parameters())
    return inside, tensors


def _counters(modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return the names of the attributes that the modules' methods read and whose values differ from module to module.

    An attribute is returned only if there are at least three modules, and if the number of its different values is greater
    than half the number of modules.
    """
    read = {name for m in modules[0].modules() for name in names_read(type(m))}
    attributes = [dict(_attributes(m)) for m in modules]
    values = {name: {repr(of_one.get(name)) for of_one in attributes} for name in attributes[0]}
    return tuple(n for n, v in values.items() if n.rpartition(".")[2] in read and 2 * len(v) > len(modules) > 2)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that have simple values, as (path, value).

    The attributes of submodules and of helper objects, such as attention processors, are included.
    """
    for prefix, inner in module.named_modules():
        for name, value in inner.__dict__.items():
            path = f"{prefix}.{name}".lstrip(".")
            if isinstance(value, _PLAIN_TYPES):
                yield path, value
            elif not name.startswith("_") and hasattr(value, "__dict__") and not isinstance(value, type):
                yield from ((f"{path}.{n}", v) for n, v in vars(value).items() if isinstance(v, _PLAIN_TYPES))


def names_read(cls: type) -> Iterator[str]:
    """Yield the names of the attributes and variables that the methods of a class use.

    Methods that the class inherits from torch are ignored.
    """
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for method in vars(base).values():
            if isinstance(method, FunctionType) and method.__name__ != "__init__":
                yield from method.__code__.co_names
