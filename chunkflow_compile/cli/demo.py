"""``chunkflow demo``: two ranks of a Wan-style model, weights resident against weights streamed."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException, spawn
from tqdm import tqdm

from chunkflow_compile.cli.output import add_json, check_json, say, write_json
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.models.ulysses import enable_ulysses
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.placing import offload, programs
from chunkflow_compile.report.record import ArmRecord, Record, table
from chunkflow_compile.runtime.measurement import StepMeasurement

DEGREE = 2
LAYERS = 12
STEPS = 5
# A rank that compiles while the other waits in a collective takes less than a minute on a slow core.
TIMEOUT = timedelta(minutes=5)
# 512 wide: a projection is 1 MiB in float32, so that it is streamed and cut into chunks of 1 MiB; 1,024 tokens.
SIZE = Size(layers=LAYERS, heads=8, head_dim=64, frames=4, height=32, width=32, text=64)
OPTIONS: dict[str, dict[str, Any]] = {
    "resident": {"policy": "resident", "chunk_bytes": 1 << 20},
    "chunkflow": {"chunk_bytes": 1 << 20},
}


@dataclass(frozen=True)
class _Job:
    """What a rank is told.  ``folder``: where it meets the others and leaves its result."""

    layers: int
    steps: int
    dump: str
    folder: str


@dataclass(frozen=True)
class _ArmResult:
    """One arm on one rank."""

    steps_s: tuple[float, ...]
    measurements: tuple[StepMeasurement, ...]
    device_bytes: int
    total_bytes: int
    moved_bytes: int
    equal: bool


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "demo",
        help="run the main job on two ranks of this machine",
        description="Two gloo ranks denoise with a small Wan-style transformer from diffusers (random weights, Ulysses "
        "degree 2): once with all weights resident, once streamed from host memory. The outputs must be equal bit for bit.",
        epilog="example: chunkflow demo --json demo.json",
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"blocks of the model (default {LAYERS})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"denoising steps an arm (default {STEPS})")
    add_json(parser, "the record")
    parser.add_argument("--dump", metavar="DIR", help="folder for the dumped programs (default: a new temporary one)")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.layers < 1 or arguments.steps < 1:
        raise ChunkflowError("--layers and --steps must be at least 1.")
    dump = arguments.dump or tempfile.mkdtemp(prefix="chunkflow-demo-")
    check_json(arguments)
    _make_folder(Path(dump))
    with tempfile.TemporaryDirectory() as folder:
        job = _Job(arguments.layers, arguments.steps, dump, folder)
        try:
            spawn(_rank, (job,), nprocs=DEGREE)
        except ProcessRaisedException as error:
            raise ChunkflowError(f"A rank of the demo failed: {error}") from error
        ranks = [torch.load(Path(folder) / f"rank{r}.pt", weights_only=False) for r in range(DEGREE)]
    record = Record(
        model=f"wan, {arguments.layers} blocks, {SIZE.heads * SIZE.head_dim} wide, random weights",
        degree=DEGREE,
        arms={name: _summary([rank[name] for rank in ranks], name) for name in OPTIONS},
    )
    column = {"collectives a step": {name: ranks[0][name].measurements[-1].collectives for name in OPTIONS}}
    say(arguments, f"{record.model}; Ulysses degree {DEGREE}, {arguments.steps} steps, medians of the slowest rank\n")
    say(arguments, table(record, column))
    program = _program(Path(dump))
    say(arguments, f"\nprogram: {program}\nwhat it did: chunkflow explain {program.parent}")
    write_json(arguments, record.to_json())
    return 0 if all(arm.equal_to_resident for arm in record.arms.values()) else 1


def _make_folder(dump: Path) -> None:
    """Before a minute of work, not behind it."""
    try:
        dump.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ChunkflowError(f"{dump} cannot be written: {error}. Give another folder.") from error


def _program(dump: Path) -> Path:
    return max(dump.glob("rank0_*/04_verified.py"), key=lambda p: p.stat().st_mtime)


def _summary(ranks: list[_ArmResult], name: str) -> ArmRecord:
    def slowest(figure: Callable[[_ArmResult], list[float]]) -> float:
        return max(statistics.median(figure(rank)) for rank in ranks)

    first = ranks[0]
    return ArmRecord(
        step_s=slowest(lambda r: list(r.steps_s)),
        exposed_h2d_s=slowest(lambda r: [m.exposed_h2d_s for m in r.measurements]),
        collective_s=slowest(lambda r: [m.collective_s for m in r.measurements]),
        weights_device_bytes=first.device_bytes,
        weights_total_bytes=first.total_bytes,
        moved_bytes_per_step=first.moved_bytes,
        equal_to_resident=all(r.equal for r in ranks),
    )


def _rank(rank: int, job: _Job) -> None:
    """One rank: both arms on the same random weights, steps interleaved in random order."""
    torch.set_num_threads(max(1, (os.cpu_count() or DEGREE) // DEGREE))
    _quiet()
    dist.init_process_group(
        "gloo", init_method=f"file://{job.folder}/meet", rank=rank, world_size=DEGREE, timeout=TIMEOUT
    )
    try:
        size = Size(**{**SIZE.__dict__, "layers": job.layers})
        with (
            torch.no_grad(),
            tqdm(total=2 * (2 + job.steps), disable=None if rank == 0 else True, unit="stage") as progress,
        ):
            results = _arms(size, job, progress)
        torch.save(results, Path(job.folder) / f"rank{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _arms(size: Size, job: _Job, progress: Any) -> dict[str, _ArmResult]:
    inputs = small_inputs("wan", size, 0)
    models: dict[str, nn.Module] = {}
    compiled: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        progress.set_description(f"{name}: build")
        models[name] = enable_ulysses(small_model("wan", size), DEGREE)
        models[name](**inputs)  # diffusers' parallel hooks settle in their first call; only then it traces whole
        if name == "chunkflow":
            offload(models[name])
        progress.update()
        progress.set_description(f"{name}: compile")
        chosen = {**options, "dump": job.dump}
        compiled[name] = torch.compile(models[name], backend="chunkflow", fullgraph=True, options=chosen)
        compiled[name](**inputs)
        progress.update()
    times, equal = _denoise(compiled, inputs, job.steps, progress)
    results = {}
    for name, model in models.items():
        runner = programs(model)[-1]
        results[name] = _ArmResult(
            steps_s=tuple(times[name]),
            measurements=runner.measurements[-job.steps :],
            device_bytes=runner.plan.device_bytes,
            total_bytes=runner.program.problem.total_bytes,
            moved_bytes=runner.plan.moved_bytes,
            equal=equal[name],
        )
    return results


def _denoise(
    compiled: dict[str, Any], inputs: dict[str, Any], steps: int, progress: Any
) -> tuple[dict[str, list[float]], dict[str, bool]]:
    """Euler steps of a flow from noise; each arm on latents of its own, which stay equal as long as the outputs are."""
    latents = dict.fromkeys(compiled, inputs["hidden_states"])
    times: dict[str, list[float]] = {name: [] for name in compiled}
    equal = dict.fromkeys(compiled, True)
    order = random.Random(0)  # the same on every rank: the arms' collectives must meet
    for step in range(steps):
        timestep = torch.tensor([1000.0 * (1 - step / steps)])
        for name in order.sample(sorted(compiled), len(compiled)):
            progress.set_description(f"{name}: step {step + 1} of {steps}")
            dist.barrier()
            start = time.perf_counter()
            velocity = compiled[name](**{**inputs, "hidden_states": latents[name], "timestep": timestep})[0]
            times[name].append(time.perf_counter() - start)
            latents[name] = latents[name] - velocity / steps
            progress.update()
        for name in compiled:
            equal[name] &= torch.equal(latents[name], latents["resident"])
    return times, equal


def _quiet() -> None:
    import warnings

    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
