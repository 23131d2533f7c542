"""Models whose programs run in turns: what repeats runs as a cycle, and everything else is right at once."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EAGER, OPTIONS, WITHIN
from helpers import Stack, UlyssesStack, check_small, check_steps, small_twins, twins
from torch import nn

from chunkflow_compile import Arena, cycles, explain, offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.cli.main import main
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.runtime.bound_cycle import BoundCycle
from chunkflow_compile.runtime.measurement import MEASURED_FILE, Measured

SIZE = Size(layers=4, singles=2)
MIN_BYTES = OPTIONS["min_bytes"]
pytestmark = pytest.mark.usefixtures("no_grad", "kept_dynamo")


def compiled(model: nn.Module, arena: Arena) -> nn.Module:
    """Compile a model whole, in place."""
    model.compile(backend="chunkflow", fullgraph=True, options={**EAGER, "arena": arena})
    return model


def arena_of(*models: nn.Module) -> Arena:
    (arena,) = {program.arena for model in models for program in programs(model)}
    return arena


def primed(model: nn.Module) -> int:
    """Bytes that the newest call of each program has fetched before it began, all together."""
    return sum(p.measurements[-1].primed_bytes for p in programs(model))


def step_of(model: nn.Module, twin: nn.Module, family: str = "wan") -> Callable[[int], None]:
    """A step of a small model: what it gives is what its twin gives."""

    return lambda i: check_small(model, twin, family, SIZE, [i])


def settled(model: nn.Module, step: Callable[[int], None], steps: int = 6) -> BoundCycle:
    """Runs steps until a cycle runs, and checks that it runs warm."""
    for i in range(steps):
        step(i)
        if i < 3:  # the third is the first in the cycle
            continue
        (route,) = cycles(model)
        last = route.measurements[-1]
        assert (last.moved_bytes, last.primed_bytes, route.jumps) == (route.cycle.plan.moved_bytes, 0, 0)
    return route


@pytest.mark.parametrize(("family", "placed"), [("wan", True), pytest.param("flux", False, marks=pytest.mark.long)])
def test_blocks_compiled_one_by_one_run_as_one_program(family: str, placed: bool) -> None:
    model, twin = small_twins(family, SIZE)
    if placed:
        offload(model, min_bytes=MIN_BYTES)
    model.compile_repeated_blocks(backend="chunkflow", options=EAGER)  # type: ignore[operator]
    step = step_of(model, twin, family)
    plan = settled(model, step).cycle.plan
    lists = [b for b in twin.modules() if isinstance(b, nn.ModuleList)]
    large = sum(p.nbytes for b in lists for p in b.parameters() if p.nbytes >= MIN_BYTES)
    assert 0 < plan.moved_bytes <= large, "a weight is fetched once a pass, or stays"
    assert arena_of(model).nbytes == max(plan.arena_bytes, *(p.plan.arena_bytes for p in programs(model)))
    assert {r.block for r in plan.regions} >= {"blocks.1" if family == "wan" else "transformer_blocks.1"}
    restore(model)
    step(9)


def test_a_cycle_keeps_to_the_budget_of_its_calls(tmp_path: Path) -> None:
    """On a slow link, what the budget has room for stays, inside the arena."""
    slow = replace(load_profile(OPTIONS["hardware"]), h2d_bandwidth=1e6)
    (tmp_path / "slow.json").write_text(slow.to_json())
    model, twin = small_twins("wan", SIZE)
    offload(model, min_bytes=MIN_BYTES)
    options = {**EAGER, "slowdown": None, "weight_memory": 700_000, "hardware": str(tmp_path / "slow.json")}
    model.compile_repeated_blocks(backend="chunkflow", options=options)  # type: ignore[operator]
    compare = step_of(model, twin)

    def step(i: int) -> None:
        compare(i)
        assert arena_of(model).nbytes <= 700_000

    plan = settled(model, step).cycle.plan
    stays = [plan.span(w, i, i + 1) for w in plan.streamed for i, window in enumerate(w.windows) if window is None]
    assert sum(end - begin for begin, end in stays) > 100_000 and 600_000 < plan.device_bytes <= 700_000


class Taken(nn.Module):
    """Runs its blocks in the order that a call asks for; each is compiled on its own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(list(Stack(layers).blocks))

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for i in order:
            x = self.blocks[i](x)
        return x


