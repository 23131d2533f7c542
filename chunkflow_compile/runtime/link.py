"""An emulated PCIe link: a receive port with limited bandwidth.  Copies, pulls and the incoming bytes of collectives pass
through this port.

Either every rank has its own port, or all ranks of a machine share one port, like ranks behind one root complex.  The state
of a shared port is in a file.  A port serves its lanes (copies, pulls and collectives) in one of two orders.  In round-robin
order, it serves one quantum of bytes of each lane in turn, as a bus arbiter does.  In fifo order, it serves whole transfers,
one after the other, in the order in which they were requested.  The port computes the time when a transfer ends, and the
sending thread sleeps until this time; sleeping uses no CPU time.

Only the time is emulated; the bytes are really copied and exchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.weights.locks import ProcessLock

from .host_clock import MONOTONIC, HostClock

LaneName = Literal["copy", "collective", "pull"]
LANES: tuple[LaneName, ...] = get_args(LaneName)
# The maximum number of ranks on one machine that can share a port.
MOST_RANKS = 16
# A transfer counts as ended when at most this many bytes remain, because so few bytes are a rounding error.
_LEAST_BYTES = 1e-3


@dataclass
class _Lane:
    """The current or latest transfer of a lane.

    ``left``: the number of bytes that the port must still carry.  ``arrived``: the number of the transfer, in the order in
    which the transfers were requested.  ``over``: the time in seconds when the port had carried the last byte of the
    transfer.
    """

    left: float = 0.0
    arrived: float = 0.0
    over: float = 0.0

    def begin(self, nbytes: float, place: float, now: float) -> None:
        self.left, self.arrived, self.over = max(0.0, nbytes), place, now

    def carry(self, nbytes: float) -> None:
        self.left -= nbytes

    def carry_again(self, nbytes: float) -> None:
        self.left += nbytes

    def end(self, at: float) -> None:
        self.left, self.over = 0.0, at


@dataclass
class Wire:
    """The state of a port at the time ``now`` in seconds.

    ``turn``: the index of the lane that is being served.  ``quantum``: the bytes that are left in the current quantum of this
    lane.  ``arrivals``: the number of transfers so far.  ``idle_from``, ``idle_to``: the times in seconds when the last idle
    period of the port began and ended.  If :meth:`add` credits a transfer with part of this idle period, ``idle_from`` moves
    forward to the end of that part.
    """

    emulation: LinkEmulation
    lanes: list[_Lane]
    now: float = 0.0
    turn: int = 0
    quantum: float = 0.0
    arrivals: float = 0.0
    idle_from: float = 0.0
    idle_to: float = 0.0

    def add(self, lane: int, nbytes: float, late: float) -> None:
        """Add a transfer of ``nbytes`` to a lane.  A real copy engine would have begun the transfer ``late`` seconds ago.

        The transfer is therefore credited with the bytes that the port would have carried for it since then: at the full
        bandwidth while the port was idle, and at a fair share of the bandwidth while other transfers used the port.  But
        the emulation has already given this share to the other transfers, so the bytes of the share are added back to the
        bytes that the port must still carry for the other transfers.
        """
        rate, added = self.emulation.bandwidth, self.lanes[lane]
        others = [other for other in self.lanes if other.left > 0]
        begin, needs = max(self.idle_from, self.now - late), nbytes / rate
        unused = min(max(0.0, self.idle_to - begin), needs)
        if unused:
            self.idle_from = begin + unused
        share = max(0.0, min(late / (len(others) + 1), needs) - unused) if others else 0.0
        for other in others:
            other.carry_again(share * rate / len(others))
        self.arrivals += 1
        added.begin(nbytes - (unused + share) * rate, self.arrivals, self.now)
        if added.left <= _LEAST_BYTES:
            added.end(self.now if share else begin + unused)

    def advance(self, until: float, lane: int | None = None) -> None:
        """Carry bytes of the transfers until the time ``until``.  If ``lane`` is given, stop as soon as the transfer of this
        lane has ended."""
        while self.now < until and (lane is None or self.lanes[lane].left > 0):
            waiting = [i for i, waits in enumerate(self.lanes) if waits.left > 0]
            if not waiting:
                if self.idle_to < self.now:
                    self.idle_from = self.now
                self.idle_to = self.now = until
                return
            if self.lanes[self.turn].left <= 0 or self.quantum <= 0:
                self.turn, self.quantum = self._next(waiting), float(self.emulation.quantum)
            served, single = self.lanes[self.turn], len(waiting) == 1
            amount = min(served.left, (until - self.now) * self.emulation.bandwidth)
            if not single:
                amount = min(amount, self.quantum)
            self.now = min(until, self.now + amount / self.emulation.bandwidth)
            served.carry(amount)
            self.quantum -= amount
            if single:
                # several quanta were served at once; a transfer that begins now waits only for the rest of the last quantum
                self.quantum %= self.emulation.quantum
            if served.left <= _LEAST_BYTES:
                served.end(self.now)
                self.quantum = 0.0
            elif amount <= 0:  # the remaining time is too short for one byte
                self.now = until

    def _next(self, waiting: Sequence[int]) -> int:
        if self.emulation.order == "fifo":
            return min(waiting, key=lambda i: self.lanes[i].arrived)
        return min(waiting, key=lambda i: (i - self.turn - 1) % len(self.lanes))


@dataclass
class Port:
    """The receive port of a rank.

    ``file``: if several ranks share the port, the file that contains its state; otherwise None.  ``rank``: the number of this
    rank among the ranks that share the port.  ``clock``: the clock with which sending threads measure time and sleep."""

    emulation: LinkEmulation
    file: Path | None = None
    rank: int = 0
    clock: HostClock = MONOTONIC
    _lock: ProcessLock = field(default_factory=ProcessLock)

    def __post_init__(self) -> None:
        self._own = Wire(self.emulation, [_Lane() for _ in LANES])
        self._format = struct.Struct(f"6d{3 * len(LANES) * MOST_RANKS}d")
        self._shared = None if self.file is None else self.file.open("a+b")
        if self._shared is not None:
            self._shared.truncate(self._format.size)  # zeros describe an idle port
            self._memory = mmap.mmap(self._shared.fileno(), self._format.size)

    def send(self, lane: LaneName, nbytes: int, since: float | None = None) -> float:
        """Block until ``nbytes`` have arrived; return the time when the last byte arrived, in seconds of the clock.

        ``since``: the time when a real copy engine would have begun the transfer, or None for the present time.  The calling
        thread may have woken up later than ``since``.
        """
        mine = LANES.index(lane) + (0 if self._shared is None else self.rank * len(LANES))
        with self._wire() as wire:
            now = self.clock.now()
            wire.advance(now)
            wire.add(mine, nbytes, 0.0 if since is None else max(0.0, now - since))
        while True:
            with self._wire() as wire:
                now = self.clock.now()
                wire.advance(now)
                if wire.lanes[mine].left <= 0:
                    over = wire.lanes[mine].over + self.emulation.latency_s
                    break
                ahead = replace(wire, lanes=[replace(lane) for lane in wire.lanes])
            ahead.advance(float("inf"), mine)  # transfers that arrive during the sleep can only delay this transfer
            self.clock.sleep(max(0.0, ahead.now - self.clock.now()))
        self.clock.sleep(max(0.0, over - self.clock.now()))
        return over

    @contextlib.contextmanager
    def _wire(self) -> Iterator[Wire]:
        """A context that yields the state of the port and locks the port against other threads of this process.

        A shared port is also locked through its file, and its state is written back to the file at the end.
        """
        with self._lock():
            if self._shared is None:
                yield self._own
                return
            fcntl.lockf(self._shared, fcntl.LOCK_EX)
            try:
                now, turn, quantum, arrivals, *rest = self._format.unpack(self._memory[:])
                lanes = [_Lane(*rest[i : i + 3]) for i in range(2, len(rest), 3)]
                wire = Wire(self.emulation, lanes, now, int(turn), quantum, arrivals, *rest[:2])
                yield wire
                flat = [figure for x in wire.lanes for figure in (x.left, x.arrived, x.over)]
                figures = (wire.now, wire.turn, wire.quantum, wire.arrivals, wire.idle_from, wire.idle_to)
                self._memory[:] = self._format.pack(*figures, *flat)
            finally:
                fcntl.lockf(self._shared, fcntl.LOCK_UN)
