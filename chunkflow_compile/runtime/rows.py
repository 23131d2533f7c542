"""Tables of rows.  A row contains the results of a preamble for one set of values of the slow inputs.  The bits of these
values are the key of the row."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hoisting import MOST_ROWS
from chunkflow_compile.units import size

from .input_bits import BitSources, InputBits, values_like
from .schedules import ExpectedSchedule, Key, UsedKeys, guesses

# After this many consecutive misses, the slow inputs are assumed to have new values in every call, as random noise levels
# do.
_SPENT = 64


@dataclass(frozen=True)
class Row:
    """The results of the preamble for one set of values of the slow inputs.  These results are inputs of the main graph.
    ``nbytes``: bytes of memory that the row holds."""

    values: tuple[torch.Tensor, ...]
    nbytes: int

    @classmethod
    def of(cls, values: Sequence[torch.Tensor]) -> Row:
        """Make a row of ``values``.  Memory that several of them share is counted once."""
        memory = {s.data_ptr(): s.nbytes() for s in (value.untyped_storage() for value in values)}
        return cls(tuple(values), sum(memory.values()))


@dataclass(frozen=True)
class Missing:
    """A row that a table does not contain.  ``inputs``: the slow inputs from which the row can be computed."""

    key: Key
    inputs: list[Any]


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of a table.

    ``hits``: the number of calls whose row was in the table.  ``misses``: the number of calls whose row was missing.
    ``computed``: the number of rows added so far, including guessed rows.  ``rows``, ``nbytes``: the number and the total
    bytes of the rows that the table contains now.  ``transfers``: the number of times that the host has read device memory.
    ``fill_s``: the total seconds spent on computing rows.
    """

    hits: int
    misses: int
    computed: int
    rows: int
    nbytes: int
    transfers: int
    fill_s: float


