"""What torch does to the tensors of a module: functions that convert them, exchanges, parametrizations, fakes and profiles.

Beside each placed model stands a plain one, to which the same happens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from helpers import Stack, twins
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrize
from torch.profiler import profile

import chunkflow_compile
from chunkflow_compile import ChunkflowError, offload, programs, restore
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.host_weight import HostWeight

EAGER = {**OPTIONS, "lowering": "eager"}
WAYS = ("whole", "lazy", "kind")

pytestmark = pytest.mark.usefixtures("no_grad", "quiet")


def place(model: nn.Module, way: str) -> None:
    """Compile a model in place, whole and offloaded before or by its first call, or by kind."""
    if way == "kind":
        chunkflow_compile.compile(model, **EAGER)
        return
    if way == "whole":
        offload(model, min_bytes=EAGER["min_bytes"])
    model.compile(backend="chunkflow", options=EAGER)


def placed(way: str) -> tuple[nn.Module, nn.Module]:
    """A model that streams, and a plain twin."""
    model, twin = twins(Stack)
    place(model, way)
    check(model, twin)
    return model, twin


def check(model: nn.Module, twin: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Two calls give what the twin gives, bit for bit, and copy weights."""
    for _ in range(2):
        x = torch.randn(4, 8).to(dtype)
        assert torch.equal(model(x), twin(x))
    assert any(p.measurements and p.measurements[-1].moved_bytes == p.plan.moved_bytes > 0 for p in programs(model))


