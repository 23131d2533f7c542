"""Guards of blocks that are compiled once for each kind: those that others imply are left out, and blocks that differ are
still told apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import EAGER
from helpers import Block, InTurn, check_steps, graphs, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import programs
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.frontend import compile as compiling
from chunkflow_compile.frontend import guard_filter as guards
from chunkflow_compile.frontend.block_kinds import kinds_of, repeated_blocks
from chunkflow_compile.weights.host_weight import HostWeight

SIZE = Size(layers=3)

pytestmark = pytest.mark.usefixtures("no_grad", "kept_dynamo")


def doubled(module: nn.Module, inputs: Any, output: Any) -> Any:
    return 2 * output


def hooked(m: Any) -> Callable[[], None]:
    """A block, a module in one, and another part; returns what removes the hooks again."""
    found = [part.register_forward_hook(doubled) for part in (m.blocks[1], m.blocks[1].attn1, m.proj_out)]
    return lambda: [handle.remove() for handle in found] and None


class Pair:
    """A model that is compiled by kind and called; its twin; the guards of its compilations."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(compiling, "needed", self.needed)
        self.model, self.twin = (small_model("wan", SIZE) for _ in range(2))
        self.kept, self.left_out = list[Any](), list[Any]()
        chunkflow_compile.compile(self.model, **EAGER)
        self.check()

    @property
    def both(self) -> tuple[Any, Any]:
        return self.model, self.twin

    def needed(self, found: Any) -> list[bool]:
        needed = guards.needed(found)
        for guard, keep in zip(found, needed, strict=True):
            (self.kept if keep else self.left_out).append(guard)
        return needed

    def check(self, steps: int = 2) -> torch.Tensor:
        """Check some steps, and return what the first gives."""
        outputs = []
        for step in range(steps):
            inputs = small_inputs("wan", SIZE, step)
            outputs.append(self.twin(**inputs)[0])
            assert torch.equal(self.model(**inputs)[0], outputs[-1])
        return outputs[0]


@pytest.fixture(scope="module")
def pair(kept_dynamo: None) -> Iterator[Pair]:
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        yield Pair(patch)


def test_what_is_left_out(pair: Pair) -> None:
    """What the guard of an offloaded weight implies, and dicts of hooks that say nothing new; the rest stays guarded."""
    kept, left_out = pair.kept, pair.left_out
    inside = [g for g in left_out if g.name.endswith((".host", ".__tensor_flatten__()[0]"))]
    of_classes = [g for g in left_out if g.guard_type in ("TENSOR_SUBCLASS_METADATA_MATCH", "TYPE_MATCH")]
    hooks = [g for g in left_out if g.guard_type == "EMPTY_NN_MODULE_HOOKS_DICT"]
    assert inside and of_classes and hooks and len(inside) + len(of_classes) + len(hooks) == len(left_out)
    names = {"forward_hooks_with_kwargs", "forward_pre_hooks_with_kwargs", "backward_hooks", "backward_pre_hooks"}
    assert {g.name.rpartition("._")[2] for g in hooks} == names
    weights = {g.name for g in (*kept, *left_out) if g.has_value and isinstance(g.value, HostWeight)}
    assert len(weights) > 8 and weights <= {g.name for g in kept if g.guard_type == "TENSOR_MATCH"}
    bare = {name for g in hooks for name in (g.name.removesuffix("_with_kwargs"),) if "forward" in name}
    assert bare <= {g.name for g in kept}


def changed(owner: Callable[[Any], Any], name: str, value: Callable[[Any], Any]) -> Callable[[Any], Callable[[], None]]:
    """Sets an attribute of a module; undone by setting it as it was."""

    def change(m: Any) -> Callable[[], None]:
        module = owner(m)
        before = getattr(module, name)
        setattr(module, name, value(before))
        return lambda: setattr(module, name, before)

    return change


def wider(feedforward: Any) -> Any:
    torch.manual_seed(1)
    first, last = feedforward.net[0].proj, feedforward.net[2]
    made = type(feedforward)(first.in_features, inner_dim=2 * first.out_features, activation_fn="gelu-approximate")
    assert made.net[2].out_features == last.out_features
    return made.eval()


