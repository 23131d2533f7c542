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

# The arm with which the others are compared: the same program with all weights on the device.
RESIDENT = "resident"
# The number of steps of ``replanned`` before the measured ones: the steps from which it replans, and the first step with
# the new plan.
REHEARSAL = REPLAN_AFTER + 1
# "processes": one process per rank, connected by gloo.  "loopback": one process stands for all ranks and exchanges data
# with host memory instead of other ranks, using the copy engines.  "loopback-kernels": the same, using kernels like NCCL.
Transport = Literal["processes", "loopback", "loopback-kernels"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The input of each rank.

    ``model``: a preset or file.py:function, instead of the regime's model; ``sizes``: sizes of the preset.  ``lowering``:
    lowering of the regions.  ``device``: "threads" (the CPU, where the host runs ahead of every stream), "cpu" or "cuda".
    ``link``: link to emulate, or None to use the device's own.  ``load``: load of the emulated link, which sets its
    bandwidth, or None to use the bandwidth in ``link``.  ``pace``: duration of a region as a multiple of its measured time,
    or None to leave it unchanged.  ``hardware``: profile of the machine, or None for the default of the device.
    ``folder``: temporary folder through which the ranks find each other and return their results.  ``dump``: folder for
    dumped programs.  ``seconds``: time limit for the whole job; after the first round, rounds that would exceed it are not
    run.  ``log``: file to which each turn immediately appends a line of JSON, so that an interrupted job keeps its figures.
    ``lines``: whether to print progress as lines if stderr is not a terminal.
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
        """The number of consecutive measured steps per turn of an arm.

        One on the CPU: other processes slow down its cores for seconds at a time, and would slow down all steps of a longer
        turn.  Three on a GPU: no other process uses it, and there is a pause only after three steps.
        """
        return 3 if self.device == "cuda" else 1

    @property
    def marks_apart(self) -> bool:
        """Whether the parts of a step are measured in a separate step, because the marks between them take time."""
        return self.device == "cuda"


def link_of(
    regime: Regime, bandwidth: float = TO_BE_DERIVED, order: str = "fair", one_port: bool = False
) -> LinkEmulation:
    """The link to emulate for a regime.  ``bandwidth``: bytes/s.  ``one_port``: whether its ranks share a port even if the
    regime does not ask for it."""
    shared = "port" if one_port or regime.one_port else ""
    return LinkEmulation(bandwidth=bandwidth, order=order, shared=shared, peers=regime.peers * bandwidth)


def job_of(regime: Regime, steps: int, **other: Any) -> Job:
    """The job for a regime on its ranks: the load of the regime sets the bandwidth of the emulated link, and regions have
    fixed durations."""
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

    ``settings``: calls that set up the arm, as text.  ``steps_s``: seconds per step in each turn.  ``host_s``: host time of
    calls in seconds.  ``host_waits``: minimum number of pauses of the host clock per call; if 0, ``host_s`` are upper
    bounds.  ``peak_bytes``: peak of the device's allocator in the steps of a turn, including their inputs and outputs and
    excluding the bytes of other arms; None on the CPU.  ``difference``: maximum difference from the outputs of the resident
    arm, divided by their maximum value; None without that arm.  ``program``: program of the arm, or None for an
    alternative.
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

    ``folder``: folder of its dump.  ``predicted``: simulated step, with the times of the resident arm in the same run.
    """

    plan: Plan
    folder: Path | None
    predicted: Timeline
    measurements: tuple[StepMeasurement, ...]


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The result of a rank.

    ``total_bytes``: bytes of all weights.  ``link``: accuracy of the emulated link.  ``load``: load that set its bandwidth,
    or None if the bandwidth was given.  ``machine``: name of the device.
    """

    arms: Mapping[str, ArmRun]
    total_bytes: int
    link: LinkError | None
    load: LinkLoad | None
    machine: str
