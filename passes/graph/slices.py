"""Slices: stub."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Slice:
    """The part of a value that call i of a repeated region takes: ``narrow(dim, offset + i * size, size)``."""

    dim: int
    offset: int
    size: int


@dataclass(frozen=True)
class Write:
    value: Node
    slice: Slice
    over: int | None


@dataclass(frozen=True)
class Phase:
    module: GraphModule
    inputs: tuple[Node, ...]
    slices: tuple[Slice | None, ...]
    outputs: tuple[Node, ...]
    writes: tuple[Write, ...]
    repeat: int


def phases(module: GraphModule, repeat: int, owned: Collection[int]) -> tuple[Phase, ...]:
    raise NotImplementedError


@dataclass(frozen=True)
class Sliced:
    """How the values of a repeated region are taken.  ``repeat``: its calls.  ``inputs``: the slice of each input, None for
    one that every call takes whole.

    ``writes``: for each output its slice, and the position of the input that it overwrites, None for memory of its own.
    After its inputs, the region's code takes the slices of the outputs with memory of their own; it returns nothing.
    """

    repeat: int
    inputs: tuple[Slice | None, ...]
    writes: tuple[tuple[Slice, int | None], ...]
