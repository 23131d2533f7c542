"""Hoisted graphs.  A hoisted graph consists of a preamble and a main graph.  The preamble runs once for many steps.  The
inputs of the main graph include the results of the preamble.

For each set of values of the slow inputs, such as the timestep, the preamble computes one row of results (graph/hoist.py).  A
table keeps the rows (rows.py).  If the table contains the row for the slow inputs of a step, the step runs only the main
graph.  Otherwise, the step first runs the preamble.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.hoist import Halves
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.private_torch import core
from chunkflow_compile.units import size

from .device import check_no_capture
from .graph import CompiledGraph, HostConstants, on_fakes
from .rows import Row, Rows, RowStatistics, Table
from .schedules import Key
from .single_call import SingleCall
from .wrapped_calls import tuple_getter

_log = logging.getLogger(__name__)

_version = attrgetter("_version")


class Preamble:
    """Computes rows and keeps them in tables.  Each model has one table, or one table per block if blocks are compiled
    separately.  A row contains the results of the compiled preamble for one set of values of the slow inputs.

    The graphs of a model for different input sizes share one preamble if it computes the same rows for them.

    ``key``: a value that is equal for two preambles if they compute the same rows.  ``hoisted``: the names of the weights
    that only the preamble reads.  ``most_bytes``: the maximum size of each table in bytes.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        halves: Halves,
        most_rows: int,
        key: object,
        timesteps: Callable[[SingleCall], torch.Tensor | None],
        share: Callable[[Preamble, SingleCall], None],
    ) -> None:
        """``most_rows``: the maximum number of rows in a table.  ``timesteps``: a function that returns the timesteps of a
        model's noise schedule, or None if they are not known.  Its argument is the program that computes the rows of the
        model.  ``share``: a function that is called when a table is created.  Its arguments are this preamble and the program
        that computes the rows of the table."""
        self.key = key
        self._timesteps, self._share = timesteps, share
        self.graph = graph
        self.hoisted, self._hoisted_bytes = halves.hoisted, halves.hoisted_bytes
        self._row_bytes = halves.row_bytes
        self.most_bytes = self._bytes_of_all = most_rows * halves.row_bytes
        place = {position: i for i, position in enumerate(halves.preamble_inputs)}
        self._slow = [place[position] for position in halves.slow]
        self._programs: weakref.WeakSet[SingleCall] = weakref.WeakSet()

    def limit(self, tables: int) -> None:
        """Divide the memory for rows equally among several preambles.  Each table of this preamble is limited to one share.

        ``tables``: the number of preambles that share the memory, including this preamble.  These preambles read the same
        weights, but were compiled for different batch sizes.
        """
        self.most_bytes = max(self._row_bytes, self._bytes_of_all // tables)
        for program in self._programs:
            if program.table is not None:
                program.table.rows.trim()

    def row(self, inputs: Sequence[Any]) -> Row | None:
        """Return the row for a call.  If the table does not contain the row, compute it now.  ``inputs``: the inputs of the
        preamble in this call.

        Returns None if hoisting should end, because rows are never reused.  If the row is missing and blocks are compiled
        separately, this method also computes the rows of the model's other blocks for the same slow inputs.  If each of these
        blocks computed its row only when it is called, the preamble would interrupt the cycle of blocks with a cold start.
        """
        slow = [inputs[position] for position in self._slow]
        with self.graph.ready(inputs) as program:
            if program.arena.device.type == "cuda":
                check_no_capture(program.arena.device)  # to read tensor values on the host would invalidate the capture
            table, counts = self._table_of(program, inputs), program.call.counts
            rows, before = table.rows, table.newest
            if (timesteps := self._timesteps(program)) is not None:
                rows.expect(timesteps)
            table.newest = key = rows.key(slow)
            if (row := rows.find(key, _versions(program))) is not None:
                counts.add_row_hit()
                return row
            if rows.spent:
                return None
            counts.add_row_miss()
            row = self._compute(program, rows, key, inputs)
            others = [] if before is None else _tables_of_other_blocks(program, before)
        for other in others:
            other.compute_ahead(slow)
        return row

    def _compute_ahead(self, weights: Sequence[Any], slow: Sequence[Any]) -> None:
        """Compute the row for a future call with the slow inputs ``slow``, unless the table already contains this row."""
        inputs = self._with_slow(weights, slow)
        with self.graph.ready(inputs) as program:
            rows = self._table_of(program, inputs).rows
            key = rows.key(slow)
            if not rows.spent and rows.lacks(key, _versions(program)):
                self._compute(program, rows, key, inputs)

    def _compute(self, program: SingleCall, rows: Rows, key: Key, inputs: Sequence[Any]) -> Row:
        """Compute the row for ``key``, and in the same pass the rows that are likely to be needed next; return the row for
        ``key``."""
        clock, slow = program.arena.streams.clock, [inputs[position] for position in self._slow]
        missing = rows.missing(key, slow, self._row_bytes)
        begin = clock.now()
        outputs = program.run([self._with_slow(inputs, each.inputs) for each in missing])
        program.arena.streams.compute.synchronize()
        seconds = clock.now() - begin
        program.call.counts.add_row_fill(seconds)
        return rows.add(missing, outputs, seconds)

    def _with_slow(self, inputs: Sequence[Any], slow: Sequence[Any]) -> list[Any]:
        changed = list(inputs)
        for position, value in zip(self._slow, slow, strict=True):
            changed[position] = value
        return changed

    def _table_of(self, program: SingleCall, inputs: Sequence[Any]) -> Table:
        if (table := program.table) is None:
            for name, weight in program.call.in_place.items():
                if weight.is_inference():
                    raise ChunkflowError(
                        f"{name} was made in inference mode, where torch counts no writes, so a row that was computed from "
                        "it could be out of date: load the model outside torch.inference_mode(), or leave hoist out."
                    )
            rows = Rows(partial(_most_bytes, weakref.ref(self)), program.arena.bits)
            weights = self._with_slow(inputs, [None] * len(self._slow))
            table = program.table = Table(rows, weights, self._compute_ahead)
            self._programs.add(program)
            self._share(self, program)
        return table

    def note(self, programs: Collection[SingleCall]) -> str:
        """Return one sentence, without a full stop, about the tables of ``programs``, which belong to one model."""
        tables = [table.rows.statistics for program in programs if (table := program.table) is not None]
        hits, misses, computed = (sum(getattr(t, name) for t in tables) for name in ("hits", "misses", "computed"))
        by = f"{len(self._slow)} small inputs" if len(self._slow) > 1 else "one small input"
        count = len(tables)
        weights = f"{len(self.hoisted) * count} weights{f' of {count} blocks' if count > 1 else ''}"
        rows = f"{max(t.rows for t in tables)} rows{' per block' if count > 1 else ''}"
        return (
            f"{weights} are hoisted, {size(self._hoisted_bytes * count)}, by {by}; {rows} of {size(self._row_bytes)} in "
            f"{'tables' if count > 1 else 'a table'} of at most {size(self.most_bytes * count)}; {hits} of {hits + misses} "
            f"calls found theirs, the others had {computed} computed in {sum(t.fill_s for t in tables):.2f} s"
        )

    @property
    def statistics(self) -> dict[SingleCall, RowStatistics]:
        """A mapping from the program that computes the rows of a table to the statistics of this table."""
        return {program: table.rows.statistics for program in self._programs if (table := program.table) is not None}


def _most_bytes(ref: weakref.ref[Preamble]) -> int:
    """Return the maximum size of each table of a preamble in bytes; 0 once the preamble has been garbage-collected."""
    preamble = ref()
    return 0 if preamble is None else preamble.most_bytes


def _tables_of_other_blocks(program: SingleCall, newest: Key) -> list[Table]:
    """Return the tables of all other blocks of the model whose latest call had the key ``newest``.  In each step, these
    blocks are assumed to get the same slow inputs as the block of ``program``."""
    return [
        table
        for other in program.arena.programs
        if isinstance(other, SingleCall) and other is not program and other.call.model == program.call.model
        if (table := other.table) is not None and table.newest == newest
    ]


def _versions(program: SingleCall) -> tuple[tuple[int, ...], ...]:
    """Return the versions of all weights that a program reads."""
    call = program.call
    return call.versions, tuple(map(_version, call.in_place.values()))


class HoistedGraph:
    """The callable that the backend gives to AOTAutograd.  It has the inputs and the results of the whole graph, which
    was split into the preamble and the main graph."""

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
        """``graph``: the whole graph.  ``main``: the compiled main graph.  ``tables``: the inputs of the whole graph that are
        in host memory, such as tables of rotary embeddings, and their device copies.  ``whole``: a function that compiles the
        graph without hoisting.  It is called if hoisting ends."""
        self._graph = graph
        self._tables = tables
        self._halves: tuple[Preamble, CompiledGraph] | None = (preamble, main)
        self._compile = whole
        self._whole: CompiledGraph | None = None
        self._preamble_inputs = tuple_getter(halves.preamble_inputs)
        self._main_inputs = tuple_getter(halves.main_inputs)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of the main graph and of the preamble, at the sizes for which they were compiled.  If hoisting has
        ended, these are the programs of the whole graph instead."""
        if self._halves is None:
            return () if self._whole is None else self._whole.programs
        preamble, main = self._halves
        return *main.programs, *preamble.graph.programs

    def __call__(self, args: list[Any]) -> Any:
        """Run one step.  See :meth:`CompiledGraph.__call__`."""
        if self._halves is None:
            return self._run_whole(args)
        if (mode := core.fake_mode()) is not None:
            return on_fakes(mode, self._graph, args)
        preamble, main = self._halves
        if self._tables.positions:
            self._tables.move(args)
        row = preamble.row(self._preamble_inputs(args))
        if row is None:
            _log.warning(
                "hoist: none of the rows computed so far was used again, because the timestep or another small input takes "
                "other values in each call. Hoisting ends, and the model is compiled once more, as a whole."
            )
            self._halves = None
            return self._run_whole(args)
        inputs = [*self._main_inputs(args), *row.values]
        args.clear()
        return main(inputs)

    def _run_whole(self, args: list[Any]) -> Any:
        if self._whole is None:
            self._whole = self._compile()
        return self._whole(args)
