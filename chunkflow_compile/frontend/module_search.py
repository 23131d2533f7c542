"""Finds the modules that contain given weights, by the identity of the weights.

Dynamo passes parameters and a graph to a backend, but not the model.  So each compilation searches once for the modules that
contain the parameters.  The search covers the modules from which Dynamo read the parameters, and all objects that Python's
garbage collector tracks.  ``gc.freeze()`` hides objects from this search.  If hidden modules may contain parameters, the
search also covers the objects that can be reached from the variables of the calling functions.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import cast

import torch
from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.placed.index import ModelIndex
from chunkflow_compile.private_torch.dynamo import OptimizedModule
from chunkflow_compile.weights.leaves import leaves, quant_state_tensors


def index_around(parameters: Sequence[torch.Tensor], near: Iterable[nn.Module] = (), min_bytes: int = 0) -> ModelIndex:
    """Return the ModelIndex of the module that contains the parameters.

    Parameters that no module contains are ignored.  If no module contains all remaining parameters, return the ModelIndex of
    a module that contains the large ones among them, that is, the parameters of at least ``min_bytes`` bytes.
    ``near``: modules to search in addition to those that the garbage collector tracks.
    Raises ChunkflowError if several modules contain large parameters, but no module contains all large parameters.
    """
    root, maybe_block = _holder(parameters, near, min_bytes) if parameters else (None, False)
    return ModelIndex(None, {}, {}) if root is None else ModelIndex.of(root, maybe_block)


def blocks_around(root: nn.Module, weights: Iterable[torch.Tensor]) -> list[nn.Module]:
    """Return the outermost ModuleLists in ``root`` that contain at least one of ``weights``."""
    wanted = {id(w) for w in weights}
    lists, inner = list[nn.Module](), set[int]()
    for module in root.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inner:
            inner.update(id(m) for m in module.modules())
            if wanted & held_by([module]):
                lists.append(module)
    return lists


def _held(module: nn.Module) -> Iterator[int]:
    """Yield the ids of a module's own parameters and buffers, which do not include the tensors of submodules.

    For a tensor subclass, yield the ids of the tensors inside it.
    """
    for kind in ("_parameters", "_buffers"):
        for tensor in module.__dict__.get(kind, {}).values():
            for whole in (tensor, *(t for _, t in quant_state_tensors(tensor))) if tensor is not None else ():
                for _, leaf in leaves(whole):
                    yield id(leaf)


def held_by(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of the parameters and buffers of ``modules`` and of their submodules.

    For a tensor subclass, the result contains the ids of the tensors inside it.
    """
    return {held for module in _with_those_below(modules) for held in _held(module)}


def _with_those_below(modules: Iterable[nn.Module]) -> list[nn.Module]:
    seen, todo = dict[int, nn.Module](), [*modules][::-1]
    while todo:
        if id(module := todo.pop()) not in seen:
            seen[id(module)] = module
            todo += _children(module)
    return [*seen.values()]


def _children(module: nn.Module) -> list[nn.Module]:
    """Return the direct submodules of a module.

    The attributes of the module may be incomplete, because another thread may still be constructing it.
    """
    return [child for child in [*module.__dict__.get("_modules", {}).values()] if child is not None]


# The search ignores objects of these types, because half of all objects in the process can be reached from them.
_ENDS = (CodeType, FrameType, FunctionType, ModuleType, type)
# The maximum length of a chain of references from a variable to an object that the search finds.  With a length of five, the
# search finds the elements of a list that is an attribute of an attribute: two references per attribute (to the ``__dict__``
# and to the value), and one from the list to its element.  The search then takes 0.7 s in a compilation of 20 s.
_STEPS = 5


def _of_callers(frame: FrameType | None) -> list[object]:
    """Return the objects in the variables of a frame and of its callers, and the objects that can be reached from these
    objects over at most ``_STEPS`` references."""
    spaces, near = dict[int, dict[str, object]](), list[object]()
    while frame is not None:
        near += [*frame.f_locals.values()]
        spaces[id(frame.f_globals)] = frame.f_globals
        frame = frame.f_back
    near += [value for space in spaces.values() for value in [*space.values()]]
    objects = dict[int, object]()
    for step in range(_STEPS + 1):
        near = [o for o in (gc.get_referents(*near) if step else near) if not issubclass(type(o), _ENDS)]
        near = [*{id(o): o for o in near if id(o) not in objects}.values()]
        objects.update((id(o), o) for o in near)
    return [*objects.values()]


def _modules_among(objects: Iterable[object]) -> list[nn.Module]:
    """Return the modules among ``objects``.

    This function checks the type of an object with type(), because isinstance() on a lazy proxy could run arbitrary code.
    """
    return [cast("nn.Module", o) for o in objects if issubclass(type(o), nn.Module)]


def _holder(
    parameters: Sequence[torch.Tensor], near: Iterable[nn.Module], min_bytes: int
) -> tuple[nn.Module | None, bool]:
    """Return a pair: the module that contains ``parameters`` (or None), and whether ``gc.freeze()`` may hide a larger module
    that contains this module."""
    asked = {id(p) for p in parameters}
    tracked = _modules_among(gc.get_objects())
    hidden = gc.get_freeze_count() > 0 and not asked.issubset(held for m in tracked for held in _held(m))
    if hidden:
        tracked += _modules_among(_of_callers(sys._getframe(1)))
    modules = _with_those_below([*near, *tracked])
    held = {id(m): ids for m in modules if (ids := asked.intersection(_held(m)))}
    wanted = set[int]().union(*held.values())
    compiled = {id(m._orig_mod) for m in modules if isinstance(m, OptimizedModule)}
    compiled |= {id(m) for m in modules if m.__dict__.get("_compiled_call_impl") is not None}
    parents: dict[int, list[nn.Module]] = {}
    for module in modules:
        if not isinstance(module, OptimizedModule):
            for child in _children(module):
                parents.setdefault(id(child), []).append(module)
    todo = [m for m in modules if id(m) in held]
    candidates: dict[int, nn.Module] = {}
    while todo:
        module = todo.pop()
        if id(module) not in candidates:
            candidates[id(module)] = module
            todo.extend(parents.get(id(module), ()))
    around = [module for module in candidates.values() if wanted <= held_by([module])]
    if not around:  # no module contains all parameters: some layers are outside the model, as happens with adapters
        wanted &= {id(p) for p in parameters if p.nbytes >= min_bytes}
        around = [module for module in candidates.values() if wanted <= held_by([module])]
    if candidates and not around:
        raise ChunkflowError(
            "The graph's parameters belong to several models, so they have no common names: call "
            "chunkflow_compile.offload on each of them before compiling. Layers outside a model may be in one "
            "torch.nn.ModuleList; those whose weights are all smaller than min_bytes need no call."
        )
    if not around:
        return None, hidden

    def rank(module: nn.Module) -> tuple[bool, bool, int]:
        return id(module) not in compiled, isinstance(module, nn.ModuleList), len([*module.modules()])

    root = _model_around(min(around, key=rank), parents)
    return root, hidden and id(root) not in parents


def _model_around(module: nn.Module, parents: Mapping[int, list[nn.Module]]) -> nn.Module:
    """Return the outermost module around ``module`` if ``module`` is a block (an element of a ModuleList); otherwise return
    ``module`` itself.

    The separately compiled blocks of a model therefore share the placement of the model.
    """
    root, seen = module, set[int]()
    while (around := parents.get(id(root), ())) and len(around) == 1 and id(root) not in seen:
        seen.add(id(root))
        root = around[0]
    return root if any(isinstance(m, nn.ModuleList) for m in parents.get(id(module), ())) else module
