"""A code is the result of compilation; a call is a code on the weights of one model."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.names import Policy, Yield
from chunkflow_compile.passes.pipeline import Settings, Stage
from chunkflow_compile.passes.program.cycle import Call as CycleCall
from chunkflow_compile.passes.program.cycle import block_of
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.weights.counts import Counts
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of
from chunkflow_compile.weights.host_weight import HostWeight, state_of

from .device import DeviceKind
from .instructions import tuple_getter
from .measurement import KEPT_MEASUREMENTS, StepMeasurement

# Why a weight stays that other calls of the same code stream.
_NOT_OFFLOADED = "on the device: not offloaded"

Sizes = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What plans are made for: the options of these names, or what replan has set since."""

    memory: int | None
    slowdown: float | None
    policy: Policy
    yields: Yield

    @staticmethod
    def of(settings: Settings) -> Goal:
        return Goal(memory=settings.memory, slowdown=settings.slowdown, policy=settings.policy, yields=settings.yields)


@dataclass(frozen=True, kw_only=True, eq=False)
class Code:
    """The result of compilation.  ``regions``: name of a submodule of the program -> its lowered code.

    ``cut`` and ``settings``: what the program was made of.
    ``make``: runs the passes on other pieces or with other settings, passed by name; returns the last stage and folder.
    ``replan_after``: the number of warm steps after which to plan again from their times; 0 for never.
    ``folder``: where measurements are written.  ``kind``: of device.  ``poison``: see :class:`Executor`.
    ``pin_bytes``: most host bytes to pin, None for what the machine leaves.
    ``notes``: for the user, on what was compiled.  ``advice``: returns a sentence on what would fit if the arena does not.
    """

    program: Program
    cut: Cut
    settings: Settings
    regions: Mapping[str, Callable[..., Sequence[Any]]]
    make: Callable[..., tuple[Stage, Path | None]]
    replan_after: int = 0
    folder: Path | None = None
    kind: DeviceKind
    poison: bool = False
    pin_bytes: int | None = None
    notes: tuple[str, ...] = ()
    advice: Callable[..., str] = str

    @property
    def verified(self) -> bool:
        """Whether the program was verified, and is to be verified together with others in its arena."""
        return "verify" not in self.settings.disabled

    def remade(self, **settings: Any) -> Code:
        """The code for other settings, without compiling.  Raises ChunkflowError if no plan meets them."""
        settings = {"likes": (), **settings}
        stage, folder = self.make(pieces=self.cut, **settings)
        assert stage.program is not None
        advice = partial(self.advice, memory=settings["memory"]) if "memory" in settings else self.advice
        make = partial(self.make, **settings)
        made = replace(self, program=stage.program, settings=replace(self.settings, **settings))
        return replace(made, folder=folder, make=make, advice=advice, replan_after=0)

    def at(self, traced: Traced) -> Code:
        """The code at other sizes of the same graph: another plan of the same regions.  Raises as ``remade``."""
        pieces, likes = self.cut.at(traced), ((self.program.problem, self.program.plan),)
        if self.folder is None:
            stage, _ = self.make(pieces=pieces, likes=likes, last="planned")
            assert stage.plan is not None
            if stage.plan.placement == self.program.plan.placement:  # its transfers are proved
                program = replace(self.program, problem=pieces.problem, plan=stage.plan)
                return replace(self, program=program, cut=pieces)
            likes = ((pieces.problem, stage.plan),)
        stage, folder = self.make(pieces=pieces, likes=likes)
        assert stage.program is not None
        return replace(self, program=stage.program, cut=pieces, folder=folder)


@dataclass(eq=False)
class CurrentCode:
    """The code that runs on the weights of one model.  It outlives the model's programs.

    ``by_itself``: ``replan_after`` chose the code, not the user, so a failure to start it is logged and not raised.
    """

    code: Code
    by_itself: bool = False

    def run(self, code: Code, by_itself: bool) -> None:
        """Let the next call run ``code``."""
        self.code, self.by_itself = code, by_itself


class CallKey:
    """What a call reads: the buffers of its weights.  Calls that read the same weights in the same regions have one key.

    ``settings``: of the newest program with this key.
    """

    def __init__(self, buffers: Iterable[HostBuffer], settings: Settings) -> None:
        self.settings = settings
        self._buffers = [weakref.ref(buffer) for buffer in buffers]

    @property
    def alive(self) -> bool:
        """Whether the weights still exist."""
        return all(ref() is not None for ref in self._buffers)


