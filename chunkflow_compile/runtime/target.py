"""The target of a call (the memory and the streams that the ops of the call use), and the state of a running step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from chunkflow_compile.passes.program.cycle import Cycle
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.ring import slot_bytes
from chunkflow_compile.passes.step import Copy, Read, reads
from chunkflow_compile.weights.source import Bytes, DriveBytes

from .arena import Binding
from .device_base import Device, NamedCopy
from .measurement import WindowSeconds
from .read_ahead import InRing
from .traffic import Traffic
from .wrapped_calls import LoweredRegion


@dataclass
class Cost:
    """The cost of a running step so far.

    ``windows``: measured seconds per window; None if the step is not measured.  ``moved``: bytes copied in the step.
    ``pulled``: the part of ``moved`` that came from other ranks.  ``primed``: bytes that the prologue copied before the
    step.  ``collectives``: the number of collectives.  ``issue_s``: the seconds that the host needed to issue the ops of the
    step.
    """

    windows: WindowSeconds | None = None
    primed: int = 0
    collectives: int = 0
    moved: int = 0
    pulled: int = 0
    issue_s: float = 0.0

    def add_copies(self, nbytes: int, pulled: int = 0) -> None:
        """Count copies that were issued: ``nbytes`` in total, of which ``pulled`` bytes came from other ranks."""
        self.moved += nbytes
        self.pulled += pulled

    def add_collective(self) -> None:
        """Count a collective that was issued."""
        self.collectives += 1

    def end_priming(self) -> None:
        """Record that all copies so far belong to the prologue, and that the step begins now."""
        self.primed, self.moved, self.pulled = self.moved, 0, 0

    def end_issue(self, seconds: float) -> None:
        """Record that the host needed ``seconds`` to issue the step."""
        self.issue_s = seconds


@dataclass
class RunningStep:
    """One run of a program.

    ``env``: the values of the program's nodes, indexed by node number.  ``cost``: the cost of the run, which is complete only
    after the times of the run are known.  ``number``: the number of the run.  ``earlier``: if the run computes several rows,
    the values of all rows except the last row, whose values are in ``env``.
    """

    env: list[Any]
    cost: Cost
    number: int
    earlier: Sequence[list[Any]] = ()

    @property
    def outputs(self) -> list[Any]:
        """The program's outputs for each row; valid after :meth:`Device.deliver`."""
        return [env[-1] for env in (*self.earlier, self.env)]


Issue = Callable[[RunningStep], None]


class Target:
    """The memory to which a call is bound, and the device to whose streams its ops are issued.

    ``program``: the program of the call.  ``events``: the events of the device, indexed by event number in the cycle.
    ``traffic``: the record of issued transfers.  ``on_drive``: the names of the weights that are read from the SSD into the
    ring.  ``read_bytes``: the number of bytes that, according to the plan, a step reads from the SSD.  ``number``: node ->
    its index among the values of a step.
    """

    def __init__(
        self,
        program: Program,
        cycle: Cycle,
        regions: Mapping[str, LoweredRegion],
        binding: Binding,
        device: Device,
        events: Sequence[Any],
        poison: bool = False,
    ) -> None:
        """``cycle``: the cycle in which the program is a call.  ``device``: the device of the arena, or a device that
        records the call.  ``poison``: whether to overwrite the bytes of each evicted weight, so that an op that still reads
        the weight gets NaN."""
        self.program = program
        self.cycle = cycle
        self.regions = regions
        self.binding = binding
        self.device = device
        self.events = events
        self.poison = poison
        self.traffic = Traffic()
        # pulled weights are not read into the ring: if a pulled weight is on the SSD, the work that copies it reads the SSD
        # itself
        pulled = program.plan.pulled
        self.on_drive = frozenset(
            n for n, source in binding.hosts.items() if isinstance(source, DriveBytes) and n not in pulled
        )
        read = [(op, self._bytes(op)) for op in reads(chain.from_iterable(cycle.ops))] if self.on_drive else []
        self.read_bytes = sum(nbytes for _, nbytes in read)
        self._ring_bytes = max((op.ring + slot_bytes(nbytes) for op, nbytes in read), default=0)
        if pulled:
            device.lane("pull")  # this creates the stream of pulls now, because a step must not create streams
        self.number = {n: i for i, n in enumerate(program.module.graph.nodes)}
        self.started, self.in_flight = device.event(), device.event()
        # one event per collective, because several collectives may be in flight
        self.ended = [device.event() for _ in program.problem.collectives]

    def copy(self, op: Copy) -> NamedCopy:
        """Return the target, the source and the name of the copy for a Copy op.  One Copy op may copy several adjacent chunks
        of a weight."""
        slot, span = self.binding.slots[op.weight], self._span(op)
        if op.window is None:
            return slot[span], self.binding.hosts[op.weight][span], f"keep {op.weight}"
        source: Bytes | InRing = self.binding.hosts[op.weight][span]
        # The values of a weight that was modified are in host memory, and no longer on the SSD.
        if op.ring is not None and op.weight in self.on_drive:
            assert isinstance(source, DriveBytes)
            source = InRing(self.binding.arena.reader, source, op.ring)
        return slot[span], source, f"prefetch {op.weight}[{op.first}:{op.end}] window {op.window}"

    def read(self, op: Read) -> tuple[Callable[[], None], None, str]:
        """Return the arguments of :meth:`Stream.run` for a Read op.  If the weight was written after planning, its values
        have been moved from the SSD to host memory, and the returned work does nothing."""
        source, name = self.binding.hosts[op.weight][self._span(op)], f"read {op.weight}[{op.first}:{op.end}]"
        if op.weight not in self.on_drive:
            return _no_work, None, name
        assert isinstance(source, DriveBytes)
        return partial(self.binding.arena.reader.read, source, op.ring, self._ring_bytes), None, name

    def _bytes(self, op: Read) -> int:
        return self.binding.hosts[op.weight][self._span(op)].numel()

    def _span(self, op: Copy | Read) -> slice:
        size = self.program.plan.chunk_bytes
        return slice(op.first * size, op.end * size)

    def drop_references(self) -> None:
        """Drop every reference to the arena's memory.  No work may be in flight."""
        self.binding = Binding(self.binding.arena, {}, {}, {})


def _no_work() -> None:
    pass
