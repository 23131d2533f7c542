"""Hoisting in models that are compiled by kind: each block has rows of its own, and all blocks take one slow input."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import diffusers
import pipelines
import pytest
import torch
from conftest import EAGER, FAST
from helpers import Stack, small_twins, twins
from small_pipelines import SMALL_PIPELINES, small_pipeline
from step_caches import step_cache
from torch import nn

import chunkflow_compile
from chunkflow_compile import apply, cycles, explain, remove, replan
from chunkflow_compile.catalog.small import Size, small_inputs
from chunkflow_compile.frontend.compile import compiled_whole
from chunkflow_compile.pipeline.budget import budget_of
from chunkflow_compile.placed.notes import hoisting_notes
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.runtime import arena, rows
from chunkflow_compile.runtime.call_site import CallSite
from chunkflow_compile.runtime.input_bits import InputBits
from chunkflow_compile.runtime.rows import RowStatistics
from chunkflow_compile.runtime.target import Cost
from chunkflow_compile.weights.counts import Counts

BLOCKS, STEPS = 4, 4
SIZE = Size(layers=BLOCKS)
OPTIONS: dict[str, Any] = {**EAGER, "min_bytes": 2048, "hoist": True}

pytestmark = pytest.mark.usefixtures("no_grad")


class Steps:
    """A small Qwen-Image, compiled by kind, and the eager one."""

    def __init__(self, **options: Any) -> None:
        self.model, self.twin = small_twins("qwen-image", SIZE)
        self.options = {**OPTIONS, **options}
        if "weight_memory" in options:
            del self.options["slowdown"]

    def compile(self) -> Steps:
        chunkflow_compile.compile(self.model, **self.options)
        return self

    def run(self, step: float, seed: int, size: Size = SIZE) -> None:
        """A call with the latent and the prompt of a seed gives what the eager model gives, bit for bit."""
        inputs = small_inputs("qwen-image", size, seed)
        inputs["timestep"] = torch.full_like(inputs["timestep"], 1 - step / STEPS)
        assert torch.equal(self.model(**inputs)[0], self.twin(**inputs)[0]), (step, seed)

    def generate(self, seed: int, size: Size = SIZE, calls: int = 1) -> None:
        """``calls``: in each step, for as many prompts."""
        for step in range(STEPS):
            for call in range(calls):
                self.run(step, 100 * seed + 10 * call + step, size)

    @property
    def counts(self) -> Counts:
        placement = placement_of(self.model)
        assert placement is not None
        return placement.store.counts

    @property
    def tables(self) -> list[RowStatistics]:
        placement = placement_of(self.model)
        assert placement is not None
        return [table for preamble in placement.preambles for table in preamble.statistics.values()]

    @property
    def computed(self) -> list[int]:
        """The number of rows that each block's preamble has computed."""
        return [table.computed for table in self.tables]

    @property
    def large(self) -> int:
        """Bytes of all large weights."""
        return sum(p.nbytes for p in self.twin.parameters() if p.nbytes >= OPTIONS["min_bytes"])

    @property
    def hoisted(self) -> int:
        """Bytes of the weights that only preambles read."""
        return sum(
            p.nbytes for n, p in self.twin.named_parameters() if "_mod." in n and p.nbytes >= OPTIONS["min_bytes"]
        )

    def moved(self) -> int:
        """The bytes that a step moves, after others."""
        before = self.counts.moved_bytes
        self.run(0, 7)
        return self.counts.moved_bytes - before


@pytest.mark.long
def test_a_step_moves_less_by_the_hoisted_weights() -> None:
    """In the smallest memory, where every large weight is moved in every step."""
    found = []
    for hoist in (True, False):
        steps = Steps(hoist=hoist, slowdown=1000.0).compile()
        for step in range(4):
            steps.run(0, step)
        found.append(steps.moved())
        (cycle,) = cycles(steps.model)
        assert len(cycle.keys) == BLOCKS + 5, "no preamble is a call of the cycle"
    assert found == [steps.large - steps.hoisted, steps.large] and steps.hoisted


def test_a_step_reads_values_once_and_starts_cold_at_most_once(
    monkeypatch: pytest.MonkeyPatch, kept_dynamo: None
) -> None:
    """The preambles of all blocks run before the first block, in whose cycle no other program then runs.

    Values are read as on a device: no tensor is in host memory.
    """
    monkeypatch.setattr(arena, "InputBits", lambda: InputBits(on_host=lambda _: False))
    cold, count = Counter[str](), CallSite.count

    def counted(call: CallSite, cost: Cost) -> None:
        kind = "preamble" if call.variant.settings.preamble else "main"
        cold.update({kind: 1, f"cold {kind}": cost.primed > 0})
        count(call, cost)

    monkeypatch.setattr(CallSite, "count", counted)
    steps, transfers = Steps().compile(), 0
    for step in range(2 * STEPS):
        cold.clear()
        steps.run(step % STEPS, step)
        (bits,) = {program.arena.bits for program in chunkflow_compile.programs(steps.model)}
        if step:  # in the first one, each block learns that it has others
            assert bits.sources.transfers == transfers + 1, step
        transfers = bits.sources.transfers
        assert cold["preamble"] == (BLOCKS if step < STEPS else 0)
        # The rows overwrite what the cycle has prefetched, so the first block starts cold.  The step in which the calls
        # become a cycle starts cold twice: first at its first call, before which nothing has prefetched for it.
        assert cold["cold main"] == (0, 0, 2, *(1,) * (STEPS - 3), *(0,) * STEPS)[step], step


