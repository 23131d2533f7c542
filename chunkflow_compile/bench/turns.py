"""The work of one rank in a measurement: a model is compiled once, and every arm is a plan for the same lowered regions.

The arms take turns in random order.  The plan is switched between two calls.  A turn runs a warm-up step, because the first
step of a plan is a cold start, and then the measured steps, one after the other.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from chunkflow_compile.hardware.contention import compute_slowdown
from chunkflow_compile.hardware.emulated import on_emulated_link
from chunkflow_compile.hardware.machine import device_name
from chunkflow_compile.hardware.profiles import CPU, default_profile, load_profile
from chunkflow_compile.hardware.stopwatch import Stopwatch
from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.pack import packable
from chunkflow_compile.passes.graph.peers import on_peers
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.names import Pack
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.placed.offload import offload, programs
from chunkflow_compile.runtime.cuda_graphs import PASSES
from chunkflow_compile.runtime.device import make_port
from chunkflow_compile.runtime.measurement import MEASURED_FILE, StepMeasurement, copying_share, measured
from chunkflow_compile.runtime.variants import Variant
from chunkflow_compile.simulate.arms import play_program

from .alternatives import (
    APPLY,
    BY_KIND,
    GRAPH,
    INDUCTOR_GRAPH,
    OFFLOADED,
    alternative_calls,
    alternative_of,
    describe_calls,
    make_alternative,
)
from .arms import HOISTED, RAW, REPLAN_AFTER, REPLANNED, Arm, ArmForm, Measured, form_of, goal_of, on_peers_of
from .compiled import Compilation, gather, step_timings
from .host import SAMPLES, HostTime, executors_of, host_time
from .job import REHEARSAL, RESIDENT, ArmRun, Job, ProgramRun, RankRun
from .link import LinkError, LinkLoad, link_error
from .pace import paced
from .subject import build, build_on_host, first

# The number of calls before measured ones.  Blocks that are compiled by block type run as a cycle from the third call on,
# the blocks of a pipeline are replanned after the first call, and a CUDA graph is recorded in the fourth call (by torch, in
# the third).
CYCLE = {BY_KIND: 3, APPLY: 6, GRAPH: PASSES + 1, INDUCTOR_GRAPH: 3}
# The minimum share of compute that overlaps with copies, over all arms.  With less, the slowdown would be noise.
_LEAST_COPYING = 0.05


def count_steps(job: Job) -> int:
    """The number of steps on the progress bar."""
    return 2 + len(job.arms) * (1 + job.steps) + REHEARSAL * (REPLANNED in [a.name for a in job.arms])


class Share(NamedTuple):
    """The compute time of an arm's step in seconds, and the share of it, 0 to 1, that overlaps with copies."""

    compute_s: float
    copying: float


@dataclass(frozen=True)
class Alternative:
    """A separate model that runs an alternative.  ``held``: bytes that it occupies on the device."""

    model: nn.Module
    call: Callable[..., Any]
    held: int


@dataclass(eq=False)
class RunningArm:
    """An arm while it is measured: how to call it, and the results of its turns so far.

    ``settings``: calls that set it up, as text.  ``compiled``: its compilation.  ``variant``: its variant in this
    compilation, or None for an alternative; replanning changes it.  ``form``: form of its variant.  ``outputs``: outputs by
    step.
    """

    name: str
    settings: str
    variant: Variant | None = None
    form: ArmForm = RAW
    compiled: Compilation | None = None
    alternative: Alternative | None = None
    steps_s: list[float] = field(default_factory=list)
    host: list[HostTime] = field(default_factory=list)
    peak_bytes: int | None = None
    measurements: list[StepMeasurement] = field(default_factory=list)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def call(self) -> Callable[..., Any]:
        """The function that runs one step."""
        runs = self.compiled or self.alternative
        assert runs is not None
        return runs.call


