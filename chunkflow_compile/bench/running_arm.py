"""An arm while it is measured, and comparisons of its results with the resident arm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from chunkflow_compile.runtime.measurement import StepMeasurement
from chunkflow_compile.runtime.variants import Variant

from .arms import RAW, ArmForm
from .compiled import Compilation
from .host import HostTime
from .job import RESIDENT

# The minimum share of compute that must overlap with copies, over all arms.  With less overlap, the slowdown would be
# noise.
_LEAST_COPYING = 0.05


@dataclass(frozen=True)
class Alternative:
    """A separate model that runs an alternative.  ``held``: the bytes that it occupies on the device."""

    model: nn.Module
    call: Callable[..., Any]
    held: int


@dataclass(eq=False)
class RunningArm:
    """An arm and the results of its turns so far.

    ``settings``: the calls that set up the arm, as text.  ``compiled``: the compilation that runs the arm, or None for an
    alternative.  ``variant``: its variant in this compilation, or None; replanning changes it.  ``form``: the form of the
    variant.  ``outputs``: the outputs by step.
    """

    name: str
    settings: str
    variant: Variant | None = None
    form: ArmForm = RAW
    compiled: Compilation | None = None
    alternative: Alternative | None = None
    steps_s: list[float] = field(default_factory=list)
    host: list[HostTime] = field(default_factory=list)
    peak_bytes: int | None = None
    measurements: list[StepMeasurement] = field(default_factory=list)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def call(self) -> Callable[..., Any]:
        """The function that runs one step."""
        runs = self.compiled or self.alternative
        assert runs is not None
        return runs.call


class Share(NamedTuple):
    """The compute time of an arm's step in seconds, and the share of this time, 0 to 1, that overlaps with copies."""

    compute_s: float
    copying: float


def seen_slowdown(ranks: Sequence[Mapping[str, Share]]) -> float:
    """Return the factor, at least 1, by which copies slow down compute, over all arms and ranks.

    ``ranks``: for each rank, the figures by arm.  Each arm is compared with the resident arm on the same rank.  The
    factor is 1 if so little compute overlaps with copies that it would be noise.
    """
    pairs = [(arm, arms[RESIDENT].compute_s) for arms in ranks for arm in arms.values()]
    more = sum(arm.compute_s - resident_s for arm, resident_s in pairs)
    base = sum(resident_s for _, resident_s in pairs)
    copied_s = sum(arm.copying * resident_s for arm, resident_s in pairs)
    return max(1.0, 1 + more / copied_s) if copied_s > _LEAST_COPYING * base else 1.0


def relative_difference(value: torch.Tensor, right: torch.Tensor) -> float:
    """Return 0 if all bits are equal, and otherwise the maximum difference, divided by the maximum value of ``right``,
    but at least 1e-30."""
    if torch.equal(value, right):
        return 0.0
    off = (value.float() - right.float()).abs().max() / right.float().abs().max()
    return max(float(off.nan_to_num(float("inf"))), 1e-30)
