"""Windows: chooses the window that starts the copy of each chunk.  The chunk should arrive in time, should not be copied
during a collective, and should not be live for long.

A step is treated as a circle, because its last windows prefetch the first weights of the next step.  Windows are chosen in
two passes around the circle:

    latest     backward: the latest window in which the copy of a chunk is still hidden and overlaps with no collective
    fit        forward: delays copies until there is enough memory
    fit_slots  forward, instead of fit: assigns slots, and delays copies until the bytes of their slots are free

The passes ``fit`` and ``fit_slots`` never choose an earlier window for a copy than ``latest`` chose.  The memory limit has
priority: if memory for a chunk becomes free too late, its copy starts late, and its reader waits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from chunkflow_compile.passes.names import Lane
from chunkflow_compile.passes.plan import Windows, aligned, chunk_count
from chunkflow_compile.passes.problem import Weight

from .slots import ArenaSpace
from .timeline import Simulator, Timeline

# The maximum number of laps around the circle in each pass.  In the first lap, it is not known which copies of the
# neighboring step overlap with the copies of this step.  The laps after the first take these copies into account.
BACKWARD_LAPS = 4
FORWARD_LAPS = 3
# If the chunks do not fit in the gaps between collectives, the step is stretched by this factor, at most _STRETCHES times.
# Only whole chunks fit in a gap, so each gap loses up to the copy time of one chunk.  A stretch of 2 % is small compared with
# this loss: it makes up for about a tenth of the loss if gaps are short.
_STRETCH = 1.02
_STRETCHES = 24


@dataclass(frozen=True)
class Chunk:
    """A chunk of a weight.  ``seconds``: copy time while nothing else uses the interconnect.  ``first``, ``last``: first
    and last region that read the chunk.  ``lane``: lane of its copy."""

    weight: str
    index: int
    nbytes: int
    seconds: float
    first: int
    last: int
    lane: Lane = "copy"


@dataclass(frozen=True)
class FreeTime:
    """The times at which copies can use an interconnect without overlapping with collectives, in a step with all weights
    resident.

    ``length``: length of the step in seconds.  ``gaps``: intervals in which copies do not overlap with collectives, in
    ascending order; no interval contains a join, the end of a call at which compute waits for all copies.  ``opens``: time at
    which each window opens.
    """

    length: float
    gaps: tuple[tuple[float, float], ...]
    opens: tuple[float, ...]


def free_time_of(
    resident: Timeline, simulator: Simulator, joins: Collection[int] = (), lane: Lane = "copy"
) -> FreeTime:
    """Return the free time of a lane's interconnect in the resident step, that is, in the step with all weights resident.
    ``joins``: as in a Plan.

    The latency of a collective does not count as free time, because it is shorter on a rank that reaches the collective
    late.
    """
    opens = tuple(s.start for s in resident.spans if s.lane == "compute")
    gaps, begin = list[tuple[float, float]](), 0.0
    taking = simulator.contending_collectives(lane)
    for start, end in sorted((s.start, s.end) for s in resident.spans if s.lane == "collective" and s.name in taking):
        if start > begin:
            gaps.append((begin, start))
        begin = max(begin, end)
    if resident.step_s > begin:
        gaps.append((begin, resident.step_s))
    for join in (opens[k] for k in joins if k < len(opens)):
        gaps = [part for a, b in gaps for part in (((a, join), (join, b)) if a < join < b else ((a, b),))]
    return FreeTime(resident.step_s, tuple(gaps), opens)


def chunks_of(weights: Sequence[Weight], simulator: Simulator) -> list[Chunk]:
    """Return the chunks of ``weights`` in order of first use."""
    chunks = []
    for weight in sorted(weights, key=lambda w: (w.uses[0], w.name)):
        for i in range(chunk_count(weight.nbytes, simulator.chunk_bytes)):
            nbytes, seconds = simulator.nbytes(weight.name, i, i + 1), simulator.copy_seconds(weight.name, i, i + 1)
            bounds = weight.uses[0], weight.uses[-1]
            chunks.append(Chunk(weight.name, i, aligned(nbytes), seconds, *bounds, simulator.lane(weight.name)))
    return chunks


def stretched(free: FreeTime, factor: float) -> FreeTime:
    """Return the free time in a step in which all gaps are ``factor`` times as long, as if compute stalled in every gap."""
    begins = [a for a, _ in free.gaps]
    before, passed = [0.0], 0.0
    for a, b in free.gaps:
        passed += b - a
        before.append(passed)

    def later(time: float) -> float:
        gap = bisect_right(begins, time) - 1
        if gap < 0:
            return time
        inside = min(time, free.gaps[gap][1]) - free.gaps[gap][0]
        return time + (factor - 1) * (before[gap] + inside)

    return FreeTime(
        later(free.length), tuple((later(a), later(b)) for a, b in free.gaps), tuple(later(t) for t in free.opens)
    )


def latest(chunks: Sequence[Chunk], free: FreeTime, margin: float) -> list[int]:
    """Return, for each chunk, the latest window in which its copy can start so that the chunk arrives ``margin`` seconds
    before its first reader starts.

    A negative window belongs to the previous step.  Chunks are copied one at a time, and not during collectives.  If there
    is too little free time, the step is stretched by the smallest sufficient factor, so that copies fill every gap.
    """
    total = sum(b - a for a, b in free.gaps)
    factor = max(1.0, sum(c.seconds for c in chunks) / total) if total else 1.0
    for _ in range(_STRETCHES):
        answer, settled = _pack(chunks, stretched(free, factor) if factor > 1 else free, margin)
        if settled:
            break
        factor *= _STRETCH
    return answer


def _pack(chunks: Sequence[Chunk], free: FreeTime, margin: float) -> tuple[list[int], bool]:
    """Return the window of each chunk, and whether the laps have converged: no copy for the next step overlaps with the
    copies of this step."""
    count, answer, limit = len(free.opens), [0] * len(chunks), float("inf")
    for _ in range(BACKWARD_LAPS):
        cursor = _Cursor(free)
        begin, cramped = limit, False
        for i in range(len(chunks) - 1, -1, -1):
            chunk = chunks[i]
            begin = cursor.place(min(begin, free.opens[chunk.first] - margin), chunk.seconds)
            earliest = chunk.last + 1 - count  # in earlier windows, the previous step still reads the chunk
            answer[i] = max(_open_window(free, begin), earliest)
            if answer[i] == earliest and begin < _opening(free, earliest):
                begin, cramped = _opening(free, earliest), True
        if not chunks or (begin + free.length >= limit and not cramped):
            return answer, True
        limit = begin + free.length
    return answer, False


class _Cursor:
    """A walk backward over the gaps of this step and then of earlier steps."""

    def __init__(self, free: FreeTime) -> None:
        self.free = free
        self.gap = len(free.gaps) - 1
        self.lap = 0
        self.longest = max((b - a for a, b in free.gaps), default=0.0)

    def place(self, end: float, seconds: float) -> float:
        """Return the latest start of a copy that takes ``seconds`` seconds and ends by ``end``.

        The copy is in the latest gap that is long enough.  If no gap is long enough, the copy overlaps with collectives.
        """
        if seconds > self.longest:
            return end - seconds
        while True:
            start, stop = (t + self.lap * self.free.length for t in self.free.gaps[self.gap])
            if min(stop, end) - seconds >= start - 1e-12:
                return min(stop, end) - seconds
            self.gap -= 1
            if self.gap < 0:
                self.gap, self.lap = len(self.free.gaps) - 1, self.lap - 1


def _open_window(free: FreeTime, time: float) -> int:
    """Return the last window that opens at or before ``time``."""
    lap = int(time // free.length) if free.length else 0
    return lap * len(free.opens) + bisect_right(free.opens, time - lap * free.length + 1e-12) - 1


def _opening(free: FreeTime, window: int) -> float:
    lap, window = divmod(window, len(free.opens))
    return free.opens[window] + lap * free.length


def fit(
    chunks: Sequence[Chunk], wanted: Sequence[int | None], count: int, limit: int | None
) -> list[int | None] | None:
    """Return windows with which at most ``limit`` bytes are live at the same time, or None if there are no such windows.
    Each window is as early as memory permits, but not earlier than the window in ``wanted``.

    ``wanted``: window of each chunk, or None if the chunk is resident.  Chunks get memory in the order in which regions read
    them.  A chunk is live from its window to its last reader.
    """
    streamed = {i: window for i, window in enumerate(wanted) if window is not None}
    moving = [chunks[i] for i in streamed]
    if limit is None or not streamed or live_bytes(moving, list(streamed.values()), count) <= limit:
        return list(wanted)
    live = [0] * count
    for chunk in moving:
        for k in range(chunk.first, chunk.last + 1):
            live[k % count] += chunk.nbytes
    if max(live) > limit:
        return None
    placed = {i: chunks[i].first for i in streamed}
    for _ in range(FORWARD_LAPS):
        before = placed[max(placed)] - count
        changed = False
        for i, earliest in streamed.items():
            chunk = chunks[i]
            for k in range(placed[i], chunk.first):
                live[k % count] -= chunk.nbytes
            window, bound = chunk.first, max(earliest, min(before, chunk.first))
            while window > bound and live[(window - 1) % count] + chunk.nbytes <= limit:
                window -= 1
                live[window % count] += chunk.nbytes
            changed |= window != placed[i]
            placed[i] = before = window
        if not changed:
            break
    return [placed.get(i) for i in range(len(chunks))]


def fit_slots(
    chunks: Sequence[Chunk], wanted: Sequence[int | None], count: int, limit: int
) -> tuple[list[int | None], dict[str, int]] | None:
    """Return windows and slots with which the streamed chunks take at most ``limit`` bytes, or None if there are no such
    slots.  No chunk gets an earlier window than in ``wanted``.

    ``chunks``: all chunks of each weight.  ``wanted``: window of each chunk, or None if the chunk is resident.  The slots are
    a mapping from each weight with streamed chunks to its offset.  Slots are assigned in order of first use.  Of the weights
    with the same first reader, the largest comes first, and smaller ones fill gaps.  The bytes of a slot become free when the
    last reader of the weight that was there before has finished; this determines the earliest window of each chunk.
    """
    streamed = _streamed(chunks, wanted)
    kept = sum(chunks[i].nbytes for members in streamed for i in members if wanted[i] is None)
    room, slots = ArenaSpace(limit + kept, count), dict[str, int]()
    windows = {i: window for i, window in enumerate(wanted) if window is not None}
    spans: dict[int, tuple[int, int]] = {}
    for members in streamed:
        weight, nbytes = chunks[members[0]], sum(chunks[i].nbytes for i in members)
        starts = [windows[i] for i in members if i in windows]
        at = room.offset(nbytes, weight.first, min(starts))
        if at is None:
            return None
        slots[weight.weight] = at
        if len(starts) < len(members):  # the weight is partly resident: no other weight may use its slot
            room.take(at, nbytes, count)
            continue
        for i in members:
            begin = at + chunks[i].index * weight.nbytes
            spans[i] = begin, begin + chunks[i].nbytes
            windows[i] = max(windows[i], room.free(*spans[i]))
        room.take(at, nbytes, weight.last + 1)
    # the weight that uses these bytes last in a step also used them last in the previous step: the bytes become free only
    # when the last reader of this weight in the previous step has finished
    for i, (begin, end) in spans.items():
        windows[i] = max(windows[i], room.free(begin, end) - count)
    return [windows.get(i) for i in range(len(chunks))], slots


def _streamed(chunks: Sequence[Chunk], wanted: Sequence[int | None]) -> list[list[int]]:
    """Return the chunks of each weight that has streamed chunks, in the order in which slots are assigned.  Partly
    resident weights come first."""
    members: dict[str, list[int]] = {}
    for i, chunk in enumerate(chunks):
        members.setdefault(chunk.weight, []).append(i)

    def order(m: list[int]) -> tuple[bool, int, int]:
        return all(wanted[i] is not None for i in m), chunks[m[0]].first, -sum(chunks[i].nbytes for i in m)

    return sorted((m for m in members.values() if any(wanted[i] is not None for i in m)), key=order)


def as_windows(chunks: Sequence[Chunk], placed: Sequence[int | None], count: int) -> dict[str, Windows]:
    """Return, for each weight, the windows of its chunks as in a :class:`WeightPlan`.  ``chunks``: all chunks of each
    weight.  ``placed``: window of each chunk, negative for the previous step, or None if the chunk is resident."""
    by_weight: dict[str, list[int | None]] = {}
    for chunk, window in zip(chunks, placed, strict=True):
        by_weight.setdefault(chunk.weight, []).append(None if window is None else window % count)
    return {name: tuple(windows) for name, windows in by_weight.items()}


def live_bytes(chunks: Sequence[Chunk], placed: Sequence[int], count: int) -> int:
    """Return the maximum, over all windows, of the bytes of streamed chunks that are live."""
    live = [0] * count
    for chunk, window in zip(chunks, placed, strict=True):
        for k in range(window, chunk.last + 1):
            live[k % count] += chunk.nbytes
    return max(live)
