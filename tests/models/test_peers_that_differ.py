"""Ranks that differ before their weights are sharded agree, or all raise one error that names the cause; none waits long."""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import EAGER, FAST
from helpers import Block, InTurn, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, offload, restore
from chunkflow_compile.frontend import graph_compiler
from chunkflow_compile.frontend.compile import uncompile
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights import groups, rounds
from chunkflow_compile.weights import peers as peers_of_ranks
from chunkflow_compile.weights.node import Node

WIDTH = 64
TOTAL = 4 * 4 * 2 * WIDTH * WIDTH * 2  # bytes of four blocks
# Seconds that a rank may wait for another that is never going to come: far more than a round takes, and no timeout.
WAITS_S = 10.0
RUNS = 20

Run = Callable[[torch.Tensor], torch.Tensor]


def model_and_twin(
    blocks: int = 4, width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, nn.Module]:
    model, twin = twins(lambda: InTurn(Block(width) for _ in range(blocks)))
    return model.to(dtype), twin.to(dtype)


def inputs(seed: int, rows: int = 8, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def placed(model: nn.Module, peers: Any = True, whole: bool = False, **options: Any) -> Run:
    given = {**EAGER, **options}
    if not whole:
        return chunkflow_compile.compile(model, peers=peers, **given)
    offload(model, min_bytes=given["min_bytes"], peers=peers, pack=given.get("pack", False))
    return torch.compile(model, backend="chunkflow", fullgraph=True, options=given)


def check(run: Run, twin: nn.Module, *seeds: int, **given: Any) -> None:
    for seed in seeds:
        x = inputs(seed, **given)
        assert torch.equal(run(x), twin(x)), seed


def in_pieces(model: nn.Module) -> set[str]:
    placement = placement_of(model)
    assert placement is not None
    return {buffer.name for buffer in placement.store.buffers if buffer.pieces is not None}


def same_everywhere(value: set[str]) -> bool:
    """Whether all ranks have the same names."""
    store, mine = dist.distributed_c10d._get_default_store(), dist.get_rank()
    count = store.add(f"times/{mine}", 1)
    store.set(f"names/{count}/{mine}", json.dumps(sorted(value)))
    return all(json.loads(store.get(f"names/{count}/{r}")) == sorted(value) for r in range(dist.get_world_size()))


def refuses(run: Callable[[], object], says: str) -> None:
    with pytest.raises(ChunkflowError, match=says):
        run()


def other_sizes(rank: int, links: str) -> None:
    """With "auto", the plan of the small input wants pieces, and that of the large one none."""
    options = {"slowdown": None, "hardware": links, "weight_memory": TOTAL * 6 // 10}
    for whole in (True, False):
        model, twin = model_and_twin()
        run = placed(model, "auto", whole, **options)
        check(run, twin, 0, 1, rows=2048 if rank else 8)
        assert same_everywhere(in_pieces(model))
        check(run, twin, 2, 3, rows=8 if rank else 2048)
        restore(model)
        torch._dynamo.reset()
    model, twin = model_and_twin()
    run = placed(model, "auto", True, **options)
    check(run, twin, 0, 1, rows=8 + rank)  # these are alike for the plans
    assert in_pieces(model) and same_everywhere(in_pieces(model))


def other_sizes_of_all(rank: int, _: str) -> None:
    """With True, all weights are sharded, whatever the sizes are."""
    model, twin = model_and_twin()
    run = placed(model)
    check(run, twin, 0, 1, rows=2048 if rank else 8)
    assert len(in_pieces(model)) == 8
    check(run, twin, 2, rows=8 if rank else 2048)


def other_values(rank: int, _: str) -> None:
    for whole in (True, False):
        model, twin = model_and_twin()
        for each in (model, twin):
            each.get_parameter("blocks.1.up.weight").data.add_(rank)
        run = placed(model, whole=whole)
        for each in (model, twin) if rank else ():
            each.get_parameter("blocks.2.down.weight").mul_(0.5)  # after it was placed
        check(run, twin, 0, 1)
        assert len(in_pieces(model)) == 6 and not in_pieces(model) & {"blocks.1.up.weight", "blocks.2.down.weight"}
        restore(model)
        torch._dynamo.reset()


def other_memory(rank: int, _: str) -> None:
    """One rank gives a weight other memory before the first call, and one another weight; then its only copy is its own."""
    model, twin = model_and_twin()
    run = placed(model)
    for each in (model, twin) if rank else ():
        parameter = each.get_parameter("blocks.1.up.weight")
        parameter.data = 2 * parameter.detach()
    for each in (model, twin):
        each.load_state_dict(each.state_dict() | {"blocks.3.up.weight": torch.ones(2 * WIDTH, WIDTH)}, assign=not rank)
    check(run, twin, 0, 1)
    assert not in_pieces(model) & {"blocks.1.up.weight"} and same_everywhere(in_pieces(model))


def other_bytes(rank: int, _: str) -> None:
    """One rank packs a weight, and another cannot."""
    for whole in (True, False):
        model, twin = model_and_twin(dtype=torch.bfloat16)
        run = placed(model, whole=whole, pack=True)
        heavy = torch.exp(-20 * torch.rand(2 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)))
        for each in (model, twin) if rank else ():
            each.get_parameter("blocks.1.up.weight").copy_(heavy.bfloat16())
        check(run, twin, 0, 1, dtype=torch.bfloat16)
        assert len(in_pieces(model)) == 7 and "blocks.1.up.weight" not in in_pieces(model)
        restore(model)
        torch._dynamo.reset()


def failed_compilation(rank: int, _: str) -> None:
    """In a part, or the whole model.  The next calls are right: all ranks shard the weights then."""
    for whole in (True, False):
        model, twin = model_and_twin()
        run = placed(model, whole=whole)
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(graph_compiler, "lower_regions", fails)
            says = "ptxas has died" if rank else "not sharded across the ranks, because rank 1 failed: .*ptxas has died"
            with pytest.raises(Exception, match=says):
                run(inputs(0))
        torch._dynamo.reset()
        dist.barrier()  # a rank that comes again before the others have come is forgiven
        check(run, twin, 0, 1)
        assert len(in_pieces(model)) == 8
        restore(model)
        torch._dynamo.reset()


def fails(*_: object) -> None:
    raise RuntimeError("ptxas has died")


def failed_plan(rank: int, links: str) -> None:
    """Too little memory on one rank, for its own sizes of the inputs or at all."""
    model, twin = model_and_twin()
    run = placed(model, whole=True, slowdown=None, weight_memory="24KiB" if rank else None)
    refuses(
        lambda: run(inputs(0)),
        "too little|at least|24.0 KiB" if rank else "not sharded across the ranks, because rank 1 failed: .*24.0 KiB",
    )
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def other_budget(rank: int, links: str) -> None:
    """With "auto", the plan within a large budget wants no pieces, or others."""
    for budgets in ((6, 20), (6, 8)):
        model, twin = model_and_twin()
        run = placed(model, "auto", slowdown=None, hardware=links, weight_memory=TOTAL * budgets[rank] // 10)
        check(run, twin, 0, 1, 2)
        assert same_everywhere(in_pieces(model))
        restore(model)
        torch._dynamo.reset()


def other_model(rank: int, _: str) -> None:
    """All ranks raise the same sentence, and no weight has moved."""
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (
            {"blocks": 4 + rank},
            {},
            "blocks.4.up.weight is torch.float32 [128, 64] on rank 1, which places 10 weights, and mi",
        ),
        ({"width": WIDTH * (1 + rank)}, {}, "blocks.0.up.weight is torch.float32 [256, 128] on rank 1"),
        (
            {"dtype": [torch.float16, torch.bfloat16][rank]},
            {},
            "blocks.0.up.weight is torch.bfloat16 [128, 64] on rank 1",
        ),
        ({}, {"min_bytes": EAGER["min_bytes"] << 10 * rank}, "blocks.0.up.weight is missing on rank 1, which places 0"),
        (
            {},
            {"peers": "auto" if rank else True},
            "Rank 1 places its model with peers='auto', and rank 0 with peers=True",
        ),
        ({}, {"share": bool(rank)}, "Rank 1 places its model with share=True, and rank 0 with share=False"),
        (
            {"dtype": torch.bfloat16},
            {"pack": bool(rank)},
            "Rank 1 places its model with pack=True, and rank 0 with pack=Fa",
        ),
    ]
    for of, given, says in cases:
        model, _ = model_and_twin(**of)
        with pytest.raises(ChunkflowError) as caught:
            offload(model, **{"min_bytes": EAGER["min_bytes"], "peers": True, **given})
        assert says in str(caught.value) and placement_of(model) is None, str(caught.value)
        assert same_everywhere({str(caught.value)})


class Trouble(Exception):
    """What a rank raises in the forward of a model."""


def trouble(*_: object) -> None:
    raise Trouble("no such prompt")


def own_error(rank: int, _: str) -> None:
    """One rank raises in its forward, before it has called all parts."""
    for kind in (Trouble, KeyboardInterrupt):
        model, twin = model_and_twin()
        run = placed(model)
        says = "Trouble: no such prompt" if kind is Trouble else "it was interrupted"

        def raises(*_: object, kind: Any = kind) -> None:
            raise kind("no such prompt")

        if rank:
            hook = model.get_submodule("blocks.2").register_forward_pre_hook(raises)
            with pytest.raises(kind):
                run(inputs(0))
            hook.remove()
        else:
            refuses(lambda: run(inputs(0)), f"not sharded across the ranks, because rank 1 failed: {says}")  # noqa: B023
        dist.barrier()
        check(run, twin, 0, 1)
        assert len(in_pieces(model)) == 8
        restore(model)
        torch._dynamo.reset()


def errors_in_turn(rank: int, _: str) -> None:
    """A rank raises twice and comes again before the other: the other need not know."""
    model, twin = model_and_twin()
    run, store = placed(model), dist.distributed_c10d._get_default_store()
    if rank:
        hook = model.get_submodule("blocks.0").register_forward_pre_hook(trouble)
        for _ in range(2):
            with pytest.raises(Trouble):
                run(inputs(0))
        hook.remove()
        store.set("raised", "")
    else:
        store.wait(["raised"])
        node = placement_of(model).store.peers._node  # type: ignore[union-attr]
        while rounds._VALUE not in (node._get("1") or {}):  # until then its record is that of its error
            time.sleep(0.01)
    check(run, twin, 0, 1)
    assert len(in_pieces(model)) == 8


def restored(rank: int, _: str) -> None:
    """One rank restores its model, before its first call or between two parts: the other streams from the host."""
    for after in (False, True):
        model, twin = model_and_twin()
        run = placed(model)
        if rank:
            if after:
                hook = model.get_submodule("blocks.2").register_forward_pre_hook(trouble)
                with pytest.raises(Trouble):
                    run(inputs(0))
                hook.remove()
            restore(model)
        elif after:
            with pytest.raises(ChunkflowError, match="rank 1 failed: Trouble"):
                run(inputs(0))
        check(run, twin, 0, 1)
        if not rank:
            assert len(in_pieces(model)) == (4 if after else 0)
        uncompile(model)
        restore(model)
        torch._dynamo.reset()


def dropped(rank: int, _: str) -> None:
    """One rank drops its model before its first call."""
    model, twin = model_and_twin()
    run = placed(model)
    if rank:
        del run, model
        gc.collect()
        return
    check(run, twin, 0, 1)
    assert not in_pieces(model)


def other_order(rank: int, _: str) -> None:
    """One rank leaves out a block, or all: no more is sharded, and both are right."""
    model, twin = model_and_twin()
    run = placed(model)
    for each in (model, twin) if rank else ():
        each.blocks = nn.ModuleList([each.blocks[i] for i in (0, 2, 3)])
    check(run, twin, 0, 1, 2)
    assert len(in_pieces(model)) == 2


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers_of_ranks, "_PATIENCE_S", seconds)
        yield


