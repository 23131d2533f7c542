"""Hoisted models: bit-equal to the eager model, for fewer bytes, whatever changes between two calls."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import EAGER, FAST
from fake_cuda import FakeCuda
from helpers import graphs, twins
from torch import nn

from chunkflow_compile import offload, programs, replan
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.runtime.hoisted import Preamble
from chunkflow_compile.runtime.rows import RowStatistics
from chunkflow_compile.runtime.single_call import SingleCall
from chunkflow_compile.weights.counts import Counts
from chunkflow_compile.weights.host_weight import HostWeight

pytestmark = pytest.mark.usefixtures("no_grad")

WIDTH = 32
TIMES, PROMPTS = 3, 2
# Of the row of a small model, and a budget whose table has room for all its rows, within which weights stream.
ROW_BYTES = 3 * 2 * WIDTH * 4
MEMORY = 80_000


class Modulated(nn.Module):
    """Blocks that scale by what a timestep and a pooled prompt give, as AdaLN does."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.pool = nn.Linear(WIDTH, WIDTH)
        self.modulations = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(blocks))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: torch.Tensor, t: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * torch.arange(1, 9, device=t.device)
        temb = nn.functional.silu(self.embed(angles.sin().to(x.dtype)) + self.pool(pooled))
        for modulation, projection in zip(self.modulations, self.projections, strict=True):
            scale, shift = modulation(temb)[:, None].chunk(2, dim=-1)
            x = x + projection(x * (1 + scale) + shift)
        return x


def modulated_inputs(time: int, prompt: int, call: int, tokens: int = 16, batch: int = 1) -> dict[str, Any]:
    """``call``: the latent is another one in each call."""
    rng = torch.Generator().manual_seed(call)
    pooled = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(prompt))
    x = torch.randn(batch, tokens, WIDTH, generator=rng)
    return {"x": x, "t": torch.full((batch,), 1.0 - time / 10), "pooled": pooled}


class Pair:
    """A hoisted model, and its eager twin.  ``inputs``: of a timestep, a prompt and a call."""

    def __init__(
        self,
        made: tuple[Any, Any] | None = None,
        inputs: Callable[..., dict[str, Any]] = modulated_inputs,
        placing: Any = None,
        **options: Any,
    ) -> None:
        self.model, self.twin = twins(Modulated) if made is None else made
        self.inputs = inputs
        if "arena" not in options:
            offload(self.model, min_bytes=EAGER["min_bytes"], **(placing or {}))
        chosen = {**EAGER, "hoist": True, **options}
        if "memory" in options:
            chosen.pop("slowdown")
            chosen["hardware"] = options.get("hardware", FAST)
        self.run = torch.compile(self.model, backend="chunkflow", fullgraph=True, options=chosen)
        self.calls = 0

    @property
    def main(self) -> SingleCall:
        return programs(self.model)[-1]

    @property
    def preamble(self) -> Preamble:
        (found,) = placement_of(self.model).preambles
        return found

    @property
    def filling(self) -> SingleCall:
        """The program that computes rows."""
        (found,) = (p for p in placement_of(self.model).programs if p.preamble and not p.closed)
        return found

    @property
    def rows(self) -> RowStatistics:
        return self.preamble.statistics[self.filling]

    @property
    def counts(self) -> Counts:
        return placement_of(self.model).store.counts

    def call(self, time: int = 0, prompt: int = 0, **given: Any) -> bool:
        """Make one call, which gives what the twin gives; return whether it was a hit."""
        self.calls += 1
        inputs = self.inputs(time, prompt, self.calls, **given)
        before = self.counts.row_hits if self.calls > 1 else 0
        got, want = self.run(**inputs), self.twin(**inputs)
        assert torch.equal(_first(got), _first(want)), (time, prompt, given)
        return self.counts.row_hits > before

    def all_hits(self, **given: Any) -> bool:
        """Whether the rows of all timesteps and prompts are in the table."""
        return all(self.call(time, prompt, **given) for time in range(TIMES) for prompt in range(PROMPTS))

    def held(self) -> int:
        """Bytes of weights and rows on the device."""
        placement = placement_of(self.model)
        arena, tables = self.main.arena, (rows for p in placement.preambles for rows in p.statistics.values())
        small = sum(p.nbytes for p in self.model.parameters() if not isinstance(p, HostWeight))
        return arena.held + small + sum(rows.nbytes for rows in tables)

    def both(self, change: Callable[[Any], object]) -> None:
        for model in (self.model, self.twin):
            torch.manual_seed(0)
            change(model)


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


@pytest.fixture
def pair() -> Pair:
    """A small one that has computed the rows of all timesteps and prompts."""
    made = Pair(memory=MEMORY)
    fill(made)
    return made


def fill(pair: Pair) -> None:
    for time in range(TIMES):
        for prompt in range(PROMPTS):
            pair.call(time, prompt)
    assert pair.all_hits()


