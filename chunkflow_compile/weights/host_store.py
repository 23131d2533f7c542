"""The host store: the offloaded weights of a model, with their host memory and the copies that programs keep."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

from .backing import Where
from .bytes import is_same_view
from .counts import Counts
from .exchange import become
from .host_buffer import HostBuffer
from .host_weight import HostWeight, like
from .leaves import leaves_of, named_leaves
from .limits import HostMemory, PinAllowance, host_memory, local_ranks
from .loader import WeightLoader
from .node import Node
from .peers import Peers
from .progress import moving
from .restoring import restore_weight
from .staging import GpuStagings
from .store import Export

_log = logging.getLogger(__name__)


def _nothing() -> None:
    """Do nothing.  This is the default of ``end_programs``, for a model without programs."""


@dataclass(eq=False)
class HostStore:
    """The offloaded weights of the model ``root``, whose programs run on ``device``.

    ``quiet``: a function that returns a context for writes to weights; while the context is active, no program of the
    model runs.  ``end_programs``: a function that ends the programs; their next calls start them again.  ``pins``:
    whether to pin host memory; False after a weight could not be pinned.  ``counts``: counters of the model's programs.
    ``exported``: tensors of state_dicts, or their storages, that share the memory of weights.
    ``bound``: the limit on host memory for the weights, in bytes, or None.
    ``rank_and_count``: the index of this rank among the ranks that share the weights, and the number of these ranks;
    None if the weights are not shared.  ``agreed_pin_bytes``: the bytes that each of these ranks may pin, or None.
    ``peers``: the ranks that keep pieces of weights for each other, or None.
    """

    _root: weakref.ref[nn.Module]
    device: torch.device
    quiet: Callable[[], AbstractContextManager[object]]
    end_programs: Callable[[], None] = _nothing
    pins: bool = True
    bound: int | None = None
    rank_and_count: tuple[int, int] | None = None
    agreed_pin_bytes: int | None = None
    peers: Peers | None = None
    counts: Counts = field(default_factory=Counts)
    exported: dict[Export, None] = field(default_factory=dict)
    _buffers: weakref.WeakKeyDictionary[HostBuffer, None] = field(default_factory=weakref.WeakKeyDictionary)
    _pending: list[tuple[tuple[str, ...], torch.Tensor, HostBuffer | None]] = field(default_factory=list)
    warned: bool = False  # whether a warning about reads by eager ops was shown or is not wanted
    _fetched: set[str] = field(default_factory=set)
    _total: int = 0
    _meant: int = 0  # bytes fetched in ``reads_meant`` contexts
    _warned_of_bound: bool = False
    _warned_of_raw: bool = False
    _warned_of_exported: bool = False
    _warned_of_compiler: bool = False

    @property
    def root(self) -> nn.Module | None:
        """The model, or None if the model was freed while something else still uses some of its weights."""
        return self._root()

    @property
    def buffers(self) -> list[HostBuffer]:
        """The buffers of the weights that still exist, oldest first."""
        return [buffer for buffer in self._kept() if buffer.is_alive_in(self)]

    def _kept(self) -> list[HostBuffer]:
        """All buffers of the store, oldest first, including buffers of weights that were replaced or dropped."""

        buffers = (ref() for ref in self._buffers.keyrefs())  # ``keyrefs`` is thread-safe
        return [buffer for buffer in buffers if buffer is not None]

    @property
    def pinned_bytes(self) -> int:
        return sum(h.nbytes for h in self.buffers if h.pinned)

    def refuse_aliases(self, weights: Iterable[torch.Tensor]) -> None:
        """Raise ChunkflowError if one of ``weights`` shares its memory with another offloaded weight of the model."""
        added = {id(w.buffer): w for w in weights if isinstance(w, HostWeight) and w.buffer.is_alive_in(self)}
        held = [*named_leaves(self.root)] if added and self.root is not None else []
        for name, leaf in held:
            weight = added.get(id(leaf.buffer)) if isinstance(leaf, HostWeight) else None
            if weight is not None and leaf is not weight:
                new = next((other for other, t in held if t is weight), "A weight")
                raise ChunkflowError(
                    f"{new} has the memory of {name}, which is offloaded: assign that parameter itself, or a clone of it, or "
                    "call chunkflow_compile.restore(model) first."
                )

    def add(self, names: tuple[str, ...], tensor: torch.Tensor, loader: WeightLoader) -> None:
        """Move the bytes of a parameter or buffer into the store and turn it into a :class:`HostWeight`.

        The original memory of each weight is freed before the next weight is moved.  A weight that is still in its
        checkpoint stays there, without host memory, until :meth:`finish_move`.  A weight that is already offloaded
        keeps its host memory, unless the loader loads it again.
        """
        with torch.inference_mode(False), torch.no_grad():
            if isinstance(tensor, HostWeight) and names[0] not in loader:
                buffer = tensor.buffer  # already in this store if ``tensor`` is a view of one of its weights
                if buffer.compressed and not is_same_view(tensor.host, buffer.host):
                    buffer.unpack()
                self._adopt(names, tensor, tensor.host, buffer.origin if buffer in self._buffers else self.device)
                return
            placed = loader.place(names[0], tensor.host if isinstance(tensor, HostWeight) else tensor)
            if placed is None or loader.in_file(names[0]):
                self._pending.append((names, tensor, placed))
            else:
                self._become(names, tensor, placed)

    def finish_move(self, loader: WeightLoader, node: Node | None) -> None:
        """Finish the move to host memory after :meth:`add` was called for all weights on this rank.  ``node``: the
        ranks that share the weights, or None.

        Raises ChunkflowError if another rank has ended or failed, or if weights that differ between ranks do not fit in
        host memory.
        """
        if node is not None:
            node.gather(None)  # waits until all ranks have written their weights
        with torch.inference_mode(False), torch.no_grad():
            for names, tensor, buffer in self._pending:
                self._become(names, tensor, buffer or loader.placed(names[0], tensor))
        self._pending.clear()
        if node is not None:
            loader.report()
            self.rank_and_count = node.ranks.index(node.rank), len(node.ranks)
            self.agreed_pin_bytes = min(node.gather(self._pinnable(host_memory())))

    def _become(self, names: tuple[str, ...], tensor: torch.Tensor, buffer: HostBuffer) -> None:
        grad, origin = tensor.grad, tensor.device
        weight = like(tensor, HostWeight(buffer.host, self.device, buffer))
        self._adopt(names, weight, buffer.host, origin, grad)
        # this is the last step, and a single call into C, so that Ctrl-C leaves either an ordinary tensor or a weight
        # of this store
        become(tensor, weight)

    def _adopt(
        self,
        names: tuple[str, ...],
        weight: HostWeight,
        host: torch.Tensor,
        origin: torch.device,
        grad: torch.Tensor | None = None,
    ) -> None:
        buffer = weight.buffer
        buffer.enter(self, names, origin, host, weight, grad)
        self._total += 0 if buffer in self._buffers else host.nbytes
        self._buffers[buffer] = None

    def release(self, device: torch.device | None = None, error: BaseException | None = None) -> None:
        """Restore every parameter on ``device``, or by default on the device that the parameter came from.  Weights
        that are no longer part of the model stay in host memory.

        ``error``: the reason why the move to host memory has failed, or None.  If it has failed and private memory is too
        short for a shared weight, the weight becomes a copy-on-write mapping of the shared memory.
        Raises ChunkflowError if a parameter does not fit.  This parameter and all others that are not restored yet stay
        in the store.
        """
        self._pending.clear()
        if self.peers is not None and error is not None:
            self.peers.close(error)
        buffers = self._kept()
        held = () if self.root is None else leaves_of(self.root)
        weights = dict[HostBuffer, HostWeight]()
        for leaf in held:  # the model may contain views of a weight, too
            if isinstance(leaf, HostWeight) and (leaf.buffer not in weights or leaf.buffer.backs(leaf)):
                weights[leaf.buffer] = leaf
        moving_back = moving("bringing weights back", sum(h.nbytes for h in buffers))
        stagings = GpuStagings()
        with torch.inference_mode(False), torch.no_grad(), moving_back as moved:
            for buffer in reversed(buffers):
                if (weight := weights.get(buffer)) is not None:
                    target = device or buffer.origin
                    if error is not None and target.type == "cpu":  # the move may have failed because memory is short
                        if buffer.compressed:
                            buffer.unpack(leaving=True, lazily=True)
                        elif buffer.backing.where is Where.SHARED:
                            buffer.make_private(lazily=True)
                    restore_weight(weight, target, stagings)
                elif buffer.compressed:
                    buffer.unpack(leaving=True)
                buffer.unpin()  # unpinned only now, because copies from pinned memory are faster
                buffer.leave()
                moved(buffer.nbytes)
            self._buffers.clear()
        if self.peers is not None:
            self.peers.close(error)
            self.peers = None

    def sync_external_writes(self) -> None:
        """Count weights as written if a tensor of a state_dict shares their memory, or has shared it since the last
        call of this method.

        Such a weight may have been written through a pointer, a NumPy array or a collective.  No version counter
        records these writes.  A weight is not counted if the kernel reports that its pages were not written; see
        :meth:`HostBuffer.settle`.  Warns once if tensors of a state_dict are still in use and make calls slow.  When no
        tensor shares the memory of a weight any more (usually after the model was saved), programs read the pieces of the
        weight again, if the pieces still have its values.
        Raises ChunkflowError if there is not enough memory for the written values.
        """

        # An export stays in ``exported`` until its buffer is settled, because another thread that calls the model
        # meanwhile must settle the buffer, too.
        exports: dict[HostBuffer, list[Export]] = {}
        for export in [*self.exported]:
            if (buffer := export.buffer()) is None:
                self.exported.pop(export, None)
            else:
                exports.setdefault(buffer, []).append(export)
        slow = False
        for buffer, lent in exports.items():
            # users are looked up before the buffer is settled: if there are none, nobody can write to the memory later
            users = {id(user): export for export in lent if (user := export.user()) is not None}
            kept = {*users.values()} or {*lent[: buffer.is_lent]}
            changed = buffer.settle()
            for export in lent:
                if export not in kept:
                    self.exported.pop(export, None)
            if kept:
                slow |= changed and not buffer.compressed
            else:
                buffer.regain_pieces(None if self.peers is None else self.peers.same)
        if slow and not self._warned_of_exported:
            self._warned_of_exported = True
            warnings.warn(
                f"Tensors of a state_dict() of {type(self.root).__name__} are still in use. A write to one may go unnoticed, "
                "so each call takes these weights from host memory again, which is right but slow. Drop the state_dict, or "
                "keep clones of its tensors.",
                stacklevel=2,
            )

    def expect_eager_reads(self) -> None:
        """Disable the warning about eager ops that fetch weights, because parts of the model run eagerly on purpose."""
        self.warned = True

    @contextlib.contextmanager
    def reads_meant(self) -> Iterator[None]:
        """A context in which the user converts weights.  In this context, ops outside programs read weights without a
        warning."""
        warned, fetched, self.warned = self.warned, self.counts.fetched_bytes, True
        try:
            yield
        finally:
            self.warned = warned
            self._meant += self.counts.fetched_bytes - fetched

    def first_call(self) -> AbstractContextManager[None]:
        """A context for a call of the model, or of a submodule.  If some weights are not sharded yet, the other ranks
        wait for this call, and raise its error if it fails."""
        return contextlib.nullcontext() if self.peers is None else self.peers.first_call()

    def count(self, name: str, nbytes: int) -> None:
        """Count a fetch of a weight.  Warns once when the fetched bytes reach the total size of all weights."""
        self.counts.add_fetched(nbytes)
        so_far = self.counts.fetched_bytes - self._meant
        if self.warned:
            return
        self._fetched.add(name)
        if so_far >= self._total:
            self.warned = True
            model, fetched, every = type(self.root).__name__, len(self._fetched), len(self.buffers)
            if fetched < every:
                said = (
                    f"Ops outside the compiled parts of {model} read {fetched} of its {every} offloaded weights, such as "
                    f"{min(self._fetched)}, and have fetched {size(so_far)} of them, one weight at a time. That "
                    "is right but slow. chunkflow_compile.compile(model) compiles such parts too."
                )
            else:
                said = (
                    f"{model} runs outside its compiled form: ops have fetched {size(so_far)} of its offloaded "
                    "weights, one weight at a time, as much as all of them have. That is right but slow. Call the model "
                    'that torch.compile(model, backend="chunkflow") returned; if this was it, compile with fullgraph=True '
                    "to see what leaves the graph."
                )
            self._fetched.clear()
            warnings.warn(said, stacklevel=2)

    def warn_of_compiler(self, name: str, backend: str) -> None:
        """Warn once that another backend compiles code that reads a weight.  Also disable the warning about eager ops."""
        if self._warned_of_compiler:
            return
        self._warned_of_compiler = self.warned = True
        model = type(self.root).__name__
        warnings.warn(
            f"torch.compile with backend={backend!r} compiles code that reads offloaded weights of {model}, such as {name}. "
            "Outputs are right, but each weight is copied when it is needed, in every call, and no copy overlaps compute. "
            f"Compile the function that calls {model} with backend='chunkflow', or call {model} outside compiled code.",
            stacklevel=2,
        )

    @property
    def piece_bytes(self) -> int:
        """Bytes of device memory that this rank's pieces take."""
        return sum(pieces.held[pieces.place].nbytes for h in self.buffers if (pieces := h.pieces) is not None)

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights that are in host memory."""
        return sum(h.nbytes for h in self.buffers if not h.source.file)

    def warn_over_bound(self, name: str, how: str, more: int = 0) -> None:
        """Warn once if the weights take more host memory than the bound.

        ``name``: the weight that is moved into host memory.  ``how``: the reason, as a predicate that follows ``name``
        in the message.  ``more``: bytes of weights that are about to be moved into host memory.
        """
        held = self.held_bytes + more
        if self.bound is not None and held > self.bound and not self._warned_of_bound:
            self._warned_of_bound = True
            warnings.warn(
                f"{name} {how}: the weights take {size(held)} of host memory now, more than host_memory, which is "
                f"{size(self.bound)}. Save the model with its new values (save_pretrained) and load it again to have them on "
                "the drive.",
                stacklevel=3,
            )

    def warn_of_raw(self, buffer: HostBuffer) -> None:
        """Log once that a weight is no longer packed."""
        if not self._warned_of_raw:
            self._warned_of_raw = True
            _log.warning(
                "%s was written, and its values no longer fit into its packed form: it is raw from now on and takes %s of "
                "host memory, and what reads it is compiled again. Other weights that this happens to are not named",
                buffer.name,
                size(buffer.nbytes),
            )

    def pin_allowance(self, budget: int | None) -> PinAllowance:
        """Return how many bytes may still be pinned.

        ``budget``: the limit for this store in bytes; None for as much as the machine allows.
        """
        if budget is not None:
            return PinAllowance(budget - self.pinned_bytes, f"the budget is {size(budget)}, see the option pin_memory")
        if self.agreed_pin_bytes is not None:
            return PinAllowance(
                self.agreed_pin_bytes - self.pinned_bytes,
                f"the ranks that share weights pin at most {size(self.agreed_pin_bytes)}",
            )
        memory = host_memory()
        most = self._pinnable(memory)
        why = (
            f"{size(memory.free)} are free{memory.by}, and {size(memory.reserve)} stay in reserve: at most {size(most)}"
        )
        return PinAllowance(most - self.pinned_bytes, why)

    def _pinnable(self, memory: HostMemory) -> int:
        """Return how many bytes of the weights this rank may pin.

        Pinning takes no additional host memory.  Therefore the result is the sum of two numbers: the bytes of the weights,
        which are in host memory already, and this rank's share of the free memory.
        """
        ranks = max(local_ranks(), self.rank_and_count[1] if self.rank_and_count else 1)
        return max(0, self.held_bytes + (memory.free - memory.reserve) // ranks)

    def disable_pinning(self, buffer: HostBuffer, cause: str) -> None:
        """Pin no more weights of this model, and warn."""
        self.pins = False
        warnings.warn(
            f"The host memory of {buffer.name} ({size(buffer.nbytes)}) could not be pinned after {size(self.pinned_bytes)} "
            f"of other weights ({cause}). It and the weights after it are copied from pageable memory, which is "
            "slower: a thread of its own sends them through a small pinned ring. Lower the option pin_memory, or free or add "
            "host memory; in a container, raise its memory limit.",
            stacklevel=2,
        )
