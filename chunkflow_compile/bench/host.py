"""The host's own work: the seconds that issuing a call takes, without waits for room in the queues of a GPU.

The host waits for the device after every few instructions of our executors and launches of Triton's kernels, and its clock
stands still then.  Its CPU time would be no measure where CUDA polls while a queue is full.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from chunkflow_compile.placed.offload import cycles, programs
from chunkflow_compile.private_torch.inductor import PyCodeCache, autotuner
from chunkflow_compile.runtime.executor import Executor

# The queue of a stream holds about a thousand kernels and copies; between two launches of Triton's there are at most a few
# others, and in a region, which is one instruction, a dozen kernels.
EVERY = 50
SAMPLES = 10


class HostTime(NamedTuple):
    """``seconds``: of the host in a call.  ``waits``: how often its clock stood still; if never, the queue may have been
    full, and ``seconds`` is an upper bound."""

    seconds: float
    waits: int


def host_time(
    call: Callable[[], Any],
    executors: Iterable[Executor],
    synchronize: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> HostTime:
    """What a call takes the host.  ``synchronize``: waits for the device, after every ``EVERY`` instructions of ``executors``
    and launches of Triton's kernels."""
    issued, waits, waited = 0, 0, 0.0

    def pause(_: object = None) -> None:
        nonlocal issued, waits, waited
        issued += 1
        if issued % EVERY == 0:
            begin = now()
            synchronize()
            waited += now() - begin
            waits += 1

    with _after_instructions(executors, pause), _after_launches(pause):
        synchronize()
        begin = now()
        call()
        return HostTime(now() - begin - waited, waits)


def executors_of(model: nn.Module) -> list[Executor]:
    """Those of the programs and cycles of a model; none if ChunkFlow does not run it."""
    return [executor for cycle in (*programs(model), *cycles(model)) for executor in cycle.executors]


@contextlib.contextmanager
def _after_instructions(executors: Iterable[Executor], pause: Callable[[object], None]) -> Iterator[None]:
    kept = [(executor, executor.instructions) for executor in executors]
    try:
        for executor, instructions in kept:
            executor.instructions = list(chain.from_iterable((issue, pause) for issue in instructions))
        yield
    finally:
        for executor, instructions in kept:
            executor.instructions = instructions


class _Paused:
    """A kernel of a module that Inductor has generated, with a pause after each launch."""

    def __init__(self, kernel: Any, pause: Callable[[], None]) -> None:
        launch = kernel.run

        def run(*args: Any, **kwargs: Any) -> None:
            launch(*args, **kwargs)
            pause()

        self.run = run


@contextlib.contextmanager
def _after_launches(pause: Callable[[], None]) -> Iterator[None]:
    """Generated code calls a kernel by its name in its module, ``triton_poi_fused_add_0.run(...)``."""
    kernels = autotuner()
    names = [
        (vars(module), name, kernel)
        for module in PyCodeCache.modules
        for name, kernel in vars(module).items()
        if isinstance(kernel, kernels)
    ]
    try:
        for module, name, kernel in names:
            module[name] = _Paused(kernel, pause)
        yield
    finally:
        for module, name, kernel in names:
            module[name] = kernel
