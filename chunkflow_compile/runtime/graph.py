"""Compiled graphs: the callables that ChunkFlow makes from the graphs that Dynamo traces.

Dynamo shares a compiled graph between models of one class, so the same graph may be called with the parameters of several
models.  A compiled graph uses one program per model and input size.  The placement of a model (placed/placement.py) owns the
programs of the model, which end when the placement ends.  The graph keeps only weak references to its programs.
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
from .single_call import SingleCall, bind_program
from .variants import ActiveVariant, Sizes, Variant, VariantCache
from .wrapped_calls import tuple_getter

_log = logging.getLogger(__name__)

# The key under which a compiled graph keeps a program: the ids of the first and the last weight that a call reads, and the
# input sizes of the call.  Both ids are needed, because two blocks may share one of these weights.
_Key = tuple[int, int, Sizes]

# A function that places a model.  Its arguments are the parameters by name, the names of the weights that are to be
# offloaded, and another function, ``start``.  The placing function moves these weights to host memory.  It then calls
# ``start`` with the model's arena; ``start`` returns a program.  If the model has a placement, the placing function adds the
# program to this placement.  The result is the program.
Place = Callable[[Mapping[str, nn.Parameter], Collection[str], Callable[[Arena], SingleCall]], SingleCall]

# A function that takes the parameters of a model, by name.  It returns the goal that ``replan`` or a pipeline has set for
# the model, or None if neither has set a goal.
Changed = Callable[[Mapping[str, nn.Parameter]], Goal | None]


class HostConstants:
    """Device copies of graph inputs that are in CPU memory, such as tables of rotary embeddings.

    Without this class, the forward of the model would copy these tables to the device in every step.  This class copies each
    table once, and keeps the copy as long as the table exists.  ``positions``: positions of the tables among the inputs of
    the graph.
    """

    def __init__(self, device: torch.device, positions: Sequence[int] = ()) -> None:
        self._device = device
        self.positions = tuple(positions)
        # table -> its version when it was copied, and its device copy
        self._moved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def move(self, inputs: list[Any]) -> None:
        """Replace each table in ``inputs`` by its copy on the device.  If a table was written since it was copied, copy it
        again."""
        for position in self.positions:
            inputs[position] = self._copy(inputs[position])

    def _copy(self, table: torch.Tensor) -> torch.Tensor:
        # an inference tensor has no version counter, so a later change of the table would be missed
        if table.is_inference():
            return table.to(self._device)
        moved: tuple[int, torch.Tensor] | None = self._moved.get(table)
        if moved is None or moved[0] != table._version:
            with torch.inference_mode(False):
                moved = self._moved[table] = table._version, table.to(self._device)
        return moved[1]


class CompiledGraph:
    """The callable that ChunkFlow's backend gives to AOTAutograd.  Its argument is a list of the inputs of the traced graph;
    each call empties this list."""

    _boxed_call = True

    def __init__(
        self,
        variants: VariantCache,
        place: Place,
        changed: Changed,
        arena: Arena | None,
        tables: HostConstants,
        packs: bool,
    ) -> None:
        """``place``, ``changed``: see :data:`Place` and :data:`Changed`.  ``tables``: the device copies of the inputs that
        are in host memory.  ``arena``: the arena that the user passed, or None if each model uses its own arena.  ``packs``:
        whether binding a program may compress weights that are not compressed yet."""
        self.variants = variants
        self._packs = packs
        self._tables = tables
        self._place = place
        self._changed = changed
        self._arena = arena
        self._programs: weakref.WeakValueDictionary[_Key, SingleCall] = weakref.WeakValueDictionary()
        # The active variants, by the id of the model's first weight and the input sizes.  A weak reference to the storage of
        # this weight is kept with each variant, because Python may give the same id to another object after the weight is
        # freed.
        self._active: dict[tuple[int, Sizes], tuple[StorageWeakRef, ActiveVariant]] = {}
        self._lock = ProcessLock()
        when_collected(self, _drop_all, self._programs)
        program = variants.first.program
        placeholders = [n.name for n in program.module.graph.nodes if n.op == "placeholder"]
        position = {name: i for i, name in enumerate(placeholders)}
        self._position = {w: position[p] for w, p in program.weight_inputs.items()}
        places = list(self._position.values())
        self._ends = places[0], places[-1]
        self._weights = tuple_getter(places)

    def __call__(self, args: list[Any]) -> Any:
        """Run one step.  If another thread is running a step in the same arena, wait for that step first.

        Under a FakeTensorMode, nothing is computed or moved, and the outputs are fake tensors.
        """
        inputs = list(args)
        args.clear()
        if (mode := core.fake_mode()) is not None:
            return on_fakes(mode, self.variants.graph, inputs)
        if self._tables.positions:
            self._tables.move(inputs)
        with self.ready(inputs) as program:
            return program.run([inputs])[0]

    @property
    def programs(self) -> tuple[Program, ...]:
        """A tuple with one element: the program for the input sizes for which the graph was compiled."""
        return (self.variants.first.program,)

    @contextlib.contextmanager
    def ready(self, inputs: Sequence[Any]) -> Iterator[SingleCall]:
        """A context that yields the program for a call with ``inputs`` and holds the lock of the program's arena."""
        weights = self._weights(inputs)
        refreshed = False
        while True:
            sizes = self.variants.sizes(inputs)
            if sizes is None:
                self._plan(inputs, dict(zip(self._position, weights, strict=True)))
                continue
            key = id(inputs[self._ends[0]]), id(inputs[self._ends[1]]), sizes
            program = self._programs.get(key)
            if program is not None:
                program.call.refresh(again=refreshed)
                with program.arena.lock():
                    if not program.closed and program.call.fits(weights):
                        yield program
                        return
            refreshed = True
            parameters = dict(zip(self._position, weights, strict=True))
            with self._lock():
                # if the condition is False, another thread has replaced the program in the meantime
                if self._programs.get(key) is program and sizes in self.variants:
                    self._renew(key, program, parameters)

    def _plan(self, inputs: Sequence[Any], parameters: Mapping[str, nn.Parameter]) -> None:
        """Make a plan for the input sizes of a call.  The number of plans is limited, so the new plan may replace the plan
        for other input sizes.  This method then ends the programs of the replaced plan."""
        with self._lock(), awaited(parameters.values()):
            if self.variants.sizes(inputs) is None:  # another thread may have made this plan in the meantime
                self.variants.plan(inputs, self._changed(parameters))
                self._active = {key: kept for key, kept in self._active.items() if key[1] in self.variants}
                for key, program in [*self._programs.items()]:
                    if key[2] not in self.variants:
                        program.close()
                        del self._programs[key]

    def _renew(self, key: _Key, stale: SingleCall | None, parameters: Mapping[str, nn.Parameter]) -> None:
        with awaited(parameters.values()):
            active = self._active_variant(parameters, key[2])
        if stale is not None:
            stale.close()
        try:
            with dynamo_timed("chunkflow.bind"), awaited(parameters.values()):
                fresh = self._place(
                    parameters,
                    active.variant.program.offloaded,
                    lambda arena: self._bind(active, parameters, key[2], self._arena or arena),
                )
        except BaseException as error:
            if stale is None or active.variant is stale.variant:
                raise
            active.fall_back(stale.variant)
            if not active.by_itself or not isinstance(error, ChunkflowError):
                raise
            _log.warning("the current plan is kept: %s", error)
            return
        if stale is not None and stale.plan == fresh.plan:
            fresh.adopt(stale)
        self._programs[key] = fresh

    def _active_variant(self, parameters: Mapping[str, nn.Parameter], sizes: Sizes) -> ActiveVariant:
        """Return the active variant of a model for the input ``sizes``.  Create the active variant if there is none.

        Active variants are not kept in a weak dictionary, because the callbacks of a weak dictionary run in the garbage
        collector, where a Ctrl-C would be lost.
        """
        first = next(iter(parameters.values()))
        self._active = {key: kept for key, kept in self._active.items() if not kept[0].expired()}
        key = id(first), sizes
        if key not in self._active:
            variant = self.variants.variant(sizes, self._changed(parameters))
            memory = first.host if isinstance(first, HostWeight) else first
            self._active[key] = StorageWeakRef(memory.untyped_storage()), ActiveVariant(variant)
        return self._active[key][1]

    def _bind(
        self, active: ActiveVariant, parameters: Mapping[str, nn.Parameter], sizes: Sizes, arena: Arena
    ) -> SingleCall:
        """Make a program for a model whose weights are placed, and bind the program to the memory of ``arena``.

        First, the weights are compressed or sharded as the variant expects.  If some of these weights cannot be compressed,
        the regions that read them are lowered again for uncompressed weights.  Compression can fail if the variant was
        lowered for the weights of another block or model, or if the weights were written after the variant was lowered.  In
        two other cases, this method makes a new plan, but lowers no region.  In the first case, the ranks do not agree on
        the weights to shard.  In the second case, the plan was made for another model, and more weights of this model are in
        files than the plan expects.
        """
        sources = self._take_sources(active.variant, parameters)
        if sources != active.variant.sources:
            active.adapt(self.variants.variant(sizes, self._changed(parameters), **sources))
        buffers = ((name, buffer_of(parameter)) for name, parameter in parameters.items())
        active.adapt(active.variant.reading(frozenset(n for n, b in buffers if b is not None and b.source.reads_file)))
        return bind_program(CallSite(active, parameters), arena)

    def _take_sources(self, variant: Variant, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, frozenset[str]]:
        """Compress and shard the weights that ``variant`` expects to be compressed or sharded, as far as this is possible.
        Return the names of the weights that are compressed or sharded afterwards, in the format of :attr:`Variant.sources`.

        A weight that is compressed although ``variant`` does not expect it is decompressed only if the graph cannot read it
        in compressed form, for example because several regions read it.
        """
        for store in _stores(parameters.values()):
            if store.exported:
                store.sync_external_writes()  # called before the program is bound, so that the program copies the new values
        able, wanted = takes_packed(self.variants.first.cut), variant.packed if self._packs else frozenset()
        buffers = {
            name: buffer for name, parameter in parameters.items() if (buffer := buffer_of(parameter)) is not None
        }
        for name, buffer in buffers.items():
            if name in wanted:
                buffer.pack()
            elif buffer.compressed and name not in able:
                buffer.unpack()
        compressed = frozenset(name for name, buffer in buffers.items() if buffer.compressed)
        return {"pack": compressed, "peers": _shard_across_peers(buffers, variant.on_peers)}


