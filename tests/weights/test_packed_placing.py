"""Placing packed weights: which are packed, from where, what it takes meanwhile, and what other ranks see."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import EAGER, WITHIN
from helpers import Stack, Tabled, in_memory, load_stack, stack, twins
from safetensors.torch import load_file, save_file
from test_drive import LEAST, buffers, full, same
from test_packed import NAME, OTHER, heavy, held, packed, pair, plain
from test_shared_weights import said_here
from torch import nn

from chunkflow_compile import ChunkflowError, offload, programs, restore
from chunkflow_compile.frontend import graph_compiler
from chunkflow_compile.passes.packing import Layout
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights import loader
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.bytes import flat_bytes
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.mapping import whole_pages
from chunkflow_compile.weights.weight_memory import Form

BF16 = torch.bfloat16
# Of a checkpoint.
ESCAPES = "blocks.2.up.weight"

pytestmark = pytest.mark.usefixtures("no_grad")


def tied(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.up.weight, block.down.weight = model.blocks[0].up.weight, model.blocks[0].down.weight
    return model


# What cannot be packed: a model, what the call is given, and the sentence.
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "float32": (
        lambda: stack(),
        {},
        "Stack has none: its large weights are float32. Load it in bfloat16 or pass dtype=",
    ),
    "float16": (lambda: stack().half(), {}, "has none: its large weights are float16"),
    "cast": (plain, {"dtype": torch.float32}, "has none: its large weights are float32"),
    "tied": (lambda: tied(plain()), {}, "Stack has none: its large weights are bfloat16. Leave out pack."),
    "small": (plain, {"min_bytes": 1 << 30}, "has none: it has no large weights"),
    "a word": (plain, {"pack": "all"}, "pack is True, False or \"auto\", not 'all'"),
    "a number": (plain, {"pack": 2}, 'pack is True, False or "auto", not 2'),
    "placed": (lambda: offload(plain(), min_bytes=LEAST), {}, "are offloaded already"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_be_packed(what: str) -> None:
    make, given, said = REFUSED[what]
    model = make()
    before = placement_of(model)
    with pytest.raises(ChunkflowError, match=said.replace("(", r"\(").replace(")", r"\)")):
        offload(model, **{"min_bytes": LEAST, "pack": True, **given})
    assert placement_of(model) is before and torch.equal(next(model.parameters()), next(make().parameters()))


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone().to(BF16) for name, value in model.state_dict().items()}, assign=True)


def exchanged(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.double()
        p.data = p.data.bfloat16()


# What gives the weights other memory, of other values or not, and leaves them in bfloat16.
RETURNS: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda m: m.to(torch.float32).to(BF16),
    "methods": lambda m: m.half().float().bfloat16(),
    "values": lambda m: m.to(torch.float64).mul_twice().to(BF16),
    "apply": lambda m: m._apply(lambda t: t.float().mul(2).to(BF16)),
    "data": exchanged,
    "assign": assigned,
}


@pytest.mark.parametrize("placed", [True, False])
def test_no_region_is_lowered_for_a_form_that_a_weight_cannot_have(
    placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether values can be packed is asked before code is lowered for them, of weights in the store and of others."""
    model, twin = plain(), plain()
    for m in (model, twin):
        m.get_parameter(NAME).copy_(heavy(m.get_parameter(NAME)))
    lowered, lower = list[set[str]](), graph_compiler.lower_regions

    def lowers(program: Program, *args: Any) -> Any:
        lowered.append({w.name for w in program.problem.weights if w.source.compressed})
        return lower(program, *args)

    monkeypatch.setattr(graph_compiler, "lower_regions", lowers)
    if placed:
        offload(model, min_bytes=LEAST, pack="auto")
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**EAGER, "min_bytes": LEAST, "pack": True})
    for seed in range(2):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(BF16)
        assert torch.equal(run(x), twin(x))
    assert lowered == [packed(model)] == [{*buffers(model)} - {NAME}] != [set()]


class Twice(Stack):
    def mul_twice(self) -> Twice:
        for p in self.parameters():
            p.mul_(2)
        return self


