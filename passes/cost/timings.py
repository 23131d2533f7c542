"""Timings: measured times of a problem's regions and collectives.  The measured times replace the times that are computed
from the rates of a hardware profile.

Regions with the same structure do the same work, so differences between their measured times are noise.  Therefore, plans use
for each region the mean time of all regions with the same structure, and for each collective the mean time of all collectives
of the same kind and size.  The sum of all times does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.problem import Problem

# The suffix that Timings.machine appends to the name of a hardware profile.
AS_MEASURED = ", as measured"


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Times and rates measured on one rank, for the problem with digest ``problem``.

    ``compute_s``: seconds of each region, including an equal share of the step's host overhead.  ``collective_s``: for each
    region, seconds of the collectives for which compute waits directly before the region, measured without concurrent copies.
    The entry is 0 if there are no such collectives, and None if copies always ran at the same time.  ``copy_rate``: bytes/s
    of copies while nothing else ran, or None if copies never ran alone.  ``drive_rate``: bytes/s read from the SSD, or None
    if nothing was read.  ``copying``: share (0 to 1) of the time of compute and collectives during which copies ran.
    ``compute_slowdown``: measured factor by which copies slow down compute, or None if it was not measured.  ``idle_s``: for
    the last region of each call, the seconds during which the device is idle before the next call of the cycle; 0 for every
    other region.  The tuple is empty if the device is never idle.
    """

    problem: str
    compute_s: tuple[float, ...]
    collective_s: tuple[float | None, ...]
    copy_rate: float | None = None
    drive_rate: float | None = None
    copying: float = 0.0
    compute_slowdown: float | None = None
    idle_s: tuple[float, ...] = ()

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Timings:
        """Make timings from fields that were read from JSON."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return Timings(**values)

    def largest(self, others: Iterable[Timings]) -> Timings:
        """Return timings with the longest times and the lowest rates that these timings or ``others`` contain.

        Timings in ``others`` for a different number of regions are ignored.  Their problem may have other sizes than the
        problem of these timings, because the sizes of shards can differ between ranks.
        """
        alike = [self, *(o for o in others if len(o.compute_s) == len(self.compute_s))]

        def most(column: str) -> tuple[Any, ...]:
            rows = zip(*(values for o in alike if (values := getattr(o, column))), strict=True)
            return tuple(max((s for s in row if s is not None), default=None) for row in rows)

        def among(choose: Callable[[list[float]], float], name: str) -> float | None:
            figures = [value for o in alike if (value := getattr(o, name)) is not None]
            return choose(figures) if figures else None

        return replace(
            self,
            compute_s=most("compute_s"),
            collective_s=most("collective_s"),
            copy_rate=among(min, "copy_rate"),
            drive_rate=among(min, "drive_rate"),
            copying=max(o.copying for o in alike),
            compute_slowdown=among(max, "compute_slowdown"),
            idle_s=most("idle_s"),
        )

    def check(self, problem: Problem) -> None:
        """Raise ChunkflowError if these timings do not belong to ``problem``."""
        if self.problem != problem.digest or {len(self.compute_s), len(self.collective_s)} != {len(problem.regions)}:
            raise ChunkflowError(
                f"The timings were measured on problem {self.problem}, this model is {problem.digest}: its sizes, "
                "degree or options differ. Measure this one: call it compiled with options={'dump': DIR}."
            )

    def machine(self, hardware: Hardware, chunk_bytes: int) -> Hardware:
        """Return ``hardware`` with the measured slowdown of compute, the measured rate of reads from the SSD, and the
        measured rate of copies.  This rate includes the overhead per chunk, so ``chunk_s`` becomes 0.

        The bandwidth of collectives is not measured, because collectives are timed together with their latency.  If
        collectives and copies share an interconnect, the bandwidth of collectives is scaled by the same factor as the rate
        of copies.  ``chunk_bytes``: size of the chunks whose copies were measured.
        """
        # the measured times already include the factor by which attention and collectives slow each other down
        seen: dict[str, Any] = {"name": f"{hardware.name}{AS_MEASURED}", "attention_slowdown": 1.0}
        if self.compute_slowdown is not None:
            seen["compute_slowdown"] = self.compute_slowdown
        if self.drive_rate is not None:
            seen["drive_bandwidth"] = self.drive_rate
        if (rate := self.copy_rate) is not None:
            said = chunk_bytes / (chunk_bytes / hardware.copy_rate + hardware.chunk_s)
            off = rate / said if hardware.shared_link else 1.0
            seen |= {"h2d_bandwidth": rate, "eta_pref": 1.0, "chunk_s": 0.0, "host_bandwidth": 0.0}
            seen |= {n: off * getattr(hardware, n) for n in ("collective_bandwidth", "node_bandwidth")}
        return replace(hardware, **seen)

    def regions(self, problem: Problem, hardware: Hardware) -> list[float]:
        """Return the seconds of each region without concurrent copies, including the idle time after the region."""
        stretched = 1 + self.copying * (hardware.compute_slowdown - 1)
        means = _means([r.key for r in problem.regions], self.compute_s)
        idle = self.idle_s or [0.0] * len(means)
        return [s / stretched + i for s, i in zip(means, idle, strict=True)]

    def collectives(self, problem: Problem, expected: Sequence[float]) -> list[float]:
        """Return the seconds of each collective without concurrent copies.  ``expected``: seconds of each collective
        according to the rates of the hardware profile.

        Collectives are timed in groups: a group contains the collectives for which compute waits before the same region.
        The time of a group is divided among its collectives in proportion to ``expected``.  A group that was never timed
        without copies gets the time of another group with the same kinds and sizes of collectives.  If no such group was
        timed, ``expected`` is used instead, scaled by the mean ratio of measured to expected seconds.
        """
        windows: dict[int, list[int]] = {}
        last = len(problem.regions) - 1
        for i, collective in enumerate(problem.collectives):
            windows.setdefault(min(collective.until, last), []).append(i)
        kinds = {
            k: tuple((problem.collectives[i].kind, problem.collectives[i].nbytes) for i in inside)
            for k, inside in windows.items()
        }
        said = {k: sum(expected[i] for i in inside) for k, inside in windows.items()}
        seen = {k: s for k in windows if (s := self.collective_s[k])}
        off = sum(seen.values()) / (sum(said[k] for k in seen) or 1.0) if seen else 1.0
        measured = dict(zip(seen, _means([kinds[k] for k in seen], seen.values()), strict=True))
        alike = {kinds[k]: seconds for k, seconds in measured.items()}
        shares = list(expected)
        for k, inside in windows.items():
            total = measured.get(k, alike.get(kinds[k], said[k] * off))
            for i in inside:
                shares[i] = total * (expected[i] / said[k] if said[k] else 1 / len(inside))
        return shares


def _means(kinds: Sequence[Hashable], seconds: Iterable[float]) -> list[float]:
    """Return, for each value of ``seconds``, the mean of all values of the same kind."""
    groups: dict[Hashable, list[float]] = {}
    for kind, value in zip(kinds, seconds, strict=True):
        groups.setdefault(kind, []).append(value)
    means = {kind: fmean(values) for kind, values in groups.items()}
    return [means[kind] for kind in kinds]
