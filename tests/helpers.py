"""Small modules, their graphs cut into regions, and plans of them."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from safetensors.torch import load_file, save_file
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore

import chunkflow_compile
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.options import Options
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.units import parse_bytes

Module = TypeVar("Module", bound=nn.Module)

# Projections of 1 MiB.  Tests that compile a model with Inductor share this size, and so its compiled kernels.
WIDE = Size(layers=2, heads=8, head_dim=64, frames=1, height=16, width=16, text=16)


class Scaled(nn.Module):
    """One product by a weight, element by element, in one byte an element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.arange(64, dtype=torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def without_joins(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Let a module issue no joins, which are in the steps that it issues."""
    whole = module.instructions

    def issued(target: Any, step: Sequence[Any], nodes: Iterable[Any] = ()) -> Any:
        joins = target.cycle.events.lanes.values()
        return whole(target, tuple(op for op in step if getattr(op, "event", None) not in joins), nodes)

    monkeypatch.setattr(module, "instructions", issued)


def twins(make: Callable[[], Module]) -> tuple[Module, Module]:
    """Two models of the same weights, of which one is for ChunkFlow and one stays as it is."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(0)
    return model.eval(), make().eval()


def small_twins(name: str, size: Size, degree: int = 1) -> tuple[Any, Any]:
    """A small model of diffusers twice; both split the sequence over ``degree`` ranks."""
    model, twin = (enable_ulysses(small_model(name, size), degree) for _ in range(2))
    return model, twin


@dataclass(frozen=True)
class Combined:
    """Options that a test combines with the options that it is about, and the small model that gets all of them.

    ``prepare``: changes the model and its twin before they are placed.
    """

    options: Mapping[str, Any]
    family: str = "wan"
    by_kind: bool = False
    dtype: torch.dtype = torch.float32
    prepare: Callable[[Any], object] = lambda model: None

    def placed(self, size: Size, given: Mapping[str, Any], degree: int = 1) -> tuple[Any, Any, Any]:
        """A model, its compiled form, and an equal model.  ``given``: the options that the test is about."""
        model, twin = (each.to(self.dtype) for each in small_twins(self.family, size, degree))
        for each in (model, twin):
            self.prepare(each)
        options = {**given, **self.options}
        if self.by_kind:
            return model, chunkflow_compile.compile(model, dynamic=False, **options), twin
        chunkflow_compile.offload(model, min_bytes=given["min_bytes"], pack=self.options.get("pack", False))
        return model, torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=False, options=options), twin

    def inputs(self, size: Size, seed: int) -> dict[str, Any]:
        found = small_inputs(self.family, size, seed)
        return {n: v.to(self.dtype) if torch.is_tensor(v) and v.is_floating_point() else v for n, v in found.items()}


def check_small(run: Any, twin: Any, name: str, size: Size, seeds: Iterable[int]) -> None:
    """Calls of a small model of diffusers, each with the inputs of a seed, give what the twin gives, bit for bit."""
    for seed in seeds:
        inputs = small_inputs(name, size, seed)
        assert torch.equal(run(**inputs)[0], twin(**inputs)[0]), seed


def check_steps(run: Any, twin: Any, steps: int, shape: Sequence[int] = (4, 8), device: str = "cpu") -> None:
    """Steps with new inputs each give what the twin gives, bit for bit."""
    for step in range(steps):
        x = torch.randn(shape, device=device)
        assert torch.equal(run(x), twin(x)), step


def on_card(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs, with the tensors on the GPU."""
    return {name: value.cuda() if torch.is_tensor(value) else value for name, value in inputs.items()}


def graphs() -> int:
    """The number of graphs that Dynamo has compiled in this test."""
    return int(counters["stats"]["unique_graphs"])


def cut_of(model: nn.Module, x: torch.Tensor, **options: int) -> Cut:
    """The regions of a module.  Without ``min_bytes``, every weight may be streamed."""
    chosen = Options(**{"min_bytes": 0, **options})
    return make_cut(trace(model, {"x": x}, chosen.min_bytes), chosen.group_bytes)


def run_python(*arguments: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """This Python in another process, which finds the package and the modules of tests."""
    here = Path(__file__).parent
    path = os.pathsep.join(filter(None, [str(here), str(here.parent), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=600
    )


def allocated_peak(profiled: Any) -> int:
    """Most bytes that torch's allocator had given out at once, of those since the profile began."""
    most = now = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    (found,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found)


@contextmanager
def fake_ranks() -> Iterator[None]:
    """Two ranks, of which one is there, for tracing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def ulysses_cut(layers: int = 2) -> Cut:
    """The regions of a model with collectives, on two ranks."""
    with fake_ranks():
        return cut_of(UlyssesStack(layers), torch.randn(4, 32))


def with_goal(**given: Any) -> dict[str, Any]:
    """Arguments of ``place`` or ``Settings``: those that are fields of a goal make one."""
    goal = {f.name: given.pop(f.name) for f in fields(Goal) if f.name in given}
    return {"goal": Goal(**goal), **given}


def aimed(settings: Settings, **goal: Any) -> Settings:
    """The settings with these fields of their goal."""
    return replace(settings, goal=replace(settings.goal, **goal))


def plan_of(problem: Problem, **goal: Any) -> Plan:
    """A plan in chunks of 4 KiB, on a machine that computes each region in about a millisecond."""
    machine = replace(load_profile(Path(__file__).parent / "slow_compute.json"), launch_s=1e-3, h2d_bandwidth=2e7)
    if goal.keys().isdisjoint(("memory", "policy")):
        goal = {"slowdown": 1.0, **goal}
    return place(problem, machine, **with_goal(**{"chunk_bytes": 4096, **goal}))


class Block(nn.Module):
    """A residual MLP of two weights."""

    def __init__(self, width: int, hidden: int | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden or 2 * width, bias=False)
        self.down = nn.Linear(hidden or 2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class InTurn(nn.Module):
    """Blocks in a ModuleList, and nothing around them."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Stack(nn.Module):
    """Blocks in a ModuleList between two projections."""

    def __init__(self, layers: int = 2, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stack(layers: int = 2, seed: int = 0) -> Stack:
    torch.manual_seed(seed)
    return Stack(layers).eval()


class Tabled(Stack):
    """With a buffer that is large, too; it is called as a model of diffusers."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__(layers, 64)  # weights of several pages
        self.register_buffer("table", torch.randn(32, 32))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (super().forward(x @ self.table[:8, :8]),)

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype


def save_stack(folder: Path) -> str:
    """The file of the weights of a ``Tabled``."""
    torch.manual_seed(0)
    save_file(Tabled().state_dict(), folder / "model.safetensors")
    return str(folder / "model.safetensors")


def load_stack(file: str, dtype: torch.dtype | None = None) -> Tabled:
    """A ``Tabled`` on the pages of a file, as diffusers loads a model, and cast as it casts one."""
    model = Tabled().eval().requires_grad_(False)
    model.load_state_dict(load_file(file), assign=True)
    return model.to(dtype)


def in_memory(model: nn.Module) -> nn.Module:
    """Let its weights lie in memory as torch aligns it: products differ by the alignment of the pages of a file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def stack_inputs(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)}


class Broken(Stack):
    """Breaks the graph around an op that reads a small parameter only."""

    def __init__(self) -> None:
        super().__init__(4)
        self.scale = nn.Parameter(torch.full((32,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[1](self.blocks[0](self.embed(x)))
        torch._dynamo.graph_break()
        x = x * self.scale
        torch._dynamo.graph_break()
        return self.head(self.blocks[3](self.blocks[2](x)))


class UlyssesBlock(nn.Module):
    """Attention over a sequence that is split over the ranks, with four functional all-to-alls."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, width = x.shape
        q, k, v = (scatter_heads(t, self.heads) for t in self.qkv(x).chunk(3, dim=-1))
        attended = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return x + self.out(gather_heads(attended).reshape(tokens, width))


def scatter_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[tokens/P, width] -> [heads/P, tokens, width/heads]."""
    ranks = dist.get_world_size()
    tokens, width = x.shape
    split = x.view(tokens, ranks, heads // ranks, width // heads).permute(1, 0, 2, 3).contiguous()
    moved = funcol.all_to_all_single(split, None, None, dist.group.WORLD)
    return moved.reshape(ranks * tokens, heads // ranks, width // heads).transpose(0, 1)


def gather_heads(x: torch.Tensor) -> torch.Tensor:
    """[heads/P, tokens, d] -> [tokens/P, heads, d]."""
    ranks = dist.get_world_size()
    heads, tokens, depth = x.shape
    split = x.transpose(0, 1).reshape(ranks, tokens // ranks, heads, depth).contiguous()
    moved = funcol.all_to_all_single(split, None, None, dist.group.WORLD)
    return moved.permute(1, 0, 2, 3).reshape(tokens // ranks, ranks * heads, depth)


class UlyssesStack(InTurn):
    """Ulysses blocks in a ModuleList."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__(UlyssesBlock(width, heads) for _ in range(layers))


class Coalesced(nn.Module):
    """A collective of two results, which one completion may wait for (as torch 2.15 traces it) or two (2.13)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        first, second = funcol.all_reduce_coalesced([hidden, hidden * 2], "sum", dist.group.WORLD)
        return self.down(first - second)


class Terminal(io.StringIO):
    """A stderr that is a terminal, and keeps what is written."""

    def __init__(self, terminal: bool = True) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def memory_named(error: object) -> int:
    """The budget that an error tells to give, bytes."""
    return parse_bytes(re.findall(r"memory='([\w.]+)'", str(error))[-1], "memory")


def join_closers() -> None:
    """Wait for the threads on which finalizers close programs."""
    for thread in threading.enumerate():
        if thread.name == "chunkflow-close":
            thread.join()
