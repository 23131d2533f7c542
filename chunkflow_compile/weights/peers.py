"""Peers: the ranks of a node that shard weights.  Each rank keeps a piece of every sharded weight on its device, and
pulls the other pieces from the other ranks.

The ranks shard the weights of a program together, when the program is called for the first time on each rank.  Each
rank reports which weights its plan shards, or why it cannot continue.  All ranks then shard the same weights.  After
that, no rank waits for another rank's weights.  If the ranks run on the CPU, the pieces are in shared memory.  If they
run on GPUs, torch exports the memory of the pieces to the other processes, and frees it only after all of these
processes have dropped it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import ctypes
import inspect
import logging
import mmap
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pieces import PiecePart, parts, piece_bytes
from chunkflow_compile.units import size

from .bytes import flat_bytes
from .groups import Group, numbers
from .host_buffer import HostBuffer
from .locks import aside, when_collected
from .mapping import Descriptor, map_file, memory_file
from .node import Node, rendezvous
from .peer_pieces import Pieces
from .rounds import Left

_log = logging.getLogger(__name__)

# Seconds that a rank waits for the other ranks in :meth:`Peers.shard`.  Loading and encoding take equally long on each
# rank, so all ranks usually make their first call at about the same time.  A rank that has not made its first call within
# this time, and has not reported that it compiles, may have received another request, or no request.  The other ranks
# then continue without pieces.
_PATIENCE_S = 60.0
# Maximum bytes of a field that describes GPU memory.  A CUDA handle has 64 bytes, or more for memory in expandable
# segments.
_HANDLE = 4096
# The name of the shared memory in which torch counts the users of GPU memory.
_COUNTER = re.compile(rb"/torch_\d+_\d+_\d+")


class Peers:
    """The ranks that keep pieces of weights for each other.

    ``place``: the index of this rank among the ranks.  ``ranks``: the number of ranks.  ``pending``: the names of the
    weights that all ranks have placed but not sharded yet, because no program has used them.
    """

    def __init__(self, node: Node, device: torch.device, names: Iterable[str] = ()) -> None:
        """``names``: the names of the weights that all ranks place.  Raises ChunkflowError if a GPU cannot read the
        memory of another one."""
        self._node = node
        self._device = device
        self.place = node.ranks.index(node.rank)
        self.ranks = len(node.ranks)
        self.pending = {*names}
        self._warned_of_plans = False
        when_collected(self, _leave, node, self.pending)
        if device.type == "cuda":
            self._check_access()
        node.task = "sharded across the ranks"

    @staticmethod
    def connect(
        group: Group,
        device: torch.device,
        weights: Mapping[str, str],
        asks: Mapping[str, Any] | None = None,
        model: str | None = None,
    ) -> Peers:
        """Create the peers.  All ranks of the group call this.

        ``weights``: name -> dtype and shape of the weights that this rank places.  ``asks``, ``model``: as in
        :func:`rendezvous`.

        Raises ChunkflowError if a rank does not call this, if ranks name different weights, or if some rank is on
        another machine.
        """
        node = rendezvous(group, asks=asks, model=model)
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
        with contextlib.ExitStack() as closing:
            closing.push(node)
            peers = Peers(node, device, weights)
            _check_weights(node.ranks, node.gather({**weights}))
            closing.pop_all()
        return peers

    def close(self, error: BaseException | None = None) -> None:
        """Stop sharding weights.

        The memory of the pieces is freed when no rank uses them any more.  On a GPU, it is freed when torch next looks
        for memory that no rank uses.
        ``error``: the reason why this rank could not place the model, or None.  If there is a reason, the other ranks
        raise RankFailed.
        """

        with contextlib.suppress(ChunkflowError):  # raised if a rank has ended
            if error is None and self.pending:
                self._node.leave("has restored its model")
            self._node.close(error)
        self.pending.clear()
        if self._device.type == "cuda" and not self._node.forked:
            torch.cuda.ipc_collect()

    def first_call(self) -> contextlib.AbstractContextManager[None]:
        """A context for a call that may shard weights.  The other ranks wait for the call; if it fails, they raise its
        error."""
        return self._node.busy() if self.pending else contextlib.nullcontext()

    def shard(self, buffers: Sequence[HostBuffer], wanted: Collection[HostBuffer]) -> None:
        """Shard the weights that every rank's plan shards: each rank copies its piece of each weight to its device, and
        maps the other pieces.

        All ranks call this with the weights of the same program.  ``wanted``: the weights that the plan of this rank
        shards.
        A weight whose values differ between ranks, or that is packed on some ranks only, is not sharded on any rank.
        If the ranks call different programs, or one of them does not call this within a minute of the others, no weight
        is sharded from then on.
        Raises ChunkflowError, on all ranks, if a rank fails in its first call, runs out of memory, or has ended.
        """
        if not (self._node.takes_part or self._node.forked):
            return
        try:
            found = self._node.agree({b.name: [b.nbytes, b in wanted] for b in buffers}, _PATIENCE_S)
            chosen, differ = self._chosen(buffers, found)
            if chosen:
                differ |= self._shard(chosen)
        except Left as why:
            self._end(str(why))
            return
        except BaseException as error:
            self._node.fail(error)
            if not (self._node.takes_part or self._node.forked):
                self.pending.clear()
            raise
        self.pending -= {name for each in found for name in each}
        if differ:
            _log.warning(
                "%s weights, such as %s, have other values on some ranks, and stream from host memory: pieces on the devices "
                "of several ranks need equal values",
                len(differ),
                min(differ),
            )

    def _end(self, why: str) -> None:
        """Stop sharding weights, on all ranks."""
        self.pending.clear()
        self._node.close()
        _log.warning(
            "%s, so the weights that are not sharded yet stream from host memory on all ranks. To shard them, restore the "
            "model on each rank and place it again",
            why[:1].upper() + why[1:],
        )

    def _chosen(
        self, buffers: Sequence[HostBuffer], found: Sequence[Mapping[str, Sequence[Any]]]
    ) -> tuple[list[HostBuffer], set[str]]:
        """Return the weights to shard, and the names of the weights that cannot be sharded although all plans shard them.
        The sizes of these weights differ, because only some ranks have packed them.

        ``found``: for each rank, name -> (bytes of the weight, whether the rank wants to shard it).
        Raises Left on all ranks if the programs of the ranks have no weight in common.
        """
        ranks = self._node.ranks
        shared = set.intersection(*map(set, found))
        if not shared:
            ran = "; ".join(
                f"rank {r}: {len(each)} weights from {next(iter(each), 'none')} on"
                for r, each in zip(ranks, found, strict=True)
            )
            raise Left(f"the ranks run different parts of the model ({ran})")
        by_all = {name for name in shared if all(each[name][1] for each in found)}
        differ = {name for name in by_all if len({each[name][0] for each in found}) > 1}
        wants = {rank: sum(wanted for _, wanted in each.values()) for rank, each in zip(ranks, found, strict=True)}
        if max(wants.values()) > len(by_all) and not self._warned_of_plans:
            self._warned_of_plans = True
            _log.warning(
                "The plans of the ranks shard different weights of the %s from %s on (%s), so the ranks shard the %s that "
                "all plans shard. Plans differ with the sizes of the inputs, and with the options. Other parts are not named",
                len(buffers),
                buffers[0].name,
                ", ".join(f"rank {rank}: {count}" for rank, count in wants.items()),
                len(by_all),
            )
        return [b for b in buffers if b.name in by_all - differ], differ

    def _shard(self, buffers: Sequence[HostBuffer]) -> set[str]:
        """Shard weights that have the same size on all ranks.  Returns the names of the weights that are not sharded
        because their values differ."""

        versions = [buffer.version for buffer in buffers]  # read before the values, so that a later write is noticed
        sizes = [piece_bytes(buffer.nbytes, self.ranks) for buffer in buffers]
        held = zip(*(memory.split(sizes) for memory in self._memories(buffers, sizes)), strict=True)
        sharded = [
            Pieces(pieces, self.place, buffer.nbytes, version, 0, buffer.nbytes)
            for buffer, pieces, version in zip(buffers, held, versions, strict=True)
        ]
        differ = [b.name for b, pieces in zip(buffers, sharded, strict=True) if not self.same(b, pieces)]
        everywhere = {name for names in self._node.gather(differ) for name in names}
        for buffer, pieces in zip(buffers, sharded, strict=True):
            if buffer.name not in everywhere:
                buffer.shard_into(pieces)
        return everywhere

    def _memories(self, buffers: Sequence[HostBuffer], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Allocate and fill the pieces of this rank.  Return one tensor (uint8) per rank: the memory with all pieces of
        that rank, mapped in this process."""
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
        self._node.gather(None)  # wait until all ranks have mapped the files, before any rank closes one
        return opened

    def _allocated(self, nbytes: int) -> tuple[Descriptor | None, torch.Tensor]:
        """Allocate memory (uint8) that other ranks can open.  Return (file, memory); the file is None if the memory is
        on a GPU."""
        if self._device.type == "cuda":
            return None, torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        file = memory_file("chunkflow-pieces", max(1, nbytes))
        return file, _mapped(file, nbytes)

    def _opened_of_gpus(self, memory: torch.Tensor) -> list[torch.Tensor]:
        error, opened = None, list[torch.Tensor]()
        handles = self._node.gather(_handle(memory))
        try:
            for place, handle in enumerate(handles):
                opened.append(memory if place == self.place else self._opened(memory.numel(), handle))
        except (RuntimeError, ValueError) as cause:
            error = ChunkflowError(f"The memory of another rank's GPU cannot be opened ({cause}). Leave out peers")
        self._node.gather(None, error)
        return opened

    def _opened(self, nbytes: int, handle: Any) -> torch.Tensor:
        """Open the memory of another rank's GPU as if it were on this rank's GPU, so that pulls are copies on this rank's
        own stream.

        If it were opened as memory of the other GPU, this process would create a context there (some 400 MiB per rank),
        and torch would copy on the default stream of that GPU.  Raises ValueError if ``handle`` is not a result of
        :func:`_handle`.
        """
        given = {
            **_checked_handle(handle, nbytes),
            "tensor_cls": torch.Tensor,
            "tensor_size": torch.Size([nbytes]),
            "tensor_stride": (1,),
            "tensor_offset": 0,
            "storage_cls": torch.storage.TypedStorage,
            "dtype": torch.uint8,
            "storage_device": self._device.index,
            "requires_grad": False,
            "event_sync_required": False,  # not needed, because each rank synchronizes after it has filled its pieces
        }
        opened: torch.Tensor = rebuild_cuda_tensor(**given)
        return opened

    def same(self, buffer: HostBuffer, pieces: Pieces) -> bool:
        """Whether the pieces have the same values as the weight on this rank."""
        return all(
            torch.equal(pieces.held[part.owner].narrow(0, part.offset, part.nbytes), values.to(self._device))
            for part, values in self._parts(buffer)
        )

    def _parts(self, buffer: HostBuffer) -> Iterator[tuple[PiecePart, torch.Tensor]]:
        """Yield the parts of a weight with their bytes in host memory."""
        values = flat_bytes(buffer.stored)
        for part in parts(0, buffer.nbytes, buffer.nbytes, self.ranks):
            yield part, values.narrow(0, part.begin, part.nbytes)

    def _check_access(self) -> None:
        """Raise ChunkflowError on all ranks if the GPU of any rank cannot read the memory of another rank's GPU, or if two
        ranks see a GPU under different indices."""
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
    """Map shared memory as uint8.  Raises OSError if mmap fails."""
    pages = map_file(file, max(1, nbytes), mmap.MAP_SHARED)
    if pages is None:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return pages[:nbytes]


