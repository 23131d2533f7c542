"""Search: finds, for a goal, the number of resident chunks and the memory for streaming the other chunks.

Three parameters define a candidate.  ``residents``: number of resident chunks, which are the first chunks of the ranking (the
order in which chunks become resident).  ``limit``: maximum bytes of the other chunks that are live at the same time.
``hard``: whether there is a barrier before each collective, so that no copy overlaps with the collective.  Candidates are
compared by their simulated steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from chunkflow_compile.passes.goal import DEFAULT_GOAL, Goal
from chunkflow_compile.passes.names import LANES, Lane
from chunkflow_compile.passes.plan import Barrier
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.step import Scheduler, Step

from .barriers import barriers
from .policies import layerwise
from .residency import rank
from .timeline import Simulator, Timeline
from .windows import Chunk, FreeTime, as_windows, chunks_of, fit, fit_slots, free_time_of, latest, live_bytes

# Steps that differ by less than this share of the resident step (the step with all weights resident) count as equally long.
SAME_STEP = 1e-3
# Predictions have an error of some percent.  So among candidates with equally long steps, the planner prefers the candidate
# whose step is shortest *under strain*, that is, if copies take STRAIN times as long as predicted.  Steps under strain that
# differ by less than SAME_STRAIN of the resident step count as equally long; then the planner prefers the candidate with less
# memory.
STRAIN = 1.2
SAME_STRAIN = 5e-3
# The relative floating-point error of a sum of a thousand spans.
ROUNDING = 1e-9
# The number of candidates in each round of a search, and the number of bisections.
_SAMPLES = 8
_HALVINGS = 6
# The search for candidates with slots starts from the fastest candidate without slots.  The search changes its number of
# resident chunks by at most about 1/32 of all chunks.
_NEAR = 32


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A placement of all chunks and its timeline.

    ``placed``: window of each chunk (negative for the previous step), or None if the chunk is resident.  ``residents``:
    number of resident chunks, which are the first chunks of ``Planner.ranking``; or None if the placement does not follow
    this ranking.  ``hard``: whether there is a barrier before each collective.  ``nbytes``: weight bytes on the device,
    without gaps between slots.  ``slots``: offset of each weight with streamed chunks, or None if slots are still to be
    assigned.
    """

    placed: tuple[int | None, ...]
    residents: int | None
    hard: bool
    nbytes: int
    slots: Mapping[str, int] | None
    timeline: Timeline

    @property
    def step_s(self) -> float:
        return self.timeline.step_s


