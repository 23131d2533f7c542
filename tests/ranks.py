"""Ranks that run functions for tests: processes that keep what they have imported, with a process group for each test."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters


def _modules_of_ours() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.partition(".")[0] == "chunkflow_compile"]


@contextmanager
def _state_of_a_test() -> Iterator[None]:
    """The state of a process that a test may change, as it was before."""
    environment, random, threads = dict(os.environ), torch.get_rng_state(), torch.get_num_threads()
    log = logging.getLogger("chunkflow_compile")
    modules = {module: dict(vars(module)) for module in _modules_of_ours()}
    handlers, level = [*log.handlers], log.level
    torch._dynamo.reset()
    counters.clear()
    yield
    for module, names in modules.items():
        vars(module).update(names)
    for module in _modules_of_ours():  # what is said once in a process
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    log.handlers[:], log.level = handlers, level
    os.environ.clear()
    os.environ.update(environment)
    torch.set_rng_state(random)
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def as_rank(rank: int, world: int, meeting: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run ``work(rank, *args)`` in a process group of its own."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        with torch.no_grad():
            work(rank, *args)
        if dist.is_initialized():
            dist.barrier()  # gloo fails on a rank that still connects to one that has ended
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _serve(rank: int, world: int, pipe: Connection, stacks: str) -> None:
    """Run what comes, and send None or a traceback, until the other end is closed."""
    gc.freeze()
    warnings.filterwarnings("ignore")
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        while True:
            said = None
            try:
                job = pipe.recv()
                with _state_of_a_test():
                    as_rank(rank, world, *job)
                del job
            except EOFError:
                return
            except BaseException:  # noqa: BLE001 - a test that skips, too, must not end the rank silently
                said = traceback.format_exc()
            gc.collect()
            pipe.send(said)


class Ranks:
    """Ranks of one process group after another, each a process.

    ``context``: of multiprocessing.  ``hangs_s``: seconds after which a rank that has not ended hangs.
    """

    def __init__(self, world: int, context: Any, hangs_s: float) -> None:
        self._hangs_s = hangs_s
        self._folder = tempfile.TemporaryDirectory()
        self._meetings = 0
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, theirs, self._stacks(rank)))
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def _stacks(self, rank: int) -> str:
        return f"{self._folder.name}/stacks{rank}"

    def run(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Raises AssertionError with the traceback of a rank that fails, dies or hangs; the ranks are of no use then."""
        self._meetings += 1
        for pipe in self._pipes:
            pipe.send((f"{self._folder.name}/meeting{self._meetings}", work, args))
        deadline = time.monotonic() + self._hangs_s
        waited = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        failed: list[str] = []
        while waited:
            ready = wait([*waited], max(0.0, deadline - time.monotonic()))
            if not ready:
                failed = failed or [self._hanging(rank) for rank in waited.values()]
                break
            for pipe in ready:
                rank = waited.pop(pipe)  # type: ignore[arg-type]
                try:
                    said = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join()
                    said = f"It ended with exit code {self.processes[rank].exitcode}."
                if said is not None:
                    failed.append(f"rank {rank} failed:\n{said}")
                    deadline = time.monotonic() + 1  # one that waits for it fails next, perhaps before it is heard
        if failed:
            raise AssertionError("\n".join(failed))

    def _hanging(self, rank: int) -> str:
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        with open(self._stacks(rank)) as file:
            return f"rank {rank} hangs after {self._hangs_s:.0f} s:\n{file.read()}"

    def close(self, kill: bool = False) -> None:
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            pipe.close()
            if kill:
                process.kill()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()
