"""Placing a model: moves its large parameters into the host store, and back."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import OptimizedModule

from chunkflow_compile.options import DEFAULT_MIN_BYTES
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.device import DeviceKind, check_device
from chunkflow_compile.runtime.locks import ProcessLock
from chunkflow_compile.units import parse_bytes
from chunkflow_compile.weights.drive import for_the_drive
from chunkflow_compile.weights.filling import DtypeOf, Filling, as_they_are, cast_to
from chunkflow_compile.weights.guards import Guards, detach_guards
from chunkflow_compile.weights.home import home_of
from chunkflow_compile.weights.host_memory import give_free_memory_back
from chunkflow_compile.weights.host_store import HostStore, give_back, no_room_for
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import align, leaves, leaves_of, named_leaves, tensors_of
from chunkflow_compile.weights.modules import ModelIndex
from chunkflow_compile.weights.peers import Peers, peers_of, stay_away
from chunkflow_compile.weights.progress import CompileProgress, moving
from chunkflow_compile.weights.sharing_again import name_replaced, share_again
from chunkflow_compile.weights.staging import GpuStagings
from chunkflow_compile.weights.streamable import why_not

if TYPE_CHECKING:
    from chunkflow_compile.runtime.route import Route
    from chunkflow_compile.runtime.session import Session

_log = logging.getLogger(__name__)

# Attribute of a placed model: its Placement.
_PLACEMENT = "_chunkflow_placement"


class Placement:
    """A placed model: its host store, its guards, and the programs that run on it.

    ``min_bytes``: smaller weights stay on the device.  ``share``: see :func:`offload`.
    ``progress``: of the compilation of its parts, if it is shown.  ``goal``: what replan has set, as fields of the settings,
    also for sizes that come later.
    """

    def __init__(self, root: nn.Module, device: torch.device, min_bytes: int) -> None:
        self.root = root
        self.min_bytes = min_bytes
        self.store = HostStore(weakref.ref(root), device, partial(_quiet, weakref.ref(self)))
        self.guards = Guards(root, self.store, partial(_free, weakref.ref(self)))
        self.sessions: list[Session] = []
        self.lock = ProcessLock()
        self._carried: list[tuple[torch.Tensor, torch.Tensor]] = []  # and its values where it came from
        self._arenas: dict[DeviceKind, Arena] = {}
        self.progress: CompileProgress | None = None
        self.owner: Callable[[], str | None] = lambda: None  # what it belongs to, which alone may undo it
        self.share: Any = False
        self.goal: Mapping[str, Any] = {}

    @staticmethod
    def on(root: nn.Module, device: torch.device, min_bytes: int) -> Placement:
        """The placement of a model, created if there is none; two threads that ask at once get the same one."""
        if placement_of(root) is None:
            root.__dict__.pop(_PLACEMENT, None)  # a copy of a placed model has the attribute, with None
        found: Placement = root.__dict__.setdefault(_PLACEMENT, Placement(root, device, min_bytes))
        return found

    @property
    def lasts(self) -> bool:
        """Whether this is still the placement of its model."""
        return placement_of(self.root) is self

    def arena(self, kind: DeviceKind) -> Arena:
        """The arena that the model's programs on one kind of device share."""
        return self._arenas.setdefault(kind, Arena(self.store.device))

    def attach(self, session: Session) -> None:
        """Make a session end with this placement.

        A session of the same program on the same weights ends now: it ran a compilation that Dynamo made before the
        weights moved, and calls no more.  So does one whose weights are gone or have other memory, which it would keep.
        """
        gone: dict[tuple[int, ...], bool] = {}  # asked once for all sizes: a new one attaches a program for each block
        for other in self.sessions:
            if not other.closed and other.reads not in gone:
                gone[other.reads] = other.outlived
            if not other.closed and gone[other.reads]:
                other.close()
            if not other.closed and other is not session and session.repeats(other):
                session.adopt(other.measurements)
                other.close()
        self.sessions = [s for s in self.sessions if not s.closed and s is not session] + [session]

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Wait for the steps of other threads, and hold off new ones."""
        with self.lock(), contextlib.ExitStack() as steps:
            for arena in sorted({s.arena for s in self.sessions}, key=id):
                steps.enter_context(arena.lock())
            yield

    def free(self) -> None:
        """End the programs and give back their device memory.  The next call of each starts it again."""
        with self.lock():
            for session in self.sessions:
                session.close()
            self.sessions.clear()

    def move(
        self,
        weights: Iterable[tuple[tuple[str, ...], torch.Tensor]],
        dtype_of: DtypeOf = as_they_are,
        peers: Peers | None = None,
        on_drive: Collection[str] = (),
    ) -> None:
        """Move parameters and buffers into the store.  If that fails, the whole placement is undone.

        ``peers``: the ranks to share their memory with, which is closed.  ``on_drive``: names of those that go to the drive.
        Waits for the steps of other threads, whose programs may read them where they are now.
        """
        with self.quiet():
            todo = [(names, p) for names, p in weights if home_of(p) is None]
            origins, device = {p.device.type for _, p in todo}, self.store.device
            plain = [(names[0], p) for names, p in todo if not isinstance(p, HostWeight)]
            if peers is not None:
                self.store.turn = peers.ranks.index(peers.rank), len(peers.ranks)
            filling: Filling | None = None
            pages = device.type == "cuda" or bool(on_drive)
            try:
                filling = Filling(device, plain, dtype_of, pages=pages, peers=peers, on_drive=on_drive)
                with moving("moving weights to the host", sum(_bytes(p) for _, p in todo)) as told:
                    for names, tensor in todo:
                        told(_bytes(tensor))
                        self.store.add(names, tensor, filling)
                filling.finish()
                self.store.moved()
                self.guards.add()
            except BaseException as error:
                if filling is not None:
                    filling.close(error)
                try:
                    self.undo(failed=True)
                except ChunkflowError as other:  # no reason to hide the first
                    _log.error("the model stays placed in part, and chunkflow_compile.restore takes it back: %s", other)
                raise
            filling.close()
            if "cuda" in origins:
                torch.cuda.empty_cache()  # the allocator keeps what the weights left, and the arena has another size
            if todo:
                give_free_memory_back()

    def carry(self, tensors: Iterable[tuple[str, torch.Tensor]], dtype_of: DtypeOf = as_they_are) -> None:
        """Move the tensors that are not in the store to the store's device, and cast them."""
        with torch.no_grad():
            for name, tensor in tensors:
                if home_of(tensor) is not None:
                    continue
                if (dtype := dtype_of(name, tensor)) != tensor.dtype:
                    tensor.data = tensor.data.to(dtype)
                if tensor.device != self.store.device:
                    # a view of the checkpoint would keep all of it mapped
                    part_of_more = tensor.untyped_storage().nbytes() > tensor.nbytes
                    self._carried.append((tensor, tensor.data.clone() if part_of_more else tensor.data))
                    tensor.data = tensor.data.to(self.store.device)

    def undo(self, device: torch.device | None = None, failed: bool = False) -> None:
        """Give every parameter its bytes back, on the device it came from or on ``device``; end the placement.

        ``failed``: whether that is because its weights could not be moved.
        """
        with compile_lock, self.lock():  # no other thread may trace hooks while they are removed
            self.free()
            self.store.release(device, failed)
            before = {id(tensor): values for tensor, values in self._carried}
            everything = [(t, device) for t in leaves_of(self.root) if device is not None]
            with torch.no_grad():
                for tensor, target in everything or [(t, values.device) for t, values in self._carried]:
                    if tensor.device != target:
                        tensor.data = _values(tensor, target, before.get(id(tensor)))
            self._carried.clear()
            align(self.root)
            self.guards.remove()  # last: an interrupt must leave no empty weight without guards
            self.root.__dict__.pop(_PLACEMENT, None)

    def __reduce_ex__(self, _: object) -> tuple[type[None], tuple[()]]:
        """Copy as None: the copy of a model is not placed until its first compiled call."""
        return type(None), ()


