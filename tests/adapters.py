"""Random LoRA adapters, as their files have them, and a model with slots for them beside one that PEFT runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from conftest import EAGER
from helpers import graphs, small_twins
from torch import nn

from chunkflow_compile import compile, enable_adapters
from chunkflow_compile.catalog.small import Size, small_inputs

ATTENTION = ("to_q", "to_k", "to_v")
SIZE = Size(layers=2, singles=2)
State = dict[str, torch.Tensor]


class Library:
    """Adapters of the linear layers of a model.  ``prefix``: of their names, what a pipeline calls the model."""

    def __init__(self, model: nn.Module, prefix: str = "transformer") -> None:
        layers = {f"{prefix}.{n}": m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._shapes = {name: (m.in_features, m.out_features) for name, m in layers.items()}

    def adapter(self, seed: int, rank: int, targets: Sequence[str] = ATTENTION, extra: int = 0) -> State:
        """``extra``: by how much the rank of the last layer is larger."""
        rng, state = torch.Generator().manual_seed(seed), State()
        chosen = [name for name in self._shapes if name.endswith(tuple(targets))]
        for name in chosen:
            ins, outs = self._shapes[name]
            r = rank + extra * (name == chosen[-1])
            state[f"{name}.lora_A.weight"] = 0.2 * torch.randn(r, ins, generator=rng)
            state[f"{name}.lora_B.weight"] = 0.2 * torch.randn(outs, r, generator=rng)
        return state


class Pair:
    """A model with slots, compiled, and a twin that PEFT runs.  ``prepare``: changes both before."""

    def __init__(
        self,
        name: str = "wan",
        whole: bool = False,
        options: Any = EAGER,
        prepare: Callable[[Any], object] = lambda m: m,
        **slots: Any,
    ) -> None:
        self.name = name
        self.model, self.twin = small_twins(name, SIZE)
        self.library = Library(self.twin)
        self.both(prepare)
        enable_adapters(self.model, **{"rank": 16, **slots})
        if whole:
            self.model.compile(backend="chunkflow", fullgraph=True, options=options)
        else:
            compile(self.model, device="cpu", **options)
        for step in range(2):
            self.check(step)
        self.compiled = graphs()

    def both(self, change: Callable[[Any], object]) -> None:
        """The loaders of PEFT may exchange tensors with those that they are given, so each change makes its own."""
        change(self.model)
        change(self.twin)

    def load(self, state: State, adapter_name: str, **given: Any) -> None:
        self.both(
            lambda m: m.load_lora_adapter({k: v.clone() for k, v in state.items()}, adapter_name=adapter_name, **given)
        )

    def choose(self, names: Any, weights: Any = None) -> None:
        self.both(lambda m: m.set_adapters(names, weights))

    def swap(self, *ranks: int, targets: Sequence[str] = ATTENTION) -> None:
        """Load adapters of these ranks, each in the place of the one before, and check a call with each."""
        for number, rank in enumerate(ranks):
            self.load(self.library.adapter(number, rank, targets), f"a{number}")
            self.choose(f"a{number}")
            self.check(number)
        self.same_programs()

    def check(self, seed: int = 0, tolerance: float = 1e-5, **given: Any) -> torch.Tensor:
        inputs = {
            name: value.to(self.twin.dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in {**small_inputs(self.name, SIZE, seed), **given}.items()
        }
        want, got = self.twin(**inputs)[0], self.model(**inputs)[0]
        assert torch.allclose(got, want, rtol=0, atol=tolerance), float((got - want).abs().max())
        return got

    def same_programs(self) -> None:
        assert graphs() == self.compiled, "nothing was compiled"
