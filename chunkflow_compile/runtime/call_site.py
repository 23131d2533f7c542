"""What arenas and cycles know of a program, and what the calls of a cycle have in common."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from torch import nn

from chunkflow_compile.passes.pipeline import Settings
from chunkflow_compile.passes.program.cycle import Call, block_of
from chunkflow_compile.weights.counts import Counts
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of

from .codes import CurrentCode
from .measurement import KEPT_MEASUREMENTS, StepMeasurement

# Why a weight stays that other calls of the same code stream.
_NOT_OFFLOADED = "on the device: not offloaded"


class CallKey:
    """What a call reads: the buffers of its weights.  Calls that read the same weights in the same regions have one key.

    ``settings``: of the newest program with this key.  ``site``: that program, None if it no longer exists.
    """

    def __init__(self, buffers: Iterable[HostBuffer], settings: Settings) -> None:
        self.settings = settings
        self._buffers = [weakref.ref(buffer) for buffer in buffers]
        self.site: Callable[[], CallSite | None] = lambda: None

    @property
    def lasts(self) -> bool:
        """Whether the weights still exist."""
        return all(ref() is not None for ref in self._buffers)


class CallSite:
    """A program on the weights of one model: what its arena, and the cycles there, know of it.

    The memory holds the chunks of one program at a time, or of one cycle of them.

    ``code``: that it runs; ``current``: that the next call runs.  ``key``: what its calls read, None if it is never a call of
    a cycle.  ``buffers``: of its offloaded weights.  ``in_place``: its other weights, which have ``kept_bytes``.  ``model``:
    of which it is a program.  ``counts``: of this model.  ``measured``: its newest steps.  ``closed``: whether it has ended.
    ``versions``: of the values of its offloaded weights, in the order of ``buffers``.  ``alone``: the program outside cycles
    of several calls.
    """

    alone: Bound

    key: CallKey | None = None
    closed = False
    versions: tuple[int, ...] = ()

    def __init__(self, current: CurrentCode, parameters: Mapping[str, nn.Parameter]) -> None:
        self.current = current
        self.code = current.code
        self.program = current.code.program
        self.buffers = {name: buffer for name, p in parameters.items() if (buffer := buffer_of(p)) is not None}
        self.in_place = {name: p for name, p in parameters.items() if name not in self.buffers}
        self.kept_bytes = sum(w.nbytes for w in self.program.problem.weights if w.name not in self.buffers)
        # not the root module: it may be gone, and its id another's
        self.model = next((id(buffer.store) for buffer in self.buffers.values()), 0)
        self.counts = next((buffer.store.counts for buffer in self.buffers.values()), Counts())
        self.measured: deque[StepMeasurement] = deque(maxlen=KEPT_MEASUREMENTS)
        self.reads = tuple(map(id, (*self.buffers.values(), *self.in_place.values())))  # equal for the same weights

    @property
    def part(self) -> bool:
        """Whether the program is a part of a model, and so runs in turns with others."""
        return self.code.settings.part

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

    def close(self) -> None:
        """Leave the arena.  The next call of the program creates another site."""
        raise NotImplementedError

    def call(self, names: Mapping[str, str]) -> Call:
        """The program as a call of a cycle.  ``names``: of its weights in the cycle."""
        keep = dict.fromkeys((names[name] for name in self.in_place), _NOT_OFFLOADED)
        drive = frozenset(names[name] for name, buffer in self.buffers.items() if buffer.drive is not None)
        return Call(self.code.cut, names, keep, drive)

    def names(self) -> dict[str, str]:
        """The names of its weights in their model.  A graph that was compiled for another block has the names of that."""
        found = {name: buffer.name for name, buffer in self.buffers.items()}
        blocks = {block_of(old): block_of(new) for old, new in found.items()}
        for weight in self.program.problem.weights:
            block = block_of(weight.name)
            found.setdefault(weight.name, blocks.get(block, block) + weight.name.removeprefix(block))
        return found


class Bound(Protocol):
    """What is bound to the memory: a cycle, of several calls or of a program alone."""

    def unbind(self) -> None:
        """Wait for work in flight and drop every reference to the memory, which is allocated again."""

    def release(self) -> None:
        """Unbind, and let go of the weights that it keeps on the device beside the memory."""


class Learnt(Protocol):
    """The cycles that the tenants run in."""

    def close(self) -> None:
        """Unbind for good."""


def sites_of(keys: Iterable[CallKey]) -> list[CallSite] | None:
    """The newest site of each key, None if one has ended."""
    found = [key.site() for key in keys]
    sites = [site for site in found if site is not None and not site.closed]
    return sites if len(sites) == len(found) else None


def calls_of(sites: Sequence[CallSite]) -> tuple[list[Call], dict[str, HostBuffer]]:
    """The calls of a cycle, and the buffers of its weights by their names in it.

    A weight that two calls read is two weights of the cycle: it is fetched for each.
    """
    calls = list[Call]()
    buffers: dict[str, HostBuffer] = {}
    taken = set[str]()
    for site in sites:
        names: dict[str, str] = {}
        for name, wanted in site.names().items():
            numbered = (f"{wanted} ({i})" for i in itertools.count(2))
            names[name] = next(n for n in itertools.chain([wanted], numbered) if n not in taken)
            taken.add(names[name])
            if name in site.buffers:
                buffers[names[name]] = site.buffers[name]
        calls.append(site.call(names))
    return calls, buffers


def bare(settings: Settings) -> Settings:
    """Without what differs between sizes of one call, and between calls."""
    return replace(settings, likes=(), part=False, outside=0)


def common(sites: Sequence[CallSite]) -> Settings | None:
    """The settings of a cycle, None if those of its calls do not agree.  The budget is the largest."""
    shared = [replace(bare(s.code.settings), memory=None) for s in sites]
    if any(s != shared[0] for s in shared):
        return None
    memory = max((m for s in sites if (m := s.code.settings.memory) is not None), default=None)
    return replace(shared[0], memory=memory, outside=_outside(sites))


def _outside(sites: Sequence[CallSite]) -> int:
    """Bytes on the device of the weights of these models that none of the calls reads."""
    left: dict[int, int] = {}
    for site in {id(s.key): s for s in sites}.values():
        left[site.model] = left.get(site.model, site.code.settings.outside + site.kept_bytes) - site.kept_bytes
    return sum(max(0, nbytes) for nbytes in left.values())


def folder_of(sites: Iterable[CallSite]) -> Path | None:
    """The folder of the dump of one of these calls, if there is one."""
    return next((s.code.folder for s in sites if s.code.folder is not None), None)
