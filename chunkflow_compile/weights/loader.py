"""Loading: how the weights of one move get into host memory, from where, in which dtype, and into which pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

import torch

from .backing import FileSlice
from .bytes import alias, ordinary
from .checkpoint import CheckpointReader, Mappings
from .drive import Scratch
from .host_buffer import HostBuffer
from .host_memory import empty_pages, fill, near_cpus
from .limits import check_room, host_memory
from .mapping import whole_pages
from .node import Node
from .sharing import LoadRequest, SharedPages
from .staging import GpuStagings

# Bytes to fill until the free memory is looked at again, which takes half a millisecond.
_CHECKED = 256 << 20
# The dtype that a weight of this name gets.
DtypeOf = Callable[[str, torch.Tensor], torch.dtype]


class WeightLoader:
    """Makes the host tensors of the weights of one move, in their order.

    Each gets pages of its own, which can be pinned for a GPU and shared; on the CPU it may keep its memory instead.
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
        shards: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """``device``: where programs run.  ``weights``: all of the move, by name.  ``pages``: whether all get pages of their
        own.  ``node``: the ranks to share them with, which move the weights of the same model.  ``on_drive``: the names of
        those that go to the drive instead.  ``shards``: by name, which part of a weight this rank
        has; ranks share equal parts only."""
        self._cpus = near_cpus(device)
        # the page cache of the checkpoint would push out other memory if there is no room for both
        direct = host_memory().free < 2 * sum(w.nbytes for _, w in weights)
        self._reader = CheckpointReader(direct, self._cpus)
        self._shards = shards or {}
        self._pages = pages or node is not None
        self._dtype_of = dtype_of
        self._stagings = GpuStagings()
        self._node = node
        self._on_drive = on_drive
        self._kept: set[str] = set()
        self._unchecked = 0
        self._shared: SharedPages | None = None
        try:
            self._weights = {name: self._wanted(name, tensor) for name, tensor in weights}
            if node is not None:
                self._shared = SharedPages(node, [w for w in self._weights.values() if not w.stays])
            copied = [w for w in self._weights.values() if self._takes_memory(w)]
            self._todo = sum(w.takes for w in copied)
            self._twice = max((min(w.nbytes, w.frees) for w in copied), default=0)  # for a moment, one after the other
            check_room(self._todo + self._twice)
        except BaseException as error:
            self.close(error)
            raise

    @property
    def reads(self) -> int:
        """Bytes of files that all ranks read together."""
        return sum(w.part.nbytes for w in self._weights.values() if w.part is not None and not w.stays)

    def work(self, name: str) -> int:
        """Bytes of a weight that this rank writes; none if it stays, or if another rank writes it."""
        weight = self._weights.get(name)
        return weight.nbytes if weight is not None and self._writes(weight) else 0

    def place(self, name: str, tensor: torch.Tensor) -> HostBuffer | None:
        """The host memory of a weight from now on: pages, a mapping of a file, or where its values were.

        None for one that ranks share and that another one writes, or that lies in its checkpoint: see :meth:`placed`.
        Raises ChunkflowError if it lies in a checkpoint that cannot be read.
        """
        weight, values = self._weights[name], alias(tensor)
        if weight.stays:
            if weight.drive and weight.part is not None:
                weight.part.file.check()
                return HostBuffer(values, FileSlice(values, weight.part))
            return HostBuffer(ordinary(values))
        if not self._writes(weight):
            return None
        self._take(weight)
        if self._shared is None or name not in self._shared:
            return self._private(weight, values)
        if weight.drive:
            self._shared.keep(name, self._filled(weight, values))
        else:
            self._fill(self._shared.backing(name).host, weight, values)
        return None if self.in_file(name) else self._joined(self._shared, weight)

    def in_file(self, name: str) -> bool:
        """Whether a weight lies in its checkpoint, and so can stay there, without memory, until all weights are placed."""
        return self._weights[name].part is not None

    def placed(self, name: str, tensor: torch.Tensor) -> HostBuffer:
        """The memory of a weight that ranks have written; of its own if it has other values.

        Raises ChunkflowError if there is no room for that.
        """
        assert self._shared is not None
        weight, values = self._weights[name], alias(tensor)
        if self._shared.same(name, values):
            return self._joined(self._shared, weight)
        if not weight.drive:
            check_room(weight.takes)  # another copy than was planned
        return self._private(weight, values)

    def report(self) -> None:
        """Say on all ranks which weights differ."""
        if self._shared is not None:
            self._shared.report()

    def _joined(self, shared: SharedPages, weight: LoadRequest) -> HostBuffer:
        """The memory of a weight that ranks share and have written."""
        backing = shared.backing(weight.name)
        self._kept.add(weight.name)
        return HostBuffer(backing.host, backing)

    def _private(self, weight: LoadRequest, values: torch.Tensor) -> HostBuffer:
        """Memory of this rank, or a part of its own scratch file, with the values of a weight."""
        filled = self._filled(weight, values)
        if not weight.drive:
            return HostBuffer(filled)
        kept = self._scratch.keep(filled)
        return HostBuffer(kept.host, kept)

    def close(self, error: BaseException | None = None) -> None:
        """Give back threads and files, and leave the node.  ``error``: why the move has failed, if it has."""
        if self._node is not None:
            self._node.close(error)
        self._reader.close()
        if self._shared is not None:
            self._shared.leave(self._kept)

    def _wanted(self, name: str, tensor: torch.Tensor) -> LoadRequest:
        values, dtype = alias(tensor), self._dtype_of(name, tensor)
        drive, same = name in self._on_drive, dtype == values.dtype
        stays = same and not self._pages and values.device.type == "cpu"
        part = None if stays else self._mappings.part(values)
        stays = stays or (same and drive and part is not None and not values.is_inference())
        frees = values.nbytes if values.device.type == "cpu" and part is None else 0
        shard = self._shards.get(name)
        like = torch.empty_strided(values.shape, values.stride(), dtype=dtype, device="meta")
        return LoadRequest(name, like, values.dtype, part, drive, stays, frees, shard)

    def _writes(self, weight: LoadRequest) -> bool:
        """Whether this rank writes a weight, for itself or for all."""
        shared = self._shared
        return not weight.stays and (shared is None or weight.name not in shared or weight.name in shared.writes)

    def _takes_memory(self, weight: LoadRequest) -> bool:
        return not weight.drive and self._writes(weight)

    def _take(self, weight: LoadRequest) -> None:
        """Look again, from time to time, whether there is room for the rest: others take memory meanwhile."""
        if self._takes_memory(weight):
            self._unchecked += weight.nbytes
            if self._unchecked >= _CHECKED:
                self._unchecked = 0
                check_room(self._todo + self._twice)
            self._todo -= weight.takes

    def _filled(self, weight: LoadRequest, values: torch.Tensor) -> torch.Tensor:
        host = empty_pages(weight.like)
        self._fill(host, weight, values)
        return host

    def _fill(self, host: torch.Tensor, weight: LoadRequest, values: torch.Tensor) -> None:
        if weight.part is not None:
            self._reader.read(weight.part, host, weight.read_as)
        else:
            fill(host, values, self._cpus, self._stagings)

    @cached_property
    def _scratch(self) -> Scratch:
        """That of this rank."""
        shared = self._shared or ()
        own = [w for w in self._weights.values() if w.drive and not w.stays and w.name not in shared]
        return Scratch.made(sum(whole_pages(w.nbytes) for w in own))

    @cached_property
    def _mappings(self) -> Mappings:
        return Mappings()


def keep_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
    """Each weight keeps its dtype."""
    return tensor.dtype
