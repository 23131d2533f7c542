"""A phase: the calls of one component of a pipeline, and what is known of them."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import nn

from chunkflow_compile.placing import courses, programs
from chunkflow_compile.report.phases import PhaseFigures
from chunkflow_compile.retrying import Cap
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves_of


class Phase:
    """A component of a pipeline.

    ``name``: in the pipeline.  ``root``: the model.  ``beside``: most bytes that the device held during a call beside the
    weights of this and other phases, activations and small weights included; 0 until a call was measured.
    ``goal``: bytes of weights on the device that its plans may take, None until then.  ``cap``: most of them after a call
    ran out of memory.
    """

    def __init__(self, name: str, root: nn.Module, device: torch.device) -> None:
        self.name = name
        self.root = root
        self.arena = Arena(device)
        self.beside = 0
        self.steady = False  # whether ``beside`` was measured in a call that did not change the arena
        self.goal: int | None = None
        self.cap = Cap()
        self.calls = 0
        self.retries = 0
        self.seconds: list[float] = []
        self.methods: dict[str, Any] = {}  # that begin it, with what the instance had; none if calls of the module do

    @property
    def weights(self) -> list[torch.Tensor]:
        """Its weights, each once."""
        return [*{id(leaf): leaf for leaf in leaves_of(self.root)}.values()]

    @property
    def kept(self) -> int:
        """Bytes of its weights that never leave the device."""
        return sum(leaf.nbytes for leaf in self.weights if not isinstance(leaf, HostWeight))

    @property
    def streamed(self) -> int:
        """Bytes of its weights that calls bring to the device."""
        return sum(leaf.nbytes for leaf in self.weights if isinstance(leaf, HostWeight))

    def figures(self) -> PhaseFigures:
        """What is known of it now."""
        plans = [r.course.plan for r in courses(self.root)[:1]] or [p.plan for p in programs(self.root)]
        predicted = [plan.predicted.step_s for plan in plans if plan.predicted is not None]
        return PhaseFigures(
            name=self.name,
            model=type(self.root).__name__,
            weights=sum(leaf.nbytes for leaf in self.weights),
            streamed=self.streamed,
            on_device=self.kept + self.arena.held,
            beside=self.beside or None,
            calls=self.calls,
            predicted_s=sum(predicted) if predicted else None,
            measured_s=median(self.seconds[1:] or self.seconds) if self.seconds else None,
            retries=self.retries,
            notes=tuple(dict.fromkeys(note for session in programs(self.root) for note in session.code.notes)),
        )
