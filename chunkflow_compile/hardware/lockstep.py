"""Ranks of a calibration that do the same work at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from chunkflow_compile.runtime.link import Port

from .contention import REPEATS
from .stopwatch import Stopwatch

# Number of collectives per measurement.  Together they take a few hundred milliseconds, so that enough other work runs
# at the same time.  The number is fixed, because all ranks must run the same number of collectives.
EXCHANGES = 40
_TIMEOUT = timedelta(minutes=2)


def rank_device(kind: str, rank: int) -> torch.device:
    """Return the device that a rank measures, and limit the rank to one CPU thread."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def process_group(backend: str, rank: int, ranks: int, folder: str) -> Iterator[None]:
    """A context with a default process group of ``ranks`` ranks, which connect through a file in ``folder``.  A rank
    leaves its context only after all ranks have reached the ends of their contexts."""
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=ranks, timeout=_TIMEOUT)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def rounds(device: torch.device, copy: Callable[[], object], calls: int) -> Iterator[list[float]]:
    """Run rounds of ``calls`` copies.  All ranks begin each round at the same time.  For each round, yield a list with
    the seconds of every rank.  The first round is a warm-up that touches all memory."""
    for _ in range(1 + REPEATS):
        dist.barrier()
        watch = Stopwatch(device)
        for _ in range(calls):
            copy()
        yield [seconds for (seconds,) in gathered(device, [watch.stop()])]


def gathered(device: torch.device, mine: Sequence[float]) -> list[list[float]]:
    """All-gather a list of numbers, whose length is equal on all ranks.  Returns one list per rank, in rank order."""
    values = torch.tensor(mine, dtype=torch.float64, device=device if dist.get_backend() == "nccl" else "cpu")
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    return [each.tolist() for each in everyone]


def all_to_all(device: torch.device, size: int, ranks: int, port: Port | None = None) -> Callable[[], object]:
    """Return a function that exchanges ``size`` bytes among the ranks.  ``port``: the port of an emulated link, which
    delays the exchange, or None."""
    size -= size % ranks
    sent, received = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))

    def exchange() -> None:
        dist.all_to_all_single(received, sent)
        if port is not None:
            port.send("collective", size * (ranks - 1) // ranks)

    return exchange
