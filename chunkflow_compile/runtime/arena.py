"""The device arena: one allocation and its streams, shared by programs that run one step at a time."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

import torch
from torch.fx import GraphModule

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import ALIGNMENT
from chunkflow_compile.passes.program.cycle import Cycle
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.program.verify import verify_together
from chunkflow_compile.units import size
from chunkflow_compile.weights.bytes import as_weight
from chunkflow_compile.weights.host_buffer import HostBuffer
from chunkflow_compile.weights.host_store import pin_all
from chunkflow_compile.weights.locks import ProcessLock, aside
from chunkflow_compile.weights.progress import moving
from chunkflow_compile.weights.source import Bytes, DriveBytes
from chunkflow_compile.weights.staging import GpuStagings

from .arena_contents import ArenaContents
from .cuda_graphs import CudaGraphs
from .device import DeviceKind, check_device, make_device
from .device_base import Device
from .input_bits import InputBits
from .read_ahead import DriveReader

Make = Callable[[torch.device, DeviceKind], Device]


class SharedDevice(Protocol):
    """What decides how much of a device the arenas on it may take, as an arena knows it."""

    def make_room(self, arena: Arena, nbytes: int) -> None:
        """Called before the memory of the arena has ``nbytes``."""

    def most_bytes(self, arena: Arena) -> int | None:
        """Most bytes of weights in the arena, of all models together; None for the sum of their budgets."""


class Owner(Protocol):
    """A program or a cycle, as the arena knows it in whose memory it runs."""

    def unbind(self) -> None:
        """Wait for work in flight and drop every reference to the memory, which is allocated again."""


class Tenant(Owner, Protocol):
    """A program that runs in an arena, by itself or in cycles.

    ``budget``: its model, and most bytes of this model's offloaded weights on the device; None without a limit.  ``reads``:
    equal for programs on the same weights.  ``stale``: whether a weight was dropped, moved or given other memory, so that the
    program can never run again.
    """

    @property
    def program(self) -> Program: ...

    @property
    def budget(self) -> tuple[int, int | None] | None: ...

    @property
    def reads(self) -> tuple[int, ...]: ...

    @property
    def stale(self) -> bool: ...

    def close(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Binding:
    """The memory that a program runs on.

    ``arena``: holds its slots and the streams.
    ``values``: offloaded weight -> the tensor that its readers get, a slot or a resident copy.  Readers of any other
    weight get the parameter, which is an input of every call.
    ``slots``, ``hosts``: streamed weight -> its bytes on the device, and on the host or the drive, uint8.
    ``state``: what lies in the slots, if it is shared with other programs: of the same placement, or of the cycle.
    """

    arena: Arena
    values: Mapping[str, torch.Tensor]
    slots: Mapping[str, torch.Tensor]
    hosts: Mapping[str, Bytes]
    state: ArenaContents | None = None


class Arena:
    """Device memory and streams that programs share: as large as the largest plan that ran in it, not as all together.

    The programs of one model share an arena automatically.  Models that run in turns, such as the two transformers of
    Wan 2.2 or a text encoder and a transformer, share one if it is passed to each as ``options={"arena": arena}``.
    Each change from one program to another is a cold start, unless both have the same placement of the same weights, or the
    order of the programs repeats: then they run as a cycle (order.py).
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, make: Make = make_device, shared: SharedDevice | None = None
    ) -> None:
        """``make``: creates the streams for a device and its kind.  ``shared``: decides how much of the device the arena may
        take; None if it has the device for itself.  Raises ChunkflowError for an unsupported device."""
        self.device = check_device(device)
        self.lock = ProcessLock()  # held for a step
        self.holder: ArenaContents | None = None  # the chunks of the program that ran last, if they are complete
        self.lost_weight = False  # whether a weight of a program was dropped since the last step
        self.graphs = CudaGraphs()
        self.bits = InputBits()  # shared by all tables of rows: the blocks of a model take the same tensors
        self._make = make
        self._shared = shared
        self._kind = DeviceKind()
        self._streams: Device | None = None
        self._reader: DriveReader | None = None
        self._running: tuple[int, str] | None = None  # the process and the name of the call that runs now
        self._memory: torch.Tensor | None = None
        self._programs: list[weakref.ref[Tenant]] = []
        # what is bound -> the weights that it keeps on the device outside the memory; several have the same copies
        self._residents: weakref.WeakKeyDictionary[Owner, weakref.WeakKeyDictionary[HostBuffer, torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        self._states: weakref.WeakValueDictionary[object, ArenaContents] = weakref.WeakValueDictionary()
        self._proved: weakref.WeakKeyDictionary[GraphModule, weakref.WeakSet[GraphModule]] = weakref.WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return 0 if self._memory is None else self._memory.numel()

    @property
    def held(self) -> int:
        """Bytes on the device of the memory and of the resident weights outside it."""
        distinct = {id(value): value.nbytes for kept in self._residents.values() for value in kept.values()}
        return self.nbytes + sum(distinct.values())

    def evict(self) -> None:
        """Free the memory and the resident weights; the next step of each program brings back what it needs."""
        with self.lock():
            self.refuse_inside()
            self._unbind()
            self._residents.clear()

    def bind(
        self,
        owner: Owner,
        cycle: Cycle,
        buffers: Mapping[str, HostBuffer],
        *,
        pin_bytes: int | None,
        advice: Callable[[], str],
    ) -> Binding:
        """Bind a cycle on these offloaded weights to the memory.  The caller holds the lock.

        ``owner``: keeps weights on the device until it lets go of them (:meth:`release`) or ends.  ``pin_bytes``: see
        :func:`pin_all`.  ``advice``: see :meth:`reserve`.
        Raises ChunkflowError if the device has no room.
        """
        plan = cycle.plan
        outside = {w.name: buffers[w.name] for w in plan.weights if w.offset is None and w.name in buffers}
        inside = {w.name: w for w in plan.streamed if w.offset is not None and w.name in buffers}
        missing = {buffer for buffer in outside.values() if buffer.on_device is None}
        self._evict_for(plan.arena_bytes, sum(buffer.nbytes for buffer in missing))
        memory = self.reserve(plan.arena_bytes, advice)
        kept = self.keep(owner, outside.values(), advice)
        slots = {name: memory.narrow(0, w.offset or 0, w.nbytes) for name, w in inside.items()}
        values = {name: kept[buffer] for name, buffer in outside.items()}
        values |= {name: as_weight(slot, buffers[name].stored) for name, slot in slots.items()}
        if not pin_all([buffers[name] for name in slots], self.streams, pin_bytes):
            self.streams.stage()
        hosts = {name: buffers[name].bytes for name in slots}
        # cycles with the same placement of the same weights share what lies in the memory, and the reads on the way to it: a
        # write that fails changes no values, but cycles that are bound after it do not read the weight from the drive
        weights = tuple((name, id(buffers[name]), isinstance(hosts[name], DriveBytes)) for name in slots)
        placement = plan.placement, cycle.problem.structure, cycle.starts, cycle.signals, weights
        state = self._states.get(placement)
        if state is None:
            state = self._states[placement] = ArenaContents(self.streams, cycle.events)
        return Binding(self, values, slots, hosts, state)

    def keep(
        self, owner: Owner, buffers: Collection[HostBuffer], advice: Callable[[], str]
    ) -> Mapping[HostBuffer, torch.Tensor]:
        """Copies of these weights on the device, outside the memory.  Others that the owner had are given up."""
        before, stagings = dict(self._residents.get(owner, {})), GpuStagings()
        kept = {buffer: before[buffer] for buffer in buffers if buffer in before and before[buffer] is buffer.on_device}
        missing = dict.fromkeys(buffer for buffer in buffers if buffer not in kept)
        with moving("placing weights", sum(buffer.nbytes for buffer in missing)) as placed:
            for buffer in missing:
                try:
                    kept[buffer] = buffer.resident(stagings, self)
                except torch.OutOfMemoryError as error:
                    raise ChunkflowError(
                        f"The device {self.device} has no room for {buffer.name} ({size(buffer.nbytes)}), which is resident. "
                        f"{advice()}Free memory on the device, or lower the option memory."
                    ) from error
                placed(buffer.nbytes)
        self.streams.record_stream(kept[buffer] for buffer in missing)
        self._residents[owner] = weakref.WeakKeyDictionary(kept)
        return kept

    def release(self, owner: Owner) -> None:
        """Unbind a program or a cycle, and let go of the weights that it keeps on the device outside the memory."""
        owner.unbind()
        self._residents.pop(owner, None)

    def displace(self, buffers: Iterable[HostBuffer]) -> None:
        """Release the programs by themselves that keep any of these weights: a cycle has them in the memory."""
        displaced = set(buffers)
        for program in self.programs:
            if not displaced.isdisjoint(self._residents.get(program, ())):
                self.release(program)

    def _evict_for(self, nbytes: int, residents: int) -> None:
        """Evict all if ``nbytes`` of memory and ``residents`` more bytes outside it would exceed the budgets of the models.

        What a program leaves may be more than the next one's plan has room for.  Of the programs of a model, that with the
        most activations decides, but one without a budget needs no limit.
        """
        budgets: dict[int, float] = {}
        for program in self.programs:
            if program.budget is None:
                continue
            model, budget = program.budget
            most_bytes = math.inf if budget is None else budget
            unlimited = math.inf in (most_bytes, budgets.get(model))
            budgets[model] = math.inf if unlimited else min(most_bytes, budgets.get(model, most_bytes))
        most = sum(budgets.values())
        if self._shared is not None and (shared := self._shared.most_bytes(self)) is not None:
            most = min(most, shared)
        if self.held + max(0, nbytes - self.nbytes) + residents > most:
            self.evict()

    @property
    def streams(self) -> Device:
        if self._streams is None:
            raise ChunkflowError("No program is bound to this arena: call the compiled model again.")
        return self._streams

    @property
    def reader(self) -> DriveReader:
        """Reads what copies need from the drive."""
        if self._reader is None:
            rate = 0.0 if self._kind.link is None else self._kind.link.drive
            self._reader = DriveReader(self.streams.pin, rate, self.streams.clock)
        return self._reader

    @property
    def programs(self) -> list[Tenant]:
        """Those that run in the memory by themselves or in cycles, oldest first."""
        return [program for ref in self._programs if (program := ref()) is not None]

    def prove(self, program: Program) -> None:
        """Verify a program together with each that runs here, once for each pair of modules with their transfers.

        Raises FindingError if they are not safe in one arena.
        """
        mine = program.module
        for other in (tenant.program for tenant in self.programs):
            theirs = other.module
            if theirs is not mine and mine not in self._proved.setdefault(theirs, weakref.WeakSet()):
                verify_together(other, program)
                self._proved[theirs].add(mine)
                self._proved.setdefault(mine, weakref.WeakSet()).add(theirs)

    def add(self, program: Tenant, kind: DeviceKind) -> None:
        """Let a program run here.  Raises ChunkflowError if the others use another ``kind`` of device."""
        with self.lock():
            self.refuse_inside()
            self.sweep()
            if self._streams is None:
                self._streams, self._kind = self._make(self.device, kind), kind
            elif kind != self._kind:
                raise ChunkflowError(
                    "Programs that share an arena run on the same streams, so they need the same kind of device: set "
                    'debug="threads" for all of them or for none, and use one hardware profile if it emulates a link.'
                )
            self._programs.append(weakref.ref(program, partial(_sweep, weakref.ref(self))))

    def remove(self, program: Tenant) -> None:
        """A program that holds nothing does not run here any more."""
        with self.lock():
            self._programs = [ref for ref in self._programs if ref() is not program]
            self.sweep()

    def begin_filling(self) -> None:
        """Copies into the memory begin: if they are interrupted, the chunks of no program are complete."""
        self.holder = None

    def hold(self, contents: ArenaContents) -> None:
        """These chunks are complete in the memory, or on their way."""
        self.holder = contents

    def discard(self, contents: ArenaContents | None) -> None:
        """Let the next call start cold if the memory has these chunks."""
        if self.holder is contents:
            self.holder = None

    def begin_call(self, title: str) -> None:
        """A call runs until :meth:`end_call`.  ``title``: names it in errors."""
        self._running = os.getpid(), title

    def end_call(self) -> None:
        self._running = None

    def lose_weight(self) -> None:
        """A weight of a program was dropped: the next step ends the programs that cannot run without it."""
        self.lost_weight = True

    def close_stale(self) -> None:
        """End the programs that have outlived a weight, such as an adapter's, and would keep the memory of all others."""
        self.lost_weight = False
        stale: dict[tuple[int, ...], bool] = {}  # asked once for all sizes: a new one has a program for each block
        for program in self.programs:
            if program.reads not in stale:
                stale[program.reads] = program.stale
            if stale[program.reads]:
                program.close()

    def refuse_inside(self) -> None:
        """Raise ChunkflowError if a call runs now: in this thread, because other threads wait for its lock."""
        if self._running is not None and self._running[0] == os.getpid():
            raise ChunkflowError(
                f"A compiled model is called inside a call of {self._running[1]}, from an op of its own, and both share an "
                "arena: it would overwrite weights that the outer call still reads. Give the inner model its own: "
                "options={'arena': chunkflow_compile.Arena(device)}."
            )

    def reserve(self, nbytes: int, advice: Callable[[], str] = str) -> torch.Tensor:
        """Make the memory at least ``nbytes`` large; return it, uint8, aligned to 256 bytes.  The caller holds the lock.

        The old memory is freed first, and cycles are bound again at their next step.  Then other arenas on a shared device
        make room.  Raises ChunkflowError if the device has no room (``advice`` returns what would fit); the memory is then as
        large as before, or freed, if the device has lost the room for that too.
        """
        before = self.nbytes
        if self._memory is None or before < nbytes:
            if self._memory is not None:
                self._unbind()
            try:
                if self._shared is not None:
                    self._shared.make_room(self, nbytes)
                self._memory = self._allocate(nbytes, advice)
            except BaseException:
                with contextlib.suppress(ChunkflowError):
                    self._memory = self._allocate(before, str) if before else None
                raise
        return self._memory

    def _unbind(self) -> None:
        """Free the memory."""
        for bound in list(self._residents):
            bound.unbind()
        self._memory = self.holder = None
        if self._streams is not None:
            self._streams.release()
        self._states.clear()

    def sweep(self) -> None:
        """Forget programs that were garbage-collected.  With the last one, the memory is freed and the streams are closed."""
        with self.lock():
            self._programs = [ref for ref in self._programs if ref() is not None]
            if self._programs or self._streams is None:
                return
            for bound in list(self._residents):
                self.release(bound)
            streams, memory = self._streams, self._memory
            self._streams = self._memory = self.holder = None
            self._states.clear()  # a program that has ended may still hold one, with events of these streams
            streams.close()
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            del memory  # not sooner: copies into it may have been in flight

    def _allocate(self, nbytes: int, advice: Callable[[], str]) -> torch.Tensor:
        try:
            with torch.inference_mode(False):  # an inference tensor cannot be written outside inference mode
                raw = self.streams.allocate(nbytes + ALIGNMENT)
        except RuntimeError as error:
            raise ChunkflowError(
                f"The device {self.device} has no room for an arena of {size(nbytes)} ({str(error).splitlines()[0]}). "
                f"{advice()}Free memory on the device, or lower the option memory."
            ) from error
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + nbytes]

    def __deepcopy__(self, _: object) -> Arena:
        """Return the arena itself: a copy of a model compiled with an arena shares it."""
        return self

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise ChunkflowError(
            "An arena is device memory of this process and cannot be copied or pickled: create another with "
            "chunkflow_compile.Arena(device)."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sweep(ref: weakref.ref[Arena], _: object) -> None:
    """Remove a program that was dropped with its model from its arena, which other models may share."""
    if (arena := ref()) is not None:
        aside(arena.sweep)
