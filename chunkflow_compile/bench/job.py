"""The input of a measurement, and the result of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from chunkflow_compile.catalog.presets import OutputSizes
from chunkflow_compile.lowering.lower import Lowering
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.placement.timeline import Timeline
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.runtime.measurement import StepMeasurement

from .arms import REPLAN_AFTER, Arm, parse_arms
from .link import TO_BE_DERIVED, LinkError, LinkLoad
from .pace import PACE
from .regimes import Regime

# The arm that the others are compared with: the same program with all weights on the device.
RESIDENT = "resident"
# Steps of ``replanned`` before the measured ones: those that it plans from, and the first with the new plan.
REHEARSAL = REPLAN_AFTER + 1
# "processes": one process per rank, gloo between them.  "loopback": one process for all ranks, which exchanges data
# with host memory instead of other ranks, by the copy engines; "loopback-kernels": by kernels, as NCCL does.
Transport = Literal["processes", "loopback", "loopback-kernels"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The input of each rank.

    ``model``: a preset or file.py:function, in place of the regime's model; ``sizes``: sizes of the preset.
    ``lowering``: of the regions.  ``device``: "threads" (the CPU, where the host runs ahead of every stream), "cpu" or
    "cuda".  ``link``: the link to emulate, None to use the device's own.  ``load``: the load of the link, which sets its
    bandwidth; None to use the bandwidth in ``link``.  ``pace``: how many times as long as measured a region is held,
    None for as long as it takes.  ``hardware``: profile of the machine, None for the default of the device.
    ``folder``: a temporary folder where the ranks meet and write their results.  ``dump``: folder for the dumped
    programs.  ``seconds``: time for the whole job; rounds after the first that would not fit are not run.  ``log``: file
    to which each turn adds a line of JSON at once, so an interrupted job keeps its figures.  ``lines``: whether progress is
    also told where stderr is no terminal, in lines.
    """

    regime: Regime
    link: LinkEmulation | None
    ranks: int
    arms: tuple[Arm, ...]
    steps: int
    load: float | None = None
    pace: float | None = None
    model: str | None = None
    sizes: OutputSizes | None = None
    lowering: Lowering = "inductor"
    device: str = "threads"
    hardware: str | None = None
    transport: Transport = "processes"
    folder: str = ""
    dump: str | None = None
    seconds: float | None = None
    log: str | None = None
    lines: bool = False

    @property
    def processes(self) -> int:
        return self.ranks if self.transport == "processes" else 1

    @property
    def turn(self) -> int:
        """Measured steps in one turn of an arm, in a row.

        On the CPU one: other processes slow its cores for seconds at a time, and would slow all steps of a longer turn.
        On a GPU three: no other process uses it, and a pause comes only after three steps.
        """
        return 3 if self.device == "cuda" else 1

    @property
    def marks_apart(self) -> bool:
        """Whether the parts of a step are measured in a step of their own, because the marks between them take time."""
        return self.device == "cuda"


def link_of(
    regime: Regime, bandwidth: float = TO_BE_DERIVED, order: str = "fair", one_port: bool = False
) -> LinkEmulation:
    """The link of a regime to emulate.  ``bandwidth``: bytes/s.  ``one_port``: whether its ranks share a port in any case."""
    shared = "port" if one_port or regime.one_port else ""
    return LinkEmulation(bandwidth=bandwidth, order=order, shared=shared, peers=regime.peers * bandwidth)


def job_of(regime: Regime, steps: int, **other: Any) -> Job:
    """A regime on its ranks: the link is what its load makes of it, and regions are held to their pace."""
    return Job(
        regime=regime,
        link=link_of(regime),
        load=regime.load,
        pace=PACE,
        ranks=regime.ranks,
        arms=parse_arms(regime.arms),
        steps=steps,
        **other,
    )


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """The steps of one arm on one rank.

    ``settings``: the calls that make the arm.  ``steps_s``: seconds of a step in each turn.  ``host_s``: seconds of the
    host in a call.  ``host_waits``: how often its clock stood still in one, at least; if never, ``host_s`` are upper
    bounds.  ``peak_bytes``: peak of the device's allocator in the steps of a turn, with their inputs and outputs and
    without the bytes of other arms; None on the CPU.  ``difference``: largest difference from the outputs of the
    resident arm, over their largest value; None without that arm.  ``program``: None for an alternative.
    """

    settings: str
    steps_s: tuple[float, ...]
    host_s: tuple[float, ...]
    host_waits: int
    peak_bytes: int | None
    difference: float | None
    program: ProgramRun | None


@dataclass(frozen=True, kw_only=True)
class ProgramRun:
    """The program of an arm that runs ChunkFlow.

    ``folder``: its dump.  ``predicted``: its step, simulated with the times of the resident arm in the same run.
    """

    plan: Plan
    folder: Path | None
    predicted: Timeline
    measurements: tuple[StepMeasurement, ...]


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The result of a rank.

    ``total_bytes``: bytes of all weights.  ``link``: the accuracy of the emulated link.  ``load``: the load that set its
    bandwidth, None if the bandwidth was passed.  ``machine``: name of the device.
    """

    arms: Mapping[str, ArmRun]
    total_bytes: int
    link: LinkError | None
    load: LinkLoad | None
    machine: str