class Rows:
    """A cache of rows with a size limit in bytes.  Not thread-safe: the caller holds the arena's lock during a call.

    For each call of the model, the caller runs::

        key = rows.key(slow_inputs)
        row = rows.find(key, versions)
        if row is None:
            missing = rows.missing(key, slow_inputs, row_bytes)
            row = rows.add(missing, [preamble(m.inputs) for m in missing], seconds)

    A lookup finds a row only if all bits of all slow inputs and the versions of all hoisted weights are the same as when the
    row was computed.  After a miss, :meth:`missing` also returns rows that the next calls are likely to need.  A wrong guess
    only costs time.  An evicted row stays in memory as long as the caller holds a reference to the row, so a running step can
    still read it.

    ``most_bytes``: a function that returns the size limit in bytes.  A function is used because re-planning may change the
    limit.
    """

    def __init__(self, most_bytes: Callable[[], int], bits: InputBits | None = None) -> None:
        self._most_bytes = most_bytes
        self._bits = bits or InputBits()
        self._expected = ExpectedSchedule()
        self._used = UsedKeys()
        self._rows: OrderedDict[Key, Row] = OrderedDict()  # least recently used rows first
        self._nbytes = 0
        self._versions: tuple[Any, ...] = ()
        self._hits = self._misses = self._computed = 0
        self._misses_since_hit = self._guesses_since_hit = 0
        self._fill_s = 0.0

    def expect(self, timesteps: torch.Tensor) -> None:
        """From now on, guess rows for the ``timesteps`` of a scheduler.  Only a weak reference to this tensor is kept.  Its
        values are read together with the inputs of the next call."""
        self._expected.expect(timesteps)

    def key(self, inputs: Sequence[Any]) -> Key:
        """Return the key of a call: the bits of its slow inputs, which are tensors, numbers or None.  Makes at most one
        transfer."""
        forms = self._expected.unread(inputs)
        found = self._bits.find([*inputs, *forms])
        self._expected.learn(found[len(inputs) :])
        return tuple(found[: len(inputs)])

    def find(self, key: Key, versions: tuple[Any, ...]) -> Row | None:
        """Return the row for ``key``, or None.  ``versions``: the versions of the hoisted weights; if they have changed, all
        rows are dropped."""
        self._expire(versions)
        self.trim()
        row = self._rows.get(key)
        if row is None:
            self._misses += 1
            self._misses_since_hit += 1
            return None
        self._hits += 1
        self._misses_since_hit = self._guesses_since_hit = 0
        self._rows.move_to_end(key)
        self._used.use(key)
        return row

    def lacks(self, key: Key, versions: tuple[Any, ...]) -> bool:
        """Return whether there is no row for ``key``.  The lookup does not count as a hit or a miss.  ``versions``: see
        :meth:`find`."""
        self._expire(versions)
        return key not in self._rows

    def missing(self, key: Key, inputs: Sequence[Any], row_bytes: int) -> list[Missing]:
        """Return the rows to compute after a miss.  The first is the row of the call.  It is followed by guessed rows, as
        many as fit in the table.

        ``row_bytes``: the size of each row in bytes.  The maximum number of guessed rows is halved each time that rows are
        guessed, until the next hit resets it.  This method also evicts the least recently used rows, to free memory for the
        new rows.
        """
        most = self._most_bytes()
        self._check(row_bytes, most)
        room = min(MOST_ROWS, most // row_bytes)
        following = guesses(
            key, inputs, self._bits.elements_of_base, self._expected, self._used, self._rows.__contains__
        )
        wanted = dict.fromkeys(guess for guess in following if guess != key and guess not in self._rows)
        chosen = list(islice(wanted, (room - 1) >> self._guesses_since_hit))
        self._guesses_since_hit += bool(chosen)
        asked = [Missing(key, list(inputs)), *_with_inputs(chosen, key, inputs)]
        self._evict(most - len(asked) * row_bytes, MOST_ROWS - len(asked))
        return asked

    def add(self, missing: Sequence[Missing], outputs: Sequence[Sequence[torch.Tensor]], seconds: float = 0.0) -> Row:
        """Add the outputs of the preamble for the missing rows; return the row of the call.

        ``seconds``: the time that the preamble needed for these rows.
        """
        rows = [Row.of(values) for values in outputs]
        most = self._most_bytes()
        self._check(rows[0].nbytes, most)
        added = list(zip(missing, rows, strict=True))
        for wanted, row in reversed(added):  # in reverse: the row that is expected to be needed last is evicted first
            if (old := self._rows.pop(wanted.key, None)) is not None:
                self._nbytes -= old.nbytes
            self._rows[wanted.key] = row
            self._nbytes += row.nbytes
        self._evict(most)
        self._used.use(missing[0].key)
        self._computed += len(rows)
        self._fill_s += seconds
        return rows[0]

    def trim(self) -> None:
        """Evict the least recently used rows until the table is within its limit."""
        self._evict(self._most_bytes())

    def drop(self) -> None:
        """Drop all rows.  The keys of previous calls are kept as guesses, so that one pass can recompute all rows of a
        generation."""
        self._rows.clear()
        self._nbytes = 0

    @property
    def spent(self) -> bool:
        """Whether hoisting should end.  This is the case after ``_SPENT`` consecutive misses: the slow inputs are then
        assumed to be different in every call."""
        return self._misses_since_hit >= _SPENT

    @property
    def sources(self) -> BitSources:
        """See :class:`BitSources`."""
        return self._bits.sources

    @property
    def statistics(self) -> RowStatistics:
        return RowStatistics(
            hits=self._hits,
            misses=self._misses,
            computed=self._computed,
            rows=len(self._rows),
            nbytes=self._nbytes,
            transfers=self.sources.transfers,
            fill_s=self._fill_s,
        )

    def _expire(self, versions: tuple[Any, ...]) -> None:
        """Drop all rows if the versions of the weights have changed."""
        if versions != self._versions:
            self.drop()
            self._versions = versions

    def _evict(self, most_bytes: int, most_rows: int = MOST_ROWS) -> None:
        while self._rows and (self._nbytes > most_bytes or len(self._rows) > most_rows):
            self._nbytes -= self._rows.popitem(last=False)[1].nbytes

    def _check(self, nbytes: int, most: int) -> None:
        if nbytes > most:
            raise ChunkflowError(
                f"One row of hoisted values takes {size(nbytes)}, but the table may use {size(most)}. Raise the budget, "
                "use a smaller batch, or pass hoist=False."
            )


class Table:
    """The rows of one model, or of one block if blocks are compiled separately, and the function that computes these rows.

    ``newest``: the key of the latest call, that is, the bits of its slow inputs.
    """

    def __init__(
        self, rows: Rows, weights: Sequence[Any], compute: Callable[[Sequence[Any], Sequence[Any]], None]
    ) -> None:
        """``weights``: the inputs of the preamble, with None for each slow input.  ``compute``: a bound method that takes
        ``weights`` and a list of slow inputs, and computes the row for these inputs if the row is missing.  The table keeps
        only weak references to the weights and to the object to which the method is bound."""
        self.rows = rows
        self.newest: Key | None = None
        self._compute = weakref.WeakMethod(compute)
        self._weights = [None if value is None else TensorWeakRef(value) for value in weights]

    def compute_ahead(self, slow: Sequence[Any]) -> None:
        """Compute the row for a future call with the slow inputs ``slow``.  Do nothing if the model no longer exists."""
        weights = [None if ref is None else ref() for ref in self._weights]
        gone = any(value is None and ref is not None for value, ref in zip(weights, self._weights, strict=True))
        if not gone and (compute := self._compute()) is not None:
            compute(weights, slow)


def _with_inputs(keys: Sequence[Key], key: Key, inputs: Sequence[Any]) -> list[Missing]:
    """Return one :class:`Missing` for each of the guessed ``keys``, with slow inputs that have exactly the bits in the key.

    ``key``, ``inputs``: the key and the slow inputs of the present call.  If a guessed key has the same bits as ``key`` for
    an input, the present input is reused.  A guessed key is left out if :func:`values_like` cannot make one of its inputs.
    """
    made: dict[Key, list[Any] | None] = {guess: list(inputs) for guess in keys}
    for position, value in enumerate(inputs):
        changed = [guess for guess in keys if guess[position] != key[position]]
        found = values_like(value, [guess[position] for guess in changed]) if changed else []
        for guess, other in zip(changed, found, strict=True):
            row = made[guess]
            if row is not None and other is not None:
                row[position] = other
            else:
                made[guess] = None
    return [Missing(guess, row) for guess, row in made.items() if row is not None]
