"""Durations: how long regions, collectives, copies and reads take on a machine while nothing else runs."""

from __future__ import annotations

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import Lane
from chunkflow_compile.passes.pieces import from_others
from chunkflow_compile.passes.plan import span_name
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.step import Copy, Read

from .resources import CopyUse, ReadUse


class Durations:
    """The durations of the ops of one problem on one machine.  ``strain``: factor by which all copies take longer than the
    hardware profile predicts."""

    def __init__(self, problem: Problem, hardware: Hardware, chunk_bytes: int, timings: Timings | None = None) -> None:
        """``hardware``: the profile; all ranks of the problem share its host bandwidth (:meth:`Hardware.shared_by`).
        ``timings``: measurements that replace rates of the profile.

        Raises ChunkflowError if the timings belong to another problem, or if weights are sharded over ranks that cannot
        pull from each other on this machine.
        """
        self.problem = problem
        hardware = hardware.shared_by(problem.ranks)
        self._profile = hardware
        self.hardware = hardware if timings is None else timings.machine(hardware, chunk_bytes)
        self.chunk_bytes = chunk_bytes
        self.strain = 1.0
        self.compute_s = [r.cost.seconds(hardware) for r in problem.regions]
        crossing = [self.hardware.crossing_seconds(c.nbytes, c.ranks) for c in problem.collectives]
        self.collective_s = [
            hardware.latency_s(c.ranks) + s for c, s in zip(problem.collectives, crossing, strict=True)
        ]
        if timings is not None:
            timings.check(problem)
            self.compute_s = timings.regions(problem, self.hardware)
            self.collective_s = timings.collectives(problem, self.collective_s)
        self.by_engine = [c.engine == "copy" for c in problem.collectives]
        self.attends = [r.cost.op == "attention" for r in problem.regions]
        self.link_s = [min(s, link) for s, link in zip(self.collective_s, crossing, strict=True)]
        self.sizes = {w.name: w.nbytes for w in problem.weights}
        self.sources = {w.name: w.source for w in problem.weights}
        self.reads_files = any(source.reads_file for source in self.sources.values())
        for ranks in sorted({source.ranks for source in self.sources.values() if source.sharded}):
            if why := hardware.why_no_peers(ranks):
                raise ChunkflowError(f"Weights lie in pieces on the devices of {ranks} ranks, but {why}")
        self._pulls: dict[tuple[str, int, int], float] = {}

    def contending_collectives(self, lane: Lane = "copy") -> frozenset[str]:
        """Return the names of the collectives that slow down or delay copies in a lane.  If collectives use the interconnect
        of the lane, return all collectives, otherwise only the collectives whose bytes a copy engine moves."""
        shared = self.hardware.shared_link or lane == "pull"
        return frozenset(c.name for c in self.problem.collectives if shared or c.engine == "copy")

    def lane(self, weight: str) -> Lane:
        """Return the lane of the copies of a weight."""
        return self.sources[weight].lane

    def nbytes(self, weight: str, first: int, end: int) -> int:
        """Return the size of chunks ``[first, end)`` of a weight in bytes."""
        return min(end * self.chunk_bytes, self.sizes[weight]) - first * self.chunk_bytes

    def copy_seconds(self, weight: str, first: int, end: int) -> float:
        """Return the seconds for copying chunks ``[first, end)`` of a weight while nothing else uses the interconnect."""
        if self.sources[weight].sharded:
            return self.strain * self._pull_seconds(weight, first, end)
        seconds = self.nbytes(weight, first, end) / self.hardware.copy_rate + (end - first) * self.hardware.chunk_s
        return self.strain * seconds

    def _pull_seconds(self, weight: str, first: int, end: int) -> float:
        if (key := (weight, first, end)) not in self._pulls:
            size, ranks = self.sizes[weight], self.sources[weight].ranks
            begin, stop = first * self.chunk_bytes, min(end * self.chunk_bytes, size)
            others = from_others(begin, stop, size, ranks)
            self._pulls[key] = self._profile.pull_seconds(stop - begin, others, end - first)
        return self._pulls[key]

    def read_seconds(self, weight: str, first: int, end: int) -> float:
        """Return the seconds for reading chunks ``[first, end)`` of a weight from the SSD; 0 if the weight is not on the
        SSD."""
        return (
            self.nbytes(weight, first, end) / self.hardware.drive_bandwidth if self.sources[weight].reads_file else 0.0
        )

    def transfer(self, op: Copy) -> CopyUse:
        """Return a copy, with its size and duration, as the timeline simulates it."""
        nbytes = self.nbytes(op.weight, op.first, op.end)
        copy_s = self.copy_seconds(op.weight, op.first, op.end)
        return CopyUse(op, span_name(op.weight, op.first, op.end), nbytes, copy_s, op.stream)

    def reading(self, op: Copy | Read) -> ReadUse:
        """Return a read, or the read that belongs to a copy, as the timeline simulates it."""
        return ReadUse(span_name(op.weight, op.first, op.end), self.read_seconds(op.weight, op.first, op.end))
