"""Timings: what the parts of a problem were seen to take, where a profile would compute it from rates.

Regions of one structure are given the mean of what they took, and so are collectives of the same bytes: they do the same
work, and what one of them took longer than another is noise.  Sums stay what they were.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds on one rank, of the problem with digest ``problem``.

    ``compute_s``: of each region, with the host's share of the step.  ``collective_s``: of the collectives that are awaited
    in front of each region, alone on the link; None where there never was a moment without copies, 0 without collectives.
    ``copy_rate``: bytes/s of a copy that has the link to itself, None if none was seen.  ``copying``: share, 0 to 1, of what
    was timed that had a copy beside it.  ``compute_slowdown``: factor by which they were seen to stretch
    compute, None if that was not told.
    """

    problem: str
    compute_s: tuple[float, ...]
    collective_s: tuple[float | None, ...]
    copy_rate: float | None = None
    copying: float = 0.0
    compute_slowdown: float | None = None

    def check(self, problem: Problem) -> None:
        """Raises ChunkflowError if these are the timings of another problem."""
        if self.problem != problem.digest or {len(self.compute_s), len(self.collective_s)} != {len(problem.regions)}:
            raise ChunkflowError(
                f"The timings were measured on problem {self.problem}, this model is {problem.digest}: its sizes, degree or "
                "options differ. Measure this one, by calling it compiled with options={'dump': DIR}."
            )

    def machine(self, hardware: Hardware, chunk_bytes: int) -> Hardware:
        """``hardware`` with the copies that were seen, and what they did to compute; overheads of a chunk are in their rate.

        Bytes of collectives, which are never seen without their latency, cross a shared link faster or slower than the
        profile says by as much as chunks of ``chunk_bytes``.
        """
        seen: dict[str, Any] = {"name": f"{hardware.name}, as measured"}
        if self.compute_slowdown is not None:
            seen["compute_slowdown"] = self.compute_slowdown
        if (rate := self.copy_rate) is not None:
            said = chunk_bytes / (chunk_bytes / hardware.copy_rate + hardware.chunk_s)
            off = rate / said if hardware.shared_link else 1.0
            seen |= {"h2d_bandwidth": rate, "eta_pref": 1.0, "chunk_s": 0.0}
            seen["collective_bandwidth"] = off * hardware.collective_bandwidth
        return replace(hardware, **seen)

    def regions(self, problem: Problem, hardware: Hardware) -> list[float]:
        """Seconds of each region without copies beside it."""
        stretched = 1 + self.copying * (hardware.compute_slowdown - 1)
        return [s / stretched for s in _means([r.key for r in problem.regions], self.compute_s)]

    def collectives(self, problem: Problem, expected: Sequence[float]) -> list[float]:
        """Seconds of each collective alone; ``expected``: what the profile says, for those that were never seen alone."""
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
        known = dict(zip(seen, _means([kinds[k] for k in seen], seen.values()), strict=True))
        alike = {kinds[k]: seconds for k, seconds in known.items()}
        found = list(expected)
        for k, inside in windows.items():
            total = known.get(k, alike.get(kinds[k], said[k] * off))
            for i in inside:
                found[i] = total * (expected[i] / said[k] if said[k] else 1 / len(inside))
        return found


def _means(kinds: Sequence[Hashable], seconds: Iterable[float]) -> list[float]:
    """Each replaced by the mean of its kind."""
    groups: dict[Hashable, list[float]] = {}
    for kind, value in zip(kinds, seconds, strict=True):
        groups.setdefault(kind, []).append(value)
    means = {kind: fmean(values) for kind, values in groups.items()}
    return [means[kind] for kind in kinds]