class Turns:
    """The work of one rank in a job."""

    def __init__(self, job: Job, rank: int, progress: tqdm[NoReturn]) -> None:
        self.job = job
        self._began = time.monotonic()
        self._log = None if job.log is None or rank else Path(job.log)
        self.progress = progress
        self.device = torch.device("cuda" if job.device == "cuda" else "cpu")
        self.hardware = load_profile(job.hardware or (default_profile(self.device) if job.device == "cuda" else CPU))
        self.profile = Path(job.folder) / f"hardware{rank}.json"
        self.arms: dict[str, RunningArm] = {}
        self._forms: dict[ArmForm, Compilation] = {}  # forms that have their own compilation

    def run(self) -> RankRun:
        job = self.job
        self.profile.write_text(self.hardware.to_json())
        self.progress.set_description("compile")
        self._compile()
        self.progress.update()
        load = self._hold_pace()
        link = None if job.link is None else self._emulate(job.link, load)
        self.progress.set_description("measure regions")
        raw = self._calibrate_raw()
        measured = {RAW: raw}
        if any(arm.pack for arm in job.arms):
            packed = self._calibrate_packed()
            measured[ArmForm(packed[0].packed)] = packed
        if any(arm.hoist for arm in job.arms):
            measured[HOISTED] = self._calibrate_hoisted(*raw)
        for groups in sorted({arm.groups for arm in job.arms} - {1}):
            measured[ArmForm(groups=groups)] = self._calibrate_groups(groups)
        self.progress.update()
        self._make_programs(measured)
        self._make_alternatives()
        order = random.Random(0)  # the same on every rank, because collectives need all ranks in the same arm
        if (replanned := self.arms.get(REPLANNED)) is not None:
            self._rehearse(replanned)
        arms = sorted(self.arms.values(), key=lambda arm: arm.name)
        for begin in range(0, job.steps, job.turn):
            round_began = time.monotonic()
            for arm in order.sample(arms, len(arms)):
                self._turn(arm, range(begin, min(begin + job.turn, job.steps)))
            now = time.monotonic()
            another = now + (now - round_began) - self._began  # the time at which another round would end
            if job.seconds is not None and max(gather(another, self.job.processes)) > job.seconds:
                break
        if RESIDENT in self.arms:
            # timed within the same minutes as the arms, because the machine's speed changes
            for name in (arm.name for arm in job.arms if arm.policy == RESIDENT):
                resident = self.arms[name]
                assert resident.variant is not None
                timings = step_timings(resident.variant.program.plan, resident.measurements, job.processes)
                measured[resident.form] = resident.variant, timings
            slowdown = self._slowdown()
            measured = {f: (variant, replace(t, compute_slowdown=slowdown)) for f, (variant, t) in measured.items()}
        return RankRun(
            arms={arm.name: self._result(self.arms[arm.name], measured) for arm in job.arms},
            total_bytes=measured[RAW][0].program.problem.total_bytes,
            link=link,
            load=load,
            machine=device_name(self.device),
        )

    def _compile(self) -> None:
        """Build the model on the device, lower every region, and run one step."""
        self.model, self.inputs = build(self.job, self.device)
        peers = any(arm.peers for arm in self.job.arms)
        offload(self.model, self.device, pack=self._pack, peers="auto" if peers else False)
        self._compiled = self._compilation(policy=RESIDENT)

    @property
    def _pack(self) -> Pack:
        return "auto" if any(arm.pack for arm in self.job.arms) else False  # uncompressed at first

    def _compilation(self, **options: Any) -> Compilation:
        """Compile the model.  ``options``: the options in which the compilations of a job differ."""
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

    def _hold_pace(self) -> LinkLoad | None:
        """Measure the compute time of a resident step, before a link is emulated, and give regions their fixed durations.

        Returns the load of the emulated link if the job sets one.
        """
        job = self.job
        if job.load is None and job.pace is None:
            return None
        self.progress.set_description("measure compute")
        self._unpaced, compute_s = self._compiled.variant, self._compiled.compute_s()
        self._unpaced_s = compute_s
        if job.pace is not None:
            self._compiled.use(paced(self._unpaced, compute_s, job.pace))
        return None if job.load is None else LinkLoad(job.load, sum(compute_s), job.pace, job.regime.peers)

    def _calibrate_raw(self) -> tuple[Variant, Timings]:
        """The resident step and its measured times.  Also plans layerwise from these times, because all goals depend on its
        bytes."""
        variant, timings = self._compiled.variant, self._compiled.calibrate()
        self._layerwise = variant.remade(goal=variant.settings.goal.aimed_at(Goal(policy="layerwise")), timings=timings)
        return variant, timings

    def _calibrate_packed(self) -> tuple[Variant, Timings]:
        """A resident step with all packable weights packed and with fixed durations for its regions, and its measured
        times."""
        self.progress.set_description("measure packed regions")
        variant = self._compiled.variant
        goal = replace(variant.settings.goal, pack=packable(variant.cut))
        packed = replace(self._unpaced.remade(hardware=self.hardware, goal=goal), kind=variant.kind)
        found = self._compiled.calibrate_with(packed, self.job.pace)
        self._compiled.use(variant)
        self._compiled.call(**self.inputs(0))
        return found

    def _calibrate_groups(self, groups: int) -> tuple[Variant, Timings]:
        """The variant of a resident step with its exchanges in ``groups`` groups of heads, and its measured times.

        Regions last as long as with whole exchanges; the attention of one group takes an equal part of the whole attention.
        """
        self.progress.set_description(f"compile for {groups} groups of heads")
        self.profile.write_text(self.hardware.to_json())  # with the emulated link
        raw = self._compiled.variant
        compiled = self._forms[ArmForm(groups=groups)] = self._compilation(exchange_groups=groups, policy=RESIDENT)
        self.progress.set_description(f"measure {groups} groups of heads")
        variant = compiled.variant
        if self.job.pace is not None:
            variant = paced(variant, in_groups(self._unpaced_s, variant.program.problem), self.job.pace)
        found = compiled.calibrate_with(variant, None)
        self._compiled.use(raw)
        self._compiled.call(**self.inputs(0))
        return found

    def _calibrate_hoisted(self, raw: Variant, timings: Timings) -> tuple[Variant, Timings]:
        """The same for the hoisted model without its preamble.  The table of rows fits in the smallest budget of its arms."""
        self.progress.set_description("compile the hoisted model")
        self.profile.write_text(self.hardware.to_json())  # includes the emulated link
        goals = (self._goal_of(arm, raw, timings)[0] for arm in self.job.arms if arm.hoist)
        memory = min(goal.memory for goal in goals if goal.memory is not None)
        hoisted = self._forms[HOISTED] = self._compilation(hoist=True, weight_memory=memory)
        self.progress.set_description("measure hoisted regions")
        variant = hoisted.variant
        resident = variant.settings.goal.aimed_at(Goal(policy="resident"))
        return hoisted.calibrate_with(variant.remade(goal=resident), self.job.pace)

    def _emulate(self, link: LinkEmulation, load: LinkLoad | None) -> LinkError:
        """Emulate ``link`` from the next call on, with the bandwidth set by ``load``, and measure its accuracy."""
        self.progress.set_description("measure the link")
        variant = self._compiled.variant
        if load is not None:
            ports = self.job.ranks if link.shared else 1
            bandwidth = ports * load.bandwidth(variant.program.problem)
            link = replace(link, bandwidth=bandwidth, peers=self.job.regime.peers * bandwidth)
        self.hardware = on_emulated_link(self.hardware, link, self.job.ranks)
        if self.job.pace is None:
            slowdown = compute_slowdown(self.device, make_port(link), dist.barrier)
            self.hardware = replace(self.hardware, compute_slowdown=fmean(gather(slowdown, self.job.processes)))
        emulated = variant.remade(hardware=self.hardware)
        self._compiled.use(replace(emulated, kind=replace(variant.kind, link=link)))
        return link_error(link)

    def _make_alternatives(self) -> None:
        made = dict[str, Alternative]()
        for name in (arm.name for arm in self.job.arms if arm.policy is None):
            alternative = alternative_of(name)
            if alternative not in made:
                self.progress.set_description(f"{alternative}: compile")
                made[alternative] = self._alternative(alternative)
            calls = describe_calls(alternative_calls(alternative, self.device.type))
            self.arms[name] = RunningArm(name, calls, alternative=made[alternative])
            self.progress.update()

    def _alternative(self, name: str) -> Alternative:
        """Build an alternative, and call it once."""
        before = self._allocated()
        on_host = name in OFFLOADED
        model = build_on_host(self.job, self.model.state_dict()) if on_host else build(self.job, self.device)[0]
        call = make_alternative(name, model, self.device)
        for _ in range(CYCLE.get(name, 1)):
            call(**self.inputs(0))
        for program in programs(model):
            program.arena.streams.measure(0)
        return Alternative(model, call, self._allocated() - before)

    def _slowdown(self) -> float:
        """The factor by which copies slow down compute, over all ranks."""
        mine = {
            name: Share(
                compute_s=median(sum(m.windows.compute_s) for m in arm.measurements),
                copying=median(copying_share(m.step_s, m.exposed_h2d_s, m.copy_s) for m in arm.measurements),
            )
            for name, arm in self.arms.items()
            if arm.measurements and arm.form == RAW  # compute differs in other forms
        }
        return seen_slowdown(gather(mine, self.job.processes))

    def _make_programs(self, measured: Measured) -> None:
        """Plan each arm that is not an alternative.  Arms of the same form share their regions."""
        variant, timings = measured[RAW]
        for arm in self.job.arms:
            if arm.policy is None:
                continue
            self.progress.set_description(f"{arm.name}: plan")
            form = ArmForm(groups=arm.groups)
            planned = {"layerwise": self._layerwise, RESIDENT: measured[form][0]}.get(arm.policy)
            if planned is None:
                goal, times = self._goal_of(arm, variant, timings)
                form = form_of(arm, measured, goal)
                base, form_times = measured[form]
                times = form_times if arm.pack or arm.hoist or arm.groups > 1 else times
                names = on_peers_of(arm, base, goal, times)
                there = on_peers(base.cut, names, base.settings.ranks).problem
                times = replace(times, problem=there.digest)  # the regions are the same
                planned = base.remade(goal=replace(base.settings.goal.aimed_at(goal), peers=names), timings=times)
            calls = self._calls_of(planned, form)
            planned = replace(planned, replan_after=REPLAN_AFTER if arm.name == REPLANNED else 0)
            compiled = self._forms.get(form, self._compiled)
            self.arms[arm.name] = RunningArm(arm.name, calls, planned, form, compiled)
            self.progress.update()

    def _goal_of(self, arm: Arm, variant: Variant, timings: Timings) -> tuple[Goal, Timings]:
        """The goal of an arm, and the times from which it is planned.  ``variant``, ``timings``: variant and times of the
        uncompressed resident step."""
        problem = variant.program.problem
        rate = self.hardware.shared_by(problem.ranks).copy_rate
        return goal_of(arm, self._layerwise.program.plan, problem, timings, rate, self.job.regime.most)

    def _calls_of(self, variant: Variant, form: ArmForm) -> str:
        """The call that makes a variant, as text, without the profile and the measured times from which it is planned."""
        settings = variant.settings
        options: dict[str, Any] = {"policy": settings.goal.policy, "lowering": self.job.lowering}
        options["chunk_bytes"] = settings.chunk_bytes
        options |= {} if settings.goal.memory is None else {settings.goal.option: settings.goal.memory}
        options |= {"pack": True} if variant.packed else {}
        options |= {"peers": True} if variant.on_peers else {}
        options |= {"hoist": True} if form.hoisted else {}
        options |= {"exchange_groups": form.groups} if form.groups > 1 else {}
        return describe_calls({"torch.compile": {"backend": "chunkflow", "fullgraph": True, "options": options}})

    def _rehearse(self, arm: RunningArm) -> None:
        """Run the steps from which an arm replans, and the first steps with its new plan."""
        assert arm.variant is not None
        self._compiled.use(arm.variant)
        for step in (-REHEARSAL, *range(-REHEARSAL, 0)):
            self.progress.set_description(f"{arm.name}: plan again")
            self._compiled.call(**self.inputs(step))
            _ = self._compiled.program.measurements  # wait for the measurements, because the next step may replan
        arm.variant = self._compiled.variant
        self.progress.update(REHEARSAL)

    def _turn(self, arm: RunningArm, steps: Sequence[int]) -> None:
        """Run a turn of one arm: a warm-up step, then ``steps`` one after the other.

        If weights are hoisted, there is one warm-up step for each of ``steps``, which computes the row that the step needs.
        If marks take time, none of ``steps`` is marked: an additional step before them measures the parts, and a step after
        them measures host time.
        """
        compiled, call, apart = arm.compiled, arm.call, self.job.marks_apart
        if compiled is not None and arm.variant is not None:
            compiled.use(arm.variant)
        self.progress.set_description(f"{arm.name}: step {steps[0] + 1} of {self.job.steps}")
        foreign = self._foreign(arm)
        before, inputs = self.inputs(steps[0]), [self.inputs(step) for step in steps]
        for step in steps if arm.form.hoisted else ():
            call(**self.inputs(step))
        # for a program that already exists: the first steps of a new one are marked anyway
        if apart and self._compiled.arena.programs:
            self._compiled.arena.streams.measure(2)
        call(**before)
        if apart:
            call(**before)
            self._compiled.arena.streams.measure(0)
        dist.barrier()  # so that a rank's step does not include waiting for another rank
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        watch = Stopwatch(self.device)
        outputs = [call(**given) for given in inputs]
        seconds = watch.stop() / len(steps)
        if self.device.type == "cuda":
            arm.peak_bytes = max(torch.cuda.max_memory_allocated(self.device) - foreign, arm.peak_bytes or 0)
            torch.cuda.current_stream(self.device).synchronize()
        host = self._host_times(arm, partial(call, **before)) if apart else [HostTime(seconds, 0)]
        arm.steps_s.append(seconds)
        arm.host += host
        figures = {"seconds": seconds, "host": median(h.seconds for h in host), "waits": min(h.waits for h in host)}
        self._append_to_log(arm=arm.name, step=steps[0], steps=len(steps), **figures)
        arm.outputs |= {step: first(output).cpu() for step, output in zip(steps, outputs, strict=True)}
        self.progress.update(len(steps))
        if compiled is not None:
            arm.measurements += compiled.program.measurements[-(1 if apart else len(steps)) :]
            arm.variant = compiled.variant

    def _host_times(self, arm: RunningArm, call: Callable[[], Any]) -> list[HostTime]:
        """The host times of calls of an arm."""
        own = [] if arm.compiled is None else [arm.compiled.program.executor]
        executors = own if arm.alternative is None else executors_of(arm.alternative.model)
        wait = partial(torch.cuda.synchronize, self.device)
        return [host_time(call, executors, wait) for _ in range(SAMPLES)]

    def _append_to_log(self, **figures: Any) -> None:
        """Append a line to the log."""
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(json.dumps(figures) + "\n")

    def _allocated(self) -> int:
        if self.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.current_stream(self.device).synchronize()  # do not wait for copies that only the next step reads
        return torch.cuda.memory_allocated(self.device)

    def _foreign(self, arm: RunningArm) -> int:
        """Bytes that other arms occupy on the device while this one runs, before its inputs are made."""
        if self.device.type != "cuda":
            return 0
        if arm.alternative is None:
            return sum(a.held for a in {other.alternative for other in self.arms.values()} if a is not None)
        return torch.cuda.memory_allocated(self.device) - arm.alternative.held

    def _result(self, arm: RunningArm, measured: Measured) -> ArmRun:
        right = self.arms[RESIDENT].outputs if RESIDENT in self.arms else {}
        off = [_relative_difference(value, right[step]) for step, value in arm.outputs.items() if step in right]
        return ArmRun(
            settings=arm.settings,
            steps_s=tuple(arm.steps_s),
            host_s=tuple(h.seconds for h in arm.host),
            host_waits=min(h.waits for h in arm.host),
            peak_bytes=arm.peak_bytes,
            difference=max(off) if off else None,
            program=None
            if arm.variant is None
            else self._program(
                arm.variant,
                arm.measurements,
                replace(measured[arm.form][1], problem=arm.variant.program.problem.digest),
            ),
        )

    def _program(self, variant: Variant, measurements: Sequence[StepMeasurement], timings: Timings) -> ProgramRun:
        if variant.folder is not None:  # measurements of all turns; a program writes only its own turn
            text = measured(variant.program.plan, measurements).to_json()
            (variant.folder / MEASURED_FILE).write_text(text)
        return ProgramRun(
            plan=variant.program.plan,
            folder=variant.folder,
            predicted=play_program(variant.program, self.hardware, timings),
            measurements=tuple(measurements),
        )


