"""Hoisting on a card: the same bits as unhoisted, rows as inputs of a graph, and how often the host reads values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_gpu import MIB, streamed
from torch import nn

from chunkflow_compile import ChunkflowError, programs
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.runtime.cuda_graphs import PASSES
from chunkflow_compile.runtime.rows import RowStatistics

from . import control
from .test_captured import on_cuda

# The text has more bytes than the result, so it is not slow.
SIZE = Size(layers=2, singles=2, heads=4, head_dim=32, height=8, width=8, text=64)
READ = "copies to the host"


def hoisted(family: str, **options: Any) -> tuple[nn.Module, Any, Any]:
    """A hoisted model, the compiled function, and one that computes the same with all weights on the device."""
    given: dict[str, Any] = {
        "policy": "chunkflow",
        "weight_memory": 3 * MIB,
        "group_bytes": 1 << 14,
        "chunk_bytes": 1 << 12,
    }
    return streamed(lambda: small_model(family, SIZE), hoist=True, **given, **options)


def rows_of(model: nn.Module) -> RowStatistics:
    placement = placement_of(model)
    assert placement is not None
    (preamble,) = placement.preambles
    (found,) = preamble.statistics.values()
    return found


def generation(family: str, seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """The inputs of each step, as the family's pipeline passes them: of all but latent and timestep the same objects."""
    given = on_cuda(small_inputs(family, SIZE, seed))
    schedule = torch.linspace(1000, 20, 28, device="cuda")
    for step in range(steps):
        latent = on_cuda(small_inputs(family, SIZE, 100 * seed + step))["hidden_states"]
        t = schedule[step].expand(1)
        yield {**given, "hidden_states": latent, "timestep": t if family == "hunyuanvideo" else t / 1000}


@pytest.mark.parametrize("family", ["flux", "qwen-image"])
@pytest.mark.parametrize("cudagraphs", [False, True])
def test_equal_to_unhoisted(family: str, cudagraphs: bool) -> None:
    """Hits and misses, however far the card lags.  As graphs, rows are copied to where these read them, by the launch."""
    model, run, right = hoisted(family, cudagraphs=cudagraphs)
    control.settings(lag=400)
    for seed in (1, 2):
        for step, inputs in enumerate(generation(family, seed, PASSES + 3)):
            with control.counted() as calls:
                y = run(**inputs)
            assert torch.equal(y[0], right(**inputs)[0])
            launched = cudagraphs and (seed > 1 or step >= PASSES)
            assert calls.get("cudaGraphLaunch", 0) == launched
    found, (main,) = rows_of(model), programs(model)
    assert main.plan.moved_bytes > 0
    assert main.call.captures.launches == (PASSES + 6 if cudagraphs else 0)
    # the first generation has its timesteps one by one; the second knows them
    assert found.misses == PASSES + 3 + (family == "flux") and found.hits == 2 * (PASSES + 3) - found.misses


@pytest.mark.parametrize("family", ["flux", "qwen-image"])
def test_the_host_reads_values_once_a_call(family: str) -> None:
    model, run, _ = hoisted(family)
    for step, inputs in enumerate(generation(family, 1, 6)):
        before = rows_of(model).transfers if step else 0
        with control.counted() as calls:
            run(**inputs)
        assert calls[READ] == rows_of(model).transfers - before == 1


def test_the_host_reads_a_schedule_once() -> None:
    """Of a timestep that is a view of it, as HunyuanVideo's pipeline passes it, and those of Wan and SD3."""
    model, run, right = hoisted("hunyuanvideo")
    for step, inputs in enumerate(generation("hunyuanvideo", 1, 6)):
        with control.counted() as calls:
            y = run(**inputs)
        assert calls.get(READ, 0) == rows_of(model).transfers - (step > 0) == (not step)
        assert torch.equal(y[0], right(**inputs)[0])
    found = rows_of(model)
    assert (found.misses, found.hits) == (1, 5)


def test_a_capture_of_the_user_goes_on_after_the_refusal() -> None:
    """A read of values would end it."""
    _, run, right = hoisted("flux")
    first, second = generation("flux", 1, 2)
    assert torch.equal(run(**first)[0], right(**first)[0])
    graph, x, y = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(ChunkflowError, match="The caller records a CUDA graph"):
            run(**second)
        y.copy_(x)
    graph.replay()
    assert torch.equal(x, y)
    assert torch.equal(run(**second)[0], right(**second)[0])