def late(rank: int, _: str) -> None:
    """One rank does something else, alive.  The other goes on alone, and so does the late one."""
    model, twin = model_and_twin()
    run, store = placed(model), dist.distributed_c10d._get_default_store()
    with patience(0.5):
        if rank:
            store.wait(["done"])
        check(run, twin, 0, 1)
        assert not in_pieces(model)
        store.set("done", "")


def slow(rank: int, _: str) -> None:
    """One rank compiles for longer than others wait for one of which they know nothing."""
    model, twin = model_and_twin()
    run, lower, store = placed(model), graph_compiler.lower_regions, dist.distributed_c10d._get_default_store()

    def late(*given: Any) -> Any:
        store.set("compiles", "")
        time.sleep(1)
        return lower(*given)

    with patience(0.1), pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(graph_compiler, "lower_regions", late)
        else:
            store.wait(["compiles"])
        check(run, twin, 0)
    assert len(in_pieces(model)) == 8


def find_unshared(rank: int, _: str) -> None:
    """One rank places the model without peers: the other says so at once, and again the next time that they differ.  Models
    that all ranks place for themselves before are no difference."""
    for _ in range(2):
        for _ in range(2):
            offload(model_and_twin()[0], min_bytes=1)
        model, twin = model_and_twin()
        if rank:
            run = placed(model, False)
            check(run, twin, 0, 1)
            dist.barrier()
        else:
            says = "Rank 1 places its model with peers=False, and rank 0 with peers=True"
            with pytest.MonkeyPatch.context() as patch, pytest.raises(ChunkflowError, match=says):
                patch.setattr(groups, "LOGGED_S", 0.1)
                placed(model)
            dist.barrier()
        restore(model)
        torch._dynamo.reset()
        run = placed(model)
        check(run, twin, 2, 3)
        assert len(in_pieces(model)) == 8
        restore(model)
        torch._dynamo.reset()
        dist.barrier()


