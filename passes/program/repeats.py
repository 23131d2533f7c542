"""Repeats: prove that the calls of a repeated region (graph/split.py) keep out of each other's values.

* Each call takes slices inside the values, and the slices of an output cover it without overlap.
* Memory that a call overwrites is read by no other call of the region: no input lies in it but the one that is overwritten,
  of which each call reads the slice that it overwrites.
* Overwritten memory is no input of the program, and what was in it is read by no later op and is no result.

Contract
    Reads a program and its memory only; it does not trust the passes that made them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from chunkflow_compile.passes.graph.listing import SLICED
from chunkflow_compile.passes.graph.slices import Slice, Sliced

from .memory import Memory
from .rewrite import Program


def check_repeats(program: Program, memory: Memory) -> Iterator[str]:
    """The violations of the repeated regions of a program, as sentences."""
    nodes = list(program.module.graph.nodes)
    number = {node: i for i, node in enumerate(nodes)}
    inputs = {node.name for node in nodes if node.op == "placeholder"}
    for node in nodes:
        if (region := program.regions.get(str(node.target))) is None or node.op != "call_module":
            continue
        sliced = node.meta.get(SLICED)
        if sliced != region.sliced:
            yield f"{node.name} is sliced as {sliced}, but its region as {region.sliced}"
        elif sliced is not None:
            yield from _check_slices(node, sliced)
            yield from _check_overwritten(node, sliced, memory, number, inputs)


def _check_slices(node: Node, sliced: Sliced) -> Iterator[str]:
    if len(sliced.inputs) != len(node.args):
        yield f"{node.name} has {len(node.args)} inputs, but slices of {len(sliced.inputs)}"
        return
    for operand, part in zip(node.args, sliced.inputs, strict=True):
        if part is not None and isinstance(operand, Node) and not _inside(operand, part, sliced.repeat):
            yield f"{node.name}: a call takes a slice of {operand.name} beyond its end: {part}"
    elements = {user.args[1]: user for user in node.users}
    for i, (part, over) in enumerate(sliced.writes):
        if (element := elements.get(i)) is None:
            continue
        if over is None and not _covers(element, part, sliced.repeat):
            yield f"{node.name}: its calls do not write all of {element.name}: {part}, {sliced.repeat} times"
        if over is not None and not _inside(element, part, sliced.repeat):
            yield f"{node.name}: a call writes a slice of {element.name} beyond its end: {part}"


def _check_overwritten(
    node: Node, sliced: Sliced, memory: Memory, number: dict[Node, int], inputs: set[str]
) -> Iterator[str]:
    operands: list[Any] = list(node.args)
    overwritten = [over for _, over in sliced.writes if over is not None]
    if len(set(overwritten)) != len(overwritten):
        yield f"{node.name} overwrites one input with two outputs"
    for part, over in sliced.writes:
        if over is None or not 0 <= over < len(operands):
            continue
        taken, places = operands[over], memory.of[operands[over].name]
        if sliced.inputs[over] != part:
            yield (
                f"{taken.name}: {node.name} overwrites {part} of it in each call, but reads "
                f"{sliced.inputs[over] or 'all of it'}: a later call reads what an earlier one wrote"
            )
        for other in dict.fromkeys(operands[:over] + operands[over + 1 :]):
            if isinstance(other, Node) and memory.of[other.name] & places:
                yield f"{other.name}: {node.name} reads it in each call, and overwrites it as {taken.name}"
        if given := sorted(places & inputs):
            yield f"{given[0]}: {node.name} overwrites it, but it is an input of the program"
        outputs = set(node.users)
        for value in number:
            if number[value] > number[node] or not memory.of[value.name] & places:
                continue
            late = [u for u in value.users if number[u] > number[node] and not outputs & {value}]
            if late:
                yield f"{value.name}: {late[0].name} reads it after {node.name} has overwritten it"


def _inside(value: Node, part: Slice, repeat: int) -> bool:
    shape = value.meta["val"].shape
    return 0 <= part.dim < len(shape) and 0 <= part.offset and part.size > 0 and _end(part, repeat) <= shape[part.dim]


def _covers(value: Node, part: Slice, repeat: int) -> bool:
    shape = value.meta["val"].shape
    return _inside(value, part, repeat) and part.offset == 0 and _end(part, repeat) == shape[part.dim]


def _end(part: Slice, repeat: int) -> int:
    return part.offset + part.size * repeat