def streaming(model: nn.Module) -> Any:
    options = {"lowering": "eager", "min_bytes": LEAST, "chunk_bytes": 1024, "policy": "layerwise"}
    return torch.compile(model, backend="chunkflow", fullgraph=True, options=options)


# torch gives memory in these as in "to"
ALIKE = [pytest.param(what, False, marks=pytest.mark.long) for what in ("methods", "apply")]


@pytest.mark.parametrize(
    ("what", "drive"),
    [
        *(("to", drive) for drive in (False, True)),
        *(pytest.param(what, False, marks=pytest.mark.long) for what in ("values", "data", "assign")),
        *ALIKE,
    ],
)
def test_a_model_that_comes_back_to_its_dtype_is_packed_again(what: str, drive: bool) -> None:
    """At its next call, also if it was called in another dtype; the same with weights that were on the drive before."""
    model, twin = twins(lambda: Twice().to(BF16).requires_grad_(False))
    offload(model, min_bytes=LEAST, pack=True, host_memory=0 if drive else None)
    run, before = streaming(model), packed(model)
    memory = sum(buffers(model)[name].nbytes for name in before)

    def step(dtype: torch.dtype) -> None:
        x = torch.randn(4, 8).to(dtype)
        assert torch.equal(run(x), twin(x))

    step(BF16)
    for times in range(2):
        for m in (model, twin):
            RETURNS[what](m)
        step(BF16)
        assert packed(model) == before != set() and same(model, twin)
        assert sum(buffers(model)[name].nbytes for name in before) == memory
        (program,) = programs(model)
        assert program.measurements[-1].moved_bytes == program.plan.moved_bytes > 0
        if not times:
            for m in (model, twin):
                m.to(torch.float32)
            step(torch.float32)
            assert packed(model) == set()
    restore(model)
    assert same(model, twin)


def test_memory_that_others_use_is_not_packed() -> None:
    """A view of a weight goes on to be one."""
    model, twin = pair()
    for m in (model, twin):
        m.to(torch.float32).to(BF16)
    views = [m.get_parameter(NAME).data[1:] for m in (model, twin)]
    x = torch.randn(4, 8).to(BF16)
    assert torch.equal(streaming(model)(x), twin(x))
    assert packed(model) == {*buffers(model)} - {NAME} != set()
    for m in (model, twin):
        m.get_parameter(NAME).mul_(2)
        m.get_parameter(OTHER).mul_(2)
    assert torch.equal(*views) and same(model, twin)


def test_a_copy_is_packed_as_well() -> None:
    model, twin = pair()
    copied = copy.deepcopy(model)
    offload(copied, min_bytes=LEAST, pack=True)
    assert packed(copied) == packed(model) != set() and same(copied, twin)
    copied.get_parameter(NAME).zero_()
    assert same(model, twin)


def test_what_stays_raw_in_a_model_that_is_packed() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Module()
        for name, values in {
            "packed": torch.randn(64, 64, dtype=BF16),
            "float32": torch.randn(64, 64),
            "float16": torch.randn(64, 64).half(),
            "int8": torch.randint(-9, 9, (64, 64), dtype=torch.int8),
            "strided": torch.randn(64, 64, dtype=BF16).t(),
            "tied": torch.randn(64, 64, dtype=BF16),
            "escapes": heavy(torch.empty(64, 64, dtype=BF16)),
        }.items():
            model.register_parameter(name, nn.Parameter(values, requires_grad=False))
        model.register_parameter("other", model.tied)
        return model

    model, twin = make(), make()
    offload(model, min_bytes=LEAST, pack=True)
    assert packed(model) == {"packed"} and len(buffers(model)) == 7
    assert {buffer.form for name, buffer in buffers(model).items() if name != "packed"} == {Form.RAW}
    assert same(model, twin)
    restore(model)
    assert same(model, twin)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A checkpoint in bfloat16, of which one weight cannot be packed."""
    torch.manual_seed(0)
    state = Tabled().to(BF16).state_dict()
    save_file(state | {ESCAPES: heavy(state[ESCAPES])}, tmp_path / "model.safetensors")
    return str(tmp_path / "model.safetensors")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of memory in all pages of a move, each time that a weight has been packed."""
    plain, pack, found, counted = (
        loader.empty_pages,
        loader.pack_into,
        list[weakref.ref[torch.UntypedStorage]](),
        list[int](),
    )

    def empty(like: torch.Tensor) -> torch.Tensor:
        made = plain(like)
        found.append(weakref.ref(made.untyped_storage()))
        return made

    def packs(*args: Any) -> bool:
        fits = pack(*args)
        live = [torch.empty(0, dtype=torch.uint8).set_(storage) for ref in found if (storage := ref()) is not None]
        counted.append(sum(map(held, live)))
        return fits

    monkeypatch.setattr(loader, "empty_pages", empty)
    monkeypatch.setattr(loader, "pack_into", packs)
    yield counted


