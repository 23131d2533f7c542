"""Measure how much ranks that share weights read from the disk if the checkpoint is larger than the free memory.

    python docs/benchmarks/shared_drive.py --out docs/benchmarks/drive.md

The script needs Linux, a folder on a disk, and a memory control group (v1 or v2), which only root can create.  The
weights of a random Wan model stay in its checkpoint.  The ranks run in the control group, without a memory limit and with
limits that leave ``spare`` bytes for the page cache.  The bytes read are the sum of read_bytes in /proc/PID/io over all
processes in the group.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import diffusers
import torch
import torch.distributed as dist
from runs import put_section
from tabulate import tabulate

from chunkflow_compile import offload, programs
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.report.record import seconds
from chunkflow_compile.units import size

MOUNT = Path("/sys/fs/cgroup")
EVERY_S = 0.02
# The read-ahead ring is full when nothing has been read from the disk for this long.
QUIET_S = 0.5
# The number of steps before the measured steps.  The model is compiled in the first one.
WARM = 4
# Smaller weights are not put on the SSD.
LARGE = 1 << 20
TIMEOUT = timedelta(minutes=5)
OPTIONS: dict[str, Any] = {"policy": "layerwise", "lowering": "eager", "min_bytes": LARGE}
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Ranks:
    """A configuration of ranks.  ``apart``: whether the ranks run independently, without collectives and with random
    pauses."""

    name: str
    number: int
    apart: bool = False


RANKS = (
    Ranks("1 rank", 1),
    Ranks("2 ranks, Ulysses", 2),
    Ranks("2 ranks, no collectives, with pauses", 2, apart=True),
)


class Group:
    """A memory control group that is removed at the end of the context."""

    def __init__(self, limit: int | None = None) -> None:
        """Create the group.  ``limit``: the memory limit in bytes, or None.  Raises SystemExit if no group can be
        created."""
        v2 = MOUNT / "cgroup.subtree_control"
        self._v1 = not (v2.exists() and "memory" in v2.read_text().split())
        self.folder = (MOUNT / "memory" if self._v1 else MOUNT) / f"chunkflow-shared-drive-{os.getpid()}"
        try:
            self.folder.mkdir()
            if limit is not None:
                (self.folder / ("memory.limit_in_bytes" if self._v1 else "memory.max")).write_text(str(limit))
                swap = self.folder / ("memory.swappiness" if self._v1 else "memory.swap.max")
                if swap.exists():
                    swap.write_text("0")
        except OSError as error:
            self.remove()
            sys.exit(f"No memory control group can be made here ({error}): run this as root, on Linux.")

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def processes(self) -> list[int]:
        return [int(line) for line in (self.folder / "cgroup.procs").read_text().split()]

    def memory(self) -> int:
        """Return the bytes of memory that the group uses without the page cache: private and shared memory of its
        processes, and kernel memory."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in map(str.split, lines)}
        cache = stat["total_cache"] - stat["total_shmem"] if self._v1 else stat["file"] - stat["shmem"]
        used = int((self.folder / ("memory.usage_in_bytes" if self._v1 else "memory.current")).read_text())
        return used - cache

    def peak(self) -> int:
        """Return the peak number of bytes so far, including the page cache."""
        path = self.folder / ("memory.max_usage_in_bytes" if self._v1 else "memory.peak")
        return int(path.read_text()) if path.exists() else 0

    def remove(self) -> None:
        """Kill the processes of the group and remove the group."""
        for _ in range(250):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            if not self.folder.exists():
                return
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(EVERY_S)
        print(f"{self.folder} could not be removed", file=sys.stderr)


@dataclass
class Counts:
    """Sums over all processes.  ``disk``: the bytes read from the disk.  ``cpu``: the CPU seconds in user mode and in the
    kernel."""

    disk: int = 0
    cpu: float = 0.0

    @staticmethod
    def of(processes: Sequence[int]) -> Counts:
        found = Counts()
        for process in processes:
            with contextlib.suppress(OSError):
                told = dict(line.split(": ") for line in Path(f"/proc/{process}/io").read_text().splitlines())
                times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                found.disk += int(told["read_bytes"])
                found.cpu += (int(times[11]) + int(times[12])) / TICK
        return found


