"""An offloaded weight is still a tensor: whatever is done to it gives what an ordinary weight gives, or a sentence."""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import OPTIONS
from helpers import Stack
from hostile import ATTEMPTS, attempt_all
from test_killed_ranks import run_all
from torch import nn

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.weights.host_weight import HostWeight

MIN_BYTES = 1024
EAGER: dict[str, Any] = {**OPTIONS, "min_bytes": MIN_BYTES, "lowering": "eager"}
NAMES = ["blocks.0.up.weight", "blocks.1.down.weight"]


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().eval()


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return torch.compile(model, backend="chunkflow", fullgraph=True, options={**EAGER, **options})


def pair() -> tuple[Stack, Stack]:
    model, twin = stack(), stack()
    offload(model, min_bytes=MIN_BYTES)
    return model, twin


# Reads: a weight -> what a user gets.
READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda w: w.sum(),
    "norm in a list": lambda w: torch._foreach_norm([w, w]),
    "item": lambda w: w[0, 0].item(),
    "tolist": lambda w: w.tolist(),
    "slice": lambda w: w[1:3, ::2] + 1,
    "t": lambda w: w.t().contiguous(),
    "matmul": lambda w: w @ w.T,
    "einsum": lambda w: torch.einsum("ij,ik->jk", w, w),
    "to double": lambda w: w.to(torch.float64),
    "cpu": lambda w: w.cpu(),
    "clone": lambda w: w.clone(),
    "chunk": lambda w: w.chunk(2),
    "unbind": lambda w: w.unbind(0)[1],
    "flatten": lambda w: w.flatten(),
    "view as bytes": lambda w: w.detach().view(torch.uint8),
    "equal": lambda w: torch.equal(w, w.clone()),
    "stack": lambda w: torch.stack([w, w]),
    "cat": lambda w: torch.cat([w, torch.ones_like(w)]),
    "numpy": lambda w: w.detach().cpu().numpy().copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "saved": lambda w: _saved(w),
    "parameter": lambda w: nn.Parameter(w.data, requires_grad=False) * 2,
    "out": lambda w: torch.add(w, 1, out=torch.empty_like(w)),
    "where": lambda w: torch.where(w > 0, w, 0.0),
    "repr": lambda w: "tensor(" in repr(w),
    "len": len,
    "iteration": lambda w: [row.sum().item() for row in w],
    "truth": lambda w: bool((w != 0).any()),
    "max": lambda w: w.max(dim=1),
}