@pytest.mark.parametrize("cast", [False, True])
def test_packing_takes_one_weight_more_than_it_leaves(tmp_path: Path, cast: bool, pages: list[int]) -> None:
    torch.manual_seed(0)
    state = {f"{i}.weight": torch.randn(256, 256).to(torch.float32 if cast else BF16) for i in range(40)}
    save_file(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in state)).requires_grad_(False)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    offload(model, min_bytes=LEAST, pack=True, dtype=BF16 if cast else None)
    raw = sum(p.nbytes for p in model.parameters())
    assert len(packed(model)) == len(pages) == 40 and max(pages) <= 0.82 * raw
    placed = buffers(model).values()
    assert all(held(b.host) == 0 and held(b.stored) == whole_pages(b.nbytes) for b in placed)
    assert sum(b.nbytes for b in placed) <= 0.76 * raw
    assert all(torch.equal(p, state[n].to(BF16)) for n, p in model.named_parameters())


def test_the_next_weight_is_read_while_one_is_packed(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a weight is packed, one read more has begun than weights were packed, but for the last."""
    read, pack, begun, ahead = loader.CheckpointReader.read, loader.pack_into, threading.Semaphore(0), list[bool]()
    count = len([p for p in offload(load_stack(saved), min_bytes=LEAST, pack=True).parameters() if p.nbytes >= LEAST])

    def reads(self: Any, *args: Any) -> None:
        begun.release()
        read(self, *args)

    def packs(*args: Any) -> bool:
        awaited = 2 if not ahead else 1 if len(ahead) < count - 1 else 0
        ahead.append(all(begun.acquire(timeout=WITHIN) for _ in range(awaited)))
        return pack(*args)

    monkeypatch.setattr(loader.CheckpointReader, "read", reads)
    monkeypatch.setattr(loader, "pack_into", packs)
    model = offload(load_stack(saved), min_bytes=LEAST, pack=True)
    assert count > 2 and all(ahead) and same(model, in_memory(load_stack(saved)))


def test_the_drive_has_packed_bytes(saved: str) -> None:
    """Also of weights that lie in their checkpoint; what is written goes to host memory, packed."""
    model, twin = load_stack(saved), in_memory(load_stack(saved))
    offload(model, min_bytes=LEAST, pack=True, host_memory=0)
    found = buffers(model)
    assert packed(model) == {*found} - {ESCAPES}
    assert all(b.backing.in_scratch_file and b.backing.where is Where.FILE for b in found.values())
    file = next(iter(found.values())).backing.bytes.file
    placed = next(iter(found.values())).store.buffers
    assert os.fstat(file.descriptor.number).st_size == sum(whole_pages(b.nbytes) for b in placed)
    assert all(torch.equal(b.backing.bytes.read_all(), flat_bytes(b.stored)) for b in found.values())
    assert all(held(found[name].host) == 0 for name in packed(model))
    for m in (model, twin):
        m.get_parameter(NAME).mul_(1.5)
        m.get_parameter(OTHER).copy_(heavy(m.get_parameter(OTHER)))
    assert found[NAME].compressed and not found[OTHER].compressed
    assert found[NAME].backing.where is found[OTHER].backing.where is Where.OWN
    assert same(model, twin)
    restore(model)
    assert same(model, twin)
    model = load_stack(saved)
    whole = sum(Layout.of(t.numel()).nbytes for t in (*twin.parameters(), *twin.buffers()) if t.nbytes >= LEAST)
    with pytest.warns(
        UserWarning, match=f"{ESCAPES} has values that cannot be packed: the weights take .* more than host_mem"
    ):
        offload(model, min_bytes=LEAST, pack=True, host_memory=whole // 2)
    store, raw = buffers(model)[ESCAPES].store, buffers(model)[ESCAPES].nbytes
    assert 0 < store.held_bytes - raw <= whole // 2 and packed(model) == {*buffers(model)} - {ESCAPES}


def test_a_checkpoint_that_changes_while_it_is_packed(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pack = load_stack(saved), loader.pack_into

    def packs(*args: Any) -> bool:
        os.utime(saved, ns=(1, 1))
        return pack(*args)

    monkeypatch.setattr(loader, "pack_into", packs)
    with pytest.raises(ChunkflowError, match="was changed while its weights were read"):
        offload(model, min_bytes=LEAST, pack=True)
    assert placement_of(model) is None and same(model, load_stack(saved))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_move_that_fails_is_undone(saved: str, mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no more room than the weights had before."""
    model = load_stack(saved) if mapped else in_memory(load_stack(saved))
    pack, done, no_memory = loader.pack_into, list[bool](), full()

    def packs(*args: Any) -> bool:
        if len(done) == 5:
            no_memory.__enter__()
            raise ChunkflowError("it fails")
        done.append(pack(*args))
        return done[-1]

    monkeypatch.setattr(loader, "pack_into", packs)
    with pytest.raises(ChunkflowError, match="it fails"):
        offload(model, min_bytes=LEAST, pack=True)
    no_memory.__exit__(None, None, None)
    assert all(done) and placement_of(model) is None and not any(isinstance(p, HostWeight) for p in model.parameters())
    assert same(model, load_stack(saved))


def on_two_ranks(rank: int, file: str, host_memory: int | None) -> None:
    """One packed copy; each rank has its own of what it writes, of what differs, and of what does not fit."""
    model, twin = load_stack(file), in_memory(load_stack(file))
    written = "blocks.3.down.weight"  # no part of the file any more, and cannot be packed
    for m in (model, twin):
        m.get_parameter(written).copy_(heavy(m.get_parameter(written)))
        if rank == 1:
            m.get_parameter(OTHER)[-1, -1] += 1
    records, place = said_here(), Where.SHARED if host_memory is None else Where.FILE
    offload(model, min_bytes=LEAST, share=True, pack=True, host_memory=host_memory)
    found = buffers(model)
    assert packed(model) == {*found} - {ESCAPES, written} and same(model, twin)
    assert [r for r in records if "other values" in r] == [
        f"rank 1 has other values than rank 0 in {OTHER}, and keeps its own copy of them"
    ]
    own = {n for n, b in found.items() if b.backing.where is not place}
    if host_memory is None:
        assert own == ({ESCAPES, written, OTHER} if rank else {ESCAPES, written})
    else:
        assert all(b.backing.in_scratch_file and b.backing.bytes.nbytes == b.nbytes for b in found.values())
    dist.barrier()
    if rank == 0:
        for m in (model, twin):
            m.get_parameter(NAME)[1:].mul_(1.5)
            m.get_parameter("blocks.3.up.weight").copy_(heavy(m.get_parameter("blocks.3.up.weight")))
        assert found[NAME].compressed and found[NAME].backing.where is Where.OWN
    dist.barrier()
    assert same(model, twin)
    state = model.state_dict()
    assert all(torch.equal(v, twin.state_dict()[n]) for n, v in state.items())
    dist.barrier()
    restore(model)
    assert same(model, twin)


@pytest.mark.parametrize("host_memory", [None, 0])
def test_ranks_share_one_packed_copy(on_ranks: Callable[..., None], saved: str, host_memory: int | None) -> None:
    on_ranks(on_two_ranks, saved, host_memory)
