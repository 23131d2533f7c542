"""Each kind of event is needed: without it, numbers are wrong.  With slow copies or slow kernels, so that it shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_gpu import MIB

from chunkflow_compile import Arena, programs
from chunkflow_compile.runtime.executor import Executor

from . import control
from .test_findings import placed

Remove = Callable[[Executor], None]
Around = Callable[[], contextlib.AbstractContextManager[Any]]


def without_arrivals(executor: Executor) -> None:
    executor.device.compute.wait = lambda event, waited=None: None


def _skip(executor: Executor, *skipped: Any) -> None:
    wait = executor.device.copy.wait
    executor.device.copy.wait = lambda event, waited=None: (
        None if any(event is each for each in skipped) else wait(event, waited)
    )


def without_openings(executor: Executor) -> None:
    _skip(executor, *executor.state.events[: executor.cycle.events.handover])


def without_handovers(executor: Executor) -> None:
    _skip(executor, executor.state.events[executor.cycle.events.handover])


def without_the_callers_other_stream(executor: Executor) -> None:
    device: Any = executor.device
    device._handover.record = lambda stream: None


def streamed_steps(remove: Remove | None, around: Around = contextlib.nullcontext) -> bool:
    model, run, twin = placed(6, width=256)
    xs = [torch.randn(16, 8, device="cuda") for _ in range(6)]
    run(xs[0])
    if remove is not None:
        remove(programs(model)[0].executor)
    torch.cuda.synchronize()
    got = []
    for x in xs:  # the host runs ahead
        with around():
            got.append(run(x))
    torch.cuda.synchronize()
    return all(torch.equal(g, twin(x)) for g, x in zip(got, xs, strict=True))


def callers_on_other_streams(remove: Remove | None) -> bool:
    return streamed_steps(remove, lambda: torch.cuda.stream(torch.cuda.Stream()))


def turns_of_two_models(remove: Remove | None) -> bool:
    arena = Arena("cuda")
    pairs = [placed(6, width=width, arena=arena) for width in (256, 192)]
    xs = [torch.randn(16, 8, device="cuda") for _ in range(3)]
    for model, run, _ in pairs:
        run(xs[0])
        if remove is not None:
            remove(programs(model)[0].executor)
    got = [(twin, x, run(x)) for x in xs for _, run, twin in pairs]
    torch.cuda.synchronize()
    return all(torch.equal(g, twin(x)) for twin, x, g in got)


CASES = [
    (without_arrivals, streamed_steps, {"rate": 20 * MIB}),
    (without_openings, streamed_steps, {"kernel_us": 2000}),
    (without_handovers, turns_of_two_models, {"kernel_us": 2000}),
    (without_the_callers_other_stream, callers_on_other_streams, {"kernel_us": 2000}),
]


@pytest.mark.parametrize(("remove", "work", "slow"), CASES)
def test_without_one_kind_of_event_numbers_are_wrong(
    remove: Remove, work: Callable[[Remove | None], bool], slow: dict[str, int]
) -> None:
    control.settings(**slow)
    assert work(None)
    assert not work(remove)
