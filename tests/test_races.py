"""Races found without a GPU: every stream a thread, the host steps ahead, slots poisoned, adversarial schedules.

A legal program gives the model's own numbers, bit for bit, on every schedule.  A mutated one is rejected by ``verify``;
and whatever ``verify`` accepts is right on every schedule that was tried.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mutations import MUTATIONS, Mutation
from schedules import Bench, RandomModel, expected, random_plan, run_ahead, schedules

from chunkflow_compile import programs, restore
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.verify import check, verify
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.device import ThreadsDevice
from chunkflow_compile.runtime.executor import Executor

MODELS, PLANS, STEPS = 50, 10, 3
# Of each kind of mutation that is a race or a wrong byte whatever the schedule; the others are rejected before they are.
SHOWN = {
    "remove_a_wait",
    "wait_behind_the_reader",
    "remove_a_prefetch",
    "forget_a_chunk",
    "prefetch_behind_the_reader",
    "prefetch_before_its_window",
    "evict_before_the_reader",
    "another_slot",
    "slot_off_by_a_line",
    "swap_weights_of_regions",
    "wait_for_another_weight",
}


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A real process group of one rank: its collectives are real, and give back what they take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    with torch.no_grad():
        yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def bench(seed: int) -> Bench:
    torch._dynamo.reset()
    model = RandomModel(seed)
    return Bench(model, torch.randn(4, model.width))


def inputs(found: Bench) -> list[torch.Tensor]:
    return [torch.randn_like(found.x) for _ in range(STEPS)]


@pytest.mark.parametrize("first", range(0, MODELS, 5))
def test_random_programs_give_the_model_s_numbers_on_every_schedule(
    first: int, record_property: Callable[[str, object], None]
) -> None:
    runs = copied = 0
    for seed in range(first, first + 5):
        found = bench(seed)
        for number in range(PLANS):
            program = found.program(random_plan(found.problem, seed * PLANS + number))
            verify(program)
            given = inputs(found)
            want = expected(found, given)
            for name, device in schedules(number).items():
                got = run_ahead(found, program, device(), given)
                runs += 1
                copied += program.plan.moved_bytes
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (seed, number, name)
    assert copied > 0
    record_property("counts", f"{5 * PLANS} random programs from seed {first}, {runs} runs, 0 mismatches")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_what_verify_accepts_is_right_and_what_is_wrong_it_rejects(
    mutation: Mutation, record_property: Callable[[str, object], None]
) -> None:
    tried = rejected = shown = 0
    for seed in range(8):
        found = bench(seed)
        for number in range(3):
            program = mutation(
                found.program(random_plan(found.problem, seed * PLANS + number)), random.Random(100 * seed + number)
            )
            if program is None:
                continue
            program.module.recompile()
            refused, wrong = bool(list(check(program))), goes_wrong(found, program, number)
            assert refused or not wrong, (mutation.__name__, seed, number)
            tried, rejected, shown = tried + 1, rejected + refused, shown + wrong
    assert tried >= 3 and rejected > 0
    assert shown > 0 or mutation.__name__ not in SHOWN
    said = f"{mutation.__name__}: {tried} programs, {rejected} rejected, {shown} with wrong numbers on a schedule"
    record_property("counts", said)


def goes_wrong(found: Bench, program: Any, seed: int) -> bool:
    """Whether one of the schedules that are the same every time shows a wrong number, or an error."""
    given = inputs(found)
    want = expected(found, given)
    for device in list(schedules(seed).values())[:4]:
        try:
            got = run_ahead(found, program, device(), given, exact=False)
        except (ChunkflowError, RuntimeError):
            return True
        if not all(torch.equal(a, b) for a, b in zip(got, want, strict=True)):
            return True
    return False


def without_openings(executor: Executor) -> None:
    executor.device.copy.wait = lambda event: 0.0


def without_arrivals(executor: Executor) -> None:
    kept = executor.device.compute.wait
    arrivals = set(map(id, executor._arrival.values()))
    executor.device.compute.wait = lambda event: 0.0 if id(event) in arrivals else kept(event)


def without_starts_of_collectives(executor: Executor) -> None:
    executor.device.collective.wait = lambda event: 0.0


def without_ends_of_collectives(executor: Executor) -> None:
    kept = executor.device.compute.wait
    executor.device.compute.wait = lambda event: 0.0 if event is executor._ended else kept(event)


@pytest.mark.parametrize(
    "remove",
    [without_openings, without_arrivals, without_starts_of_collectives, without_ends_of_collectives],
    ids=lambda r: r.__name__,
)
def test_each_event_of_the_executor_is_needed(
    remove: Callable[[Executor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The race tests can fail: without any one kind of event a schedule shows a wrong number."""
    prepare = Executor._prepare

    def broken(self: Executor, module: Any) -> Any:
        remove(self)
        return prepare(self, module)

    monkeypatch.setattr(Executor, "_prepare", broken)
    shown = 0
    for seed in range(8):
        found = bench(seed)
        shown += sum(goes_wrong(found, found.program(random_plan(found.problem, n)), n) for n in range(2))
    assert shown > 0


@pytest.mark.parametrize("debug", ["threads", ["poison", "threads"], "poison"])
def test_a_compiled_model_runs_on_threads(debug: str | list[str]) -> None:
    from conftest import OPTIONS
    from helpers import Stack

    model = Stack(4).eval()
    given = [torch.randn(4, 8) for _ in range(4)]
    want = [model(x) for x in given]
    options = {**OPTIONS, "group_bytes": 1, "debug": debug, "lowering": "eager"}
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    for x, right in zip(given, want, strict=True):
        assert torch.equal(run(x), right)
    (session,) = programs(model)
    assert (session.executor.device.name == "threads") == ("threads" in debug)
    assert session.measurements[-1].moved_bytes == session.plan.moved_bytes > 0
    restore(model)
    assert torch.equal(model(given[0]), want[0])


def test_an_error_on_a_stream_reaches_the_caller_and_the_next_step_is_right() -> None:
    found = bench(2)
    program, device = found.program(random_plan(found.problem, 1)), ThreadsDevice()
    executor = found.executor(program, Arena(make=lambda *_, **__: device))
    given = inputs(found)
    copy, failing = device.copy_bytes, iter([True])

    def fail_once(target: torch.Tensor, source: torch.Tensor) -> None:
        if next(failing, False):
            raise OSError("the link is down")
        copy(target, source)

    device.copy_bytes = fail_once  # type: ignore[method-assign]
    with pytest.raises(ChunkflowError, match="A copy to the device failed: the link is down"):
        for x in given:  # a copy for the next step is first waited for there
            executor.run(found.arguments(program, x))
    for x, right in zip(given, expected(found, given), strict=True):
        assert torch.equal(executor.run(found.arguments(program, x))[0], right)
    device.close()
