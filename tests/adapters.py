"""Random LoRA adapters, as their files have them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

ATTENTION = ("to_q", "to_k", "to_v")
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
