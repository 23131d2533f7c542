"""Trace, plan and simulate the configurations of the paper's evaluation, without weights."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from tqdm import tqdm

from chunkflow_compile.catalog.presets import OutputSizes, preset
from chunkflow_compile.catalog.sizes import Timestep
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import Policy
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.plan import Plan, Prediction
from chunkflow_compile.passes.problem import Problem

# The policies that the paper measures, and the policy chunkflow.
POLICIES: tuple[Policy, ...] = ("resident", "layerwise", "layerwise-barrier", "chunkflow")
DEGREE = 2
MACHINE = "h100-pcie-x2"
MIB, GIB = 1 << 20, 1 << 30
CHUNK = 16 * MIB
TEXT = {"hunyuanvideo": 162}  # the paper uses 161 tokens, which cannot be divided evenly between two ranks
# The paper's formulas do not count the products and bytes that one timestep per token would add.
TIMESTEP: Timestep = "sample"
ROOMY = "chunkflow, in layerwise's memory"


@dataclass(frozen=True)
class Case:
    """A configuration of the paper.  ``size``: the number of frames or, for an image model, of samples."""

    model: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.model.split('-')[0]} {self.size}"

    @property
    def sizes(self) -> OutputSizes:
        known = preset(self.model).sizes
        text = TEXT.get(self.model, known.text)
        batch, frames = (self.size, 1) if self.model == "flux.1-dev" else (1, self.size)
        return OutputSizes(height=known.height, width=known.width, frames=frames, batch=batch, text=text)

    @property
    def forwards(self) -> int:
        return preset(self.model).forwards

    def trace(self) -> Problem:
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
        warnings.filterwarnings("ignore")
        return make_cut(replace(preset(self.model), timestep=TIMESTEP).trace(DEGREE, self.sizes)).problem


CASES = [
    *(Case("wan2.2-ti2v-5b", n) for n in (41, 81, 121, 161)),
    *(Case("flux.1-dev", b) for b in (4, 8, 12, 16)),
    *(Case("hunyuanvideo", n) for n in (9, 21, 33, 45)),
]


@dataclass(frozen=True)
class Result:
    """A configuration and its plans.  ``plans``: the plans by arm."""

    case: Case
    problem: Problem
    plans: dict[str, Plan]

    def step(self, arm: str) -> float:
        return self.predicted(arm).step_s * self.case.forwards

    def predicted(self, arm: str) -> Prediction:
        found = self.plans[arm].predicted
        assert found is not None
        return found

    def with_more_bytes(self, arm: str, factor: float) -> float:
        """Return the step time of an arm's plan if every collective transferred ``factor`` times as many bytes."""
        collectives = tuple(replace(c, nbytes=round(c.nbytes * factor)) for c in self.problem.collectives)
        problem, plan = replace(self.problem, collectives=collectives), self.plans[arm]
        return Simulator(problem, load_profile(MACHINE), CHUNK).step_under(plan) * self.case.forwards

    @property
    def fits(self) -> bool:
        """Whether the time to copy all weights plus the time of all collectives is at most the resident step time."""
        machine, resident = load_profile(MACHINE), self.predicted("resident")
        return self.problem.total_bytes / machine.copy_rate + resident.collective_s <= resident.step_s


def play(case: Case, problem: Problem, machine: Hardware) -> Result:
    plans = {policy: place(problem, machine, Goal(policy=policy), chunk_bytes=CHUNK) for policy in POLICIES}
    room = plans["layerwise"].device_bytes
    return Result(case, problem, {**plans, ROOMY: place(problem, machine, Goal(memory=room), chunk_bytes=CHUNK)})


def breakdown(r: Result, arm: str) -> tuple[float, float, float, float]:
    """Return the shares of a step: compute, collectives without contention, waiting for weights, and the time that copies
    add to collectives."""
    p = r.predicted(arm)
    alone = p.collective_s - p.inflation_s
    return p.compute_s / p.step_s, alone / p.step_s, p.exposed_s / p.step_s, p.inflation_s / p.step_s


def blocks_of(problem: Problem) -> tuple[float, float]:
    """Return the mean FLOPs of a block on one rank, and the mean weight bytes of a block."""
    home = {r.index: r.block for r in problem.regions}
    flops: dict[str, float] = {}
    nbytes: dict[str, float] = {}
    for region in problem.regions:
        if "blocks" in region.block and "refiner" not in region.block:
            flops[region.block] = flops.get(region.block, 0) + region.cost.flops
    for weight in problem.weights:
        if weight.uses and home[weight.uses[0]] in flops:
            block = home[weight.uses[0]]
            nbytes[block] = nbytes.get(block, 0) + weight.nbytes
    return mean(flops.values()), mean(nbytes.values())


def trace_all(keep: Path | None) -> list[Problem]:
    """Return the problems of all cases.  They are read from the folder ``keep`` if an earlier run wrote them there, and
    otherwise traced by two processes."""
    found: dict[Case, Problem] = {}
    for case in CASES:
        path = keep / f"{case.model}_{case.size}.pkl" if keep is not None else None
        if path is not None and path.exists():
            found[case] = pickle.loads(path.read_bytes())
    missing = [c for c in CASES if c not in found]
    workers = min(2, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        traced = pool.map(Case.trace, missing)
        for case, problem in zip(missing, tqdm(traced, total=len(missing), unit="graph", desc="tracing"), strict=True):
            found[case] = problem
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{case.model}_{case.size}.pkl").write_bytes(pickle.dumps(problem))
    return [found[c] for c in CASES]
