"""Presets: traced at full width and length, without weights; the formulas count what the graph counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.models.presets import PRESETS, OutputSizes, Preset, preset
from chunkflow_compile.passes.cost.formulas import dit_block_flops, double_block_flops, single_block_flops
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.program.verify import verify


def two_of_each(name: str) -> Preset:
    """The preset with two blocks of each kind: enough for the figures of one block."""
    found = PRESETS[name]
    layers = {key: 2 for key in ("num_layers", "num_single_layers") if key in found.config}
    return replace(found, config={**found.config, **layers})


@cache
def traced(name: str, degree: int = 1) -> Cut:
    """Two blocks of each kind of a preset, cut into regions."""
    return make_cut(two_of_each(name).trace(degree))


def block_flops(problem: Problem, block: str) -> int:
    return sum(r.cost.flops for r in problem.regions if r.block == block)


def block_bytes(problem: Problem, block: str) -> int:
    return sum(w.nbytes for w in problem.weights if w.name.startswith(block + "."))


# preset -> (blocks' container, formula, tokens, width, MLP width); the second kind of MM-DiT blocks too
WAN, DOUBLE, SINGLE = dit_block_flops, double_block_flops, single_block_flops
BLOCKS: list[tuple[str, str, Callable[..., float], dict[str, int]]] = [
    ("wan2.2-ti2v-5b", "blocks.1", WAN, {"tokens": 220 * 84, "text": 512, "width": 3072, "mlp": 14336}),
    ("wan2.2-t2v-a14b", "blocks.1", WAN, {"tokens": 900 * 84, "text": 512, "width": 5120, "mlp": 13824}),
    ("flux.1-dev", "transformer_blocks.1", DOUBLE, {"tokens": 4096, "text": 512, "width": 3072, "mlp": 12288}),
    ("flux.1-dev", "single_transformer_blocks.1", SINGLE, {"tokens": 4096, "text": 512, "width": 3072, "mlp": 12288}),
    ("hunyuanvideo", "transformer_blocks.1", DOUBLE, {"tokens": 900 * 36, "text": 256, "width": 3072, "mlp": 12288}),
    (
        "hunyuanvideo",
        "single_transformer_blocks.1",
        SINGLE,
        {"tokens": 900 * 36, "text": 256, "width": 3072, "mlp": 12288},
    ),
    # Not the last block: nothing reads its text stream, and half of it is dead code.
    ("qwen-image", "transformer_blocks.0", DOUBLE, {"tokens": 4096, "text": 64, "width": 3072, "mlp": 12288}),
]


# What make test traces.
SHORT = ("wan2.2-ti2v-5b",)


@pytest.mark.parametrize(
    ("name", "block", "formula", "size"),
    [pytest.param(*b, marks=() if b[0] in SHORT else pytest.mark.long) for b in BLOCKS],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_block_s_flops_are_the_formula_s_within_2_percent(
    name: str, block: str, formula: Callable[..., float], size: dict[str, int]
) -> None:
    problem = traced(name).problem
    assert block_flops(problem, block) == pytest.approx(formula(batch=1, **size), rel=0.02)


@pytest.mark.long
def test_ulysses_divides_the_flops_and_adds_four_collectives_a_block() -> None:
    whole, split = (traced("wan2.2-ti2v-5b", degree).problem for degree in (1, 4))
    # Text keys and values of cross-attention are computed on every rank.
    assert block_flops(split, "blocks.1") == pytest.approx(block_flops(whole, "blocks.1") / 4, rel=0.03)
    kinds = [c.kind for c in split.collectives]
    assert kinds == ["all-to-all"] * 8 + ["all-gather"]
    tokens, width, bf16 = 220 * 84, 3072, 2
    assert (
        split.collectives[0].nbytes == tokens * width * bf16 / 4 * 3 / 4
    )  # three of four ranks' shares cross the link
    assert block_bytes(split, "blocks.1") == block_bytes(whole, "blocks.1")


def test_a_preset_is_planned_and_verified_without_weights() -> None:
    cut = traced("wan2.2-ti2v-5b", 2)
    plan = place(cut.problem, load_profile("h100-pcie-x2"))
    verify(rewrite(cut, plan))
    assert (
        plan.moved_bytes > 0.85 * cut.problem.total_bytes
    )  # there is little compute before the embeddings to hide them
    assert {w.name for w in plan.streamed} >= {"blocks.0.ffn.net.2.weight", "blocks.1.attn2.to_out.0.weight"}


def test_true_bytes_of_a_block_are_the_paper_s() -> None:
    wan = traced("wan2.2-ti2v-5b").problem
    assert block_bytes(wan, "blocks.1") == pytest.approx(327e6, rel=0.005)


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda: preset("wan3"), r"no preset 'wan3': use one of wan2.2-ti2v-5b, "),
        (lambda: PRESETS["flux.1-dev"].trace(5), r"24 attention heads: the Ulysses degree 5 must divide"),
        (lambda: PRESETS["flux.1-dev"].shape(OutputSizes(height=100, width=64)), r"height 100 is not a multiple of 16"),
        (
            lambda: PRESETS["flux.1-dev"].shape(OutputSizes(height=64, width=64, frames=5)),
            r"generates images: leave out frames",
        ),
        (
            lambda: PRESETS["hunyuanvideo"].shape(OutputSizes(height=720, width=1280, frames=32)),
            r"frames 32 is not 4 k \+ 1",
        ),
    ],
)
def test_bad_sizes_are_named(attempt: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ChunkflowError, match=sentence):
        attempt()
