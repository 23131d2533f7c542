"""Live: the bytes of activations against the code that Inductor generates, and in programs by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from helpers import fake_ranks
from torch import nn
from wrappers import Call, peaks_of

from chunkflow_compile.catalog.presets import PRESETS, preset
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.passes.cost.live import live_of
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.coarsen import apart, grouped, merged
from chunkflow_compile.passes.graph.regions import Cut, cut
from chunkflow_compile.passes.placement.coarsest import coarsest
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem

LAYERS = ("num_layers", "num_single_layers", "n_layers")
CLOSE = 0.05
# Bytes of a hidden state.
TOKENS, WIDTH = 8, 16
STATE = 4 * TOKENS * WIDTH


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(2 * self.up(x).relu())


class Modulated(nn.Module):
    """A large value that is cheap to compute, read after both products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        scales = scale.expand(4, TOKENS, WIDTH) + 1
        return self.second(self.first(x) * scales[0]) * scales[1]


class Exchange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exchanged = funcol.all_to_all_single(self.first(x), None, None, dist.group.WORLD)
        y = self.beside(x)
        return self.second(exchanged) + y


@pytest.mark.long  # in make test, test_split_models.py compares the prediction with torch's allocator
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_needs_what_its_compiled_code_allocates(name: str) -> None:
    """At its finest cut and with one region per block; ``merged`` knows the latter without cutting again."""
    known = preset(name)
    # Two blocks of each type are enough, because all others are equal to them.
    config = known.config | dict.fromkeys(known.config.keys() & {*LAYERS}, 2)
    finest = make_cut(replace(known, config=config).trace())
    groups = grouped(finest, None)
    blocks = cut(finest.traced, finest.discovery, groups=groups)
    assert [r.live for r in merged(finest, groups).regions] == [r.live for r in blocks.problem.regions]
    wrappers: dict[str, Call] = {}
    for form, pieces in (("finest", finest), ("blocks", blocks)):
        most = max(peaks_of(pieces, wrappers))
        live = pieces.problem.live_bytes
        print(f"{name} {form} {live / 2**20:.0f} {most / 2**20:.0f} {live / most:.3f}")
        assert live == pytest.approx(most, rel=CLOSE)


def of(module: nn.Module, group_bytes: int, *operands: torch.Tensor) -> Cut:
    names = ("x", "scale")
    return make_cut(trace(module, dict(zip(names, operands, strict=False)), 0), group_bytes)


def test_a_pointwise_chain_takes_no_memory_of_its_own() -> None:
    """With Inductor the input, the hidden value and the result; op by op two hidden values at a time."""
    whole = of(FeedForward(), 1 << 20, torch.randn(TOKENS, WIDTH))
    assert [r.live for r in whole.problem.regions] == [(1 + 4 + 1) * STATE]
    op_by_op = whole.at(replace(whole.traced, fused=False))
    assert [r.live for r in op_by_op.problem.regions] == [(1 + 4 + 4) * STATE]
    assert op_by_op.problem.digest == whole.problem.digest, "not part of it"
    assert Problem.from_body(whole.problem.body) == whole.problem
    assert 10 * STATE - whole.problem.live_bytes == 4 * STATE


def test_a_region_frees_what_no_later_one_reads() -> None:
    """The caller holds the input; the second region ends without what the first one returns."""
    parts = of(FeedForward(), 1, torch.randn(TOKENS, WIDTH))
    live = live_of(parts.storages, parts.sequence)
    assert (live.between, live.peaks) == ((STATE, 5 * STATE), (5 * STATE, 6 * STATE))


def test_a_collective_holds_its_operand_until_it_is_complete() -> None:
    """Also while another region runs."""
    with fake_ranks():
        parts = of(Exchange(), 1, torch.randn(TOKENS, WIDTH))
    first, exchange, completion, beside, second = parts.sequence
    assert live_of(parts.storages, (first, exchange, beside, completion, second)).peaks == (
        2 * STATE,
        4 * STATE,
        4 * STATE,
    )


def test_a_coarser_cut_fits_where_the_finest_one_does_not() -> None:
    """A value that regions pass on is in no memory if they are joined.  If bytes of activations count, that decides."""
    fine = of(Modulated(), 1, torch.randn(TOKENS, WIDTH), torch.randn(1, TOKENS, WIDTH))
    coarse = merged(fine, grouped(fine, None)).live_bytes
    assert coarse < fine.problem.live_bytes

    def planned(problem: Problem, memory: int) -> Plan:
        if memory < problem.live_bytes:
            raise ChunkflowError("too little memory")
        raise Fits

    with pytest.raises(Fits):
        coarsest(fine, True, lambda problem: planned(problem, coarse))
    assert coarsest(fine, True, lambda problem: planned(problem, coarse - 1)) == apart(fine)


class Fits(Exception):
    """A plan was asked for that there is."""
