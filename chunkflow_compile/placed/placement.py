"""The placement of a model: its host store, its guards, and the programs that run on it."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
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
from chunkflow_compile.private_torch.dynamo import OptimizedModule, compile_lock, dynamo_timed
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.device import DeviceKind
from chunkflow_compile.weights.checkpoint import Mappings
from chunkflow_compile.weights.guards import Guards
from chunkflow_compile.weights.host_buffer import buffer_of, store_of
from chunkflow_compile.weights.host_memory import give_free_memory_back
from chunkflow_compile.weights.host_store import HostStore, no_room_for
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import align, leaves_of, tensors_of
from chunkflow_compile.weights.loader import DtypeOf, WeightLoader, keep_dtype
from chunkflow_compile.weights.locks import ProcessLock
from chunkflow_compile.weights.node import Node
from chunkflow_compile.weights.peers import Peers
from chunkflow_compile.weights.progress import moving

if TYPE_CHECKING:
    from chunkflow_compile.runtime.hoisted import Preamble
    from chunkflow_compile.runtime.single_call import SingleCall

_log = logging.getLogger(__name__)

# Attribute of a placed model: its Placement.
PLACEMENT = "_chunkflow_placement"


class Placement:
    """A placed model: its host store, its guards, and the programs that run on it.

    ``min_bytes``: the size in bytes below which weights stay on the device.
    ``progress``: shows the compilation of its parts; None before the first compilation.  ``fixed``: one tuple of weight names
    for each part of the model that is compiled per size, because Inductor fails on dynamic shapes.  ``owner``: returns the
    name of the object that the placement belongs to, which alone may undo it; returns None if there is no such object.
    ``goal``: the goal that the owner or replan has set, also for later sizes, or None.  ``owned_arena``: the arena that the
    owner provides for its programs, or None.
    ``expected``: the goal that the owner expects to set, or None without an owner; regions are cut for this goal.
    ``timesteps``: returns the timesteps of the schedule that its calls follow, or None if they are not known.
    ``pack``: whether weights are compressed when they are placed; with "auto", they may be compressed later.  ``peers``:
    whether weights are sharded over the devices of the ranks when a program starts on them.  ``hoist``: the default of the
    option for graphs.
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
        """``ranks``: the ranks that weights may be sharded over, or None.  ``bound``: maximum bytes of host memory for the
        weights, or None if it is unlimited."""
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
        self._moved: list[tuple[torch.Tensor, torch.Tensor]] = []  # with values on the original device
        self._arenas: dict[DeviceKind, Arena] = {}
        self.owned_arena: Arena | None = None
        self.progress: CompileProgress | None = None
        self.fixed = set[tuple[str, ...]]()
        self.owner: Callable[[], str | None] = lambda: None  # see the class
        self.goal: Goal | None = None
        self.expected: Goal | None = None
        self.timesteps: Callable[[], torch.Tensor | None] = lambda: None

    @staticmethod
    def on(root: nn.Module, device: torch.device, min_bytes: int, **options: Any) -> Placement:
        """The placement of a model, which is created with these options if there is none.

        Two threads that call this at the same time get the same placement.
        """
        with compile_lock:
            placement = placement_of(root)
            if placement is None:  # a copy of a placed model has the attribute, with None
                placement = root.__dict__[PLACEMENT] = Placement(root, device, min_bytes, **options)
            return placement

    def belong_to(self, owner: Callable[[], str | None], arena: Arena, expected: Goal) -> None:
        """Run the programs in the arena of an owner, which alone may undo the placement.

        ``owner``: returns the name of the owner, or None once the owner is gone.  ``expected``: the goal that the owner
        expects to set.
        """
        self.owner, self.owned_arena, self.expected = owner, arena, expected

    def follow(self, timesteps: Callable[[], torch.Tensor | None]) -> None:
        """Allow rows to be computed ahead for a schedule.  ``timesteps``: see the class."""
        self.timesteps = timesteps

    def aim_for(self, goal: Goal) -> None:
        """Plan for this goal from now on, also for sizes that come later."""
        self.goal = goal

    def begin_compilation(self, name: str, graphs: int, model: nn.Module) -> CompileProgress:
        """Create the progress display for parts of the model that are about to be compiled.  ``graphs``: their number."""
        self.progress = CompileProgress(name, graphs, model)
        return self.progress

    @property
    def current(self) -> bool:
        """Whether this is still the placement of its model."""
        return placement_of(self.root) is self

    @property
    def preambles(self) -> tuple[Preamble, ...]:
        """The preambles that graphs of the model share and still use."""
        return tuple(self._preambles)

    @property
    def tables(self) -> list[tuple[Preamble, SingleCall]]:
        """The preambles that keep a table for this model, each with the program that computes the rows of the table."""
        return [(each, program) for program in self.programs for each in self._preambles if program in each.statistics]

    @property
    def row_bytes(self) -> int:
        """Bytes of all tables of rows on the device."""
        return sum(preamble.statistics[program].nbytes for preamble, program in self.tables)

    def preamble(self, key: object) -> Preamble | None:
        """The preamble with this key, made for another size or another block of the model; or None."""
        return next((preamble for preamble in self._preambles if preamble.key == key), None)

    def share(self, preamble: Preamble) -> None:
        """Register a preamble, so that other graphs of the model can use it.  It lives as long as a graph uses it."""
        self._preambles.add(preamble)

    def arena(self, kind: DeviceKind) -> Arena:
        """The arena that the model's programs on this kind of device share."""
        return self.owned_arena or self._arenas.setdefault(kind, Arena(self.store.device))

    def attach(self, program: SingleCall) -> None:
        """Register a program, so that it ends with this placement.

        An earlier copy of the same program on the same weights ends now: it belongs to a compilation from before the weights
        moved, which is not called any more.  Programs whose weights are gone or were given other memory also end now, because
        they would keep that memory alive.
        """
        for arena in dict.fromkeys(p.arena for p in (*self.programs, program)):
            arena.close_stale()
        for other in self.programs:
            if not other.closed and other is not program and program.repeats(other):
                program.adopt(other)
                other.close()
        self.programs = [p for p in self.programs if not p.closed and p is not program] + [program]

    def end_programs(self, before: Collection[SingleCall]) -> None:
        """End all programs that were added since.  ``before``: the programs that stay."""
        for program in self.programs:
            if program not in before:
                program.close()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """A context in which no step runs: it waits for the steps of other threads, and blocks new steps."""
        with self.lock(), contextlib.ExitStack() as steps:
            for arena in sorted({program.arena for program in self.programs}, key=id):
                steps.enter_context(arena.lock())
            yield

    def free(self) -> None:
        """End the programs and free their device memory.  The next call of each program starts it again."""
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
        """Move parameters and buffers into the host store.  If this fails, the whole placement is undone.

        ``node``: the ranks to share memory with, or None; it is closed afterwards.  ``on_drive``: names of the weights that
        are stored on the SSD.
        Waits for the steps of other threads, because their programs may read the weights at their present addresses.
        """
        with self.quiet(), dynamo_timed("chunkflow.place"):
            todo = [(names, p) for names, p in weights if buffer_of(p) is None]
            self.store.refuse_aliases(p for _, p in todo)
            origins, device = {p.device.type for _, p in todo}, self.store.device
            loader: WeightLoader | None = None
            pages = device.type == "cuda" or bool(on_drive)
            chosen = packable(self.root, todo, dtype_of) if self.pack else frozenset()
            plain = [(names[0], p) for names, p in todo if not isinstance(p, HostWeight)]
            if node is None:  # a weight that has left its store, as by .to(dtype), is compressed again
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
                except ChunkflowError as other:  # must not hide the first error
                    _log.error("the model stays placed in part, and chunkflow_compile.restore takes it back: %s", other)
                raise
            loader.close()
            if "cuda" in origins:
                # the allocator caches the memory that the weights have left, and cannot reuse it for the arena
                torch.cuda.empty_cache()
            if todo:
                give_free_memory_back()
                name, how = todo[-1][0][0], "came after the model was placed, and such weights do not go to the drive"
                if raw := [b.name for b in self.store.buffers if b.name in packs and not b.compressed]:
                    name, how = raw[0], "has values that cannot be packed"
                self.store.warn_over_bound(name, how)

    def _let_fill(self) -> None:
        """Register the ``fill`` method of its module with each buffer that a module fills."""
        for module in {id(m): m for m in filled_by(self.root).values()}.values():
            fill = weakref.WeakMethod(module.fill)
            for name in module.chunkflow_filled:
                if (buffer := buffer_of(module._buffers[name])) is not None:
                    buffer.fill_with(partial(_call_if_alive, fill))

    def move_small(self, tensors: Iterable[tuple[str, torch.Tensor]], dtype_of: DtypeOf = keep_dtype) -> None:
        """Move the tensors that are not in the host store to the compute device, and cast them.

        If host memory is limited, a tensor that is mapped from a checkpoint is copied.  Otherwise the system might drop its
        pages and read them again, together with much of the file around them, in every step.
        """
        mappings = None if self.store.bound is None else Mappings()
        with torch.no_grad():
            for name, tensor in tensors:
                if buffer_of(tensor) is not None:
                    continue
                if (dtype := dtype_of(name, tensor)) != tensor.dtype:
                    tensor.data = tensor.data.to(dtype)
                if tensor.device != self.store.device:
                    # a view of the checkpoint would keep all of it mapped
                    part_of_more = tensor.untyped_storage().nbytes() > tensor.nbytes
                    self._moved.append((tensor, tensor.data.clone() if part_of_more else tensor.data))
                    tensor.data = tensor.data.to(self.store.device)
                elif mappings is not None and mappings.part(tensor.data) is not None:
                    tensor.data = tensor.data.clone()

    def undo(self, device: torch.device | None = None, error: BaseException | None = None) -> None:
        """Restore every parameter as an ordinary tensor, and end the placement.

        ``device``: the device to restore the parameters on; by default, the device that each came from.  ``error``: the error
        because of which the placement is undone, or None.
        """
        with compile_lock, self.lock():  # so that no other thread traces hooks while they are removed
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
            self.guards.remove()  # last, so that an interrupt leaves no empty weight without guards
            self.root.__dict__.pop(PLACEMENT, None)

    def __reduce_ex__(self, _: object) -> tuple[type[None], tuple[()]]:
        """Copy as None: the copy of a model is not placed until its first compiled call."""
        return type(None), ()