def check(model: Taken, twin: Taken, order: Sequence[int], rows: int = 4) -> None:
    x = torch.randn(rows, 32)
    assert torch.equal(model(x, order), twin(x, order)), order


def taken(layers: int = 5, **options: Any) -> tuple[Taken, Taken]:
    return placed(*twins(lambda: Taken(layers)), **options)


def placed(model: Taken, twin: Taken, **options: Any) -> tuple[Taken, Taken]:
    offload(model, min_bytes=MIN_BYTES)
    for block in model.blocks:
        block.compile(backend="chunkflow", options={**EAGER, **options})
    return model, twin


def test_without_cycles_each_block_streams_alone() -> None:
    model, twin = taken(3, disable=["cycle"])
    for _ in range(3):
        check(model, twin, range(3))
    sizes = [sum(p.nbytes for p in block.parameters()) for block in twin.blocks]
    for program, size in zip(programs(model), sizes, strict=True):
        assert [(m.moved_bytes, m.primed_bytes) for m in program.measurements] == [(size, 0)] * 3
    assert arena_of(model).nbytes <= max(sizes) and cycles(model) == ()


def stacks(*layers: int) -> tuple[list[Any], list[Any]]:
    """Models with weights of their own, and their twins."""
    models, plain = twins(lambda: nn.ModuleList([Stack(n) for n in layers]))
    return [*models], [*plain]


def test_models_in_one_arena_run_as_a_cycle() -> None:
    """A text encoder, a transformer and a decoder, which is dropped in the end."""
    arena, (models, plain) = Arena(), stacks(1, 2, 1)
    for model in models:
        compiled(model, arena)

    def generate() -> None:
        for model, twin in zip(models, plain, strict=False):
            check_steps(model, twin, 1)

    for _ in range(8):
        generate()
    route = cycles(models[0])[0]
    assert len(route.cycle.calls) == 3 and all(primed(m) == 0 for m in models)
    restore(models[1])
    check_steps(models[1], plain[1], 1)
    generate()
    del model, models[2]
    torch._dynamo.reset()
    for _ in range(3):
        generate()
    assert all(route.alive for route in cycles(models[0])), "one was dropped in the middle of the cycle"


def test_blocks_between_other_models_in_one_arena() -> None:
    """The blocks of a step are the inner cycle; an encoder and a decoder come between two runs of it."""
    arena, (models, plain) = Arena(), stacks(1, 3, 1)
    for model in (models[0], models[2]):
        compiled(model, arena)
    for block in offload(models[1], min_bytes=MIN_BYTES).blocks:
        compiled(block, arena)

    def generate(parts: Any, x: torch.Tensor) -> torch.Tensor:
        encoder, transformer, decoder = parts
        x = encoder(x)
        for _ in range(4):
            x = x - 0.1 * transformer(x)
        return decoder(x)

    for _ in range(6):
        x = torch.randn(4, 8)
        assert torch.equal(generate(models, x), generate(plain, x))
    assert 3 in {len(route.cycle.calls) for route in cycles(models[1])}
    cold = [sum(p.measurements[-i].primed_bytes > 0 for p in programs(models[1])) for i in (1, 2)]
    assert cold == [0, 0], "from its second step on, the transformer runs warm"


