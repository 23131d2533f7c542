"""The loader: it reads or copies weights into host memory in their final dtypes, or into files on the SSD."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch

from chunkflow_compile.passes.problem import Source

from .backing import Backing, FileSlice
from .bytes import alias, ordinary
from .checkpoint import CheckpointReader, Mappings
from .drive import Scratch
from .host_buffer import HostBuffer
from .host_memory import empty_pages, fill, near_cpus
from .limits import check_room, host_memory
from .mapping import close_pages, whole_pages
from .node import Node
from .packed import Packed, address_space, fits, mark_unfit, pack_into
from .sharing import LoadRequest, SharedPages
from .staging import GpuStagings

# Bytes of weights to load between two checks of the free memory; a check takes half a millisecond.
_CHECKED = 256 << 20
# A function that takes the name and the tensor of a weight, and returns the dtype with which to load the weight.
DtypeOf = Callable[[str, torch.Tensor], torch.dtype]


class WeightLoader:
    """Creates the host tensors for one move of weights to host memory, one weight after the other.

    Each weight gets its own pages, which can be pinned for a GPU and shared with other ranks.  If no pages are needed,
    because programs run on the CPU, a weight may keep its present memory instead.
    """

    def __init__(
        self,
        device: torch.device,
        weights: Sequence[tuple[str, torch.Tensor]],
        dtype_of: DtypeOf,
        *,
        pages: bool,
        node: Node | None = None,
        on_drive: Collection[str] = (),
        packs: Collection[str] = (),
        packable: Collection[str] = (),
        shards: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """``device``: the device on which programs run.  ``weights``: all weights of the move, with their names.
        ``dtype_of``: a function that returns the dtype with which to load a weight.  ``pages``: whether each weight
        gets separate pages.  ``node``: the ranks with which to share the weights, or None; all of these ranks move the
        weights of the same model.  ``on_drive``: the names of the weights to leave on the SSD.  ``packs``: the names of the
        weights to pack now.  ``packable``: the names of the weights that may be packed later.
        ``shards``: name -> an id of the part of the weight that this rank has; ranks share a weight only if they have
        the same part.

        Raises ChunkflowError if the weights do not fit in host memory.
        """
        self._cpus = near_cpus(device)
        # if memory is short, read the checkpoint without the page cache
        direct = host_memory().free < 2 * sum(w.nbytes for _, w in weights)
        self._reader = CheckpointReader(direct, self._cpus)
        self._shards = shards or {}
        self._pages = pages or node is not None
        self._dtype_of = dtype_of
        self._stagings = GpuStagings()
        self._node = node
        self._on_drive = on_drive
        self._packs = packs
        self._packable = packable
        self._kept: set[str] = set()
        self._ahead: tuple[str, Future[torch.Tensor]] | None = None  # a weight that is read while another one is packed
        self._thread = ThreadPoolExecutor(1, "chunkflow-read-ahead")
        self._unchecked = 0
        self._shared: SharedPages | None = None
        try:
            self._weights = {name: self._request(name, tensor) for name, tensor in weights}
            if node is not None:
                self._shared = SharedPages(node, [w for w in self._weights.values() if not w.stays])
            read = [
                w.name for w in self._weights.values() if w.source.compressed and w.part is not None and self._writes(w)
            ]
            self._after = dict(pairwise(read))
            copied = [w for w in self._weights.values() if self._takes_memory(w)]
            self._todo = sum(w.takes for w in copied)
            # the maximum and not the sum, because weights are placed one after the other
            self._temporary = max((w.takes_temporarily for w in copied), default=0)
            check_room(self._todo + self._temporary)
        except BaseException as error:
            self.close(error)
            raise

    def __contains__(self, name: str) -> bool:
        """Whether a weight of this name is part of the move."""
        return name in self._weights

    @property
    def reads(self) -> int:
        """The number of bytes that all ranks together read from files."""
        return sum(w.part.nbytes for w in self._weights.values() if w.part is not None and not w.stays)

    def work(self, name: str) -> int:
        """Return how many bytes of a weight this rank writes: 0 if the weight keeps its memory, or if another rank writes
        it."""
        weight = self._weights.get(name)
        return weight.nbytes if weight is not None and self._writes(weight) else 0

    def place(self, name: str, tensor: torch.Tensor) -> HostBuffer | None:
        """Return the new host memory of a weight: pages, a mapping of a file, or its present memory.

        Returns None for a shared weight that another rank writes or that is still in its checkpoint; see :meth:`placed`.
        Raises ChunkflowError if the weight is in a checkpoint that cannot be read.
        """
        weight, values = self._weights[name], alias(tensor)
        if weight.stays:
            if weight.source.file and weight.part is not None:
                weight.part.file.check()
                return HostBuffer(values, FileSlice(values, weight.part))
            return HostBuffer(ordinary(values))
        if not self._writes(weight):
            return None
        self._take(weight)
        if self._shared is None or name not in self._shared:
            return self._private(weight, values)
        if weight.source.file:
            self._shared.keep(name, self._stored(weight, values))
        elif weight.source.compressed:
            self._pack(self._shared.backing(name).host, weight, values)
        else:
            self._fill(self._shared.backing(name).host, weight, values)
        return None if self.in_file(name) else self._in_shared_memory(self._shared, weight, values)

    def in_file(self, name: str) -> bool:
        """Whether a weight is still in a file.  Such a weight can stay there, without host memory, until all weights
        are placed."""
        return self._weights[name].part is not None

    def placed(self, name: str, tensor: torch.Tensor) -> HostBuffer:
        """Return the host memory of a shared weight after all ranks have written their weights.  If the values on this
        rank differ from the values that were written, return private memory.

        Raises ChunkflowError if the weight does not fit in private memory.
        """
        assert self._shared is not None
        weight, values = self._weights[name], alias(tensor)
        if self._shared.same(name, values):
            return self._in_shared_memory(self._shared, weight, values)
        return self._unshared(weight, values)

    def report(self) -> None:
        """Log on all ranks which weights differ."""
        if self._shared is not None:
            self._shared.report()

    def _in_shared_memory(self, shared: SharedPages, weight: LoadRequest, values: torch.Tensor) -> HostBuffer:
        """Return the memory of a shared weight after it was written, or private memory if the weight was to be packed
        and its values do not fit in the packed form."""
        backing = shared.backing(weight.name)
        if weight.source.compressed and not fits(backing.host):
            # the shared memory is too small for the unpacked values
            return self._unshared(replace(weight, source=replace(weight.source, values=0)), values)
        self._kept.add(weight.name)
        if weight.source.compressed:
            backing = Packed(address_space(weight.like), backing)
        return HostBuffer(backing.host, backing)

    def _unshared(self, weight: LoadRequest, values: torch.Tensor) -> HostBuffer:
        """Return private memory for a weight that other ranks share.  Raises ChunkflowError if it does not fit in host
        memory."""
        if not weight.source.file:
            check_room(weight.takes + weight.takes_temporarily if weight.source.compressed else weight.takes)
        return self._private(weight, values)

    def _private(self, weight: LoadRequest, values: torch.Tensor) -> HostBuffer:
        """Store the values of a weight in private memory or in a scratch file of this rank, and return the new buffer."""
        filled = self._filled(weight, values)
        packed = empty_pages(weight.stored) if weight.source.compressed else None
        if packed is None or not pack_into(packed, filled, self._cpus):
            kept = self._scratch.keep(filled) if weight.source.file else Backing(filled)
        else:
            close_pages(filled)
            kept = Packed(filled, self._scratch.keep(packed) if weight.source.file else Backing(packed))
        return HostBuffer(kept.host, kept, compressible=weight.name in self._packable)

    def close(self, error: BaseException | None = None) -> None:
        """End the threads, free shared pages that no weight uses, and close the node.  ``error``: the error with which
        the move has failed, or None."""
        if self._node is not None:
            self._node.close(error)
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._reader.close()
        if self._shared is not None:
            self._shared.leave(self._kept)

    def _request(self, name: str, tensor: torch.Tensor) -> LoadRequest:
        values, dtype = alias(tensor), self._dtype_of(name, tensor)
        like = torch.empty_strided(values.shape, values.stride(), dtype=dtype, device="meta")
        source = Source(file=name in self._on_drive, values=like.nbytes if name in self._packs else 0)
        same = dtype == values.dtype and not source.compressed
        stays = same and not (self._pages or name in self._packable) and values.device.type == "cpu"
        part = None if stays else self._mappings.part(values)
        stays = stays or (same and source.file and part is not None and not values.is_inference())
        frees = values.nbytes if values.device.type == "cpu" and part is None else 0
        shard = self._shards.get(name)
        return LoadRequest(name, like, values.dtype, part, source, stays, frees, shard)

    def _writes(self, weight: LoadRequest) -> bool:
        """Whether this rank writes a weight, for itself or for all ranks."""
        shared = self._shared
        return not weight.stays and (shared is None or weight.name not in shared or weight.name in shared.writes)

    def _takes_memory(self, weight: LoadRequest) -> bool:
        return not weight.source.file and self._writes(weight)

    def _take(self, weight: LoadRequest) -> None:
        """Count a weight that is about to take memory.  Check from time to time whether the remaining weights still
        fit, because other processes may take memory meanwhile."""
        if self._takes_memory(weight):
            self._unchecked += weight.nbytes
            if self._unchecked >= _CHECKED:
                self._unchecked = 0
                check_room(self._todo + self._temporary)
            self._todo -= weight.takes

    def _stored(self, weight: LoadRequest, values: torch.Tensor) -> torch.Tensor:
        """Return pages with the values of a weight in the form in which they are stored, raw or packed."""
        if not weight.source.compressed:
            return self._filled(weight, values)
        packed = empty_pages(weight.stored)
        self._pack(packed, weight, values)
        return packed

    def _pack(self, packed: torch.Tensor, weight: LoadRequest, values: torch.Tensor) -> None:
        """Pack a weight that ranks share.  If the values do not fit in the packed form, record this in the shared memory,
        where the other ranks read it."""
        if not pack_into(packed, self._filled(weight, values), self._cpus):
            mark_unfit(packed)

    def _filled(self, weight: LoadRequest, values: torch.Tensor) -> torch.Tensor:
        """Return pages with the values of a weight.  If another weight is to be packed after this weight, start to read
        the other weight on a separate thread."""
        if self._ahead is not None and self._ahead[0] == weight.name:
            host = self._ahead[1].result()
            self._ahead = None
        else:
            host = self._pages_with(weight, values)
        if self._ahead is None and (following := self._after.get(weight.name)) is not None:
            self._ahead = following, self._thread.submit(self._pages_with, self._weights[following])
        return host

    def _pages_with(self, weight: LoadRequest, values: torch.Tensor | None = None) -> torch.Tensor:
        """Return new pages with the values of a weight.  ``values``: the values, or None if the weight is in a file."""

        # set the modes here, because ``_thread`` does not inherit the modes of the thread that submits the work
        with torch.inference_mode(False), torch.no_grad():
            host = empty_pages(weight.like)
            self._fill(host, weight, values)
        return host

    def _fill(self, host: torch.Tensor, weight: LoadRequest, values: torch.Tensor | None) -> None:
        if weight.part is not None:
            self._reader.read(weight.part, host, weight.read_as)
        elif values is not None:
            fill(host, values, self._cpus, self._stagings)

    @cached_property
    def _scratch(self) -> Scratch:
        shared = self._shared or ()
        own = [w for w in self._weights.values() if w.source.file and not w.stays and w.name not in shared]
        return Scratch.made(sum(whole_pages(w.nbytes) for w in own))

    @cached_property
    def _mappings(self) -> Mappings:
        return Mappings()


def keep_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of the tensor.  As the ``DtypeOf`` of a loader, this function lets each weight keep its
    dtype."""
    return tensor.dtype
