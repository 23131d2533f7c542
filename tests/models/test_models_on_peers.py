"""Models whose weights lie in pieces on the devices of ranks: the same bits as resident ones, whatever one rank does."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters import Library
from conftest import EAGER, FAST, WITHIN
from helpers import Block, InTurn, UlyssesBlock, small_twins, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, cycles, enable_adapters, offload, programs, replan, restore
from chunkflow_compile.catalog.small import Size, small_inputs
from chunkflow_compile.passes.pieces import parts
from chunkflow_compile.passes.plan import runs
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.host_buffer import HostBuffer

SIZE = Size(layers=2, singles=2)


def buffers_of(model: nn.Module) -> list[HostBuffer]:
    placement = placement_of(model)
    assert placement is not None
    return placement.store.buffers


def in_pieces(model: nn.Module) -> set[str]:
    return {buffer.name for buffer in buffers_of(model) if buffer.pieces is not None}


class Tupled(InTurn):
    """Called as a model of diffusers."""

    def forward(self, x: torch.Tensor) -> Any:
        return (super().forward(x),)


def twins_of(family: str, degree: int = 1) -> tuple[Any, Any]:
    """``family``: also "stack", of small blocks that are traced in no time, with or without collectives."""
    if family != "stack":
        return small_twins(family, SIZE, degree)
    return twins(lambda: Tupled(UlyssesBlock(32, 4) if degree > 1 else Block(32) for _ in range(3)))


def inputs_of(family: str, seed: int, size: Size = SIZE, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    if family == "stack":
        return {"x": torch.randn(size.height, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)}
    inputs = small_inputs(family, size, seed)
    return {n: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for n, v in inputs.items()}


def check(run: Any, twin: Any, family: str, *seeds: int, **given: Any) -> None:
    for seed in seeds:
        inputs = inputs_of(family, seed, **given)
        assert torch.equal(run(**inputs)[0], twin(**inputs)[0]), seed


def check_bytes(model: nn.Module) -> None:
    """What is copied and pulled is what the plan says.

    A plan is for any rank: of each copy it counts what the rank pulls that has the fewest bytes of it.  Parts are multiples
    of 256 bytes, so the last one of a stripe is shorter, and a copy of a part of a stripe may have all its bytes from one
    rank.  By what this rank has more of each copy, it pulls less.
    """
    ran = (*cycles(model), *programs(model))[0]
    newest, plan = ran.measurements[-1], ran.plan
    assert newest.primed_bytes == 0 and newest.moved_bytes == plan.moved_bytes > 0
    peers = [w for w in plan.streamed if w.home == "peers"]
    most, own = 0, 0
    for weight in peers:
        for run in runs(weight.windows):
            if run.window is not None:
                begin, end = plan.span(weight, run.first, run.end)
                owners = [
                    part.owner
                    for part in parts(begin, end, weight.nbytes, weight.source.ranks)
                    for _ in range(part.nbytes)
                ]
                has = [owners.count(rank) for rank in range(weight.source.ranks)]
                most, own = most + end - begin - min(has), own + end - begin - has[dist.get_rank()]
    assert (newest.pulled_bytes, plan.pulled_bytes) == (own, most)
    assert len(peers) > 5 and own > 0.9 * sum(w.nbytes for w in peers) * (1 - 1 / peers[0].source.ranks)


def on_a_rank(rank: int, family: str, by_kind: bool, debug: tuple[str, ...], steps: int) -> None:
    model, twin = twins_of(family, dist.get_world_size())
    if by_kind:
        run: Any = chunkflow_compile.compile(model, peers=True, debug=debug, **EAGER)
    else:
        offload(model, min_bytes=EAGER["min_bytes"], share=True, peers=True)
        run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**EAGER, "debug": debug})
    check(run, twin, family, *range(steps))
    check_bytes(model)
    dealt = in_pieces(model)
    written = max((b for b in buffers_of(model) if b.name in dealt), key=lambda b: b.nbytes)
    for each in (model, twin) if rank else ():
        each.get_parameter(written.name).mul_(1.25)
    check(run, twin, family, *range(steps, steps + 4))
    assert in_pieces(model) == (dealt - {written.name} if rank else dealt)
    assert (written.backing.where is Where.SHARED) == (not by_kind and not rank)
    least = (*cycles(model), *programs(model))[0].plan.device_bytes
    if not rank:
        replan(model, weight_memory=least + (1 << 20))  # on one rank: the others have their plan
    check(run, twin, family, *range(steps + 4, steps + 8))
    if not rank:
        dist.barrier()
    restore(model)
    if rank:
        dist.barrier()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_two_ranks(on_ranks: Callable[..., None]) -> None:
    on_ranks(on_a_rank, "stack", True, (), 4)
    on_ranks(on_a_rank, "stack", False, ("threads", "poison"), 8)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "by_kind", "debug", "world"),
    [
        ("flux", True, (), 4),
        ("wan", True, (), 2),
        ("flux", False, ("threads", "poison"), 2),
        ("qwen-image", False, (), 2),
        ("wan", True, ("threads", "poison"), 4),
    ],
)
def test_ranks(family: str, by_kind: bool, debug: tuple[str, ...], world: int, on_ranks: Callable[..., None]) -> None:
    on_ranks(on_a_rank, family, by_kind, debug, 30, world=world)


def mapped() -> int:
    """How many pieces this process has in its memory, or open."""
    links = [os.readlink(link.path) for link in os.scandir("/proc/self/fd") if os.path.islink(link.path)]
    return (Path("/proc/self/maps").read_text() + "\n".join(links)).count("chunkflow-pieces")


class Trouble(Exception):
    """What a rank raises in its forward."""


def alone(rank: int, family: str, steps: int) -> None:
    """Replicas, which exchange nothing: each rank does something else, and none waits for another."""
    model, twin = twins_of(family)
    run = chunkflow_compile.compile(model, peers=True, **EAGER)
    check(run, twin, family, 0, 1, 2)  # all have dealt
    arena, whole = programs(model)[0].arena, sum(buffer.nbytes for buffer in buffers_of(model))
    for step in range(3, 3 + steps):
        if rank == 0:
            arena.evict()  # cold
        elif rank == 1:
            check(run, twin, family, step, size=Size(layers=2, singles=2, height=16))  # and back
        elif rank == 2:
            replan(model, weight_memory=whole + step % 3 * whole // 4)
        else:
            time.sleep(0.05)
        check(run, twin, family, step)
    dealt = in_pieces(model)
    given = min(dealt)
    for each in (model, twin) if rank == 1 else ():
        parameter = each.get_parameter(given)
        parameter.data = 2 * parameter.detach()  # it comes anew, and nobody waits to deal it out
    check(run, twin, family, 49)
    assert given in dealt and in_pieces(model) == dealt - ({given} if rank == 1 else set())
    if rank == 1:
        restore(model)  # while the others go on
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
        check(chunkflow_compile.compile(model, **EAGER), twin, family, 50)  # placed again, without pieces
        assert not in_pieces(model)
    else:
        check(run, twin, family, *range(50, 54))
        assert in_pieces(model) == dealt and mapped()
    restore(model)
    gc.collect()
    assert not mapped()


@pytest.mark.long
def test_no_rank_waits_for_another(on_ranks: Callable[..., None]) -> None:
    on_ranks(alone, "wan", 20, world=4)


def test_two_replicas(on_ranks: Callable[..., None]) -> None:
    on_ranks(alone, "stack", 10)


def raises(rank: int) -> None:
    """From the first call on, when the other rank waits to shard the weights of the next block: it is told, once."""
    model, twin = small_twins("wan", SIZE)
    run = chunkflow_compile.compile(model, peers=True, **EAGER)

    def fails(*_: Any) -> None:
        raise Trouble

    for step in range(20):
        if rank:
            hook = model.blocks[1].register_forward_pre_hook(fails)
            with pytest.raises(Trouble):
                run(**inputs_of("wan", step))
            hook.remove()
        elif not step:
            with pytest.raises(ChunkflowError, match=r"not sharded across the ranks, because rank 1 failed: Trouble"):
                run(**inputs_of("wan", step))
        if not step:
            dist.barrier()
        check(run, twin, "wan", step)
    assert in_pieces(model)


@pytest.mark.long
def test_a_rank_that_raises(on_ranks: Callable[..., None]) -> None:
    on_ranks(raises)


def packed_too(rank: int) -> None:
    """Pieces have the packed bytes."""
    model, twin = (m.to(torch.bfloat16) for m in twins_of("stack", 2))
    run = chunkflow_compile.compile(model, peers=True, pack=True, **EAGER)
    check(run, twin, "stack", *range(4), dtype=torch.bfloat16)
    packed = [b for b in buffers_of(model) if b.compressed]
    assert packed and all(b.pieces is not None and b.pieces.nbytes == b.nbytes < b.host.nbytes for b in packed)
    for each in (model, twin) if rank else ():
        each.get_parameter(packed[0].name).mul_(0.5)
    check(run, twin, "stack", *range(4, 8), dtype=torch.bfloat16)
    assert (packed[0].pieces is None) == bool(rank) and packed[0].compressed
    restore(model)


def test_packed_weights(on_ranks: Callable[..., None]) -> None:
    on_ranks(packed_too)


def differs(rank: int) -> None:
    """Other values on a rank: streamed from the host there and elsewhere, and right on all."""
    model, twin = twins_of("stack")
    name = next(n for n, p in model.named_parameters() if p.nbytes >= EAGER["min_bytes"])
    for each in (model, twin):
        each.get_parameter(name).data.add_(rank)
    run = chunkflow_compile.compile(model, peers=True, **EAGER)
    check(run, twin, "stack", *range(4))
    assert in_pieces(model) and name not in in_pieces(model)


def test_weights_that_differ(on_ranks: Callable[..., None]) -> None:
    on_ranks(differs)


def other_options(rank: int) -> None:
    """Ranks that place other weights, or none: one sentence on both, before a weight moves."""
    for more in (7, 1 << 20):
        model, twin = twins_of("stack")
        least = {"min_bytes": EAGER["min_bytes"] * (1 + more * rank)}
        with pytest.raises(
            ChunkflowError, match=r"^The ranks place different models with peers: \S+ is missing on rank 1"
        ):
            chunkflow_compile.compile(model, peers=True, **{**EAGER, **least})
        assert placement_of(model) is None
        check(model, twin, "stack", 0)


def test_ranks_with_other_options(on_ranks: Callable[..., None]) -> None:
    on_ranks(other_options)


def absent(rank: int) -> None:
    model, _ = small_twins("wan", SIZE)
    first, then = ("bfloat", "offload casts to") if rank else (None, "rank 1 failed.*bfloat")
    with pytest.raises(ChunkflowError, match=then):
        offload(model, "cpu", min_bytes=4096, peers=True, dtype=first)
    assert placement_of(model) is None


def test_a_rank_that_does_not_place_the_model(on_ranks: Callable[..., None]) -> None:
    """The others are told, and do not wait for it."""
    on_ranks(absent)


def refused(rank: int) -> None:
    model, _ = small_twins("wan", SIZE)
    with pytest.raises(
        ChunkflowError, match=r"peers=True keeps weights on the devices of all ranks, but .*has no peer_bandwidth"
    ):
        chunkflow_compile.compile(model, peers=True, **{**EAGER, "hardware": "rtx-4090-pcie"})
    assert placement_of(model) is None


def test_a_machine_without_peer_access(on_ranks: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    on_ranks(refused)


def other_budgets(rank: int, profile: str) -> None:
    """Too little for the pieces of all parts is an error.  Where one rank chooses pieces and the other none, none is sharded,
    and the models can be restored."""
    model, twin = small_twins("wan", SIZE)
    options = {**{k: v for k, v in EAGER.items() if k != "slowdown"}, "hardware": profile}
    run = chunkflow_compile.compile(model, peers=True, weight_memory="420KiB", **options)
    with pytest.raises(ChunkflowError, match="too little for peers=True: this rank's pieces of weights take"):
        run(**inputs_of("wan", 0))
    restore(model)
    run = chunkflow_compile.compile(model, peers="auto", weight_memory="2MiB" if rank else "420KiB", **options)
    check(run, twin, "wan", 0, 1)
    assert not in_pieces(model)
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    check(run, twin, "wan", 4)


@pytest.mark.long
def test_ranks_with_other_budgets(on_ranks: Callable[..., None], tmp_path: Path) -> None:
    """On a machine with a slow link to the host, and a fast one between ranks."""
    profile = tmp_path / "links.json"
    profile.write_text(json.dumps({**json.loads(Path(FAST).read_text()), "h2d_bandwidth": 1e6, "peer_bandwidth": 6e11}))
    on_ranks(other_budgets, str(profile))


def changes(rank: int) -> None:
    """Replicas, of which one changes in every way."""
    model, twin = small_twins("wan", SIZE)
    run = chunkflow_compile.compile(model, peers=True, **EAGER)
    check(run, twin, "wan", 0, 1)
    dealt, names = in_pieces(model), sorted(in_pieces(model))

    def loads(each: nn.Module) -> None:
        each.load_state_dict({n: v.clone() * (0.5 if n == names[1] else 1) for n, v in each.state_dict().items()})

    def through_a_view(each: nn.Module) -> None:
        each.state_dict()[names[2]].numpy()[:] *= 2

    def adapts(each: Any) -> None:
        peft = pytest.importorskip("peft")
        torch.manual_seed(1)
        each.add_adapter(peft.LoraConfig(r=16, lora_alpha=16, target_modules=["to_q"], init_lora_weights=False))

    ways: list[tuple[Callable[[Any], object], set[str]]] = [
        (lambda each: {k: v.clone() for k, v in each.state_dict().items()}, set()),
        (lambda each: each.get_parameter(names[0]).mul_(1.5), {names[0]}),
        (through_a_view, {names[2]}),
        (loads, dealt),
        (adapts, dealt),
    ]
    for number, (change, lost) in enumerate(ways):
        for each in (twin, model) if rank else ():
            change(each)
        check(run, twin, "wan", *range(4 * number, 4 * number + 3))
        check(run, twin, "wan", 4 * number + 3, size=Size(layers=2, singles=2, height=16))
        if not rank:
            assert in_pieces(model) == dealt
        elif change is not loads and change is not adapts:
            assert not in_pieces(model) & lost and len(in_pieces(model)) >= len(dealt) - number
    if rank:
        other = copy.deepcopy(model)
        replan(model, weight_memory="1MiB")
        torch._dynamo.reset()
        check(run, twin, "wan", 30, 31)
        check(other, twin, "wan", 32, 33)
        assert placement_of(other) is None or not in_pieces(other)
    check(run, twin, "wan", 34, 35)


@pytest.mark.long
def test_one_replica_changes(on_ranks: Callable[..., None]) -> None:
    on_ranks(changes)


def slots(rank: int) -> None:
    """Each rank writes its own adapter."""
    model, twin = small_twins("wan", SIZE)
    enable_adapters(model, rank=16)
    run = chunkflow_compile.compile(model, peers=True, **EAGER)
    library = Library(twin)
    for step in range(6):
        for each in (model, twin) if step % 2 else ():
            state = library.adapter(step if rank else 0, 8)
            each.load_lora_adapter({k: v.clone() for k, v in state.items()}, adapter_name=f"a{step}")
            each.set_adapters(f"a{step}")
        inputs = inputs_of("wan", step)
        assert torch.allclose(run(**inputs)[0], twin(**inputs)[0], rtol=0, atol=1e-5)
    filled = {b.name for b in buffers_of(model) if b.fill is not None}
    assert filled and in_pieces(model) and not filled & in_pieces(model)


@pytest.mark.long
def test_adapters_in_slots(on_ranks: Callable[..., None]) -> None:
    on_ranks(slots)


def ends(rank: int) -> None:
    """A rank ends without a word; the others go on, plan again, and restore."""
    model, twin = small_twins("wan", SIZE)
    run = chunkflow_compile.compile(model, peers=True, **EAGER)
    check(run, twin, "wan", 0, 1)
    dealt = in_pieces(model)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"dealt{rank}", "")
    store.wait([f"dealt{other}" for other in range(3)])
    if rank == 1:
        os._exit(0)
    check(run, twin, "wan", *range(2, 22))
    programs(model)[0].arena.evict()
    check(run, twin, "wan", 22)
    assert in_pieces(model) == dealt and dealt
    replan(model, weight_memory=1 << 20)
    check(run, twin, "wan", 23)
    restore(model)
    check(run, twin, "wan", 24)
    os._exit(0)  # gloo would wait for the one that has ended


@pytest.mark.long
def test_a_rank_that_ends(on_ranks: Callable[..., None]) -> None:
    on_ranks(ends, world=3, fresh=True)


def not_placed(rank: int) -> None:
    """Only a model that all ranks have placed has peers."""
    model, twin = twins_of("stack")
    with pytest.raises(ChunkflowError, match="peers"):
        torch.compile(model, backend="chunkflow", options={**EAGER, "peers": True})(**inputs_of("stack", 0))
    offload(model, min_bytes=EAGER["min_bytes"], peers=True)
    with pytest.raises(ChunkflowError, match="placed already, so peers would change nothing"):
        chunkflow_compile.compile(model, peers=True, **EAGER)
    torch._dynamo.reset()
    run = torch.compile(model, backend="chunkflow", options={**EAGER, "hardware": "rtx-4090-pcie"})
    with pytest.raises(
        ChunkflowError, match=r"peers=True keeps weights on the devices of all ranks, but .*has no peer_bandwidth"
    ):
        run(**inputs_of("stack", 0))
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_models_that_are_not_placed(on_ranks: Callable[..., None]) -> None:
    on_ranks(not_placed)


def exports(rank: int) -> None:
    """Tensors of state_dicts that are alive in calls: pieces wait, and come back for each weight that nobody wrote."""
    model, twin = twins_of("stack")
    run = chunkflow_compile.compile(model, peers=True, **EAGER)
    check(run, twin, "stack", 0, 1, 2)
    sharded, names = in_pieces(model), sorted(in_pieces(model))

    def pulls() -> int:
        check(run, twin, "stack", 3, 4)
        return (*cycles(model), *programs(model))[0].measurements[-1].pulled_bytes

    before = pulls()
    states = [model.state_dict(), model.state_dict()]
    check(run, twin, "stack", 5, 6)
    assert in_pieces(model) == sharded and not pulls()
    states.pop()
    assert not pulls()  # the other is still in use
    check(run, twin, "stack", 7, size=Size(layers=2, singles=2, height=16))  # another size is planned meanwhile
    states.clear()
    assert pulls() == before > 0 and in_pieces(model) == sharded
    check(run, twin, "stack", 8, size=Size(layers=2, singles=2, height=16))
    weight = model.state_dict()[names[0]]
    assert 0 < pulls() < before  # of one weight
    if rank:
        weight.numpy()[:] *= 2
        twin.get_parameter(names[0]).mul_(2)
        for each in (model, twin):
            each.get_parameter(names[1]).mul_(0.5)
    del weight
    assert (pulls() < before) == bool(rank)
    assert in_pieces(model) == (sharded - {*names[:2]} if rank else sharded)
    state = model.state_dict()
    check(run, twin, "stack", 9)
    restore(model)
    assert all(torch.equal(state[n], p) for n, p in twin.named_parameters())


def test_pieces_come_back_after_a_state_dict(on_ranks: Callable[..., None]) -> None:
    on_ranks(exports)


def in_a_child(work: Callable[[], object]) -> None:
    """Fork, and work there: it neither crashes nor hangs."""
    if (child := os.fork()) == 0:
        try:
            signal.alarm(int(WITHIN))
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child runs nothing of its parent's
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def forks(rank: int, when: str, share: bool) -> None:
    """A child restores, drops its model, or calls it, which raises; the ranks go on.  Before the first call, or after it."""
    model, twin = twins_of("stack")
    offload(model, min_bytes=EAGER["min_bytes"], share=share, peers=True)
    run: Any = chunkflow_compile.compile(model, **EAGER)
    kept = [run]
    del run

    def restores() -> None:
        restore(model)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))

    def drops() -> None:
        nonlocal model
        kept.clear()
        del model
        gc.collect()

    def calls() -> None:
        with pytest.raises(ChunkflowError, match="This process was forked from"):
            kept[0](**inputs_of("stack", 0))
        restores()

    if when == "after":
        check(kept[0], twin, "stack", 0, 1)
    for work in (restores, drops, calls):
        in_a_child(work)
    check(kept[0], twin, "stack", 2, 3, 4)
    assert in_pieces(model)
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    ("when", "share"), [("before", False), pytest.param("after", False, marks=pytest.mark.long), ("after", True)]
)
def test_a_rank_that_forks(when: str, share: bool, on_ranks: Callable[..., None]) -> None:
    on_ranks(forks, when, share, fresh=True)
