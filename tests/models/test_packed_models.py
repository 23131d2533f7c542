"""Models whose weights are packed: the same bits as raw ones, in fewer bytes, whatever is done with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import EAGER, FAST, OPTIONS
from helpers import small_twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, cycles, explain, offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_inputs
from chunkflow_compile.passes.packing import Layout
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.host_buffer import HostBuffer

SIZE = Size(layers=2, singles=2)
PACKED: dict[str, Any] = {**EAGER, "pack": True}

pytestmark = pytest.mark.usefixtures("no_grad")


def bf16_twins(family: str) -> tuple[Any, Any]:
    return tuple(model.to(torch.bfloat16) for model in small_twins(family, SIZE))  # type: ignore[return-value]


def inputs_of(family: str, seed: int, size: Size = SIZE) -> dict[str, Any]:
    inputs = small_inputs(family, size, seed)
    floats = {n: v.to(torch.bfloat16) for n, v in inputs.items() if torch.is_tensor(v) and v.is_floating_point()}
    return {**inputs, **floats}


def check(model: Any, twin: Any, family: str, seeds: Iterator[int] | range, size: Size = SIZE) -> None:
    for seed in seeds:
        inputs = inputs_of(family, seed, size)
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0]), seed


def packed_of(model: nn.Module) -> list[HostBuffer]:
    placement = placement_of(model)
    assert placement is not None
    return [buffer for buffer in placement.store.buffers if buffer.packed is not None]


@pytest.mark.parametrize("threads", [False, True], ids=["cpu", "threads"])
@pytest.mark.parametrize("by_kind", [True, False], ids=["by-kind", "whole"])
@pytest.mark.parametrize("family", ["flux", "qwen-image", "wan"])
def test_the_same_bits_in_fewer_bytes(family: str, by_kind: bool, threads: bool) -> None:
    model, twin = bf16_twins(family)
    options = {**EAGER, **({"debug": ["threads", "poison"]} if threads else {})}
    offload(model, min_bytes=options["min_bytes"], pack=True)
    run = (
        chunkflow_compile.compile(model, **options)
        if by_kind
        else torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    )
    check(run, twin, family, range(5))
    packed = packed_of(model)
    assert packed and all(b.nbytes == Layout.of(b.host.numel()).nbytes < b.host.nbytes for b in packed)
    ran = cycles(model)[0] if by_kind else programs(model)[0]
    newest = ran.measurements[-1]
    assert newest.primed_bytes == 0 and newest.moved_bytes == ran.plan.moved_bytes > 0
    planned = {w.name: w for w in ran.cycle.problem.weights}
    for name, buffer in ran.buffers.items():
        assert planned[name].nbytes == buffer.nbytes and bool(planned[name].packed) == (buffer.packed is not None)
    assert f"{len(packed)} of " in str(explain(model)) and "weights are packed" in str(explain(model))
    restore(model)
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor and torch.equal(value, twin.state_dict()[name]), name


def test_through_inductor_as_raw_ones() -> None:
    """Packed or raw, Inductor's code gives the same bits, and a block of each kind is lowered once."""
    raw, model = bf16_twins("flux")
    for each, pack in ((raw, False), (model, True)):
        chunkflow_compile.compile(each, **OPTIONS, pack=pack)
    check(model, raw, "flux", range(4))
    assert packed_of(model) and not packed_of(raw)
    mine, theirs = ({r.key for r in cycles(m)[0].cycle.problem.regions} for m in (model, raw))
    assert len(mine) <= len(theirs) + 2
    assert cycles(model)[0].measurements[-1].moved_bytes < 0.8 * cycles(raw)[0].measurements[-1].moved_bytes


def large(model: nn.Module, number: int = 0) -> nn.Parameter:
    """One of the weights that are packed."""
    buffer = packed_of(model)[number]
    return model.get_parameter(buffer.name)


@pytest.mark.parametrize("by_kind", [True, False], ids=["by-kind", "whole"])
def test_writes_are_packed_again(by_kind: bool) -> None:
    model, twin = bf16_twins("flux")
    chunkflow_compile.compile(model, **PACKED, **({} if by_kind else {"cudagraphs": True}))
    check(model, twin, "flux", range(4))
    name, before = packed_of(model)[3].name, len(packed_of(model))
    for number, write in enumerate(
        (
            lambda p: p.mul_(1.5),
            lambda p: p.data.add_(0.01),
            lambda p: p[:4].mul_(0.5),
            lambda p: p.copy_(torch.randn_like(p)),
        )
    ):
        for each in (model, twin):
            torch.manual_seed(number)
            write(each.get_parameter(name))
        check(model, twin, "flux", range(4 + 2 * number, 6 + 2 * number))
    assert len(packed_of(model)) == before
    model.load_state_dict(twin.state_dict())
    check(model, twin, "flux", range(20, 23))
    assert len(packed_of(model)) == before


