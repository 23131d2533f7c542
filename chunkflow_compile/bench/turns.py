"""The work of one rank in a measurement.

The model is compiled once per form, and the arms of a form are different plans for the same lowered regions.  The arms
take turns in random order.  A turn switches to the plan of its arm, runs a warm-up step, because the first step of a plan
is a cold start, and then runs the measured steps, one after the other.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from tqdm import tqdm

from chunkflow_compile.hardware.machine import device_name
from chunkflow_compile.hardware.stopwatch import Stopwatch
from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.graph.shard import on_peers
from chunkflow_compile.placed.offload import programs
from chunkflow_compile.runtime.cuda_graphs import PASSES
from chunkflow_compile.runtime.measurement import MEASURED_FILE, StepMeasurement, copying_share, measured
from chunkflow_compile.runtime.variants import Variant
from chunkflow_compile.simulate.played_steps import play_program

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
from .arms import RAW, REPLAN_AFTER, REPLANNED, ArmForm, Measured, form_of, on_peers_of
from .compiled import gather, step_timings
from .host import SAMPLES, HostTime, executors_of, host_time
from .job import REHEARSAL, RESIDENT, ArmRun, Job, ProgramRun, RankRun
from .resident_steps import ResidentSteps
from .running_arm import Alternative, RunningArm, Share, relative_difference, seen_slowdown
from .subject import build, build_on_host, first

# The number of calls of an alternative before it is measured, by default 1.  Blocks that are compiled by block type run
# as a cycle from the third call on, the blocks of a pipeline are replanned after the first call, and a CUDA graph is
# recorded in the fourth call (by torch in the third call).
CYCLE = {BY_KIND: 3, APPLY: 6, GRAPH: PASSES + 1, INDUCTOR_GRAPH: 3}


def count_steps(job: Job) -> int:
    """Return the number of steps on the progress bar."""
    return 2 + len(job.arms) * (1 + job.steps) + REHEARSAL * (REPLANNED in [a.name for a in job.arms])


class Turns:
    """Runs a job on one rank."""

    def __init__(self, job: Job, rank: int, progress: tqdm[NoReturn]) -> None:
        self.job = job
        self._began = time.monotonic()
        self._log = None if job.log is None or rank else Path(job.log)
        self.progress = progress
        self.device = torch.device("cuda" if job.device == "cuda" else "cpu")
        self.resident = ResidentSteps(job, rank, self.device, progress)
        self.arms: dict[str, RunningArm] = {}

    def run(self) -> RankRun:
        job = self.job
        self.progress.set_description("compile")
        self.resident.compile()
        self.progress.update()
        load = self.resident.hold_pace()
        link = None if job.link is None else self.resident.emulate(job.link, load)
        measured = self.resident.measured()
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
            another = now + (now - round_began) - self._began  # the seconds after which another round would end
            if job.seconds is not None and max(gather(another, self.job.processes)) > job.seconds:
                break
        if RESIDENT in self.arms:
            # take the times from the measured turns, because the machine's speed may have changed
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
        """Build an alternative, and call it as often as ``CYCLE`` says."""
        before = self._allocated()
        on_host = name in OFFLOADED
        model = (
            build_on_host(self.job, self.resident.model.state_dict()) if on_host else build(self.job, self.device)[0]
        )
        call = make_alternative(name, model, self.device)
        for _ in range(CYCLE.get(name, 1)):
            call(**self.resident.inputs(0))
        for program in programs(model):
            program.arena.streams.measure(0)
        return Alternative(model, call, self._allocated() - before)

    def _slowdown(self) -> float:
        """Return the factor by which copies slow down compute, over all ranks."""
        mine = {
            name: Share(
                compute_s=median(sum(m.windows.compute_s) for m in arm.measurements),
                copying=median(copying_share(m.step_s, m.exposed_h2d_s, m.copy_s) for m in arm.measurements),
            )
            for name, arm in self.arms.items()
            if arm.measurements and arm.form == RAW  # arms in other forms compute for a different time
        }
        return seen_slowdown(gather(mine, self.job.processes))

    def _make_programs(self, measured: Measured) -> None:
        """Plan each arm that is not an alternative.  ``measured``: the resident step of each form."""
        variant, timings = measured[RAW]
        for arm in self.job.arms:
            if arm.policy is None:
                continue
            self.progress.set_description(f"{arm.name}: plan")
            form = ArmForm(groups=arm.groups)
            planned = {"layerwise": self.resident.layerwise, RESIDENT: measured[form][0]}.get(arm.policy)
            if planned is None:
                goal, times = self.resident.goal_of(arm, variant, timings)
                form = form_of(arm, measured, goal)
                base, form_times = measured[form]
                times = form_times if arm.pack or arm.hoist or arm.groups > 1 else times
                names = on_peers_of(arm, base, goal, times)
                there = on_peers(base.cut, names, base.settings.ranks).problem
                times = replace(
                    times, problem=there.digest
                )  # the measured times also apply to the problem with sharded weights, which has the same regions
                planned = base.remade(goal=replace(base.settings.goal.aimed_at(goal), peers=names), timings=times)
            calls = self._calls_of(planned, form)
            planned = replace(planned, replan_after=REPLAN_AFTER if arm.name == REPLANNED else 0)
            compiled = self.resident.compilation_of(form)
            self.arms[arm.name] = RunningArm(arm.name, calls, planned, form, compiled)
            self.progress.update()

    def _calls_of(self, variant: Variant, form: ArmForm) -> str:
        """Return the call that would make a variant, as text, without the profile and the measured times from which it is
        planned."""
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
        """Run the steps from which an arm is replanned, and the first step with its new plan."""
        assert arm.variant is not None
        self.resident.compiled.use(arm.variant)
        for step in (-REHEARSAL, *range(-REHEARSAL, 0)):
            self.progress.set_description(f"{arm.name}: plan again")
            self.resident.compiled.call(**self.resident.inputs(step))
            _ = (
                self.resident.compiled.program.measurements
            )  # wait for the measurements, because the next step may be planned from them
        arm.variant = self.resident.compiled.variant
        self.progress.update(REHEARSAL)

    def _turn(self, arm: RunningArm, steps: Sequence[int]) -> None:
        """Run a turn of one arm: a warm-up step, then ``steps`` one after the other.

        If products are hoisted, there is one warm-up step for each of ``steps``, which computes the row that the step
        needs.  On a GPU, timed events between the parts of a step would take time.  So the measured steps contain none:
        an additional step before them measures the parts, and further steps after them measure host time.
        """
        compiled, call, apart = arm.compiled, arm.call, self.job.marks_apart
        if compiled is not None and arm.variant is not None:
            compiled.use(arm.variant)
        self.progress.set_description(f"{arm.name}: step {steps[0] + 1} of {self.job.steps}")
        foreign = self._foreign(arm)
        before, inputs = self.resident.inputs(steps[0]), [self.resident.inputs(step) for step in steps]
        for step in steps if arm.form.hoisted else ():
            call(**self.resident.inputs(step))
        # measure the parts of the next two steps; the first steps of a new program are measured anyway
        if apart and self.resident.compiled.arena.programs:
            self.resident.compiled.arena.streams.measure(2)
        call(**before)
        if apart:
            call(**before)
            self.resident.compiled.arena.streams.measure(0)
        dist.barrier()  # so that the steps do not include waiting for ranks that start late
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
        """Return the host times of several calls of an arm."""
        own = [] if arm.compiled is None else [arm.compiled.program.executor]
        executors = own if arm.alternative is None else executors_of(arm.alternative.model)
        wait = partial(torch.cuda.synchronize, self.device)
        return [host_time(call, executors, wait) for _ in range(SAMPLES)]

    def _append_to_log(self, **figures: Any) -> None:
        """Append a line of JSON to the log, if there is one."""
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(json.dumps(figures) + "\n")

    def _allocated(self) -> int:
        if self.device.type != "cuda":
            return 0
        gc.collect()
        torch.cuda.current_stream(
            self.device
        ).synchronize()  # do not wait for other streams, on which copies for the next step may run
        return torch.cuda.memory_allocated(self.device)

    def _foreign(self, arm: RunningArm) -> int:
        """Return the bytes on the device that do not belong to an arm.  Call this before the inputs of the arm are
        made."""
        if self.device.type != "cuda":
            return 0
        if arm.alternative is None:
            return sum(a.held for a in {other.alternative for other in self.arms.values()} if a is not None)
        return torch.cuda.memory_allocated(self.device) - arm.alternative.held

    def _result(self, arm: RunningArm, measured: Measured) -> ArmRun:
        right = self.arms[RESIDENT].outputs if RESIDENT in self.arms else {}
        off = [relative_difference(value, right[step]) for step, value in arm.outputs.items() if step in right]
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
        if (
            variant.folder is not None
        ):  # overwrite the file with the measurements of all turns, because a program writes only the last turn
            text = measured(variant.program.plan, measurements).to_json()
            (variant.folder / MEASURED_FILE).write_text(text)
        return ProgramRun(
            plan=variant.program.plan,
            folder=variant.folder,
            predicted=play_program(variant.program, self.resident.hardware, timings),
            measurements=tuple(measurements),
        )
