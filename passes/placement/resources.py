"""Resources: the machine as a table of what ops occupy, and how two uses of a resource meet.

    resource      occupied by                          how uses meet
    SMs           regions; the latency of a            regions one after the other; a copy in flight stretches regions
                  collective, in which ranks meet      and latencies by ``compute_slowdown``, a pull by
                                                       ``compute_pull_slowdown``
                                                       attention and a collective by kernels stretch each other by
                                                       ``attention_slowdown``, in both phases of the collective
    collectives   collectives                          one at a time, in the order of their start
    link          copies; the bytes of a collective    at once: a collective stretches a copy by ``copy_slowdown``, a copy
                                                       a collective by ``collective_slowdown``; 2 for both is a fair share
                                                       of a link that either fills alone, 1 for both a link for each
    peers' link   pulls; the bytes of a collective     the same, by ``pull_slowdown`` and ``collective_pull_slowdown``
    copy engines  copies; pulls; the bytes of a        copies one at a time, in the order of issue, and so pulls, on another
                  collective by such an engine; a      engine; a collective waits for those under way, and goes before the
                  user's copies                        next; a pull over the link of copies takes half of it beside one
    drive         reads                                one at a time, in the order of their copies
    ring          a read, until its copy has ended     a read waits for the copies out of its slot, a copy for its read

A user's own copies to the device queue with ours (docs/benchmarks/h200.md).  No profile says when they come, so the
timeline plays none.  A copy is from host memory, a pull from the devices of the other ranks.
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

# What occupies a resource.  A collective is a latency, then an exchange of bytes.
Use = Literal["region", "latency", "exchange", "copy", "pull"]
Phase = Literal["latency", "exchange"]
Op = TypeVar("Op")


def stretches(hardware: Hardware) -> Mapping[tuple[Use, Use], float]:
    """The factor by which the first of two uses takes longer while the second is in flight, for pairs that meet.

    A region and a collective meet only if the region is attention and kernels move the bytes of the collective.
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
class Transfer:
    """What a copy occupies: the copy engine and the link of its ``use`` for ``copy_s``."""

    op: Copy
    name: str
    nbytes: int
    copy_s: float
    use: Lane = "copy"


@dataclass(frozen=True, eq=False)
class Reading:
    """What a read occupies: the drive for ``read_s``."""

    name: str
    read_s: float


class Queue(Generic[Op]):
    """Ops that occupy a resource one at a time, in the order of issue.

    ``left``: seconds that the first still takes with nothing else in flight, IDLE if there is none or it waits for another
    resource.  ``newest``: weight or collective -> the number of its newest op.
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
    """Reads that are issued, one after the other, each after the copies that free its bytes of the ring.

    ``ops``: each with how many copies must have ended before.  ``left``: seconds of the first, IDLE while it waits.
    ``ready``: reads that have ended before their copies have.
    """

    def __init__(self) -> None:
        self.ops: deque[tuple[Reading, int]] = deque()
        self.ready = 0
        self.start = 0.0
        self.left = IDLE

    def issue(self, read: Reading, after: int) -> None:
        self.ops.append((read, after))

    def begin(self, now: float, copied: int) -> None:
        """Begin the next read, if none is under way and it need not wait.  ``copied``: copies that have ended."""
        if self.left == IDLE and self.ops and self.ops[0][1] <= copied:
            self.start, self.left = now, self.ops[0][0].read_s

    def end(self) -> Reading:
        self.ready += 1
        self.left = IDLE
        return self.ops.popleft()[0]

    def leave(self) -> None:
        """The copy of a read has ended."""
        self.ready -= 1
