"""The arena: device memory and streams that several programs share.  Only one of these programs runs at a time."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import ALIGNMENT
from chunkflow_compile.passes.program.cycle import Cycle
from chunkflow_compile.units import size
from chunkflow_compile.weights.bytes import as_weight
from chunkflow_compile.weights.host_buffer import HostBuffer
from chunkflow_compile.weights.locks import ProcessLock, aside
from chunkflow_compile.weights.pin_order import pin_all
from chunkflow_compile.weights.progress import moving
from chunkflow_compile.weights.source import Bytes, DriveBytes
from chunkflow_compile.weights.staging import GpuStagings

from .arena_contents import ArenaContents
from .cuda_graphs import CudaGraphs
from .device import DeviceKind, check_device, make_device
from .device_base import Device
from .input_bits import InputBits
from .read_ahead import DriveReader
from .tenants import Owner, Tenant, Tenants

MakeDevice = Callable[[torch.device, DeviceKind], Device]


class SharedDevice(Protocol):
    """The interface of an object that limits the memory of several arenas on one device."""

    def make_room(self, arena: Arena, nbytes: int) -> None:
        """Free memory that other arenas hold on the device, because ``arena`` is about to allocate ``nbytes``."""

    def most_bytes(self, arena: Arena) -> int | None:
        """Return the maximum total bytes of weights in ``arena``, or None if only the budgets of the arena's models limit
        these bytes."""


@dataclass(frozen=True)
class Binding:
    """The memory from which a program reads its weights.

    ``arena``: the arena whose memory contains the slots, and whose streams the program uses.
    ``values``: name of an offloaded weight -> the device tensor that regions read instead of the parameter.  This tensor is
    a view of a slot, or a resident copy of the weight.  A weight that is not offloaded is not in this mapping: its parameter
    is an input of every call, and regions read this parameter.
    ``slots``: name of a streamed weight -> its bytes in the arena's memory, uint8.
    ``hosts``: name of a streamed weight -> the source of the copies to its slot: bytes (uint8) in host memory, on the SSD or
    on the devices of the peers.  ``state``: the object that records the contents of the slots.  All programs that place the
    same weights in the same slots share this object, and so do all calls of a cycle.  If ``state`` is None, the executor
    creates such an object for itself.
    """

    arena: Arena
    values: Mapping[str, torch.Tensor]
    slots: Mapping[str, torch.Tensor]
    hosts: Mapping[str, Bytes]
    state: ArenaContents | None = None


class Arena:
    """Device memory and streams that several programs share.

    An arena is as large as the largest plan that ran in it, not as large as all plans together.  The programs of one model
    share an arena automatically.  Models that run one after the other, such as the two transformers of Wan 2.2, or a text
    encoder and a transformer, can share an arena: pass the arena to each model as ``options={"arena": arena}``.  A program
    that runs after another program needs a cold start, with two exceptions.  If both programs place the same weights in the
    same slots, the second program uses the weights that the first program has left there.  If several programs are called in
    a repeating order, they run as a cycle (order.py), and the calls of a cycle follow one another without a cold start.

    ``lock``: a lock that is held while the ops of a call are issued.  ``contents``: the contents of the arena's memory; None
    if they are unknown or incomplete.  ``lost_weight``: whether a weight of a program was dropped since the last call.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, make: MakeDevice = make_device, shared: SharedDevice | None = None
    ) -> None:
        """``make``: a function that creates the :class:`Device` object for a ``torch.device`` and a :class:`DeviceKind`.
        ``shared``: an object that limits the memory that the arena may use; None if no other arena uses the device.  Raises
        ChunkflowError for an unsupported device."""
        self.device = check_device(device)
        self.lock = ProcessLock()
        self.contents: ArenaContents | None = None
        self.lost_weight = False
        self.graphs = CudaGraphs()
        self.tenants = Tenants()
        # all tables of rows (rows.py) share one object, because all blocks of a model get the same tensors
        self.bits = InputBits()
        self._make = make
        self._shared = shared
        self._kind = DeviceKind()
        self._streams: Device | None = None
        self._reader: DriveReader | None = None
        self._running: tuple[int, str] | None = None  # the process id and the title of the running call
        self._memory: torch.Tensor | None = None
        # bound program or cycle -> its resident weights outside the arena's memory; several programs or cycles may share a
        # copy
        self._residents: weakref.WeakKeyDictionary[Owner, weakref.WeakKeyDictionary[HostBuffer, torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        self._states: weakref.WeakValueDictionary[object, ArenaContents] = weakref.WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """The bytes of device memory that the arena has allocated for slots."""
        return 0 if self._memory is None else self._memory.numel()

    @property
    def held(self) -> int:
        """The total bytes of device memory in use: the arena's memory plus the resident weights outside this memory."""
        distinct = {id(value): value.nbytes for kept in self._residents.values() for value in kept.values()}
        return self.nbytes + sum(distinct.values())

    def evict(self) -> None:
        """Free the arena's memory and the resident weights.  The next step of each program copies its weights again."""
        with self.lock():
            self.check_not_inside()
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

        ``owner``: the program or the :class:`BoundCycle` that is bound.  The resident weights of this owner stay on the
        device until :meth:`release` is called for the owner, or until the owner is garbage-collected.  ``buffers``: the
        offloaded weights of the cycle, by name.  ``pin_bytes``: see :func:`pin_all`.  ``advice``: see :meth:`reserve`.
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
        # Cycles that place the same weights in the same slots share one state object, which describes the contents of the
        # memory.  The key of this object in ``_states`` also contains, for each weight, whether it is read from the SSD.
        # The reason is that a write to a weight on the SSD first moves the weight to host memory.  Even if the write then
        # fails, cycles that are bound after the move read the weight from host memory.  These cycles cannot share a state
        # object with the cycles that read the weight from the SSD.
        weights = tuple((name, id(buffers[name]), isinstance(hosts[name], DriveBytes)) for name in slots)
        placement = plan.placement, cycle.problem.structure, cycle.starts, cycle.signals, weights
        state = self._states.get(placement)
        if state is None:
            state = self._states[placement] = ArenaContents(self.streams, cycle.events)
        return Binding(self, values, slots, hosts, state)

    def keep(
        self, owner: Owner, buffers: Collection[HostBuffer], advice: Callable[[], str]
    ) -> Mapping[HostBuffer, torch.Tensor]:
        """Keep copies of the weights in ``buffers`` on the device, outside the arena's memory; return the copies.

        If ``owner`` kept copies of other weights before, these copies are released.
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
        """Unbind a program or a cycle, and release its resident weights outside the arena's memory."""
        owner.unbind()
        self._residents.pop(owner, None)

    def displace(self, buffers: Iterable[HostBuffer]) -> None:
        """Release the programs that keep any of the weights in ``buffers`` outside the arena's memory.  The caller is about
        to bind a cycle that stores these weights inside the arena's memory."""
        displaced = set(buffers)
        for program in self.programs:
            if not displaced.isdisjoint(self._residents.get(program, ())):
                self.release(program)

    def _evict_for(self, nbytes: int, residents: int) -> None:
        """Evict all weights if the device memory that is in use now, plus the additional memory that the next plan needs,
        exceeds the budgets of the models.

        ``nbytes``: bytes that the next plan needs in the arena's memory.  ``residents``: bytes of the resident weights that
        must still be copied to the device for this plan, outside the arena's memory.
        """
        most = self.tenants.most_bytes()
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
        """The object that reads weights from the SSD before they are copied to the device."""
        if self._reader is None:
            rate = 0.0 if self._kind.link is None else self._kind.link.drive
            self._reader = DriveReader(self.streams.pin, rate, self.streams.clock)
        return self._reader

    @property
    def programs(self) -> list[Tenant]:
        """The programs that run in the arena, alone or in cycles, oldest first."""
        return self.tenants.programs

    def add(self, program: Tenant, kind: DeviceKind) -> None:
        """Add a program to the arena.  Raises ChunkflowError if the other programs of the arena use a different ``kind`` of
        device."""
        with self.lock():
            self.check_not_inside()
            self.sweep()
            if self._streams is None:
                self._streams, self._kind = self._make(self.device, kind), kind
            elif kind != self._kind:
                raise ChunkflowError(
                    "Programs that share an arena run on the same streams, so they need the same kind of device: set "
                    'debug="threads" for all of them or for none, and use one hardware profile if it emulates a link.'
                )
            self.tenants.add(program, partial(_sweep, weakref.ref(self)))

    def remove(self, program: Tenant) -> None:
        """Remove a program.  The caller has released the program's memory before (see :meth:`release`)."""
        with self.lock():
            self.tenants.remove(program)
            self.sweep()

    def begin_filling(self) -> None:
        """Record that the contents of the arena's memory are incomplete, because the caller is about to issue copies into
        this memory.  If an error occurs before :meth:`hold` is called, the next call is a cold start."""
        self.contents = None

    def hold(self, contents: ArenaContents) -> None:
        """Record that the arena's memory has these ``contents``, because all copies into this memory have been issued."""
        self.contents = contents

    def discard(self, contents: ArenaContents | None) -> None:
        """If ``contents`` are the present contents of the arena's memory, make the next call a cold start."""
        if self.contents is contents:
            self.contents = None

    def begin_call(self, title: str) -> None:
        """Record that a call has begun.  :meth:`end_call` records the end of the call.  ``title``: the name of the call in
        error messages."""
        self._running = os.getpid(), title

    def end_call(self) -> None:
        self._running = None

    def lose_weight(self) -> None:
        """Record that a weight was dropped.  The next call of any program in the arena first ends the programs that read
        this weight."""
        self.lost_weight = True

    def close_stale(self) -> None:
        """End each program that reads a dropped weight; see :meth:`Tenants.close_stale`."""
        self.lost_weight = False
        self.tenants.close_stale()

    def check_not_inside(self) -> None:
        """Raise ChunkflowError if this thread is already inside a call.  The caller holds the lock, so no other thread can
        be inside a call."""
        if self._running is not None and self._running[0] == os.getpid():
            raise ChunkflowError(
                f"A compiled model is called inside a call of {self._running[1]}, from an op of its own, and both share an "
                "arena: it would overwrite weights that the outer call still reads. Give the inner model its own: "
                "options={'arena': chunkflow_compile.Arena(device)}."
            )

    def reserve(self, nbytes: int, advice: Callable[[], str] = str) -> torch.Tensor:
        """Grow the arena's memory to at least ``nbytes``; return the memory as a uint8 tensor that is aligned to 256 bytes.
        The caller holds the lock.

        If the memory must grow, this method unbinds all cycles, and frees the old memory before it allocates the new memory.
        If several arenas share the device, this method also frees memory of the other arenas if needed.  Each cycle is bound
        to the new memory at the cycle's next call.

        ``advice``: a function that returns a sentence for the error message; the sentence says which plan would fit.  Raises
        ChunkflowError if the device does not have enough memory.  Before this method raises the error, it allocates memory
        of the old size again.  If this allocation also fails, the arena has no memory afterwards.
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
        self._memory = self.contents = None
        if self._streams is not None:
            self._streams.release()
        self._states.clear()

    def sweep(self) -> None:
        """Forget programs that were garbage-collected.  If no program is left, free the memory and close the streams."""
        with self.lock():
            if self.tenants.prune() or self._streams is None:
                return
            for bound in list(self._residents):
                self.release(bound)
            streams, memory = self._streams, self._memory
            self._streams = self._memory = self.contents = None
            self._states.clear()  # forget the states that ended programs keep alive: their events belong to the old streams
            streams.close()
            if self._reader is not None:
                self._reader.close()
                self._reader = None
            del memory  # freed only now, because copies into the memory may be in flight until close() returns

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
        """Return the arena itself: the copy of a compiled model uses the same arena as the model."""
        return self

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise ChunkflowError(
            "An arena is device memory of this process and cannot be copied or pickled: create another with "
            "chunkflow_compile.Arena(device)."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sweep(ref: weakref.ref[Arena], _: object) -> None:
    """Remove a program from its arena after the program was garbage-collected."""
    if (arena := ref()) is not None:
        aside(arena.sweep)
