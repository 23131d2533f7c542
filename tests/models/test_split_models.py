"""Models whose blocks are split into slices of their tokens: the same bits, whatever else a call has."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from adapters import Library
from conftest import EAGER, FAST
from helpers import (
    Block,
    Combined,
    InTurn,
    Stack,
    allocated_peak,
    check_small,
    check_steps,
    memory_named,
    small_twins,
    twins,
)
from pipelines import WAN, Allocator, Applied, bytes_moved, bytes_read, expected
from torch.profiler import ProfilerActivity, profile

import chunkflow_compile
from chunkflow_compile import ChunkflowError, enable_adapters, units
from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.catalog.sizes import Size
from chunkflow_compile.catalog.small import small_inputs
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import choose_cut, make_cut, whole_blocks
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.placement.splitting import splits
from chunkflow_compile.passes.planning import Settings, make_plan
from chunkflow_compile.placed.notes import hoisting_notes, packing_notes
from chunkflow_compile.placed.placement import placement_of

# Most GiB of activations with slices, and how many times as long as with whole blocks a forward may then take.
FIGURES = {"wan2.2-ti2v-5b": (1.7, 1.09), "wan2.2-t2v-a14b": (2.8, 1.01), "hunyuanvideo": (3.5, 1.02)}
# Text of as many tokens as a slice has, because GEMMs of a few rows have other bits on a CPU.
SIZE = Size(layers=2, singles=1, height=16, width=16, text=64)
FEWER = replace(SIZE, height=8)

SLICED = {**EAGER, "slowdown": None, "weight_memory": "1MiB", "min_bytes": 0, "split": 2}

pytestmark = pytest.mark.usefixtures("no_grad")


def compiled(family: str, size: Size = SIZE, dynamic: bool | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """A small model, what it is compiled to with its tokens in two slices, and an equal one."""
    model, twin = small_twins(family, size)
    chosen = {**SLICED, **options}
    return model, torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=dynamic, options=chosen), twin


def repeats(model: Any) -> set[int]:
    return {
        region.repeat for program in chunkflow_compile.programs(model) for region in program.program.problem.regions
    }


@pytest.mark.long  # in make test, wan is combined with other options below
@pytest.mark.parametrize("family", ["wan", "flux", "hunyuanvideo", "qwen-image"])
def test_families(family: str) -> None:
    model, run, twin = compiled(family)
    check_small(run, twin, family, SIZE, range(3))
    (program,) = chunkflow_compile.programs(model)
    assert repeats(model) == {1, 2} and program.call.counts.moved_bytes > 0
    # The stream of HunyuanVideo is transposed until its first single block.
    assert ("_rows" in str(program.program)) == (family == "hunyuanvideo")


@dataclass(frozen=True)
class OfSizes(Combined):
    """``sizes``: the sizes of the calls."""

    sizes: tuple[Size, ...] = (SIZE,)


def load_an_adapter(model: Any) -> None:
    enable_adapters(model, rank=4)
    model.load_lora_adapter(Library(small_twins("wan", SIZE)[1]).adapter(0, 4), adapter_name="a")


COMBINED = {
    "threads, two sizes": OfSizes({"debug": ["poison", "threads"]}, sizes=(SIZE, FEWER, SIZE)),
    "packing, hoisting": OfSizes({"pack": True, "hoist": True}, dtype=torch.bfloat16),
    "adapters, hoisting": OfSizes({"hoist": True}, prepare=load_an_adapter),
    "blocks, hoisting, two sizes": OfSizes({"hoist": True}, "qwen-image", by_kind=True, sizes=(SIZE, FEWER, SIZE)),
}


@pytest.mark.long  # make test combines slices with threads, hoisting and two ranks below
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in COMBINED.items()])
def test_what_slices_are_combined_with(case: Combined) -> None:
    """A weight is written and the plan changes between calls, whose bits are those of an equal model."""
    model, run, twin = case.placed(SIZE, SLICED)

    def check(*sizes: Size) -> None:
        for size, seed in itertools.product(sizes, range(2)):
            inputs = case.inputs(size, seed)
            assert torch.equal(run(**inputs)[0], twin(**inputs)[0]), (size, seed)

    check(SIZE)
    for each in (model, twin):
        next(w for n, w in each.named_parameters() if re.search(r"blocks\.1\..*net\.2\..*weight", n)).mul_(1.5)
    check(SIZE)
    chunkflow_compile.replan(model, weight_memory="2MiB")
    check(*case.sizes)
    assert bool(hoisting_notes(model)) == ("hoist" in case.options)
    assert bool(packing_notes(model)) == ("pack" in case.options)
    assert repeats(model) == {1, 2}
    check_bytes(model, lambda: check(SIZE))


def check_bytes(model: Any, two_calls: Callable[[], None]) -> None:
    """Calls move the bytes of a plan."""
    placement = placement_of(model)
    assert placement is not None
    before = placement.store.counts.moved_bytes
    two_calls()
    plans = [each.plan for each in chunkflow_compile.cycles(model) or chunkflow_compile.programs(model)]
    assert placement.store.counts.moved_bytes - before in {2 * plan.moved_bytes for plan in plans} - {0}


def sliced_on_a_rank(rank: int) -> None:
    size = replace(SIZE, layers=1)
    model, twin = small_twins("wan", size, degree=2)
    options = {**SLICED, "hoist": True, "debug": ["poison", "threads"]}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    check_small(run, twin, "wan", size, range(2))
    for each in (model, twin):
        each.get_parameter("blocks.0.ffn.net.2.weight").mul_(1.5)
    check_small(run, twin, "wan", size, range(2))
    chunkflow_compile.replan(model, weight_memory="300KiB")
    check_small(run, twin, "wan", size, range(2))
    assert repeats(model) == {1, 2} and hoisting_notes(model)
    check_bytes(model, lambda: check_small(run, twin, "wan", size, range(2)))


def test_slices_on_two_ranks(on_ranks: Callable[..., None]) -> None:
    """With hoisting.  A weight is written and the plan changes between calls, whose bits are those of an equal model."""
    on_ranks(sliced_on_a_rank)


@pytest.mark.parametrize("family", ["blocks", *(pytest.param(f, marks=pytest.mark.long) for f in ("wan", "flux"))])
def test_the_peak_of_the_allocator_falls_as_predicted(family: str) -> None:
    """Of a call, by the profile of torch's allocator, which does not count what the caller and the model hold."""
    size, peaks = replace(SIZE, layers=1, height=32, width=32), list[tuple[int, int]]()
    for split in (1, 2, *([4] if family == "flux" else [])):
        torch._dynamo.reset()
        if family == "blocks":
            model, twin = twins(lambda: InTurn(Block(64) for _ in range(2)))
            run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**SLICED, "split": split})
            inputs = {"x": torch.randn(1, 256, 64)}
        else:
            model, run, twin = compiled(family, size, split=split)
            inputs = small_inputs(family, size, 0)
        assert torch.equal(run(**inputs)[0], twin(**inputs)[0])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            run(**inputs)
        assert max(repeats(model)) == split
        (program,) = chunkflow_compile.programs(model)
        peaks.append((program.program.problem.live_bytes, allocated_peak(profiled)))
    (whole, measured), *split_peaks = peaks
    for predicted, peak in split_peaks:
        assert whole - predicted == pytest.approx(measured - peak, rel=0.1) and peak < 0.95 * measured


