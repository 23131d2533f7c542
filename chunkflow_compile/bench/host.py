"""The host's own work: the seconds that issuing a call takes, without waits for room in the queues of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import nn

from chunkflow_compile.placed.offload import cycles, programs
from chunkflow_compile.runtime.executor import Executor

# The queue of a stream holds about a thousand kernels and copies; a region of one instruction has a dozen.
EVERY = 50
SAMPLES = 10


def host_seconds(
    call: Callable[[], Any],
    executors: Iterable[Executor],
    synchronize: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds that a call takes the host.  After every ``EVERY`` instructions of ``executors`` it waits for the device; the
    clock stands still then."""
    kept = [(executor, executor.instructions) for executor in executors]
    issued, waited = 0, 0.0

    def pause(_: object) -> None:
        nonlocal issued, waited
        issued += 1
        if issued % EVERY == 0:
            begin = now()
            synchronize()
            waited += now() - begin

    try:
        for executor, instructions in kept:
            executor.instructions = list(chain.from_iterable((issue, pause) for issue in instructions))
        synchronize()
        begin = now()
        call()
        return now() - begin - waited
    finally:
        for executor, instructions in kept:
            executor.instructions = instructions


def executors_of(model: nn.Module) -> list[Executor]:
    """Those of the programs and cycles of a model; none if ChunkFlow does not run it."""
    return [executor for sequence in (*programs(model), *cycles(model)) for executor in sequence.executors]
