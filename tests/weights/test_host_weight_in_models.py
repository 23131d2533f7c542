"""What modules, other models and other compilers do with offloaded weights."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import WITHIN
from helpers import Stack, join_closers, twins
from test_host_weight import MIN_BYTES, NAMES, compiled, pair, stack
from torch import nn

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.host_weight import HostWeight


def assert_steps(run: nn.Module, twin: nn.Module, steps: int = 2, dtype: torch.dtype = torch.float32) -> None:
    for _ in range(steps):
        x = torch.randn(4, 8, dtype=dtype)
        assert torch.equal(run(x), twin(x))


def assert_plain(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
    for module in model.modules():
        assert "_apply" not in module.__dict__ and not module._forward_pre_hooks


def test_new_memory_that_is_not_dense(no_grad: None) -> None:
    model, twin = pair()
    run = compiled(model)
    assert_steps(run, twin)
    wide = {name: torch.randn(*model.get_parameter(name).shape, 2) for name in NAMES}
    for m in (model, twin):
        for name in NAMES:
            m.get_parameter(name).data = wide[name][..., 0]
    assert_steps(run, twin)
    state = {name: wide[name][..., 1] if name in NAMES else p for name, p in twin.state_dict().items()}
    for m in (model, twin):
        m.load_state_dict(state, assign=True)
    assert_steps(run, twin)
    restore(model)
    assert_plain(model)


WRITERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "whole": lambda w: w.mul_(2),
    "row": lambda w: w[0].mul_(2),
    "flat": lambda w: w.view(-1)[3:9].add_(1),
    "transposed": lambda w: w.t().mul_(2),
}


@pytest.mark.parametrize("policy", ["chunkflow", "resident"])
def test_a_write_in_a_function_that_another_backend_compiled(policy: str, no_grad: None) -> None:
    model, twin = pair()
    run = compiled(model) if policy == "chunkflow" else compiled(model, policy="resident", slowdown=None)
    assert_steps(run, twin)
    for what, write in WRITERS.items():
        function = torch.compile(write, backend="aot_eager")
        for m in (model, twin):
            function(m.get_parameter(NAMES[0]).detach())
        assert torch.equal(model.get_parameter(NAMES[0]), twin.get_parameter(NAMES[0])), what
        assert_steps(run, twin)


def test_a_write_that_inductor_compiled_is_noticed(no_grad: None) -> None:
    """Its kernels write the host memory past every op, and only torch's counter on the weight tells."""
    model, twin = pair()
    run = compiled(model, policy="resident", slowdown=None)
    assert_steps(run, twin)
    torch.compile(WRITERS["row"])(model.get_parameter(NAMES[0]).detach())
    WRITERS["row"](twin.get_parameter(NAMES[0]).detach())
    assert_steps(run, twin)


