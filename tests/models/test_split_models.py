"""Models whose blocks are split into slices of their tokens: the same bits, whatever else a call has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import EAGER
from helpers import check_small, memory_named, small_twins
from torch.profiler import ProfilerActivity, profile

import chunkflow_compile
from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.catalog.sizes import Size
from chunkflow_compile.catalog.small import small_inputs, small_model
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.pipeline import Settings, choose_cut, make_cut, make_plan, whole_blocks
from chunkflow_compile.passes.placement.splitting import splits

# Most GiB of activations with slices, and how many times as long as with whole blocks a forward may then take.
FIGURES = {"wan2.2-ti2v-5b": (1.7, 1.09), "wan2.2-t2v-a14b": (2.8, 1.01), "hunyuanvideo": (3.5, 1.02)}
# Text of as many tokens as a slice has, because GEMMs of a few rows have other bits on a CPU.
SIZE = Size(layers=2, singles=1, height=16, width=16, text=64)
FEWER = replace(SIZE, height=8)

pytestmark = pytest.mark.usefixtures("no_grad")


def compiled(family: str, dynamic: bool | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """A small model, what it is compiled to with its tokens in two slices, and an equal one."""
    model, twin = small_twins(family, SIZE)
    chosen = {**EAGER, "slowdown": None, "weight_memory": "1MiB", "min_bytes": 0, "split": 2, **options}
    return model, torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=dynamic, options=chosen), twin


def repeats(model: Any) -> set[int]:
    return {
        region.repeat for program in chunkflow_compile.programs(model) for region in program.program.problem.regions
    }


@pytest.mark.parametrize(
    "family", ["wan", *(pytest.param(name, marks=pytest.mark.long) for name in ("flux", "hunyuanvideo", "qwen-image"))]
)
def test_families(family: str) -> None:
    model, run, twin = compiled(family)
    check_small(run, twin, family, SIZE, range(3))
    (program,) = chunkflow_compile.programs(model)
    assert repeats(model) == {1, 2} and program.call.counts.moved_bytes > 0
    # The stream of HunyuanVideo is transposed until its first single block.
    assert ("_rows" in str(program.program)) == (family == "hunyuanvideo")


@pytest.mark.long
@pytest.mark.parametrize("family", ["wan", "hunyuanvideo"])
def test_the_allocator_needs_what_is_predicted(family: str) -> None:
    """By the profile of torch's allocator, in which the inputs of the call are not."""
    least = list[int]()
    for split in (1, 4):
        torch._dynamo.reset()
        size = replace(SIZE, height=32, width=32)
        model = small_model(family, size)
        chosen = {**EAGER, "slowdown": None, "weight_memory": "1MiB", "min_bytes": 0, "split": split}
        run = torch.compile(model, backend="chunkflow", fullgraph=True, options=chosen)
        inputs = small_inputs(family, size, 0)
        run(**inputs)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run(**inputs)
        most = now = sum(value.nbytes for value in inputs.values() if torch.is_tensor(value))
        for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                now += event.nbytes()
                most = max(most, now)
        (program,) = chunkflow_compile.programs(model)
        assert program.program.problem.live_bytes == pytest.approx(most, rel=0.02)
        least.append(most)
    assert least[1] < 0.7 * least[0]


def test_what_changes_between_calls() -> None:
    """The host runs ahead, evicted weights are overwritten, a weight is written, the plan changes, and so does the size."""
    model, run, twin = compiled("wan", dynamic=False, debug=["poison", "threads"])
    check_small(run, twin, "wan", SIZE, range(2))
    for each in (model, twin):
        each.blocks[1].ffn.net[2].weight.mul_(1.5)
    check_small(run, twin, "wan", SIZE, range(2))
    chunkflow_compile.replan(model, weight_memory="2MiB")
    check_small(run, twin, "wan", SIZE, range(2))
    check_small(run, twin, "wan", FEWER, range(2))
    check_small(run, twin, "wan", SIZE, range(1))
    assert len(chunkflow_compile.programs(model)) == 2 and repeats(model) == {1, 2}


@pytest.mark.long
def test_symbolic_sizes_stay_whole() -> None:
    model, run, twin = compiled("wan", dynamic=True)
    check_small(run, twin, "wan", SIZE, range(1))
    check_small(run, twin, "wan", FEWER, range(1))
    assert repeats(model) == {1}


