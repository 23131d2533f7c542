"""What the executor runs on: memory, and the values of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .arena import Arena
from .measurement import WindowSeconds


@dataclass(frozen=True)
class Binding:
    """The memory that a program runs on.

    ``arena``: where its slots lie, and the streams over it.
    ``values``: offloaded weight -> the tensor that its readers see, a slot or a resident copy.  Weights that were not
    offloaded are read where they are: the parameters come with every call.
    ``slots``, ``hosts``: streamed weight -> its bytes on the device and on the host, uint8.
    """

    arena: Arena
    values: Mapping[str, torch.Tensor]
    slots: Mapping[str, torch.Tensor]
    hosts: Mapping[str, torch.Tensor]


@dataclass
class Cost:
    """What a step cost so far.  Bytes ``moved``, and ``primed`` in front of a cold one."""

    windows: WindowSeconds
    primed: int = 0
    collectives: int = 0
    moved: int = 0


@dataclass
class Step:
    """One run: the values of the program's nodes by number, and its cost, which is known later than its outputs."""

    env: list[Any]
    cost: Cost

    @property
    def outputs(self) -> Any:
        """What the program returns, once the device has delivered."""
        return self.env[-1]
