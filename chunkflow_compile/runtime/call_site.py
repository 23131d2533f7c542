"""Call sites.  A call site stands for all calls of one compiled graph at one input size with the weights of one model."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.program.cycle import Call, block_of
from chunkflow_compile.private_torch import core
from chunkflow_compile.weights.counts import Counts
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of
from chunkflow_compile.weights.host_weight import HostWeight, mark_of, state_of

from .cuda_graphs import CaptureLog
from .measurement import KEPT_MEASUREMENTS, StepMeasurement
from .target import Cost
from .variants import ActiveVariant, without_call_fields
from .wrapped_calls import tuple_getter

# The reason, shown in plans, why a weight stays on the device although other calls of the same compiled graph stream it.
_NOT_OFFLOADED = "on the device: not offloaded"

_version = attrgetter("_version")


class CallKey:
    """The key of a call: the identity of the weights that the call reads.  Calls share one key if they read the same weights
    in the same regions."""

    def __init__(self, buffers: Iterable[HostBuffer], settings: Settings) -> None:
        """``buffers``: the buffers of the weights.  ``settings``: the settings of the latest program that has this key."""
        self._settings = settings
        self._buffers = [weakref.ref(buffer) for buffer in buffers]

    @property
    def alive(self) -> bool:
        """Whether the weights still exist."""
        return all(ref() is not None for ref in self._buffers)

    def renew(self, settings: Settings) -> bool:
        """Record that a new program has this key.  Return whether the settings of this program, including its goal, differ
        from the settings of the previous program with the key."""
        before, self._settings = self._settings, settings
        return without_call_fields(before) != without_call_fields(settings)


class CallSite:
    """All calls of one compiled graph at one input size with the weights of one model.

    ``variant``: the variant that the calls run.  ``active``: the object that holds the variant for the next call.  After the
    model is re-planned, ``active`` holds another variant, and the next call creates a new call site.
    ``buffers``: the buffers of the offloaded weights, by name.  ``versions``: the versions of the offloaded weights, in the
    order of ``buffers``.  ``in_place``: the parameters that are not offloaded, by name.  ``kept_bytes``: the total bytes of
    the parameters in ``in_place``.
    ``reads``: ids of all weights; call sites that read the same weights have the same ids.  ``model``: an id of the model
    that owns the weights.  ``counts``: the counters of this model.
    ``steps``: the number of steps so far.  ``measured``: the measurements of the latest measured steps.  ``captures``: the
    log of captures of this call as CUDA graphs.
    """

    def __init__(self, active: ActiveVariant, parameters: Mapping[str, nn.Parameter]) -> None:
        self.active = active
        self.variant = active.variant
        self.program = program = active.variant.program
        self.buffers = {name: buffer for name, p in parameters.items() if (buffer := buffer_of(p)) is not None}
        self.in_place = {name: p for name, p in parameters.items() if name not in self.buffers}
        self.kept_bytes = sum(w.nbytes for w in program.problem.weights if w.name not in self.buffers)
        # the id of the store, not of the root module: once the module is gone, another object may get the id of the module
        self.model = next((id(buffer.store) for buffer in self.buffers.values()), 0)
        self.counts = next((buffer.store.counts for buffer in self.buffers.values()), Counts())
        self.steps = 0
        self.captures = CaptureLog(self.counts, active.variant.cudagraphs)
        self.measured: deque[StepMeasurement] = deque(maxlen=KEPT_MEASUREMENTS)
        self.reads = tuple(map(id, (*self.buffers.values(), *self.in_place.values())))
        self._fills = [buffer.fill for buffer in self.buffers.values() if buffer.fill is not None]
        self._stores = [*{id(buffer.store): buffer.store for buffer in self.buffers.values()}.values()]
        self._storeless = [p for p in self.in_place.values() if isinstance(p, HostWeight)]
        weights = [parameters[name] for name in self.buffers]
        # the marks are read before the states: if a weight changes in between, fits() finds a different mark and reads the
        # states again
        self._marks = list(map(mark_of, weights))
        self._watch(list(map(state_of, weights)))
        order = list(parameters)
        self._offloaded = tuple_getter([order.index(name) for name in self.buffers])
        self._others = tuple_getter([order.index(name) for name in self.in_place])
        self._kinds = [type(p) for p in self.in_place.values()]

    @property
    def part(self) -> bool:
        """Whether the program is only a part of a model, and therefore alternates with the programs of the other parts."""
        return self.variant.settings.part

    @property
    def seconds(self) -> list[float]:
        """The durations of the latest measured steps in seconds.  If launches of a CUDA graph were timed, the property
        contains the durations of the latest launches instead."""
        return [*self.captures.step_s] or [step.step_s for step in [*self.measured]]

    @property
    def is_stale(self) -> bool:
        """Whether the program can never run again, because one of its weights was dropped, moved or stored in other
        memory."""
        gone = any(buffer.token is None for buffer in self.buffers.values())
        return gone or any(buffer_of(p) is not None for p in self.in_place.values())

    @property
    def budget(self) -> tuple[int, int | None] | None:
        """A pair: an id of the model, and the maximum bytes of device memory that the newest goal allows for the model's
        offloaded weights.

        The bytes are None if there is no limit.  Instead of a pair, the property is None in two cases.  A program without
        offloaded weights needs no budget.  A preamble needs no budget, because the budget of its main program also covers
        the preamble.
        """
        settings = self.active.variant.settings
        if not self.buffers or settings.preamble:
            return None
        if settings.goal.memory is None:
            return self.model, None
        live = settings.goal.counted(self.program.problem.live_bytes)
        return self.model, max(0, settings.goal.memory - live - settings.external_bytes - self.kept_bytes)

    def count(self, cost: Cost) -> None:
        """Count a step that had this ``cost``."""
        self.steps += 1
        self.counts.add_call(cost.moved, cost.primed)

    def refresh(self, again: bool = False) -> None:
        """Let modules write the weights that they compute before each call, such as the weights of adapters.  Then find out
        whether exported weights (tensors of a state_dict) were written, because no version counter records these writes.

        The caller does not hold the lock of the arena.  ``again``: whether :meth:`refresh` already ran for the current call.
        If it did, exported weights are not checked again.  The reason is that each check may count an exported weight as
        written if the user still holds the exported tensor.  A weight that counts as written is copied to the device again.
        """
        for fill in self._fills:
            fill()
        for store in () if again else self._stores:
            if store.exported:
                store.sync_external_writes()

    def fits(self, weights: Sequence[nn.Parameter]) -> bool:
        """Return whether the program can run with the present ``weights`` of the call.  If the result is False, the caller
        makes a new program.

        ``weights``: the weights, in the order of the graph's parameters.  This method runs in every call, so it loops over
        the weights with built-in functions, which run in C, and not with Python loops.
        """
        if self.active.variant is not self.variant:
            return False
        offloaded = self._offloaded(weights)
        try:
            # without this context, torch would look up __torch_function__ for each tensor
            with core.DisableTorchFunctionSubclass():
                marks = list(map(mark_of, offloaded))
                same = marks == self._marks and list(map(_version, self._hosts)) == self._host_versions
                if not same or list(map(_version, self._exposed(offloaded))) != self._exposed_versions:
                    if not self._take_versions(offloaded):
                        return False
                    self._marks = marks
        except AttributeError:  # a weight is now an ordinary tensor, or is not in any store
            return False
        others = self._others(weights)
        if not all(map(is_, others, self.in_place.values())):
            return False
        # a weight that was offloaded after this call site was created is the same object, but has another class
        return list(map(type, others)) == self._kinds and not any(map(buffer_of, self._storeless))

    def _take_versions(self, offloaded: Iterable[torch.Tensor]) -> bool:
        """Record the new versions of weights that were written, so that the next step copies these weights to the device
        again.

        Returns False if the program cannot run with these weights, because a weight was exchanged, restored, replaced,
        stored in other memory, compressed or decompressed.
        """
        states = list(map(state_of, offloaded))
        if any(new[0] is not old[0] or new[1] != old[1] for new, old in zip(states, self._states, strict=True)):
            return False
        self._watch(states)
        return True

    def _watch(self, states: Sequence[tuple[Any, ...]]) -> None:
        """Store the states of the offloaded weights.  At the next call, :meth:`fits` compares the states at that time with
        the stored states."""
        buffers = [*self.buffers.values()]
        exposed = [i for i, buffer in enumerate(buffers) if buffer.exposed]
        self._states = states
        self.versions = tuple(sum(counts) for _, _, *counts in states)
        self._hosts, self._host_versions = [buffer.host for buffer in buffers], [state[3] for state in states]
        self._exposed, self._exposed_versions = tuple_getter(exposed), [states[i][4] for i in exposed]

    def names(self) -> dict[str, str]:
        """Return a mapping from each weight name in the graph to the weight's name in the model.

        The names differ if the graph was compiled for another block of the same type: the graph uses the names of that
        block.
        """
        names = {name: buffer.name for name, buffer in self.buffers.items()}
        blocks = {block_of(old): block_of(new) for old, new in names.items()}
        for weight in self.program.problem.weights:
            block = block_of(weight.name)
            names.setdefault(weight.name, blocks.get(block, block) + weight.name.removeprefix(block))
        return names

    def in_cycle(self, names: Mapping[str, str], live: int = 0) -> Call:
        """Return the :class:`Call` that stands for this call site in a cycle.  ``names``: weight name in this call site ->
        name in the cycle.  ``live``: see :class:`Call`."""
        keep = dict.fromkeys((names[name] for name in self.in_place), _NOT_OFFLOADED)
        in_files = frozenset(names[name] for name, buffer in self.buffers.items() if buffer.source.file)
        return Call(self.variant.cut, names, keep, in_files, live)

    def drop_weights(self) -> None:
        """Drop all references to weights.  The caller has ended the program."""
        self.buffers, self.in_place = {}, {}
        self._states, self._hosts, self._storeless, self._stores, self._fills = [], [], [], [], []
