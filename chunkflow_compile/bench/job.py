"""What a measurement is told, and what each of its ranks brings back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chunkflow_compile.models.presets import Sizes
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.placement.timeline import Timeline
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.runtime.measurement import StepMeasurement

from .arms import REPLAN_AFTER, Arm
from .link_error import LinkError
from .link_load import LinkLoad
from .regimes import Regime

# The arm that others are compared with: the same program with all weights on the device.
RESIDENT = "resident"
# Steps of ``replanned`` in front of those that count: its new plan comes behind the first of them.
REHEARSAL = REPLAN_AFTER + 1
# "processes": each rank one, gloo between them; "loopback": one process, whose peers are host memory.
Transport = Literal["processes", "loopback"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank is told.

    ``model``: a preset or file.py:function, in place of the regime's; ``sizes``: of the preset.  ``device``: "threads", where
    the host runs ahead of every stream, "cpu", or "cuda".  ``link``: to be emulated; None for the device's own.  ``load``:
    of the link, which sets its bandwidth; None for the bandwidth in ``link``.
    ``hardware``: profile of the machine, None for that of the device.  ``folder``: where it meets the others and leaves its
    result, made for the run; ``dump``: for programs.
    """

    regime: Regime
    link: LinkEmulation | None
    ranks: int
    arms: tuple[Arm, ...]
    steps: int
    load: float | None = None
    model: str | None = None
    sizes: Sizes | None = None
    device: str = "threads"
    hardware: str | None = None
    transport: Transport = "processes"
    seed: int = 0
    folder: str = ""
    dump: str | None = None

    @property
    def processes(self) -> int:
        return 1 if self.transport == "loopback" else self.ranks

    @property
    def turn(self) -> int:
        """Steps that count in one turn of an arm, behind a cold one.

        Cores that others use too are as fast or as slow for some seconds: one, so that no two steps have the same luck.  A
        card has no such neighbours, and cold steps would be half of its time.
        """
        return 3 if self.device == "cuda" else 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """The steps of one arm on one rank.

    ``host_s``: until the call returned; ``peak_bytes``: of the device's allocator, without what other arms hold, None where
    it has none; ``difference``: largest from the resident arm's outputs, over their largest value, None without that arm.
    """

    steps_s: tuple[float, ...]
    host_s: tuple[float, ...]
    peak_bytes: int | None
    difference: float | None


@dataclass(frozen=True, kw_only=True)
class ArmRun(Run):
    """``folder``: where its program was dumped; ``predicted``: its program played on what the resident arm took in the same
    run."""

    plan: Plan
    folder: Path | None
    predicted: Timeline
    measurements: tuple[StepMeasurement, ...]


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """``peers``: arms that are no programs of ours.  ``total_bytes``: of all weights; ``link``: how well the emulation keeps
    to its figures; ``load``: what its bandwidth follows from, None where it was given; ``machine``: what it ran on."""

    arms: Mapping[str, ArmRun]
    peers: Mapping[str, Run]
    total_bytes: int
    link: LinkError | None
    load: LinkLoad | None
    machine: str