def test_packed_weights() -> None:
    model, twin = (each.bfloat16() for each in small_twins("wan", SIZE))
    chosen = {**EAGER, "slowdown": None, "weight_memory": "2MiB", "min_bytes": 0, "split": 2, "pack": True}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=chosen)
    for seed in range(2):
        inputs = small_inputs("wan", SIZE, seed)
        inputs |= {n: v.bfloat16() for n, v in inputs.items() if torch.is_tensor(v) and v.is_floating_point()}
        assert torch.equal(run(**inputs)[0], twin(**inputs)[0])
    (program,) = chunkflow_compile.programs(model)
    assert repeats(model) == {1, 2} and any(w.source.compressed for w in program.program.problem.weights)


@pytest.mark.long
def test_compiled_kernels() -> None:
    """Within the tolerance of kernels that are compiled for other sizes."""
    model, run, twin = compiled("wan", lowering="inductor")
    for seed in range(2):
        inputs = small_inputs("wan", SIZE, seed)
        torch.testing.assert_close(run(**inputs)[0], twin(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert repeats(model) == {1, 2}


def test_the_budget_of_weights_and_activations_splits() -> None:
    """Far too little memory is refused with the minimum, which is that with slices; with much, blocks stay whole."""
    _, run, twin = compiled("wan", memory="100KiB", weight_memory=None, split="auto")
    with pytest.raises(Exception, match=r"memory=100.0 KiB is too little: .* for activations") as told:
        run(**small_inputs("wan", SIZE, 0))
    least = memory_named(told.value)
    for memory in (least, 8 << 20):
        torch._dynamo.reset()
        model, run, twin = compiled("wan", memory=memory, weight_memory=None, split="auto")
        for seed in range(2):
            inputs = small_inputs("wan", SIZE, seed)
            torch.testing.assert_close(run(**inputs)[0], twin(**inputs)[0], rtol=1e-4, atol=1e-5)
        (program,) = chunkflow_compile.programs(model)
        assert program.program.plan.device_bytes + program.program.problem.live_bytes <= memory
        assert (max(repeats(model)) > 1) == (memory == least)


def test_blocks_that_are_compiled_by_themselves() -> None:
    """Their streams are inputs, which belong to the caller: they are not overwritten."""
    model, twin = small_twins("wan", SIZE)
    chosen = {**EAGER, "slowdown": None, "weight_memory": "1MiB", "min_bytes": 0, "split": 2}
    chunkflow_compile.compile(model, **chosen)
    check_small(model, twin, "wan", SIZE, range(3))
    assert repeats(model) == {1, 2}


def two_blocks(name: str) -> tuple[Cut, Settings]:
    """Two blocks of each type of a preset, to which all others are equal, on an H100 with enough memory for the weights."""
    known = PRESETS[name]
    layers = {field: 2 for field in ("num_layers", "num_single_layers") if field in known.config}
    finest = make_cut(replace(known, config={**known.config, **layers}).trace())
    return finest, Settings(hardware=load_profile("h100-pcie"), goal=Goal(memory=finest.problem.total_bytes))


@pytest.mark.long
@pytest.mark.parametrize("name", FIGURES)
def test_activations_of_videos_in_slices(name: str) -> None:
    gib, times = FIGURES[name]
    finest, settings = two_blocks(name)
    whole = whole_blocks(finest, settings)
    found = next(cut for cut in splits(whole) if cut.problem.live_bytes <= gib * 2**30)
    steps = [step.step_s for cut in (found, whole) if (step := make_plan(cut.problem, settings).predicted)]
    assert steps[0] <= times * steps[1]


@pytest.mark.long
@pytest.mark.parametrize("name", ["flux.1-dev", "qwen-image"])
def test_images_stay_whole(name: str) -> None:
    """With half of the weights, and activations of whole blocks."""
    finest, settings = two_blocks(name)
    goal = Goal(memory=finest.problem.total_bytes // 2 + finest.problem.live_bytes, activations=True)
    found = choose_cut(finest.traced, replace(settings, goal=goal))
    assert {region.repeat for region in found.problem.regions} == {1}