def test_writes_of_two_models_at_once_end() -> None:
    a, b = pair()[0], pair()[0]
    weights = [m.get_parameter(NAMES[0]) for m in (a, b)]

    def write(order: list[nn.Parameter]) -> None:
        with torch.no_grad():
            for _ in range(300):
                torch._foreach_mul_(order, 1.0)

    threads = [threading.Thread(target=write, args=(o,), daemon=True) for o in (weights, weights[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
        assert not thread.is_alive(), "they wait for each other"


def test_inference_mode() -> None:
    model, twin = pair()
    run = compiled(model)
    with torch.inference_mode():
        for m in (model, twin):
            m.to(torch.bfloat16)
            m.get_parameter(NAMES[0])[0].mul_(2)
            m.get_parameter(NAMES[1]).data = m.get_parameter(NAMES[1]).data * 2
        assert_steps(run, twin, dtype=torch.bfloat16)
        assert torch.equal(model.state_dict()[NAMES[0]], twin.state_dict()[NAMES[0]])
        copied = copy.deepcopy(model)
    with torch.no_grad():
        assert_steps(run, twin, dtype=torch.bfloat16)
        assert_steps(copied, twin, dtype=torch.bfloat16)
    restore(model)
    assert_plain(model)
    assert all(p.requires_grad for p in model.parameters())


def test_a_move_beside_the_steps_of_another_thread(no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = pair()
    run = compiled(model)
    assert_steps(run, twin)
    x = torch.randn(4, 8)
    expected, wrong = twin(x), list[object]()
    done = threading.Event()

    def step() -> None:
        with torch.no_grad():
            while not done.is_set():
                if not torch.equal(run(x), expected):
                    wrong.append("another result")

    thread = threading.Thread(target=step)
    monkeypatch.setattr(threading, "excepthook", lambda failed: wrong.append(failed.exc_value))
    thread.start()
    for _ in range(30):
        model.to("cpu")
    done.set()
    thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("make", "change", "x"),
    [
        (lambda: nn.LSTM(16, 32), lambda m: m.to("cpu").double(), torch.rand(3, 1, 16, dtype=torch.float64)),
        (lambda: nn.Conv2d(8, 16, 3), lambda m: m.to(memory_format=torch.channels_last), torch.rand(1, 8, 8, 8)),
    ],
    ids=["an _apply of its own", "channels_last"],
)
def test_modules_that_are_not_linear(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], Any], x: torch.Tensor, no_grad: None
) -> None:
    model, twin = twins(make)
    offload(model, min_bytes=MIN_BYTES)
    for m in (model, twin):
        change(m)
    for _ in range(2):
        assert [p.stride() for p in model.parameters()] == [p.stride() for p in twin.parameters()]
        found, expected = model(x)[0], twin(x)[0]
        assert torch.equal(found, expected) and found.stride() == expected.stride()
        restore(model)
    assert_plain(model)


def test_what_needs_shared_memory_or_another_shape_is_refused(no_grad: None) -> None:
    model, _ = pair()
    weight = model.get_parameter(NAMES[0])
    before = weight.clone()
    with pytest.raises(ChunkflowError, match=r"share_memory_\(\) needs the memory of"):
        model.share_memory()
    with pytest.raises(ChunkflowError, match=r"out= of shape \[3, 4\] needs the memory of"):
        torch.add(torch.ones(3, 4), 1, out=weight)
    with pytest.raises(ChunkflowError, match=r"_conj.default needs the memory of"):
        torch.view_as_complex(weight.detach().view(-1, 2)).conj()
    assert not hasattr(weight, "__cuda_array_interface__") and torch.equal(weight, before)


ALIASES: dict[str, Callable[[Any, Any], Any]] = {
    "a parameter": lambda a, b: setattr(b, "weight", nn.Parameter(a.weight)),
    "a view": lambda a, b: setattr(b, "weight", nn.Parameter(a.weight[:])),
    "data": lambda a, b: setattr(b.weight, "data", a.weight.data),
}


@pytest.mark.parametrize("first_step", [True, False])
def test_two_parameters_of_one_memory(first_step: bool, no_grad: None) -> None:
    """Placed, or with programs already: a sentence, nothing has moved, and what it says runs."""
    for alias in ALIASES.values():
        torch._dynamo.reset()
        model, twin = pair()
        run = compiled(model)
        if not first_step:
            assert_steps(run, twin)
        one, other = model.blocks[0].up, model.blocks[1].up
        alias(one, other)
        with pytest.raises(
            Exception, match=r"1\.up\.weight has the memory of blocks\.0\.up\.weight, .* or a clone of it"
        ):
            run(torch.randn(4, 8))
        other.weight, twin.blocks[1].up.weight = one.weight, twin.blocks[0].up.weight
        assert_steps(run, twin)
        one.weight.mul_(0.5), twin.blocks[0].up.weight.mul_(0.5)
        assert_steps(run, twin)
        assert programs(model)[0].measurements[-1].moved_bytes > 0
        restore(model)
        assert_plain(model)


def test_a_parameter_made_by_the_class_of_a_weight_is_an_ordinary_one(no_grad: None) -> None:
    model, _ = pair()
    made = type(model.get_parameter(NAMES[0]))(torch.ones(2), requires_grad=False)
    assert type(made) is nn.Parameter and not made.requires_grad
    assert f"{model.get_parameter(NAMES[0])[0, 0]:.2f}" == f"{stack().get_parameter(NAMES[0])[0, 0]:.2f}"


def test_gradients_and_keep_vars() -> None:
    model, twin = stack(), stack()
    for m in (model, twin):
        m(torch.ones(4, 8)).sum().backward()
    offload(model, min_bytes=MIN_BYTES)
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is p for name, p in model.named_parameters())
    restore(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_a_shallow_copy_of_a_placed_model(no_grad: None) -> None:
    model, twin = pair()
    shallow = copy.copy(model)
    restore(model)
    restore(shallow)
    offload(shallow, min_bytes=MIN_BYTES)
    assert_steps(shallow, twin)


def test_memory_is_given_back(no_grad: None) -> None:
    """That of an adapter that was removed, of a type that was left, and of a model whose weight is kept."""
    model, twin = pair()
    run = compiled(model)
    assert_steps(run, twin)
    old = weakref.ref(model.get_parameter(NAMES[0]).host)  # type: ignore[attr-defined]
    for m in (model, twin):
        m.double()
    assert_steps(run, twin, dtype=torch.float64)
    gc.collect()
    assert old() is None, "the program of the old type keeps nothing"

    hosts = []
    for seed in range(2):
        for m in (model, twin):
            torch.manual_seed(seed)
            m.blocks.append(Stack().blocks[0].double())
        assert_steps(run, twin, dtype=torch.float64)
        added = model.blocks[-1].up.weight
        assert isinstance(added, HostWeight)
        hosts.append(weakref.ref(added.host))
        del added
        for m in (model, twin):
            del m.blocks[-1]
        gc.collect()
        assert_steps(run, twin, dtype=torch.float64)
    gc.collect()
    assert [ref() for ref in hosts] == [None] * 2 and len(programs(model)) == 1

    kept, others = model.get_parameter(NAMES[0]), [weakref.ref(p) for p in model.parameters()]
    del model, run, m
    torch._dynamo.reset()
    gc.collect()
    join_closers()
    gc.collect()
    assert sum(ref() is not None for ref in others) == 1
    assert torch.equal(kept, twin.get_parameter(NAMES[0]))