@pytest.mark.long
def test_symbolic_sizes_stay_whole() -> None:
    model, run, twin = compiled("wan", dynamic=True)
    check_small(run, twin, "wan", SIZE, range(1))
    check_small(run, twin, "wan", FEWER, range(1))
    assert repeats(model) == {1}


@pytest.mark.long
def test_compiled_kernels() -> None:
    """Within the tolerance of kernels that are compiled for other sizes."""
    model, run, twin = compiled("wan", lowering="inductor")
    for seed in range(2):
        inputs = small_inputs("wan", SIZE, seed)
        torch.testing.assert_close(run(**inputs)[0], twin(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert repeats(model) == {1, 2}


def test_the_budget_of_weights_and_activations_splits() -> None:
    """An error states the minimum, which is that with slices.  With more memory, blocks stay whole, also when it shrinks."""

    def compiled_in(memory: int) -> tuple[Any, Any, Any]:
        torch._dynamo.reset()
        model, twin = twins(lambda: InTurn(Block(64) for _ in range(2)))
        options = {**SLICED, "memory": memory, "weight_memory": None, "split": "auto"}
        return model, torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=False, options=options), twin

    shape = (1, 256, 64)
    _, run, _ = compiled_in(60 << 10)
    with pytest.raises(Exception, match=r"memory=60.0 KiB is too little: .* for activations") as told:
        run(torch.randn(shape))
    least = memory_named(told.value)
    for memory in (least, 8 << 20):
        model, run, twin = compiled_in(memory)
        check_steps(run, twin, 2, shape)
        (program,) = chunkflow_compile.programs(model)
        assert program.program.plan.device_bytes + program.program.problem.live_bytes <= memory
        assert (max(repeats(model)) > 1) == (memory == least)
    with pytest.raises(ChunkflowError, match=r"Blocks keep the number of slices .* with this budget to split them"):
        chunkflow_compile.replan(model, memory=least)
    check_steps(run, twin, 1, shape)


@pytest.mark.long  # in make test, sizes of which one is in slices are compiled so below
@pytest.mark.parametrize("options", [{"split": 2}, {"memory": "500KiB", "weight_memory": None, "split": "auto"}])
def test_blocks_that_are_compiled_by_themselves(options: dict[str, Any]) -> None:
    """Their streams are inputs, which belong to the caller: they are not overwritten."""
    model, twin = small_twins("wan", SIZE)
    chunkflow_compile.compile(model, dynamic=False, **(SLICED | options))
    for seed in range(3):
        inputs = small_inputs("wan", SIZE, seed)
        atol = 0.0 if options["split"] == 2 else 1e-5  # the budget needs slices of few rows
        torch.testing.assert_close(model(**inputs)[0], twin(**inputs)[0], rtol=0, atol=atol)
    assert {1} < repeats(model)


@pytest.mark.long
def test_blocks_of_a_larger_size_leave_less_for_weights() -> None:
    """The plan of all blocks has room for the activations of each size that was called."""
    model, twin = small_twins("wan", SIZE)
    options = {"memory": "700KiB", "weight_memory": None, "split": 1}
    chunkflow_compile.compile(model, dynamic=False, **(SLICED | options))
    planned = []
    for size in (FEWER, SIZE, FEWER):
        for seed in range(4):
            inputs = small_inputs("wan", size, seed)
            assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
        live = max(p.program.problem.live_bytes for p in chunkflow_compile.programs(model))
        (cycle,) = chunkflow_compile.cycles(model)
        assert cycle.plan.device_bytes + live <= 700 << 10
        planned.append(cycle.plan.device_bytes)
    assert planned[0] > planned[1] == planned[2]


def test_sizes_of_which_one_is_in_slices_have_a_cycle_each() -> None:
    """The other parts of the model are calls of both cycles."""
    model, twin = small_twins("wan", SIZE)
    options = {"memory": "550KiB", "weight_memory": None, "split": "auto"}
    chunkflow_compile.compile(model, dynamic=False, **(SLICED | options))
    for size in (FEWER, SIZE, FEWER, SIZE):
        for seed in range(3):
            inputs = small_inputs("wan", size, seed)
            torch.testing.assert_close(model(**inputs)[0], twin(**inputs)[0], rtol=1e-4, atol=1e-5)
    assert repeats(model) > {1}
    found = chunkflow_compile.cycles(model)
    assert len(found) == 2 and len(found[0].keys) == len(found[1].keys)
    for cycle, other in (found, found[::-1]):
        assert 0 < len({*cycle.keys} - {*other.keys}) < len(cycle.keys)
    jumps = sum(cycle.jumps for cycle in found)
    inputs = small_inputs("wan", SIZE, 0)
    model(**inputs)
    assert sum(cycle.jumps for cycle in found) == jumps, "calls of one size follow their own cycle"


def test_a_failed_call_costs_no_residency() -> None:
    """The plan of all blocks needs no room for the activations of a size whose call failed after the first blocks had run."""
    model, twin = twins(lambda: Stack(2, 64))
    options = {"memory": "420KiB", "weight_memory": None, "split": 1, "hardware": FAST}
    chunkflow_compile.compile(model, dynamic=False, **(SLICED | options))

    def planned(rows: int) -> tuple[int, int]:
        check_steps(model, twin, 4, (rows, 8))
        (cycle,) = chunkflow_compile.cycles(model)
        return cycle.plan.device_bytes, len(chunkflow_compile.programs(model))

    def fail(*_: Any) -> None:
        raise KeyError("of the user")

    before = planned(32)
    handle = model.head.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="of the user"):
        model(torch.randn(256, 8))
    handle.remove()
    device_bytes, count = planned(32)
    assert count == before[1] and device_bytes > before[0] - 4096, "as before, but for a chunk"
    assert planned(256)[0] < before[0], "a call of this size that succeeds leaves less for weights"