def _leave(node: Node, pending: set[str]) -> None:
    """Notify the other ranks that the model of this rank was dropped.  The notification is sent from another thread,
    because the garbage collector calls this function."""

    def leave() -> None:
        with contextlib.suppress(ChunkflowError):
            node.leave("has dropped its model")

    if pending and node.takes_part:
        aside(leave)


# The fields that describe GPU memory to other ranks.  Their names are parameters of torch's rebuild_cuda_tensor.
_BYTES = "storage_handle", "ref_counter_handle", "event_handle"
_NUMBERS = "storage_size_bytes", "storage_offset_bytes", "ref_counter_offset"


def _handle(memory: torch.Tensor) -> dict[str, Any]:
    """Return a JSON-serialisable description with which other processes can open GPU memory.  ``memory``: a whole
    storage (uint8, [n])."""
    rebuild, given = reduce_tensor(memory)
    fields = inspect.signature(rebuild).bind(*given).arguments
    return {
        **{name: base64.b64encode(fields[name]).decode() for name in _BYTES},
        **{name: fields[name] for name in _NUMBERS},
    }


def _checked_handle(handle: Any, nbytes: int) -> dict[str, Any]:
    """Convert a description from another rank to arguments for rebuild_cuda_tensor.  Raises ValueError unless each
    field has a valid type and length."""
    if not isinstance(handle, dict) or {*handle} != {*_BYTES, *_NUMBERS}:
        raise ValueError("it has other fields than a handle")
    checked = dict[str, Any]()
    for name in _BYTES:
        try:
            checked[name] = base64.b64decode(handle[name], validate=True)
        except (TypeError, binascii.Error) as error:
            raise ValueError(f"{name} is no bytes") from error
        if len(checked[name]) > _HANDLE:
            raise ValueError(f"{name} has {len(checked[name])} bytes")
    for name in _NUMBERS:
        if type(handle[name]) is not int or not 0 <= handle[name] < 1 << 48:
            raise ValueError(f"{name} is {handle[name]!r}")
        checked[name] = handle[name]
    if not _COUNTER.fullmatch(checked["ref_counter_handle"]):
        raise ValueError("ref_counter_handle is no name of shared memory")
    if checked["storage_size_bytes"] < nbytes:
        raise ValueError(f"its memory has {checked['storage_size_bytes']} bytes, not {nbytes}")
    return checked


def _check_weights(ranks: Sequence[int], found: Sequence[Mapping[str, str]]) -> None:
    """Raise the same ChunkflowError on every rank if any rank places different weights from the first rank.

    ``found``: for each rank, name -> dtype and shape.
    """
    firsts = found[0]
    for rank, others in zip(ranks, found, strict=True):
        for name in (*firsts, *others):
            if others.get(name) != firsts.get(name):
                here, there = (
                    f"{each.get(name, 'missing')} on rank {r}, which places {len(each)} weights"
                    for r, each in ((rank, others), (ranks[0], firsts))
                )
                raise ChunkflowError(
                    f"The ranks place different models with peers: {name} is {here}, and {there}. Give all ranks the same "
                    "model, dtype and min_bytes."
                )
