"""The resident steps of a measurement: they show how long regions and collectives take in each form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from chunkflow_compile.hardware.contention import compute_slowdown
from chunkflow_compile.hardware.emulated import on_emulated_link
from chunkflow_compile.hardware.profiles import CPU, default_profile, load_profile
from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.pack import packable
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.names import Pack
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.placed.offload import offload
from chunkflow_compile.runtime.device import make_port
from chunkflow_compile.runtime.variants import Variant

from .arms import HOISTED, RAW, Arm, ArmForm, goal_of
from .compiled import Compilation, gather
from .job import RESIDENT, Job
from .link_load import LinkError, LinkLoad, link_error
from .pace import paced
from .subject import build


class ResidentSteps:
    """Compiles the model of a job, and measures the resident step of each form.

    ``hardware``: the profile of the machine, with the emulated link once there is one.  ``profile``: the file of this
    profile.  ``compiled``: the first compilation, which runs the uncompressed and the packed form.  Hoisted products and
    groups of heads need other compilations.  ``layerwise``: the variant of policy layerwise, from which all budgets
    follow.
    """

    def __init__(self, job: Job, rank: int, device: torch.device, progress: tqdm[NoReturn]) -> None:
        self.job, self.device, self.progress = job, device, progress
        self.hardware = load_profile(job.hardware or (default_profile(device) if job.device == "cuda" else CPU))
        self.profile = Path(job.folder) / f"hardware{rank}.json"
        self._forms: dict[ArmForm, Compilation] = {}  # compilations of single forms

    def compilation_of(self, form: ArmForm) -> Compilation:
        return self._forms.get(form, self.compiled)

    def measured(self) -> dict[ArmForm, tuple[Variant, Timings]]:
        """Measure the resident step of each form that an arm of the job needs."""
        self.progress.set_description("measure regions")
        raw = self.raw()
        measured = {RAW: raw}
        if any(arm.pack for arm in self.job.arms):
            packed = self.packed()
            measured[ArmForm(packed[0].packed)] = packed
        if any(arm.hoist for arm in self.job.arms):
            measured[HOISTED] = self.hoisted(*raw)
        for groups in sorted({arm.groups for arm in self.job.arms} - {1}):
            measured[ArmForm(groups=groups)] = self.in_head_groups(groups)
        return measured

    def compile(self) -> None:
        """Build the model on the device, compile it, and run one step."""
        self.profile.write_text(self.hardware.to_json())
        self.model, self.inputs = build(self.job, self.device)
        peers = any(arm.peers for arm in self.job.arms)
        offload(self.model, self.device, pack=self._pack, peers="auto" if peers else False)
        self.compiled = self._compilation(policy=RESIDENT)

    @property
    def _pack(self) -> Pack:
        # with "auto", the first compilation has uncompressed weights
        return "auto" if any(arm.pack for arm in self.job.arms) else False

    def _compilation(self, **options: Any) -> Compilation:
        """Compile the model.  ``options``: the options in which the compilations of the job differ."""
        options |= {
            "hardware": str(self.profile),
            "chunk_bytes": self.job.regime.chunk_bytes,
            "debug": "threads" if self.job.device == "threads" else (),
            "dump": self.job.dump,
            "lowering": self.job.lowering,
            "group_bytes": self.job.regime.group_bytes,
            "pack": self._pack,
        }
        return Compilation(self.model, self.inputs, self.job.processes, options)

    def hold_pace(self) -> LinkLoad | None:
        """Measure the compute time of a resident step before a link is emulated, and then hold the regions to their fixed
        durations.

        Returns the load of the emulated link, or None if the job sets no load.
        """
        job = self.job
        if job.load is None and job.pace is None:
            return None
        self.progress.set_description("measure compute")
        self._unpaced, compute_s = self.compiled.variant, self.compiled.compute_s()
        self._unpaced_s = compute_s
        if job.pace is not None:
            self.compiled.use(paced(self._unpaced, compute_s, job.pace))
        return None if job.load is None else LinkLoad(job.load, sum(compute_s), job.pace, job.regime.peers)

    def raw(self) -> tuple[Variant, Timings]:
        """Return the variant of the resident step and its measured times.  Also plan policy layerwise from these times,
        because all budgets depend on its bytes."""
        variant, timings = self.compiled.variant, self.compiled.calibrate()
        self.layerwise = variant.remade(goal=variant.settings.goal.aimed_at(Goal(policy="layerwise")), timings=timings)
        return variant, timings

    def packed(self) -> tuple[Variant, Timings]:
        """Return the variant of a resident step in which all packable weights are packed, and its measured times."""
        self.progress.set_description("measure packed regions")
        variant = self.compiled.variant
        goal = replace(variant.settings.goal, pack=packable(variant.cut))
        packed = replace(self._unpaced.remade(hardware=self.hardware, goal=goal), kind=variant.kind)
        found = self.compiled.calibrate_with(packed, self.job.pace)
        self.compiled.use(variant)
        self.compiled.call(**self.inputs(0))
        return found

    def in_head_groups(self, groups: int) -> tuple[Variant, Timings]:
        """Return the variant of a resident step with exchanges in ``groups`` groups of heads, and its measured times.

        If regions have fixed durations, they last as long as with whole exchanges, and each group's attention takes an
        equal part of the duration of the whole attention.
        """
        self.progress.set_description(f"compile for {groups} groups of heads")
        self.profile.write_text(self.hardware.to_json())  # the profile now includes the emulated link
        raw = self.compiled.variant
        compiled = self._forms[ArmForm(groups=groups)] = self._compilation(exchange_groups=groups, policy=RESIDENT)
        self.progress.set_description(f"measure {groups} groups of heads")
        variant = compiled.variant
        if self.job.pace is not None:
            variant = paced(variant, in_groups(self._unpaced_s, variant.program.problem), self.job.pace)
        found = compiled.calibrate_with(variant, None)
        self.compiled.use(raw)
        self.compiled.call(**self.inputs(0))
        return found

    def hoisted(self, raw: Variant, timings: Timings) -> tuple[Variant, Timings]:
        """Return the variant of the resident step without the hoisted products, and its measured times.  The table of
        rows fits in the smallest budget of the arms that hoist."""
        self.progress.set_description("compile the hoisted model")
        self.profile.write_text(self.hardware.to_json())  # the profile now includes the emulated link
        goals = (self.goal_of(arm, raw, timings)[0] for arm in self.job.arms if arm.hoist)
        memory = min(goal.memory for goal in goals if goal.memory is not None)
        hoisted = self._forms[HOISTED] = self._compilation(hoist=True, weight_memory=memory)
        self.progress.set_description("measure hoisted regions")
        variant = hoisted.variant
        resident = variant.settings.goal.aimed_at(Goal(policy="resident"))
        return hoisted.calibrate_with(variant.remade(goal=resident), self.job.pace)

    def emulate(self, link: LinkEmulation, load: LinkLoad | None) -> LinkError:
        """Emulate ``link`` from the next call on, and measure its accuracy.  ``load``: the load from which the bandwidth
        is derived, or None to use the bandwidth in ``link``."""
        self.progress.set_description("measure the link")
        variant = self.compiled.variant
        if load is not None:
            ports = self.job.ranks if link.shared else 1
            bandwidth = ports * load.bandwidth(variant.program.problem)
            link = replace(link, bandwidth=bandwidth, peers=self.job.regime.peers * bandwidth)
        self.hardware = on_emulated_link(self.hardware, link, self.job.ranks)
        if self.job.pace is None:
            slowdown = compute_slowdown(self.device, make_port(link), dist.barrier)
            self.hardware = replace(self.hardware, compute_slowdown=fmean(gather(slowdown, self.job.processes)))
        emulated = variant.remade(hardware=self.hardware)
        self.compiled.use(replace(emulated, kind=replace(variant.kind, link=link)))
        return link_error(link)

    def goal_of(self, arm: Arm, variant: Variant, timings: Timings) -> tuple[Goal, Timings]:
        """Return the goal of an arm and the times from which it is planned.  ``variant``, ``timings``: the variant and
        the times of the uncompressed resident step."""
        problem = variant.program.problem
        rate = self.hardware.shared_by(problem.ranks).copy_rate
        return goal_of(arm, self.layerwise.program.plan, problem, timings, rate, self.job.regime.most)


def in_groups(compute_s: Sequence[float], problem: Problem) -> list[float]:
    """Return the seconds of each region in a problem whose exchanges are in groups of heads.

    ``compute_s``: the seconds of each region with whole exchanges.  The seconds of an attention are divided equally among
    its groups.
    """
    whole, found = iter(compute_s), list[float]()
    for _, regions in groupby(problem.regions, lambda region: region.groups):
        for place, region in enumerate(regions):
            found.append(found[-1] if place % region.groups else next(whole) / region.groups)
    return found