def in_groups(compute_s: Sequence[float], problem: Problem) -> list[float]:
    """Seconds of each region of a problem whose exchanges are in groups of heads.

    ``compute_s``: seconds of each region with whole exchanges.  The groups of an attention divide its seconds equally.
    """
    whole, found = iter(compute_s), list[float]()
    for _, regions in groupby(problem.regions, lambda region: region.groups):
        for place, region in enumerate(regions):
            found.append(found[-1] if place % region.groups else next(whole) / region.groups)
    return found


def seen_slowdown(ranks: Sequence[Mapping[str, Share]]) -> float:
    """The factor, at least 1, by which copies slow down compute, over all arms and ranks.

    ``ranks``: for each rank, the arms by name.  Each arm is compared with the resident arm of its rank.  The factor is 1 if
    there were so few copies that it would be noise.
    """
    pairs = [(arm, arms[RESIDENT].compute_s) for arms in ranks for arm in arms.values()]
    more = sum(arm.compute_s - resident_s for arm, resident_s in pairs)
    base = sum(resident_s for _, resident_s in pairs)
    copied_s = sum(arm.copying * resident_s for arm, resident_s in pairs)
    return max(1.0, 1 + more / copied_s) if copied_s > _LEAST_COPYING * base else 1.0


def _relative_difference(value: torch.Tensor, right: torch.Tensor) -> float:
    """0 if all bits are equal; otherwise the maximum difference divided by the maximum value of ``right``, and at least
    1e-30."""
    if torch.equal(value, right):
        return 0.0
    off = (value.float() - right.float()).abs().max() / right.float().abs().max()
    return max(float(off.nan_to_num(float("inf"))), 1e-30)