def test_a_cache_that_skips_blocks(kept_dynamo: None) -> None:
    steps = Steps()
    for model in (steps.model, steps.twin):
        model.enable_cache(step_cache("FirstBlockCache", lambda: 500, 2 * STEPS))
    steps.compile()
    calls = []
    for step in range(2 * STEPS):
        before = steps.counts.calls
        inputs = small_inputs("qwen-image", SIZE, 0)
        inputs["hidden_states"] += 0.01 * step + step // 3
        inputs["timestep"] = torch.full_like(inputs["timestep"], 1 - (step % STEPS) / STEPS)
        outputs = []
        for model in (steps.model, steps.twin):
            with model.cache_context("cond"):
                outputs.append(model(**inputs)[0])
        assert torch.equal(*outputs), step
        calls.append(steps.counts.calls - before)
    assert min(calls) < max(calls), "no step hit the cache"
    assert max(steps.computed) == STEPS


def test_the_second_generation_has_no_misses() -> None:
    """With another prompt, and with one of another length, for which the blocks are compiled again.

    For guidance, each step of the first makes two calls, which take equal values in different tensors.  After a write to a
    hoisted weight, its block computes the rows of all steps again, in one pass.
    """
    steps = Steps().compile()
    steps.generate(0, calls=2)
    assert steps.counts.row_misses == BLOCKS + STEPS - 1, "a miss computes the rows of all blocks that are known"
    assert steps.computed == [STEPS] * BLOCKS
    misses, hits = steps.counts.row_misses, steps.counts.row_hits
    steps.generate(1)
    steps.generate(2, replace(SIZE, text=12))
    assert steps.counts.row_misses == misses and steps.computed == [STEPS] * BLOCKS
    assert steps.counts.row_hits == hits + 2 * STEPS * BLOCKS
    (note,) = hoisting_notes(steps.model)
    assert "weights of 4 blocks are hoisted, 768.0 KiB, by one small input; 4 rows per block" in note
    assert note in explain(steps.model).notes
    for model in (steps.model, steps.twin):
        model.transformer_blocks[1].img_mod[1].weight.mul_(1.5)
    steps.generate(3)
    assert steps.counts.row_misses == misses + 1
    assert sorted(steps.computed) == [STEPS] * (BLOCKS - 1) + [2 * STEPS]
    replan(steps.model, slowdown=1000.0)  # in the smallest memory, a step copies all large weights of main
    steps.generate(4)
    assert steps.counts.row_misses == misses + 1 and steps.moved() == steps.large - steps.hoisted > 0


def test_a_pipeline(quiet: None) -> None:
    """The second generation has another prompt, and no misses.  Prompts are given as embeddings, for want of an encoder."""
    pytest.importorskip("transformers")
    pipe, twin = (small_pipeline("qwen-image") for _ in range(2))
    for each in (pipe, twin):
        each.text_encoder = None
    apply(pipe, memory="1MiB", hoist=True, split=1, **pipelines.EAGER)
    budget, counts = budget_of(pipe), placement_of(pipe.transformer).store.counts  # type: ignore[union-attr]
    given = {"prompt": None, "negative_prompt": None, "output_type": "latent", "prompt_embeds_mask": torch.ones(1, 8)}
    misses = []
    for seed in range(2):
        embeds = torch.randn(1, 8, pipe.transformer.config.joint_attention_dim)
        got, want = (
            SMALL_PIPELINES["qwen-image"].generate(p, seed, prompt_embeds=embeds, **given) for p in (pipe, twin)
        )
        assert torch.equal(got, want)
        misses.append(counts.row_misses)
    assert misses[0] > 0 and misses == [misses[0]] * 2
    assert any("of 3 blocks are hoisted" in note for phase in budget.figures().phases for note in phase.notes)
    remove(pipe)
    assert pipelines.is_plain(pipe) and pipelines.same_weights(pipe, twin)


@pytest.mark.long
def test_tables_are_within_the_budget() -> None:
    """Those of all blocks, which the plan of their cycle counts."""
    memory = 640 << 10
    steps = Steps(weight_memory=f"{memory}B", hardware=FAST, chunk_bytes=1024).compile()
    for generation in range(3):
        steps.generate(generation)
    (cycle,) = cycles(steps.model)
    tables = sum(program.variant.settings.table for program in chunkflow_compile.programs(steps.model))
    assert 0 < tables <= memory // 16 and sum(table.nbytes for table in steps.tables) <= tables
    assert cycle.settings.external_bytes >= tables and cycle.plan.device_bytes + cycle.settings.external_bytes <= memory


