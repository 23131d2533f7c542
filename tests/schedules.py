"""Schedules by which a device may run programs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from random_cycles import CycleBench
from random_programs import Bench

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.program.cycle import prefetches
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.device import ThreadsDevice

# A step: the program that takes it, and its input.
Turn = tuple[Program, torch.Tensor]


class Jitter:
    """Seeded delays before some pieces of work, of all streams or of one."""

    def __init__(self, seed: int, slow: str = "", seconds: float = 2e-4) -> None:
        self.random = random.Random(seed)
        self.slow = slow
        self.seconds = seconds
        self.lock = threading.Lock()

    def __call__(self, stream: str) -> None:
        with self.lock:
            wait = self.random.random()
        if stream == self.slow and wait < 0.3:
            time.sleep(self.seconds)
        elif not self.slow and wait < 0.2:
            time.sleep(self.seconds * wait)


def ranked(*order: str) -> Callable[[Sequence[str]], str]:
    """Chooses the first stream in ``order`` that can continue.  Completions come directly after the starts of collectives."""
    places: dict[str, float] = {name: i for i, name in enumerate(order)}
    places["completion"] = places["collective"] + 0.5
    return lambda able: min(able, key=places.__getitem__)


def at_random(seed: int) -> Callable[[Sequence[str]], str]:
    rng = random.Random(seed)
    return lambda able: rng.choice(sorted(able))


def schedules(seed: int, pulls: bool = False) -> dict[str, Callable[[], ThreadsDevice]]:
    """Six ways to run a program, by name; two more if it ``pulls``."""
    lanes = {
        "pulls early, copies late": lambda: ThreadsDevice(ranked("pull", "collective", "compute", "read", "copy")),
        "copies early, pulls late": lambda: ThreadsDevice(ranked("read", "copy", "collective", "compute", "pull")),
    }
    return {
        **(lanes if pulls else {}),
        "copies as early as allowed": lambda: ThreadsDevice(ranked("read", "copy", "pull", "collective", "compute")),
        "copies as late as allowed": lambda: ThreadsDevice(ranked("compute", "collective", "copy", "pull", "read")),
        "collectives late": lambda: ThreadsDevice(ranked("compute", "read", "copy", "pull", "collective")),
        "at random": lambda: ThreadsDevice(at_random(seed)),
        # the last two, in every run another
        "compute slow": lambda: ThreadsDevice(before=Jitter(seed, "compute")),
        "jitter": lambda: ThreadsDevice(before=Jitter(seed)),
    }


def run_ahead(
    bench: Bench | CycleBench, turns: Sequence[Turn], device: ThreadsDevice, exact: bool = True, rows: int = 1
) -> list[Any]:
    """The outputs of several steps, of one program or of several in one arena, all enqueued before any has run.

    ``rows``: the number of consecutive turns, of one program, that are the rows of one step.
    """
    arena = Arena(make=lambda *_: device)
    programs = list({id(program): program for program, _ in turns}.values())
    bench.join(arena, max((p.plan for p in programs), key=lambda plan: plan.arena_bytes))
    executors = {id(p): bench.executor(p, arena) for p in programs}
    try:
        device.engine.pause()
        steps = [
            executors[id(program)].enqueue([bench.arguments(program, x) for _, x in turns[i : i + rows]])
            for i, (program, _) in [*enumerate(turns)][::rows]
        ]
        device.deliver()
        for lane in device.lanes:
            lane.synchronize()
        due = sum(moved_bytes(p) for p, _ in turns[::rows]) + sum(s.cost.primed for s in steps)
        if rows == 1:
            copied = sum(e.traffic.copied_bytes for e in executors.values())
        else:  # no copy of such a step is timed
            copied = sum(s.cost.moved + s.cost.primed for s in steps)
        assert not exact or copied == due, "every byte of the plans was copied, and no other"
        return [outputs[0] for step in steps for outputs in step.outputs]
    finally:
        device.engine.resume()  # after an error, nothing must wait for the paused engine
        for executor in executors.values():
            executor.forget()
        device.close()


def moved_bytes(program: Program) -> int:
    """The bytes that the program's own prefetches copy; of a cycle, a call moves other calls' weights too."""
    plan = program.plan
    weights = {w.name: w for w in plan.streamed}
    spans = (plan.span(weights[op.weight], op.first, op.end) for _, op in prefetches(program))
    return sum(end - begin for begin, end in spans)


def equal(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def matches(found: Bench | CycleBench, turns: Sequence[Turn], seed: int, rows: int = 1) -> int:
    """Asserts the model's numbers on every schedule; returns the number of schedules.  ``rows``: see :func:`run_ahead`."""
    want = found.expected(turns)
    ways = schedules(seed, _pulls(turns))
    for name, device in ways.items():
        assert equal(run_ahead(found, turns, device(), rows=rows), want), name
    return len(ways)


def _pulls(turns: Sequence[Turn]) -> bool:
    return any(program.plan.pulled for program, _ in turns)


def goes_wrong(found: Bench | CycleBench, turns: Sequence[Turn], seed: int) -> str:
    """What the reproducible schedules show: "number" for a wrong number, else "error" for an error, else ""."""
    want = found.expected(turns)
    shown = ""
    for device in list(schedules(seed, _pulls(turns)).values())[:-2]:
        try:
            if not equal(run_ahead(found, turns, device(), exact=False), want):
                return "number"
        except (ChunkflowError, RuntimeError):
            shown = "error"
    return shown
