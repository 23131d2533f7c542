"""Make the sizing table of docs/deployment.md: which cloud instance runs which model, with which budget, and how fast.

    python docs/benchmarks/sizing.py                       # writes the table from sizing.json
    python docs/benchmarks/sizing.py --plan                # plans first: traces three pipelines, ten minutes of one core
    python docs/benchmarks/sizing.py --plan --only MODEL   # plans one model again

Each row is planned by ``chunkflow pipeline MODEL --memory BUDGET --hardware PROFILE``; nothing is measured.  The vCPUs
and the memory of the instances are from the providers' public lists.  The script needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from runs import replaced
from tabulate import tabulate

from chunkflow_compile.catalog.presets import preset
from chunkflow_compile.cli.main import main as chunkflow
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import parse_bytes

BENCHMARKS = Path(__file__).parent
PAGE = BENCHMARKS.parent / "deployment.md"
PLANNED = BENCHMARKS / "sizing.json"
# The script replaces the text between these two lines of the page.
BEGIN, END = "<!-- sizing: make sizing -->\n", "<!-- end -->\n"
# The host memory in GiB for everything except weights: the operating system, Python, torch, and copies of images and
# videos.
HOST_RESERVED_GIB = 8


@dataclass(frozen=True)
class Instance:
    """A cloud instance with one GPU."""

    name: str
    vcpus: int
    memory_gib: int


@dataclass(frozen=True)
class Gpu:
    """A GPU.  ``budget``: the argument ``memory``, which leaves memory for the CUDA context and fragmentation.
    ``instances``: cloud instances with this GPU, in ascending order of host memory."""

    profile: str
    budget: str
    instances: tuple[Instance, ...]


GPUS = {
    "L4, 24 GB": Gpu(
        "l4-pcie",
        "20GiB",
        (Instance("AWS g6.4xlarge", 16, 64), Instance("AWS g6.8xlarge", 32, 128)),
    ),
    "A10G, 24 GB": Gpu(
        "a10g-pcie",
        "20GiB",
        (Instance("AWS g5.4xlarge", 16, 64), Instance("AWS g5.8xlarge", 32, 128)),
    ),
    "L40S, 48 GB": Gpu(
        "l40s-pcie",
        "42GiB",
        (Instance("AWS g6e.2xlarge", 8, 64), Instance("AWS g6e.4xlarge", 16, 128)),
    ),
    "A100, 80 GB": Gpu("a100-80gb-nvlink", "74GiB", (Instance("Google a2-ultragpu-1g", 12, 170),)),
    "H100, 80 GB": Gpu("h100-nvlink", "74GiB", (Instance("Google a3-highgpu-1g", 26, 234),)),
}
MODELS = {
    "flux.1-dev": "FLUX.1-dev",
    "wan2.2-ti2v-5b": "Wan2.2 5B",
    "qwen-image": "Qwen-Image",
    "wan2.2-t2v-a14b": "Wan2.2 A14B",
    "hunyuanvideo": "HunyuanVideo",
}
CASES = tuple((model, gpu) for model in MODELS for gpu in GPUS)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A planned generation.  ``output``: the sizes and the number of steps as text.  ``device_bytes``: the peak bytes of
    weights and activations on the GPU.  ``host_bytes``: the bytes of weights in host memory.  ``resident_bytes``,
    ``resident_seconds``: the peak bytes and the seconds with all weights on the GPU."""

    model: str
    gpu: str
    output: str
    device_bytes: int
    host_bytes: int
    seconds: float
    resident_bytes: int
    resident_seconds: float

    @property
    def fits(self) -> bool:
        """Whether all weights and activations fit in the budget, so that no weight has to be streamed."""
        return self.resident_bytes <= parse_bytes(GPUS[self.gpu].budget, "memory")

    @property
    def instance(self) -> Instance | None:
        """The smallest instance with enough host memory, or None."""
        needed = self.host_bytes / 2**30 + HOST_RESERVED_GIB
        return next((i for i in GPUS[self.gpu].instances if i.memory_gib >= needed), None)