def test_weights_that_change_in_a_cycle() -> None:
    """In the middle of a pass; and before calls of another size, whose programs are new: so none that ran has to end, which
    would also let the cycle start cold."""
    model, twin = taken()
    for i in range(12):
        check(model, twin, (0, 1))
        if i > 4:
            for m in (model, twin):
                m.blocks[i % 5].up.weight.mul_(1.5)
        check(model, twin, (2, 3, 4))
    assert cycles(model)[0].cycle.calls
    settled(model, lambda _: check(model, twin, range(5)))
    for i in range(5):
        for m in (model, twin):
            m.blocks[i].up.weight.mul_(1.5)
            m.blocks[i].down.weight.mul_(0.5)
        check(model, twin, range(5), 6 + 2 * i)


def test_weights_of_one_region_that_change_places() -> None:
    """While the cycle is planned, and while it runs: the call reads the same weights, each for another purpose."""
    model, twin = small_twins("wan", SIZE)
    offload(model, min_bytes=MIN_BYTES)
    model.compile_repeated_blocks(backend="chunkflow", options=EAGER)  # type: ignore[operator]
    step = step_of(model, twin)
    for i in range(9):
        step(i)
        if i in (0, 5):
            for m in (model, twin):
                attention: Any = m.blocks[1].attn1  # type: ignore[union-attr, index]
                attention.to_q, attention.to_k = attention.to_k, attention.to_q
    (route,) = cycles(model)
    assert route.cycle.calls and route.measurements[-1].primed_bytes == 0


def test_a_tied_weight_and_one_on_the_device() -> None:
    """What stays is settled for the weights of each call, not for those of the block that was compiled first."""

    def made() -> Taken:
        found = Taken(5)
        found.blocks[3].up.weight = found.blocks[2].up.weight
        found.blocks[4].down.weight = nn.Parameter(found.blocks[4].down.weight[:, ::2].repeat_interleave(2, 1).t())
        found.blocks[4].down.weight = nn.Parameter(found.blocks[4].down.weight.t())  # other strides
        return found

    model, twin = placed(*twins(made))
    for _ in range(6):
        check(model, twin, range(5))
    assert primed(model) == 0 and cycles(model)


@pytest.mark.parametrize("call", range(3))
def test_an_error_between_two_calls_and_in_one(call: int) -> None:
    model, twin = taken(3)
    for _ in range(4):
        check(model, twin, range(3))
    device = arena_of(model).streams
    copy, failed = device.copy_bytes, []

    def fail(*args: object) -> None:
        if not failed:
            failed.append(call)
            raise OSError("the link is gone")
        copy(*args)

    check(model, twin, range(call))
    device.copy_bytes = fail
    with pytest.raises(Exception, match="the link is gone"):
        for _ in range(3):
            check(model, twin, range(3))
    device.copy_bytes = copy
    for _ in range(3):
        check(model, twin, range(3))
    restore(model)
    check(model, twin, range(3))


def blocks_on_a_rank(rank: int, family: str, debug: tuple[str, ...]) -> None:
    """Blocks compiled one by one on two ranks.  ``family``: also "stack", of small blocks with collectives."""
    options = {**EAGER, "debug": list(debug)}
    if family == "stack":
        model, twin = twins(lambda: UlyssesStack(3))
        offload(model, min_bytes=MIN_BYTES)
        for block in model.blocks:
            block.compile(backend="chunkflow", options=options)
        step: Callable[[int], None] = lambda _: check_steps(model, twin, 1, (4, 32))  # noqa: E731
    else:
        model, twin = small_twins(family, SIZE, 2)
        offload(model, min_bytes=MIN_BYTES)
        model.compile_repeated_blocks(backend="chunkflow", options=options)  # type: ignore[operator]
        step = step_of(model, twin, family)
    route = settled(model, step)
    assert sum(m.collectives for p in programs(model) for m in p.measurements) > 0
    assert route.cycle.problem.collectives


@pytest.mark.parametrize(
    ("family", "debug"),
    [
        ("stack", ("threads", "poison")),
        *(pytest.param("wan", debug, marks=pytest.mark.long) for debug in ((), ("threads", "poison"))),
    ],
)
def test_blocks_at_ulysses_2(family: str, debug: tuple[str, ...], on_ranks: Callable[..., None]) -> None:
    on_ranks(blocks_on_a_rank, family, debug)


