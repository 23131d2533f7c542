"""Verify: proves, before a program runs, that every reader of a weight reads the bytes of this weight.

The checks unroll a cold start and the two steps after it.  Every step runs the same program, so these two steps represent
every pair of consecutive steps.  A step of a cycle is one pass over its calls.  If the plan has joins, several sequences of
eager and captured calls are checked, which represent all sequences (happens_before.py).  It is proved that:

* Slots are inside the arena, are aligned, and are as large as their weights.
* Each streamed chunk is copied exactly once for each step, and each resident chunk is copied once for all steps.  No other
  chunk is copied.
* Each reader of a weight comes after a wait that covers all chunks of the weight.
* Each weight is evicted once per step, after its last reader.
* If two chunks use the same bytes, the copy of the later chunk begins only after the last reader of the earlier chunk has
  finished.  This holds for chunks of the same step and for chunks of different steps.
* The program has the same inputs, regions and collectives as the traced graph, in the same order and with the same values
  (fidelity.py).
* A jump to a call first copies the chunks that would be in flight or in use before this call in a pass without jumps.  Then
  the arena is in the same state as in this pass, whatever ran before, and the proof of the pass holds (borders.py).
* A read from the SSD does not overwrite bytes of the ring that an earlier copy may still use, and each copy waits for its
  read (reads.py).
* Compute and collectives do not conflict in memory, and no op reads a value after its release, except the region that takes
  the value over (collectives.py).
* The runs of a repeated region write each output completely, and do not overwrite values that are read elsewhere
  (repeats.py).

:func:`verify_together` checks programs that share an arena: each reader in a program must read the bytes of its weights, even
though weights of the other programs are in the arena or are being copied to it.

Contract
    The checks read only programs and their plans, and do not trust the passes that made them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Generator, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch.fx import GraphModule

from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.plan import ALIGNMENT, WeightPlan, chunk_count

from .borders import check_borders
from .collectives import check_collectives
from .cycle import Cycle
from .fidelity import check_data_flow, check_operands, check_order, check_readers
from .happens_before import EAGER, FORMS, Form, HappensBefore, issued_by
from .memory import Memory, program_memory
from .reads import check_reads, check_ring
from .repeats import check_repeats
from .rewrite import Program

CHECKED_STEPS = 2
# The version of the rules, which is recorded in each proof.  Every change of the rules increases the version.
VERSION = 11


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The extent of a proof.  ``ops``: number of ops of the unrolled programs.  ``edges``: number of edges that order
    these ops on the device."""

    version: int
    steps: int
    ops: int
    edges: int

    def __str__(self) -> str:
        return f"{self.steps} steps, {self.ops} ops, {self.edges} edges; rules {self.version}"


def verify(program: Program | Cycle) -> Proof:
    """Prove a program or a cycle safe.

    Raises FindingError with the weight, the ops and the missing edge of each violation.
    """
    orders = orders_of((program,), CHECKED_STEPS)
    _raise_violations("The program is not safe to run", check(program, orders))
    ops, edges = (sum(map(count, orders)) for count in (lambda o: len(o.ops), lambda o: o.graph.number_of_edges()))
    return Proof(version=VERSION, steps=CHECKED_STEPS, ops=ops, edges=edges)


def verify_together(*programs: Program | Cycle) -> None:
    """Prove that programs may run one after the other in one arena, provided that each program is safe by itself.  Raises
    FindingError if they may not."""
    orders = orders_of((*programs, programs[0]), 1)  # the first program again, after the last one
    violations = chain(chain.from_iterable(map(check_turns, orders)), check_ring(orders[0]))
    _raise_violations("The programs are not safe in one arena", violations)


def orders_of(turns: Sequence[Program | Cycle], steps: int) -> list[HappensBefore]:
    """Return the orders of unrolled programs: first the order with eager calls only, then, if a plan has joins, the
    orders with captured calls.  ``turns``: programs in the order in which they use the arena."""
    cycles = [Cycle.of(turn) for turn in turns]
    forms: tuple[Form, ...] = FORMS if any(cycle.plan.joins for cycle in cycles) else (EAGER,)
    return [HappensBefore(cycles, steps, form) for form in forms]


