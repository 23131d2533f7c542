"""Measurement of pulls, that is, copies from the devices of other ranks.  All ranks pull at the same time, as in the
runtime.

The results are the rate of the pulls, and the factors by which pulls and other work slow each other down.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES
from chunkflow_compile.runtime.link import Port
from chunkflow_compile.runtime.torch_cuda import TorchCuda
from chunkflow_compile.units import size
from chunkflow_compile.weights.groups import group_of
from chunkflow_compile.weights.host_buffer import HostBuffer
from chunkflow_compile.weights.peer_pieces import Pieces
from chunkflow_compile.weights.peers import Peers
from chunkflow_compile.weights.source import take

from .contention import LEAST_SLOWDOWN, MIB, compute_slowdown, contended_seconds, factor, median_seconds
from .lockstep import EXCHANGES, all_to_all, gathered, process_group, rank_device, rounds

# Size in bytes of the weight that is pulled.  It is larger than a cache, so that no pull reads from a cache.
_WEIGHT = 256 * MIB
# How often the whole weight is pulled per round on GPUs.  A round takes 25 ms at 340 GB/s, which is long compared with
# the skew between ranks after a barrier.
_WALKS = 32
_EXCHANGED = 16 * MIB


@dataclass(frozen=True)
class Pulls:
    """The results of measuring pulls.  All ranks pull the chunks of a weight from each other at the same time; the time
    and the numbers of bytes are averages per chunk.

    ``seconds``: the time on the slowest rank.  ``nbytes``: the size of a chunk.  ``from_others``: the bytes of a chunk
    that come from other ranks.
    ``exchange_slowdowns``: the factor by which collectives slow pulls, and the factor by which pulls slow collectives;
    None if these factors were not measured.  ``compute_slowdown``: the factor by which pulls slow compute.
    """

    seconds: float
    nbytes: float
    from_others: float
    exchange_slowdowns: tuple[float, float] | None
    compute_slowdown: float

    def rate(self, memory_rate: float, chunk_s: float) -> int:
        """Return the bytes/s of pulls from other ranks.  With this rate, :meth:`Hardware.pull_seconds` predicts the
        measured time of a chunk.

        ``memory_rate``: the maximum bytes/s at which pulled bytes are written to memory.  ``chunk_s``: seconds to start
        a copy.
        """
        own = 2 * (self.nbytes - self.from_others) / memory_rate
        return round(self.from_others / max(self.seconds - own - chunk_s, self.from_others / memory_rate))


def measure_pulls(
    rank: int, kind: str, folder: str, emulated: LinkEmulation | None, ranks: int, exchanges: bool
) -> None:
    """Measure the pulls between the ranks.  Rank 0 saves the :class:`Pulls`, or the reason why the ranks cannot pull.

    ``exchanges``: whether to measure pulls during collectives as well.
    """
    device = rank_device(kind, rank)
    port = None if emulated is None else Port(replace(emulated, bandwidth=emulated.peers))
    with process_group("nccl" if kind == "cuda" and exchanges else "gloo", rank, ranks, folder):
        exchange = all_to_all(device, _EXCHANGED, ranks, port) if exchanges else None
        found: Pulls | str
        try:
            with _sharded(device) as pieces:
                found = pulls_of(device, pieces, port, exchange)
        except ChunkflowError as error:  # raised on all ranks, because they exchange their errors
            found = str(error)
        if rank == 0:
            torch.save(found, Path(folder) / "rank0.pt")


@contextlib.contextmanager
def _sharded(device: torch.device) -> Iterator[Pieces]:
    """A context with a weight that is sharded over the devices of all ranks.  Raises ChunkflowError on all ranks if
    they cannot pull from each other."""
    group = group_of()
    assert group is not None
    peers = Peers.connect(group, device, {"pulled": f"{_WEIGHT} bytes"})
    try:
        buffer = HostBuffer(torch.ones(_WEIGHT, dtype=torch.uint8), name="pulled")
        peers.shard([buffer], {buffer})
        assert buffer.pieces is not None  # sharded, because the values are equal on all ranks
        yield buffer.pieces
    finally:
        peers.close()


def pulls_of(
    device: torch.device, pieces: Pieces, port: Port | None = None, exchange: Callable[[], object] | None = None
) -> Pulls:
    """Measure the pulls of a weight.  All ranks of the default process group call this.

    ``exchange``: a function that runs a collective of these ranks, or None to measure no collectives.  ``port``: the
    port of an emulated link for pulls and collectives, or None.
    """
    chunks = chunks_of(pieces)
    pull = puller(device, chunks, port)
    calls = len(chunks) * (_WALKS if device.type == "cuda" else 1)
    lane = torch.cuda.stream(TorchCuda(device).stream("pull")) if device.type == "cuda" else contextlib.nullcontext()
    with lane:
        found = [*rounds(device, pull, calls)][1:]
    own_s = statistics.median(seconds[dist.get_rank()] for seconds in found) / calls
    factors = []
    if exchange is not None:
        uncontended_s = own_s, median_seconds(device, exchange, EXCHANGES)
        contended_s = contended_seconds(device, exchange, EXCHANGES, pull)
        factors = [factor(*pair) for pair in zip(contended_s, uncontended_s, strict=True)]
    factors.append(compute_slowdown(device, barrier=dist.barrier, copy=pull))
    *slowdowns, compute = map(max, zip(*gathered(device, factors), strict=True))
    return Pulls(
        seconds=statistics.median(map(max, found)) / calls,
        nbytes=pieces.numel() / len(chunks),
        from_others=pieces.from_others / len(chunks),
        exchange_slowdowns=(slowdowns[0], slowdowns[1]) if slowdowns else None,
        compute_slowdown=compute,
    )


def chunks_of(pieces: Pieces) -> list[Pieces]:
    """Split a weight into chunks of the default size, as programs do."""
    begins = range(0, pieces.numel(), DEFAULT_CHUNK_BYTES)
    return [pieces[begin : begin + DEFAULT_CHUNK_BYTES] for begin in begins]


def puller(device: torch.device, chunks: list[Pieces], port: Port | None = None) -> Callable[[], object]:
    """Return a function that pulls one chunk per call, in the same way as the runtime.  Its calls cycle through
    ``chunks``.

    ``port``: the port of an emulated link, which delays the pulls, or None.
    """
    targets = [torch.ones(chunk.numel(), dtype=torch.uint8, device=device) for chunk in chunks]
    turns = cycle(zip(targets, chunks, strict=True))
    if device.type == "cuda":
        cuda = TorchCuda(device)
        return lambda: cuda.copy(*next(turns))

    def pull() -> None:
        start = time.monotonic()
        target, chunk = next(turns)
        take(target, chunk)
        if port is not None:
            port.send("copy", chunk.from_others, start)

    return pull


def pull_figures(found: Pulls | str, hardware: Hardware, ranks: int) -> Iterator[tuple[str, Any, str]]:
    """Yield the fields of a profile that describe pulls, each with its value and source.

    ``found``: the measured pulls, or the reason why no pulls were measured.  ``hardware``: the profile, in which the
    fields about pulls are not set yet.  ``ranks``: the number of ranks that pulled.
    """
    if isinstance(found, str):
        yield "peer_bandwidth", 0.0, found
        for field in ("pull_slowdown", "collective_pull_slowdown", "compute_pull_slowdown"):
            yield field, Hardware.__dataclass_fields__[field].default, "not measured, no pulls"
        return
    rate = found.rate(hardware.memory_rate, hardware.chunk_s)
    how = f"{ranks} ranks that pull chunks of {size(DEFAULT_CHUNK_BYTES)} at once, the slowest, less its own parts and starts"
    if why := replace(hardware, peer_bandwidth=rate).why_no_peers(ranks):
        rate, how = 0, f"0, because {why}"
    yield "peer_bandwidth", rate, how
    pull, collective = (2.0, 2.0) if found.exchange_slowdowns is None else found.exchange_slowdowns
    assumed = "not measured, collectives of one process only: a fair share"
    yield "pull_slowdown", round(pull, 2), "during an all-to-all of 16 MiB" if found.exchange_slowdowns else assumed
    yield (
        "collective_pull_slowdown",
        round(collective, 2),
        "during pulls of all ranks" if found.exchange_slowdowns else assumed,
    )
    compute = found.compute_slowdown if found.compute_slowdown >= LEAST_SLOWDOWN else 1.0
    yield "compute_pull_slowdown", round(compute, 2), "an MLP during pulls of all ranks"