class Planner:
    """Builds and simulates candidates for a problem on a machine.  Of the goal, only ``yields`` affects a candidate: it says
    how copies avoid collectives."""

    def __init__(
        self,
        problem: Problem,
        simulator: Simulator,
        goal: Goal = DEFAULT_GOAL,
        external_bytes: int = 0,
        joins: tuple[int, ...] = (),
        arena: int = 0,
    ) -> None:
        """``external_bytes``, ``arena``, ``joins``: as in :func:`place`."""
        self.problem = problem
        self.scheduler = Scheduler(problem, simulator.chunk_bytes)
        self.joins = joins
        self.external_bytes = external_bytes
        self.arena = arena
        self.goal = goal
        self.simulator = simulator
        self.count = len(problem.regions)
        self.weights = [w for w in problem.weights if w.keep is None and w.uses and w.nbytes]
        self.chunks: list[Chunk] = chunks_of(self.weights, simulator)
        streamed = {w.name for w in self.weights}
        self.kept_bytes = (
            external_bytes + problem.piece_bytes + sum(w.nbytes for w in problem.weights if w.name not in streamed)
        )
        self.resident = simulator.play(self.scheduler.step({}))
        self.free_times: dict[Lane, FreeTime] = {
            lane: free_time_of(self.resident, simulator, joins, lane) for lane in LANES
        }
        longest = max((c.seconds for c in self.chunks), default=0.0)
        self.margin = longest  # a copy that was not planned may delay the next copy by the time for one chunk
        self.ranking = self._rank()
        self._resident_sums = [0, *accumulate(self.chunks[i].nbytes for i in self.ranking)]
        self._whole_sums = self._sums_of_whole_weights()
        self._known: dict[tuple[int, int | None, bool, bool], Candidate | None] = {}
        self._late: dict[int, list[int | None]] = {}
        self._strained: dict[tuple[tuple[int | None, ...], bool], float] = {}
        self._slower = simulator.with_slower_copies(STRAIN)

    def floor(self, residents: int = 0) -> int:
        """Return the minimum weight bytes on the device with ``residents`` resident chunks, without gaps between
        slots."""
        streaming = self._resident_sums[residents] + self._least(residents)
        return self.kept_bytes + max(streaming, self._whole_sums[residents] + self.arena)

    def candidate(
        self, residents: int, limit: int | None, hard: bool = False, slotted: bool = False
    ) -> Candidate | None:
        """Return the candidate with these parameters (see the module docstring), or None if a region reads more than
        ``limit`` streamed bytes.  ``slotted``: whether to assign slots first and to derive the windows from the slots.  Then
        the result is also None if the slots do not fit in ``limit`` bytes."""
        key = (residents, limit, hard, slotted)
        if key not in self._known:
            wanted = self._latest(residents)
            if slotted and limit is not None:
                placed, slots = fit_slots(self.chunks, wanted, self.count, limit) or (None, None)
            else:
                placed, slots = fit(self.chunks, wanted, self.count, limit), None
            self._known[key] = None if placed is None else self.play(placed, hard, residents, slots)
        return self._known[key]

    def within(self, memory: int, residents: int, hard: bool = False, slotted: bool = False) -> Candidate | None:
        """Return the candidate with ``residents`` resident chunks within ``memory`` bytes, or None if there is none.
        Streamed chunks may use the memory that the resident chunks leave free."""
        room = memory - self.kept_bytes
        if room < self._whole_sums[residents] + self.arena:
            return None
        limit = room - self._resident_sums[residents]
        return self.candidate(residents, limit, hard, slotted) if limit >= 0 else None

    def play(
        self,
        placed: Sequence[int | None],
        hard: bool = False,
        residents: int | None = None,
        slots: Mapping[str, int] | None = None,
    ) -> Candidate:
        """Simulate a placement of the chunks.  ``residents``, ``slots``: fields of the candidate."""
        hard = hard or self.goal.yields == "hard"
        timeline = self.simulator.play(self._step(placed, hard, self.joins), spans=False)
        return Candidate(
            placed=tuple(placed),
            residents=residents,
            hard=hard,
            nbytes=self._nbytes(placed),
            slots=slots,
            timeline=timeline,
        )

    def _step(self, placed: Sequence[int | None], hard: bool, joins: tuple[int, ...]) -> Step:
        windows = as_windows(self.chunks, placed, self.count)
        step = self.scheduler.step(windows, joins=joins)
        return self.scheduler.step(windows, self.barriers(step), joins) if hard else step

    @cached_property
    def all_resident(self) -> Candidate:
        """The candidate with all weights resident."""
        return self.play([None] * len(self.chunks))

    def _nbytes(self, placed: Sequence[int | None]) -> int:
        """Return the weight bytes on the device for a placement, without gaps between slots."""
        streamed = [(c, w) for c, w in zip(self.chunks, placed, strict=True) if w is not None]
        kept = sum(c.nbytes for c, w in zip(self.chunks, placed, strict=True) if w is None)
        live = live_bytes([c for c, _ in streamed], [w for _, w in streamed], self.count) if streamed else 0
        in_arena = {c.weight for c, _ in streamed}
        resident = sum(c.nbytes for c in self.chunks if c.weight not in in_arena)
        return self.kept_bytes + max(kept + live, resident + self.arena)

    def fastest(self, memory: int) -> Candidate:
        """Return the best candidate within ``memory`` bytes, in the order of :meth:`rank_key`."""
        natural = self.candidate(0, None)
        if natural is not None and natural.nbytes <= memory and self._hides_all(natural):
            return natural
        most = _bisect(0, len(self.chunks), lambda m: self.floor(m + 1) > memory)
        candidates = self._search(lambda m: self.within(memory, m), 0, most, (_SAMPLES, _SAMPLES // 2))
        ordered = sorted(candidates, key=self.rank_key)
        hard = [self.play(c.placed, True, c.residents) for c in ordered[:2] if self._contended(c)]
        return min([ordered[0], *hard, *self._baselines(memory)], key=self.rank_key)

    def slotted(self, candidate: Candidate, memory: int) -> Candidate | None:
        """Return the best candidate within ``memory`` whose windows are derived from slots, and which has about as many
        resident chunks as ``candidate``.  Return None if there is none."""
        residents, near = candidate.residents or 0, max(len(self.chunks) // _NEAR, _SAMPLES)
        low, high = max(0, residents - near), min(len(self.chunks), residents + near)
        samples = [_SAMPLES // 2] * _HALVINGS
        candidates = self._search(lambda m: self.within(memory, m, candidate.hard, slotted=True), low, high, samples)
        return min(candidates, key=self.rank_key, default=None)

    def _search(
        self, candidate: Callable[[int], Candidate | None], low: int, high: int, samples: Sequence[int]
    ) -> list[Candidate]:
        """Try candidates with ``low`` to ``high`` resident chunks, and return all that exist.  In the first round, the tried
        numbers are spread evenly from ``low`` to ``high``.  After each round, the range shrinks: it then reaches from the
        tried number just below the best number to the tried number just above it.

        ``candidate``: makes the candidate for a number of resident chunks.  ``samples``: number of tries per round.
        """
        candidates: list[Candidate] = []
        for number in samples:
            grid = _spread(low, high, number)
            tried = [(m, c) for m in grid if (c := candidate(m)) is not None]
            if not tried:
                break
            best = min(tried, key=lambda t: self.rank_key(t[1]))[0]
            candidates += [c for _, c in tried]
            low, high = (
                max([m for m in grid if m < best], default=low),
                min([m for m in grid if m > best], default=high),
            )
        return candidates

    def smaller(self, candidate: Candidate, memory: int) -> Candidate | None:
        """Return the best variant of ``candidate`` within ``memory``, or None if there is none.  The variants have less
        memory for streamed chunks, or fewer resident chunks."""
        residents = candidate.residents or 0
        kept = max(0, self._resident_sums[residents] - max(0, candidate.nbytes - memory))
        fewer = bisect_right(self._resident_sums, kept) - 1
        tried = (
            self.within(memory, m, candidate.hard) for m in {residents, fewer, (residents + fewer) // 2, fewer // 2, 0}
        )
        return min((c for c in tried if c is not None), key=self.rank_key, default=None)

    def smallest(self, step_s: float) -> Candidate:
        """Return the smallest candidate whose step takes at most ``step_s``, or the candidate with all weights resident
        if there is none."""
        total = len(self.chunks)
        step_s *= 1 + ROUNDING
        enough = _bisect(0, total, lambda m: self._meets(self.candidate(m, None), step_s))
        candidates: list[Candidate] = []
        for extra in (0, total // 64, total // 24, total // 8):
            residents = min(enough + extra, total)
            least = min((c.nbytes for c in candidates), default=None)
            if least is not None and self.floor(residents) >= least:
                continue
            candidates += self._shrink(residents, step_s)
        candidates += [c for c in self._baselines(None) if c.step_s <= step_s]
        return min(candidates, key=lambda c: (c.nbytes, c.step_s)) if candidates else self.all_resident

    def _shrink(self, residents: int, step_s: float) -> list[Candidate]:
        """Return candidates with ``residents`` resident chunks whose step takes at most ``step_s`` seconds.  Bisection lowers
        the limit for the streamed chunks, first without barriers, then with barriers."""
        natural = self.candidate(residents, None)
        if natural is None or natural.step_s > step_s:
            return []
        floor = self._least(residents)
        ceiling = natural.nbytes - self.kept_bytes - self._resident_sums[residents]
        candidates = [natural]
        for hard in (False, True) if self.goal.yields == "auto" else (natural.hard,):
            if hard and self.play(candidates[-1].placed, True).step_s > candidates[-1].step_s:
                break
            low, high = floor, ceiling
            for _ in range(_HALVINGS):
                middle = (low + high) // 2
                tried = self.candidate(residents, middle, hard)
                if self._meets(tried, step_s):
                    assert tried is not None
                    candidates.append(tried)
                    high = middle
                else:
                    low = middle
        return candidates

    def _baselines(self, memory: int | None) -> list[Candidate]:
        """Return a candidate with the layerwise policy of other systems, so that no plan is slower than this policy.  Return
        an empty list if the candidate does not fit in ``memory``."""
        candidate = self.play(layerwise(self.problem, self.chunks))
        return [candidate] if memory is None or candidate.nbytes <= memory else []

    def _hides_all(self, candidate: Candidate) -> bool:
        """Return whether the step is as short as the step with all weights resident, both if copies take as long as
        predicted and if they take STRAIN times as long."""
        least = self.resident.step_s
        return candidate.step_s <= least * (1 + ROUNDING) and self.strained(candidate) <= least * (1 + SAME_STRAIN)

    def _contended(self, candidate: Candidate) -> bool:
        taking = any(self.simulator.contending_collectives(lane) for lane in {chunk.lane for chunk in self.chunks})
        return self.goal.yields == "auto" and taking and candidate.timeline.inflation_s > 0

    def _meets(self, candidate: Candidate | None, step_s: float) -> bool:
        return candidate is not None and candidate.step_s <= step_s

    def rank_key(self, candidate: Candidate) -> tuple[int, int, int, float]:
        """Return a sort key for candidates, best first.  A shorter step is better.  Among candidates with equally long
        steps (SAME_STEP), a shorter step under strain is better, and then less memory."""
        unit = self.resident.step_s or 1.0
        strained = round(self.strained(candidate) / (SAME_STRAIN * unit))
        return round(candidate.step_s / (SAME_STEP * unit)), strained, candidate.nbytes, candidate.step_s

    def strained(self, candidate: Candidate) -> float:
        """Return the step time in seconds if copies take STRAIN times as long as predicted."""
        key = candidate.placed, candidate.hard
        if key not in self._strained:
            step = self._step(candidate.placed, candidate.hard, self.joins)
            self._strained[key] = self._slower.play(step, spans=False).step_s
        return self._strained[key]

    def _sums_of_whole_weights(self) -> list[int]:
        """Return, for each number of resident chunks, the bytes of the weights that are resident as a whole.  These
        weights are not in the arena."""
        sizes, left, sums = Counter[str](), Counter(c.weight for c in self.chunks), [0]
        for chunk in (self.chunks[i] for i in self.ranking):
            sizes[chunk.weight] += chunk.nbytes
            left[chunk.weight] -= 1
            sums.append(sums[-1] + (0 if left[chunk.weight] else sizes[chunk.weight]))
        return sums

    def _least(self, residents: int) -> int:
        """Return the maximum, over all regions, of the streamed bytes that a region reads if the first ``residents`` chunks
        of the ranking are resident."""
        kept = set(self.ranking[:residents])
        streamed = [c for i, c in enumerate(self.chunks) if i not in kept]
        return live_bytes(streamed, [c.first for c in streamed], self.count) if streamed else 0

    def _latest(self, residents: int) -> list[int | None]:
        """Return, for each chunk, the latest window that hides its copy, or None for the first ``residents`` chunks of
        the ranking."""
        if residents not in self._late:
            kept = set(self.ranking[:residents])
            windows = iter(self.latest([c for i, c in enumerate(self.chunks) if i not in kept]))
            self._late[residents] = [None if i in kept else next(windows) for i in range(len(self.chunks))]
        return self._late[residents]

    def latest(self, chunks: Sequence[Chunk]) -> list[int]:
        """Return, for each chunk, the latest window that hides its copy.  Copies use the free time of their lane's
        interconnect."""
        answer = [0] * len(chunks)
        for lane, free in self.free_times.items():
            mine = [i for i, chunk in enumerate(chunks) if chunk.lane == lane]
            for i, window in zip(mine, latest([chunks[i] for i in mine], free, self.margin), strict=True):
                answer[i] = window
        return answer

    def barriers(self, step: Step) -> tuple[Barrier, ...]:
        """Return barriers that keep the copies of a step from overlapping with collectives.  At these barriers, compute waits
        for the copies in each lane that shares its interconnect with collectives, or for all copies if there is no such
        lane."""
        contended = [lane for lane in LANES if self.simulator.contending_collectives(lane)] or LANES
        lanes = [[w.name for w in self.weights if self.simulator.lane(w.name) == lane] for lane in contended]
        return barriers(self.problem, step, lanes)

    def _rank(self) -> list[int]:
        """Return the ranking: the indices of chunks in the order in which they become resident.

        The ranking depends on the stalls of a step that streams all chunks with twice the minimum memory, so that copies run
        hardly ahead of compute.  This step has no joins, because a stall at a join cannot be attributed to a region.
        """
        if not self.chunks:
            return []
        least = live_bytes(self.chunks, [c.first for c in self.chunks], self.count)
        windows = fit(self.chunks, self.latest(self.chunks), self.count, 2 * least)
        assert windows is not None
        timeline = self.simulator.play(self._step(windows, self.goal.yields == "hard", ()), spans=False)
        stalls: dict[int, float] = {}
        for chunk in self.chunks:
            stalls[chunk.first] = stalls.get(chunk.first, 0.0)
        first = {w.name: w.uses[0] for w in self.weights}
        for name, slack in timeline.slack.items():
            stalls[first[name]] += max(0.0, -slack)
        return self._drive_first(rank(self.chunks, stalls))

    def _drive_first(self, ranking: list[int]) -> list[int]:
        """Move chunks on the SSD to the front of the ranking, until the SSD can read all other chunks within the time of the
        resident step."""
        seconds = {i: self.simulator.read_seconds(c.weight, c.index, c.index + 1) for i, c in enumerate(self.chunks)}
        over, first = sum(seconds.values()) - self.resident.step_s, list[int]()
        for i in ranking:
            if over > 0 and seconds[i]:
                first.append(i)
                over -= seconds[i]
        chosen = set(first)
        return first + [i for i in ranking if i not in chosen]


def _spread(low: int, high: int, samples: int) -> Sequence[int]:
    """Return at most ``samples`` + 1 integers, evenly spread from ``low`` to ``high``, including both."""
    steps = min(samples, max(high - low, 0)) or 1
    return sorted({low + (high - low) * i // steps for i in range(steps + 1)})


def _bisect(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the lowest number from ``low`` to ``high - 1`` for which ``holds`` is true, or ``high`` if there is none.  If
    ``holds`` is true for a number, it must be true for all larger numbers."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
