"""Hoisted models: bit-equal to the eager model, for fewer bytes, whatever changes between two calls."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from adapters import Library
from conftest import EAGER, FAST
from fake_cuda import FakeCuda
from helpers import graphs, join_closers, small_twins, twins
from pipelines import Applied, expected
from small_pipelines import SMALL_PIPELINES
from torch import nn

from chunkflow_compile import ChunkflowError, enable_adapters, explain, offload, programs, replan, restore
from chunkflow_compile.catalog.sizes import Size
from chunkflow_compile.catalog.small import SMALL_MODELS, small_inputs
from chunkflow_compile.placed.placement import Placement, placement_of
from chunkflow_compile.runtime.hoisted import Preamble
from chunkflow_compile.runtime.rows import _SPENT as SPENT
from chunkflow_compile.runtime.rows import RowStatistics
from chunkflow_compile.runtime.single_call import SingleCall
from chunkflow_compile.weights.counts import Counts
from chunkflow_compile.weights.host_weight import HostWeight

pytestmark = pytest.mark.usefixtures("no_grad")

WIDTH = 32
TIMES, PROMPTS = 3, 2
SIZE = Size(layers=1, singles=1, text=16)
# Of the row of a small model, and a budget whose table has room for all its rows, within which weights stream.
ROW_BYTES = 3 * 2 * WIDTH * 4
TOLERANCE = 1e-5  # of an adapter, whose products are summed in another order
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


def inputs_of(name: str, size: Size) -> Callable[..., dict[str, Any]]:
    """The inputs of a small model of diffusers, as :func:`modulated_inputs`."""

    def inputs(time: int, prompt: int, call: int, **changed: Any) -> dict[str, Any]:
        at = replace(size, **changed)
        found = small_inputs(name, at, 50 * prompt)
        latent = small_inputs(name, at, 50 * call + 1)["hidden_states"]
        return {**found, "hidden_states": latent, "timestep": found["timestep"] * (1 - time / 10)}

    return inputs


class Pair:
    """A hoisted model, and its eager twin.  ``inputs``: of a timestep, a prompt and a call."""

    def __init__(
        self,
        made: tuple[Any, Any] | None = None,
        inputs: Callable[..., dict[str, Any]] = modulated_inputs,
        placing: Any = None,
        prepare: Callable[[Any], object] = lambda model: None,
        **options: Any,
    ) -> None:
        """``placing``: arguments of offload.  ``prepare``: changes the model before."""
        self.model, self.twin = twins(Modulated) if made is None else made
        self.inputs = inputs
        prepare(self.model)
        if "arena" not in options:
            offload(self.model, min_bytes=EAGER["min_bytes"], **(placing or {}))
        chosen = {**EAGER, "hoist": True, **options}
        if "weight_memory" in options:
            chosen.pop("slowdown")
            chosen["hardware"] = options.get("hardware", FAST)
        self.run: Any = torch.compile(self.model, backend="chunkflow", fullgraph=True, options=chosen)
        self.calls = 0

    @property
    def placement(self) -> Placement:
        placement = placement_of(self.model)
        assert placement is not None
        return placement

    @property
    def main(self) -> SingleCall:
        return programs(self.model)[-1]

    @property
    def preamble(self) -> Preamble:
        (found,) = self.placement.preambles
        return found

    @property
    def filling(self) -> SingleCall:
        """The program that computes rows."""
        (found,) = (p for p in self.placement.programs if p.preamble and not p.closed)
        return found

    @property
    def rows(self) -> RowStatistics:
        return self.preamble.statistics[self.filling]

    @property
    def counts(self) -> Counts:
        return self.placement.store.counts

    def call(self, time: int = 0, prompt: int = 0, tolerance: float = 0.0, **given: Any) -> bool:
        """Make one call, which gives what the twin gives; return whether it was a hit."""
        self.calls += 1
        inputs = self.inputs(time, prompt, self.calls, **given)
        before = self.counts.row_hits if self.calls > 1 else 0
        got, want = self.run(**inputs), self.twin(**inputs)
        torch.testing.assert_close(_first(got), _first(want), rtol=0, atol=tolerance)
        return self.counts.row_hits > before

    def all_hits(self, **given: Any) -> bool:
        """Whether the rows of all timesteps and prompts are in the table."""
        return all(self.call(time, prompt, **given) for time in range(TIMES) for prompt in range(PROMPTS))

    def row_bytes(self) -> int:
        """Of all tables."""
        return sum(preamble.statistics[program].nbytes for preamble, program in self.placement.tables)

    def held(self) -> int:
        """Bytes of weights and rows on the device."""
        small = sum(p.nbytes for p in self.model.parameters() if not isinstance(p, HostWeight))
        return int(self.main.arena.held + small + self.row_bytes())

    def both(self, change: Callable[[Any], object]) -> None:
        for model in (self.model, self.twin):
            torch.manual_seed(0)
            change(model)


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def moved(pair: Pair) -> int:
    """Bytes copied so far."""
    return pair.counts.moved_bytes if pair.calls else 0


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "wan")) for n in sorted(SMALL_MODELS)]
)
def test_a_family_in_any_order(name: str) -> None:
    """Three timesteps and two prompts, twice.  A hit moves main's weights; a miss moves the hoisted ones, too."""
    pair = Pair(small_twins(name, SIZE), inputs_of(name, SIZE))
    rng, hits = random.Random(name), list[bool]()
    both = [(time, prompt) for time in range(TIMES) for prompt in range(PROMPTS)]
    for order in (rng.sample(both, len(both)), rng.sample(both, len(both))):
        for time, prompt in order:
            before = moved(pair)
            hits.append(pair.call(time, prompt))
            more = moved(pair) - before - pair.main.plan.moved_bytes
            assert more == 0 if hits[-1] else more >= pair.filling.plan.moved_bytes > 0
    assert not hits[0] and all(hits[len(both) :])
    assert (pair.rows.hits, pair.rows.misses) == (sum(hits), len(hits) - sum(hits))
    hoisted = sum(buffer.nbytes for buffer in pair.filling.buffers.values())
    assert pair.filling.plan.moved_bytes == hoisted
    if name != "qwen-image":
        return
    assert pair.rows.computed == TIMES, "its rows depend on the timestep alone"
    offload(pair.twin, min_bytes=EAGER["min_bytes"])
    whole = torch.compile(pair.twin, backend="chunkflow", fullgraph=True, options=EAGER)
    inputs = pair.inputs(0, 0, 0)
    assert torch.equal(_first(whole(**inputs)), _first(pair.run(**inputs)))
    saved = programs(pair.twin)[0].plan.moved_bytes - pair.main.plan.moved_bytes
    assert abs(saved - hoisted) <= 2 * EAGER["chunk_bytes"], "a plan may keep a chunk or two on the device"