@pytest.mark.parametrize("by_kind", [True, False], ids=["by-kind", "whole"])
def test_a_weight_that_packs_no_more_is_raw_from_then_on(by_kind: bool) -> None:
    """Its block runs other code, the other blocks theirs, at other sizes too."""
    model, twin = bf16_twins("wan")
    run = chunkflow_compile.compile(model, **PACKED, **({} if by_kind else {"cudagraphs": True}))
    check(run, twin, "wan", range(4))
    packed = packed_of(model)
    name = next(b.name for b in packed if b.name.startswith("blocks.1."))
    wild = torch.logspace(-30, 30, 4096).to(torch.bfloat16)
    for each in (model, twin):
        p = each.get_parameter(name)
        p.view(-1)[: len(wild)] = wild[: p.numel()] * 1e-3
        p.view(-1)[:8] = 0.5
    check(run, twin, "wan", range(4, 9))
    assert {b.name for b in packed} - {b.name for b in packed_of(model)} == {name}
    other = replace(SIZE, height=8, width=12)
    check(run, twin, "wan", range(9, 12), other)
    check(run, twin, "wan", range(12, 14), replace(SIZE, height=12, width=8))
    check(run, twin, "wan", range(14, 18))
    assert cycles(model) or not by_kind


def test_the_plan_chooses() -> None:
    """Where no copy hides all are packed, where all hide none is."""
    fast = {**EAGER, "hardware": FAST, "memory": "400KiB", "pack": "auto"}
    fast.pop("slowdown")
    model, twin = bf16_twins("flux")
    chunkflow_compile.compile(model, **fast)
    check(model, twin, "flux", range(4))
    assert packed_of(model)
    slow, twin = bf16_twins("flux")
    chunkflow_compile.compile(slow, **{**fast, "hardware": EAGER["hardware"]})
    check(slow, twin, "flux", range(4))
    assert not packed_of(slow)
    loose, twin = bf16_twins("flux")
    chunkflow_compile.compile(loose, **EAGER, pack="auto")
    check(loose, twin, "flux", range(3))
    assert not packed_of(loose) and "depends on memory=" in str(explain(loose))


def test_placed_packed_or_packed_at_the_first_call() -> None:
    """The option packs what the first call places; what is placed packed stays so without it."""
    for option in (True, False):
        model, twin = bf16_twins("qwen-image")
        if not option:
            offload(model, min_bytes=EAGER["min_bytes"], pack=True)
        run = torch.compile(model, backend="chunkflow", options={**EAGER, "pack": option})
        check(run, twin, "qwen-image", range(3))
        assert packed_of(model) and programs(model)[0].plan.moved_bytes


def test_what_cannot_be_packed_is_refused() -> None:
    model, twin = small_twins("flux", SIZE)
    with pytest.raises(ChunkflowError, match="float32"):
        chunkflow_compile.compile(model, **PACKED)
    assert torch.equal(model(**small_inputs("flux", SIZE, 0))[0], twin(**small_inputs("flux", SIZE, 0))[0])
    with pytest.raises(ChunkflowError, match="pack"):
        offload(model, pack="perhaps")  # type: ignore[arg-type]
    model = model.to(torch.bfloat16)
    with pytest.raises(ChunkflowError, match="resident"):
        chunkflow_compile.compile(model, min_bytes=4096, policy="resident", pack=True)


def test_a_pipeline(quiet: None) -> None:
    """Each component packs what it has in bfloat16; the outputs are those of a raw pipeline."""
    pytest.importorskip("transformers")
    import pipelines
    from small_pipelines import small_pipeline

    made = {}
    for pack in (False, True):
        pipe = small_pipeline("flux")
        chunkflow_compile.apply(pipe, memory="2MiB", dtype=torch.bfloat16, pack=pack, **pipelines.EAGER)
        made[pack] = [pipelines.FLUX.generate(pipe, seed) for seed in range(3)]
        transformer = pipe.transformer
        assert bool(packed_of(transformer)) == pack and cycles(transformer)[0].measurements[-1].moved_bytes
        assert ("weights are packed" in str(explain(pipe))) == pack
        chunkflow_compile.remove(pipe)
        assert pipelines.is_plain(pipe)
    assert all(torch.equal(a, b) for a, b in zip(made[False], made[True], strict=True))


def on_a_rank(rank: int) -> None:
    """Ranks share one packed copy; one that writes packs its own, and the others keep theirs."""
    model, twin = (m.to(torch.bfloat16) for m in small_twins("wan", SIZE, degree=2))
    offload(model, min_bytes=EAGER["min_bytes"], pack=True, share=True)
    packed = packed_of(model)
    assert packed and all(buffer.where is Where.SHARED for buffer in packed)
    run = chunkflow_compile.compile(model, **EAGER)
    check(run, twin, "wan", range(4))
    assert cycles(model)[0].measurements[-1].moved_bytes > 0
    for each in (model, twin) if rank else ():
        each.get_parameter(packed[0].name).zero_()
    check(run, twin, "wan", range(4, 8))
    assert [b.where for b in packed].count(Where.OWN) == rank and packed_of(model) == packed
    restore(model)


def test_two_ranks(on_ranks: Any) -> None:
    on_ranks(on_a_rank)