def offload(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    min_bytes: int = DEFAULT_MIN_BYTES,
    dtype: torch.dtype | None = None,
    share: Any = None,
    host_memory: int | str | None = None,
) -> nn.Module:
    """Move the parameters and buffers of at least ``min_bytes`` to host memory; return ``model``.

    Each is still a tensor with its shape, dtype and compute device (:class:`HostWeight`); smaller ones move to ``device``
    (default: where the parameters are).  Of a tensor subclass, such as a quantised weight, the tensors inside it move.
    A weight that is still a mapping of its safetensors file, as ``from_pretrained`` leaves it, is read from there.

    ``dtype``: cast floating-point weights to it one by one, with the same result as ``from_pretrained(torch_dtype=dtype)``:
    modules that the class of the model keeps in float32 stay there.

    ``share``: whether the ranks of a machine keep one copy of the weights together: True, False, or a process group.  All
    ranks of the group must then call ``offload``, and those that differ in a weight keep their own.  By default, the ranks of
    the default process group share if ``device`` is a GPU.  A rank that writes a weight gets a copy of its own.

    ``host_memory``: most bytes of host memory for the weights, as bytes or "24GiB".  The others stay on the drive, in the
    checkpoint or in a scratch file in the folder for temporary files, and are read from there in every step.
    Raises ChunkflowError, and leaves the model as it was, if the model is placed already, has parameters on the meta
    device, or lies in a checkpoint that cannot be read; weights that were cast before an error may stay cast.
    """
    root = _unwrap(model)
    parameters = [*leaves_of(root)]
    try:
        target = _target(root, device, parameters)
        index = ModelIndex.of(root)
        dtype_of = as_they_are if dtype is None else cast_to(_checked(dtype), root)
        weights = [(index.names[id(weight)], weight) for weight in large_weights([root], index, min_bytes)]
        bound, on_drive = None, frozenset[str]()
        if host_memory is not None:
            sizes = [(names[0], p.numel() * dtype_of(names[0], p).itemsize) for names, p in weights]
            bound = parse_bytes(host_memory, "host_memory")
            on_drive = for_the_drive(sizes, bound)
    except BaseException as error:  # the other ranks of the group need not wait for this one
        with contextlib.suppress(ChunkflowError, RuntimeError):
            stay_away(share, _device(device, parameters), error)
        raise
    peers = peers_of(share, target)
    placement = Placement.on(root, target, min_bytes)
    placement.share, placement.store.bound = share, bound
    with compile_lock:
        placement.guards.watch_calls()
        placement.move(weights, dtype_of, peers, on_drive)
    try:
        placement.carry(named_leaves(root), dtype_of)
        align(root)
    except BaseException:
        placement.undo()
        raise
    return model


