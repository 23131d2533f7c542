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
from .link_load import TO_BE_DERIVED, LinkError, LinkLoad
from .pace import PACE
from .regimes import Regime

# The arm with which all other arms are compared.  It keeps all weights on the device.
RESIDENT = "resident"
# The number of steps that the arm ``replanned`` runs before the measurement: the steps from which it is replanned, and
# the first step with the new plan.
REHEARSAL = REPLAN_AFTER + 1
# "processes": one process per rank, connected by gloo.  "loopback": one process stands for all ranks and exchanges data
# with host memory instead of other ranks, using the copy engines.  "loopback-kernels": the same, using kernels like NCCL.
Transport = Literal["processes", "loopback", "loopback-kernels"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The input of each rank.

    ``model``: a preset or file.py:function that replaces the regime's model.  ``sizes``: the sizes of the preset.
    ``lowering``: how regions are lowered.  ``device``: "threads" (the CPU, with a thread per stream), "cpu" or "cuda".
    ``link``: the link to emulate, or None to use the device's own link.  ``load``: the load of the emulated link, from
    which its bandwidth is derived; None to use the bandwidth in ``link``.  ``pace``: the duration to which regions are
    held, as a multiple of their measured times, or None.  ``hardware``: the profile of the machine, or None for the
    default of the device.  ``folder``: a temporary folder in which the ranks find each other and write their results.
    ``dump``: the folder for dumped programs.  ``seconds``: the time limit for the whole job.  The first round always
    runs; a later round runs only if it is expected to end within the limit.  ``log``: a file to which each turn
    immediately appends a line of JSON, so that an interrupted job keeps its figures.  ``lines``: whether to print
    progress as lines if stderr is not a terminal.
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

        On the CPU there is one step per turn: other processes may slow down the cores for seconds at a time, and would
        slow down all steps of a longer turn.  On a GPU, which no other process uses, there are three.
        """
        return 3 if self.device == "cuda" else 1

    @property
    def marks_apart(self) -> bool:
        """Whether the parts of a step are measured in a separate step, because the timed events between the parts take
        time."""
        return self.device == "cuda"


def link_of(
    regime: Regime, bandwidth: float = TO_BE_DERIVED, order: str = "fair", one_port: bool = False
) -> LinkEmulation:
    """Return the link to emulate for a regime.  ``bandwidth``: the bandwidth in bytes/s.  ``one_port``: whether all ranks
    share a port, even if the regime does not require this."""
    shared = "port" if one_port or regime.one_port else ""
    return LinkEmulation(bandwidth=bandwidth, order=order, shared=shared, peers=regime.peers * bandwidth)


def job_of(regime: Regime, steps: int, **other: Any) -> Job:
    """Return the usual job for a regime.  The bandwidth of the emulated link is derived from the regime's load, and
    regions have fixed durations."""
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

    ``settings``: the calls that set up the arm, as text.  ``steps_s``: the seconds per step in each turn.  ``host_s``:
    the host times of calls in seconds.  ``host_waits``: the minimum of HostTime.waits over these calls; if it is 0,
    ``host_s`` are upper bounds.  ``peak_bytes``: the peak bytes that torch has allocated during measured steps, including
    inputs and outputs, excluding the bytes of other arms; None on the CPU.  ``difference``: the maximum difference from
    the outputs of the resident arm, divided by their maximum value; None if there is no resident arm.  ``program``: the
    program of the arm, or None for an alternative.
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

    ``folder``: the folder of its dump, or None.  ``predicted``: the simulated step; compute and collectives take as long
    as measured in the resident arm.
    """

    plan: Plan
    folder: Path | None
    predicted: Timeline
    measurements: tuple[StepMeasurement, ...]


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """The result of a rank.

    ``total_bytes``: the bytes of all weights.  ``link``: the accuracy of the emulated link, or None.  ``load``: the load
    from which its bandwidth was derived, or None.  ``machine``: the name of the device.
    """

    arms: Mapping[str, ArmRun]
    total_bytes: int
    link: LinkError | None
    load: LinkLoad | None
    machine: str
