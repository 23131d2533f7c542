"""Benchmark on a GPU: calibrate the card, then run models at full size with random weights, arms in turns.

python docs/benchmarks/gpu.py --out docs/benchmarks/gpu.md

The page is written anew after each case, and every measured step goes to a log next to it at once: what was measured is
not lost when the script is cut off.  A case for which no time is left is not run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import diffusers
import torch
from gpu_card import GIB, Card, measure

from chunkflow_compile.bench.arms import parse_arms
from chunkflow_compile.bench.job import RESIDENT, Job, Transport
from chunkflow_compile.bench.peers import GROUP_OFFLOAD, GROUP_OFFLOAD_COMPILED, INDUCTOR
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import PEERS, Regime
from chunkflow_compile.bench.summary import BenchRecord, bench_table, describe, summarise
from chunkflow_compile.cli.calibrate import describe as describe_profile
from chunkflow_compile.hardware.calibrate import calibrate
from chunkflow_compile.hardware.machine import look
from chunkflow_compile.models.presets import PRESETS
from chunkflow_compile.models.small import Size
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES
from chunkflow_compile.runtime.device import check_device

OURS = (RESIDENT, "layerwise", "chunkflow")

ABOUT = """\
# On a GPU

Real models at full size, random weights in bfloat16, one card. `resident`, `layerwise` and `chunkflow` are programs of one
compilation; `inductor` is plain `torch.compile` with all weights on the card; `diffusers-group-offload` is
`enable_group_offload(block_level, use_stream=True)`, alone and with `compile_repeated_blocks`. The arms take turns of one
step, in random order. *Peak* is what the allocator held for the arm, weights and activations; *host* is the time until
the call returned; *copied at* is the rate while copies ran; *differs by* is the largest difference from the output of
`resident`, over the largest value of that output. In the loopback case, one process acts as two ranks, and its all-to-alls
go through pinned host memory, as NCCL's do on nodes without peer access.
"""


@dataclass(frozen=True)
class Case:
    """A model at one size.  ``transport``: "loopback" for two ranks on one card.

    ``seconds``: an estimate of compilation with empty caches and the first round: with less time left, it is not started.
    """

    model: str
    sizes: dict[str, int]
    arms: tuple[str, ...]
    seconds: float
    transport: Transport = "processes"

    @property
    def ranks(self) -> int:
        return 2 if self.transport == "loopback" else 1


# The most important first.  On a card of 500 TFLOP/s with a link of 50 GB/s, a forward of 5 or 12 billion weights takes
# as long as their copy (F*) at some 10,000 tokens; the sizes are on both sides of that.
CASES = (
    Case("wan2.2-ti2v-5b", {"frames": 81}, (*OURS, INDUCTOR, GROUP_OFFLOAD), 200),
    Case("wan2.2-ti2v-5b", {"frames": 33}, (*OURS, INDUCTOR, GROUP_OFFLOAD), 200),
    Case("flux.1-dev", {"height": 2048, "width": 2048}, (*OURS, INDUCTOR, GROUP_OFFLOAD), 300),
    Case("wan2.2-ti2v-5b", {"frames": 81}, PEERS, 200, "loopback"),
    Case("flux.1-dev", {"height": 1024, "width": 1024}, (*OURS, INDUCTOR, GROUP_OFFLOAD), 300),
    Case("wan2.2-ti2v-5b", {"frames": 17}, (*OURS, INDUCTOR, GROUP_OFFLOAD, GROUP_OFFLOAD_COMPILED), 250),
)
# The same steps of the script on models of two blocks: they prove that it runs, and their figures mean nothing.
DRY_CASES = (
    Case("wan", {}, (*OURS, INDUCTOR, GROUP_OFFLOAD, GROUP_OFFLOAD_COMPILED), 0),
    Case("wan", {}, PEERS, 0, "loopback"),
)
DRY_SIZE = Size(layers=2, heads=4, head_dim=32, frames=2, height=16, width=16, text=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=520.0, help="time for all cases (default 520)")
    parser.add_argument("--steps", type=int, default=6, help="measured steps per arm (default 6)")
    parser.add_argument("--cases", default="", metavar="N,M", help=f"cases to run, 1 to {len(CASES)} (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="small models: shows that the script runs")
    arguments = parser.parse_args()
    start = time.monotonic()
    try:
        device = check_device(torch.device("cuda"))
    except ChunkflowError as error:
        parser.exit(2, f"{error}\n")
    machine = look()
    dry = arguments.dry_run
    card = measure(device, machine, *((GIB // 64, 256) if dry else ()))
    print(*card.lines(), sep="\n", flush=True)
    profile = calibrate(device, "this card", loopback=True)
    hardware = arguments.out.with_name(f"{arguments.out.stem}_hardware.json")
    hardware.write_text(profile.to_json())
    log = arguments.out.with_name(f"{arguments.out.stem}_steps.jsonl")
    log.unlink(missing_ok=True)
    parts, records, took = [], [], dict[str, float]()
    write = partial(_write, arguments.out, card, profile, parts, records, dry)
    write(time.monotonic() - start)
    cases = DRY_CASES if dry else CASES
    chosen = [int(n) for n in arguments.cases.split(",") if n] or range(1, len(cases) + 1)
    for case in (cases[n - 1] for n in chosen):
        left = arguments.seconds - (time.monotonic() - start)
        if left < took.get(case.model, case.seconds):
            parts.append(f"## {_title(case)}: not measured, no time was left")
            continue
        began = time.monotonic()
        with log.open("a") as file:
            file.write(json.dumps({"case": case.model, **case.sizes, "transport": case.transport}) + "\n")
        try:
            job = replace(_job(case, arguments.steps, str(hardware)), seconds=left, log=str(log))
            found = summarise(job, run_job(job))
            parts += [f"## {_title(case)}", describe(job, found), f"```\n{bench_table(found)}\n```"]
            parts += [f"* {line}" for line in _findings(found, profile)]
            records.append(json.loads(found.to_json()))
        except Exception as error:  # noqa: BLE001  (the other cases still run)
            parts.append(f"## {_title(case)}: failed\n\n```\n{str(error)[-3000:]}\n```")
        took[case.model] = time.monotonic() - began
        write(time.monotonic() - start)
    write(time.monotonic() - start)


def _job(case: Case, steps: int, hardware: str) -> Job:
    preset = PRESETS.get(case.model)
    regime = Regime(
        family="" if preset else case.model,
        size=DRY_SIZE,
        load=0.0,
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
        sizes=replace(preset.sizes, **case.sizes) if preset else None,
        device="cuda",
        hardware=hardware,
        transport=case.transport,
    )


def _title(case: Case) -> str:
    sizes = [f"{k} {v}" for k, v in case.sizes.items()]
    return ", ".join([case.model, *sizes, *(["loopback"] if case.ranks > 1 else [])])


def _findings(found: BenchRecord, profile: Hardware) -> Iterator[str]:
    """The figures of this run that the case is meant to show."""
    arms = found.record.arms
    mine = arms["chunkflow"].step_s or 0.0
    for name, arm in arms.items():
        if name != "chunkflow" and arm.step_s:
            yield f"chunkflow takes {mine / arm.step_s:.3f} of the step of {name}"
    base, peak = found.peak_bytes.get(INDUCTOR), found.peak_bytes.get("chunkflow")
    if base and peak:
        yield f"its peak is {100 * (1 - peak / base):.0f} % below that of {INDUCTOR}"
    if rate := found.copy_rate.get("chunkflow"):
        yield f"it copies at {100 * rate / profile.copy_rate:.0f} % of the calibrated rate"
    yield f"its host needs {100 * found.host_s['chunkflow'] / mine:.1f} % of the step"
    for name in ("layerwise", "chunkflow"):
        if (inflation := found.inflation.get(name)) is not None:
            yield f"collectives are inflated by {100 * inflation:.1f} % under {name}"
    off = {n: (p.step_s or 0.0) / (arms[n].step_s or 1.0) - 1 for n, p in found.predicted.items()}
    worst = max(off, key=lambda n: abs(off[n]))
    yield f"the prediction is off by at most {100 * abs(off[worst]):.1f} % ({worst})"


def _write(
    out: Path, card: Card, profile: Hardware, parts: Sequence[str], records: Sequence[object], dry: bool, took: float
) -> None:
    date = time.strftime("%Y-%m-%d", time.gmtime())
    ran = f"{date}, {card.versions}, diffusers {diffusers.__version__}; {took:.0f} s."
    about = [ABOUT, "**A dry run on small models: its figures mean nothing.**"] if dry else [ABOUT]
    alone = ["## The card by itself", *(f"* {line}" for line in card.lines()[1:]), _fenced(profile)]
    text = "\n\n".join([*about, f"```\npython docs/benchmarks/gpu.py --out {out}\n```", ran, *alone, *parts])
    out.write_text(text.replace("\n\n* ", "\n* ") + "\n")
    body = {
        "date": date,
        "machine": ran,
        "card": card.to_dict(),
        "profile": json.loads(profile.to_json()),
        "cases": list(records),
    }
    out.with_suffix(".json").write_text(json.dumps(body, indent=1) + "\n")


def _fenced(profile: Hardware) -> str:
    return f"```\n{describe_profile(profile)}\n```"


if __name__ == "__main__":
    main()