def packable(
    root: nn.Module, weights: Iterable[tuple[tuple[str, ...], torch.Tensor]], dtype_of: DtypeOf
) -> frozenset[str]:
    """The names of the weights that can be compressed, unless too many of their values are outside the range of exponents.

    They are contiguous bfloat16 tensors that have only one name, are not part of a tensor subclass, and are not filled by a
    module.
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
    """The placement of a model, or None if it is not placed."""
    placement: Placement | None = root.__dict__.get(PLACEMENT)
    return placement if placement is not None and placement.root is root else None  # a shallow copy has the attribute


def progress_of(root: nn.Module) -> CompileProgress:
    """The progress display for the compilation of a model.  A placed model keeps it; otherwise a new one is returned."""
    placement = placement_of(root)
    if placement is None:
        return CompileProgress(type(root).__name__, 0, root)
    return placement.progress or placement.begin_compilation(type(root).__name__, 0, root)


def placements_around(parameters: Iterable[torch.Tensor]) -> list[Placement]:
    """The placements whose host stores contain any of ``parameters``."""
    roots = {id(r): r for p in parameters if (store := store_of(p)) is not None and (r := store.root) is not None}
    return [p for root in roots.values() if (p := placement_of(root)) is not None]


def placements_of(model: nn.Module) -> list[Placement]:
    """The placements of a model, of its submodules, and of the models that contain it."""
    root = unwrap(model)
    own = [p for m in root.modules() if (p := placement_of(m)) is not None]
    return list(dict.fromkeys([*own, *placements_around(leaves_of(root))]))


@contextlib.contextmanager
def _quiet(ref: weakref.ref[Placement]) -> Iterator[None]:
    """``Placement.quiet`` for a store, which may outlive the placement."""
    placement = ref()
    with contextlib.nullcontext() if placement is None else placement.quiet():
        yield


def _call_if_alive(ref: Callable[[], Callable[[], None] | None]) -> None:
    """Call a method if its object still exists.  The object is a module, or a placement that guards and buffers outlive."""
    if (method := ref()) is not None:
        method()


def unwrap(model: nn.Module) -> nn.Module:
    """The model that torch.compile has wrapped, or the model itself.  Raises ChunkflowError if it is not a model."""
    if not isinstance(model, nn.Module):
        raise ChunkflowError(instead_of_model(model))
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def is_pipeline(given: Any) -> bool:
    """Whether an argument is a pipeline of diffusers, or any other object with ``components``, that is not a model."""
    return not isinstance(given, nn.Module) and isinstance(getattr(given, "components", None), Mapping)


def instead_of_model(given: Any, or_pipeline: bool = False) -> str:
    """Why an argument is not a model, and what to pass instead.  ``or_pipeline``: whether a pipeline is accepted, too."""
    wanted, loader = (
        ("a model or a pipeline", "DiffusionPipeline") if or_pipeline else ("a model", "FluxTransformer2DModel")
    )
    if isinstance(given, type):
        name = given.__name__
        return f"{name} is a class, not {wanted}: pass an instance, as {name}.from_pretrained(...) returns."
    if isinstance(given, str | Path):
        load = f"{loader}.from_pretrained({str(given)!r})"
        return f"{str(given)!r} is a name, not {wanted}: load it first, such as with {load}."
    this = f"This {type(given).__name__}"
    if or_pipeline:
        fix = (
            "the pipeline itself, not its components"
            if isinstance(given, Mapping)
            else "a torch.nn.Module or a pipeline"
        )
        return f"{this} is neither a model nor a diffusers pipeline: pass {fix}."
    if is_pipeline(given):
        return (
            f"{this} is a pipeline, not a model: pass one component, such as pipe.transformer. For the whole pipeline, call "
            "chunkflow_compile.compile(pipe)."
        )
    return f"{this} is not a model: pass a torch.nn.Module."


def _values(tensor: torch.Tensor, device: torch.device, before: torch.Tensor | None) -> torch.Tensor:
    """The values of a small weight or a buffer on ``device``.

    ``before``: the values from before it was moved, or None.  They are used if its GPU has failed and ``device`` is the CPU.
    """
    try:
        with no_room_for("a small weight or a buffer", bytes_of(tensor), device):
            return tensor.data.to(device)
    except RuntimeError:
        if before is None or device.type != "cpu":
            raise
        return before.to(device)


def bytes_of(parameter: torch.Tensor) -> int:
    """The size of a tensor's elements in bytes."""
    return parameter.numel() * parameter.element_size()
