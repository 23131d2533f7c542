"""Weights in pieces on the devices of the ranks, in cuts and programs: regions are as they were, the problem says where."""

from __future__ import annotations

from dataclasses import replace

import torch
from expecttest import TestCase
from helpers import Block, InTurn, cut_of, plan_of

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.shard import on_peers, streamable
from chunkflow_compile.passes.pass_pipeline import Stage
from chunkflow_compile.passes.pieces import piece_bytes
from chunkflow_compile.passes.program.contracts import check_cut
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.program.verify import verify
from chunkflow_compile.report.lines import stage_lines
from chunkflow_compile.report.listings import render
from chunkflow_compile.report.plan_tables import blocks_table, summary_table, weights_table

X = torch.randn(4, 64, dtype=torch.bfloat16)


def two_blocks() -> Cut:
    return cut_of(InTurn(Block(64) for _ in range(2)).bfloat16(), X)


def peers_in(cut: Cut) -> dict[str, int]:
    return {w.name: w.source.ranks for w in cut.problem.weights if w.source.sharded}


class TestListing(TestCase):
    def test_two_blocks(self) -> None:
        raw = two_blocks()
        cut = on_peers(raw, [name for name in streamable(raw) if "down" in name], 2)
        plan = plan_of(cut.problem, memory=52_000)
        short = [replace(w, why=w.why.partition(" because")[0]) for w in plan.weights]
        stage = Stage(name="regions", traced=cut.traced, cut=cut)
        inputs = [line for line in render(stage_lines(stage), full=False).split("\n") if line.startswith("arg")]
        text = "\n".join([*inputs, weights_table(short), blocks_table(plan, cut.problem)])
        self.assertExpectedInline(
            text,
            """\
arg0_1: bfloat16[128, 64]  # blocks.0.up.weight
arg1_1: bfloat16[4, 64]
arg2_1: bfloat16[64, 128]  # blocks.0.down.weight, in pieces
arg3_1: bfloat16[128, 64]  # blocks.1.up.weight
arg4_1: bfloat16[64, 128]  # blocks.1.down.weight, in pieces
weight                size      home    why
--------------------  --------  ------  -------------------
blocks.0.up.weight    16.0 KiB  host    exposed by 0.818 ms
blocks.0.down.weight  16.0 KiB  peers   exposed by 0.011 ms
blocks.1.up.weight    16.0 KiB  host    exposed by 0.818 ms
blocks.1.down.weight  16.0 KiB  peers   exposed by 0.011 ms
block          weights    streamed    resident    least slack
-------------  ---------  ----------  ----------  -------------
blocks.0 .. 1  32.0 KiB   32.0 KiB    0 B         waits 0.8 ms""",
        )


def test_the_regions_are_the_same() -> None:
    raw = two_blocks()
    names = sorted(streamable(raw))
    cut = on_peers(raw, names[:2], 4)
    check_cut(cut)
    assert cut.regions is raw.regions and cut.sequence is raw.sequence
    assert peers_in(cut) == dict.fromkeys(names[:2], 4) and cut.problem.digest != raw.problem.digest
    assert cut.problem.piece_bytes == 2 * piece_bytes(64 * 128 * 2, 4) and raw.problem.piece_bytes == 0
    assert {w.parameter.name for w in cut.discovery.weights if w.parameter.source.sharded} == set(names[:2])
    assert on_peers(cut, (), 4).problem == raw.problem and peers_in(on_peers(cut, names, 2)) == dict.fromkeys(names, 2)
    plan = plan_of(cut.problem, memory=60_000)
    program = rewrite(cut, plan)
    assert verify(program).edges
    assert {w.home for w in plan.streamed if w.name in names[:2]} == {"peers"}
    assert "pulled from other ranks" in summary_table(plan, cut.problem, 1)


def test_packed_weights_in_pieces() -> None:
    """In either order; peers hold the packed bytes."""
    raw = two_blocks()
    names = sorted(packable(raw))
    first, then = packed(on_peers(raw, names[:3], 2), names[1:]), on_peers(packed(raw, names[1:]), names[:3], 2)
    assert first.problem == then.problem and first.raw is not None and then.raw is not None
    assert first.raw.problem == then.raw.problem == on_peers(raw, names[:3], 2).problem
    weights = {w.name: w for w in first.problem.weights}
    assert first.problem.piece_bytes == sum(piece_bytes(weights[name].nbytes, 2) for name in names[:3])
    assert weights[names[2]].nbytes < weights[names[2]].source.values == weights[names[0]].nbytes


def test_pieces_at_other_sizes() -> None:
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    traced = trace(InTurn([Block(64)]).bfloat16(), {"x": x}, 0)
    raw = make_cut(traced)
    more = replace(traced, sizes=dict.fromkeys(traced.sizes, 400))
    names = streamable(raw)
    assert peers_in(on_peers(raw, names, 2).at(more)) == dict.fromkeys(names, 2)
