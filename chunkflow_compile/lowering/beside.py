"""Worker processes that lower regions beside this one.

Inductor's Python is not made for threads.  A worker leaves what it lowered in Inductor's caches on disk, where this process
finds it by Inductor's own keys, with its guards checked: a worker that fails or does not fit costs time, and no more.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch.fx import GraphModule

from chunkflow_compile.weights.limits import host_memory, local_ranks

from .worker import Job, State, packed

_log = logging.getLogger(__name__)

# Regions that take less were in the cache, and so are the others: a hit takes 0.02 to 0.2 s.
_CACHED_S = 0.25
# Until a worker has imported torch and this package.
_START_S = 4.0
# The gain from more is small, because the longest region remains.
_MOST = 4
# What a worker takes: 0.7 GiB of host memory on the CPU; a context on the GPU takes 0.3 to 0.5 GiB there.
_HOST_BYTES = 2 << 30
_DEVICE_BYTES = 1 << 30
# A region that a worker has not lowered after this is lowered here: a minute, and 20 times what a region took here.
_PATIENCE_S, _PATIENCE = 60, 20
_POLL_S = 0.02
# These time kernels, so nothing else may run on the device.
_TIMED = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")


def shares(regions: int, region_s: float, workers: int) -> list[int]:
    """How many regions each worker lowers, so that all processes end at about the same time.

    ``region_s``: what one takes.  A worker begins _START_S late.
    """
    if workers < 1:
        return []
    here = math.ceil((regions * region_s + _START_S * workers) / (region_s * (workers + 1)))
    rest, used = max(0, regions - here), min(workers, max(0, regions - here))
    return [rest // used + (n < rest % used) for n in range(used)]


def most_workers(device: torch.device, inductor: Mapping[str, Any]) -> int:
    """How many workers may run here: by cores, by memory, and none where they would not help or would disturb.

    Inductor's ``compile_threads`` counts the cores; ranks of one machine divide them.
    """

    def chosen(name: str) -> Any:
        return inductor.get(name, getattr(config, name, False))

    if chosen("force_disable_caches") or not chosen("fx_graph_cache") or any(chosen(name) for name in _TIMED):
        return 0
    ranks = local_ranks()
    limits = [_MOST, (config.compile_threads or 1) // ranks - 1, host_memory().free // _HOST_BYTES // ranks]
    if device.type == "cuda":
        limits.append(torch.cuda.mem_get_info(device)[0] // _DEVICE_BYTES)
    return max(0, min(limits))


class Workers:
    """The workers of one program: none at first, and none any more at the end of the context."""

    def __init__(self, inductor: Mapping[str, Any], device: torch.device) -> None:
        self._inductor = inductor
        self._device = device
        self._folders = contextlib.ExitStack()
        self._started = list[_Worker]()
        self._lent = dict[str, _Worker]()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._started:
            worker.end()
        self._folders.close()

    def lend(self, regions: Mapping[str, GraphModule], region_s: float) -> None:
        """Let workers lower some of the regions, the last ones first, if that pays and they have none yet.

        ``region_s``: what each took that is lowered already.
        """
        if self._started or region_s < _CACHED_S:
            return
        counts = shares(len(regions), region_s, most_workers(self._device, self._inductor))
        if not counts:
            return
        state, left = State.here(self._device, len(counts) + 1), list(regions)
        try:
            root = Path(self._folders.enter_context(tempfile.TemporaryDirectory(prefix="chunkflow_lowering_")))
        except OSError as error:
            _log.info("no worker can be started: %s", error)
            return
        for number, count in enumerate(counts):
            mine = [(name, data) for name in left[-count:] if (data := _packed(name, regions[name])) is not None]
            del left[-count:]
            try:
                worker = _Worker(
                    root / str(number), Job(mine, self._inductor, state), _PATIENCE_S + _PATIENCE * region_s
                )
            except Exception as error:  # noqa: BLE001  (the user's configuration of Inductor may hold anything)
                _log.info("no worker can be started: %s", error)
                return
            self._started.append(worker)
            self._lent |= {name: worker for name, _ in mine}

    def next(self, regions: Iterable[str]) -> str:
        """The region to lower now: the first that no worker has, or else one that a worker has lowered or will not."""
        left = list(regions)
        name = next((name for name in left if name not in self._lent), left[0])
        if name in self._lent:
            self._lent.pop(name).wait(name)
        return name


def _packed(name: str, module: GraphModule) -> bytes | None:
    try:
        return packed(module)
    except Exception as error:  # noqa: BLE001  (an op of a user may hold anything)
        _log.info("%s is lowered here, because it cannot be sent to a worker: %s", name, error)
        return None


class _Worker:
    """A process that lowers the regions of a job.  ``folder``: gets a file for each that is lowered.

    ``patience_s``: how long a region is waited for.
    """

    def __init__(self, folder: Path, job: Job, patience_s: float) -> None:
        self._folder = folder
        self._patience_s = patience_s
        folder.mkdir()
        job.write(folder)
        code = "import sys; from chunkflow_compile.lowering.worker import main; main(sys.argv[1])"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._errors = (folder / "errors").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    def wait(self, name: str) -> None:
        """Until a region is lowered, the worker has failed, or patience is at its end."""
        until = time.monotonic() + self._patience_s
        while not (self._folder / name).exists():
            if self._process.poll() is not None:
                lines = (self._folder / "errors").read_text(errors="replace").strip().splitlines()
                _log.info("a worker failed, so %s is lowered here: %s", name, lines[-1] if lines else "no word")
                return
            if time.monotonic() > until:
                _log.info("a worker took longer than %.0f s, so %s is lowered here", self._patience_s, name)
                return
            time.sleep(_POLL_S)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