def plan(model: str, gpu: str) -> Row:
    """Plan a generation with ``chunkflow pipeline``.  Raises ChunkflowError if the command fails."""
    command = ["pipeline", model, "--memory", GPUS[gpu].budget, "--hardware", GPUS[gpu].profile, "--json", "-"]
    with contextlib.redirect_stdout(io.StringIO()) as answer:
        code = chunkflow(command)
    if code:
        raise ChunkflowError(f"chunkflow {' '.join(command)} ended with {code}: its message is above.")
    found = json.loads(answer.getvalue())
    ways = {name: way["phases"] for name, way in found["ways"].items()}

    def peak(name: str) -> int:
        return int(max(p["weights"] + p["activations"] for p in ways[name]))

    def seconds(name: str) -> float:
        return round(float(sum(p["loading_s"] + p["calls"] * p["seconds"] for p in ways[name])), 3)

    # for example "wan2.2-ti2v-5b, 121 frames of 704x1280, one timestep per token, 50 steps, 2 forwards per step, on
    # l4-pcie"
    _, sizes, *rest = found["pipeline"].split(", ")
    return Row(
        model=model,
        gpu=gpu,
        output=f"{sizes}, {next(each for each in rest if each.endswith(' steps'))}",
        device_bytes=peak("chunkflow"),
        host_bytes=sum(p["host"] for p in ways["chunkflow"]),
        seconds=seconds("chunkflow"),
        resident_bytes=peak("plain"),
        resident_seconds=seconds("plain"),
    )


def planned(path: Path = PLANNED) -> list[Row]:
    """Return the planned rows.  Raises ChunkflowError if their file is missing."""
    if not path.exists():
        raise ChunkflowError(f"{path} is missing: it contains the planned generations. Write it with --plan.")
    return [Row(**body) for body in json.loads(path.read_text())]


def table(rows: Sequence[Row]) -> str:
    """Return the table of the page."""
    return tabulate(
        [
            (
                MODELS[row.model],
                _output(row),
                row.gpu,
                _instance(row),
                GPUS[row.gpu].budget.replace("GiB", " GiB"),
                f"{row.device_bytes / 2**30:.1f} GiB",
                f"{row.host_bytes / 2**30:.0f} GiB",
                _seconds(row.seconds),
                f"{_seconds(row.resident_seconds)}, {row.resident_bytes / 2**30:.0f} GiB"
                if row.fits
                else "does not fit",
            )
            for row in rows
        ],
        headers=(
            "model",
            "output",
            "GPU",
            "instance",
            "`memory`",
            "peak GPU memory",
            "host memory per replica",
            "per image or clip",
            "all weights on the GPU",
        ),
        tablefmt="github",
        disable_numparse=True,
    )


def _output(row: Row) -> str:
    forwards = preset(row.model).forwards
    return f"{row.output} of {forwards} forward{'s' * (forwards > 1)}"


def _instance(row: Row) -> str:
    found = row.instance
    return f"{found.name}: {found.vcpus} vCPU, {found.memory_gib} GiB" if found else "none with enough memory"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def written(page: str, rows: Sequence[Row]) -> str:
    """The page with the table of these rows.  Raises ChunkflowError if the page lacks the lines around the table."""
    return replaced(PAGE.name, page, "table", BEGIN, END, table(rows))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="plan again before writing the table")
    parser.add_argument("--only", choices=MODELS, help="with --plan: plan this model and keep the other rows")
    arguments = parser.parse_args(given)
    try:
        if arguments.plan:
            rows = {(row.model, row.gpu): row for row in (planned() if arguments.only else [])}
            for model, gpu in CASES:
                if arguments.only in (None, model):
                    rows[model, gpu] = plan(model, gpu)
                    body = [asdict(rows[case]) for case in CASES if case in rows]
                    PLANNED.write_text(json.dumps(body, indent=1) + "\n")
        PAGE.write_text(written(PAGE.read_text(), planned()))
    except ChunkflowError as error:
        print(f"sizing: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
