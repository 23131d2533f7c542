"""What a call of a region goes through: Inductor's code itself, where nothing that torch puts around it does anything."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import Stack, twins
from torch import nn
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from chunkflow_compile import programs
from chunkflow_compile.lowering.inductor import through_inductor

STREAMED = {**OPTIONS, "min_bytes": 64, "group_bytes": 1, "slowdown": 1000.0}


@torch.library.custom_op("chunkflow_tests::transposed", mutates_args=())
def transposed(x: torch.Tensor) -> torch.Tensor:
    """In another layout than its fake one."""
    return (x + 1).t().contiguous().t()


@transposed.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("chunkflow_tests::plus", mutates_args=())
def plus(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@plus.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.fixture
def through(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls that went through what torch puts around Inductor's code."""
    made, call = list[Any](), CompiledFxGraph.__call__
    monkeypatch.setattr(CompiledFxGraph, "__call__", lambda self, inputs: (made.append(self), call(self, inputs))[1])
    with torch.no_grad(), fresh_cache():
        yield made


def lowered(function: Callable[..., Any], *inputs: torch.Tensor, **options: Any) -> Callable[..., Any]:
    mode = FakeTensorMode()
    with mode:
        module = make_fx(function)(*map(mode.from_tensor, inputs))
    with tracing(TracingContext(mode)):
        return through_inductor(module, options)


def asserts(region: Any) -> int:
    """How many assertions a call of a lowered region evaluates."""
    compiled = inspect.unwrap(inspect.getclosurevars(region).nonlocals.get("region", region))
    return sum("assert_" in line and " = " not in line for line in compiled.source_code.splitlines())


# Function of two matrices -> whether its later calls are of Inductor's code itself, and without assertions.
REGIONS: dict[str, tuple[Callable[..., Any], bool, bool]] = {
    "results": (lambda x, w: [torch.relu(x @ w), x + w], True, True),
    "views of a result": (lambda x, w: [*(x @ w).chunk(2)], True, True),
    "an input that nothing changes": (lambda x, w: [x * 2, w], False, True),
    "a view of an input": (lambda x, w: [x @ w, w.t()], False, True),
    "an input is written": (lambda x, w: [x.add_(1) @ w], False, True),
    "an output is a written input": (lambda x, w: [x.add_(w)], False, True),
    "a tensor of its own": (lambda x, w: [x @ w + torch.tensor([2.0])], False, False),
    "attention": (lambda x, w: [torch.softmax(x @ w, -1)], True, False),
    "an op of another library": (lambda x, w: [plus(x @ w)], True, False),
}


@pytest.mark.parametrize("case", REGIONS)
def test_a_region_is_called_directly_where_nothing_is_around_it(case: str, through: list[Any]) -> None:
    function, direct, unchecked = REGIONS[case]
    region = lowered(function, torch.randn(8, 8), torch.randn(8, 8))
    for step in range(4):
        x, w = torch.randn(8, 8), torch.randn(8, 8)
        given = [x.clone(), w.clone()]
        torch.testing.assert_close([*region([*given])], [*function(x, w)])
        torch.testing.assert_close(given, [x, w])
        assert len(through) == (1 if direct else step + 1)
    assert (asserts(region) == 0) == unchecked


def test_what_an_op_of_another_library_returns_is_compared_in_each_call(through: list[Any]) -> None:
    region = lowered(lambda x, w: [transposed(x @ w).view(-1)], torch.randn(4, 8), torch.randn(8, 8))
    for _ in range(2):
        with pytest.raises(AssertionError, match="transposed"):
            region([torch.randn(4, 8), torch.randn(8, 8)])


def test_assertions_stay_where_the_user_says_so(through: list[Any]) -> None:
    for options in ({"size_asserts": True}, {"keep_output_stride": False}):
        assert asserts(lowered(lambda x, w: [x @ w], torch.randn(8, 8), torch.randn(8, 8), **options))


class Returns(nn.Module):
    """Returns what shares memory with inputs, weights and other outputs, and writes an input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(self.a(x))
        z = self.b(y)
        x.mul_(2)
        return y, self.a.weight.t(), self.b.weight * torch.ones(8, 8), x.view(-1), *z.chunk(2, -1)


def test_outputs_stay_as_they_were_when_the_slots_have_other_weights(through: list[Any]) -> None:
    model, twin = twins(lambda: nn.Sequential(Stack(2), Returns()))
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=STREAMED)
    kept = []
    for _ in range(6):
        x = torch.randn(4, 8)
        given = x.clone(), x.clone()
        kept.append((run(given[0]), twin(given[1])))
        torch.testing.assert_close(*given)
    for mine, expected in kept:
        torch.testing.assert_close(mine, expected)
    (program,) = programs(model)
    assert program.plan.moved_bytes > 0
    slots = {memory.untyped_storage().data_ptr() for memory in program.executor.binding.values.values()}
    assert slots.isdisjoint(output.untyped_storage().data_ptr() for mine, _ in kept for output in mine)
    through.clear()
    run(torch.randn(4, 8))
    assert 0 < len(through) < len(program.plan.regions) / 2, "the regions that return an input or a weight as it is"


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.long), True])
def test_each_call_after_the_first_in_each_mode_and_size(dynamic: bool, through: list[Any]) -> None:
    """Also where the regions come from a cache, and in a profiler, which shows each region."""
    for found in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model, twin = twins(lambda: Stack(2).requires_grad_(False))
        run = torch.compile(model, backend="chunkflow", fullgraph=True, dynamic=dynamic, options=STREAMED)
        sizes = (3, 5, 3, 7) if dynamic else (4,)
        run(torch.randn(sizes[0], 8))
        assert (counters["aot_autograd"]["autograd_cache_hit"] > 0) == found
        regions = len(programs(model)[0].plan.regions)
        assert 0 < len(through) <= regions
        for mode in (nullcontext, torch.inference_mode, torch.enable_grad):
            with mode():
                for turn in range(2):  # Dynamo compiles anew in another mode
                    through.clear()
                    for rows in sizes:
                        x = torch.randn(rows, 8)
                        torch.testing.assert_close(run(x), twin(x))
                    assert turn == 0 or not through
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            x = torch.randn(sizes[-1], 8)
            torch.testing.assert_close(run(x), twin(x))
        assert sum("Call CompiledFxGraph" in event.name for event in profiled.events()) == len(through) == regions
        through.clear()
        run(x)
        assert not through and all(p.plan.moved_bytes > 0 for p in programs(model))