def verify_call(
    cycle: Cycle,
    call: int,
    program: Program,
    keys: MutableMapping[GraphModule, str] | None = None,
) -> None:
    """Prove that a program may replace a call of a proved cycle: the program must copy and read the same weights as the
    call.  Raises FindingError if it does not.

    ``keys``: as in :func:`check_data_flow`.  Only the ops of the program and of the call are compared, because the other
    calls do not change.  For both forms of the call, eager and captured, its order on the device follows from these ops.
    """
    violations = _check_place(cycle, call, program, {} if keys is None else keys)
    _raise_violations("The program is not safe in its place in the cycle", violations)


def _raise_violations(what: str, sentences: Iterable[str]) -> None:
    violations = list(sentences)
    if violations:
        shown = "\n".join(f"  {v}" for v in violations[:10])
        more = f"\n  and {len(violations) - 10} more" if len(violations) > 10 else ""
        raise FindingError(f"{what}:\n{shown}{more}")


def check(program: Program | Cycle, orders: Sequence[HappensBefore] = ()) -> Iterator[str]:
    """Yield a sentence for each violation of a program or a cycle.  ``orders``: result of :func:`orders_of`, or empty if it
    has not been computed yet."""
    cycle = Cycle.of(program)
    orders = orders or orders_of((cycle,), CHECKED_STEPS)
    order = orders[0]  # the order of eager calls, which is enough to check borders, reads and collectives
    single = len(cycle.calls) == 1
    yield from _check_slots(cycle)
    keys: dict[GraphModule, str] = {}
    memories = list[Memory]()
    for call in cycle.calls:
        memory = yield from _check_graph(call, keys)
        if memory is None:
            return
        memories.append(memory)
    for form in orders:
        yield from check_turns(form)
    yield from check_borders(cycle, order)
    yield from check_reads(cycle, order)
    for call, memory in zip(cycle.calls, memories, strict=True):
        yield from check_collectives(call, memory, order if single else None)


def _check_graph(program: Program, keys: MutableMapping[GraphModule, str]) -> Generator[str, None, Memory | None]:
    """Check that a program is equivalent to the traced graph, and return its memory.

    If an operand comes after its reader, report this and return None: the other checks follow operands and might not
    terminate.
    """
    misplaced = list(check_operands(program))
    yield from misplaced
    yield from check_order(program)
    yield from check_data_flow(program, keys)
    if misplaced:
        return None
    memory = program_memory(program)
    yield from check_readers(program, memory)
    yield from check_repeats(program, memory)
    return memory


def check_turns(order: HappensBefore) -> Iterator[str]:
    """Yield a sentence for each violation in the use of slots by unrolled programs."""
    lives = _lives(order)
    for life in lives.values():
        yield from _check_life(order, life)
    yield from _check_overlaps(order, lives)


@dataclass
class _Life:
    """The ops that use one streamed weight in one step, as indices.  ``chunks``: for each streamed chunk, its copies for
    this step.  ``kept``: for each resident chunk, its copies for all steps of the turn.
    """

    plan: WeightPlan
    step: int
    chunks: dict[int, list[int]] = field(default_factory=dict)
    kept: dict[int, list[int]] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    evicts: list[int] = field(default_factory=list)


# Lives by turn, weight and step.
_Lives = dict[tuple[int, str, int], _Life]


