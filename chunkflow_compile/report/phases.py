"""The table of a pipeline's components."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tabulate import tabulate

from .record import seconds, size


class Figures(Protocol):
    """See ``PhaseFigures`` in phases.py."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def weights(self) -> int: ...
    @property
    def streamed(self) -> int: ...
    @property
    def on_device(self) -> int: ...
    @property
    def beside(self) -> int | None: ...
    @property
    def calls(self) -> int: ...
    @property
    def predicted_s(self) -> float | None: ...
    @property
    def measured_s(self) -> float | None: ...
    @property
    def retries(self) -> int: ...


def phases_table(phases: Sequence[Figures], total: int) -> str:
    """A line for each component, and their sum."""
    head = ("component", "model", "weights", "streamed", "on device", "beside weights", "calls", "predicted", "measured")
    rows = [
        (
            p.name,
            p.model,
            size(p.weights),
            size(p.streamed),
            size(p.on_device),
            "-" if p.beside is None else size(p.beside),
            p.calls,
            "after the first call" if p.predicted_s is None and not p.calls else seconds(p.predicted_s),
            seconds(p.measured_s),
        )
        for p in phases
    ]
    rows.append(("all", "", *(size(sum(getattr(p, f) for p in phases)) for f in ("weights", "streamed", "on_device")), *("",) * 4))
    table = tabulate(rows, headers=head, disable_numparse=True)
    return f"{table}\nbudget: {size(total)} on the device, weights and activations together"
