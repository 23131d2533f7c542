"""One rank of a measurement: a model compiled once, every arm a plan of its own on the same lowered regions.

Steps of the arms are taken in turns, in random order: an arm is switched to between two calls, takes one step that does
not count, because it begins cold, and then those that do.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessException, spawn
from tqdm import tqdm

from chunkflow_compile.hardware.emulated import on_emulated_link
from chunkflow_compile.hardware.profiles import DEFAULT, load_profile
from chunkflow_compile.models.small import small_inputs, small_model
from chunkflow_compile.models.ulysses import enable_ulysses
from chunkflow_compile.models.weightless import load_build
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.timeline import Timeline
from chunkflow_compile.passes.timings import Timings
from chunkflow_compile.placing import offload, programs, restore
from chunkflow_compile.runtime.measurement import MEASURED_FILE, StepMeasurement, measured
from chunkflow_compile.runtime.runner import Code, Session
from chunkflow_compile.simulate.arms import play_program

from .arms import REPLAN_AFTER, REPLANNED, Arm, settings_of
from .link_error import LinkError, link_error
from .regimes import Regime

# A rank that compiles while the other waits in a collective takes less than a minute on a slow core.
TIMEOUT = timedelta(minutes=5)
# Steps that count in one turn of an arm: fewer would make half of the time cold steps, more would let the machine change.
TURN = 3
RESIDENT = "resident"
# Resident steps that the plans are made from, behind one that pays for first touches.
CALIBRATION = 3


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank is told.  ``model``: file.py:function in place of the regime's; ``device``: "threads", where the host runs
    ahead of every stream, or "cpu".  ``folder``: where it meets the others and leaves its result, made for the run; ``dump``:
    for programs.
    """

    regime: Regime
    link: LinkEmulation
    ranks: int
    arms: tuple[Arm, ...]
    steps: int
    model: str | None = None
    device: str = "threads"
    seed: int = 0
    folder: str = ""
    dump: str | None = None


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One arm on one rank.  ``folder``: where its program was dumped; ``predicted``: its program played on what the resident
    arm took in the same run."""

    plan: Plan
    folder: Path | None
    predicted: Timeline
    steps_s: tuple[float, ...]
    measurements: tuple[StepMeasurement, ...]
    equal: bool


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """``total_bytes``: of all weights; ``link``: how well the emulation keeps to its figures."""

    arms: Mapping[str, ArmRun]
    total_bytes: int
    link: LinkError


def run_job(job: Job) -> list[RankRun]:
    """Runs the job, one process a rank.  Raises ChunkflowError if one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        link = replace(job.link, shared=str(Path(folder) / "port") if job.link.shared else "")
        try:
            spawn(_rank, (replace(job, folder=folder, link=link),), nprocs=job.ranks)
        except ProcessException as error:
            raise ChunkflowError(f"A rank failed: {error}") from error
        return [torch.load(Path(folder) / f"rank{r}.pt", weights_only=False) for r in range(job.ranks)]


