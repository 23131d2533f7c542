"""Models whose weights are packed: the same bits as raw ones, in fewer bytes, whatever is done with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from conftest import EAGER, FAST, OPTIONS
from helpers import Stack, small_twins, twins
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


class Tupled(Stack):
    """Called as a model of diffusers."""

    def forward(self, x: torch.Tensor) -> Any:
        return (super().forward(x),)


def bf16_twins(family: str) -> tuple[Any, Any]:
    """``family``: also "stack", of blocks of two large weights."""
    made = twins(lambda: Tupled(3, 128)) if family == "stack" else small_twins(family, SIZE)
    return tuple(model.to(torch.bfloat16) for model in made)  # type: ignore[return-value]


def inputs_of(family: str, seed: int, size: Size = SIZE) -> dict[str, Any]:
    if family == "stack":
        rows = size.height * size.width
        return {"x": torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)}
    inputs = small_inputs(family, size, seed)
    floats = {n: v.to(torch.bfloat16) for n, v in inputs.items() if torch.is_tensor(v) and v.is_floating_point()}
    return {**inputs, **floats}


def check(model: Any, twin: Any, family: str, seeds: Iterable[int], size: Size = SIZE) -> None:
    for seed in seeds:
        inputs = inputs_of(family, seed, size)
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0]), seed


def packed_of(model: nn.Module) -> list[HostBuffer]:
    placement = placement_of(model)
    assert placement is not None
    return [buffer for buffer in placement.store.buffers if buffer.compressed]


@dataclass
class Pair:
    """A model whose weights are packed, compiled; a plain twin; the family of both."""

    family: str
    by_kind: bool
    threads: bool

    def __post_init__(self) -> None:
        self.model, self.twin = bf16_twins(self.family)
        options = {**EAGER, **({"debug": ["threads", "poison"]} if self.threads else {})}
        offload(self.model, min_bytes=options["min_bytes"], pack=True)
        if self.by_kind:
            self.run = chunkflow_compile.compile(self.model, **options)
        else:
            self.run = torch.compile(self.model, backend="chunkflow", fullgraph=True, options=options)

    def check(self, *seeds: int, size: Size = SIZE) -> None:
        check(self.run, self.twin, self.family, seeds, size)

    def both(self, change: Callable[[Any], object]) -> None:
        for number, model in enumerate((self.model, self.twin)):
            torch.manual_seed(0)
            change(model)
            assert number or packed_of(model)


@pytest.mark.parametrize(
    ("family", "by_kind", "threads"),
    [
        ("stack", True, False),
        pytest.param("wan", True, False, marks=pytest.mark.long),
        pytest.param("flux", True, False, marks=pytest.mark.long),
        pytest.param("wan", False, True, marks=pytest.mark.long),
        pytest.param("qwen-image", True, False, marks=pytest.mark.long),
        pytest.param("qwen-image", False, True, marks=pytest.mark.long),
        pytest.param("flux", False, False, marks=pytest.mark.long),
    ],
)
def test_the_same_bits_in_fewer_bytes(family: str, by_kind: bool, threads: bool) -> None:
    pair = Pair(family, by_kind, threads)
    pair.check(*range(4))
    packed = check_transfers(pair)
    check_writes(pair, packed)
    check_one_that_does_not_fit(pair, packed)
    model, twin = pair.model, pair.twin
    restore(model)
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor and torch.equal(value, twin.state_dict()[name]), name


def check_transfers(pair: Pair) -> list[HostBuffer]:
    """What is copied are the packed bytes."""
    packed = packed_of(pair.model)
    assert packed and all(b.nbytes == Layout.of(b.host.numel()).nbytes < b.host.nbytes for b in packed)
    ran = cycles(pair.model)[0] if pair.by_kind else programs(pair.model)[0]
    newest = ran.measurements[-1]
    assert newest.primed_bytes == 0 and newest.moved_bytes == ran.plan.moved_bytes > 0
    planned = {w.name: w for w in ran.cycle.problem.weights}
    for name, buffer in ran.buffers.items():
        assert planned[name].nbytes == buffer.nbytes and planned[name].source.compressed == (buffer.compressed)
    said = str(explain(pair.model, details=True))
    assert f"{len(packed)} of " in said and "weights are packed" in said
    return packed


def check_writes(pair: Pair, packed: list[HostBuffer]) -> None:
    """They are packed again."""
    name = packed[3].name
    changes: list[Callable[[Any], object]] = [
        lambda m: m.get_parameter(name).mul_(1.5),
        lambda m: m.get_parameter(name).data.add_(0.01),
        lambda m: m.get_parameter(name)[:4].mul_(0.5),
        lambda m: m.get_parameter(name).copy_(torch.randn_like(m.get_parameter(name))),
    ]
    for number, change in enumerate(changes):
        pair.both(change)
        pair.check(10 + number)
    pair.model.load_state_dict(pair.twin.state_dict())
    pair.check(20, 21)
    assert packed_of(pair.model) == packed


def check_one_that_does_not_fit(pair: Pair, packed: list[HostBuffer]) -> None:
    """It is raw from then on.  Its block runs other code, the other blocks theirs, at other sizes too."""
    name = next(b.name for b in packed if "blocks.1." in b.name)
    wild = torch.logspace(-30, -2, 4096).to(torch.bfloat16)

    def change(model: Any) -> None:
        values = model.get_parameter(name).view(-1)
        values[8 : len(wild)] = wild[8 : len(values)]

    pair.both(change)
    pair.check(30, 31, 32)
    assert {b.name for b in packed} - {b.name for b in packed_of(pair.model)} == {name}
    pair.check(33, 34, size=replace(SIZE, height=8, width=12))
    pair.check(35, size=replace(SIZE, height=12, width=8))
    pair.check(36)


@pytest.mark.long
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


@pytest.mark.long
def test_the_plan_chooses() -> None:
    """With a budget in which copies are the bound."""
    fast = {**EAGER, "hardware": FAST, "weight_memory": "400KiB", "pack": "auto"}
    fast.pop("slowdown")
    model, twin = bf16_twins("flux")
    chunkflow_compile.compile(model, **fast)
    check(model, twin, "flux", range(4))
    assert packed_of(model)


@pytest.mark.long
def test_without_a_budget_nothing_is_chosen() -> None:
    model, twin = bf16_twins("flux")
    chunkflow_compile.compile(model, **EAGER, pack="auto")
    check(model, twin, "flux", range(2))
    said = " ".join(str(explain(model, details=True)).split())
    assert not packed_of(model) and "neither memory= nor weight_memory= was given" in said


@pytest.mark.long
def test_packed_at_the_first_call() -> None:
    """The option packs what the first call places."""
    model, twin = bf16_twins("qwen-image")
    run = torch.compile(model, backend="chunkflow", options={**PACKED, "debug": ["threads", "poison"]})
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


@pytest.mark.long
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
        assert ("weights are packed" in str(explain(pipe, details=True))) == pack
        chunkflow_compile.remove(pipe)
        assert pipelines.is_plain(pipe)
    assert all(torch.equal(a, b) for a, b in zip(made[False], made[True], strict=True))


def on_a_rank(rank: int) -> None:
    """Ranks share one packed copy; one that writes packs its own, and the others keep theirs."""
    model, twin = (m.to(torch.bfloat16) for m in small_twins("wan", SIZE, degree=2))
    offload(model, min_bytes=EAGER["min_bytes"], pack=True, share=True)
    packed = packed_of(model)
    assert packed and all(buffer.backing.where is Where.SHARED for buffer in packed)
    run = chunkflow_compile.compile(model, **EAGER)
    check(run, twin, "wan", range(4))
    assert cycles(model)[0].measurements[-1].moved_bytes > 0
    for each in (model, twin) if rank else ():
        each.get_parameter(packed[0].name).zero_()
    check(run, twin, "wan", range(4, 8))
    assert [b.backing.where for b in packed].count(Where.OWN) == rank and packed_of(model) == packed
    restore(model)


@pytest.mark.long
def test_two_ranks(on_ranks: Any) -> None:
    on_ranks(on_a_rank)


@pytest.mark.long
@pytest.mark.parametrize("slots", [True, False])
def test_adapters(slots: bool) -> None:
    """In slots and without: loaded, chosen, fused into packed weights and taken out again, unloaded."""
    pytest.importorskip("peft")
    from adapters import Library

    model, twin = bf16_twins("flux")
    states = [Library(twin).adapter(seed, 4, ("to_q", "to_v")) for seed in range(2)]
    if slots:
        chunkflow_compile.enable_adapters(model, rank=8, targets=("to_q", "to_v"))
    chunkflow_compile.compile(model, **PACKED)
    check(model, twin, "flux", range(3))
    for number, state in enumerate(states):
        for m in (model, twin):
            m.load_lora_adapter({k: v.to(torch.bfloat16) for k, v in state.items()}, adapter_name=f"a{number}")
        check(model, twin, "flux", [number])
    for change in (
        lambda m: m.set_adapters("a0"),
        lambda m: m.fuse_lora(adapter_names=["a0"]),
        lambda m: m.unfuse_lora(),
        lambda m: m.unload_lora(),
    ):
        for m in (model, twin):
            change(m)
        check(model, twin, "flux", [5])
    assert packed_of(model) and packed_of(model)[0].store.counts.moved_bytes
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
