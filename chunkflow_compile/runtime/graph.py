"""Compiled graphs: what Dynamo calls.

Dynamo shares a compiled graph between models of one class, so it may be called with the parameters of several models.  It
keeps a weak reference to a program for each, which belongs to its model's placement and ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.pack import takes_packed
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.private_torch import core
from chunkflow_compile.private_torch.dynamo import dynamo_timed
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of, store_of
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.locks import ProcessLock, aside, when_collected
from chunkflow_compile.weights.store import Store

from .arena import Arena
from .call_site import CallSite
from .codes import Code, Codes, CurrentCode, Sizes
from .single_call import SingleCall, bind_program
from .wrapped_calls import tuple_getter

_log = logging.getLogger(__name__)

# The ids of the first and the last weight, because blocks may share one of them, and the sizes of the call.
_Key = tuple[int, int, Sizes]

# Called with the parameters by name, the names of the weights to offload, and ``start``.  Move those weights into the
# host store, calls ``start`` with the model's arena, and attaches the program that it returns to the model's placement.
Place = Callable[[Mapping[str, nn.Parameter], Collection[str], Callable[[Arena], SingleCall]], SingleCall]

# Called with the parameters by name.  Returns the goal that replan or a pipeline has set for their model, if either has.
Changed = Callable[[Mapping[str, nn.Parameter]], Goal | None]


class HostConstants:
    """Copies on ``device`` of inputs on the CPU that forward moves there, such as rotary embeddings: moved once, not in every
    step, and kept as long as the table lives.  ``positions``: of the tables among the inputs."""

    def __init__(self, device: torch.device, positions: Sequence[int] = ()) -> None:
        self._device = device
        self.positions = tuple(positions)
        self._moved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # table -> its version, and the copy

    def move(self, inputs: list[Any]) -> None:
        """Replace each table among ``inputs`` by its copy, which is made anew if the table has changed."""
        for position in self.positions:
            inputs[position] = self._copy(inputs[position])

    def _copy(self, table: torch.Tensor) -> torch.Tensor:
        if table.is_inference():  # counts no versions: it could have changed
            return table.to(self._device)
        moved: tuple[int, torch.Tensor] | None = self._moved.get(table)
        if moved is None or moved[0] != table._version:
            with torch.inference_mode(False):
                moved = self._moved[table] = table._version, table.to(self._device)
        return moved[1]


class CompiledGraph:
    """The callable for AOTAutograd: it gets the inputs of the traced graph as one list, which it may empty."""

    _boxed_call = True

    def __init__(
        self, codes: Codes, place: Place, changed: Changed, arena: Arena | None, tables: HostConstants, packs: bool
    ) -> None:
        """``arena``: the one that the user passed; None for each model's own.  ``packs``: whether raw weights are packed
        here; else they stay as they were placed."""
        self.codes = codes
        self._packs = packs
        self._tables = tables
        self._place = place
        self._changed = changed
        self._arena = arena
        self._programs: weakref.WeakValueDictionary[_Key, SingleCall] = weakref.WeakValueDictionary()
        # by the id of the model's first weight, with its memory: once that is gone, the id may be another's
        self._current: dict[tuple[int, Sizes], tuple[StorageWeakRef, CurrentCode]] = {}
        self._lock = ProcessLock()
        when_collected(self, _drop_all, self._programs)
        program = codes.first.program
        placeholders = [n.name for n in program.module.graph.nodes if n.op == "placeholder"]
        position = {name: i for i, name in enumerate(placeholders)}
        self._position = {w: position[p] for w, p in program.weight_inputs.items()}
        places = list(self._position.values())
        self._ends = places[0], places[-1]
        self._weights = tuple_getter(places)

    def __call__(self, args: list[Any]) -> Any:
        """Run one step.  A second thread waits until the first has finished its step.

        Under a FakeTensorMode nothing runs or moves: the outputs are fake tensors.
        """
        inputs = list(args)
        args.clear()
        if (mode := core.fake_mode()) is not None:
            return on_fakes(mode, self.codes.graph, inputs)
        if self._tables.positions:
            self._tables.move(inputs)
        with self.ready(inputs) as program:
            return program.run([inputs])[0]

    @property
    def programs(self) -> tuple[Program, ...]:
        """What was compiled, at the sizes for which it was."""
        return (self.codes.first.program,)

    @contextlib.contextmanager
    def ready(self, inputs: Sequence[Any]) -> Iterator[SingleCall]:
        """The program that fits a call with these inputs, while the lock of its arena is held."""
        weights = self._weights(inputs)
        noticed = False
        while True:
            sizes = self.codes.sizes(inputs)
            if sizes is None:
                self._plan(inputs, dict(zip(self._position, weights, strict=True)))
                continue
            key = id(inputs[self._ends[0]]), id(inputs[self._ends[1]]), sizes
            program = self._programs.get(key)
            if program is not None:
                program.call.notice(again=noticed)
                with program.arena.lock():
                    if not program.closed and program.call.fits(weights):
                        yield program
                        return
            noticed = True
            parameters = dict(zip(self._position, weights, strict=True))
            with self._lock():
                # no other thread has replaced it meanwhile
                if self._programs.get(key) is program and sizes in self.codes:
                    self._renew(key, program, parameters)

    def _plan(self, inputs: Sequence[Any], parameters: Mapping[str, nn.Parameter]) -> None:
        """Plan for the sizes of a call; end the programs of sizes that were forgotten for it."""
        with self._lock(), awaited(parameters.values()):
            if self.codes.sizes(inputs) is None:  # no other thread has planned for them meanwhile
                self.codes.plan(inputs, self._changed(parameters))
                self._current = {key: kept for key, kept in self._current.items() if key[1] in self.codes}
                for key, program in [*self._programs.items()]:
                    if key[2] not in self.codes:
                        program.close()
                        del self._programs[key]

    def _renew(self, key: _Key, stale: SingleCall | None, parameters: Mapping[str, nn.Parameter]) -> None:
        with awaited(parameters.values()):
            current = self._current_code(parameters, key[2])
        if stale is not None:
            stale.close()
        try:
            with dynamo_timed("chunkflow.bind"), awaited(parameters.values()):
                fresh = self._place(
                    parameters,
                    current.code.program.offloaded,
                    lambda arena: self._bind(current, parameters, key[2], self._arena or arena),
                )
        except BaseException as error:
            if stale is None or current.code is stale.code:
                raise
            current.fall_back(stale.code)
            if not current.by_itself or not isinstance(error, ChunkflowError):
                raise
            _log.warning("the current plan is kept: %s", error)
            return
        if stale is not None and stale.plan == fresh.plan:
            fresh.adopt(stale)
        self._programs[key] = fresh

    def _current_code(self, parameters: Mapping[str, nn.Parameter], sizes: Sizes) -> CurrentCode:
        """The current code of a model at sizes, created if there is none.

        Not in a weak dictionary: its callbacks run in the garbage collector, where Python drops a Ctrl-C.
        """
        first = next(iter(parameters.values()))
        self._current = {key: kept for key, kept in self._current.items() if not kept[0].expired()}
        key = id(first), sizes
        if key not in self._current:
            code = self.codes.code(sizes, self._changed(parameters))
            memory = first.host if isinstance(first, HostWeight) else first
            self._current[key] = StorageWeakRef(memory.untyped_storage()), CurrentCode(code)
        return self._current[key][1]

    def _bind(
        self, current: CurrentCode, parameters: Mapping[str, nn.Parameter], sizes: Sizes, arena: Arena
    ) -> SingleCall:
        """A program of the model, whose weights are placed.

        The weights take the sources that its code wants, once, before they are bound.  What can be compressed was asked
        before code was lowered for it.  So other code is needed only if the weights are not those of that time: those of
        another block or model that shares the graph, or written since, with values that do not fit.  If the ranks do not
        agree on what is sharded, or more weights are in files than the plan expects, which is made for another model, there
        is another plan, and nothing is lowered.
        """
        sources = self._take_sources(current.code, parameters)
        if sources != current.code.sources:
            current.adapt(self.codes.code(sizes, self._changed(parameters), **sources))
        buffers = ((name, buffer_of(parameter)) for name, parameter in parameters.items())
        current.adapt(current.code.reading(frozenset(n for n, b in buffers if b is not None and b.source.reads_file)))
        return bind_program(CallSite(current, parameters), arena)

    def _take_sources(self, code: Code, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, frozenset[str]]:
        """Let weights take the sources that their code wants, as far as they can.  Returns those that they have then, as
        :attr:`Code.sources`.

        One that several regions read, or that the graph returns, becomes raw.  Any other that is compressed stays so.
        """
        for store in _stores(parameters.values()):
            if store.exported:
                store.sync_external_writes()  # programs copy what was written before they start
        able, wanted = takes_packed(self.codes.first.cut), code.packed if self._packs else frozenset()
        buffers = {
            name: buffer for name, parameter in parameters.items() if (buffer := buffer_of(parameter)) is not None
        }
        for name, buffer in buffers.items():
            if name in wanted:
                buffer.pack()
            elif buffer.compressed and name not in able:
                buffer.unpack()
        compressed = frozenset(name for name, buffer in buffers.items() if buffer.compressed)
        return {"pack": compressed, "peers": _shard_across_peers(buffers, code.on_peers)}


def _shard_across_peers(buffers: Mapping[str, HostBuffer], wanted: Collection[str]) -> frozenset[str]:
    """Shard the weights ``wanted`` across the peers of their models, if that is still to do; return the names of all sharded.

    All ranks come here in the same order, with the weights that they placed together, also if one wants none of them.  After
    that no rank comes back to wait: not for those that it did not want, nor for a weight that came later.
    """
    for peers in dict.fromkeys(buffer.store.peers for buffer in buffers.values()):
        todo = {
            n: b for n, b in buffers.items() if b.store.peers is peers and peers is not None and b.name in peers.pending
        }
        if todo:
            peers.shard([*todo.values()], {buffer for name, buffer in todo.items() if name in wanted})
    return frozenset(name for name, buffer in buffers.items() if buffer.source.sharded)


def _stores(values: Iterable[Any]) -> list[Store]:
    """The stores of the placed weights among ``values``, each once."""
    return [*dict.fromkeys(store for value in values if (store := store_of(value)) is not None)]


@contextlib.contextmanager
def awaited(values: Iterable[Any]) -> Iterator[None]:
    """Around what comes before the weights among ``values`` are sharded: the other ranks wait for it, and raise what it
    raises."""
    with contextlib.ExitStack() as calls:
        for store in _stores(values):
            calls.enter_context(store.first_call())
        yield


def on_fakes(mode: Any, graph: GraphModule, inputs: Sequence[Any]) -> Any:
    """The outputs of an ATen graph, as fake tensors of ``mode``, whatever tensors the inputs are."""

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or type(value) is FakeTensor:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    with mode:
        return graph(*map(fake, inputs))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _drop_all(programs: weakref.WeakValueDictionary[_Key, SingleCall]) -> None:
    """End programs whose compiled code is gone (torch._dynamo.reset): nothing can run them again."""
    for program in list(programs.values()):
        aside(program.close)