def test_a_budget_that_needs_slices_where_sizes_are_symbolic() -> None:
    """The graph is compiled for each size, in slices."""
    model = InTurn(Block(64) for _ in range(2)).eval()
    options = {"memory": "100KiB", "lowering": "eager", "min_bytes": 64}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=True, options=options)
    for tokens in (48, 64):
        x = torch.randn(1, tokens, 64)
        torch.testing.assert_close(run(x), model(x))
    assert len(chunkflow_compile.programs(model)) == 2 and min(repeats(model)) > 1


# A generation of 128 tokens, without the decoder.
TOKENS = {"height": 128, "width": 128, "num_inference_steps": 2, "output_type": "latent"}


def test_a_pipeline(applied: Applied) -> None:
    """The transformer of a pipeline is split if its activations with whole blocks exceed the budget."""
    pipe, budget = applied(memory="500KiB")
    phase = budget.phase_of(pipe.transformer)
    for seed in range(2):
        assert torch.equal(WAN.generate(pipe, seed, **TOKENS), expected("wan", seed, **TOKENS))
    assert repeats(pipe.transformer) == {1, 8} and bytes_moved(phase) >= bytes_read(phase) > 0
    assert repeats(pipe.text_encoder) == {1}, "it runs once per generation"
    live = max(p.program.problem.live_bytes for p in chunkflow_compile.programs(pipe.transformer))
    assert phase.activations == live + sum(p.kept for p in budget.phases) == budget.usable - phase.budget + phase.kept
    Allocator(budget, transformer=150_000)
    assert torch.equal(WAN.generate(pipe, **TOKENS), expected("wan", **TOKENS))
    text = str(chunkflow_compile.explain(pipe, details=True))
    assert "transformer: blocks run in 8 slices of the tokens" in text
    assert f"transformer: activations: {units.size(live)} predicted, {units.size(150_000)} measured" in text