class Call:
    """The calls of a compiled graph, at one size, on the weights of one model: what they run, and what they read.

    ``code``: that they run; ``current``: that the next one runs.  ``key``: what they read, None if they are never calls of a
    cycle.  ``buffers``: of the offloaded weights; ``versions``: of their values, in this order.  ``in_place``: the other
    weights, which have ``kept_bytes``.  ``model``: whose weights they are.  ``counts``: of this model.  ``steps``: so far;
    ``measured``: the newest ones.
    """

    key: CallKey | None = None

    def __init__(self, current: CurrentCode, parameters: Mapping[str, nn.Parameter]) -> None:
        self.current = current
        self.code = current.code
        self.program = program = current.code.program
        self.buffers = {name: buffer for name, p in parameters.items() if (buffer := buffer_of(p)) is not None}
        self.in_place = {name: p for name, p in parameters.items() if name not in self.buffers}
        self.kept_bytes = sum(w.nbytes for w in program.problem.weights if w.name not in self.buffers)
        # not the root module: it may be gone, and its id another's
        self.model = next((id(buffer.store) for buffer in self.buffers.values()), 0)
        self.counts = next((buffer.store.counts for buffer in self.buffers.values()), Counts())
        self.steps = 0
        self.measured: deque[StepMeasurement] = deque(maxlen=KEPT_MEASUREMENTS)
        self.reads = tuple(map(id, (*self.buffers.values(), *self.in_place.values())))  # equal for the same weights
        self._fills = [buffer.fill for buffer in self.buffers.values() if buffer.fill is not None]
        self._stores = [*{id(buffer.store): buffer.store for buffer in self.buffers.values()}.values()]
        self._bare = [p for p in self.in_place.values() if isinstance(p, HostWeight)]
        self._states = [state_of(parameters[name]) for name in self.buffers]
        self.versions = _versions(self._states)
        order = list(parameters)
        self._offloaded = tuple_getter([order.index(name) for name in self.buffers])
        self._others = tuple_getter([order.index(name) for name in self.in_place])
        self._kinds = [type(p) for p in self.in_place.values()]

    @property
    def part(self) -> bool:
        """Whether the program is a part of a model, and so runs in turns with others."""
        return self.code.settings.part

    @property
    def name(self) -> str:
        """The same on every rank, whose shards may differ in size."""
        problem = self.program.problem
        block = next((block for buffer in self.buffers.values() if (block := block_of(buffer.name))), "")
        name = block if self.part and block else "the model"
        return f"{name} ({len(problem.regions)} regions, {len(problem.collectives)} collectives)"

    @property
    def outlived(self) -> bool:
        """Whether a weight was dropped, moved or given other memory, so that the program can never run again."""
        gone = any(buffer.life is None for buffer in self.buffers.values())
        return gone or any(buffer_of(p) is not None for p in self.in_place.values())

    @property
    def budget(self) -> tuple[int, int | None]:
        """The model, and most bytes of its offloaded weights on the device, by the newest goal; None for any.

        A program without such weights is not known to be one of a model's, and needs no budget.
        """
        if not self.buffers:
            return self.model, 0
        settings = self.current.code.settings
        if settings.memory is None:
            return self.model, None
        return self.model, max(0, settings.memory - settings.outside - self.kept_bytes)

    def notice(self, again: bool = False) -> None:
        """Let modules fill their buffers, and notice what was written unseen since the last call.  The arena is not locked.

        ``again``: whether this call has noticed before, and what is in use would be noticed again.
        """
        for fill in self._fills:
            fill()
        for store in () if again else self._stores:
            if store.lent:
                store.reclaim()

    def fits(self, weights: Sequence[nn.Parameter]) -> bool:
        """Whether the program can run on its weights as they are now; if not, a new one is needed.

        ``weights``: in the order of the parameters.  Every call comes here, so what loops over them is in C.
        """
        if self.current.code is not self.code:
            return False
        try:
            with torch._C.DisableTorchFunctionSubclass():  # else each tensor is asked for an override of _version
                states = list(map(state_of, self._offloaded(weights)))
            if states != self._states:
                # other numbers: it was written, so copies of it on the device are out of date
                if any(new[0] is not old[0] for new, old in zip(states, self._states, strict=True)):
                    return False  # it was exchanged, restored, replaced, or given other memory
                self._states, self.versions = states, _versions(states)
        except AttributeError:  # it is an ordinary tensor now, or in no store
            return False
        others = self._others(weights)
        if not all(map(is_, others, self.in_place.values())):
            return False
        # one that has become offloaded is the same object of another class
        return list(map(type, others)) == self._kinds and not any(map(buffer_of, self._bare))

    def repeats(self, other: Call) -> bool:
        """Whether it is the same program on the same weights."""
        same = self.buffers.keys() == other.buffers.keys()
        same = same and all(buffer is other.buffers[name] for name, buffer in self.buffers.items())
        return same and self.program.same_as(other.program)  # last: there are many programs, few on the same weights

    def names(self) -> dict[str, str]:
        """The names of its weights in their model.  A graph that was compiled for another block has the names of that."""
        found = {name: buffer.name for name, buffer in self.buffers.items()}
        blocks = {block_of(old): block_of(new) for old, new in found.items()}
        for weight in self.program.problem.weights:
            block = block_of(weight.name)
            found.setdefault(weight.name, blocks.get(block, block) + weight.name.removeprefix(block))
        return found

    def in_cycle(self, names: Mapping[str, str]) -> CycleCall:
        """It as a call of a cycle.  ``names``: of its weights there."""
        keep = dict.fromkeys((names[name] for name in self.in_place), _NOT_OFFLOADED)
        drive = frozenset(names[name] for name, buffer in self.buffers.items() if buffer.drive is not None)
        return CycleCall(self.code.cut, names, keep, drive)

    def let_go(self) -> None:
        """Hold no weights any more: the program has ended."""
        self.buffers, self.in_place = {}, {}
        self._states, self._bare, self._stores, self._fills = [], [], [], []


def _versions(states: Iterable[tuple[Any, ...]]) -> tuple[int, ...]:
    """:attr:`HostBuffer.version` of each weight, from what :func:`state_of` returns."""
    return tuple(sum(counts) for _, _, *counts in states)


def bare(settings: Settings) -> Settings:
    """Without what differs between sizes of one call, and between calls."""
    return replace(settings, likes=(), part=False, outside=0)
