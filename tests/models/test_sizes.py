"""Sizes: from the second on, regions are lowered for all of them, and a new size is a new plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from conftest import EAGER, FAST, OPTIONS
from helpers import Block, InTurn, Scaled, Stack, check_steps, graphs, small_twins, twins
from torch import nn
from torch._inductor.exc import InductorError

import chunkflow_compile
from chunkflow_compile import explain, offload, programs
from chunkflow_compile.catalog.small import Size, small_inputs
from chunkflow_compile.frontend.compile import compile_by_kind
from chunkflow_compile.lowering import lower
from chunkflow_compile.passes.graph.symbolic_sizes import symbols_of
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.runtime.variants import KEPT_SIZES
from chunkflow_compile.weights.limits import host_memory

SIZE = Size(layers=2)
# Height and width change at the second call: torch then makes both symbolic.
RESOLUTIONS = [(8, 12), (16, 8), (16, 16), (12, 20), (24, 16), (20, 12), (8, 24), (12, 12), (16, 20), (28, 8)]


pytestmark = pytest.mark.usefixtures("no_grad")


def check(model: Any, twin: nn.Module, inputs: dict[str, Any], tolerance: float = 0.0) -> None:
    expected = twin(**inputs)[0]
    torch.testing.assert_close(model(**inputs)[0], expected, atol=tolerance, rtol=tolerance)


def turns(model: Any, twin: nn.Module, sizes: Sequence[Size], tolerance: float = 0.0) -> list[int]:
    """Graphs compiled after each call of two turns through ``sizes``."""
    made = []
    for number, size in enumerate([*sizes, *sizes]):
        check(model, twin, small_inputs("wan", size, number), tolerance)
        made.append(graphs())
    return made


def at_resolutions(count: int = len(RESOLUTIONS)) -> list[Size]:
    return [replace(SIZE, height=height, width=width) for height, width in RESOLUTIONS[:count]]


def compiled(model: nn.Module, by_kind: bool, **options: Any) -> Any:
    if by_kind:
        return chunkflow_compile.compile(model, **options)
    return torch.compile(model, backend="chunkflow", fullgraph=True, options=options)


def lengths(count: int) -> list[Size]:
    """Of the text."""
    return [replace(SIZE, text=5 + 3 * n) for n in range(count)]


# From a batch of two on, because torch compiles a size of one for itself.
BATCHES = [replace(at, batch=batch) for at, batch in zip(at_resolutions(4), (2, 3, 5, 2), strict=True)]
CASES = [
    *((by_kind, sizes, "eager") for by_kind in (False, True) for sizes in (at_resolutions(), BATCHES, lengths(20))),
    *((by_kind, at_resolutions(4), "inductor") for by_kind in (False, True)),
]


@pytest.mark.long  # in make test, models of blocks are compiled so below
@pytest.mark.parametrize(("by_kind", "sizes", "lowering"), CASES)
def test_sizes_are_two_compilations(by_kind: bool, sizes: list[Size], lowering: str) -> None:
    """Of the whole model or of each kind, in any order, and a bounded number of plans: each for its own size."""
    model, twin = small_twins("wan", Size(layers=2 if by_kind else 1))
    run = compiled(model, by_kind, **{**EAGER, "lowering": lowering})
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        counts = turns(run, twin, sizes, 0.0 if lowering == "eager" else 1e-4)
    assert (by_kind or counts[0] == 1) and counts[0] < counts[1] <= 2 * counts[0]
    assert counts[1:] == [counts[1]] * (2 * len(sizes) - 1)
    found = programs(model)
    assert sum(m.moved_bytes for p in found for m in p.measurements) > 0
    if by_kind:
        of_blocks = [p for p in found if any(buffer.name.startswith("blocks.0.") for buffer in p.buffers.values())]
        assert len({id(p.variant.regions) for p in of_blocks}) == 2
        assert sum(p.call.steps for p in of_blocks) == 2 * len(sizes), "each call ran compiled"
        return
    for program in found:
        assert all(m.moved_bytes == program.plan.moved_bytes for m in program.measurements if not m.primed_bytes)
    assert len({id(p.variant.regions) for p in found}) == 2, "one for the first size, one for all others"
    assert len({id(p.program.module) for p in found}) < len(found), "other sizes with its placement have its module"
    costs = {sum(r.cost.flops for r in p.program.problem.regions) for p in found}
    assert len(found) == min(len(costs), KEPT_SIZES) + 1, "the first size has one in each of the two graphs"


def test_sizes_by_kind_are_two_compilations() -> None:
    """Of the blocks, in any order of the sizes."""
    (model, twin), counts = twins(lambda: InTurn(Block(32) for _ in range(2))), list[int]()
    run = compiled(model, True, **EAGER)
    sizes = [(2, 3), (4, 6), (6, 4), (5, 3)]
    for rows, columns in [*sizes, *sizes]:
        check_steps(run, twin, 1, (rows, columns, 32))
        counts.append(graphs())
    assert counts == [1] + [2] * (2 * len(sizes) - 1)
    found = programs(model)
    assert sum(m.moved_bytes for p in found for m in p.measurements) > 0
    of_blocks = [p for p in found if any(buffer.name.startswith("blocks.0.") for buffer in p.buffers.values())]
    assert len({id(p.variant.regions) for p in of_blocks}) == 2
    assert sum(p.call.steps for p in of_blocks) == 2 * len(sizes), "each call ran compiled"


def test_sizes_of_equal_cost_share_a_program() -> None:
    model, twin = twins(Stack)
    whole = torch.compile(model, backend="chunkflow", fullgraph=True, options=EAGER)
    for rows, columns in [(2, 3), (4, 6), (6, 4), (4, 6), (6, 4), (5, 5)]:
        check_steps(whole, twin, 1, (rows, columns, 8))
    found = programs(model)
    assert [len(p.measurements) for p in found] == [1, 4, 1]
    assert graphs() == 2 and len({id(p.variant.regions) for p in found}) == 2, (
        "one for the first size, one for all others"
    )
    assert all(m.moved_bytes == p.plan.moved_bytes > 0 for p in found for m in p.measurements if not m.primed_bytes)


def resolutions_on_a_rank(rank: int) -> None:
    model, twin = small_twins("wan", SIZE, 2)
    whole = torch.compile(model, backend="chunkflow", options=EAGER)
    with torch.no_grad():
        compiled = turns(whole, twin, at_resolutions(4))
    assert len(set(compiled)) == 2
    crossing = {sum(c.nbytes for c in p.program.problem.collectives) for p in programs(model)}
    assert len(crossing) == 4, "the bytes of the collectives are those of each size"
    assert all(m.collectives > 0 and m.moved_bytes > 0 for p in programs(model) for m in p.measurements)


@pytest.mark.long
def test_resolutions_at_ulysses_2(on_ranks: Callable[..., None]) -> None:
    on_ranks(resolutions_on_a_rank)


def mochi() -> nn.Module:
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "patch_size": 2, "in_channels": 12}
    text = {"pooled_projection_dim": 16, "text_embed_dim": 16, "time_embed_dim": 4, "max_sequence_length": 16}
    return diffusers.MochiTransformer3DModel(**heads, **text)


def mochi_inputs(seed: int) -> dict[str, Any]:
    """Two prompts, whose masks keep another number of tokens each time."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(16)[None] < torch.tensor([[5 + seed], [9 - seed]])
    return {
        "hidden_states": torch.randn(2, 12, 2, 16, 16, generator=generator),
        "encoder_hidden_states": torch.randn(2, 16, 16, generator=generator),
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_attention_mask": mask,
        "return_dict": False,
    }


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("by_kind", [False, pytest.param(True, marks=pytest.mark.long)])
def test_sizes_that_depend_on_data(by_kind: bool, lowering: str, caplog: pytest.LogCaptureFixture) -> None:
    (model, twin), counts = twins(mochi), list[int]()
    with caplog.at_level(logging.WARNING, logger="chunkflow_compile"):
        run = compiled(model, by_kind, min_bytes=256, lowering=lowering)
        for seed in (1, 2, 3, 1, 2, 3) if by_kind else (1, 2, 3):
            check(run, twin, mochi_inputs(seed), 0.0 if lowering == "eager" else 1e-5)
            counts.append(graphs())
    assert counts[2:] == [counts[2]] * len(counts[2:]), "a size that was there is compiled no more"
    large = {n for n, p in model.named_parameters() if p.nbytes >= 256}
    assert {buffer.name for p in programs(model) for buffer in p.buffers.values()} <= large
    assert sum(m.moved_bytes for p in programs(model) for m in p.measurements) > 0
    if not by_kind:
        assert "sizes that depend on data" in caplog.text
        assert "its FLOPs, bytes and times are estimates" in " ".join(str(explain(model, details=True)).split())
        (program,) = programs(model)
        assert program.plan.moved_bytes > 0 and graphs() == 1
        assert all(m.moved_bytes == program.plan.moved_bytes for m in program.measurements[1:])


