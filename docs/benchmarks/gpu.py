"""Benchmark models of full size on a GPU, with random weights.  The arms take turns.

python docs/benchmarks/gpu.py --out docs/benchmarks/gpu.md

The script writes the page after each case, and appends every measured turn to a log next to the page at once.  So an
interrupted run loses no measurement.  A case is skipped if too little time is left.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch
from gpu_card import ready
from gpu_page import beside, read, write

from chunkflow_compile.bench.alternatives import (
    APPLY,
    BY_KIND,
    GRAPH,
    GROUP_OFFLOAD,
    GROUP_OFFLOAD_COMPILED,
    INDUCTOR,
    INDUCTOR_AGAIN,
    INDUCTOR_GRAPH,
    REPEATED,
)
from chunkflow_compile.bench.arms import parse_arms
from chunkflow_compile.bench.bench_record import BenchRecord, bench_table, conditions, summarise
from chunkflow_compile.bench.job import RESIDENT, Job, Transport
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import OWN_ARMS, Regime
from chunkflow_compile.catalog.presets import PRESETS, Workload
from chunkflow_compile.catalog.small import Size
from chunkflow_compile.hardware.calibrate import calibrate
from chunkflow_compile.hardware.machine import device_name, look
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES

OURS = (RESIDENT, "layerwise", "chunkflow")
# The alternatives to ChunkFlow.  torch.compile runs twice, because the difference between the two arms shows the noise.
# Group offload is compiled, like ChunkFlow.
THEIRS = (INDUCTOR, INDUCTOR_AGAIN, GROUP_OFFLOAD_COMPILED)


@dataclass(frozen=True)
class Case:
    """A model at one size, called as in its diffusers pipeline.  A step of the benchmark is one forward.

    ``transport``: "processes" for one rank; otherwise, how one process on one GPU stands for two ranks, see bench/job.py.

    ``seconds``: the estimated time to compile with empty caches and to run the first round.  The case is skipped if less
    time is left.
    """

    model: str
    sizes: dict[str, int]
    arms: tuple[str, ...]
    seconds: float
    transport: Transport = "processes"

    @property
    def ranks(self) -> int:
        return 1 if self.transport == "processes" else 2

    @property
    def workload(self) -> Workload | None:
        """The calls of the model, or None for a small model."""
        known = PRESETS.get(self.model)
        return known and known.workload(replace(known.sizes, **self.sizes))


# The cases, the most important first.  With 500 TFLOP/s and a PCIe bandwidth of 50 GB/s, a forward takes as long as the
# copy of all weights at about 10,000 tokens.  The cases have more and fewer tokens than that.
CASES = (
    Case("wan2.2-ti2v-5b", {"frames": 81}, (*OURS, *THEIRS), 250),
    Case("wan2.2-ti2v-5b", {"frames": 33}, (*OURS, BY_KIND, *THEIRS, REPEATED, APPLY), 340),
    Case("flux.1-dev", {"height": 2048, "width": 2048}, (*OURS, *THEIRS), 300),
    Case("wan2.2-ti2v-5b", {"frames": 81}, OWN_ARMS, 200, "loopback"),
    Case(
        "flux.1-dev", {"height": 1024, "width": 1024}, (*OURS, "chunkflow@25%", "chunkflow@50%", BY_KIND, *THEIRS), 280
    ),
    Case("wan2.2-ti2v-5b", {"frames": 17}, (*OURS, *THEIRS, GROUP_OFFLOAD), 250),
    Case("wan2.2-ti2v-5b", {"frames": 81}, OWN_ARMS, 200, "loopback-kernels"),
    # a step so short that the host may be the bottleneck
    Case("flux.1-dev", {"height": 512, "width": 512}, (RESIDENT, "chunkflow", GRAPH, INDUCTOR, INDUCTOR_GRAPH), 260),
)
# Cases for a rehearsal, with models of two blocks.  They test the script; their figures are meaningless.
DRY_CASES = (
    Case("wan", {}, (*OURS, BY_KIND, GRAPH, *THEIRS, GROUP_OFFLOAD, APPLY), 0),
    Case("wan", {}, OWN_ARMS, 0, "loopback"),
    Case("wan", {}, OWN_ARMS, 0, "loopback-kernels"),
    Case("flux", {}, (*OURS, *THEIRS), 0),
)
DRY_SIZE = Size(layers=2, heads=8, head_dim=64, frames=2, height=16, width=16, text=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the page; its other files are written next to it")
    parser.add_argument("--seconds", type=float, default=520.0, help="time for all cases (default 520)")
    parser.add_argument("--steps", type=int, default=12, help="measured steps per arm, in turns of three (default 12)")
    parser.add_argument("--cases", default="", metavar="N,M", help=f"cases to run, 1 to {len(CASES)} (default: all)")
    parser.add_argument("--profile", type=Path, help="the profile of the GPU (default: measure it)")
    parser.add_argument(
        "--append", action="store_true", help="keep the cases that the page has, and measure the others"
    )
    parser.add_argument("--dry-run", action="store_true", help="small models: shows that the script runs")
    arguments = parser.parse_args()
    start = time.monotonic()
    try:
        device = ready()
        profile = _profile(device, arguments.out, arguments.profile)
    except ChunkflowError as error:
        parser.exit(2, f"{error}\n")
    cases = DRY_CASES if arguments.dry_run else CASES
    known = {str(n): case for n, case in enumerate(cases, 1)}
    chosen = [n for n in arguments.cases.split(",") if n] or list(known)
    if not set(chosen) <= known.keys():
        parser.error(f"--cases {arguments.cases}: there are 1 to {len(cases)}")
    page = Page(arguments.out, device, arguments.dry_run, arguments.append)
    took = dict[str, float]()
    for case in (known[n] for n in chosen):
        if page.has(case):
            continue
        left, began = arguments.seconds - (time.monotonic() - start), time.monotonic()
        if left < took.get(case.model, case.seconds):
            page.add(case, [f"Not measured: {left:.0f} s were left."])
            page.status = page.status or 3
            continue
        page.begin(case)
        try:
            job = replace(_job(case, arguments.steps, str(page.profile)), seconds=left, log=str(page.log))
            found = summarise(job, run_job(job))
            findings = "\n".join(f"* {line}" for line in _findings(found, profile))
            says = [conditions(job, found), f"```\n{bench_table(found)}\n```", findings]
            page.add(case, says, json.loads(found.to_json()))
        except Exception as error:  # noqa: BLE001  (the other cases still run)
            page.add(case, [f"Failed:\n\n```\n{str(error)[-3000:]}\n```"])
            page.status = 1
        took[case.model] = time.monotonic() - began
    parser.exit(page.status)


def _profile(device: torch.device, page: Path, given: Path | None) -> Hardware:
    """Return the profile of the GPU, and write it to a file next to the page.  ``given``: the file of a profile, or None
    to measure one."""
    mine = beside(page, "hardware.json")
    profile = calibrate(device, "this card", loopback=True) if given is None else load_profile(str(given))
    mine.write_text(profile.to_json())
    return profile


class Page:
    """The page and the files that it is made from.

    ``status``: the exit status: 1 if a case failed, or else 3 if a case was skipped, or else 0.
    """

    def __init__(self, out: Path, device: torch.device, dry: bool, append: bool) -> None:
        self._out = out
        self._file = out.with_suffix(".json")
        self.profile = beside(out, "hardware.json")
        self.log = beside(out, "steps.jsonl")
        self.status = 0
        self._cases = read(self._file).get("cases", {}) if append else {}
        if not append:
            self.log.unlink(missing_ok=True)
        versions = f"torch {torch.__version__}, diffusers {version('diffusers')}, Python {platform.python_version()}"
        machine = f"{device_name(device)}, driver {look().driver}, CUDA {torch.version.cuda}, {versions}"
        date = time.strftime("%Y-%m-%d", time.gmtime())
        self._body = {"date": date, "machine": machine, "ran": f"{date}, {machine}.", "dry": dry}
        self._write()

    def begin(self, case: Case) -> None:
        """Begin a case.  Until it ends, the page shows the turns in the log."""
        with self.log.open("a") as file:
            file.write(json.dumps({"case": _title(case)}) + "\n")
        self._write()

    def has(self, case: Case) -> bool:
        """Whether an earlier run measured the case.  Its figures are kept."""
        return bool(self._cases.get(_title(case), {}).get("record"))

    def add(self, case: Case, says: Sequence[str], record: object = None) -> None:
        workload = case.workload and asdict(case.workload)
        self._cases[_title(case)] = {"workload": workload, "says": list(says), "record": record}
        self._write()

    def _write(self) -> None:
        self._file.write_text(json.dumps({**self._body, "cases": self._cases}, indent=1) + "\n")
        write(self._out)


def _job(case: Case, steps: int, hardware: str) -> Job:
    preset = PRESETS.get(case.model)
    regime = Regime(
        family="" if preset else case.model,
        size=DRY_SIZE,
        chunk_bytes=DEFAULT_CHUNK_BYTES if preset else 1 << 16,
        arms=case.arms,
        shows=case.model,
    )
    return Job(
        regime=regime,
        link=None,
        ranks=case.ranks,
        arms=parse_arms(case.arms),
        steps=steps,
        model=case.model if preset else None,
        sizes=case.workload.sizes if case.workload else None,
        device="cuda",
        hardware=hardware,
        transport=case.transport,
    )


def _title(case: Case) -> str:
    sizes = [f"{k} {v}" for k, v in case.sizes.items()]
    form = ["one timestep per token"] if case.workload and case.workload.timestep == "token" else []
    return ", ".join([case.model, *sizes, *form, *([case.transport] if case.ranks > 1 else [])])


def _findings(found: BenchRecord, profile: Hardware) -> Iterator[str]:
    """Yield sentences with the most important figures of a case."""
    arms = found.record.arms
    mine = arms["chunkflow"].step_s or 0.0
    if INDUCTOR_AGAIN in arms:
        yield f"noise: {INDUCTOR} takes {_ratio(found, INDUCTOR_AGAIN, INDUCTOR)} times as long as in another measurement"
    for name in arms:
        if name not in ("chunkflow", INDUCTOR_AGAIN):
            yield f"a step of chunkflow takes {_ratio(found, 'chunkflow', name)} times as long as a step of {name}"
    base, peak = found.peak_bytes.get(INDUCTOR), found.peak_bytes.get("chunkflow")
    if base and peak:
        yield f"its peak is {100 * (1 - peak / base):.0f} % below the peak of {INDUCTOR}"
    if rate := found.copy_rate.get("chunkflow"):
        yield f"it copies at {100 * rate / profile.copy_rate:.0f} % of the calibrated rate"
    yield f"its host is busy for {100 * found.host_s['chunkflow'] / mine:.1f} % of the step"
    yield f"the host's own work: {', '.join(f'{name} {found.host(name)}' for name in found.host_s)}"
    for name in ("layerwise", "chunkflow"):
        if (inflation := found.inflation.get(name)) is not None:
            yield f"collectives are slowed by {100 * inflation:.1f} % with {name}"
    worst = max(found.off, key=lambda n: abs(found.off[n]))
    yield f"the prediction is off by at most {100 * abs(found.off[worst]):.1f} % ({worst})"
    for name, calls in found.settings.items():
        yield f"{name}: `{calls}`"


def _ratio(found: BenchRecord, arm: str, base: str) -> str:
    """Return the ratio of the step times of two arms as text: the median over the rounds, the minimum and the maximum."""
    ratios = found.ratios(arm, base)
    rounds = f"{len(ratios)} round{'s' * (len(ratios) > 1)}"
    return f"{found.ratio(arm, base):.3f} ({min(ratios):.3f} to {max(ratios):.3f} in {rounds})"


if __name__ == "__main__":
    main()
