"""Tables: inputs on the CPU that forward moves to the device, such as rotary embeddings; moved once, not in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Tables:
    """Copies of tables on ``device``, each as long as its table lives.  ``positions``: of the tables among the inputs."""

    def __init__(self, device: torch.device, positions: Sequence[int] = ()) -> None:
        self._device = device
        self._positions = tuple(positions)
        self._moved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # table -> its version, and the copy

    def move(self, inputs: list[Any]) -> None:
        """Replace each table among ``inputs`` by its copy, which is made anew if the table has changed."""
        for position in self._positions:
            inputs[position] = self._copy(inputs[position])

    def _copy(self, table: torch.Tensor) -> torch.Tensor:
        if table.is_inference():  # counts no versions: it could have changed
            return table.to(self._device)
        known: tuple[int, torch.Tensor] | None = self._moved.get(table)
        if known is None or known[0] != table._version:
            with torch.inference_mode(False):
                known = self._moved[table] = table._version, table.to(self._device)
        return known[1]
