"""The device arena: one allocation of device memory and its streams, shared by programs that run one step at a time."""

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
    """The object that limits how much memory the arenas of one device may use, as an arena sees it."""

    def make_room(self, arena: Arena, nbytes: int) -> None:
        """Free other memory on the device, because the arena is about to allocate ``nbytes``."""

    def most_bytes(self, arena: Arena) -> int | None:
        """The maximum bytes of weights in the arena, over all models; None means the sum of the models' budgets."""


class Owner(Protocol):
    """A program or a cycle that runs in the memory of an arena, as the arena sees it."""

    def unbind(self) -> None:
        """Wait for work in flight, then drop every reference to the arena's memory, so that it can be allocated again."""


class Tenant(Owner, Protocol):
    """A program that runs in an arena, alone or as part of cycles.

    ``budget``: an id of its model, and the maximum bytes of this model's offloaded weights on the device (None if there is no
    limit).  ``reads``: ids of its weights; equal for programs that read the same weights.  ``stale``: whether a weight was
    dropped, moved or given other memory, so that the program can never run again.
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
        """End the program."""


@dataclass(frozen=True)
class Binding:
    """The memory that a program runs on.

    ``arena``: the arena that holds its slots and its streams.
    ``values``: offloaded weight -> the tensor that its readers get, which is a slot or a resident copy.  Readers of any other
    weight get the parameter, which is an input of every call.
    ``slots``: streamed weight -> its bytes on the device, uint8.
    ``hosts``: streamed weight -> its bytes in host memory or on the SSD, uint8.
    ``state``: the contents of the slots.  Programs with the same placement share it, and so do the calls of a cycle.  None if
    the program shares its slots with no other program.
    """

    arena: Arena
    values: Mapping[str, torch.Tensor]
    slots: Mapping[str, torch.Tensor]
    hosts: Mapping[str, Bytes]
    state: ArenaContents | None = None


class Arena:
    """Device memory and streams that several programs share.

    Its size is the size of the largest plan that ran in it, not the sum of all plans.  The programs of one model share an
    arena automatically.  Models that run one after the other, such as the two transformers of Wan 2.2 or a text encoder and a
    transformer, share an arena if it is passed to each of them as ``options={"arena": arena}``.
    Each switch from one program to another is a cold start, with two exceptions: both programs place the same weights in the
    same way, or the order of the programs repeats, so that they run as a cycle (order.py).
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, make: Make = make_device, shared: SharedDevice | None = None
    ) -> None:
        """``make``: creates the streams for a device and its kind.  ``shared``: limits how much of the device the arena may
        use; None if no other arena uses the device.  Raises ChunkflowError for an unsupported device."""
        self.device = check_device(device)
        self.lock = ProcessLock()  # held during a step
        self.holder: ArenaContents | None = None  # contents left by the last program, if complete
        self.lost_weight = False  # whether a program lost a weight since the last step
        self.graphs = CudaGraphs()
        self.bits = InputBits()  # shared by all tables of rows, because the blocks of a model get the same tensors
        self._make = make
        self._shared = shared
        self._kind = DeviceKind()
        self._streams: Device | None = None
        self._reader: DriveReader | None = None
        self._running: tuple[int, str] | None = None  # the process id and the title of the running call
        self._memory: torch.Tensor | None = None
        self._programs: list[weakref.ref[Tenant]] = []
        # bound program or cycle -> the weights that it keeps on the device outside the arena's memory; owners share copies
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
        """Bytes on the device: the arena's memory plus the resident weights outside it."""
        distinct = {id(value): value.nbytes for kept in self._residents.values() for value in kept.values()}
        return self.nbytes + sum(distinct.values())

    def evict(self) -> None:
        """Free the arena's memory and the resident weights.  The next step of each program copies its weights again."""
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
        """Bind a cycle to the arena's memory.  The caller holds the lock.

        ``owner``: the object that keeps weights on the device until it releases them (:meth:`release`) or ends.
        ``buffers``: the offloaded weights of the cycle, by name.  ``pin_bytes``: see :func:`pin_all`.  ``advice``: see
        :meth:`reserve`.
        Raises ChunkflowError if the device does not have enough memory.
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
        # Cycles that place the same weights in the same way share the contents of the memory, and the reads that fill it.
        # The key also says which weights are read from the SSD: a write to a weight that fails changes no values, but cycles
        # bound after it no longer read this weight from the SSD.
        weights = tuple((name, id(buffers[name]), isinstance(hosts[name], DriveBytes)) for name in slots)
        placement = plan.placement, cycle.problem.structure, cycle.starts, cycle.signals, weights
        state = self._states.get(placement)
        if state is None:
            state = self._states[placement] = ArenaContents(self.streams, cycle.events)
        return Binding(self, values, slots, hosts, state)

    def keep(
        self, owner: Owner, buffers: Collection[HostBuffer], advice: Callable[[], str]
    ) -> Mapping[HostBuffer, torch.Tensor]:
        """Keep copies of these weights on the device, outside the arena's memory; return the copies.

        The owner releases its copies of all other weights.
        Raises ChunkflowError if the device does not have enough memory.  ``advice``: see :meth:`reserve`."""
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
        """Unbind a program or a cycle, and release the weights that it keeps on the device outside the arena's memory."""
        owner.unbind()
        self._residents.pop(owner, None)

    def displace(self, buffers: Iterable[HostBuffer]) -> None:
        """Release the programs that keep any of these weights outside the arena's memory: a cycle stores the weights in
        it."""
        displaced = set(buffers)
        for program in self.programs:
            if not displaced.isdisjoint(self._residents.get(program, ())):
                self.release(program)

    def _evict_for(self, nbytes: int, residents: int) -> None:
        """Evict everything if the next plan would exceed the budgets of the models.

        The weights that earlier programs left on the device may be too many for the budget of the next plan.  The budget of a
        model is the smallest one of its programs: the larger a program's activations, the less memory is left for weights.
        It is unlimited if any of the programs has no limit.

        ``nbytes``: bytes that the next plan needs in the arena's memory.  ``residents``: further bytes outside it.
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
        """The reader that reads weights from the SSD ahead of their copies."""
        if self._reader is None:
            rate = 0.0 if self._kind.link is None else self._kind.link.drive
            self._reader = DriveReader(self.streams.pin, rate, self.streams.clock)
        return self._reader

    @property
    def programs(self) -> list[Tenant]:
        """The programs that run in the arena, alone or in cycles, oldest first."""
        return [program for ref in self._programs if (program := ref()) is not None]

    def prove(self, program: Program) -> None:
        """Verify a program together with each program of this arena, once for each pair of modules.

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
        """Add a program to the arena.  Raises ChunkflowError if the other programs use a different ``kind`` of device."""
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
        """Remove a program, which must have released its memory."""
        with self.lock():
            self._programs = [ref for ref in self._programs if ref() is not program]
            self.sweep()

    def begin_filling(self) -> None:
        """Note that copies into the memory begin.  If they are interrupted, no program has its chunks complete."""
        self.holder = None

    def hold(self, contents: ArenaContents) -> None:
        """Note that the memory holds these chunks, or that their copies have been issued."""
        self.holder = contents

    def discard(self, contents: ArenaContents | None) -> None:
        """Make the next call a cold start if the memory holds these chunks."""
        if self.holder is contents:
            self.holder = None

    def begin_call(self, title: str) -> None:
        """Note that a call runs from now until :meth:`end_call`.  ``title``: its name in errors."""
        self._running = os.getpid(), title

    def end_call(self) -> None:
        self._running = None

    def lose_weight(self) -> None:
        """Note that a weight of a program was dropped.  The next step ends the programs that cannot run without it."""
        self.lost_weight = True

    def close_stale(self) -> None:
        """End the programs that have lost a weight, such as an adapter's, because they would keep all other weights alive."""
        self.lost_weight = False
        stale: dict[tuple[int, ...], bool] = {}  # checked once per set of weights, not per size
        for program in self.programs:
            if program.reads not in stale:
                stale[program.reads] = program.stale
            if stale[program.reads]:
                program.close()

    def refuse_inside(self) -> None:
        """Raise ChunkflowError if a call is running now.  It can only be in this thread: other threads wait for the lock."""
        if self._running is not None and self._running[0] == os.getpid():
            raise ChunkflowError(
                f"A compiled model is called inside a call of {self._running[1]}, from an op of its own, and both share an "
                "arena: it would overwrite weights that the outer call still reads. Give the inner model its own: "
                "options={'arena': chunkflow_compile.Arena(device)}."
            )

    def reserve(self, nbytes: int, advice: Callable[[], str] = str) -> torch.Tensor:
        """Grow the memory to at least ``nbytes``; return it as uint8, aligned to 256 bytes.  The caller holds the lock.

        If it must grow, the old memory is freed first, and each cycle is bound again at its next step.  Then other arenas on
        a shared device free memory.

        ``advice``: returns a sentence for the error, on which plan would fit.
        Raises ChunkflowError if the device does not have enough memory.  Memory of the old size is then allocated again, if
        that is still possible; otherwise the arena is left without memory.
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
        """Unbind all programs and cycles, and free the memory."""
        for bound in list(self._residents):
            bound.unbind()
        self._memory = self.holder = None
        if self._streams is not None:
            self._streams.release()
        self._states.clear()

    def sweep(self) -> None:
        """Forget programs that were garbage-collected.  After the last one, free the memory and close the streams."""
        with self.lock():
            self._programs = [ref for ref in self._programs if ref() is not None]
            if self._programs or self._streams is None:
                return
            for bound in list(self._residents):
                self.release(bound)
            streams, memory = self._streams, self._memory
            self._streams = self._memory = self.holder = None
            self._states.clear()  # an ended program may still hold contents, whose events belong to these streams
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
    """Remove a program that was garbage-collected with its model from its arena, which other models may share."""
    if (arena := ref()) is not None:
        aside(arena.sweep)