@pytest.mark.long
def test_a_pipeline_with_too_little_memory(applied: Applied) -> None:
    """Before a weight of the blocks moves it is refused, with the memory in which they run in as many slices as possible."""
    pipe, _ = applied(memory="400KiB")
    said = r"memory=400.0 KiB is too little for transformer \(WanTransformer3DModel\): one .* needs .*Call restore"
    with pytest.raises(ChunkflowError, match=said) as told:
        WAN.generate(pipe, **TOKENS)
    moved = {name for p in chunkflow_compile.programs(pipe.transformer) for name in p.buffers}
    assert not any(name.startswith("blocks") for name in moved)
    chunkflow_compile.restore(pipe)
    pipe, _ = applied(memory=memory_named(told.value))
    got = WAN.generate(pipe, **TOKENS)
    assert max(repeats(pipe.transformer)) >= 8, "slices of fewer than 16 tokens have other bits on a CPU"
    torch.testing.assert_close(got, expected("wan", **TOKENS), rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_sizes_of_a_pipeline(applied: Applied, caplog: pytest.LogCaptureFixture) -> None:
    """The second size would leave its tokens open: if whole blocks do not fit there, it is compiled by itself, in slices."""
    pipe, _ = applied(memory="600KiB")
    for height in (64, 128):
        assert max(repeats(pipe.transformer), default=1) == 1
        call = {**TOKENS, "height": height}
        assert torch.equal(WAN.generate(pipe, **call), expected("wan", **call))
    assert repeats(pipe.transformer) == {1, 2}
    assert "is compiled for each size: blocks can be split into slices only at fixed sizes" in caplog.text


@pytest.mark.long
def test_slices_of_a_pipeline_as_the_user_says(applied: Applied) -> None:
    """Only of what runs in every step: text encoders stay whole."""
    pipe, _ = applied(memory="4MiB", split=2)
    assert torch.equal(WAN.generate(pipe, **TOKENS), expected("wan", **TOKENS))
    assert repeats(pipe.transformer) == {1, 2} and repeats(pipe.text_encoder) == {1}


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
