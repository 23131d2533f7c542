"""Traffic: records the transfers over PCIe into a rank, and finds the copies that overlapped no other transfer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from chunkflow_compile.passes.names import LANES, Lane

from .measurement import WindowSeconds

_UNKNOWN = float("inf")


class Copied(NamedTuple):
    """Sums over a number of copies that have ended.

    ``seconds``, ``nbytes``: total seconds and bytes of all copies.  ``alone_s``, ``alone_bytes``: total seconds and bytes of
    the copies from the host that overlapped neither a collective nor a pull.
    """

    seconds: float = 0.0
    nbytes: int = 0
    alone_s: float = 0.0
    alone_bytes: int = 0


_NO_COPIES = Copied()


@dataclass(eq=False)
class Transfer:
    """A transfer over PCIe.

    ``log``: the queue to which the transfer is added when it begins.  ``nbytes``: for a copy, its size in bytes.
    ``windows``, ``window``: for a collective or its completion, the record of seconds per window, and the index of the
    window to which the duration is added.  ``begin``, ``end``: the times when the transfer began and ended, in seconds of
    the device's clock; infinite until they are known.
    """

    log: deque[Transfer]
    nbytes: int = 0
    windows: WindowSeconds | None = None
    window: int = 0
    begin: float = _UNKNOWN
    end: float = _UNKNOWN

    def begins(self, at: float) -> None:
        self.begin = at
        self.log.append(self)

    def ends(self, at: float) -> None:
        self.end = at


class Traffic:
    """The transfers of a program.

    Up to four threads use this object: one thread each for copies, pulls and collectives, and the thread that calls
    :meth:`drain`.
    """

    def __init__(self) -> None:
        self._counted = 0
        self._lanes: dict[Lane, deque[Transfer]] = {lane: deque() for lane in LANES}
        self._collectives: deque[Transfer] = deque()
        # collectives (``_drained``) and pulls (``_pulled``) that have ended.  They are kept because they may have overlapped
        # copies that are still in flight.
        self._drained: deque[Transfer] = deque()
        self._pulled: deque[Transfer] = deque()

    def copy(self, nbytes: int, lane: Lane = "copy") -> Transfer:
        """Return the record of a copy that is about to run on the stream of a lane."""
        return Transfer(self._lanes[lane], nbytes)

    def collective(self, windows: WindowSeconds, window: int) -> Transfer:
        """Return the record of a collective, or of the completion of a collective, that is about to run."""
        return Transfer(self._collectives, windows=windows, window=window)

    def drain(self, now: float) -> Copied:
        """Add the duration of each collective to its window; return the sums over the copies that had ended by ``now``.

        No collective may be in flight when this method is called.
        """
        if not (self._collectives or self._drained or any(self._lanes.values())):
            return _NO_COPIES
        fresh = [self._collectives.popleft() for _ in range(len(self._collectives))]
        per_lane = [[overlaps for _, overlaps in _overlaps(fresh, list(lane))] for lane in self._lanes.values()]
        for collective, *overlaps in zip(fresh, *per_lane, strict=True):
            assert collective.windows is not None
            seconds = collective.end - collective.begin
            collective.windows.collective_s[collective.window] += seconds
            collective.windows.beside_s[collective.window] += seconds * any(overlaps)
        self._drained.extend(fresh)
        ended: dict[Lane, list[Transfer]] = {name: list(_ended(lane, now)) for name, lane in self._lanes.items()}
        self._pulled.extend(ended["pull"])
        pulls = [*self._pulled, *list(self._lanes["pull"])]
        free = [copy for copy, overlaps in _overlaps(ended["copy"], list(self._drained)) if not overlaps]
        free = [copy for copy, overlaps in _overlaps(free, pulls) if not overlaps]
        since = min((copy.begin for lane in self._lanes.values() for copy in list(lane)), default=now)
        for past in (self._drained, self._pulled):
            while past and past[0].end <= since:
                past.popleft()
        copied = Copied(*_sums([copy for copies in ended.values() for copy in copies]), *_sums(free))
        self._counted += copied.nbytes
        return copied

    @property
    def copied_bytes(self) -> int:
        """The total bytes of all copies that have ended."""
        copies = (copy for lane in self._lanes.values() for copy in list(lane))
        return self._counted + sum(copy.nbytes for copy in copies if copy.end < _UNKNOWN)

    def forget(self) -> None:
        """Drop all transfers of a failed step, so that no later step counts them."""
        self._counted = self.copied_bytes
        for lane in self._lanes.values():
            lane.clear()
        self._collectives.clear()
        self._drained.clear()
        self._pulled.clear()


def _ended(lane: deque[Transfer], now: float) -> Iterator[Transfer]:
    """Remove the transfers that had ended by ``now`` from ``lane``; yield the removed transfers."""
    while lane and lane[0].end <= now:
        yield lane.popleft()


def _sums(copies: Sequence[Transfer]) -> tuple[float, int]:
    """Return the total seconds and the total bytes of ``copies``."""
    return sum((copy.end - copy.begin for copy in copies), 0.0), sum(copy.nbytes for copy in copies)


def _overlaps(transfers: Sequence[Transfer], others: Sequence[Transfer]) -> Iterator[tuple[Transfer, bool]]:
    """Yield a pair for each of ``transfers``: the transfer, and whether it overlaps any of ``others``.  The transfers of
    each sequence must be in order of time."""
    position = 0
    for transfer in transfers:
        while position < len(others) and others[position].end <= transfer.begin:
            position += 1
        yield transfer, position < len(others) and others[position].begin < transfer.end