def check_restored(model: nn.Module, twin: nn.Module) -> None:
    restore(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert type(p) is nn.Parameter and torch.equal(p, q) and "token" not in p.__dict__


def written_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is, after a write to a copy of it."""
    tensor.to("cpu", copy=True).zero_()
    return tensor


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "other values": lambda t: t * 0.5,
    "in place": lambda t: t.mul_(0.5),
    "rounded": lambda t: t.bfloat16().float(),
    "through a view": lambda t: t.view(-1).mul_(0.5).view_as(t),
    "by its values": lambda t: t.clamp(-0.01, 0.01),
    "a copy that is written": lambda t: t.to("cpu", copy=True).mul_(2),
    "another that is dropped": written_copy,
    "as it is": lambda t: t.contiguous(),
    "a parameter": lambda t: nn.Parameter(t + 1, requires_grad=False),
    "on the device by its index": lambda t: t.to("cpu:0"),
    "transposed twice": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
}


@pytest.mark.parametrize("way", ["whole", "kind"])
def test_what_apply_makes_of_a_weight_is_its_value(way: str) -> None:
    """nn.Module._apply keeps what its function returns, also of weights whose type and device stay."""
    model, twin = placed(way)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # such reads are meant
        for function in FUNCTIONS.values():
            for m in (model, twin):
                m._apply(function)
            check(model, twin)
        for dtype in (torch.float64, torch.float32):
            for m in (model, twin):
                m.to(dtype)
            check(model, twin, dtype)
    check_restored(model, twin)


def test_views_and_copies_beside_the_weights() -> None:
    """A copy that a conversion keeps has memory of its own; a view in the model does not hide its weight from restore, and
    is no input of compiled code."""
    model, _ = twins(Stack)
    with torch.enable_grad():
        model(torch.randn(4, 8)).sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    offload(model, min_bytes=EAGER["min_bytes"])
    kept: list[torch.Tensor] = []
    model._apply(lambda t: (kept.append(t.to("cpu", copy=True)), t)[1])
    before = [copy.clone() for copy in kept]
    for p in model.parameters():
        p.mul_(3)
    assert all(torch.equal(copy, values) for copy, values in zip(kept, before, strict=True))
    weight = model.blocks[0].up.weight
    model.blocks[0].register_buffer("view", weight.data[:4])
    run = torch.compile(lambda x, view: model(x) + view.sum(), backend="chunkflow", options=EAGER)
    x = torch.randn(4, 8)
    with pytest.raises(
        Exception, match=r"A view of blocks.0.up.weight of shape .4, 32. .* pass a copy, view.clone\(\)"
    ):
        run(x, weight[:4])
    assert torch.equal(run(x, weight[:4].clone()), model(x) + weight[:4].sum())
    restore(model)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert p.grad is not None and torch.equal(p.grad, grad)
    assert type(model.blocks[0].view) is torch.Tensor and torch.equal(model.blocks[0].view, weight[:4])


def test_an_empty_model_is_loaded() -> None:
    """to_empty keeps a model placed; on the meta device its values would be lost, so it is restored before."""
    model, twin = placed("whole")
    for move in (lambda m: m.to("meta"), lambda m: m.to_empty(device="meta")):
        with pytest.raises(
            ChunkflowError, match=r"on the meta device it would lose its values: call .*restore\(model\)"
        ):
            move(model)
        check(model, twin)
    model.to_empty(device="cpu").load_state_dict(twin.state_dict())
    check(model, twin)
    restore(model).to("meta").to_empty(device="cpu").load_state_dict(twin.state_dict())
    place(model, "whole")
    check(model, twin)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_with_fake_tensors_runs_nothing(way: str) -> None:
    """Tools that count memory call models under FakeTensorMode; before the first call and later."""
    model, twin = twins(Stack)
    place(model, way)
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            out = model(mode.from_tensor(torch.randn(4, 8)))
        assert type(out) is FakeTensor and out.shape == (4, 8)
        check(model, twin)
    with FakeTensorMode(allow_non_fake_inputs=True):
        restore(model)
    check_restored(model, twin)


def test_fake_weights_are_not_placed() -> None:
    """Under a FakeTensorMode, a model with values is placed as ever, one without is refused."""
    model, twin = twins(Stack)
    with FakeTensorMode():
        fake = Stack()
        offload(model, min_bytes=4096)
    with pytest.raises(ChunkflowError, match="parameters of a FakeTensorMode, without values: load its weights first"):
        offload(fake)
    place(model, "lazy")
    check(model, twin)


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.long] * (way == "lazy")) for way in WAYS])
def test_weights_are_exchanged(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.utils.swap_tensors, and by load_state_dict and .to() where torch is told to use it."""
    model, twin = placed(way)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for seed, assign in enumerate((False, True)):
            torch.manual_seed(seed)
            other = Stack().state_dict()
            for m in (model, twin):
                m.load_state_dict({name: value.clone() for name, value in other.items()}, assign=assign)
            check(model, twin)
        for m in (model, twin):
            m.to(torch.float64)
        check(model, twin, torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    values = torch.randn(64, 32, dtype=torch.float64)
    for m in (model, twin):
        torch.utils.swap_tensors(m.blocks[0].up.weight, nn.Parameter(values.clone()))  # by one that is not offloaded
        torch.utils.swap_tensors(m.blocks[0].down.weight, m.blocks[1].down.weight)  # by one that is
    check(model, twin, torch.float64)
    assert buffer_of(model.blocks[0].up.weight) is not None
    check_restored(model, twin)


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.5


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2 + 0.001


class Summed(nn.Module):
    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one + other

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return weight * 0.25, weight * 0.75


@pytest.mark.parametrize(
    ("way", "kind"), [("whole", Scaled), ("kind", Halved), pytest.param("lazy", Summed, marks=pytest.mark.long)]
)
def test_weights_are_parametrized(way: str, kind: type[nn.Module]) -> None:
    """Registered on a placed model, set, and removed; and removed from a model that was placed with it."""

    def register(*models: Any) -> None:
        for m in models:
            parametrize.register_parametrization(m.blocks[1].up, "weight", kind())

    def remove(*models: Any) -> None:
        for m in models:
            parametrize.remove_parametrizations(m.blocks[1].up, "weight")

    both: Any = placed(way)
    register(*both)
    check(*both)
    if kind is not Scaled:  # it has no inverse
        values = torch.randn(64, 32)
        for m in both:
            m.blocks[1].up.weight = values
        check(*both)
    remove(*both)
    check(*both)
    check_restored(*both)
    both = twins(Stack)
    register(*both)
    place(both[0], way)
    check(*both)
    remove(*both)
    check(*both)


@pytest.mark.parametrize(("way", "where"), [("whole", "placing"), ("lazy", "first call"), ("kind", "all")])
def test_a_profile_sees_a_model_being_placed(way: str, where: str) -> None:
    """A profiler that records shapes refers weakly to the tensors of each op that it sees."""
    model, twin = twins(Stack)
    if where != "first call":
        with profile(record_shapes=True):
            place(model, way)
            if where == "all":
                check(model, twin)
    else:
        place(model, way)
        with profile(record_shapes=True):
            check(model, twin)
    check(model, twin)
    check_restored(model, twin)


def test_a_profile_that_is_kept_is_named() -> None:
    """Its weak references hold up placing and restoring.  Nothing is lost, and without it all goes on."""
    model, twin = twins(Stack)
    with profile(record_shapes=True) as kept:
        model(torch.randn(4, 8))
    with pytest.raises(ChunkflowError, match=r"something refers to it weakly.* as a profile with record_shapes"):
        offload(model, min_bytes=4096)
    assert not any(isinstance(p, HostWeight) for p in model.parameters())
    del kept
    place(model, "whole")
    check(model, twin)
    with profile(record_shapes=True) as kept:
        model.blocks[0].up.weight.sum()
    with pytest.raises(ChunkflowError, match="Delete the profile"):
        restore(model)
    check(model, twin)
    del kept
    check_restored(model, twin)
