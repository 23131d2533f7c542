"""Random programs, and the schedules that a device could run them by."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers import gather_heads, scatter_heads
from torch import nn

from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.lowering.lower import lower_regions
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.passes.place import Builder
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.regions import Cut
from chunkflow_compile.passes.rewrite import Program, rewrite
from chunkflow_compile.passes.schedule import transfers
from chunkflow_compile.passes.search import Planner, barriers
from chunkflow_compile.passes.timeline import Simulator
from chunkflow_compile.passes.windows import as_windows
from chunkflow_compile.runtime.arena import Arena, as_weight, flat_bytes, slot_bytes
from chunkflow_compile.runtime.device import ThreadsDevice
from chunkflow_compile.runtime.executor import Binding, Executor
from chunkflow_compile.tracing import trace

CHUNK = 512
MACHINE = load_profile(Path(__file__).parent / "slow_compute.json")


class RandomModel(nn.Module):
    """Layers of odd widths, some read twice, some with a collective, one tied to the first, one larger than the rest."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.width = rng.choice([8, 16, 24])
        hidden = [rng.choice([8, 20, 36, 200]) for _ in range(rng.randint(1, 4))]
        self.up = nn.ModuleList([nn.Linear(self.width, h, bias=rng.random() < 0.3) for h in hidden])
        self.down = nn.ModuleList([nn.Linear(h, self.width, bias=False) for h in hidden])
        self.twice = rng.random() < 0.5  # the first layer's weights are read again at the end
        self.exchange = [rng.random() < 0.5 for _ in hidden]
        if rng.random() < 0.3:
            self.head = nn.Linear(self.width, hidden[0], bias=False)
            self.head.weight = self.up[0].weight  # tied
        else:
            self.head = nn.Linear(self.width, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down, exchange in zip(self.up, self.down, self.exchange, strict=True):
            x = x + torch.tanh(down(torch.nn.functional.gelu(up(x))))
            if exchange:
                x = x + gather_heads(scatter_heads(x, 4)).reshape(x.shape)
        if self.twice:
            x = x + self.down[0](self.up[0](x))
        return self.head(x)


@dataclass(frozen=True)
class Tenant:
    """What an arena asks of a program that lives as long as the arena."""

    plan: Plan

    def close(self) -> None:
        raise AssertionError("the arena was made large enough")


class Bench:
    """A traced model with the values of its weights: programs of any plan run on it."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model = model.eval()
        self.x = x
        self.cut: Cut = make_cut(trace(self.model, {"x": x}, 0), 1)
        self.weights = {name: p.detach() for name, p in self.model.named_parameters(remove_duplicate=False)}

    @property
    def problem(self) -> Problem:
        return self.cut.problem

    def program(self, plan: Plan) -> Program:
        return rewrite(self.cut, plan)

    def executor(self, program: Program, arena: Arena, poison: bool = True) -> Executor:
        """In an arena that is full of NaN."""
        plan = program.plan
        memory = arena.join(Tenant(plan))
        if arena.holder is None:
            memory.fill_(255)
        values, slots, hosts = {}, {}, {}
        for weight in plan.weights:
            host = self.weights[weight.name]
            if weight.offset is None:
                values[weight.name] = host
                continue
            slots[weight.name] = slot = slot_bytes(memory, weight.offset, weight.nbytes)
            hosts[weight.name] = flat_bytes(host)
            values[weight.name] = as_weight(slot, host)
        return Executor(program, lower_regions(program, "eager", {}), Binding(arena, values, slots, hosts), poison)

    def arguments(self, program: Program, x: torch.Tensor) -> list[Any]:
        """The inputs of the traced graph: the activation, and a placeholder for each weight."""
        names = {placeholder: weight for weight, placeholder in program.weight_inputs.items()}
        nodes = program.module.graph.find_nodes(op="placeholder")
        return [self.weights[names[n.name]] if n.name in names else x for n in nodes]


def random_plan(problem: Problem, seed: int) -> Plan:
    """Any legal plan: for each chunk a window, or none; early, late, wrapping around; sometimes with barriers."""
    rng = random.Random(seed)
    planner = Planner(problem, Simulator(problem, MACHINE, CHUNK))
    count, stay = planner.count, rng.choice([0.0, 0.1, 0.5])
    reach = rng.choice([1, 2, count])
    placed: list[int | None] = []
    for chunk in planner.chunks:
        earliest = max(chunk.last + 1 - count, chunk.first - reach)
        placed.append(None if rng.random() < stay else rng.randint(earliest, chunk.first))
    windows = as_windows(planner.chunks, placed, count)
    hard = barriers(problem, transfers(problem, windows)) if rng.random() < 0.3 else ()
    return Builder(planner, MACHINE, "chunkflow").plan(windows, hard)


class Jitter:
    """Seeded delays in front of pieces of work, of all streams or of one."""

    def __init__(self, seed: int, slow: str = "", seconds: float = 2e-4) -> None:
        self.random = random.Random(seed)
        self.slow = slow
        self.seconds = seconds
        self.lock = threading.Lock()

    def __call__(self, stream: str) -> None:
        with self.lock:
            wait = self.random.random()
        if stream == self.slow:
            time.sleep(self.seconds)
        elif not self.slow and wait < 0.2:
            time.sleep(self.seconds * wait)


def ranked(*order: str) -> Callable[[Sequence[str]], str]:
    """The first of the streams in ``order`` that can go on."""
    return lambda able: min(able, key=order.index)


def at_random(seed: int) -> Callable[[Sequence[str]], str]:
    rng = random.Random(seed)
    return lambda able: rng.choice(sorted(able))


def schedules(seed: int) -> dict[str, Callable[[], ThreadsDevice]]:
    """Six ways to run a program, by name."""
    return {
        "copies as early as allowed": lambda: ThreadsDevice(ranked("copy", "collective", "compute")),
        "copies as late as allowed": lambda: ThreadsDevice(ranked("compute", "collective", "copy")),
        "collectives late": lambda: ThreadsDevice(ranked("compute", "copy", "collective")),
        "at random": lambda: ThreadsDevice(at_random(seed)),
        "compute slow": lambda: ThreadsDevice(before=Jitter(seed, "compute")),
        "jitter": lambda: ThreadsDevice(before=Jitter(seed)),
    }


def run_ahead(
    bench: Bench, program: Program, device: ThreadsDevice, inputs: Sequence[torch.Tensor], exact: bool = True
) -> list[Any]:
    """The outputs of several steps, all enqueued before any of them has run."""
    arena = Arena(make=lambda *_, **__: device)
    executor = bench.executor(program, arena)
    try:
        device.engine.pause()
        steps = [executor.enqueue(bench.arguments(program, x)) for x in inputs]
        device.deliver()
        device.copy.synchronize()
        due = program.plan.moved_bytes * len(inputs) + sum(s.primed for s in steps)
        assert not exact or executor.copied_bytes == due, "every byte of the plan was copied, and no other"
        return [step.outputs[0] for step in steps]
    finally:
        executor.forget()
        device.close()


def expected(bench: Bench, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the model itself says."""
    return [bench.model(x) for x in inputs]