@pytest.mark.long
def test_auto_hoists_where_no_copy_hides() -> None:
    steps = Steps(hoist="auto", weight_memory="512KiB", hardware=FAST, chunk_bytes=1024).compile()
    steps.generate(0)
    assert steps.computed == [STEPS] * BLOCKS


@pytest.mark.long
def test_hoisting_ends_if_no_step_comes_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of all blocks at once, in the middle of a generation."""
    monkeypatch.setattr(rows, "_SPENT", 3)
    steps = Steps().compile()
    for step in range(STEPS):
        steps.run(step / 7, step)
    assert "Hoisting ends" in caplog.text
    computed = steps.computed
    steps.run(0.5, 9)
    assert steps.computed == computed


@pytest.mark.parametrize(
    ("family", "whole"), [("flux", True), ("hunyuanvideo", True), ("qwen-image", False), ("wan", False)]
)
def test_which_models_are_compiled_whole(family: str, whole: bool) -> None:
    """Those whose rows depend on the prompt; and any if the user names inputs, which are those of the model."""
    model, twin = small_twins(family, Size(layers=2))
    assert compiled_whole(model, {"hoist": True}) == compiled_whole(model, {"hoist": "auto"}) == whole
    assert compiled_whole(model, {"hoist": ("timestep",)}) and not compiled_whole(model, {})
    if hasattr(twin, "enable_cache"):
        twin.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
        assert not compiled_whole(twin, {"hoist": True}), "the hooks of the cache stay between the blocks"


@pytest.mark.long
def test_flux_is_compiled_whole(caplog: pytest.LogCaptureFixture) -> None:
    size = Size(layers=2, singles=2)
    model, twin = small_twins("flux", size)
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        chunkflow_compile.compile(model, **OPTIONS)
    assert "FluxTransformer2DModel has hoisted weights: it is compiled whole" in caplog.text
    inputs = small_inputs("flux", size, 0)
    for _ in range(2):
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
    (note,) = hoisting_notes(model)
    assert "of 2 blocks" not in note and "1 of 2 calls found theirs" in note


@pytest.mark.long
def test_one_miss_computes_the_rows_of_both_kinds(caplog: pytest.LogCaptureFixture) -> None:
    """LongCat-Image has blocks of two kinds, which take the same value."""
    model, twin = twins(
        lambda: diffusers.LongCatImageTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 6, 6],
        )
    )
    chunkflow_compile.compile(model, **OPTIONS)
    misses = []
    for step in (0, 1, 2, 0, 1, 2):
        inputs = {"hidden_states": torch.randn(1, 64, 16), "encoder_hidden_states": torch.randn(1, 8, 32)}
        inputs |= {
            "timestep": torch.tensor([1 - step / 3]),
            "img_ids": torch.zeros(64, 3),
            "txt_ids": torch.zeros(8, 3),
        }
        assert torch.equal(*(m(**inputs, return_dict=False)[0] for m in (model, twin)))
        misses.append(placement_of(model).store.counts.row_misses)  # type: ignore[union-attr]
    assert misses == [5, 6, 7, 7, 7, 7]
    notes = " ".join(sorted(hoisting_notes(model)))
    assert "6 weights of 3 blocks are hoisted" in notes and "8 weights of 2 blocks are hoisted" in notes
    assert "changes nothing for the part of the model" not in caplog.text, "what is beside the blocks is small"


class Unmodulated(Stack):
    """Its blocks take nothing but the latent."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        return super().forward(x + timestep)


def test_blocks_without_modulations(caplog: pytest.LogCaptureFixture) -> None:
    model, twin = twins(lambda: Unmodulated(3))
    chunkflow_compile.compile(model, **OPTIONS)
    x, timestep = torch.randn(4, 8), torch.ones(1)
    assert torch.equal(model(x, timestep), twin(x, timestep))
    assert caplog.text.count("hoist=True changes nothing for blocks.0 and the blocks of its kind") == 1
    assert not hoisting_notes(model)


class Broken(nn.Module):
    """Graph breaks divide it, and its second part reads the modulation."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation, self.projection = nn.Linear(8, 64), nn.Linear(32, 32)
        self.before, self.after = nn.Linear(32, 80), nn.Linear(32, 80)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x = x + self.before(x)[..., :32]
        torch._dynamo.graph_break()
        scale, shift = self.modulation(t)[:, None].chunk(2, dim=-1)
        x = x + self.projection(x * (1 + scale) + shift)
        torch._dynamo.graph_break()
        return self.after(x)


def test_what_is_not_hoisted_in_a_part_that_is_no_block_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, twin = twins(Broken)
    run = torch.compile(model, backend="chunkflow", options={**EAGER, "hoist": True, "min_bytes": 64})
    t = torch.randn(1, 8)
    for tokens in (16, 16, 24):
        x = torch.randn(1, tokens, 32)
        assert torch.equal(run(x, t), twin(x, t))
    said = (
        "for the part of the model that reads modulation.weight, although 2 of its weights (2.2 KiB) could be hoisted"
    )
    assert caplog.text.count(said) == 1
    assert not hoisting_notes(model)