@pytest.fixture
def pair(kept_dynamo: None) -> Pair:
    """A small one that has computed the rows of all timesteps and prompts."""
    made = Pair(weight_memory=MEMORY)
    fill(made)
    return made


def fill(pair: Pair) -> None:
    for time in range(TIMES):
        for prompt in range(PROMPTS):
            pair.call(time, prompt)
    assert pair.all_hits()


def test_a_table_within_its_share_of_memory_evicts_rows(kept_dynamo: None) -> None:
    """Of the six rows, it has room for two."""
    pair = Pair(weight_memory=26_000)
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
        replan(pair.run, weight_memory=memory)
        assert pair.all_hits()
        assert pair.held() <= memory == pair.main.variant.settings.goal.memory
        assert (pair.main.plan.moved_bytes > 0) == (memory < 35_000)
    assert pair.rows.computed == TIMES * PROMPTS


def test_sizes_of_the_image_share_rows() -> None:
    pair = Pair(weight_memory=MEMORY)
    fill(pair)
    for tokens in (24, 32, 16):
        assert pair.all_hits(tokens=tokens)
    assert graphs() == 2 and pair.rows.computed == TIMES * PROMPTS


def test_batches_have_rows_of_their_own(pair: Pair) -> None:
    """One product for a batch of two may round differently from two.  Images of another size share the rows of a batch, and
    the tables of all batches share the memory for rows."""
    assert pair.row_bytes() > MEMORY // 32
    assert [pair.call(batch=2, tokens=tokens) for tokens in (16, 40, 24)] == [False, True, True]
    compiled = graphs()
    for time in range(TIMES):
        for batch in (2, 1):
            pair.call(time, batch=batch, tokens=64)
            assert pair.call(time, batch=batch)
            assert pair.row_bytes() <= MEMORY // 16
    assert graphs() <= compiled + 1


