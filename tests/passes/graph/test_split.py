"""The pass that splits blocks into slices of their tokens: what its regions compute and overwrite, and what is proved."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from expecttest import TestCase
from helpers import InTurn, aimed, cut_of, plan_of
from torch import nn
from torch.fx import Node

from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import choose_cut
from chunkflow_compile.passes.errors import ChunkflowError, FindingError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.coarsen import grouped
from chunkflow_compile.passes.graph.listing import SLICING
from chunkflow_compile.passes.graph.regions import Cut, Slicing, cut
from chunkflow_compile.passes.graph.slice_graphs import Slice
from chunkflow_compile.passes.graph.slices import Whole
from chunkflow_compile.passes.graph.split import split, why_whole
from chunkflow_compile.passes.placement.splitting import REPEATS, split_into, splits
from chunkflow_compile.passes.planning import Settings, make_plan
from chunkflow_compile.passes.program.contracts import check_cut
from chunkflow_compile.passes.program.rewrite import Program, rewrite
from chunkflow_compile.passes.program.verify import verify

WIDTH, TOKENS, TEXT = 32, 64, 16
X = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


class AttentionBlock(nn.Module):
    """A block of a diffusion transformer without conditions: attention and a feed-forward layer, each in a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (f(normed).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transposed(nn.Module):
    """Returns a stream with the tokens in its last stride, as a patch embedding does that is a convolution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)


class JointBlock(AttentionBlock):
    """Joins two streams, as HunyuanVideo's single blocks do, and returns them as views of one value."""

    def forward(self, streams: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return super().forward(torch.cat([*streams], 1)).split_with_sizes([TOKENS, TEXT], 1)


class Joint(nn.Module):
    """Two streams of a stream, of which the second is short; or the first of two."""

    def forward(self, x: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return (x * x.sin(), x[:, :TEXT] * 3) if isinstance(x, torch.Tensor) else x[0] * 2


@cache  # no test changes a cut
def blocks(count: int = 2, x: torch.Tensor = X) -> tuple[nn.Module, Cut]:
    """A model of equal blocks, and its cut with one region for each block."""
    torch.manual_seed(0)
    return in_turn([AttentionBlock() for _ in range(count)], x)


def in_turn(modules: Sequence[nn.Module], x: torch.Tensor = X) -> tuple[nn.Module, Cut]:
    model = InTurn(modules).eval()
    finest = cut_of(model, x)
    return model, cut(finest.traced, finest.discovery, groups=grouped(finest, None))


def run(found: Cut, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The regions one after another, each with its calls, for values that each passes to the next."""
    values: dict[Node, torch.Tensor] = {}
    for weight in found.discovery.weights:
        values[weight.node] = model.get_parameter(weight.parameter.name).detach()
    for node in found.source.graph.find_nodes(op="placeholder"):
        values.setdefault(node, x)
    results: list[torch.Tensor] = []
    for region in found.regions:
        inputs, slicing = [values[node] for node in region.inputs], region.slicing
        if slicing is None or not slicing.writes:
            parts = [None] * len(inputs) if slicing is None else slicing.inputs
            results = list(region.module(*(taken(v, part, 0) for v, part in zip(inputs, parts, strict=True))))
        else:
            results = [
                inputs[over] if over is not None else torch.full(tuple(node.meta["val"].shape), math.nan)
                for node, (_, over) in zip(region.outputs, slicing.writes, strict=True)
            ]
            fresh = [
                (result, part) for result, (part, over) in zip(results, slicing.writes, strict=True) if over is None
            ]
            for i in range(slicing.repeat):
                region.module(*(taken(v, part, i) for v, part in [*zip(inputs, slicing.inputs, strict=True), *fresh]))
        values.update(zip(region.outputs, results, strict=True))
    return results[0]


def taken(value: torch.Tensor, part: Slice | None, call: int) -> torch.Tensor:
    return value if part is None else value.narrow(part.dim, part.offset + call * part.size, part.size)


class TestListing(TestCase):
    def test_two_blocks(self) -> None:
        """K and V of all tokens come first; then the rest of a block, in place where nothing else reads the stream."""
        _, found = blocks()
        program = program_of(split_into(found, 4))
        text = re.sub(r", blocks_\d_\w+|blocks_\d_\w+, ", "", str(program))  # without weights
        lines = [line for line in text.splitlines() if "lowered" in line]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
region_0 = lowered_0[4](arg0_1[:, i * 16 : 16 + i * 16], out=(new[i * 16 : 16 + i * 16], new[i * 16 : 16 + i * 16],))
region_1 = lowered_1[4](arg0_1[:, i * 16 : 16 + i * 16], addmm_1, addmm_2, out=(new[:, i * 16 : 16 + i * 16],))
region_2 = lowered_0[4](add_1[:, i * 16 : 16 + i * 16], out=(new[i * 16 : 16 + i * 16], new[i * 16 : 16 + i * 16],))
region_3 = lowered_2[4](add_1[:, i * 16 : 16 + i * 16], addmm_7, addmm_8, out=(add_1[:, i * 16 : 16 + i * 16],))""",
        )


def program_of(found: Cut) -> Program:
    return rewrite(found, plan_of(found.problem, policy="layerwise"))


@pytest.mark.parametrize("repeat", [2, 4])  # GEMMs of a few rows have other bits on a CPU
def test_a_split_block_computes_the_same_bits(repeat: int) -> None:
    model, found = blocks()
    plain = run(found, model, X.clone())
    again = split_into(found, repeat)
    assert sorted({r.repeat for r in again.problem.regions}) == [repeat]
    check_cut(again)
    verify(program_of(again))
    for seed in range(2):
        x = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed))
        before = x.clone()
        torch.testing.assert_close(run(again, model, x), run(found, model, before.clone()), rtol=0, atol=0)
        assert torch.equal(x, before), "an input of the model is overwritten"
    assert not plain.isnan().any()


def test_only_what_nothing_else_reads_is_overwritten() -> None:
    """The first block gets an input of the model, and the second what only it reads."""
    _, found = blocks()
    bodies = [r for r in split_into(found, 2).regions if r.slicing is not None and len(r.outputs) == 1]
    over = [[place for _, place in body.slicing.writes] for body in bodies if body.slicing is not None]
    assert over[0] == [None] and over[1] != [None]
    assert bodies[0].info.key != bodies[1].info.key


def test_a_transposed_stream_is_copied_first() -> None:
    """No result of a joint block is transposed, so none could overwrite the stream itself.  Results in slices do not share
    memory, although they are views of one value."""
    model, found = in_turn([Transposed(), Joint(), JointBlock(), JointBlock(), Joint()])
    again = split_into(found, 4)
    check_cut(again)
    verify(program_of(again))
    regions = [r for r in again.regions if r.info.block == "blocks.2"]
    copy, body = regions[0], regions[-1]
    assert [n.meta["val"].is_contiguous() for n in (*copy.inputs, *copy.outputs)] == [False, True]
    assert body.slicing is not None
    assert [body.inputs[over] for _, over in body.slicing.writes if over is not None] == [*copy.outputs]
    most = [max(r.info.live for r in again.regions if r.info.block == block) for block in ("blocks.2", "blocks.3")]
    state = X.numel() * X.element_size()
    assert most[0] <= 6.6 * state and most[1] <= 6.1 * state  # at least one more each if it were new memory
    torch.testing.assert_close(run(again, model, X.clone()), model(X), rtol=0, atol=0)


@cache
def live_of_splits() -> list[int]:
    """The bytes of activations of three blocks, whole and in ever more slices."""
    _, found = blocks(3)
    return [found.problem.live_bytes, *(each.problem.live_bytes for each in splits(found))]


def test_slices_need_fewer_bytes() -> None:
    live = live_of_splits()
    assert live == sorted(live, reverse=True) and len(set(live)) == len(live) > 1
    assert live[-1] < 0.7 * live[0]


def test_sizes_that_no_number_of_slices_divides_stay_whole() -> None:
    _, found = blocks(1, torch.randn(1, 63, WIDTH))
    (region,) = found.regions
    assert "63 tokens cannot be divided into 2 slices" in why_whole(region, 2)
    with pytest.raises(Whole, match="63 tokens"):
        split(found, {region.info.key: 2})
    assert [*splits(found)] == [] and split_into(found, 4).regions == found.regions


def settings(found: Cut, **goal: object) -> Settings:
    return Settings(hardware=load_profile("h100-nvlink"), goal=Goal(**goal), chunk_bytes=1024)  # type: ignore[arg-type]


def test_the_budget_decides() -> None:
    """As few slices as weights and activations need; none without a budget of both; an error states the minimum."""
    _, found = blocks(3)
    weights, live = found.problem.total_bytes, live_of_splits()
    repeats = []
    for nbytes in (2 * weights + live[0], weights // 2 + live[-1]):
        goal = settings(found, memory=nbytes, activations=True)
        chosen = choose_cut(found.traced, goal)
        plan = make_plan(chosen.problem, goal)
        assert plan.device_bytes + chosen.problem.live_bytes <= nbytes
        repeats.append(max(r.repeat for r in chosen.problem.regions))
    assert repeats[0] == 1 < repeats[1]
    again = choose_cut(found.traced, replace(aimed(goal, memory=None, activations=False), plan=plan))
    assert again.problem.digest == chosen.problem.digest == plan.problem, "a plan with slices is found again"
    assert max(r.repeat for r in choose_cut(found.traced, settings(found, memory=weights)).problem.regions) == 1
    little = settings(found, memory=live[-1] + 100, activations=True)
    with pytest.raises(ChunkflowError, match=r"^memory=.* for activations.* Give memory='(\S+)' or more") as told:
        make_plan(choose_cut(found.traced, little).problem, little)
    assert max(REPEATS) > 1 and "too little" in str(told.value)


@cache
def in_two_slices() -> Cut:
    return split_into(blocks()[1], 2)


def wrong(change: Callable[[Program], None]) -> str:
    """The violations of a program of two blocks in two slices that was changed."""
    program = program_of(in_two_slices())
    verify(program)
    change(program)
    with pytest.raises(FindingError) as found:
        verify(program)
    return str(found.value)


def body(program: Program, number: int = 1) -> Node:
    """The call of the body of a block."""
    calls = [n for n in program.module.graph.nodes if SLICING in n.meta and len(n.meta[SLICING].writes) == 1]
    return calls[number]


def slice_as(program: Program, call: Node, slicing: Slicing) -> None:
    """Let a region, and what calls it, be sliced in another way."""
    call.meta[SLICING] = slicing
    regions = dict(program.regions)
    regions[str(call.target)] = replace(regions[str(call.target)], slicing=slicing)
    object.__setattr__(program, "regions", regions)


def resliced(number: int, **changes: Any) -> Callable[[Program], None]:
    """A change of how call ``number`` is sliced, in program order: K and V of the first block, its body, and so on."""

    def change(program: Program) -> None:
        call = [n for n in program.module.graph.nodes if SLICING in n.meta][number]
        slice_as(program, call, replace(call.meta[SLICING], **changes))

    return change


def read_whole(program: Program) -> None:
    """The body of the second block reads all of the stream that it overwrites."""
    call = body(program)
    slicing: Slicing = call.meta[SLICING]
    ((_, over),) = slicing.writes
    inputs = tuple(None if i == over else part for i, part in enumerate(slicing.inputs))
    slice_as(program, call, replace(slicing, inputs=inputs))


def moved(program: Program) -> None:
    """K and V of the first block are computed from other tokens."""
    call = next(n for n in program.module.graph.nodes if SLICING in n.meta)
    inputs = tuple(part and Slice(1, 8, TOKENS // 4) for part in call.meta[SLICING].inputs)
    slice_as(program, call, replace(call.meta[SLICING], inputs=inputs))


HALF = TOKENS // 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            read_whole, "a later call reads what an earlier one wrote", id="a stream read whole and overwritten"
        ),
        pytest.param(resliced(1, writes=((Slice(1, 0, HALF + 8), None),)), "beyond its end", id="overlapping chunks"),
        pytest.param(moved, "holds other code than its region", id="a slice at the wrong offset"),
        pytest.param(resliced(0, repeat=1), "write only 0 to 32 of it", id="K and V of one chunk only"),
        pytest.param(resliced(1, writes=((Slice(1, 8, HALF), None),)), "beyond its end", id="beyond the end"),
        pytest.param(
            resliced(1, writes=((Slice(1, 0, HALF // 2), None),)), "its calls write only 0 to 32 of it", id="a gap"
        ),
    ],
)
def test_wrong_slices_are_rejected(change: Callable[[Program], None], said: str) -> None:
    assert said in wrong(change)


def test_a_stream_that_another_input_is_a_view_of_is_rejected() -> None:
    def change(program: Program) -> None:
        call = body(program)
        ((_, over),) = call.meta[SLICING].writes
        stream = call.args[over]
        other = next(i for i, a in enumerate(call.args) if i != over and call.meta[SLICING].inputs[i] is None)
        call.update_arg(other, stream)

    assert "reads it in each call, and overwrites it" in wrong(change)


def test_a_stream_that_is_read_later_is_rejected() -> None:
    def change(program: Program) -> None:
        call = body(program)
        ((_, over),) = call.meta[SLICING].writes
        (output,) = program.module.graph.find_nodes(op="output")
        output.args = ((call.args[over],),)

    assert "after region_3 has overwritten it" in wrong(change)


def test_a_call_that_is_sliced_as_its_region_is_not_is_rejected() -> None:
    def change(program: Program) -> None:
        call = body(program, 0)
        call.meta[SLICING] = replace(call.meta[SLICING], repeat=4)

    assert "but its region in" in wrong(change)
