"""A worker process: lowers the regions of a job into Inductor's caches on disk, and ends with the process that started it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config, cpu_vec_isa
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .inductor import through_inductor
from .warm_up import take_vector_instructions

JOB = "job.pickle"


@dataclass(frozen=True)
class Job:
    """``regions``: names and pickled graphs, in the order in which they are lowered.  ``inductor``: the user's configuration
    of Inductor for every region.  ``state``: what else of the process that lowers them the code may depend on."""

    regions: Sequence[tuple[str, bytes]]
    inductor: Mapping[str, Any]
    state: State

    def write(self, folder: Path) -> None:
        Path(folder, JOB).write_bytes(pickle.dumps(self))


@dataclass(frozen=True)
class State:
    """Settings of a process that are in the keys of Inductor's caches, or in the code that it generates."""

    config: Mapping[str, Any]
    compile_threads: int
    threads: int
    vectors: str
    device: int | None
    deterministic: bool
    precision: str

    @staticmethod
    def here(device: torch.device, processes: int) -> State:
        """Those of this process, for regions on ``device``.  ``processes``: that lower at once, and divide the threads."""
        return State(
            config=config.save_config_portable(),
            compile_threads=max(1, (config.compile_threads or 1) // processes),
            threads=torch.get_num_threads(),
            vectors=str(cpu_vec_isa.pick_vec_isa()) if device.type == "cpu" else "",
            device=device.index if device.type == "cuda" else None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            precision=torch.get_float32_matmul_precision(),
        )

    def set(self) -> None:
        config.load_config(dict(self.config))
        config.compile_threads = self.compile_threads  # a pool of them in each process
        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic)
        if torch.get_float32_matmul_precision() != self.precision:  # setting the same is another key of the caches
            torch.set_float32_matmul_precision(self.precision)
        if self.vectors:
            take_vector_instructions(self.vectors)
        if self.device is not None:
            torch.cuda.set_device(self.device)


def packed(module: torch.fx.GraphModule) -> bytes:
    """The graph of a region, with its fake tensors.  Raises what pickle raises: an op may hold anything."""
    return GraphPickler.dumps(module, Options(ops_filter=None))


def lower(region: bytes, inductor: Mapping[str, Any]) -> None:
    """Lower a region that was packed in another process."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    module: Any = GraphPickler.loads(region, mode)
    with torch.no_grad(), torch._guards.tracing(torch._guards.TracingContext(mode)):
        through_inductor(module, inductor)


def main(folder: str) -> None:
    """Lower the regions of the job in a folder; a file with the name of a region says that it is lowered."""
    parent = os.getppid()
    job: Job = pickle.loads(Path(folder, JOB).read_bytes())
    job.state.set()
    for name, region in job.regions:
        if os.getppid() != parent:  # nobody waits for it any more
            return
        lower(region, job.inductor)
        Path(folder, name).touch()
