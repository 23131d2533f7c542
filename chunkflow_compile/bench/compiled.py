"""The compiled model of a measurement.  The arms of a compilation run different plans for the same regions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from chunkflow_compile.passes.cost.timings import Timings
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.placed.offload import programs
from chunkflow_compile.runtime.measurement import StepMeasurement, measured
from chunkflow_compile.runtime.single_call import SingleCall
from chunkflow_compile.runtime.variants import Variant
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.peer_pieces import Pieces
from chunkflow_compile.weights.weight_memory import Form

from .pace import paced

T = TypeVar("T")
# The number of resident steps whose median compute time sets the bandwidth of the emulated link.
COMPUTE_STEPS = 4
# The number of resident steps before the arms are planned.  The first step is not counted, because it writes to new
# memory pages.
CALIBRATION = 3


class Compilation:
    """A compilation of an offloaded model.  A model can have several compilations with different options, which share its
    weights.

    ``call``: the compiled model.  ``arena``: the arena that all compilations of the model share.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Callable[[int], Mapping[str, Any]],
        processes: int,
        options: Mapping[str, Any],
    ) -> None:
        """Compile the model and run one step.  ``inputs``: a function from a step number to the inputs of the step.
        ``processes``: the number of processes that run this measurement."""
        self.call = torch.compile(model, backend="chunkflow", fullgraph=True, options=dict(options))
        self.call(**inputs(0))
        self._model, self._inputs, self._processes = model, inputs, processes
        newest = programs(model)[-1]
        self.arena = newest.arena
        self._active = newest.call.active
        self._pieces: dict[str, Pieces] = {}  # the shards of all weights that were ever sharded, by name

    @property
    def program(self) -> SingleCall:
        """The program of the latest call."""
        return next(p for p in programs(self._model) if p.call.active is self._active)

    @property
    def variant(self) -> Variant:
        """The variant that the next call runs."""
        return self._active.variant

    def use(self, variant: Variant) -> None:
        """Make the next call run ``variant``, and convert the weights to the form that it expects: packed or not, sharded
        or not.

        Also close the programs of other compilations, so that they occupy no memory while this one is measured.
        """
        for program in programs(self._model):
            if program.call.active is not self._active:
                program.close()
        for name, parameter in self._model.named_parameters():
            if (buffer := buffer_of(parameter)) is None:
                continue
            if buffer.compressed and name not in variant.packed:
                buffer.unpack()
                buffer.form = Form.COMPRESSIBLE  # another arm has packed it
            if buffer.pieces is not None:
                self._pieces[name] = buffer.pieces
            buffer.pieces = self._pieces.get(name) if name in variant.on_peers else None
            if (peers := buffer.store.peers) is not None and name in variant.on_peers and buffer.pieces is None:
                peers.pending.add(buffer.name)
        self._active.variant = variant

    def compute_s(self) -> list[float]:
        """Run resident steps; return the seconds of each region, averaged over the ranks."""
        self._repeat(COMPUTE_STEPS)
        steps = self.program.measurements[-COMPUTE_STEPS:]
        mine = [median(column) for column in zip(*(m.windows.compute_s for m in steps), strict=True)]
        return [fmean(column) for column in zip(*gather(mine, self._processes), strict=True)]

    def calibrate(self) -> Timings:
        """Run the current resident step several times and return its measured times."""
        self._repeat(CALIBRATION)
        program = self.program
        return step_timings(program.plan, program.measurements[-CALIBRATION + 1 :], self._processes)

    def calibrate_with(self, variant: Variant, pace: float | None) -> tuple[Variant, Timings]:
        """Run another resident step; return the variant that ran and its measured times.  ``pace``: the duration to which
        regions are held, as a multiple of their measured times, or None."""
        self.use(variant)
        if pace is not None:
            self.use(paced(variant, self.compute_s(), pace))
        timings = self.calibrate()
        return self.variant, timings

    def _repeat(self, steps: int) -> None:
        """Run the same step several times.  If products are hoisted, only the first run computes the row."""
        for _ in range(steps):
            self.call(**self._inputs(0))


def step_timings(resident: Plan, steps: Sequence[StepMeasurement], processes: int) -> Timings:
    """Return the seconds of regions and collectives in resident steps, averaged over the ranks."""
    mine = measured(resident, steps).timings()
    everyone = gather(mine, processes)
    return replace(
        mine,
        compute_s=tuple(fmean(column) for column in zip(*(t.compute_s for t in everyone), strict=True)),
        collective_s=tuple(fmean(column) for column in zip(*(t.collective_s for t in everyone), strict=True)),
    )


def gather(mine: T, processes: int) -> list[T]:
    """Gather the value ``mine`` from all ranks, in the order of ranks."""
    everyone = [mine] * processes
    if processes > 1:
        dist.all_gather_object(everyone, mine)
    return everyone