def test_two_threads_on_one_arena() -> None:
    """Each call that the cycle does not expect is a jump."""
    arena = Arena()
    pairs = []
    for factor in (1, 2):
        model, twin = taken(3, arena=arena)
        for m in (model, twin):
            m.blocks[1].up.weight.mul_(factor)
        for _ in range(3):
            check(model, twin, range(3))
        pairs.append((model, twin))
    wrong: list[str] = []

    def serve(model: Taken, twin: Taken, seed: int) -> None:
        numbers = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for i in range(30):
                x = torch.randn(4, 32, generator=numbers)
                if not torch.equal(model(x, [0, 1, 2]), twin(x, [0, 1, 2])):
                    wrong.append(f"thread {seed}, step {i}")

    threads = [threading.Thread(target=serve, args=(*pair, seed)) for seed, pair in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_cycle_is_explained_call_by_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = taken(3, dump=str(tmp_path))
    for _ in range(6):
        model(torch.randn(4, 32), [0, 1, 2])
    explained = explain(model)
    (route,) = cycles(model)
    plan = route.cycle.plan
    assert explained.plan == plan.digest and explained.jumps == 0
    assert [c.block for c in explained.calls] == ["blocks.0", "blocks.1", "blocks.2"]
    (folder,) = tmp_path.glob("rank0_cycle_of_3_*")
    assert Plan.from_json((folder / "plan.json").read_text()) == plan
    listed = re.findall(r"# call (\d): (.*)", (folder / "calls.txt").read_text())
    assert listed == [(str(i), f"blocks.{i}") for i in range(3)]
    assert sum(c.own_bytes + c.ahead_bytes for c in explained.calls) == plan.moved_bytes
    assert "a cycle of 3 calls, 0 jumps so far" in explained.report(details=True)
    assert [len(m.windows.compute_s) for m in route.measurements] == [len(plan.regions)] * len(route.measurements)
    filed = Measured.from_json((folder / MEASURED_FILE).read_text())
    assert filed.plan == plan.digest and filed.steps + filed.cold >= 2, "under the plan that they ran under"
    own = [Measured.from_json(path.read_text()) for path in tmp_path.glob(f"rank0_[0-9]*/{MEASURED_FILE}")]
    assert {m.plan for m in own} == {p.plan.digest for p in programs(model)} != {plan.digest}
    assert {m.steps + m.cold for m in own} == {2}, "the steps before there was a cycle"
    assert main(["explain", str(tmp_path)]) == 0 and folder.name in capsys.readouterr().out
    model(torch.randn(4, 32), [0])
    model(torch.randn(4, 32), [0, 1, 2])
    assert explain(model).jumps == 1
    cost = programs(model)[0].measurements[-1]
    assert cost.primed_bytes == explained.calls[0].jump_bytes


@pytest.mark.long
def test_the_plan_of_the_command_is_that_of_the_blocks() -> None:
    """``plan --regional`` cuts the blocks out of the whole model; the cycle is joined from blocks."""
    size = Size(layers=2)
    whole = small_model("wan", size)
    torch.compile(whole, backend="chunkflow", fullgraph=True, options=EAGER)(**small_inputs("wan", size, 0))
    planned = programs(whole)[0].program.problem.in_blocks
    model = small_model("wan", size)
    model.compile_repeated_blocks(backend="chunkflow", options=EAGER)  # type: ignore[operator]
    for i in range(3):
        model(**small_inputs("wan", size, i))
    (route,) = cycles(model)
    found = route.cycle.problem
    assert [r.block for r in planned.regions] == [r.block for r in found.regions]
    sizes = [{w.name: (w.nbytes, w.uses) for w in p.weights if w.keep is None} for p in (planned, found)]
    assert sizes[0] == sizes[1]
