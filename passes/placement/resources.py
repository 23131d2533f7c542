"""Resources: a table of the resources of a machine, the ops that use them, and the effect of concurrent uses.

    resource      used by                              effect of concurrent uses
    SMs           regions; the latency of a            regions run one after the other; a copy in flight slows down
                  collective (ranks synchronize)       regions and latencies by ``compute_slowdown``, a pull by
                                                       ``compute_pull_slowdown``;
                                                       if kernels move the bytes of a collective, it and attention slow
                                                       each other down by ``attention_slowdown``, both while the ranks
                                                       synchronize and while they exchange bytes
    collectives   collectives                          run one at a time, in the order of their start
    PCIe          copies; the bytes of a collective    run concurrently: a collective slows down a copy by
                                                       ``copy_slowdown``, a copy slows down a collective by
                                                       ``collective_slowdown``; both are 2 if each of the two alone would use
                                                       the full bandwidth, and 1 if collectives use another interconnect
    interconnect  pulls; the bytes of a collective     run concurrently and slow each other down by ``pull_slowdown``
    of peers                                           and ``collective_pull_slowdown``
    copy engines  copies; pulls; the bytes of a        copies run one at a time in the order of issue; so do pulls, on
                  collective whose bytes a copy        another engine; a collective waits for copies in flight, and the
                  engine moves; copies by user code    next copies wait for the collective; a pull over the same
                                                       interconnect as copies gets half of the bandwidth during a copy
    SSD           reads                                run one at a time, in the order of their copies
    ring          a read and its copy                  a read waits until the bytes that it overwrites in the ring have
                                                       been copied, and a copy waits for its read

In this table, copies come from host memory, and pulls come from the devices of the other ranks.  Copies by user code share
the queue of the copy engine with ChunkFlow's copies (docs/benchmarks/h200.md).  The times of the user's copies are not known,
so the timeline does not simulate them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import Lane
from chunkflow_compile.passes.step import Copy

IDLE = float("inf")

# The uses of a resource.  A collective has two phases: its latency, and then the exchange of bytes.
Use = Literal["region", "latency", "exchange", "copy", "pull"]
CollectivePhase = Literal["latency", "exchange"]
Op = TypeVar("Op")


def stretches(hardware: Hardware) -> Mapping[tuple[Use, Use], float]:
    """Return the slowdowns: for a pair of uses, the factor by which the first use takes longer while the second use is
    in flight.

    The factors by which a region and a collective (``latency`` or ``exchange``) slow each other down are valid only if the
    region is attention and kernels move the bytes of the collective.
    """
    both_lanes, together = 2.0 if hardware.shared_link else 1.0, hardware.attention_slowdown
    return {
        ("region", "copy"): hardware.compute_slowdown,
        ("latency", "copy"): hardware.compute_slowdown,
        ("exchange", "copy"): hardware.collective_slowdown,
        ("copy", "exchange"): hardware.copy_slowdown,
        ("region", "latency"): together,
        ("region", "exchange"): together,
        ("latency", "region"): together,
        ("exchange", "region"): together,
        ("region", "pull"): hardware.compute_pull_slowdown,
        ("latency", "pull"): hardware.compute_pull_slowdown,
        ("exchange", "pull"): hardware.collective_pull_slowdown,
        ("pull", "exchange"): hardware.pull_slowdown,
        ("copy", "pull"): both_lanes,
        ("pull", "copy"): both_lanes,
    }


@dataclass(frozen=True, eq=False)
class CopyUse:
    """A copy, with the resources that it occupies: the copy engine and the interconnect of its lane.  ``copy_s``: seconds
    that the copy takes while nothing else is in flight."""

    op: Copy
    name: str
    nbytes: int
    copy_s: float
    lane: Lane = "copy"


@dataclass(frozen=True, eq=False)
class ReadUse:
    """A read, which occupies the SSD for ``read_s`` seconds."""

    name: str
    read_s: float


class Queue(Generic[Op]):
    """Ops that occupy a resource one at a time, in the order of issue.

    ``left``: seconds that the first op would still take if nothing else were in flight; IDLE if there is no op, or if the
    first op waits for another resource.  ``newest``: for each weight or collective, the number of its newest op, counted from
    1 in the order of issue.
    """

    def __init__(self) -> None:
        self.ops: deque[Op] = deque()
        self.issued = self.ended = 0
        self.newest: dict[str | int, int] = {}
        self.start = 0.0
        self.left = IDLE

    def issue(self, op: Op, name: str | int) -> None:
        self.ops.append(op)
        self.issued += 1
        self.newest[name] = self.issued

    def end(self) -> Op:
        self.ended += 1
        self.left = IDLE
        return self.ops.popleft()


class Drive:
    """The queue of reads from the SSD.  Reads run one after the other.  Each read waits for the copies that free its bytes
    of the ring.

    ``ops``: reads, each with the number of copies that must have ended before it starts.  ``left``: remaining seconds of
    the first read, or IDLE while this read waits.  ``ready``: number of reads that have ended, but whose copies have not
    ended yet.
    """

    def __init__(self) -> None:
        self.ops: deque[tuple[ReadUse, int]] = deque()
        self.ready = 0
        self.start = 0.0
        self.left = IDLE

    def issue(self, read: ReadUse, after: int) -> None:
        self.ops.append((read, after))

    def begin(self, now: float, copied: int) -> None:
        """Begin the next read, if no read is running and the copies that the next read waits for have ended.
        ``copied``: number of copies that have ended."""
        if self.left == IDLE and self.ops and self.ops[0][1] <= copied:
            self.start, self.left = now, self.ops[0][0].read_s

    def end(self) -> ReadUse:
        self.ready += 1
        self.left = IDLE
        return self.ops.popleft()[0]

    def leave(self) -> None:
        """Record that the copy of a read has ended."""
        self.ready -= 1
