"""The placement of a model: its weights in host memory, the hooks on its modules, and its programs."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from chunkflow_compile.hardware.read_time import ReadTime
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.names import Hoist, OnPeers, Pack
from chunkflow_compile.passes.packing import can_pack
from chunkflow_compile.placed.compile_progress import CompileProgress
from chunkflow_compile.placed.index import filled_by, shards_of
from chunkflow_compile.placed.model_arguments import unwrap
from chunkflow_compile.private_torch.dynamo import compile_lock, dynamo_timed
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.device import DeviceKind
from chunkflow_compile.weights.checkpoint import Mappings
from chunkflow_compile.weights.guards import Guards
from chunkflow_compile.weights.host_buffer import buffer_of, store_of
from chunkflow_compile.weights.host_memory import give_free_memory_back
from chunkflow_compile.weights.host_store import HostStore
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import align, leaves_of, tensors_of
from chunkflow_compile.weights.loader import DtypeOf, WeightLoader, keep_dtype
from chunkflow_compile.weights.locks import ProcessLock
from chunkflow_compile.weights.node import Node
from chunkflow_compile.weights.peers import Peers
from chunkflow_compile.weights.progress import moving
from chunkflow_compile.weights.restoring import no_room_for

if TYPE_CHECKING:
    from chunkflow_compile.runtime.hoisted import Preamble
    from chunkflow_compile.runtime.single_call import SingleCall

_log = logging.getLogger(__name__)

# The name of the attribute in which a placed model stores its Placement.
PLACEMENT = "_chunkflow_placement"


class Placement:
    """A placed model: its weights in host memory, its programs, and its guards.  Guards are hooks that adapt ``state_dict``,
    ``.to()`` and similar methods to weights in host memory.

    ``min_bytes``: the size in bytes below which weights stay on the device.
    ``progress``: the progress display for the compilation of the model's parts; None before the first compilation.
    ``fixed``: the parts of the model that are compiled again for each input size.  Each entry contains the names of the
    weights of one part.  A part needs fixed sizes if Inductor fails on its dynamic shapes, or if its blocks have to be split
    into slices.
    ``owner``: a function that returns the name of the owner of this placement, such as a component of a compiled pipeline, or
    None if there is no owner.  Only the owner may undo the placement.
    ``goal``: the goal that the owner or ``replan`` has set, or None.  The goal also applies to input sizes that have not
    occurred yet.  ``owned_arena``: the arena that the owner provides for the programs, or None.
    ``expected``: the goal that the owner expects to set, or None if there is no owner.  The graph is cut into regions for
    this goal.
    ``timesteps``: a function that returns the timesteps of the pipeline's noise schedule, or None if they are not known.
    ``pack``: True if weights are compressed when they are moved to host memory, "auto" if plans choose the weights to
    compress.
    ``peers``: True if weights are sharded over the devices of several ranks, "auto" if plans choose the weights to shard.
    ``hoist``: the default value of the option ``hoist`` for graphs of the model.
    """

    def __init__(
        self,
        root: nn.Module,
        device: torch.device,
        min_bytes: int,
        *,
        pack: Pack = False,
        peers: OnPeers = False,
        hoist: Hoist | Sequence[str] = False,
        ranks: Peers | None = None,
        bound: int | None = None,
    ) -> None:
        """``device``: the compute device.  ``ranks``: the ranks over which weights may be sharded, or None if weights are not
        sharded.  ``bound``: the maximum bytes of host memory for the weights, or None if there is no limit."""
        self.root = root
        self.min_bytes = min_bytes
        self.pack = pack
        self.peers = peers
        self.hoist = hoist
        free = partial(_call_if_alive, weakref.WeakMethod(self.free))
        quiet = partial(_quiet, weakref.ref(self))
        self.store = HostStore(weakref.ref(root), device, quiet, free, bound=bound, peers=ranks)
        self.guards = Guards(root, self.store, free)
        self.programs: list[SingleCall] = []
        self._preambles: weakref.WeakSet[Preamble] = weakref.WeakSet()
        self.lock = ProcessLock()
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []  # small tensors, each with its values before the move
        self._arenas: dict[DeviceKind, Arena] = {}
        self.owned_arena: Arena | None = None
        self.progress: CompileProgress | None = None
        self.fixed = set[tuple[str, ...]]()
        self.owner: Callable[[], str | None] = lambda: None
        self.goal: Goal | None = None
        self.expected: Goal | None = None
        self.timesteps: Callable[[], torch.Tensor | None] = lambda: None

    @staticmethod
    def on(root: nn.Module, device: torch.device, min_bytes: int, **options: Any) -> Placement:
        """Return the placement of a model.  If the model is not placed yet, create a placement with these ``options``.

        Two threads that call this function for a model at the same time get the same placement.
        """
        with compile_lock:
            placement = placement_of(root)
            if placement is None:  # the attribute may exist: its value is None in a copy of a placed model
                placement = root.__dict__[PLACEMENT] = Placement(root, device, min_bytes, **options)
            return placement

    def belong_to(self, owner: Callable[[], str | None], arena: Arena, expected: Goal) -> None:
        """Assign this placement to an owner.  Programs then run in the owner's arena, and only the owner may undo the
        placement.

        ``owner``: a function that returns the name of the owner, or None after the owner has been garbage-collected.
        ``arena``: the arena of the owner.  ``expected``: the goal that the owner expects to set.
        """
        self.owner, self.owned_arena, self.expected = owner, arena, expected

    def follow(self, timesteps: Callable[[], torch.Tensor | None]) -> None:
        """Let preambles compute rows in advance for all timesteps of a noise schedule.  ``timesteps``: a function that
        returns the timesteps, or None if they are not known."""
        self.timesteps = timesteps

    def aim_for(self, goal: Goal) -> None:
        """Use this goal for all plans that are made from now on, including plans for new input sizes."""
        self.goal = goal

    def begin_compilation(self, name: str, graphs: int, model: nn.Module) -> CompileProgress:
        """Create the progress display for a compilation that begins now; return the display.  ``graphs``: the expected number
        of graphs, or 0 if the number is not known."""
        self.progress = CompileProgress(name, graphs, model)
        return self.progress

    @property
    def current(self) -> bool:
        """Whether this object is still the placement of its model."""
        return placement_of(self.root) is self

    @property
    def preambles(self) -> tuple[Preamble, ...]:
        """The preambles that graphs of the model still use."""
        return tuple(self._preambles)

    @property
    def tables(self) -> list[tuple[Preamble, SingleCall]]:
        """One pair for each table of rows: the preamble that keeps the table, and the program that computes the rows."""
        return [(each, program) for program in self.programs for each in self._preambles if program in each.statistics]

    @property
    def row_bytes(self) -> int:
        """The total bytes of all tables of rows on the device."""
        return sum(preamble.statistics[program].nbytes for preamble, program in self.tables)

    def preamble(self, key: object) -> Preamble | None:
        """Return the preamble with this key that another graph of the model uses, or None if there is no such preamble."""
        return next((preamble for preamble in self._preambles if preamble.key == key), None)

    def share(self, preamble: Preamble) -> None:
        """Register a preamble, so that other graphs of the model can use it.  Only a weak reference to the preamble is
        kept."""
        self._preambles.add(preamble)

    def arena(self, kind: DeviceKind) -> Arena:
        """Return the arena that the programs of the model share.  ``kind``: the properties of the arena's device."""
        return self.owned_arena or self._arenas.setdefault(kind, Arena(self.store.device))

    def attach(self, program: SingleCall) -> None:
        """Register a program, so that the program is closed when this placement ends.

        If an earlier compilation has made the same program for the same weights, the earlier program is closed now, because
        it is not called any more.  Programs whose weights were dropped or stored in other memory are also closed, because
        they would keep the old memory alive.
        """
        for arena in dict.fromkeys(p.arena for p in (*self.programs, program)):
            arena.close_stale()
        for other in self.programs:
            if not other.closed and other is not program and program.repeats(other):
                program.adopt(other)
                other.close()
        self.programs = [p for p in self.programs if not p.closed and p is not program] + [program]

    def end_programs(self, before: Collection[SingleCall]) -> None:
        """Close all programs except the programs in ``before``."""
        for program in self.programs:
            if program not in before:
                program.close()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which no step of the model runs.  On entry, this context waits for the end of running steps.  New
        steps wait for the end of the context."""
        with self.lock(), contextlib.ExitStack() as steps:
            for arena in sorted({program.arena for program in self.programs}, key=id):
                steps.enter_context(arena.lock())
            yield

    def free(self) -> None:
        """Close all programs, and free their device memory.  The next call of each compiled graph makes a new program."""
        with self.lock():
            for program in self.programs:
                program.close()
            self.programs.clear()

    @unset_fake_temporarily()
    def move(
        self,
        weights: Iterable[tuple[tuple[str, ...], torch.Tensor]],
        dtype_of: DtypeOf = keep_dtype,
        node: Node | None = None,
        on_drive: Collection[str] = (),
    ) -> None:
        """Move parameters and buffers to host memory.  If the move fails, the whole placement is undone.

        ``node``: the ranks with which this rank shares host memory, or None if it shares none.  The node is closed when the
        move ends.  ``on_drive``: names of the weights to store on the SSD.
        This method first waits for running steps of other threads, which may read the weights at their old addresses.
        """
        with self.quiet(), dynamo_timed("chunkflow.place"):
            todo = [(names, p) for names, p in weights if buffer_of(p) is None]
            self.store.refuse_aliases(p for _, p in todo)
            origins, device = {p.device.type for _, p in todo}, self.store.device
            loader: WeightLoader | None = None
            pages = device.type == "cuda" or bool(on_drive)
            chosen = packable(self.root, todo, dtype_of) if self.pack else frozenset()
            plain = [(names[0], p) for names, p in todo if not isinstance(p, HostWeight)]
            # Compress again the weights that are not in the host store any more, for example after .to(dtype).
            if node is None:
                left = [(names[0], p) for names, p in todo if isinstance(p, HostWeight) and names[0] in chosen]
                plain += [(name, weight.host) for name, weight in left if weight.is_only_user]
            packs = chosen if self.pack is True else ()
            try:
                loader = WeightLoader(
                    device,
                    plain,
                    dtype_of,
                    pages=pages,
                    node=node,
                    on_drive=on_drive,
                    packs=packs,
                    packable=chosen.difference(packs, on_drive),
                    shards={} if node is None else shards_of(self.root),
                )
                work, expected = sum(loader.work(names[0]) for names, _ in todo), ReadTime.here(loader.reads).text
                with moving(f"moving {type(self.root).__name__} to the host", work, expected) as moved:
                    for names, tensor in todo:
                        self.store.add(names, tensor, loader)
                        moved(loader.work(names[0]))
                    self.store.finish_move(loader, node)
                align(self.root)
                self.guards.add()
                self._let_fill()
            except BaseException as error:
                if loader is not None:
                    loader.close(error)
                try:
                    self.undo(error=error)
                except ChunkflowError as other:  # this second error is only logged, so that it does not hide the first
                    _log.error("the model stays placed in part, and chunkflow_compile.restore takes it back: %s", other)
                raise
            loader.close()
            if "cuda" in origins:
                # the allocator caches the GPU memory that the weights used before the move, and cannot reuse it for the arena
                torch.cuda.empty_cache()
            if todo:
                give_free_memory_back()
                name, how = todo[-1][0][0], "came after the model was placed, and such weights do not go to the drive"
                if raw := [b.name for b in self.store.buffers if b.name in packs and not b.compressed]:
                    name, how = raw[0], "has values that cannot be packed"
                self.store.warn_over_bound(name, how)

    def _let_fill(self) -> None:
        """For each buffer that a module fills, store a weak reference to the module's ``fill`` method in the HostBuffer of
        the buffer."""
        for module in {id(m): m for m in filled_by(self.root).values()}.values():
            fill = weakref.WeakMethod(module.fill)
            for name in module.chunkflow_filled:
                if (buffer := buffer_of(module._buffers[name])) is not None:
                    buffer.fill_with(partial(_call_if_alive, fill))

    def move_small(self, tensors: Iterable[tuple[str, torch.Tensor]], dtype_of: DtypeOf = keep_dtype) -> None:
        """Cast the tensors that were not moved to host memory, and move them to the compute device.

        If the compute device is a CPU and host memory is limited, tensors that are mapped from a checkpoint are copied.
        Without the copy, the operating system might drop the pages of such a tensor, and read them and a large part of the
        file around them again in every step.
        """
        mappings = None if self.store.bound is None else Mappings()
        with torch.no_grad():
            for name, tensor in tensors:
                if buffer_of(tensor) is not None:
                    continue
                if (dtype := dtype_of(name, tensor)) != tensor.dtype:
                    tensor.data = tensor.data.to(dtype)
                if tensor.device != self.store.device:
                    # copy a view of larger memory, such as a mapped checkpoint, because the view would keep all of it alive
                    part_of_more = tensor.untyped_storage().nbytes() > tensor.nbytes
                    self._moved.append((tensor, tensor.data.clone() if part_of_more else tensor.data))
                    tensor.data = tensor.data.to(self.store.device)
                elif mappings is not None and mappings.part(tensor.data) is not None:
                    tensor.data = tensor.data.clone()

    def undo(self, device: torch.device | None = None, error: BaseException | None = None) -> None:
        """Make every parameter an ordinary tensor again, and end the placement.

        ``device``: the device to move the parameters to; by default, each parameter returns to its original device.
        ``error``: the error because of which the placement is undone, or None if there was no error.
        """
        with compile_lock, self.lock():  # so that no other thread traces the guards while they are removed
            self.free()
            self.store.release(device, error)
            before = {id(tensor): values for tensor, values in self._moved}
            everything = [(t, device) for t in leaves_of(self.root) if device is not None]
            with torch.no_grad():
                for tensor, target in everything or [(t, values.device) for t, values in self._moved]:
                    if tensor.device != target:
                        tensor.data = _values(tensor, target, before.get(id(tensor)))
            self._moved.clear()
            align(self.root)
            self.guards.remove()  # remove guards last, so that Ctrl-C cannot leave an empty weight without guards
            self.root.__dict__.pop(PLACEMENT, None)

    def __reduce_ex__(self, _: object) -> tuple[type[None], tuple[()]]:
        """Copy and pickle a placement as None, because a copy of a model is not placed until its first compiled call."""
        return type(None), ()


def packable(
    root: nn.Module, weights: Iterable[tuple[tuple[str, ...], torch.Tensor]], dtype_of: DtypeOf
) -> frozenset[str]:
    """Return the names of the weights that can be compressed if their values allow it.

    These weights are contiguous bfloat16 tensors that have only one name, are not part of a tensor subclass, and are not
    filled by a module.  Their values allow compression if the exponents of almost all values are in a range of sixteen
    consecutive exponents.
    """
    own, filled = {id(tensor) for _, tensor in tensors_of(root)}, filled_by(root)
    return frozenset(
        names[0]
        for names, weight in weights
        if len(names) == 1
        and id(weight) in own
        and id(weight) not in filled
        and (weight.kind if isinstance(weight, HostWeight) else type(weight)) in (torch.Tensor, nn.Parameter)
        and can_pack(weight, dtype_of(names[0], weight))
    )


def placement_of(root: nn.Module) -> Placement | None:
    """Return the placement of a model; None if the model is not placed."""
    placement: Placement | None = root.__dict__.get(PLACEMENT)
    # a shallow copy of a placed model also has the attribute, but with the placement of the original
    return placement if placement is not None and placement.root is root else None


def progress_of(root: nn.Module) -> CompileProgress:
    """Return the progress display for the compilation of a model.  A placed model has a single display.  For a model that is
    not placed, each call returns a new display."""
    placement = placement_of(root)
    if placement is None:
        return CompileProgress(type(root).__name__, 0, root)
    return placement.progress or placement.begin_compilation(type(root).__name__, 0, root)


def placements_around(parameters: Iterable[torch.Tensor]) -> list[Placement]:
    """Return the placements whose host stores contain any of ``parameters``."""
    roots = {id(r): r for p in parameters if (store := store_of(p)) is not None and (r := store.root) is not None}
    return [p for root in roots.values() if (p := placement_of(root)) is not None]


def placements_of(model: nn.Module) -> list[Placement]:
    """Return the placements of a model, of its submodules, and of models that share parameters with it."""
    root = unwrap(model)
    own = [p for m in root.modules() if (p := placement_of(m)) is not None]
    return list(dict.fromkeys([*own, *placements_around(leaves_of(root))]))


@contextlib.contextmanager
def _quiet(ref: weakref.ref[Placement]) -> Iterator[None]:
    """A context in which no step of the placed model runs (see :meth:`Placement.quiet`).  If the placement has been
    garbage-collected, the context does nothing."""
    placement = ref()
    with contextlib.nullcontext() if placement is None else placement.quiet():
        yield


def _call_if_alive(ref: Callable[[], Callable[[], None] | None]) -> None:
    """Call the method to which ``ref`` refers, unless the object of the method has been garbage-collected.

    The object is a placement or a module.  The guards and buffers that store ``ref`` may outlive the object.
    """
    if (method := ref()) is not None:
        method()


def _values(tensor: torch.Tensor, device: torch.device, before: torch.Tensor | None) -> torch.Tensor:
    """Copy the values of a small weight or buffer to ``device``; return the copy.

    ``before``: the values before the tensor was moved to the device, or None if it was not moved.  If the copy fails and
    ``device`` is the CPU, as after a failure of the GPU, the result has these values.
    """
    try:
        with no_room_for("a small weight or a buffer", bytes_of(tensor), device):
            return tensor.data.to(device)
    except RuntimeError:
        if before is None or device.type != "cpu":
            raise
        return before.to(device)


def bytes_of(parameter: torch.Tensor) -> int:
    """Return the total size of a tensor's elements in bytes."""
    return parameter.numel() * parameter.element_size()