def _rank(rank: int, job: Job) -> None:
    import diffusers

    _settle(rank, job.ranks)
    diffusers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{job.folder}/meet", rank=rank, world_size=job.ranks, timeout=TIMEOUT
    )
    total = 2 + len(job.arms) * (1 + job.steps) + TURN * (REPLANNED in [a.name for a in job.arms])
    try:
        with torch.no_grad(), tqdm(total=total, disable=None if rank == 0 else True, unit="step") as progress:
            torch.save(_Bench(job, progress).run(), Path(job.folder) / f"rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _settle(rank: int, ranks: int) -> None:
    """Gives a rank processors of its own, as it would have a GPU: threads that wander cost the other rank a tenth."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
    if mine:
        os.sched_setaffinity(0, mine)
    torch.set_num_threads(max(1, len(mine)))


class _Bench:
    def __init__(self, job: Job, progress: Any) -> None:
        self.job = job
        self.progress = progress
        self.hardware = Path(job.folder) / f"hardware{dist.get_rank()}.json"
        self.hardware.write_text(on_emulated_link(load_profile(DEFAULT), job.link, job.ranks).to_json())
        self.model, self.inputs = self._build()
        self.times: dict[str, list[float]] = {a.name: [] for a in job.arms}
        self.measurements: dict[str, list[StepMeasurement]] = {a.name: [] for a in job.arms}
        self.outputs: dict[str, dict[int, torch.Tensor]] = {a.name: {} for a in job.arms}

    def run(self) -> RankRun:
        progress, job = self.progress, self.job
        link = link_error(job.link)
        progress.set_description("compile")
        # diffusers' parallel hooks settle in their first call; only then the model traces whole
        self.model(**self.inputs(0))
        offload(self.model)
        options: dict[str, Any] = {
            "policy": "resident",
            "hardware": str(self.hardware),
            "chunk_bytes": job.regime.chunk_bytes,
            "debug": "threads" if job.device == "threads" else (),
            "dump": job.dump,
        }
        self.compiled = torch.compile(self.model, backend="chunkflow", fullgraph=True, options=options)
        self.compiled(**self.inputs(0))
        progress.update()
        progress.set_description("measure regions")
        timings = self._calibrate()
        progress.update()
        codes = self._codes(timings)
        resident = codes[RESIDENT].program.plan if RESIDENT in codes else None
        order = random.Random(job.seed)  # the same on every rank: the arms' collectives must meet
        if REPLANNED in codes:  # its plan comes behind its first steps, which are those of misjudged
            self._turn(REPLANNED, codes, range(-TURN, 0))
        for first in range(0, job.steps, TURN):
            for name in order.sample(sorted(codes), len(codes)):
                self._turn(name, codes, range(first, min(first + TURN, job.steps)))
        if resident is not None:  # the machine of these steps, not that of a minute ago
            timings = self._timings(resident, self.measurements[RESIDENT])
        total = self._session.program.problem.total_bytes
        restore(self.model)
        return RankRun(arms=self._results(codes, timings), total_bytes=total, link=link)

    @property
    def _session(self) -> Session:
        return programs(self.model)[-1]

    def _build(self) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
        """The model, and the inputs of each step."""
        regime = self.job.regime
        if self.job.model is None:
            small = small_model(regime.family, regime.size)
            return self._split(small), lambda step: small_inputs(regime.family, regime.size, step + TURN)
        torch.manual_seed(0)
        model, given = load_build(self.job.model)()
        return self._split(model), lambda step: _changed(given, step)

    def _split(self, model: nn.Module) -> nn.Module:
        splits = self.job.ranks > 1 and hasattr(model, "enable_parallelism")
        return enable_ulysses(model, self.job.ranks) if splits else model

    def _calibrate(self) -> Timings:
        for step in range(CALIBRATION):
            self.compiled(**self.inputs(step))
        session = self._session
        return self._timings(session.plan, session.measurements[-CALIBRATION + 1 :])

    def _timings(self, resident: Plan, steps: Sequence[StepMeasurement]) -> Timings:
        """What regions and collectives take here, with all weights resident; the mean over the ranks."""
        mine = measured(resident, steps).timings()
        everyone: list[Any] = [None] * self.job.ranks
        dist.all_gather_object(everyone, mine)
        return replace(
            mine,
            compute_s=tuple(fmean(column) for column in zip(*(t.compute_s for t in everyone), strict=True)),
            collective_s=tuple(fmean(column) for column in zip(*(t.collective_s for t in everyone), strict=True)),
        )

    def _codes(self, timings: Timings) -> dict[str, Code]:
        """A program for each arm, of the same regions."""
        code = self._session.code
        layerwise = code.remade(policy="layerwise", timings=timings)
        rate = load_profile(self.hardware).copy_rate
        codes = {}
        for arm in self.job.arms:
            self.progress.set_description(f"{arm.name}: plan")
            settings = settings_of(arm, layerwise.program.plan, code.program.problem, timings, rate)
            ready = {"layerwise": layerwise, RESIDENT: code}.get(arm.policy)
            made = ready or code.remade(**settings)
            codes[arm.name] = replace(made, replan_after=REPLAN_AFTER if arm.name == REPLANNED else 0)
            self.progress.update()
        return codes

    def _turn(self, name: str, codes: dict[str, Code], steps: Sequence[int]) -> None:
        """Steps of one arm, behind one that begins cold; those below 0 do not count."""
        self._session.choice.code = codes[name]
        self.compiled(**self.inputs(steps[0]))
        dist.barrier()
        for step in steps:
            self.progress.set_description(f"{name}: step {max(step, 0) + 1} of {self.job.steps}")
            start = time.perf_counter()
            output = self.compiled(**self.inputs(step))
            if step >= 0:
                self.times[name].append(time.perf_counter() - start)
            self.outputs[name][step] = _first(output)
            self.progress.update()
        session = self._session
        if steps[0] >= 0:
            self.measurements[name] += session.measurements[-len(steps) :]
        codes[name] = session.choice.code

    def _results(self, codes: Mapping[str, Code], timings: Timings) -> dict[str, ArmRun]:
        hardware, right = load_profile(self.hardware), self.outputs.get(RESIDENT, {})
        for name, code in codes.items():
            if code.folder is not None:  # of all turns, where the session of each knew its own
                text = measured(code.program.plan, self.measurements[name]).to_json()
                (code.folder / MEASURED_FILE).write_text(text)
        return {
            name: ArmRun(
                plan=code.program.plan,
                folder=code.folder,
                predicted=play_program(code.program, hardware, timings),
                steps_s=tuple(self.times[name]),
                measurements=tuple(self.measurements[name]),
                equal=all(
                    torch.equal(value, right[step]) for step, value in self.outputs[name].items() if step in right
                ),
            )
            for name, code in codes.items()
        }


def _first(output: Any) -> torch.Tensor:
    """The first tensor of what a model returns: itself, of a tuple, or of diffusers' output."""
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found


def _changed(inputs: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The inputs of another step: every floating tensor a little smaller, as latents lose noise."""
    return {
        k: v / (1 + 0.01 * (step + TURN)) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
