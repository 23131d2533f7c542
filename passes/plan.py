"""Plan: where each weight is stored, which slot it is streamed through, and which window starts the copy of each chunk.  A
plan is immutable, and is stored as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from .errors import ChunkflowError
from .names import Lane
from .pieces import from_others
from .problem import HOST, Problem, Source

SCHEMA = 3
# The CUDA allocator aligns every tensor to 256 bytes; kernels assume that inputs are aligned to 16 bytes.
ALIGNMENT = 256

# Where a weight is copied from: host memory ("host") or its shards on the devices of several ranks ("peers").  A weight
# with the home "device" is not copied, because it stays on the device.
HomeName = Literal["host", "peers", "device"]
# For each chunk of a weight, the window that starts its copy, or None for a resident chunk.
Windows = tuple["int | None", ...]


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """Return the number of chunks in ``nbytes`` bytes; the last one may be shorter."""
    return -(-nbytes // chunk_bytes)


class ChunkRun(NamedTuple):
    """Consecutive chunks ``[first, end)`` of a weight that have the same window.  ``window``: window that starts their
    copies, or None if they are resident."""

    first: int
    end: int
    window: int | None


def runs(windows: Windows) -> Iterator[ChunkRun]:
    """Group consecutive chunks of a weight that have the same window."""
    first, count = 0, len(windows)
    for end in range(1, count + 1):
        if end == count or windows[end] != windows[first]:
            yield ChunkRun(first, end, windows[first])
            first = end


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """The placement of one weight.  Unless ``home`` is "device", the weight is streamed through a slot at ``offset``
    bytes in the arena.

    ``windows``: for each chunk, the window that starts its copy, or None if the chunk is resident.  If ``window <=
    first_use``, the chunk is copied in the same step in which it is read, otherwise in the previous step (wrap-around).
    ``first_use`` and ``last_use``: indices of the first and the last region that read the weight.  ``slack_s``:
    predicted seconds from the arrival of the last chunk to the start of the first region that reads the weight;
    negative if this region waits.  ``why``: reason for the placement, as a sentence.  ``source``: source of the weight, in
    which a plan sets only the field ``ranks``; for a sharded weight, this field is set even if ``home`` is "device".
    """

    name: str
    home: HomeName
    nbytes: int
    why: str
    offset: int | None = None
    windows: Windows = ()
    first_use: int = -1
    last_use: int = -1
    slack_s: float | None = None
    source: Source = HOST

    def ahead(self, count: int) -> int:
        """Return the number of windows by which the weight's earliest copy precedes its first reader.  ``count``:
        number of windows per step."""
        return max(((self.first_use - w) % count for w in self.windows if w is not None), default=0)

    @property
    def streamed_chunks(self) -> int:
        return sum(w is not None for w in self.windows)

    def wraps(self, window: int) -> bool:
        """Return whether a chunk that is copied in ``window`` is read in the next step."""
        return window > self.first_use


@dataclass(frozen=True, kw_only=True)
class Barrier:
    """A point at which compute waits for the copies of ``weights`` before it starts ``collective``, so that these
    copies do not overlap with the collective."""

    collective: str
    weights: tuple[str, ...]


class RegionLabel(NamedTuple):
    """The label of a region in reports.  ``block``: block of the region, empty outside blocks.  ``what``: what the region
    computes."""

    block: str
    what: str


SpanLane = Literal["compute", "collective", "copy", "pull", "read", "stall", "barrier", "join"]


class Span(NamedTuple):
    """An interval of the predicted timeline, in seconds from the start of the step.  ``start`` is negative if a copy or a
    read starts in the previous step.

    In a ``stall``, compute waits for the weight ``name`` before the region that reads it.  In a ``barrier``, compute
    waits for copies before a collective.  In a ``join``, compute waits for all copies at the end of a call.
    """

    lane: SpanLane
    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The cost model's prediction for a step in the steady state.

    ``compute_s``: compute time, including the slowdown by copies.  ``exposed_s``: stall time.  ``collective_s``: total time
    of collectives; ``inflation_s``: the part of ``collective_s`` that concurrent copies cause.  ``copy_s``: total time of
    copies and pulls.  ``peak_bytes``: peak of weight bytes on the device.  ``resident_step_s``: step time with all
    weights resident.
    """

    step_s: float
    resident_step_s: float
    compute_s: float
    exposed_s: float
    collective_s: float
    inflation_s: float
    copy_s: float
    peak_bytes: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The placement of all weights.  ``arena_bytes``: size of the arena.  ``chunk_bytes``: size of a full chunk.

    ``problem``: digest of the Problem for which the plan was made.  ``hardware``: name of the profile.  ``regions``:
    label of each region; window k opens before region k.  ``joins``: for each call, the number of regions up to its end.  At
    the end of the call, compute waits for all copies issued so far, so that the call can be one CUDA graph.  ``joins`` is
    empty if copies may continue after the end of a call.  ``model``: title of the model in reports, empty if unknown.
    """

    policy: str
    problem: str
    hardware: str
    chunk_bytes: int
    arena_bytes: int
    regions: tuple[RegionLabel, ...]
    weights: tuple[WeightPlan, ...]
    barriers: tuple[Barrier, ...] = ()
    predicted: Prediction | None = None
    joins: tuple[int, ...] = ()
    model: str = ""

    @property
    def streamed(self) -> tuple[WeightPlan, ...]:
        return tuple(w for w in self.weights if w.home != "device")

    @cached_property
    def pulled(self) -> frozenset[str]:
        """The names of the weights that are streamed from the devices of the ranks."""
        return frozenset(w.name for w in self.weights if w.home == "peers")

    def lane(self, weight: str) -> Lane:
        """Return the lane of a streamed weight.  A sharded weight stays in the lane "pull" after a rank has written to it,
        although this rank then copies the weight from host memory."""
        return "pull" if weight in self.pulled else "copy"

    @property
    def placement(self) -> object:
        """The decisions of the plan, without reasons, labels and predictions."""
        where = tuple((w.name, w.home, w.offset, w.windows) for w in self.weights)
        return self.chunk_bytes, self.arena_bytes, self.policy, where, self.barriers, self.joins

    @property
    def device_bytes(self) -> int:
        """Weight bytes on the device: the arena, the weights outside it, and this rank's shards."""
        return self.arena_bytes + sum(w.nbytes for w in self.weights if w.home == "device") + self.piece_bytes

    @property
    def piece_bytes(self) -> int:
        """The part of ``device_bytes`` that this rank's shards occupy."""
        return sum(w.source.shard_bytes(w.nbytes) for w in self.weights)

    @property
    def moved_bytes(self) -> int:
        """Bytes copied into slots per step."""
        return sum(map(self.streamed_bytes, self.streamed))

    @property
    def pulled_bytes(self) -> int:
        """The part of ``moved_bytes`` that comes from the devices of other ranks."""
        return sum(
            from_others(*self.span(w, r.first, r.end), w.nbytes, w.source.ranks)
            for w in self.streamed
            for r in runs(w.windows)
            if w.home == "peers" and r.window is not None
        )

    def streamed_bytes(self, weight: WeightPlan) -> int:
        """Return the bytes of a weight that are copied per step."""
        return sum(self.nbytes(weight, r.first, r.end) for r in runs(weight.windows) if r.window is not None)

    @cached_property
    def drive_rate(self) -> float | None:
        """The predicted read rate of the SSD in bytes/s, or None if nothing is read from it."""
        weights, nbytes, seconds = {w.name: w for w in self.weights}, 0, 0.0
        for span in self.predicted.spans if self.predicted is not None else ():
            if span.lane == "read":
                name, first, end = span_chunks(span.name)
                nbytes += self.nbytes(weights[name], first, end)
                seconds += span.end - span.start
        return nbytes / seconds if seconds else None

    def span(self, weight: WeightPlan, first: int, end: int) -> tuple[int, int]:
        """Return the range of bytes ``[start, stop)`` in a weight that chunks ``[first, end)`` occupy."""
        return first * self.chunk_bytes, min(end * self.chunk_bytes, weight.nbytes)

    def nbytes(self, weight: WeightPlan, first: int, end: int) -> int:
        """Return the size of chunks ``[first, end)`` of a weight in bytes."""
        begin, stop = self.span(weight, first, end)
        return stop - begin

    def check_problem(self, problem: Problem, ends: Sequence[int] | None = None) -> None:
        """Raise ChunkflowError if the plan was made for another model, input size, Ulysses degree or cut, or if its
        joins are not at the ends of the calls.

        ``ends``: for each call of the problem, the number of regions up to its end; or None if there is only one call.
        """
        if self.problem != problem.digest:
            ours, theirs = {w.name for w in self.weights}, {w.name for w in problem.weights}
            odd = sorted(ours ^ theirs)
            hint = f"; only one of them has the weight {odd[0]}" if odd else ": its sizes, degree or options differ"
            raise ChunkflowError(
                f"The plan was made for problem {self.problem}, this model is {problem.digest}{hint}. "
                "Make the plan again for this model."
            )
        ends = (len(problem.regions),) if ends is None else tuple(ends)
        if self.joins not in ((), ends):
            raise ChunkflowError(
                f"The plan joins copies after regions {_listed(self.joins)}, but the calls end after {_listed(ends)}. "
                "Make the plan again for these calls."
            )

    def to_json(self) -> str:
        body = self._body
        return json.dumps({**body, "digest": _digest(body)}, indent=1, sort_keys=True) + "\n"

    @cached_property
    def digest(self) -> str:
        return _digest(self._body)

    @property
    def _body(self) -> dict[str, Any]:
        """The plan as it is stored.  ``joins``, ``peers`` and ``model`` are left out if they are empty, so that digests of
        older plans, which lack these fields, do not change."""
        body = {"schema": SCHEMA, **asdict(self)}
        for name in ("joins", "model"):
            if not body[name]:
                del body[name]
        for weight in body["weights"]:
            if ranks := weight.pop("source")["ranks"]:
                weight["peers"] = ranks
        return body

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read a plan.  Raises ChunkflowError if it has another schema or its digest does not match."""
        try:
            body: dict[str, Any] = json.loads(text)
            digest, schema = body.pop("digest"), body["schema"]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ChunkflowError(f"This is not a ChunkFlow plan: {error!r}. Make one with chunkflow plan.") from error
        if schema != SCHEMA:
            raise ChunkflowError(f"The plan has schema {schema!r}, this version reads {SCHEMA}: make the plan again.")
        if digest != _digest(body):
            raise ChunkflowError("The plan was edited after it was written (its digest does not match): make it again.")
        del body["schema"]
        body["regions"] = tuple(RegionLabel(*r) for r in body["regions"])
        body["weights"] = tuple(_weight(**w) for w in body["weights"])
        body["barriers"] = tuple(
            Barrier(collective=b["collective"], weights=tuple(b["weights"])) for b in body["barriers"]
        )
        if body["predicted"] is not None:
            spans = tuple(Span(*s) for s in body["predicted"]["spans"])
            body["predicted"] = Prediction(**{**body["predicted"], "spans": spans})
        return Plan(**{**body, "joins": tuple(body.get("joins", ()))})


def _weight(*, windows: Sequence[int | None], peers: int = 0, **more: Any) -> WeightPlan:
    return WeightPlan(windows=tuple(windows), source=Source(ranks=peers), **more)


def span_name(weight: str, first: int, end: int) -> str:
    """Return the name of a span in which chunks ``[first, end)`` are copied or read."""
    return f"{weight}[{first}:{end}]"


def span_chunks(span: str) -> tuple[str, int, int]:
    """Return the weight and its chunks ``[first, end)`` from the name of a span, see :func:`span_name`."""
    name, _, chunks = span.rpartition("[")
    first, _, end = chunks.removesuffix("]").partition(":")
    return name, int(first), int(end)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _digest(body: Mapping[str, Any]) -> str:
    """Return the digest of a plan's body.  The digest does not cover the title of the model, which only reports show."""
    described = {name: value for name, value in body.items() if name != "model"}
    canonical = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
