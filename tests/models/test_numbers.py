"""Python numbers in a call that change from call to call: they cost no more compilations than with torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import EAGER
from helpers import Block, graphs, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import offload, programs

pytestmark = pytest.mark.usefixtures("no_grad")

Call = tuple[tuple[Any, ...], dict[str, Any]]
FLOATS = [0.9**i for i in range(4)]
INTS = [2, 3, 5, 4]


class Numbered(Block):
    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__(32)
        self.use = use

    def forward(self, x: torch.Tensor, *numbers: Any, **named: Any) -> torch.Tensor:
        return self.use(super().forward(x), *numbers, **named)


class Model(nn.Module):
    """Nothing but blocks that are given the numbers of the call."""

    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Numbered(use) for _ in range(2))

    def forward(self, x: torch.Tensor, *numbers: Any, **named: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, *numbers, **named)
        return x


def chosen(y: torch.Tensor, by: float, flag: bool) -> torch.Tensor:
    return y * by if flag else y - by


# Name -> what a block does with the numbers, and those of each call.
USES: dict[str, tuple[Callable[..., torch.Tensor], Sequence[Call]]] = {
    "a float": (lambda y, by: y * by, [((s,), {}) for s in FLOATS]),
    "floats in a dict": (
        lambda y, by: y * by["scale"] + by["shift"],
        [(({"scale": s, "shift": -s},), {}) for s in FLOATS],
    ),
    "floats by keyword": (lambda y, *, by, to: y / by - to, [((), {"by": s, "to": 2 * s}) for s in FLOATS]),
    "floats in all these ways": (
        lambda y, by, of, *, to: y * by * of["scale"] + of["shift"] - to,
        [((s, {"scale": 2 * s, "shift": -s}), {"to": 3 * s}) for s in FLOATS],
    ),
    "a float and a size": (lambda y, by: y * (by * y.shape[0]), [((s,), {}) for s in FLOATS]),
    "a float and an int": (
        lambda y, by, n: y * (by * n) + n,
        [((s, n), {}) for s, n in zip(FLOATS, INTS, strict=True)],
    ),
    "a float and a bool": (chosen, [((s, i % 2 == 0), {}) for i, s in enumerate(FLOATS)]),
    "a float that no tensor replaces": (lambda y, by: y.clamp(max=by) * by, [((s,), {}) for s in FLOATS]),
    "an int": (lambda y, n: y.roll(n, 1) * n, [((n,), {}) for n in INTS]),
}
INDUCTOR = ("a float", "floats in a dict", "a float and a size")
CASES = [*((name, "eager", by_kind) for name in USES for by_kind in (False, True))]
CASES += [(name, "inductor", by_kind) for name in INDUCTOR for by_kind in (False, True)]


# Cases that "floats in all these ways" has in it.
PARTS = ("a float", "floats in a dict", "floats by keyword")


def short(name: str, lowering: str, by_kind: bool) -> bool:
    """Whether make test runs the case."""
    if by_kind:
        return (name, lowering) == ("a float", "eager")
    return name not in PARTS if lowering == "eager" else name == "a float"


def run(step: Callable[..., torch.Tensor], twin: nn.Module, calls: Sequence[Call], open_sizes: bool) -> list[int]:
    """The graphs that were compiled after each call."""
    torch._dynamo.reset()
    before, made = graphs(), []
    for i, (numbers, named) in enumerate(calls):
        x = torch.randn(4 + 2 * i * open_sizes, 32)
        torch.testing.assert_close(step(x, *numbers, **named), twin(x, *numbers, **named), atol=1e-5, rtol=1e-5)
        made.append(graphs() - before)
    return made


@pytest.mark.parametrize(
    ("name", "lowering", "by_kind"),
    [pytest.param(*case, marks=() if short(*case) else pytest.mark.long) for case in CASES],
)
def test_numbers_that_change(name: str, lowering: str, by_kind: bool) -> None:
    use, calls = USES[name]
    open_sizes = name == "a float and a size"
    model, twin = twins(lambda: Model(use))
    alone, _ = twins(lambda: Model(use))
    backend = "aot_eager" if lowering == "eager" else "inductor"
    options = {**EAGER, "lowering": lowering}
    with torch._functorch.config.patch(enable_autograd_cache=False):  # it takes the code of one float for another's
        if by_kind:
            for block in alone.blocks:
                block.compile(backend=backend)
            plain = run(alone, twin, calls, open_sizes)
            chunkflow_compile.compile(model, **options)
            made = run(model, twin, calls, open_sizes)
        else:
            # one frame each, in which the hooks of a placed model are traced too
            plain = run(torch.compile(lambda x, *a, **k: alone(x, *a, **k), backend=backend), twin, calls, open_sizes)
            offload(model, min_bytes=EAGER["min_bytes"])
            whole = torch.compile(lambda x, *a, **k: model(x, *a, **k), backend="chunkflow", options=options)
            made = run(whole, twin, calls, open_sizes)
    assert made == plain
    assert all(m.moved_bytes > 0 for p in programs(model) for m in p.measurements)
