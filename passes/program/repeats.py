"""Repeats: proves that the runs of a repeated region (graph/split.py), one per slice, write correct values.

* Every slice that a run reads or writes is within the bounds of the value that it is a slice of.
* If several runs or regions write slices of an output, these slices do not overlap, and they cover the whole output before
  anything reads it.
* If a run overwrites a slice of an input with a slice of an output, the run reads no other slice of this input, and the
  memory of this input contains no other input of the region.  So no run reads elements that another run has overwritten.
* The overwritten memory is not an input of the program, and neither an op after the region nor a result of the program uses
  its old contents.

Contract
    The checks read only a program and its memory, and do not trust the passes that made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import Node

from chunkflow_compile.passes.graph.listing import SLICING
from chunkflow_compile.passes.graph.regions import Slicing
from chunkflow_compile.passes.graph.slice_graphs import Slice

from .memory import Memory
from .rewrite import Program


def check_repeats(program: Program, memory: Memory) -> Iterator[str]:
    """Yield one sentence for each case in which a repeated region of a program violates a rule in the module's docstring."""
    nodes = list(program.module.graph.nodes)
    number = {node: i for i, node in enumerate(nodes)}
    inputs = {node.name for node in nodes if node.op == "placeholder"}
    written = dict[Node, _Written]()
    for node in nodes:
        region = program.regions.get(str(node.target)) if node.op == "call_module" else None
        slicing = node.meta.get(SLICING)
        if region is not None and slicing != region.slicing:
            yield f"{node.name} is in slices {slicing}, but its region in {region.slicing}"
            continue
        if slicing is not None and not _fit(node, slicing):
            yield f"{node.name} has {len(node.args)} inputs and {len(node.users)} outputs, but other slices: {slicing}"
            continue
        yield from _check_complete(node, slicing, written)
        if slicing is not None:
            yield from _check_slices(node, slicing, written)
            yield from _check_overwritten(node, slicing, memory, number, inputs)


def _fit(node: Node, slicing: Slicing) -> bool:
    written = len(slicing.writes) == len(node.users) or (not slicing.writes and slicing.repeat == 1)
    return written and len(slicing.inputs) == len(node.args)


# The slices of a value that have been written, as (dimension, first element, end).
_Written = frozenset[tuple[int, int, int]]


def _check_complete(node: Node, slicing: Slicing | None, written: Mapping[Node, _Written]) -> Iterator[str]:
    """Check that all elements of the values that a node reads have been written."""
    overwritten = set() if slicing is None else {over for _, over in slicing.writes}
    for place, operand in enumerate(node.all_input_nodes if slicing is None else node.args):
        if not isinstance(operand, Node) or operand not in written or place in overwritten:
            continue
        if not _is_all(operand, written[operand]):
            yield f"{operand.name}: {node.name} reads it, but its calls write only {_text(written[operand])} of it"


def _check_slices(node: Node, slicing: Slicing, written: dict[Node, _Written]) -> Iterator[str]:
    """Check that slices are within their values, and that no element is written twice.  Update ``written``."""
    for operand, part in zip(node.args, slicing.inputs, strict=True):
        if part is not None and isinstance(operand, Node) and not _inside(operand, part, slicing.repeat):
            yield f"{operand.name}: {node.name} takes slices of it beyond its end: {part}, {slicing.repeat} times"
    elements = {user.args[1]: user for user in node.users}
    for i, (part, over) in enumerate(slicing.writes):
        element, before = elements[i], node.args[over] if over is not None else None
        if not _inside(element, part, slicing.repeat):
            yield f"{element.name}: {node.name} writes slices of it beyond its end: {part}, {slicing.repeat} times"
            continue
        begin, end = part.offset, part.offset + part.size * slicing.repeat
        earlier = written.get(before, frozenset()) if isinstance(before, Node) else frozenset()
        if isinstance(before, Node) and (before not in written or _is_all(before, earlier)):
            continue  # the region overwrites a complete value slice by slice
        if any(dim != part.dim or (first < end and begin < last) for dim, first, last in earlier):
            yield f"{element.name}: {node.name} writes {begin} to {end} of it, of which {_text(earlier)} is written already"
        written[element] = earlier | {(part.dim, begin, end)}


def _is_all(value: Node, parts: _Written) -> bool:
    """Return whether slices cover a whole value.  ``parts``: slices that do not overlap."""
    dim = next(iter(parts))[0]
    size: int = value.meta["val"].shape[dim]
    return sum(end - begin for _, begin, end in parts) == size


def _text(parts: _Written) -> str:
    return ", ".join(f"{begin} to {end}" for _, begin, end in sorted(parts))


def _inside(value: Node, part: Slice, repeat: int) -> bool:
    shape = value.meta["val"].shape
    end = part.offset + part.size * repeat
    return 0 <= part.dim < len(shape) and part.offset >= 0 and part.size > 0 and end <= shape[part.dim]


def _check_overwritten(
    node: Node, slicing: Slicing, memory: Memory, number: dict[Node, int], inputs: set[str]
) -> Iterator[str]:
    operands: list[Any] = list(node.args)
    overwritten = [over for _, over in slicing.writes if over is not None]
    if len(set(overwritten)) != len(overwritten):
        yield f"{node.name} overwrites one input with two outputs"
    for part, over in slicing.writes:
        if over is None or not 0 <= over < len(operands):
            continue
        taken, places = operands[over], memory.of[operands[over].name]
        if slicing.inputs[over] != part:
            yield (
                f"{taken.name}: {node.name} overwrites {part} of it in each call, but reads "
                f"{slicing.inputs[over] or 'all of it'}: a later call reads what an earlier one wrote"
            )
        for other in dict.fromkeys(operands[:over] + operands[over + 1 :]):
            if isinstance(other, Node) and memory.of[other.name] & places:
                yield f"{other.name}: {node.name} reads it in each call, and overwrites it as {taken.name}"
        if given := sorted(places & inputs):
            yield f"{given[0]}: {node.name} overwrites it, but it is an input of the program"
        for value in number:
            if number[value] > number[node] or not memory.of[value.name] & places:
                continue
            if late := [user for user in value.users if number[user] > number[node]]:
                yield f"{value.name}: {late[0].name} reads it after {node.name} has overwritten it"
