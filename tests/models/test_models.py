"""Diffusers models, streamed: equal bit for bit to the same models with resident weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import OPTIONS, RESIDENT
from helpers import WIDE
from torch import nn

import chunkflow_compile
from chunkflow_compile.catalog.small import SMALL_MODELS, Size, small_inputs, small_model
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.passes.program.cycle import prefetches
from chunkflow_compile.placed.offload import offload, programs
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.leaves import tensors_of

STEPS = 4
# Inductor takes half a minute for the regions of a family.  make test runs one family on two ranks without
# Inductor; make test-all runs the others.
SHORT = {("wan", "eager", 2)}
CASES = [
    pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
    for case in itertools.product(sorted(SMALL_MODELS), ("eager", "inductor"), (1, 2))
]


def run_and_compare(name: str, lowering: str, degree: int) -> None:
    """Runs a model streamed for some steps with changing inputs, and checks outputs and bytes.

    Regions that are not compiled give the numbers of the model itself; compiled ones those of a resident program.
    """
    size, chunk_bytes = (
        (WIDE, 1 << 18) if lowering == "inductor" and name == "wan" else (Size(layers=2, singles=1), 4096)
    )
    if (name, lowering, degree) in SHORT:  # the harder case: the ranks split the timesteps too
        size = replace(size, layers=1, timestep="token")

    def make() -> nn.Module:
        model = small_model(name, size)
        if degree > 1:
            enable_ulysses(model, degree)
        return model

    def compiled(model: nn.Module, options: dict[str, Any]) -> nn.Module:
        options = {**options, "chunk_bytes": chunk_bytes, "lowering": lowering}
        return torch.compile(model, backend="chunkflow", fullgraph=True, options=options)

    streamed, eager = make(), make()
    offload(streamed, min_bytes=OPTIONS["min_bytes"])
    run, reference = compiled(streamed, OPTIONS), eager
    if lowering == "inductor":
        reference = compiled(make(), RESIDENT)
    for step in range(STEPS):
        inputs = small_inputs(name, size, step)
        output = run(**inputs)[0]
        assert torch.equal(output, reference(**inputs)[0]), f"step {step} differs from resident weights"
        torch.testing.assert_close(output, eager(**inputs)[0], atol=2e-5, rtol=1e-4)
    (runner,) = programs(streamed)
    check_transfers(runner)
    check_slots(streamed, runner)
    if lowering == "inductor":
        assert programs(reference)[0].plan.moved_bytes == 0


def check_transfers(runner: chunkflow_compile.runtime.single_call.SingleCall) -> None:
    """Count the bytes: an offloader that does nothing would pass the test of outputs."""
    plan, steps = runner.plan, runner.measurements
    assert plan.moved_bytes > 0.9 * runner.program.problem.total_bytes
    assert [m.moved_bytes for m in steps] == [plan.moved_bytes] * len(steps)
    assert steps[0].primed_bytes > 0, "the first weights are prefetched by the step before"
    assert [m.primed_bytes for m in steps[1:]] == [0] * (len(steps) - 1)
    runner.executor.device.copy.synchronize()
    assert runner.executor.traffic.copied_bytes == plan.moved_bytes * len(steps) + steps[0].primed_bytes


def check_slots(model: nn.Module, runner: chunkflow_compile.runtime.single_call.SingleCall) -> None:
    """If a kernel had written an activation into a slot, its bytes would differ from the weight's."""
    buffers = {buffer.name: buffer for _, t in tensors_of(model) if (buffer := buffer_of(t)) is not None}
    plans, broken, newer = {w.name: w for w in runner.plan.streamed}, set[str](), list[tuple[str, int, int]]()
    for _, op in reversed([*prefetches(runner.program)]):  # what a later copy has overwritten
        begin, end = (plans[op.weight].offset + b for b in runner.plan.span(plans[op.weight], op.first, op.end))
        if any(name != op.weight and a < end and begin < b for name, a, b in newer):
            broken.add(op.weight)
        newer.append((op.weight, begin, end))
    whole = {name: slot for name, slot in runner.executor.binding.slots.items() if name not in broken}
    assert len(whole) >= 3
    for name, slot in whole.items():
        assert bytes(slot.tolist()) == bytes(buffers[name].host.contiguous().view(torch.uint8).flatten().tolist()), name


def on_rank(rank: int, name: str, lowering: str) -> None:
    run_and_compare(name, lowering, 2)


@pytest.mark.parametrize(("name", "lowering", "degree"), CASES)
def test_streams_bitwise_equal_to_resident(
    name: str, lowering: str, degree: int, on_ranks: Callable[..., None], no_grad: None
) -> None:
    """On one rank, and at Ulysses 2."""
    if degree > 1:
        on_ranks(on_rank, name, lowering)
    else:
        run_and_compare(name, lowering, degree)


def on_rank_with_a_timestep_per_token(rank: int) -> None:
    """Beside a model on one rank, to which all tokens of the sequence and their timesteps are given."""
    size = Size(layers=1, timestep="token")
    inputs = small_inputs("wan", size, 1)
    tokens = inputs["timestep"].shape[1]
    inputs["timestep"] *= torch.arange(tokens) / tokens  # each its own: a wrong part of them would show
    whole, split = (small_model("wan", size) for _ in range(2))
    enable_ulysses(split, 2)
    torch.testing.assert_close(split(**inputs)[0], whole(**inputs)[0], atol=2e-5, rtol=1e-4)


def test_a_timestep_per_token_is_split_as_the_tokens_are(on_ranks: Callable[..., None]) -> None:
    on_ranks(on_rank_with_a_timestep_per_token)


def test_ulysses_without_a_process_group_is_refused() -> None:
    said = r"there is none: call torch\.distributed\.init_process_group"
    with pytest.raises(chunkflow_compile.ChunkflowError, match=said):
        enable_ulysses(small_model("wan", Size(layers=1)), 2)
