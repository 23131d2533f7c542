"""The executor's data: the memory of a program, and the values of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from chunkflow_compile.passes.program.arrivals import Arrivals
from chunkflow_compile.weights.shared_ring import SharedRing
from chunkflow_compile.weights.source import Source

from .arena import Arena, Occupancy
from .measurement import WindowSeconds


@dataclass(frozen=True)
class Binding:
    """The memory that a program runs on.

    ``arena``: holds its slots and the streams.
    ``values``: offloaded weight -> the tensor that its readers get, a slot or a resident copy.  Readers of any other
    weight get the parameter, which is an input of every call.
    ``slots``, ``hosts``: streamed weight -> its bytes on the device, and on the host or the drive, uint8.
    ``occupancy``: what lies in the slots, if it is shared with other programs: of the same placement, or of the course.
    ``marks``: the marks of the copies, if they were computed already.
    ``ring``: of the ranks that share the weights on the drive, if they are all of one model.
    """

    arena: Arena
    values: Mapping[str, torch.Tensor]
    slots: Mapping[str, torch.Tensor]
    hosts: Mapping[str, Source]
    occupancy: Occupancy | None = None
    marks: Arrivals | None = None
    ring: SharedRing | None = None


@dataclass
class Cost:
    """What a step has cost so far.  ``moved``: bytes copied.  ``primed``: bytes copied before a cold step."""

    windows: WindowSeconds
    primed: int = 0
    collectives: int = 0
    moved: int = 0


@dataclass
class Step:
    """One run: the values of the program's nodes by number, and its cost, which is complete later than its outputs.

    ``number``: that of the step.
    """

    env: list[Any]
    cost: Cost
    number: int

    @property
    def outputs(self) -> Any:
        """The program's outputs; valid after :meth:`Device.deliver`."""
        return self.env[-1]