def rank_of(rank: int, ranks: Ranks, folder: str, group: str, size_: Size, steps: int, parent: Connection) -> None:
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on an interrupt, the parent ends this process
    warnings.filterwarnings("ignore")
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    meet = f"file://{folder}/meet-{Path(group).name}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks.number, timeout=TIMEOUT)
    model = diffusers.WanTransformer3DModel.from_pretrained(f"{folder}/wan")
    if ranks.number > 1 and not ranks.apart:
        enable_ulysses(model, ranks.number)
    offload(model, min_bytes=LARGE, share=ranks.number > 1 or None, host_memory=0)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
    expected = torch.load(f"{folder}/expected.pt")
    inputs = [small_inputs("wan", size_, step) for step in range(len(expected))]
    order, times = random.Random(rank), list[float]()
    for step in range(WARM + steps):
        if step == WARM:
            parent.send("warm")
            parent.recv()
        if ranks.apart and step:
            time.sleep(order.uniform(0, median(times)))
        begin = time.perf_counter()
        output = run(**inputs[step % len(inputs)])[0]
        times.append(time.perf_counter() - begin)
        torch.testing.assert_close(output, expected[step % len(inputs)], atol=1e-4, rtol=1e-3)
    (plan,) = (program.plan for program in programs(model))
    planned = sum(plan.streamed_bytes(w) for w in plan.streamed if w.nbytes >= LARGE)
    parent.send((times[WARM:], planned))
    parent.recv()
    dist.barrier()
    parent.send("over")


@dataclass
class Found:
    """The figures of one run.

    ``cold``: the bytes read from the disk before the measured steps.  ``disk``, ``cpu``: the bytes read from the disk and
    the CPU seconds of all ranks per measured step.  ``planned``: the bytes that a rank copies per step according to its
    plan.  ``step``: the median seconds per step over all steps and ranks, without pauses.  ``most``: the peak memory of
    the group without the page cache.  ``peak``: the peak memory of the group including the page cache.
    """

    cold: int
    disk: float
    planned: int
    cpu: float
    step: float
    most: int
    peak: int


class Crew:
    """The ranks of a run.  ``most``: the peak memory of their group without the page cache, sampled in :meth:`hear`."""

    def __init__(self, group: Group, processes: Sequence[SpawnProcess], links: Sequence[Connection]) -> None:
        self.most = 0
        self._group = group
        self._processes = processes
        self._links = links

    def hear(self) -> list[Any]:
        """Wait for the next message of each rank; return the messages.  Raises SystemExit if a rank has ended."""
        while not all(link.poll(EVERY_S) for link in self._links):
            self.most = max(self.most, self._group.memory())
            if any(p.exitcode for p in self._processes):
                self._ended()
        self.most = max(self.most, self._group.memory())
        try:
            return [link.recv() for link in self._links]
        except EOFError:
            self._ended()

    def go(self) -> None:
        for link in self._links:
            link.send("go")

    def _ended(self) -> NoReturn:
        for p in self._processes:
            p.join(1)
        sys.exit(
            f"A rank ended. Exit codes: {[p.exitcode for p in self._processes]}; -9 if the limit leaves no memory."
        )


@contextlib.contextmanager
def started(ranks: Ranks, folder: str, group: Group, size_: Size, steps: int) -> Iterator[Crew]:
    context = multiprocessing.get_context("spawn")
    processes, links = list[SpawnProcess](), list[Connection]()
    try:
        for rank in range(ranks.number):
            mine, its = context.Pipe()
            arguments = (rank, ranks, folder, str(group.folder), size_, steps, its)
            processes.append(context.Process(target=rank_of, args=arguments, daemon=True))
            processes[-1].start()
            its.close()
            links.append(mine)
        yield Crew(group, processes, links)
        for p in processes:
            p.join()
    finally:
        for p in processes:
            p.kill()
            p.join()


def run(ranks: Ranks, limit: int | None, folder: str, size_: Size, steps: int) -> Found:
    """Run a configuration of ranks; return its figures.  ``limit``: the memory limit of the group in bytes, or None.
    Raises SystemExit if a rank ends early."""
    out_of_the_page_cache(next(Path(folder).glob("wan/*.safetensors")))
    (Path(folder) / f"meet-chunkflow-shared-drive-{os.getpid()}").unlink(missing_ok=True)
    with Group(limit) as group, started(ranks, folder, group, size_, steps) as crew:
        crew.hear()
        before = quiet(group)
        crew.go()
        answers = crew.hear()
        after = quiet(group)
        crew.go()
        crew.hear()
        return Found(
            cold=before.disk,
            disk=(after.disk - before.disk) / steps,
            planned=max(nbytes for _, nbytes in answers),
            cpu=(after.cpu - before.cpu) / steps,
            step=median(itertools.chain.from_iterable(times for times, _ in answers)),
            most=crew.most,
            peak=group.peak(),
        )


