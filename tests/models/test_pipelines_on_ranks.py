"""A pipeline whose transformer is split over two ranks by Ulysses; each rank streams all of its components."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_pipelines import small_pipeline
from test_pipelines import EAGER, WAN, models, same_weights

from chunkflow_compile import ChunkflowError, apply, cycles, programs, remove
from chunkflow_compile.model.placement import placement_of
from chunkflow_compile.models.ulysses import enable_ulysses
from chunkflow_compile.pipeline.budget import Budget, Phase, budget_of
from chunkflow_compile.weights.host_weight import HostWeight

pytest.importorskip("transformers")


@pytest.mark.long
def test_a_pipeline_at_ulysses_2(on_ranks: Callable[..., None]) -> None:
    on_ranks(on_rank)


def on_rank(rank: int) -> None:
    """Several generations, equal to the plain pipeline on the same ranks; each phase moves what its plan says."""
    os.environ["CHUNKFLOW_PROGRESS"] = "0"
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    for p in (pipe, twin):
        enable_ulysses(p.transformer, 2)
    apply(pipe, memory="512KiB", **EAGER)  # less than any component has
    budget = budget_of(pipe)
    assert budget is not None and {phase.name for phase in budget.phases} == set(models(pipe))
    seen = []
    for seed, changed in enumerate([{}, {"prompt": "two cats"}, {"num_inference_steps": 2}]):
        want, got = WAN.generate(twin, seed, **changed), WAN.generate(pipe, seed, **changed)
        assert torch.equal(got, want), f"generation {seed} differs from the plain pipeline's on rank {rank}"
        seen.append(want)
        learn(budget)
    assert not torch.equal(seen[0], seen[1])
    for phase in budget.phases:
        assert phase.streamed > 0.9 * sum(t.nbytes for t in phase.weights)
        check_transfers(phase, generations=len(seen))
    collectives = sum(m.collectives for p in programs(pipe.transformer) for m in p.measurements)
    assert collectives > 0, "the ranks shared the sequence"
    check_out_of_memory(pipe)
    assert torch.equal(WAN.generate(pipe), seen[0])
    remove(pipe)
    assert same_weights(pipe, twin) and budget_of(pipe) is None
    assert not any(isinstance(t, HostWeight) for m in models(pipe).values() for t in m.parameters())
    assert torch.equal(WAN.generate(pipe), seen[0])


def learn(budget: Budget) -> None:
    """Wait for the cycles that are being planned."""
    for phase in budget.phases:
        if phase.arena.cycles is not None:
            phase.arena.cycles.wait_planned()


def check_transfers(phase: Phase, generations: int) -> None:
    """Count the bytes of a phase against its plan, and against the weights that it reads."""
    if phase.name == "vae":  # runs eagerly, and each op fetches its weights
        fetched = placement_of(phase.root).store.fetched_bytes
        decoder = sum(t.nbytes for t in phase.root.decoder.parameters() if isinstance(t, HostWeight))
        assert phase.calls == generations and fetched >= generations * decoder > 0
        return
    steps = [m for program in programs(phase.root) for m in program.measurements]
    read = {id(buffer): buffer.host.nbytes for program in programs(phase.root) for buffer in program.buffers.values()}
    assert sum(m.moved_bytes + m.primed_bytes for m in steps) >= sum(read.values()) > 0, phase.name
    (route,) = cycles(phase.root)
    last = route.measurements[-1]
    assert (last.moved_bytes, last.primed_bytes) == (route.cycle.plan.moved_bytes, 0), phase.name
    assert last.moved_bytes > 0 and route.jumps == 0, phase.name


def check_out_of_memory(pipe: Any) -> None:
    """A rank does not run a call again that the others do not: the first failure is an error, which names the component."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    hook = pipe.vae.decoder.mid_block.register_forward_pre_hook(fail)
    with pytest.raises(ChunkflowError, match=r"vae \(AutoencoderKLWan\) does not fit .* no room"):
        WAN.generate(pipe)
    hook.remove()
    assert [p.retries for p in budget_of(pipe).phases] == [0, 0, 0]