def test_a_table_within_its_share_of_memory_evicts_rows() -> None:
    """Of the six rows, it has room for two."""
    pair = Pair(memory=26_000)
    rows = 26_000 // 16 // ROW_BYTES
    assert rows == 2
    for time in range(TIMES):
        assert not pair.call(time) and pair.call(time)
        assert pair.held() <= 26_000
    assert pair.call(TIMES - 2) and not pair.call(0)
    assert pair.rows.rows == rows and pair.rows.nbytes == rows * ROW_BYTES


def test_replanning_keeps_the_rows(pair: Pair) -> None:
    """With a larger and a smaller budget, within which weights and table stay."""
    assert pair.main.plan.moved_bytes == 0
    for memory in (25_000, 10**6, 26_000, MEMORY):
        replan(pair.run, memory=memory)
        assert pair.all_hits()
        assert pair.held() <= memory == pair.main.code.settings.goal.memory
        assert (pair.main.plan.moved_bytes > 0) == (memory < 35_000)
    assert pair.rows.computed == TIMES * PROMPTS


def test_sizes_of_the_image_share_rows(pair: Pair) -> None:
    for tokens in (24, 32, 16):
        assert pair.all_hits(tokens=tokens)
    assert graphs() == 2 and pair.rows.computed == TIMES * PROMPTS


def test_batches_have_rows_of_their_own() -> None:
    """One product for a batch of two may round differently from two.  Images of another size share the rows of a batch."""
    pair = Pair(memory=MEMORY)
    for batch in (2, 1):
        assert [pair.call(batch=batch, tokens=tokens) for tokens in (16, 40, 24)] == [False, True, True]
    compiled = graphs()
    for batch in (2, 1, 2):
        assert pair.call(batch=batch, tokens=64)
    assert graphs() == compiled


@pytest.mark.parametrize("name", ["modulations.1.weight", "modulations.1.bias", "embed.bias", "projections.1.weight"])
def test_a_written_weight_drops_the_rows_that_depend_on_it(pair: Pair, name: str) -> None:
    """Weights that are offloaded, and small ones that stay on the device.  Those of main change no row."""
    pair.both(lambda model: model.get_parameter(name).mul_(1.5))
    assert pair.call(1) == name.startswith("projections")
    assert pair.call(0) and pair.call(2), "one pass computes the rows of a prompt again"


def test_load_state_dict_drops_the_rows(pair: Pair) -> None:
    state = {name: 1.25 * value for name, value in pair.twin.state_dict().items()}
    pair.both(lambda model: model.load_state_dict(state))
    assert not pair.call(1)
    assert not pair.call(1, 1) and pair.all_hits()


@pytest.mark.parametrize("debug", ["poison", ("poison", "threads")])
def test_rows_survive_what_the_preamble_leaves_in_the_arena(debug: Any) -> None:
    pair = Pair(memory=26_000, debug=debug)
    rng = random.Random(0)
    hits = [pair.call(rng.randrange(TIMES), rng.randrange(PROMPTS)) for _ in range(24)]
    assert 0 < sum(hits) < 24
    assert pair.rows.hits == sum(hits)


def test_a_step_that_is_a_cuda_graph_gets_rows_as_inputs() -> None:
    cuda = FakeCuda(copy_s=1e-4)
    pair = Pair(memory=MEMORY, arena=cuda.arena(), cudagraphs=True, debug="poison")
    for _ in range(4):
        for time in range(TIMES):
            pair.call(time)
    log = pair.main.call.captures
    assert log.captures == 1 and log.launches > 6 and not log.why_not
    assert not pair.call(0, 1) and pair.call(1, 1) and pair.call(1), "a miss is issued before a launch"
    assert log.captures == 1


def test_packed_weights_are_hoisted() -> None:
    def make() -> nn.Module:
        return Modulated().to(torch.bfloat16)

    def inputs(*call: int) -> dict[str, Any]:
        return {name: x if name == "t" else x.to(torch.bfloat16) for name, x in modulated_inputs(*call).items()}

    pair = Pair(twins(make), inputs, {"pack": True}, memory=MEMORY)
    fill(pair)
    assert any(buffer.compressed for buffer in pair.filling.buffers.values())


def test_values_and_not_objects_are_compared(pair: Pair) -> None:
    """Other tensors of equal values are a hit; a tensor that was written, one in the same memory, and -0.0 are misses."""
    inputs = pair.inputs(0, 0, 0)

    def hit() -> bool:
        before = pair.counts.row_hits
        assert torch.equal(pair.run(**inputs), pair.twin(**inputs))
        return pair.counts.row_hits > before

    assert hit()
    inputs["pooled"].add_(1)
    assert not hit() and hit()
    inputs["pooled"].data.add_(1)  # which torch does not count
    assert not hit()
    inputs["t"] = torch.zeros(1)
    assert not hit()
    inputs["t"] = -torch.zeros(1)
    assert not hit()