def doubled_attention(before: Any) -> Any:
    class Doubled(type(before)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return 2 * super().__call__(*args, **kwargs)

    return Doubled()


def scaled(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(2 * a for a in args), {name: 2 * value for name, value in kwargs.items()}


def doubled_with_kwargs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    return 2 * output


def adapted(m: Any) -> Callable[[], None]:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=r"blocks\.[01]\.attn1\.to_q", init_lora_weights=False)
    torch.manual_seed(0)
    m.add_adapter(config)
    assert len(kinds_of(repeated_blocks(m))) == 2
    return m.unload_lora


CHANGES = [
    (changed(lambda m: m.blocks[2].norm1, "eps", lambda _: 0.5), 1),
    (changed(lambda m: m.blocks[1], "ffn", wider), 1),
    (changed(lambda m: m.blocks[1].attn1.to_q, "bias", lambda _: None), 1),
    (changed(lambda m: m.blocks[1].attn1, "processor", doubled_attention), 1),
    (lambda m: m.blocks[1].attn1.to_q.register_forward_pre_hook(scaled, with_kwargs=True).remove, 1),
    (lambda m: m.blocks[1].attn1.norm_q.register_forward_hook(doubled_with_kwargs, with_kwargs=True).remove, 1),
    (hooked, 3),
    (adapted, 6),
]


@pytest.mark.parametrize(
    ("change", "compiled"),
    [pytest.param(*case, marks=[pytest.mark.long] * (i not in (0, 6))) for i, case in enumerate(CHANGES)],
)
def test_a_block_that_differs_later_is_told_apart(
    change: Callable[[Any], Callable[[], None]], compiled: int, pair: Pair
) -> None:
    """``compiled``: most graphs for it; there are none to go back."""
    plain, before = pair.check(1), graphs()
    undo = [change(m) for m in pair.both]
    assert not torch.equal(pair.check(), plain)
    after = graphs()
    assert after - before <= compiled
    for function in undo:
        function()
    assert torch.equal(pair.check(), plain) and graphs() == after
    assert torch._dynamo.config.skip_nnmodule_hook_guards, "the user's setting is back"


class Hosted(Block):
    """Has an attribute of the name that the memory of an offloaded weight has."""

    def __init__(self) -> None:
        super().__init__(32)
        self.host = "here"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.host == "here" else 2)


def test_an_attribute_of_a_module_that_is_called_host_is_guarded() -> None:
    model, twin = twins(lambda: InTurn([Hosted(), Hosted()]))
    chunkflow_compile.compile(model, **EAGER)
    for host in ("here", "there"):
        model.blocks[1].host = twin.blocks[1].host = host  # type: ignore[union-attr]
        check_steps(model, twin, 2, (4, 32))


def test_a_hook_that_takes_keyword_arguments_later_is_told_apart(pair: Pair) -> None:
    """It is the same function, in the same place: that it takes them is all that differs."""
    given = []

    def either(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        scaled = tuple((2 if kwargs is None else 3) * a for a in args)
        return scaled if kwargs is None else (scaled, kwargs)

    for with_kwargs in (False, True):
        parts = [m.blocks[1].attn1.to_q for m in pair.both]
        handles = [part.register_forward_pre_hook(either, with_kwargs=with_kwargs) for part in parts]
        given.append(pair.check())
        for handle in handles:
            handle.remove()
    assert not torch.equal(*given)


def test_a_hook_of_gradients_does_nothing_where_they_are_off(pair: Pair) -> None:
    before = graphs()
    module = pair.model.blocks[1].attn1.to_q  # type: ignore[union-attr, index]
    handle = module.register_full_backward_hook(lambda *_: pytest.fail("there are no gradients"))  # type: ignore[union-attr]
    pair.check()
    assert graphs() == before
    handle.remove()


def test_weights_that_are_restored_and_placed_again_run(pair: Pair) -> None:
    chunkflow_compile.compile(chunkflow_compile.restore(pair.model), **EAGER)
    pair.check(4)
    newest = [(p.measurements[-1], p.plan) for p in programs(pair.model) if p.measurements]
    assert any(m.moved_bytes == plan.moved_bytes > 0 for m, plan in newest)


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


@pytest.mark.parametrize("hooked", ["blocks.1", "blocks.1.up", "blocks.0.last"])
def test_a_hook_is_noticed_whatever_the_frame_reads(hooked: str) -> None:
    """All or more than half of the large weights, or none; whether it is there before the first call or comes later."""
    for when in (0, 2):
        torch._dynamo.reset()
        model, twin = twins(lambda: InTurn(Breaking(width) for width in (64, 512, 64)))  # the second has most weights
        chunkflow_compile.compile(model, **EAGER)
        for step in range(4):
            if step == when:
                for m in (model, twin):
                    m.get_submodule(hooked).register_forward_hook(doubled)
            check_steps(model, twin, 1, (4, 32))
    assert torch._dynamo.config.skip_nnmodule_hook_guards, "the user's setting is back"
