"""Call sites: each is a compiled graph at one size, on the weights of one model: what it reads, and which code runs."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from chunkflow_compile.passes.pipeline import Settings
from chunkflow_compile.passes.program.cycle import Call, block_of
from chunkflow_compile.private_torch import core
from chunkflow_compile.weights.counts import Counts
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of
from chunkflow_compile.weights.host_weight import HostWeight, mark_of, state_of

from .codes import CurrentCode, bare
from .cuda_graphs import CaptureLog
from .measurement import KEPT_MEASUREMENTS, StepMeasurement
from .target import Cost
from .wrapped_calls import tuple_getter

# Why a weight stays that other calls of the same code stream.
_NOT_OFFLOADED = "on the device: not offloaded"

_version = attrgetter("_version")


class CallKey:
    """What a call reads: the buffers of its weights.  Calls that read the same weights in the same regions have one key."""

    def __init__(self, buffers: Iterable[HostBuffer], settings: Settings) -> None:
        """``settings``: of the newest program with this key."""
        self._settings = settings
        self._buffers = [weakref.ref(buffer) for buffer in buffers]

    @property
    def alive(self) -> bool:
        """Whether the weights still exist."""
        return all(ref() is not None for ref in self._buffers)

    def renew(self, settings: Settings) -> bool:
        """There is a new program with this key.  Returns whether it is planned for another goal than the one before."""
        before, self._settings = self._settings, settings
        return bare(before) != bare(settings)


class CallSite:
    """The calls of a compiled graph, at one size, on the weights of one model: what they run, and what they read.

    ``code``: that they run; ``current``: that the next one runs.  ``buffers``: of the offloaded weights; ``versions``: of
    their values, in this order.  ``in_place``: the other weights, which have ``kept_bytes``.  ``model``: whose weights they
    are.  ``counts``: of this model.  ``steps``: so far; ``measured``: the newest ones.  ``captures``: as CUDA graphs.
    """

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
        self.captures = CaptureLog(self.counts, current.code.cudagraphs)
        self.measured: deque[StepMeasurement] = deque(maxlen=KEPT_MEASUREMENTS)
        self.reads = tuple(map(id, (*self.buffers.values(), *self.in_place.values())))  # equal for the same weights
        self._fills = [buffer.fill for buffer in self.buffers.values() if buffer.fill is not None]
        self._stores = [*{id(buffer.store): buffer.store for buffer in self.buffers.values()}.values()]
        self._bare = [p for p in self.in_place.values() if isinstance(p, HostWeight)]
        weights = [parameters[name] for name in self.buffers]
        self._marks = list(map(mark_of, weights))  # first: a change meanwhile gives another one
        self._watch(list(map(state_of, weights)))
        order = list(parameters)
        self._offloaded = tuple_getter([order.index(name) for name in self.buffers])
        self._others = tuple_getter([order.index(name) for name in self.in_place])
        self._kinds = [type(p) for p in self.in_place.values()]

    @property
    def part(self) -> bool:
        """Whether the program is a part of a model, and so runs in turns with others."""
        return self.code.settings.part

    @property
    def seconds(self) -> list[float]:
        """What its newest steps took: as one CUDA graph, if it is one."""
        return [*self.captures.step_s] or [step.step_s for step in [*self.measured]]

    @property
    def is_stale(self) -> bool:
        """Whether a weight was dropped, moved or given other memory, so that the program can never run again."""
        gone = any(buffer.token is None for buffer in self.buffers.values())
        return gone or any(buffer_of(p) is not None for p in self.in_place.values())

    @property
    def budget(self) -> tuple[int, int | None] | None:
        """The model, and most bytes of its offloaded weights on the device, by the newest goal; None without a limit.

        None instead of both if the other programs of the model decide.  A program without offloaded weights is not known to
        be one of a model's, and needs no budget.
        """
        settings = self.current.code.settings
        if not self.buffers or settings.preamble:
            return None
        if settings.goal.memory is None:
            return self.model, None
        live = settings.goal.counted(self.program.problem.live_bytes)
        return self.model, max(0, settings.goal.memory - live - settings.outside - self.kept_bytes)

    def count(self, cost: Cost) -> None:
        """It has run, at this cost."""
        self.steps += 1
        self.counts.add_call(cost.moved, cost.primed)

    def notice(self, again: bool = False) -> None:
        """Let modules fill their buffers, and notice what was written unseen since the last call.  The arena is not locked.

        ``again``: whether this call has noticed before, and what is in use would be noticed again.
        """
        for fill in self._fills:
            fill()
        for store in () if again else self._stores:
            if store.exported:
                store.sync_external_writes()

    def fits(self, weights: Sequence[nn.Parameter]) -> bool:
        """Whether the program can run on its weights as they are now; if not, a new one is needed.

        ``weights``: in the order of the parameters.  Every call comes here, so what loops over them is in C.
        """
        if self.current.code is not self.code:
            return False
        offloaded = self._offloaded(weights)
        try:
            with core.DisableTorchFunctionSubclass():  # else each tensor is asked for an override of _version
                marks = list(map(mark_of, offloaded))
                same = marks == self._marks and list(map(_version, self._hosts)) == self._host_versions
                if not same or list(map(_version, self._exposed(offloaded))) != self._exposed_versions:
                    if not self._take_versions(offloaded):
                        return False
                    self._marks = marks
        except AttributeError:  # it is an ordinary tensor now, or in no store
            return False
        others = self._others(weights)
        if not all(map(is_, others, self.in_place.values())):
            return False
        # one that has become offloaded is the same object of another class
        return list(map(type, others)) == self._kinds and not any(map(buffer_of, self._bare))

    def _take_versions(self, offloaded: Iterable[torch.Tensor]) -> bool:
        """Take over the versions of weights that were written, because their copies on the device are out of date.

        Returns False if a weight was exchanged, restored, replaced, given other memory, packed or unpacked.
        """
        states = list(map(state_of, offloaded))
        if any(new[0] is not old[0] or new[1] != old[1] for new, old in zip(states, self._states, strict=True)):
            return False
        self._watch(states)
        return True

    def _watch(self, states: Sequence[tuple[Any, ...]]) -> None:
        """Keep the states of the offloaded weights, and the versions that the next call compares."""
        buffers = [*self.buffers.values()]
        exposed = [i for i, buffer in enumerate(buffers) if buffer.exposed]
        self._states = states
        self.versions = tuple(sum(counts) for _, _, *counts in states)
        self._hosts, self._host_versions = [buffer.host for buffer in buffers], [state[3] for state in states]
        self._exposed, self._exposed_versions = tuple_getter(exposed), [states[i][4] for i in exposed]

    def names(self) -> dict[str, str]:
        """The names of its weights in their model.  A graph that was compiled for another block has the names of that."""
        names = {name: buffer.name for name, buffer in self.buffers.items()}
        blocks = {block_of(old): block_of(new) for old, new in names.items()}
        for weight in self.program.problem.weights:
            block = block_of(weight.name)
            names.setdefault(weight.name, blocks.get(block, block) + weight.name.removeprefix(block))
        return names

    def in_cycle(self, names: Mapping[str, str], live: int = 0) -> Call:
        """It as a call of a cycle.  ``names``: of its weights there.  ``live``: as in :class:`Call`."""
        keep = dict.fromkeys((names[name] for name in self.in_place), _NOT_OFFLOADED)
        in_files = frozenset(names[name] for name, buffer in self.buffers.items() if buffer.source.file)
        return Call(self.code.cut, names, keep, in_files, live)

    def let_go(self) -> None:
        """Hold no weights any more: the program has ended."""
        self.buffers, self.in_place = {}, {}
        self._states, self._hosts, self._bare, self._stores, self._fills = [], [], [], [], []
