"""Peers: the ranks of a node that keep a piece of each weight on their devices, where the others pull from.

All of them deal out the same weights in the same order; after that, none waits for another because of a weight.  Host devices
have shared memory for a piece; torch hands memory of a GPU to other processes, and keeps it until all have dropped it.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import inspect
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pieces import Part, parts, piece_bytes
from chunkflow_compile.units import size

from .bytes import flat_bytes
from .groups import Group, numbers
from .host_buffer import HostBuffer
from .mapping import Descriptor, map_file, memory_file
from .node import Node, rendezvous
from .pieces import Pieces

_log = logging.getLogger(__name__)


class Peers:
    """The ranks that keep pieces for each other.  ``place``: of this one among them.  ``ranks``: how many they are."""

    def __init__(self, node: Node, device: torch.device) -> None:
        """Raises ChunkflowError if a GPU cannot read the memory of another's."""
        self._node = node
        self._device = device
        self.place = node.ranks.index(node.rank)
        self.ranks = len(node.ranks)
        if device.type == "cuda":
            self._check_access()

    @staticmethod
    def meet(group: Group, device: torch.device, weights: Sequence[tuple[str, int]]) -> Peers:
        """All ranks of the group call it.  ``weights``: names and bytes of those that they place.

        Raises ChunkflowError if one does not call it, or names other weights, or if they are not all on this machine.
        """
        node = rendezvous(group)
        if node is None or len(node.ranks) < len(group.ranks):
            found = (group.rank,) if node is None else node.ranks
            if node is not None:
                node.close()
            raise ChunkflowError(
                f"peers keeps weights on the devices of all {len(group.ranks)} ranks of the group, and {numbers(found)} "
                "cannot reach the memory of the others, which are on another machine, of another user, or in a container "
                "with process numbers of its own (--pid). Leave out peers, or pass as share the group of the ranks of one "
                "machine."
            )
        try:
            peers = Peers(node, device)
            peers._check_same(weights)
            return peers
        except BaseException as error:
            node.close(error)
            raise

    def close(self) -> None:
        """Leave: nothing more is dealt.  Memory of pieces is free once no rank has them, on a GPU when torch next looks."""
        self._node.close()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()

    def deal(self, buffers: Sequence[HostBuffer]) -> None:
        """Deal out these weights: each rank copies its piece of each to its device, and opens those of the others.

        One whose values differ between ranks is not dealt out, on any rank.
        Raises ChunkflowError if the ranks name other weights, if one has no room, or has ended.
        """
        if not self._node.meets:
            raise ChunkflowError(
                "These weights can go to the devices of the ranks no more, because a rank has failed or ended while they "
                "did: call chunkflow_compile.restore(model) on each rank, and place the model again."
            )
        self._check_same([(buffer.name, buffer.nbytes) for buffer in buffers])
        if not buffers:
            return
        versions = [buffer.version for buffer in buffers]  # before the values are read
        sizes = [piece_bytes(buffer.nbytes, self.ranks) for buffer in buffers]
        held = zip(*(memory.split(sizes) for memory in self._memories(buffers, sizes)), strict=True)
        dealt = [
            Pieces(pieces, self.place, buffer.nbytes, version, 0, buffer.nbytes)
            for buffer, pieces, version in zip(buffers, held, versions, strict=True)
        ]
        differ = [b.name for b, pieces in zip(buffers, dealt, strict=True) if not self.same(b, pieces)]
        everywhere = {name for names in self._node.gather(differ) for name in names}
        if everywhere:
            _log.warning(
                "%s weights, such as %s, have other values on some ranks, and stream from host memory: pieces on the devices "
                "of several ranks need equal values",
                len(everywhere),
                min(everywhere),
            )
        for buffer, pieces in zip(buffers, dealt, strict=True):
            buffer.pieces = None if buffer.name in everywhere else pieces

    def _check_same(self, kinds: Sequence[tuple[str, int]]) -> None:
        """Raise ChunkflowError, on all ranks, if they deal out other weights.  ``kinds``: their names and bytes."""
        digest = hashlib.sha256(repr([*kinds]).encode()).hexdigest()
        found = self._node.gather([digest, len(kinds), kinds[0][0] if kinds else ""])
        for rank, (other, count, name) in zip(self._node.ranks, found, strict=True):
            if other != found[0][0]:
                first = self._node.ranks[0]
                here, there = (f", from {n} on," if n else "" for n in (name, found[0][2]))
                raise ChunkflowError(
                    f"Rank {rank} puts {count} weights{here} on the devices of the peers, and rank {first} puts "
                    f"{found[0][1]}{there.rstrip(',')}. Give all ranks the same model, options and version of ChunkFlow."
                )

    def _memories(self, buffers: Sequence[HostBuffer], sizes: Sequence[int]) -> list[torch.Tensor]:
        """The memory of each rank's pieces, uint8, as this rank sees it, with the values in it."""
        error, file, memory = None, None, torch.empty(0)
        try:
            file, memory = self._allocated(sum(sizes))
            for buffer, piece in zip(buffers, memory.split(sizes), strict=True):
                for part, values in self._parts(buffer):
                    if part.owner == self.place:
                        piece.narrow(0, part.offset, part.nbytes).copy_(values)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except (RuntimeError, OSError) as cause:
            error = ChunkflowError(
                f"A piece of {len(buffers)} weights ({size(sum(sizes))}) finds no room on the device {self._device} ({cause})"
            )
        self._node.gather(None, error)
        if file is None:
            return self._opened_of_gpus(memory)
        files = self._node.exchange(file)
        opened = [memory if file is files[rank] else _mapped(files[rank], sum(sizes)) for rank in self._node.ranks]
        self._node.gather(None)  # until all have mapped them, no rank closes its file
        return opened

    def _allocated(self, nbytes: int) -> tuple[Descriptor | None, torch.Tensor]:
        """Memory that other ranks can open, uint8, and its file if it is shared memory of the host."""
        if self._device.type == "cuda":
            return None, torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        file = memory_file("chunkflow-pieces", max(1, nbytes))
        return file, _mapped(file, nbytes)

    def _opened_of_gpus(self, memory: torch.Tensor) -> list[torch.Tensor]:
        handed = base64.b64encode(ForkingPickler.dumps(reduce_tensor(memory))).decode()
        error, opened = None, list[torch.Tensor]()
        handles = self._node.gather(handed)
        try:
            for place, handle in enumerate(handles):
                own = place == self.place
                opened.append(memory if own else self._opened(*ForkingPickler.loads(base64.b64decode(handle))))
        except RuntimeError as cause:
            error = ChunkflowError(f"The memory of another rank's GPU cannot be opened ({cause}). Leave out peers")
        self._node.gather(None, error)
        return opened

    def _opened(self, rebuild: Callable[..., torch.Tensor], given: Sequence[Any]) -> torch.Tensor:
        """Memory of another rank's GPU, as memory of this rank's: pulls from it are then copies on this rank's own stream.

        Opened as what it is, it would take a context of this process on that GPU, some 400 MiB there for each rank, and torch
        would copy from it on that GPU's default stream.
        """
        how = inspect.signature(rebuild).bind(*given)
        how.arguments["storage_device"] = self._device.index
        how.arguments["event_sync_required"] = False  # its values are there: all ranks have synchronized
        return rebuild(*how.args)

    def same(self, buffer: HostBuffer, pieces: Pieces) -> bool:
        """Whether the pieces have the values that this rank has."""
        return all(
            torch.equal(pieces.held[part.owner].narrow(0, part.offset, part.nbytes), values.to(self._device))
            for part, values in self._parts(buffer)
        )

    def _parts(self, buffer: HostBuffer) -> Iterator[tuple[Part, torch.Tensor]]:
        """The parts of a weight, and their bytes in host memory."""
        values = flat_bytes(buffer.stored)
        for part in parts(0, buffer.nbytes, buffer.nbytes, self.ranks):
            yield part, values.narrow(0, part.begin, part.nbytes)

    def _check_access(self) -> None:
        """Raise ChunkflowError, on all ranks, if some GPU cannot read the memory of another's, or does not see it."""
        here = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        own, error = self._device.index, None
        for rank, (uuid, index) in zip(self._node.ranks, self._node.gather([here[own], own]), strict=True):
            if uuid not in here[index : index + 1]:
                error = ChunkflowError(
                    f"The GPU of rank {rank} is not number {index} in rank {self._node.rank}, so its memory cannot be opened "
                    "there. Let each rank see the same GPUs: unset CUDA_VISIBLE_DEVICES, and choose by LOCAL_RANK"
                )
            elif index != own and not torch.cuda.can_device_access_peer(self._device, index):
                error = ChunkflowError(
                    f"{self._device} cannot read the memory of cuda:{index} (no NVLink, or no peer access). Leave out peers"
                )
        self._node.gather(None, error)


def _mapped(file: Descriptor, nbytes: int) -> torch.Tensor:
    """Shared memory, uint8.  Raises OSError if it cannot be mapped."""
    pages = map_file(file, max(1, nbytes), mmap.MAP_SHARED)
    if pages is None:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pages[:nbytes]