def test_a_written_weight_drops_the_rows_that_depend_on_it(pair: Pair) -> None:
    """Weights that are offloaded, and small ones that stay on the device.  Those of main change no row."""

    def write(model: nn.Module) -> None:
        model.get_parameter(name).mul_(1.5)

    for name in ("modulations.1.weight", "projections.1.weight", "modulations.1.bias", "embed.bias"):
        pair.both(write)
        assert pair.call(1) == name.startswith("projections"), name
        assert pair.call(0) and pair.call(2), "one pass computes the rows of a prompt again"


def test_load_state_dict_drops_the_rows(pair: Pair) -> None:
    state = {name: 1.25 * value for name, value in pair.twin.state_dict().items()}
    pair.both(lambda model: model.load_state_dict(state))
    assert not pair.call(1)
    assert not pair.call(1, 1) and pair.all_hits()


@pytest.mark.parametrize("debug", ["poison", ("poison", "threads")])
def test_rows_survive_what_the_preamble_leaves_in_the_arena(debug: Any) -> None:
    pair = Pair(weight_memory=26_000, debug=debug)
    rng = random.Random(0)
    hits = [pair.call(rng.randrange(TIMES), rng.randrange(PROMPTS)) for _ in range(24)]
    assert 0 < sum(hits) < 24
    assert pair.rows.hits == sum(hits)


def test_a_step_that_is_a_cuda_graph_gets_rows_as_inputs() -> None:
    cuda = FakeCuda(copy_s=1e-4)
    pair = Pair(weight_memory=MEMORY, arena=cuda.arena(), cudagraphs=True, debug="poison")
    for _ in range(4):
        for time in range(TIMES):
            pair.call(time)
    log = pair.main.call.captures
    assert log.captures == 1 and log.launches > 6 and not log.why_not
    assert not pair.call(0, 1) and pair.call(1, 1) and pair.call(1), "a miss is issued before a launch"
    assert log.captures == 1


@pytest.mark.long
def test_compiled_kernels_compute_what_they_do_without_hoisting() -> None:
    inductor = {**EAGER, "lowering": "inductor"}
    pair = Pair(twins(lambda: Modulated(1)), lowering="inductor")
    offload(pair.twin, min_bytes=EAGER["min_bytes"])
    pair.twin = torch.compile(pair.twin, backend="chunkflow", fullgraph=True, options=inductor)
    fill(pair)


def test_packed_weights_are_hoisted() -> None:
    def make() -> nn.Module:
        return Modulated().to(torch.bfloat16)

    def inputs(*call: int) -> dict[str, Any]:
        return {name: x if name == "t" else x.to(torch.bfloat16) for name, x in modulated_inputs(*call).items()}

    pair = Pair(twins(make), inputs, {"pack": True}, weight_memory=MEMORY)
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


def test_an_adapter_in_the_slots_of_hoisted_layers() -> None:
    """Loading one writes slots, which drops the rows; its scale is applied in main."""
    pytest.importorskip("peft")
    layers = ["img_mod.1"]
    pair = Pair(
        small_twins("qwen-image", SIZE),
        inputs_of("qwen-image", SIZE),
        prepare=lambda model: enable_adapters(model, rank=64, targets=layers),
    )
    library = Library(pair.twin)

    def load(seed: int) -> Callable[[Any], object]:
        state = library.adapter(seed, 64, layers)
        return lambda m: m.load_lora_adapter({k: v.clone() for k, v in state.items()}, adapter_name=f"a{seed}")

    pair.call(tolerance=TOLERANCE)
    changes: list[tuple[Callable[[Any], object], bool]] = [
        (load(0), False),
        (lambda m: m.set_adapters("a0", 0.5), True),
        (load(1), False),
        (lambda m: m.unload_lora(), False),
    ]
    for change, hit in changes:
        pair.both(change)
        assert pair.call(tolerance=TOLERANCE) == hit and pair.call(tolerance=TOLERANCE)
    assert graphs() == 1