KINDS: list[Callable[[int, str], None]] = [
    find_unshared,
    other_sizes,
    other_sizes_of_all,
    other_values,
    other_memory,
    other_bytes,
    failed_compilation,
    failed_plan,
    other_budget,
    other_model,
    own_error,
    errors_in_turn,
    restored,
    dropped,
    other_order,
    late,
    slow,
]


def timed(rank: int, kind: Callable[[int, str], None], links: str, folder: str, run: int) -> None:
    """One kind, and what it took: all of it, and the longest wait for another rank."""
    waits, meet = [0.0], Node._run_round

    def measured(self: Node, *given: Any) -> Any:
        began = time.monotonic()
        try:
            return meet(self, *given)
        finally:
            waits.append(time.monotonic() - began)

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "_run_round", measured)
        kind(rank, links)
    Path(folder, f"{run}-{rank}").write_text(json.dumps([time.monotonic() - began, max(waits)]))


@pytest.fixture
def links(tmp_path: Path) -> str:
    """A machine whose link to the host is slow, and that between ranks fast; compute hides the copies of large inputs."""
    profile = tmp_path / "links.json"
    machine = {"gemm_flops": {"float32": 1e10}, "h2d_bandwidth": 1e8, "peer_bandwidth": 6e11}
    profile.write_text(json.dumps({**json.loads(Path(FAST).read_text()), **machine}))
    return str(profile)