def _shard_across_peers(buffers: Mapping[str, HostBuffer], wanted: Collection[str]) -> frozenset[str]:
    """Shard the ``wanted`` weights across the peers of their models, unless they are sharded already.  Return the names of
    all sharded weights.

    The ranks decide only once which weights they shard.  This decision covers all weights that the ranks have placed
    together.  So each rank must call this function for these weights, in the same order as the other ranks, even if
    ``wanted`` is empty on this rank.  A weight is sharded only if it is in ``wanted`` on all ranks.  A weight that is placed
    after this decision is never sharded.
    """
    for peers in dict.fromkeys(buffer.store.peers for buffer in buffers.values()):
        todo = {
            n: b for n, b in buffers.items() if b.store.peers is peers and peers is not None and b.name in peers.pending
        }
        if todo:
            peers.shard([*todo.values()], {buffer for name, buffer in todo.items() if name in wanted})
    return frozenset(name for name, buffer in buffers.items() if buffer.source.sharded)


def _stores(values: Iterable[Any]) -> list[Store]:
    """Return the stores of the placed weights among ``values``, without duplicates."""
    return [*dict.fromkeys(store for value in values if (store := store_of(value)) is not None)]


@contextlib.contextmanager
def awaited(values: Iterable[Any]) -> Iterator[None]:
    """A context for the work that this rank does before the ranks shard the placed weights among ``values``.

    The other ranks wait until this rank has done the work.  If the work raises an error, the other ranks raise the same
    error.
    """
    with contextlib.ExitStack() as calls:
        for store in _stores(values):
            calls.enter_context(store.first_call())
        yield


def on_fakes(mode: Any, graph: GraphModule, inputs: Sequence[Any]) -> Any:
    """Return the outputs of an ATen graph as fake tensors of ``mode``.  The inputs may be fake or ordinary tensors."""

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or type(value) is FakeTensor:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    with mode:
        return graph(*map(fake, inputs))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _drop_all(programs: weakref.WeakValueDictionary[_Key, SingleCall]) -> None:
    """End all programs of a compiled graph that was garbage-collected (for example after torch._dynamo.reset), because these
    programs can never run again."""
    for program in list(programs.values()):
        aside(program.close)