class Alone(nn.Module):
    """Nothing but blocks that the latent runs through."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, t: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        for projection in self.projections:
            x = projection(x) * t + pooled
        return x


BAD: list[tuple[dict[str, Any], type[nn.Module], str]] = [
    ({}, Alone, "no weight is read by products of small inputs alone"),
    ({"hoist": ("x",)}, Modulated, "no weight is read by products of small inputs alone"),
    ({"hoist": ("nope",)}, Modulated, "this graph has no input 'nope'; its inputs are t, x, pooled"),
    ({"hoist": ()}, Modulated, "names no input"),
    ({"hoist": "yes"}, Modulated, "hoist='yes' is unknown"),
    ({"hoist": 1}, Modulated, "hoist=1 must be True, False, 'auto', or a tuple of names"),
    ({"weight_memory": 12_000}, Modulated, "keeps rows of 768 B, and at most a sixteenth of weight_memory"),
    ({"policy": "layerwise", "slowdown": None}, Modulated, "hoist=True would change nothing; leave it out"),
]


@pytest.mark.parametrize(("options", "made", "said"), BAD)
def test_what_cannot_be_hoisted_is_one_sentence(options: dict[str, Any], made: Any, said: str) -> None:
    """It comes before a program starts, and the model is restored bit for bit."""
    pair = Pair(twins(made), **options)
    with pytest.raises(ChunkflowError, match=re.escape(said)) as raised:
        pair.call()
    assert str(raised.value).count(". ") <= 1
    check_restored(pair)


def check_restored(pair: Pair) -> None:
    assert not programs(pair.model)
    restore(pair.model)
    for own, theirs in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        assert type(own) is nn.Parameter and torch.equal(own, theirs)
    inputs = pair.inputs(0, 0, 0)
    assert torch.equal(pair.model(**inputs), pair.twin(**inputs))


def test_gradients_are_refused() -> None:
    pair = Pair()
    with pytest.raises(ChunkflowError, match="gradients are enabled"), torch.enable_grad():
        pair.run(**{name: value.requires_grad_() for name, value in pair.inputs(0, 0, 0).items()})
    check_restored(pair)


def test_weights_of_inference_mode_are_refused() -> None:
    """torch counts no writes to them, so a row could be out of date."""
    with torch.inference_mode():
        made = twins(Modulated)
    pair = Pair(made)
    with pytest.raises(ChunkflowError, match="was made in inference mode, where torch counts no writes"):
        pair.call()
    restore(pair.model)
    assert all(torch.equal(own, theirs) for own, theirs in zip(*(m.parameters() for m in made), strict=True))


def test_hoisting_ends_if_no_value_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(weight_memory=26_000)
    for call in range(SPENT + 2):
        assert not pair.call(call)
        assert pair.held() <= 26_000
    assert caplog.text.count("none of the rows computed so far was used again") == 1
    assert graphs() == 1
    join_closers()
    gc.collect()
    pair.call(0)
    assert pair.held() <= 26_000 and not pair.placement.preambles
    (program,) = programs(pair.model)
    assert len(program.program.problem.weights) > 6


def test_rows_are_the_models_own() -> None:
    """Two models of one class share a compiled graph, and neither uses the rows of the other."""
    torch.manual_seed(0)
    first = Pair(weight_memory=MEMORY)
    other = Pair((Modulated().eval(), Modulated().eval()), weight_memory=MEMORY)
    other.twin.load_state_dict(other.model.state_dict())
    for pair in (first, other, first, other):
        pair.call(0)
    assert graphs() == 1
    assert first.counts.row_hits == other.counts.row_hits == 1
    for pair in (first, other):
        said = str(explain(pair.model, details=True)).replace("\n", " ")
        assert "1 rows of 768 B in a table of at most 4.5 KiB; 1 of 2 calls found theirs" in said
        assert "of weights, 768 B of results of hoisted weights" in said


def test_a_restored_model_starts_without_rows_and_a_reset_one_runs(pair: Pair) -> None:
    restore(pair.model)
    assert not placement_of(pair.model)
    pair.both(lambda model: model.modulations[0].weight.mul_(2))
    offload(pair.model, min_bytes=EAGER["min_bytes"])
    assert not pair.call(0) and pair.call(0)
    torch._dynamo.reset()
    pair.call(0)
    assert pair.call(0)


def test_compiled_code_keeps_no_model_alive() -> None:
    pair = Pair(weight_memory=MEMORY)
    pair.call(0)
    model, weight = weakref.ref(pair.model), weakref.ref(pair.model.modulations[0].weight)
    del pair.model, pair.run
    gc.collect()
    assert model() is None and weight() is None


def test_a_model_that_is_dropped_frees_its_preamble_and_its_rows(pair: Pair) -> None:
    program, preamble = weakref.ref(pair.filling), weakref.ref(pair.preamble)
    table = weakref.ref(pair.filling.table)
    del pair.model, pair.run
    torch._dynamo.reset()
    join_closers()
    gc.collect()
    assert table() is None and program() is None and preamble() is None


class Summed(Modulated):
    """Its outputs are summed over the ranks."""

    def forward(self, x: torch.Tensor, t: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(super().forward(x, t, pooled), "sum", dist.group.WORLD)


def one_of_two_misses(rank: int, family: str) -> None:
    pair = Pair(twins(Summed)) if family == "small" else Pair(small_twins(family, SIZE, 2), inputs_of(family, SIZE))
    assert not pair.call(0, 0)
    assert pair.call(0, rank) == (rank == 0)
    assert pair.call(0, 0) and pair.call(0, rank)


@pytest.mark.parametrize("family", ["small", pytest.param("flux", marks=pytest.mark.long)])
def test_one_of_two_ranks_misses(family: str, on_ranks: Callable[..., None]) -> None:
    """As with another prompt: it computes its row, and the other rank waits for it in the next collective."""
    on_ranks(one_of_two_misses, family)


# Most misses in a generation with another prompt: none if the timestep alone is the key, two if a step calls the model with
# batches of two sizes.
PIPELINES = {"qwen-image": 0, "flux": 1, "hunyuanvideo": 1, "sd3": 1, "sd3.5": 2}


@pytest.mark.long  # test_hoisting_by_kind.py runs a pipeline in make test
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline(name: str, applied: Applied) -> None:
    pipe, _ = applied(name, "4.5MiB" if "sd3" in name else "1MiB", hoist=True)
    placement = placement_of(pipe.transformer)
    assert placement is not None
    missed = list[int]()
    for seed, changed in enumerate([{}, {"prompt": "two cats"}]):
        before = placement.store.counts.row_misses
        assert torch.equal(SMALL_PIPELINES[name].generate(pipe, seed, **changed), expected(name, seed, **changed))
        missed.append(placement.store.counts.row_misses - before)
    # what is compiled by kind knows no timestep before its step
    assert missed[0] > 0 and (name == "qwen-image" or missed[0] <= PIPELINES[name])
    assert missed[1] <= PIPELINES[name]


def test_auto_says_that_it_hoists_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Where all weights fit, each prompt would only cost the time of a preamble."""
    pair = Pair(weight_memory=10**6, hoist="auto")
    pair.call()
    pair.call()
    assert caplog.text.count("hoist='auto' hoists nothing") == 1 and not pair.placement.preambles


def test_offload_takes_the_option_for_what_compiles_the_model() -> None:
    pair = Pair(placing={"hoist": True}, weight_memory=MEMORY, hoist=False)
    assert not pair.call(0) and pair.call(0)
    with pytest.raises(ChunkflowError, match="hoist='yes' is unknown"):
        offload(Modulated(), hoist="yes")