# Others of the same kind take less time.
LONG = (other_sizes, failed_compilation)


@pytest.mark.parametrize("runs", [1, pytest.param(RUNS, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=kind.__name__, marks=[pytest.mark.long] * (kind in LONG)) for kind in KINDS],
)
def test_ranks_that_differ(
    kind: Callable[[int, str], None],
    runs: int,
    links: str,
    tmp_path: Path,
    on_ranks: Callable[..., None],
    record_property: Callable[[str, object], None],
) -> None:
    took = list[tuple[float, float]]()
    for run in range(runs):
        on_ranks(timed, kind, links, str(tmp_path), run)
        took += [tuple(json.loads((tmp_path / f"{run}-{rank}").read_text())) for rank in range(2)]
    whole, wait = map(max, zip(*took, strict=True))
    record_property(
        "counts", f"{kind.__name__}: the longest of {runs} runs took {whole:.1f} s, the longest wait {wait:.1f} s"
    )


def ends(rank: int, when: str) -> None:
    """A process ends before its first call, or in it."""
    model, twin = model_and_twin()
    run = placed(model)
    if rank == 1:
        if when == "call":
            model.get_submodule("blocks.2").register_forward_pre_hook(lambda *_: os._exit(0))
            run(inputs(0))
        os._exit(0)
    began = time.monotonic()
    refuses(lambda: run(inputs(0)), "not sharded across the ranks, because rank 1 is gone: its process has ended")
    print("waited", time.monotonic() - began)
    check(run, twin, 0, 1)  # from the host
    assert len(in_pieces(model)) == (4 if when == "call" else 0)
    restore(model)
    os._exit(0)  # gloo would wait for the one that has ended


@pytest.mark.parametrize("when", ["before", "call"])
def test_a_rank_that_ends(when: str, on_ranks: Callable[..., None]) -> None:
    on_ranks(ends, when, fresh=True)


def says_who(rank: int) -> None:
    model, twin = model_and_twin()
    run, store = placed(model), dist.distributed_c10d._get_default_store()
    handler, log = logging.Handler(), logging.getLogger("chunkflow_compile.weights.rounds")
    handler.emit = lambda record: store.set("said", record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "LOGGED_S", 0.1)
        if rank:
            assert store.get("said") == b"rank 0 waits for rank 1"
        check(run, twin, 0)
    log.removeHandler(handler)


def test_the_log_says_who_is_waited_for(on_ranks: Callable[..., None]) -> None:
    on_ranks(says_who)
