"""Forecasts: how long a call of a transformer takes, and how much memory it needs, between three traced sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from chunkflow_compile.catalog.sizes import Shape
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.problem import Problem


@dataclass(eq=False)
class Forecast:
    """Forecasts of a transformer for one number of slices, interpolated between traces at three numbers of tokens.
    ``plans``: bytes for weights -> the plan for them."""

    settings: Settings
    tokens: tuple[int, ...]
    problems: tuple[Problem, ...]
    plans: dict[int, Plan] = field(default_factory=dict)

    @cached_property
    def least(self) -> int:
        """The minimum bytes on the device that any plan needs for weights."""
        return least_memory(self.problems[0], self.settings.hardware, self.settings.chunk_bytes)

    @cached_property
    def _simulators(self) -> list[Simulator]:
        return [Simulator(p, self.settings.hardware, self.settings.chunk_bytes) for p in self.problems]

    def plan(self, nbytes: int) -> Plan:
        """Return the fastest plan with at most ``nbytes`` bytes of weights on the device."""
        if nbytes not in self.plans:
            chosen = self.settings
            goal = replace(chosen.goal, memory=nbytes, activations=False)
            self.plans[nbytes] = place(self.problems[0], chosen.hardware, goal, chunk_bytes=chosen.chunk_bytes)
        return self.plans[nbytes]

    def seconds(self, plan: Plan, count: int) -> float:
        """Return the seconds of a call with ``count`` tokens, under a plan that was made for another number of tokens."""
        simulator = copy.copy(self._simulators[0])
        for name in ("compute_s", "collective_s", "link_s"):
            columns = zip(*(getattr(s, name) for s in self._simulators), strict=True)
            setattr(simulator, name, [max(0.0, _interpolated(self.tokens, column, count)) for column in columns])
        return simulator.step_under(plan)

    def activations_at(self, count: int) -> int:
        """Return the bytes of activations of a call with ``count`` tokens."""
        return max(0, round(_interpolated(self.tokens, [problem.live_bytes for problem in self.problems], count)))


def tokens_of(shape: Shape) -> int:
    """Return the number of elements in the latent of a sample, which is proportional to the number of tokens."""
    return shape.frames * shape.height * shape.width


def _interpolated(at: Sequence[int], values: Sequence[float], x: int) -> float:
    """Return the value at ``x`` of the parabola that has ``values`` at the three points ``at`` (Lagrange interpolation)."""
    parts = (math.prod((x - other) / (here - other) for other in at if other != here) for here in at)
    return sum(part * value for part, value in zip(parts, values, strict=True))