def _target(root: nn.Module, device: torch.device | str | None, parameters: list[torch.Tensor]) -> torch.device:
    """The compute device of a model that can be placed.  Raises ChunkflowError if it cannot."""
    if placements_of(root):
        placed = next((home.name for p in parameters if (home := home_of(p)) is not None), "none of them large")
        raise ChunkflowError(
            f"Weights of this model are offloaded already ({placed}): call chunkflow_compile.restore(model) first."
        )
    if any(p.is_meta for p in parameters):
        raise ChunkflowError("This model has parameters on the meta device, without values: load its weights first.")
    return check_device(_device(device, parameters))


def large_weights(modules: Iterable[nn.Module], index: ModelIndex, min_bytes: int) -> list[torch.Tensor]:
    """The weights of ``modules`` that can be streamed, of at least ``min_bytes``."""
    held = [(inside, leaf) for m in modules for _, tensor in tensors_of(m) for inside, leaf in leaves(tensor)]
    large = {id(p): p for inside, p in held if _bytes(p) >= min_bytes and why_not(p, index, inside) is None}
    return list(large.values())


def restore(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Bring the parameters of an offloaded model back to where they came from, bit for bit; return ``model``.

    ``device``: where to bring them instead.  Raises ChunkflowError if it has no room (the weights that do not fit stay
    offloaded), or if the model is in an applied pipeline.  Restoring a part of a model that was placed as a whole restores
    the whole.  A model that is not placed is left as it is.  Compiled functions of the model stay usable: their next call
    places it again.
    """
    for owner in filter(None, (placement.owner() for placement in placements_of(model))):
        raise ChunkflowError(f"This model is {owner}, within its budget: call chunkflow_compile.remove(pipe) instead.")
    return bring_back(model, device)


def bring_back(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """:func:`restore`, for the owner of a model."""
    target = None if device is None else check_device(torch.device(device))
    for placement in placements_of(model):
        placement.undo(target)
    for module in _unwrap(model).modules() if placement_of(_unwrap(model)) is None else ():
        detach_guards(module)  # those of a copy
        module.__dict__.pop(_PLACEMENT, None)
    for leaf in [*leaves_of(_unwrap(model))]:  # those that a copy has, or that were assigned after the last call
        if isinstance(leaf, HostWeight):
            give_back(leaf, target or leaf.device, GpuStagings())
    return model


@contextlib.contextmanager
def writing(model: nn.Module) -> Iterator[None]:
    """A context in which all ranks that share the weights of a model write the same values to them.

    A write ends the sharing of a weight.  At the end of this context, the weights that all ranks have written are compared,
    byte for byte, and shared again.  Raises ChunkflowError if a rank ends or fails.  Does nothing for other models.
    A weight that got new memory, as by ``load_state_dict(assign=True)``, is not shared again; a warning names it.
    """
    sharing = [p for p in placements_of(model) if p.share is not False]
    before = {p: {home.name for home in p.store.homes if home.was_shared} for p in sharing}
    try:
        yield
    except BaseException as error:
        for placement in sharing[:1]:  # the first one that the others want to share
            stay_away(placement.share, placement.store.device, error)
        raise
    for placement in sharing:
        if placement.lasts:
            name_replaced(placement.root, before[placement])
            with placement.quiet():
                share_again(placement.store, placement.share)


def programs(model: nn.Module) -> tuple[Session, ...]:
    """The programs that run on a placed model, oldest first: their plan, listing, measurements and slots."""
    sessions = (s for placement in placements_of(model) for s in placement.sessions if not s.closed)
    return tuple(sorted(dict.fromkeys(sessions), key=lambda s: s.started))


def courses(model: nn.Module) -> tuple[Route, ...]:
    """The courses that programs of a placed model run in, the one that runs now first: their plan and their jumps.

    Programs that run in turns become a course when their order has repeated and its plan is ready.
    """
    known = [arena.courses for arena in dict.fromkeys(session.arena for session in programs(model)) if arena.courses]
    found = [route for c in known for route in sorted(c.known, key=lambda route: route is not c.current)]
    return tuple(found)


def placement_of(root: nn.Module) -> Placement | None:
    """The placement of a model, None if it is not placed."""
    found: Placement | None = root.__dict__.get(_PLACEMENT)
    return found if found is not None and found.root is root else None  # a shallow copy has the attribute


def placements_around(parameters: Iterable[torch.Tensor]) -> list[Placement]:
    """The placements that hold any of ``parameters`` in their stores."""
    roots = {id(r): r for p in parameters if (home := home_of(p)) is not None and (r := home.store.root) is not None}
    return [p for root in roots.values() if (p := placement_of(root)) is not None]


def placements_of(model: nn.Module) -> list[Placement]:
    """The placements of a model, of its parts, and of the models that it is a part of."""
    root = _unwrap(model)
    own = [p for m in root.modules() if (p := placement_of(m)) is not None]
    return list(dict.fromkeys([*own, *placements_around(leaves_of(root))]))


@contextlib.contextmanager
def _quiet(ref: weakref.ref[Placement]) -> Iterator[None]:
    """``Placement.quiet`` for a store, which may outlive the placement."""
    placement = ref()
    with contextlib.nullcontext() if placement is None else placement.quiet():
        yield


def _free(ref: weakref.ref[Placement]) -> None:
    """``Placement.free`` for the guards of a module, which may outlive the placement."""
    if (placement := ref()) is not None:
        placement.free()


def _unwrap(model: nn.Module) -> nn.Module:
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def _values(tensor: torch.Tensor, device: torch.device, before: torch.Tensor | None) -> torch.Tensor:
    """The values of a small weight or a buffer on ``device``; those from ``before`` it was moved, if its GPU failed."""
    try:
        with no_room_for("a small weight or a buffer", _bytes(tensor), device):
            return tensor.data.to(device)
    except RuntimeError:
        if before is None or device.type != "cpu":
            raise
        return before.to(device)


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _checked(dtype: torch.dtype) -> torch.dtype:
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise ChunkflowError(
            f"offload casts to float32, float16 or bfloat16, not to {dtype}: quantise the model instead."
        )
    return dtype


def _device(device: torch.device | str | None, parameters: list[torch.Tensor]) -> torch.device:
    if device is not None:
        return torch.device(device)
    devices = {p.device for p in parameters}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise ChunkflowError(f"The model's parameters are on {found}: pass the compute device, offload(model, device).")
    return devices.pop()
