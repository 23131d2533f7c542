"""Finds the model that contains given weights, and moves the weights into the model's host store before a program that reads
them starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from chunkflow_compile.frontend.module_search import index_around
from chunkflow_compile.frontend.preconditions import warn_if_no_module_holds
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import Pack
from chunkflow_compile.placed.index import ModelIndex
from chunkflow_compile.placed.placement import Placement, placements_around
from chunkflow_compile.private_torch.dynamo import compile_lock
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.device import DeviceKind
from chunkflow_compile.runtime.single_call import SingleCall
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves


def index_of(
    weights: Sequence[torch.Tensor], near: Iterable[nn.Module], min_bytes: int
) -> tuple[ModelIndex, int | None]:
    """Return the ModelIndex of the model that contains ``weights``, and the ``min_bytes`` with which the model was placed.

    The second value is None if the model is not placed.
    ``near``: the modules from which Dynamo read the inputs of a graph.  ``min_bytes``: the size in bytes below which weights
    are not streamed, for a model that is not placed.
    """
    parameters = [leaf for weight in weights for _, leaf in leaves(weight)]
    placements = placements_around(parameters)
    least = min((p.min_bytes for p in placements), default=None)
    indices = [ModelIndex.of(p.root) for p in placements]
    whole = next((i for i in indices if i.covers(parameters)), None)
    if whole is not None:
        return whole, least
    if indices and all(buffer_of(p) or any(i.covers([p]) for i in indices) for p in parameters):
        # several models contain the weights, and all of these models are placed
        names = {k: v for i in indices for k, v in i.names.items()}
        return ModelIndex(None, names, {k: v for i in indices for k, v in i.blocks.items()}), least
    index = index_around(parameters, near, min_bytes if least is None else least)
    return index, least if any(p.root is index.root for p in placements) else None


def move_weights(
    index: ModelIndex, device: torch.device, min_bytes: int, weights: Sequence[torch.Tensor], pack: Pack
) -> None:
    """Move weights into the host store of their model.

    ``min_bytes``, ``pack``: arguments for the :class:`Placement` that is created if the model is not placed yet.
    """
    if weights and index.root is not None:
        with compile_lock, (placement := Placement.on(index.root, device, min_bytes, pack=pack)).lock():
            placement.move((index.names[id(p)], p) for p in weights)


def start_program(
    device: torch.device,
    min_bytes: int,
    pack: Pack,
    kind: DeviceKind,
    seen: Callable[[], nn.Module | None],
    parameters: Mapping[str, nn.Parameter],
    wanted: Collection[str],
    start: Callable[[Arena], SingleCall],
) -> SingleCall:
    """Move the weights of a program into the host store of their model, unless they are already there.  Then start the
    program and return it.

    The program ends as soon as one of the placements of its weights ends.
    ``pack``: see :func:`move_weights`.  ``seen``: a function that returns the compiled model, or None.  If the compiled model
    does not contain the weights, all modules in the process are searched.  ``parameters``: all weights of the program, by
    name.  ``wanted``: the names of the weights that must be in a host store.  ``start``: a function that creates the program
    in an arena.
    """
    while True:
        around, names = placements_around(parameters.values()), dict[int, tuple[str, ...]]()
        if not around or _missing(parameters, wanted):
            index = _around(list(parameters.values()), seen(), min_bytes)
            names.update(index.names)
            if index.root is not None:
                around = list(dict.fromkeys([Placement.on(index.root, device, min_bytes, pack=pack), *around]))
            loose = {name: p for name, p in parameters.items() if buffer_of(p) is None and id(p) not in names}
            _refuse_copies(loose)
            warn_if_no_module_holds((p for name, p in loose.items() if name in wanted), min_bytes)
        if not around:
            # no module was found: store the program in a weight, so that the program ends when the weight is freed
            program = start(Arena(device))
            next(iter(parameters.values()))._chunkflow_program = program  # type: ignore[attr-defined]
            return program
        with contextlib.ExitStack() as held:
            held.enter_context(compile_lock)  # no other thread may trace a module while a placement adds hooks to it
            for placement in sorted(around, key=id):
                held.enter_context(placement.lock())
            if not all(placement.current for placement in around):
                continue  # another thread restored the model meanwhile
            if missing := [p for p in _missing(parameters, wanted) if id(p) in names]:
                around[0].move((names[id(p)], p) for p in missing)
            program = start(around[0].arena(kind))
            for placement in around:
                placement.attach(program)
            return program


def _missing(parameters: Mapping[str, nn.Parameter], wanted: Collection[str]) -> list[nn.Parameter]:
    """Return the weights that have to be moved into a host store.

    They are in no host store yet, and either ``wanted`` contains their names, or they are copies of offloaded weights.
    """
    return [
        p for name, p in parameters.items() if buffer_of(p) is None and (name in wanted or isinstance(p, HostWeight))
    ]


def _refuse_copies(loose: Mapping[str, torch.Tensor]) -> None:
    """Raise ChunkflowError if one of the weights in ``loose`` is a copy of an offloaded weight.

    ``loose``: the weights that no known module contains and that are in no host store, by name.
    """
    for name, weight in loose.items():
        if isinstance(weight, HostWeight):
            raise ChunkflowError(
                f"{name} is a copy of an offloaded weight, and no module was found that holds it: call "
                "chunkflow_compile.offload(model) on the copied model before its first call."
            )


def _around(parameters: Sequence[nn.Parameter], seen: nn.Module | None, min_bytes: int) -> ModelIndex:
    if seen is not None and (index := ModelIndex.of(seen)).covers(parameters):
        return index
    return index_around(parameters, min_bytes=min_bytes)
