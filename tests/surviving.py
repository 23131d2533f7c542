"""Helpers of the fault tests: cause a fault, and check that the model survives it."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from conftest import OPTIONS, WRAPS
from helpers import Stack, check_steps
from helpers import stack as stack_of
from torch import nn

from chunkflow_compile import programs, restore
from chunkflow_compile.runtime.single_call import SingleCall

EAGER = {**OPTIONS, "lowering": "eager", "hardware": WRAPS}
stack = partial(stack_of, 4)


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, backend="chunkflow", fullgraph=True, options={**EAGER, **options})


def assert_survives(model: nn.Module, twin: nn.Module, **options: object) -> None:
    """Saves the model, restores it, and compiles it again; all of it equal to ``twin``."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    assert list(saved) == list(twin.state_dict())
    assert all(torch.equal(saved[n], v) for n, v in twin.state_dict().items())
    restore(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    torch._dynamo.reset()
    again = compiled(model, **options)
    check_steps(again, twin, 3)
    assert programs(model)[-1].measurements[-1].moved_bytes > 0
    restore(model)
    check_steps(model, twin, 1)


def goes_on(model: nn.Module, twin: nn.Module, run: nn.Module) -> None:
    """The same program, from a cold start."""
    for cold in (True, False):
        x = torch.randn(4, 8)
        assert torch.equal(run(x), twin(x))
        assert (programs(model)[-1].measurements[-1].primed_bytes > 0) == cold


def fail_at(function: Callable[..., Any], call: int, error: BaseException) -> Callable[..., Any]:
    """``function``, except that call number ``call`` raises."""
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return function(*args, **kwargs)

    return failing


def run_once() -> tuple[Stack, Stack, nn.Module, SingleCall]:
    """A model, its twin, the model compiled and called, and its program."""
    model, twin = stack(), stack()
    run = compiled(model)
    run(torch.randn(4, 8))
    return model, twin, run, programs(model)[0]
