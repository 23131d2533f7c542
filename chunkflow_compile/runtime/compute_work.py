"""The work that the compute stream does on the values of a step: it runs regions and other nodes, and drops values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.graph.listing import SLICING
from chunkflow_compile.passes.plan import runs

from .target import Target
from .wrapped_calls import LoweredRegion, checked, owning, repeated, tuple_getter, undeclared

# A function that the compute stream runs.  Its argument is the list of the values of a step, which it reads and sets.
Work = Callable[[list[Any]], None]
# A function whose argument is the list of the values of a step.  It returns the positional and the keyword operands of a
# node.
Reader = Callable[[list[Any]], tuple[Sequence[Any], Mapping[str, Any]]]


@dataclass(frozen=True)
class Compute:
    """A piece of work for the compute stream.

    ``window``: the index of the region whose compute time includes the work; None if the work is not timed.  ``name``: the
    name that profilers show.  ``once``: if a step computes several rows, whether the work runs only for the last of these
    rows.
    """

    work: Work
    window: int | None = None
    name: str = ""
    once: bool = False


@dataclass(frozen=True)
class PicksAndDrops:
    """Work that first takes elements from the outputs of regions and then drops values, all in one function.

    ``picks``: for each element, the number of the value to set, the number of the value that contains the region's outputs,
    and the index of the element in these outputs.
    ``drops``: the numbers of the values to drop.
    """

    picks: list[tuple[int, int, Any]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)

    def work(self) -> Work:
        """Return the work as a function.  The function reads the lists when it runs, so the caller may still add picks and
        drops after ``work`` has returned."""
        return partial(_pick_and_drop, self.picks, self.drops)


def region_work(target: Target, node: Node, index: int, taken: Sequence[int]) -> Compute:
    """Return the work that calls a region.

    ``index``: the index of the region in the problem of the program.  ``taken``: the numbers of the values that only this
    region still reads; the work drops these values before it calls the region.
    """
    program, values, module = target.program, target.binding.values, str(node.target)
    read = program.problem.regions[index].weights
    number, take = target.number[node], tuple_getter([target.number[operand] for operand in node.args])
    region = target.regions[module]
    if (slicing := node.meta.get(SLICING)) is not None:
        outputs = sorted(node.users, key=lambda user: cast(int, user.args[1]))
        region = repeated(region, slicing, [output.meta["val"] for output in outputs])
    # a call that is recorded needs no check, because it was checked when it ran op by op before
    if not target.device.records and (ops := undeclared(getattr(program.module, module))):
        region = checked(region, {w: values[w] for w in read if w in values}, ops)

    def settled(later: LoweredRegion) -> None:
        nonlocal region
        region = later

    region = owning(region, [values[w] for w in read if w in values], settled)

    def work(env: list[Any]) -> None:
        inputs = [*take(env)]
        for value in taken:
            env[value] = None
        env[number] = region(inputs)

    named = program.plan.regions[program.start + index]
    return Compute(work, index, " ".join(w for w in (node.name, *named) if w))


def node_work(target: Target, node: Node) -> Work:
    """Return the work of a node outside of regions: a constant, the outputs of the graph, or any op except ``getitem``."""
    place, function = target.number, cast(Any, node.target)
    number = place[node]
    if node.op == "get_attr":
        return partial(_put, number, getattr(target.program.module, str(node.target)))
    if node.op == "output":
        return partial(_output, number, reader(place, cast(Any, node.args[0])))
    return partial(_call, number, function, reader(place, node.args, node.kwargs))


def poison_work(target: Target, weight: str) -> Work:
    """Return the work that overwrites the streamed chunks of an evicted weight.  The resident chunks of the weight keep
    their values, because later steps do not copy these chunks again.

    No event is needed between this work and the next copies of the streamed chunks.  These copies wait until their window
    opens, and the compute stream opens this window only after it has overwritten the chunks.
    """
    plan = target.program.plan
    placed = next(w for w in plan.streamed if w.name == weight)
    spans = [plan.span(placed, r.first, r.end) for r in runs(placed.windows) if r.window is not None]
    return partial(_poison, [target.binding.slots[weight][begin:end] for begin, end in spans])


def reader(number: Mapping[Node, int], operands: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Reader:
    """Return a :data:`Reader`: a function that gets the values of a step and returns the operands of a node.  ``number``:
    node -> its index among the values."""
    kwargs = kwargs or {}
    if not kwargs and all(isinstance(a, Node) for a in operands):  # the operands of a region are of this form
        take = tuple_getter([number[a] for a in operands])
        return lambda env: (take(env), kwargs)
    nested = list[Node]()
    map_arg([a for a in operands if not isinstance(a, Node)], nested.append)
    if not kwargs and not nested:  # the operands of a collective are of this form
        places = [(number[a], None) if isinstance(a, Node) else (-1, a) for a in operands]
        return lambda env: ([constant if n < 0 else env[n] for n, constant in places], kwargs)

    def read(env: list[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return map_arg((operands, kwargs), lambda n: env[number[n]])

    return read


def together(works: Sequence[Work]) -> Work:
    return works[0] if len(works) == 1 else partial(run_all, works)


def run_all(works: Sequence[Work], env: list[Any]) -> None:
    for work in works:
        work(env)


def _pick_and_drop(picks: Sequence[tuple[int, int, Any]], drops: Sequence[int], env: list[Any]) -> None:
    for number, whole, element in picks:
        env[number] = env[whole][element]
    for number in drops:
        env[number] = None


def _put(number: int, value: Any, env: list[Any]) -> None:
    env[number] = value


def _call(number: int, function: Callable[..., Any], read: Reader, env: list[Any]) -> None:
    args, kwargs = read(env)
    env[number] = function(*args, **kwargs)


def _output(number: int, read: Reader, env: list[Any]) -> None:
    """Set the value of the output node: a tuple of the outputs."""
    env[number] = tuple(read(env)[0])


def _poison(pieces: Sequence[torch.Tensor], env: list[Any]) -> None:
    """Set all bits of the given memory.  A value with all bits set is NaN in every floating-point type except the ``fnuz``
    variants of float8."""
    for piece in pieces:
        piece.fill_(255)