def _check_slots(cycle: Cycle) -> Iterator[str]:
    plan, sizes = cycle.plan, {w.name: w.nbytes for w in cycle.problem.weights}
    names = [w.name for w in plan.weights]
    inputs = {name for program in cycle.calls for name in program.weight_inputs}
    if any(program.plan is not plan for program in cycle.calls):
        yield "a program has another plan than its cycle"
    if sorted(names) != sorted(sizes) or inputs != set(sizes):
        yield "the weights of the plan or of the program are not those of the traced graph"
    if plan.chunk_bytes <= 0:
        yield f"the plan has chunks of {plan.chunk_bytes} bytes, which is not a positive size"
    for weight in plan.weights:
        if weight.nbytes != sizes.get(weight.name):
            yield f"{weight.name}: planned with {weight.nbytes} bytes, but it has {sizes.get(weight.name)}"
        if weight.home == "device":
            if weight.offset is not None:
                yield f"{weight.name}: lives on the device and has a slot, which nothing fills"
            continue
        if weight.offset is None or weight.offset < 0 or weight.offset % ALIGNMENT:
            yield f"{weight.name}: slot offset {weight.offset} is not a multiple of {ALIGNMENT}"
        elif plan.chunk_bytes > 0 and len(weight.windows) != chunk_count(weight.nbytes, plan.chunk_bytes):
            yield f"{weight.name}: {len(weight.windows)} windows do not fit its {weight.nbytes} bytes"
        elif weight.offset + weight.nbytes > plan.arena_bytes:
            end = weight.offset + weight.nbytes
            yield f"{weight.name}: slot ends at byte {end}, outside the arena of {plan.arena_bytes}"


def _lives(order: HappensBefore) -> _Lives:
    steps = range(order.steps + 1)
    lives = {(t, w.name, s): _Life(w, s) for t, p in enumerate(order.turns) for w in p.plan.streamed for s in steps}
    for i, each in enumerate(order.ops):
        if (copy := each.copy) is not None:
            for step in steps if each.serves is None else (each.serves,):
                if life := lives.get((each.turn, copy.weight, step)):
                    copies = life.kept if each.serves is None else life.chunks
                    for chunk in range(copy.first, copy.end):
                        copies.setdefault(chunk, []).append(i)
            continue
        for name in each.readable:
            if life := lives.get((each.turn, name, each.step)):
                life.waits.append(i)
        for name in each.reads:
            if life := lives.get((each.turn, name, each.step)):
                life.reads.append(i)
        for name in each.evicts:
            if life := lives.get((each.turn, name, each.step)):
                life.evicts.append(i)
    return lives


def _check_place(
    cycle: Cycle,
    call: int,
    program: Program,
    keys: MutableMapping[GraphModule, str],
) -> Iterator[str]:
    memory = yield from _check_graph(program, keys)
    if memory is None:
        return
    yield from check_collectives(program, memory)
    # weights that are not streamed may have other names in the cycle than in the program
    streamed = {w.name for p in (cycle.calls[call], program) for w in p.plan.streamed}
    # the copies in prologues follow from the prefetches of all calls, so only prefetches are compared.  Releases of values
    # may differ, because the regions of the two programs may take different sizes as inputs; check_collectives has proved
    # the releases of the new program
    before, after = (
        [
            (each.planned and each.op, streamed.intersection(each.reads))
            for each in issued_by(placed)
            if each.reads or each.planned
        ]
        for placed in (cycle.calls[call], program)
    )
    if before != after or program.plan is not cycle.plan:
        yield f"call {call}: the program does not move or read the weights of the cycle there"


def _check_life(order: HappensBefore, life: _Life) -> Iterator[str]:
    if life.step >= order.steps:  # this step comes after the unrolled steps, which issue only some of its copies
        return
    name, ops = life.plan.name, order.ops
    for chunk, window in enumerate(life.plan.windows):
        times, due = len(life.chunks.get(chunk, ())), window is not None
        if times != due:
            wanted = "not once" if due else "but it stays on the device"
            yield f"{name}: chunk {chunk} is prefetched {times} times for step {life.step}, {wanted}"
    if surplus := [c for c in sorted(life.chunks) if c not in range(len(life.plan.windows))]:
        yield f"{name}: chunks {surplus} are prefetched, but it has {len(life.plan.windows)}"
    # for each copy, its first chunk, which represents all its chunks
    copies: dict[int, int] = {}
    for chunk, indices in (*life.kept.items(), *life.chunks.items()):
        for i in indices:
            copies.setdefault(i, chunk)
    for read in life.reads:
        waits = [w for w in life.waits if order.ordered(w, read)]
        for copy, chunk in copies.items():
            if not any(order.ordered(copy, w) for w in waits):
                yield (
                    f"{name}: {ops[read]} may read before {ops[copy].text(chunk)} has arrived; missing edge: "
                    f"{ops[copy].of_chunk(chunk)} -> wait({name!r}) -> {ops[read].label}"
                )
                break
    if len(life.evicts) != 1:
        yield f"{name}: evicted {len(life.evicts)} times in step {life.step}, not once"
    for evict in life.evicts:
        for read in life.reads:
            if not order.ordered(read, evict):
                yield (
                    f"{name}: {ops[evict]} comes before its reader {ops[read]}; missing edge: "
                    f"{ops[read].label} -> {ops[evict].label}"
                )