def _saved(weight: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# Writes, in place.
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "zero_": lambda w: w.zero_(),
    "data.zero_": lambda w: w.data.zero_(),
    "mul_": lambda w: w.mul_(1.5),
    "add_ itself": lambda w: w.add_(w),
    "copy_": lambda w: w.copy_(torch.full_like(w, 0.25)),
    "data.copy_": lambda w: w.data.copy_(w.data * 2),
    "assign data": lambda w: setattr(w, "data", w.data + 1),
    "a view": lambda w: w.view(-1)[3:9].fill_(2.0),
    "a row": lambda w: w[0].zero_(),
    "setitem": lambda w: w.__setitem__((slice(1, 2), slice(None)), 3.0),
    "a transposed view": lambda w: w.t().fill_(0.5),
    "a diagonal": lambda w: w.diagonal().add_(1),
    "a chunk": lambda w: w.chunk(2)[1].neg_(),
    "a view of a detached view": lambda w: w.detach()[2:].view(-1).mul_(3),
    "out": lambda w: torch.mul(w.detach(), 2, out=w.data),
    "out of itself": lambda w: torch.add(w, 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "lerp_": lambda w: w.lerp_(torch.ones_like(w), 0.1),
    "index_fill_": lambda w: w.index_fill_(0, torch.tensor([1, 2]), 0.1),
    "masked_fill_": lambda w: w.masked_fill_(w > 0, 0.3),
    "addmm_": lambda w: w.addmm_(w.detach(), torch.eye(w.shape[1])),
    "normal_": lambda w: (torch.manual_seed(5), nn.init.normal_(w)),
    "kaiming": lambda w: (torch.manual_seed(6), nn.init.kaiming_uniform_(w)),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "swap rows": lambda w: w[:2].copy_(w[:2].flip(0)),
    "as_strided": lambda w: w.as_strided((4,), (2,)).fill_(1.0),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and torch.equal(a.cpu(), b.cpu())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


@pytest.mark.parametrize("what", READS)
def test_a_read_is_that_of_an_ordinary_weight(what: str, no_grad: None) -> None:
    model, twin = pair()
    for name in NAMES:
        weight = model.get_parameter(name)
        assert isinstance(weight, HostWeight) and isinstance(weight, nn.Parameter)
        assert same(READS[what](weight), READS[what](twin.get_parameter(name)))


@pytest.mark.parametrize("policy", ["chunkflow", "resident"])
def test_a_write_is_seen_by_the_next_step(policy: str, no_grad: None) -> None:
    """By a program that has copied the weight already: as a resident, or into its slot for the next step."""
    model, twin = pair()
    run = compiled(model, **({} if policy == "chunkflow" else {"policy": "resident", "slowdown": None}))
    start = copy.deepcopy(twin.state_dict())
    for what, write in WRITES.items():
        for name in NAMES:
            for m in (model, twin):
                write(m.get_parameter(name))
            assert torch.equal(model.get_parameter(name), twin.get_parameter(name)), what
            for _ in range(2):
                x = torch.randn(4, 8)
                assert torch.equal(run(x), twin(x)), what
        for m in (model, twin):
            m.load_state_dict(start)
    assert len(programs(model)) == 1
    moved = programs(model)[0].plan.moved_bytes
    assert moved > 0 if policy == "chunkflow" else moved == 0
    restore(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


# What a whole model may be asked to do between two steps.
def _other() -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    return Stack().state_dict()


ON_MODELS: dict[str, Callable[[nn.Module], Any]] = {
    "load": lambda m: m.load_state_dict(_other()),
    "assign": lambda m: m.load_state_dict({n: v.clone() for n, v in _other().items()}, assign=True),
    "half and back": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "to its device": lambda m: m.to("cpu"),
    "no gradients": lambda m: m.requires_grad_(False),
    "gradients": lambda m: m.requires_grad_(True),
    "eager": lambda m: m(torch.ones(2, 8)),
    "state": lambda m: {n: v.clone() for n, v in m.state_dict().items()},
    "write through the state": lambda m: m.state_dict()[NAMES[0]].mul_(0.5),
    "average": lambda m: [p.lerp_(q, 0.25) for p, q in zip(m.parameters(), Stack().parameters(), strict=True)],
    "copy": lambda m: [q for p in copy.deepcopy(m).parameters() for q in [p.sum()]],
    "new parameter": lambda m: setattr(m.blocks[0].up, "weight", nn.Parameter(torch.full((64, 32), 0.1))),
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 25))])
def test_random_sequences_of_operations(seed: int, no_grad: None) -> None:
    """After each operation, both models have the same weights and the same outputs."""
    rng = random.Random(seed)
    todo = {**{n: ("model", f) for n, f in ON_MODELS.items()}, **{n: ("read", f) for n, f in READS.items()}}
    todo |= {f"write {n}": ("write", f) for n, f in WRITES.items()}
    moved = 0
    for _ in range(4):
        torch._dynamo.reset()
        model, twin = stack(), stack()
        if rng.random() < 0.7:
            offload(model, min_bytes=MIN_BYTES)
        run = compiled(model)
        for name in rng.choices(sorted(todo), k=18):
            kind, work = todo[name]
            target = rng.choice(NAMES)
            found = []
            for m in (model, twin):
                torch.manual_seed(1)
                found.append(work(m if kind == "model" else m.get_parameter(target)))
            if kind == "read":
                assert same(*found), name
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)), name
            if rng.random() < 0.4:
                x = torch.randn(4, 8)
                assert torch.equal(run(x), twin(x)), name
                moved += sum(p.plan.moved_bytes for p in programs(model))
        restore(model)
        assert not any(isinstance(p, HostWeight) for p in model.parameters())
    assert moved > 0


@pytest.mark.parametrize("pack", [False, True])
def test_nothing_ends_the_process(tmp_path: Path, pack: bool) -> None:
    """Each of fifty hostile reads and writes is right, or an error, and the model can be restored."""
    said = tmp_path / "said"
    assert run_all(attempt_all, str(said), pack, ranks=1) == [0], said.read_text()[-500:]
    lines = said.read_text().splitlines()
    assert [line.partition(": ")[0] for line in lines] == [*ATTEMPTS]
    assert "data_ptr: ChunkflowError: data_ptr() needs the memory of blocks.0.up.weight on cpu, but" in lines[0]


def test_a_write_waits_for_the_steps_of_other_threads(no_grad: None) -> None:
    model, twin = pair()
    run, x = compiled(model), torch.randn(4, 8)
    weight, other = model.blocks[1].up.weight, twin.blocks[1].up.weight
    values = [torch.full_like(other, 0.1), torch.full_like(other, -0.2)]
    right = [twin(x) for value in values if other.copy_(value) is other]
    weight.copy_(values[0])
    run(x)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.extend(_steps(run, x, 60)))
    thread.start()
    writes = 0
    while thread.is_alive():
        writes += 1
        weight.copy_(values[writes % 2])
    thread.join()
    assert len(found) == 60 and writes > 5
    assert all(any(torch.equal(y, r) for r in right) for y in found), "a step read a weight that was half written"


def _steps(run: nn.Module, x: torch.Tensor, count: int) -> list[torch.Tensor]:
    with torch.no_grad():
        return [run(x).clone() for _ in range(count)]