def quiet(group: Group) -> Counts:
    """Wait until the ranks read nothing more from the disk; return the counts."""
    found, since = Counts.of(group.processes()), time.monotonic()
    while time.monotonic() - since < QUIET_S:
        time.sleep(EVERY_S)
        now = Counts.of(group.processes())
        if now.disk != found.disk:
            since = time.monotonic()
        found = now
    return found


def out_of_the_page_cache(file: Path) -> None:
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


ABOUT = """\
{today}, torch {torch}, {cores} CPU cores, no GPU; run as root:
`python docs/benchmarks/shared_drive.py --out docs/benchmarks/drive.md`.

* The model is a Wan model whose weights take {weights}, placed with `share=True` and `host_memory=0`. Each rank copies
  {planned} per step, one block ahead (`layerwise`).
* *Limit* bounds the memory of the ranks: what they need themselves, plus {spares} for the page cache.
* *Disk* is the number of bytes read from the disk over {steps} warm steps, as a multiple of the bytes that one rank copies in
  these steps. *CPU* is the CPU time of all ranks per step. Figures are medians of {repeats} runs.

```
{table}
```

Each rank reads for itself; if there are several, they read through the page cache. In another run, on 26 November 2026, two
ranks in lockstep copied 384 MiB each. They read 1.26 to 1.63 times as much from the disk as one rank when the limit left
150 MB for the page cache, and 2.09 to 2.35 times as much when it left 60 MB.
"""
HEADERS = ("ranks", "limit", "disk", "CPU", "step", "peak")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=16, help="of 64; a block has 16 bytes * 4 * (64 * heads)^2")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--spare", type=int, nargs="+", default=[150], metavar="MB", help="page cache that a limit leaves"
    )
    parser.add_argument("--folder", type=Path, help="a folder on a disk (default: that for temporary files)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    os.environ["OMP_NUM_THREADS"] = os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # for the processes of the ranks
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    with Group(None):
        pass  # check that a group can be created, before the model is built
    size_ = Size(layers=arguments.layers, heads=arguments.heads, head_dim=64, frames=1, text=8)
    found = dict[tuple[Ranks, int | None], list[Found]]()
    with tempfile.TemporaryDirectory(prefix="chunkflow-", dir=arguments.folder) as folder:
        model = small_model("wan", size_)
        model.save_pretrained(f"{folder}/wan", max_shard_size="1TB")  # type: ignore[operator]
        weights = sum(p.nbytes for p in model.parameters() if p.nbytes >= LARGE)
        torch.save([model(**small_inputs("wan", size_, step))[0] for step in range(4)], f"{folder}/expected.pt")
        del model
        order = random.Random(0)
        for _ in range(arguments.repeats):
            for ranks in order.sample(RANKS, len(RANKS)):
                for spare in (None, *order.sample(arguments.spare, len(arguments.spare))):
                    limit = None if spare is None else found[ranks, None][-1].most + spare * 10**6
                    new = run(ranks, limit, folder, size_, arguments.steps)
                    if new.cold < weights:
                        sys.exit(f"{folder} is not on a disk: of {weights} bytes, {new.cold} were read from one.")
                    found.setdefault((ranks, spare), []).append(new)
                    print(ranks.name, spare, new, flush=True)
    rows = [row(ranks, spare, found[ranks, spare]) for ranks in RANKS for spare in (None, *arguments.spare)]
    text = ABOUT.format(
        today=date.today(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        weights=size(weights),
        planned=size(found[RANKS[0], None][0].planned),
        spares=" or ".join(f"{spare} MB" for spare in arguments.spare),
        steps=arguments.steps,
        repeats=arguments.repeats,
        table=tabulate(rows, headers=HEADERS, disable_numparse=True),
    )
    print(text)
    if arguments.out:
        put_section(arguments.out, "Weights on an SSD", "Reads by several ranks", text)


def row(ranks: Ranks, spare: int | None, runs: Sequence[Found]) -> tuple[str, ...]:
    read = sorted(f.disk / f.planned for f in runs)
    least, most = f"{read[0]:.2f}", f"{read[-1]:.2f}"
    return (
        ranks.name,
        "none" if spare is None else f"{spare} MB left",
        least if least == most else f"{least} to {most}",
        f"{median(f.cpu for f in runs):.2f} s",
        seconds(median(f.step for f in runs)),
        size(int(median(f.peak for f in runs))),
    )


if __name__ == "__main__":
    main()
