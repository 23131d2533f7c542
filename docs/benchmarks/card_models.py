"""Measure models with a few blocks of full width on a GPU, by type of kernel, and compare the times with predictions.

python docs/benchmarks/card_models.py --measure models.jsonl                          on a GPU
python docs/benchmarks/card_models.py --measured models.jsonl --hardware PROFILE > models.md

The script writes a line for each case as soon as it ends.  A step is a call of the model; its time is the median of seven
calls, each measured between two CUDA events.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from chunkflow_compile.catalog.presets import OutputSizes, Preset, preset
from chunkflow_compile.catalog.sizes import Timestep
from chunkflow_compile.hardware.device_figures import BACKENDS
from chunkflow_compile.hardware.machine import device_name
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.problem import Problem

STEPS = 7
# Parts of the names of kernels from cuBLAS, cuDNN, CUTLASS and FlashAttention, by type of kernel.
_ATTENTION = ("flash", "fmha", "sdpa", "attention")
_PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "gemv", "splitk", "conv", "cublas")
KINDS = ("products", "attention", "other")


@dataclass(frozen=True)
class Case:
    """A preset with fewer blocks.  ``blocks``: for each block type, the name of its configuration parameter and the
    number of blocks.  ``kernel``: the attention kernel; empty for the one that torch chooses.

    ``timestep``: whether a call passes one timestep per sample or per token.  In some measured cases, this differs from
    the pipeline.
    """

    model: str
    blocks: Mapping[str, int]
    sizes: OutputSizes
    fused: bool
    kernel: str = ""
    timestep: Timestep = "sample"

    @property
    def preset(self) -> Preset:
        known = preset(self.model)
        return replace(known, config={**known.config, **self.blocks}, timestep=self.timestep)


# The models and sizes that were measured on the H100.
_MODELS: tuple[tuple[str, dict[str, int], OutputSizes], ...] = (
    ("flux.1-dev", {"num_layers": 4, "num_single_layers": 8}, OutputSizes(height=1024, width=1024)),
    ("qwen-image", {"num_layers": 8}, OutputSizes(height=1024, width=1024, text=64)),
    ("wan2.2-ti2v-5b", {"num_layers": 4}, OutputSizes(height=704, width=1280, frames=81)),
    ("wan2.2-t2v-a14b", {"num_layers": 3}, OutputSizes(height=480, width=832, frames=81)),
    (
        "hunyuanvideo",
        {"num_layers": 2, "num_single_layers": 4},
        OutputSizes(height=720, width=1280, frames=33, text=256),
    ),
)
CASES = tuple(
    Case(model, blocks, sizes, fused, kernel, preset(model).timestep)
    for fused, kernel in ((True, ""), (False, ""), (False, "fa2"), (False, "cudnn"))
    for model, blocks, sizes in _MODELS
)


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    """Measure a case: milliseconds of a step, of its kernels by type, and of the host to issue them, and the number of
    kernels."""
    from torch.nn.attention import sdpa_kernel
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    model, inputs = case.preset.build(case.sizes, device)
    model.eval().requires_grad_(False)
    call = torch.compile(model, dynamic=False) if case.fused else model
    only = sdpa_kernel(BACKENDS[case.kernel]) if case.kernel else contextlib.nullcontext()
    with torch.no_grad(), only:
        began = time.perf_counter()
        for _ in range(3):
            call(**inputs)
        torch.cuda.synchronize()
        warm = time.perf_counter() - began
        steps, hosts = list[float](), list[float]()
        for _ in range(STEPS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began = time.perf_counter()
            begin.record()
            call(**inputs)
            end.record()
            hosts.append(1e3 * (time.perf_counter() - began))
            end.synchronize()
            steps.append(begin.elapsed_time(end))
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call(**inputs)
            torch.cuda.synchronize()
    times, counts, names = Counter[str](), Counter[str](), Counter[str]()
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kind = _kind(event.name)
            times[kind] += event.self_device_time_total / 1e3
            counts[kind] += 1
            names[f"{kind}: {event.name[:80]}"] += event.self_device_time_total / 1e3
    return {
        **asdict(case),
        "card": device_name(device),
        "torch": torch.__version__,
        "step_ms": statistics.median(steps),
        "range_ms": [min(steps), max(steps)],
        "host_ms": statistics.median(hosts),
        "warm_s": round(warm, 1),
        "ms": {kind: round(times[kind], 3) for kind in KINDS},
        "kernels": {kind: counts[kind] for kind in KINDS},
        "longest_ms": {name: round(t, 3) for name, t in names.most_common(40)},
    }


def _kind(name: str) -> str:
    low = name.lower()
    if any(part in low for part in _ATTENTION) and "triton" not in low:
        return "attention"
    return "products" if any(part in low for part in _PRODUCTS) and "triton_p" not in low else "other"


def measure_all(out: Path, seconds: float) -> None:
    start, device = time.monotonic(), torch.device("cuda", 0)
    done = {_name(found) for found in read(out)}
    for case in CASES:
        if _name(asdict(case)) in done:
            continue
        if time.monotonic() - start > seconds:
            print("no time is left")
            return
        try:
            found = measure(case, device)
        except Exception as error:  # noqa: BLE001  (the other cases still run)
            print(f"{_name(asdict(case))} failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        with out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{_name(found)}: {found['step_ms']:.2f} ms, {found['ms']}, {found['kernels']}", flush=True)


def _name(found: Mapping[str, Any]) -> str:
    lowering, kernel = "compiled" if found["fused"] else "eager", found["kernel"] or "as torch takes"
    return f"{found['model']}, one timestep per {_timestep(found)}, {lowering}, {kernel}"


def _timestep(found: Mapping[str, Any]) -> Timestep:
    """Return the form of the timestep in a line of measurements.  Files of earlier runs do not contain this form; they
    used one timestep per sample."""
    form: Timestep = found.get("timestep", "sample")
    return form


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def predicted(problem: Problem, machine: Hardware) -> dict[str, float]:
    """Return the predicted milliseconds by type of kernel and of the whole step, and the number of kernels."""
    costs = [region.cost for region in problem.regions]
    gemms = sum(c.gemm_seconds(machine) for c in costs)
    attention = sum(c.attention_seconds(machine) for c in costs)
    step = sum(c.seconds(machine) for c in costs)
    return {
        "products": 1e3 * gemms,
        "attention": 1e3 * attention,
        "other": 1e3 * (step - gemms - attention),
        "step": 1e3 * step,
        "kernels": sum(c.kernels for c in costs),
    }


def rows(measured: Sequence[Mapping[str, Any]], machine: Hardware) -> Iterator[list[object]]:
    problems: dict[tuple[str, str, bool], Problem] = {}
    for found in measured:
        sizes = OutputSizes(**found["sizes"])
        case = Case(found["model"], found["blocks"], sizes, found["fused"], found["kernel"], _timestep(found))
        key = case.model, case.timestep, case.fused
        if key not in problems:
            problems[key] = make_cut(replace(case.preset.trace(1, case.sizes), fused=case.fused)).problem
        kernel = case.kernel or machine.attention
        said = predicted(problems[key], replace(machine, attention=kernel))
        step, parts = found["step_ms"], found["ms"]
        yield [
            case.model,
            case.timestep,
            "compiled" if case.fused else "eager",
            kernel,
            f"{step:.1f}",
            f"{said['step']:.1f}",
            f"{100 * (said['step'] / step - 1):+.0f} %",
            *(f"{parts[k]:.1f} / {said[k]:.1f}" for k in KINDS),
            f"{sum(found['kernels'].values())} / {said['kernels']:.0f}",
            f"{found['host_ms']:.1f}",
        ]


HEADERS = (
    "model", "one timestep per", "lowering", "attention", "measured, ms", "predicted, ms", "error",
    *(f"{k}, measured / predicted" for k in KINDS), "kernels", "host, ms",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--measure", type=Path, metavar="FILE", help="measure on this card; a file that exists is gone on with"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="after which no case is begun (default 300)")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="a file that was measured")
    parser.add_argument("--hardware", help="the profile to predict with")
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure_all(arguments.measure, arguments.seconds)
    if arguments.measured is not None:
        machine = load_profile(arguments.hardware)
        print(tabulate(list(rows(read(arguments.measured), machine)), headers=HEADERS, tablefmt="github"))


if __name__ == "__main__":
    main()
