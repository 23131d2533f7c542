"""The ranks of a measurement: one process per rank, or one process that stands for all ranks."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessException, spawn
from tqdm import tqdm

from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.catalog.quiet import quiet_diffusers, quiet_imports
from chunkflow_compile.hardware.loopback import join_loopback
from chunkflow_compile.hardware.machine import check_installed
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.progress import off

from .job import Job, RankRun
from .turns import Turns, count_steps

# The timeout of collectives.  A rank may wait in a collective while another rank compiles, which takes less than a minute
# on a slow core.
TIMEOUT = timedelta(minutes=5)
# The minimum seconds between two lines of progress: a log should show that the job is running, but stay short.
_LINE_EVERY_S = 5.0


class JobProgress(tqdm):  # type: ignore[type-arg]
    """The progress bar of a job.

    ``show``: whether this rank shows progress.  ``lines``: whether to print lines instead of a bar if stderr is not a
    terminal, at most one every ``_LINE_EVERY_S``.  ``now``: a clock in seconds.
    """

    def __init__(self, total: int, show: bool, lines: bool, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(total=total, disable=None if show and not off() else True, unit="step")
        self._now, self._began, self._told_s = now, now(), float("-inf")
        self._lines = lines and show and self.disable and not off()

    def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
        super().set_description(desc, refresh)
        passed_s = self._now() - self._began
        if self._lines and passed_s >= self._told_s + _LINE_EVERY_S:
            self._told_s = passed_s
            print(f"{passed_s:4.0f} s  {desc}", file=sys.stderr, flush=True)


def run_job(job: Job) -> list[RankRun]:
    """Run a job and return the result of each process.  Raises ChunkflowError if a process fails."""
    if job.model is None or job.model in PRESETS:
        check_installed("The model that is measured", "diffusers")
    with tempfile.TemporaryDirectory() as folder:
        job = replace(job, folder=folder)
        if job.link is not None and job.link.shared:
            job = replace(job, link=replace(job.link, shared=f"{folder}/port"))
        if job.lines and not sys.stderr.isatty() and not off():
            print(f"   0 s  starting {job.processes} process{'es' * (job.processes > 1)}", file=sys.stderr, flush=True)
        try:
            _wait(spawn(_run_rank, (job,), nprocs=job.processes, join=False))
        except ProcessException as error:
            _, ours, said = str(error).rpartition(f"{ChunkflowError.__module__}.{ChunkflowError.__name__}: ")
            raise ChunkflowError(said.strip() if ours else f"A rank failed: {error}") from error
        return [torch.load(Path(folder) / f"rank{r}.pt", weights_only=False) for r in range(job.processes)]


def _wait(ranks: ProcessContext) -> None:
    """Wait for all ranks.  On an interrupt, terminate them, because they must not write to the temporary folder after it
    is removed."""
    try:
        while not ranks.join():
            pass
    except BaseException:
        for process in ranks.processes:
            process.terminate()
        for process in ranks.processes:
            process.join()
        raise


def _run_rank(rank: int, job: Job) -> None:
    if job.device != "cuda":
        _pin_to_cores(rank, job.processes)
    quiet_diffusers()
    warnings.filterwarnings("ignore")
    if job.transport != "processes":
        join_loopback(job.ranks, by_kernels=job.transport == "loopback-kernels")
    else:
        meet = f"file://{job.folder}/meet"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=job.ranks, timeout=TIMEOUT)
    try:
        with (
            quiet_imports(),
            torch.no_grad(),
            JobProgress(count_steps(job), show=rank == 0, lines=job.lines) as progress,
        ):
            torch.save(Turns(job, rank, progress).run(), Path(job.folder) / f"rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _pin_to_cores(rank: int, ranks: int) -> None:
    """Pin a rank to its own processors, or to a shared processor if there are fewer processors than ranks.

    Without this, threads that move between processors slow down the other ranks by a tenth.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    first = rank * len(cores) // ranks
    mine = cores[first : max(first + 1, (rank + 1) * len(cores) // ranks)]
    if mine:
        os.sched_setaffinity(0, mine)
    torch.set_num_threads(max(1, len(mine)))