@dataclass(frozen=True, order=True)
class _Stay:
    """The time in which a chunk occupies its bytes: from its copy, the op at index ``start``, to the last op that uses the
    chunk.

    ``step``: step for which the chunk is copied, or None if the chunk is resident.
    """

    start: int
    chunk: int
    name: str
    turn: int
    step: int | None = field(compare=False)


def _check_overlaps(order: HappensBefore, lives: _Lives) -> Iterator[str]:
    """Check that a chunk is no longer in use when the next chunk is copied to the same bytes.

    For each byte of the arena, each chunk is compared only with the chunk that is copied next.  This is enough: if every
    copy happens after the last use of the chunk before it, every copy also happens after the last uses of all earlier chunks.
    """
    edges: list[tuple[int, bool, _Stay]] = []
    for turn, program in enumerate(order.turns):
        for weight in program.plan.streamed:
            for chunk in range(len(weight.windows)):
                begin, end = ((weight.offset or 0) + b for b in program.plan.span(weight, chunk, chunk + 1))
                if begin >= end:  # the weight has no such chunk; _check_slots reports it
                    continue
                for stay in _stays(order, lives, weight, chunk, turn):
                    edges += [(begin, True, stay), (end, False, stay)]
    present: list[_Stay] = []
    seen: set[tuple[int, int]] = set()
    for byte, enters, stay in sorted(edges):
        at = bisect_left(present, stay)
        if enters:
            insort(present, stay)
            pairs = list(zip(present[max(at - 1, 0) : at + 1], present[max(at, 1) : at + 2], strict=False))
        else:
            del present[at]
            pairs = [(present[at - 1], present[at])] if 0 < at < len(present) else []
        for first, then in pairs:
            if (first.start, then.start) not in seen:
                seen.add((first.start, then.start))
                yield from _check_pair(order, lives, byte, first, then)


def _stays(order: HappensBefore, lives: _Lives, weight: WeightPlan, chunk: int, turn: int) -> Iterator[_Stay]:
    for start in lives[turn, weight.name, 0].kept.get(chunk, ())[:1]:
        yield _Stay(start, chunk, weight.name, turn, None)
    for step in range(order.steps + 1):
        for start in lives[turn, weight.name, step].chunks.get(chunk, ())[:1]:
            yield _Stay(start, chunk, weight.name, turn, step)


def _check_pair(order: HappensBefore, lives: _Lives, byte: int, first: _Stay, then: _Stay) -> Iterator[str]:
    ops, steps = order.ops, range(order.steps) if first.step is None else (first.step,)
    ends = [end for s in steps for life in (lives[first.turn, first.name, s],) for end in (*life.reads, *life.evicts)]
    for end in (*ends, first.start):
        if not order.ordered(end, then.start):
            chunk = first.chunk if end == first.start else None
            ended = ops[end].label if chunk is None else ops[end].of_chunk(chunk)
            yield (
                f"{then.name}: {ops[then.start].text(then.chunk)} overwrites the slot of {first.name} at byte {byte} while "
                f"{ops[end].text(chunk)} may still use it; missing edge: {ended} -> {ops[then.start].of_chunk(then.chunk)}"
            )
            return