@pytest.mark.long
@pytest.mark.skipif(host_memory().free < 12 << 30, reason="needs 12 GiB of host memory")
def test_a_region_lowered_small_beyond_two_to_the_31_elements() -> None:
    """With 32-bit indices, elements beyond the limit would be those of another place."""
    model = Scaled()
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={"min_bytes": 1, "policy": "layerwise"})
    with torch.no_grad():
        for rows in (3, 5, 2**25 + 3):
            x = torch.empty(rows, 64, dtype=torch.int8).random_(-100, 100)
            found = run(x)
            for begin in range(0, rows, 1 << 20):  # eager on all of it would take as much memory again
                assert torch.equal(found[begin : begin + (1 << 20)], x[begin : begin + (1 << 20)] * model.scale)
    assert found.numel() > 2**31 and graphs() == 2


def test_what_stays_on_the_device_counts_once_for_all_sizes() -> None:
    model = Stack(4).eval()
    options = {**EAGER, "slowdown": None, "weight_memory": 10**8, "hardware": FAST}
    whole = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    for rows in (4, 6, 9, 12):
        whole(torch.randn(rows, 8))
    found = programs(model)
    stays = sum(p.nbytes for p in model.parameters() if p.nbytes >= OPTIONS["min_bytes"])
    assert len(found) == 4 and not any(p.plan.streamed for p in found)
    assert found[0].arena.held == found[0].arena.nbytes + stays


