"""Hoisted graphs: a preamble that runs once for many steps, and main, which takes what has crossed as inputs.

The preamble computes a row for each set of slow inputs (graph/hoist.py).  The rows are kept in a table (rows.py), so a step
runs main alone if the table has the row of its slow inputs, and the preamble first if it has not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.hoist import Halves
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.units import size

from .device import refuse_capture
from .graph import CompiledGraph, HostConstants, on_fakes
from .rows import Row, Rows, RowStatistics
from .single_call import SingleCall
from .wrapped_calls import tuple_getter

_log = logging.getLogger(__name__)

_version = attrgetter("_version")


class Preamble:
    """Computes rows, and keeps them in a table for each model.  Graphs of one model for several sizes share it.

    ``key``: equal for preambles that compute the same.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        halves: Halves,
        most_rows: int,
        key: object,
        timesteps: Callable[[], torch.Tensor | None] = lambda: None,
    ) -> None:
        """``timesteps``: returns those of the schedule that the calls follow, None if it is not known."""
        self.key = key
        self._timesteps = timesteps
        self.graph = graph
        self._hoisted, self._hoisted_bytes = halves.hoisted, halves.hoisted_bytes
        self._row_bytes = halves.row_bytes
        self._most_bytes = most_rows * halves.row_bytes
        place = {position: i for i, position in enumerate(halves.preamble_inputs)}
        self._slow = [place[position] for position in halves.slow]
        self._tables: weakref.WeakKeyDictionary[SingleCall, Rows] = weakref.WeakKeyDictionary()

    def row(self, inputs: Sequence[Any]) -> Row | None:
        """The row of a call, computed now if the table has none; None if hoisting does not pay, because no row is ever used
        again.  ``inputs``: of the preamble."""
        slow = [inputs[position] for position in self._slow]
        with self.graph.ready(inputs) as program:
            if program.arena.device.type == "cuda":
                refuse_capture(program.arena.device)  # a read of values would end it
            rows, counts = self._rows_of(program), program.call.counts
            if (timesteps := self._timesteps()) is not None:
                rows.expect(timesteps)
            key = rows.key(slow)
            if (row := rows.find(key, _versions(program))) is not None:
                counts.add_row_hit()
                return row
            if rows.spent:
                return None
            clock, missing = program.arena.streams.clock, rows.missing(key, slow, self._row_bytes)
            begin = clock.now()
            outputs = program.run([self._with_slow(inputs, each.inputs) for each in missing])
            program.arena.streams.compute.synchronize()
            seconds = clock.now() - begin
            counts.add_row_miss(seconds)
            return rows.add(missing, outputs, seconds)

    def _with_slow(self, inputs: Sequence[Any], slow: Sequence[Any]) -> list[Any]:
        changed = list(inputs)
        for position, value in zip(self._slow, slow, strict=True):
            changed[position] = value
        return changed

    def _rows_of(self, program: SingleCall) -> Rows:
        if (rows := self._tables.get(program)) is None:
            for name, weight in program.call.in_place.items():
                if weight.is_inference():
                    raise ChunkflowError(
                        f"{name} was made in inference mode, where torch counts no writes, so a row that was computed from "
                        "it could be out of date: load the model outside torch.inference_mode(), or leave hoist out."
                    )
            rows = self._tables[program] = Rows(lambda: self._most_bytes)
        return rows

    def note(self, program: SingleCall) -> str:
        """What there is to say of the table of a model, as a sentence without a full stop."""
        rows, hoisted = self._tables[program].statistics, self._hoisted
        calls = rows.hits + rows.misses
        by = f"{len(self._slow)} small inputs" if len(self._slow) > 1 else "one small input"
        return (
            f"{len(hoisted)} weights are hoisted, {size(self._hoisted_bytes)}, by {by}; {rows.rows} rows of "
            f"{size(self._row_bytes)} in a table of at most {size(self._most_bytes)}; {rows.hits} of {calls} "
            f"calls found theirs, the others had {rows.computed} computed in {rows.fill_s:.2f} s"
        )

    @property
    def statistics(self) -> dict[SingleCall, RowStatistics]:
        """What the table of each model has seen, by the program that computes its rows."""
        return {program: rows.statistics for program, rows in self._tables.items() if not program.closed}


def _versions(program: SingleCall) -> tuple[tuple[int, ...], ...]:
    """Versions of the values of all weights of a program: of the offloaded ones, the same object until one is written, and
    of the others."""
    call = program.call
    return call.versions, tuple(map(_version, call.in_place.values()))


class HoistedGraph:
    """The callable for AOTAutograd: the inputs and the results are those of the whole graph."""

    _boxed_call = True

    def __init__(
        self,
        graph: GraphModule,
        halves: Halves,
        preamble: Preamble,
        main: CompiledGraph,
        tables: HostConstants,
        whole: Callable[[], CompiledGraph],
    ) -> None:
        """``graph``: the whole one.  ``tables``: among its inputs.  ``whole``: compiles it, if hoisting does not pay."""
        self._graph = graph
        self._tables = tables
        self._halves: tuple[Preamble, CompiledGraph] | None = (preamble, main)
        self._compile = whole
        self._whole: CompiledGraph | None = None
        self._of_preamble = tuple_getter(halves.preamble_inputs)
        self._of_main = tuple_getter(halves.main_inputs)

    @property
    def preamble(self) -> Preamble:
        """That of the graph, until hoisting ends."""
        assert self._halves is not None
        return self._halves[0]

    @property
    def programs(self) -> tuple[Program, ...]:
        """What was compiled, at the sizes for which it was."""
        if self._halves is None:
            return () if self._whole is None else self._whole.programs
        preamble, main = self._halves
        return *main.programs, *preamble.graph.programs

    def __call__(self, args: list[Any]) -> Any:
        """Run one step, see :meth:`CompiledGraph.__call__`."""
        if self._halves is None:
            return self._run_whole(args)
        if (mode := torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)) is not None:
            return on_fakes(mode, self._graph, args)
        preamble, main = self._halves
        if self._tables.positions:
            self._tables.move(args)
        row = preamble.row(self._of_preamble(args))
        if row is None:
            _log.warning(
                "hoist: none of the rows computed so far was used again, because the timestep or another small input takes "
                "other values in each call. Hoisting ends, and the model is compiled once more, as a whole."
            )
            self._halves = None
            return self._run_whole(args)
        inputs = [*self._of_main(args), *row.values]
        args.clear()
        return main(inputs)

    def _run_whole(self, args: list[Any]) -> Any:
        if self._whole is None:
            self._whole = self._compile()
        return self._whole(args)
