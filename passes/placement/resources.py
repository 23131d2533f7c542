"""Resources: a table of the resources of a machine, the ops that use them, and the effect of concurrent uses.

    resource      used by                              effect of concurrent uses
    SMs           regions; the latency of a            regions run one after the other; a copy in flight slows down
                  collective (ranks synchronize)       regions and latencies by ``compute_slowdown``, a pull by
                                                       ``compute_pull_slowdown``;
                                                       attention and a collective by kernels slow each other down by
                                                       ``attention_slowdown``, in both phases of the collective
    collectives   collectives                          run one at a time, in the order of their start
    link          copies; the bytes of a collective    run concurrently: a collective slows down a copy by
                                                       ``copy_slowdown``, a copy slows down a collective by
                                                       ``collective_slowdown``; 2 for both means that they share a link
                                                       that either could fill alone, 1 that they use separate links
    peers' link   pulls; the bytes of a collective     the same, by ``pull_slowdown`` and ``collective_pull_slowdown``
    copy engines  copies; pulls; the bytes of a        copies run one at a time, in the order of issue; pulls do so on
                  collective by such an engine; a      another engine; a collective waits for running copies and comes
                  user's copies                        before the next one; a pull over the same link as copies gets half
                                                       of its bandwidth while a copy runs
    SSD           reads                                run one at a time, in the order of their copies
    ring          a read, until its copy has ended     a read waits for the copies out of its slot, a copy for its read

If user code copies to the device, its copies share the queue with ChunkFlow's copies (docs/benchmarks/h200.md).  It is
not known when such copies occur, so the timeline does not simulate them.  A copy is from host memory, a pull from the
devices of the other ranks.
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

# The uses of a resource.  A collective consists of a latency and an exchange of bytes.
Use = Literal["region", "latency", "exchange", "copy", "pull"]
Phase = Literal["latency", "exchange"]
Op = TypeVar("Op")


def stretches(hardware: Hardware) -> Mapping[tuple[Use, Use], float]:
    """Return, for pairs of uses that slow each other down, the factor by which the first use takes longer while the
    second use is in flight.

    The factors between a region and a collective apply only if the region is attention and kernels move the bytes of
    the collective.
    """
    beside, together = 2.0 if hardware.shared_link else 1.0, hardware.attention_slowdown
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
        ("copy", "pull"): beside,
        ("pull", "copy"): beside,
    }


@dataclass(frozen=True, eq=False)
class CopyUse:
    """A copy as a use of resources: it occupies the copy engine and the interconnect of its lane ``use`` for ``copy_s``
    seconds."""

    op: Copy
    name: str
    nbytes: int
    copy_s: float
    use: Lane = "copy"


@dataclass(frozen=True, eq=False)
class ReadUse:
    """A read as a use of resources: it occupies the SSD for ``read_s`` seconds."""

    name: str
    read_s: float


class Queue(Generic[Op]):
    """Ops that occupy a resource one at a time, in the order of issue.

    ``left``: remaining seconds of the first op if nothing else is in flight; IDLE if there is no op, or if the first op
    waits for another resource.  ``newest``: for each weight or collective, the number of its newest op.
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
    """The queue of reads from the SSD.  They run one after the other, each after the copies that free its bytes of the
    ring.

    ``ops``: reads, each with the number of copies that must have ended before it.  ``left``: remaining seconds of the first
    read, IDLE while it waits.  ``ready``: number of reads that have ended and whose copies have not ended.
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
        """Note that the copy of a read has ended."""
        self.ready -= 1