def test_sizes_that_are_used_stay_and_the_others_go() -> None:
    """Twenty lengths in turns are planned once each; beyond the number that is kept, the one used longest ago goes."""
    model = Stack(2).eval()
    whole: Any = torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=True, options=EAGER)
    planned: list[int] = []

    def turn(lengths: Sequence[int]) -> None:
        before = {id(p) for p in programs(model)}
        for rows in lengths:
            whole(torch.randn(rows, 8))
        planned.append(len({id(p) for p in programs(model)} - before))

    twenty = range(2, 22)
    turn(twenty)
    turn(twenty)
    assert planned == [20, 0] and graphs() == 1, "with dynamic=True, the first size is compiled for all"
    turn(range(22, 22 + KEPT_SIZES - 20))  # all places are taken
    turn([2, 3])  # used, so they stay
    turn([100, 101])
    turn([2, 3, 6])
    assert planned[3:] == [0, 2, 0]
    turn([4, 5])
    assert planned[-1] == 2 and len(programs(model)) == KEPT_SIZES


class Level(nn.Module):
    """A block of a decoder: its output has twice the height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(4, 4, 3, padding=1), nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(nn.functional.interpolate(x, scale_factor=2.0) * self.scale)


def decode(**options: Any) -> list[int]:
    """The graphs that were compiled after each of some sizes of a decoder, which share a height or a width."""
    model, twin = twins(lambda: InTurn([Level(), Level()]))
    offload(model, "cpu", min_bytes=256)
    placement: Any = placement_of(model)
    compile_by_kind(model, placement, {"min_bytes": 256, **options}, None, levels=True)
    counts = []
    for height, width in ((4, 4), (6, 4), (4, 8), (6, 6)):
        check_steps(model, twin, 1, (1, 4, height, width))
        counts.append(graphs())
    moved = [m.moved_bytes for p in programs(model) for m in p.measurements]
    assert moved and min(moved) >= min(p.plan.moved_bytes for p in programs(model)) > 0
    return counts


def test_levels_of_a_decoder() -> None:
    """Each is compiled for its first size; one compilation for all other sizes of all levels, in height and width."""
    assert decode(lowering="eager") == [2, 3, 3, 3]


def test_levels_that_inductor_fails_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each level is tried on symbols once, and is then compiled for each size.

    A library that a killed process has left in the compile cache is no reason to try again.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (torn := tmp_path / "torn.so").write_bytes(b"\x7fELF")
    os.utime(torn, (0, 0))
    tried: list[bool] = []

    def lowered(module: Any, _: Any) -> Any:
        given = [n.meta["val"] for n in module.graph.find_nodes(op="placeholder")]
        tried.append(bool(symbols_of(given)))
        if tried[-1]:
            raise InductorError(ValueError("no symbols here"), None)
        return lower._eager(module).forward

    monkeypatch.setattr(lower, "through_inductor", lowered)
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        assert decode() == [2, 4, 6, 8]
    (said, *rest) = [r.getMessage() for r in caplog.records if "each size" in r.getMessage()]
    assert "blocks.0.scale" in said and "Inductor fails on symbols, InductorError: ValueError: no symbols here" in said
    assert len(rest) == 1 and tried.count(True) == 2
