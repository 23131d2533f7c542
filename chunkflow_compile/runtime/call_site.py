"""What programs tell their arena and the cycles in it, and what the calls of a cycle have in common."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from chunkflow_compile.passes.pipeline import Settings
from chunkflow_compile.passes.program.cycle import Call, block_of
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.weights.counts import Counts
from chunkflow_compile.weights.host_buffer import HostBuffer

from .codes import Code
from .measurement import StepMeasurement

# Why a weight stays that other calls of the same code stream.
_NOT_OFFLOADED = "on the device: not offloaded"


class CallKey:
    """What a call reads: the buffers of its weights.  Calls that read the same weights in the same regions have one key.

    ``settings``: of the newest program with this key.  ``site``: what it tells, None if it has ended.
    """

    def __init__(self, buffers: Iterable[HostBuffer], settings: Settings) -> None:
        self.settings = settings
        self._buffers = [weakref.ref(buffer) for buffer in buffers]
        self.site: Callable[[], CallSite | None] = lambda: None

    @property
    def lasts(self) -> bool:
        """Whether the weights still exist."""
        return all(ref() is not None for ref in self._buffers)


@dataclass(frozen=True, eq=False, kw_only=True)
class CallSite:
    """What a program tells the cycles of its arena.  It ends with the program's session.

    ``key``: None if it is never a call of a cycle.  ``buffers``: of its offloaded weights.  ``in_place``: its other weights,
    which have ``kept_bytes``.  ``model``: of which it is a program.  ``counts``: of this model.  ``file``: takes the
    predicted seconds and the measurement of each step.
    """

    key: CallKey | None
    code: Code
    buffers: Mapping[str, HostBuffer]
    in_place: tuple[str, ...]
    kept_bytes: int
    model: int
    counts: Counts
    file: Callable[[float, StepMeasurement], None]

    def __post_init__(self) -> None:
        if self.key is not None:
            self.key.site = weakref.ref(self)

    @property
    def part(self) -> bool:
        """Whether the program is a part of a model, and so runs in turns with others."""
        return self.code.settings.part

    def call(self, names: Mapping[str, str]) -> Call:
        """The program as a call of a cycle.  ``names``: of its weights in the cycle."""
        keep = dict.fromkeys((names[name] for name in self.in_place), _NOT_OFFLOADED)
        drive = frozenset(names[name] for name, buffer in self.buffers.items() if buffer.drive is not None)
        return Call(self.code.cut, names, keep, drive)

    def names(self) -> dict[str, str]:
        """The names of its weights in their model.  A graph that was compiled for another block has the names of that."""
        found = {name: buffer.name for name, buffer in self.buffers.items()}
        blocks = {block_of(old): block_of(new) for old, new in found.items()}
        for weight in self.code.program.problem.weights:
            block = block_of(weight.name)
            found.setdefault(weight.name, blocks.get(block, block) + weight.name.removeprefix(block))
        return found


class Bound(Protocol):
    """What is bound to the memory: a cycle, of several calls or of a program alone."""

    def unbind(self) -> None:
        """Wait for work in flight and drop every reference to the memory, which is allocated again."""


class Tenant(Protocol):
    """A program that runs in an arena.  The memory holds the chunks of one tenant at a time, or of one cycle of them."""

    program: Program

    key: CallKey | None
    """What its calls read, if it may run in a cycle."""

    @property
    def outlived(self) -> bool:
        """Whether a weight of the tenant is gone, so that it can never run again."""

    @property
    def budget(self) -> tuple[int, int | None]:
        """The model, and most bytes of its offloaded weights on the device; None for any."""

    def release(self) -> None:
        """Unbind the program outside cycles, and let go of the weights that it keeps on the device."""

    def close(self) -> None:
        """Leave the arena.  The next call of the program creates a new tenant."""


class Learnt(Protocol):
    """The cycles that the tenants run in."""

    def close(self) -> None:
        """Unbind for good."""


def sites_of(keys: Iterable[CallKey]) -> list[CallSite] | None:
    """The newest site of each key, None if one has ended."""
    found = [key.site() for key in keys]
    sites = [site for site in found if site is not None]
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
            names[name] = next(n for n in _numbered(wanted) if n not in taken)
            taken.add(names[name])
            if name in site.buffers:
                buffers[names[name]] = site.buffers[name]
        calls.append(site.call(names))
    return calls, buffers


def _numbered(name: str) -> Iterator[str]:
    """A name, and variants of it."""
    yield name
    yield from (f"{name} ({i})" for i in itertools.count(2))


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
