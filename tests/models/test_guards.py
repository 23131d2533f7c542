"""Guards that others imply are left out of the calls of blocks, and blocks that differ are still told apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import graphs
from torch import nn

import chunkflow_compile
from chunkflow_compile import programs
from chunkflow_compile.frontend import compile as compiling
from chunkflow_compile.frontend import guard_filter as guards
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.weights.host_weight import HostWeight

SIZE = Size(layers=3)
EAGER: dict[str, Any] = {**OPTIONS, "lowering": "eager"}

pytestmark = pytest.mark.usefixtures("no_grad")


def check(model: nn.Module, twin: nn.Module, steps: int = 2) -> None:
    for step in range(steps):
        inputs = small_inputs("wan", SIZE, step)
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
        programs(model)[0].arena.cycles.wait_planned()


def test_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inside of offloaded weights, and dicts of hooks that say nothing new; weights and forward hooks stay guarded."""
    kept, left_out = list[Any](), list[Any]()

    def seen(found: Any) -> list[bool]:
        needed = guards.needed(found)
        for guard, keep in zip(found, needed, strict=True):
            (kept if keep else left_out).append(guard)
        return needed

    monkeypatch.setattr(compiling, "needed", seen)
    model = chunkflow_compile.compile(small_model("wan", SIZE), **EAGER)
    check(model, small_model("wan", SIZE))
    inside = [g for g in left_out if g.name.endswith((".host", ".__tensor_flatten__()[0]"))]
    of_classes = [g for g in left_out if g.guard_type == "TENSOR_SUBCLASS_METADATA_MATCH"]
    hooks = [g for g in left_out if g.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT"]
    assert inside and of_classes and hooks and len(inside) + len(of_classes) + len(hooks) == len(left_out)
    assert {g.name.rpartition("._")[2] for g in hooks} == {
        "forward_hooks_with_kwargs",
        "forward_pre_hooks_with_kwargs",
        "backward_hooks",
        "backward_pre_hooks",
    }
    weights = {g.name for g in (*kept, *left_out) if g.has_value and isinstance(g.value, HostWeight)}
    assert len(weights) > 8 and weights <= {g.name for g in kept if g.guard_type == "TENSOR_MATCH"}
    bare = {name for g in hooks for name in (g.name.removesuffix("_with_kwargs"),) if "forward" in name}
    assert bare <= {g.name for g in kept}


def wider(m: Any) -> None:
    torch.manual_seed(1)
    first, last = m.blocks[1].ffn.net[0].proj, m.blocks[1].ffn.net[2]
    width = first.out_features * 2
    m.blocks[1].ffn.net[0].proj = nn.Linear(first.in_features, width)
    m.blocks[1].ffn.net[2] = nn.Linear(width, last.out_features)


def without_bias(m: Any) -> None:
    m.blocks[1].attn1.to_q.bias = None


def scaled(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(2 * a for a in args), {name: 2 * value for name, value in kwargs.items()}


def with_kwargs(m: Any) -> None:
    m.blocks[1].attn1.to_q.register_forward_pre_hook(scaled, with_kwargs=True)


def after_with_kwargs(m: Any) -> None:
    hook: Callable[..., Any] = lambda module, args, kwargs, output: 2 * output  # noqa: E731
    m.blocks[1].attn1.norm_q.register_forward_hook(hook, with_kwargs=True)


LONG = [pytest.param(change, marks=pytest.mark.long) for change in (without_bias, after_with_kwargs)]


@pytest.mark.parametrize("change", [wider, with_kwargs, *LONG])
def test_a_block_that_differs_later_is_told_apart(change: Callable[[Any], None]) -> None:
    model, twin, plain = (small_model("wan", SIZE) for _ in range(3))
    chunkflow_compile.compile(model, **EAGER)
    check(model, twin)
    before = graphs()
    change(model)
    change(twin)
    inputs = small_inputs("wan", SIZE, 0)
    assert not torch.equal(twin(**inputs)[0], plain(**inputs)[0])
    check(model, twin)
    assert graphs() == before + 1


class Breaking(nn.Module):
    """A block whose last frame reads no weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.last = nn.Linear(32, width), nn.Tanh()
        self.down = nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.up(x))
        torch._dynamo.graph_break()
        return torch.neg(self.last(x))


class Uneven(nn.Module):
    """Its second block has more than half of the weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Breaking(width) for width in (64, 512, 64)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("hooked", ["blocks.1.up", "blocks.0.last"])
def test_a_hook_is_noticed_whatever_the_frame_reads(hooked: str) -> None:
    """More than half of the large weights, or none."""
    model, twin = Uneven().eval(), Uneven().eval()
    chunkflow_compile.compile(model, **EAGER)
    for step in range(4):
        x = torch.randn(4, 32)
        assert torch.equal(model(x), twin(x))
        if step == 1:
            for m in (model, twin):
                m.get_submodule(hooked).register_forward_hook(lambda module, inputs, output: 2 * output)


def test_a_hook_of_gradients_does_nothing_where_they_are_off() -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    chunkflow_compile.compile(model, **EAGER)
    check(model, twin)
    before = graphs()
    model.blocks[1].attn1.to_q.register_full_backward_hook(lambda *_: pytest.fail("there are no gradients"))  # type: ignore[union-attr, index]
    check(model, twin)
    assert graphs() == before


def test_weights_that_are_restored_and_placed_again_run() -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    chunkflow_compile.compile(model, **EAGER)
    check(model, twin)
    chunkflow_compile.restore(model)
    check(model, twin, 4)
    assert any(p.measurements[-1].moved_bytes == p.plan.moved_bytes > 0 for p in programs(model) if p.measurements)
