"""Make the page of a GPU from the files next to it.  Each part of a run adds to these files, so an interrupted run loses
nothing.

The files of the page gpu.md: gpu.json (cases), gpu_card.json (facts about the GPU), gpu_hardware.json (its profile),
gpu_parts.json (how each part of make card ended), gpu_steps.jsonl (one line per measured turn), gpu_calls.jsonl (public
calls), and gpu_graphs.jsonl (whether a step can be one CUDA graph).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

from chunkflow_compile.cli.calibrate import profile_table as describe_profile
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.report.record import seconds
from chunkflow_compile.units import size

ABOUT = """\
# Measured on a GPU

The models are real models at full size, with random weights in bfloat16, on one GPU. `resident`, `layerwise` and
`chunkflow` are programs from one compilation. `inductor` is `torch.compile` alone, with all weights on the GPU,
measured twice to show the noise. `diffusers-group-offload` is configured as diffusers recommends, also compiled by
repeated blocks. The calls of each arm are listed below each table.

The arms take turns, in random order. A turn is a warm-up step, one step with marks between its parts, and three
consecutive steps without marks. The step with marks gives *waited*, *collectives* and *copied at*. The step time is a
third of the time between two events, before and after the three steps, so copies for the next step run inside it.

* *Peak* is the peak of the allocator during these steps.
* *Host* is the CPU time to call one more step. After every 50 instructions of a program, or launches of Triton
  kernels, the host synchronizes with the GPU and the clock stops. If the clock never stopped, the figure is an upper
  bound (*at most*).
* *Differs by* is the largest difference from the output of `resident`, relative to its largest value.
* A ratio of two arms is the median over the rounds, with the smallest and the largest.

In the loopback cases, one process acts as two ranks, and its all-to-alls go through pinned host memory: by the copy
engines, or by kernels, as in NCCL without peer access.
"""

CALLS = """\
## Public calls

Each case is a separate process. A step is one call of the transformer; times are medians over groups of four steps.
*First* is the time of the first call, which compiles, or of the first generation of a pipeline, with four steps.
*Equal* means that the outputs equal the outputs with all weights on the GPU, bit for bit. For a pipeline, they are
compared with the outputs of `compile` in another process."""
CALLS_HEADERS = ("model", "case", "arm", "step, ms", "host, ms", "copied per step", "peak", "first, s", "equal")

DRY = """\
**A rehearsal on small models, without a GPU: its figures mean nothing. No kernel computes in the cases, so no output is
correct.**"""

CANNOT_SHOW = """\
## Not covered by one GPU

* How NCCL collectives and copies of weights slow each other, because there is no second GPU. The loopback case stands
  in for this.
* Exchanges between GPUs over PCIe or NVLink.
* Several processes that read one copy of the weights, each for its own GPU.
* A process for another GPU than the first: whether a helper thread opens a context on the first one."""


def beside(page: Path, name: str) -> Path:
    """Return the path of a file that belongs to a page.  ``name``: such as ``card.json``."""
    return page.with_name(f"{page.stem}_{name}")


def read(path: Path) -> Any:
    """Return the content of a JSON file, or {} if there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(page: Path) -> None:
    """Write the page from the files that exist so far."""
    body = read(page.with_suffix(".json"))
    done = read(beside(page, "parts.json"))
    parts = [ABOUT]
    if body.get("dry") or done.get("dry"):
        parts.append(DRY)
    parts.append(f"Made by `make card`, or `make bench-gpu` for the cases alone. {body.get('ran', '')}".strip())
    parts += [CANNOT_SHOW, "\n".join(_parts(done)), "\n".join(_calls(page)), "\n".join(_graphs(page))]
    parts.append("\n".join(_card(page)))
    if (profile := beside(page, "hardware.json")).exists():
        parts += ["## Its profile", f"```\n{describe_profile(Hardware.from_json(profile.read_text()))}\n```"]
    cases: Mapping[str, Any] = body.get("cases", {})
    for title, case in cases.items():
        parts += [f"## {title}", *case["says"]]
    for title, steps in _begun(beside(page, "steps.jsonl")).items():
        if title not in cases:
            parts += [f"## {title}", "\n".join(_cut_off(steps))]
    page.write_text("\n\n".join(part for part in parts if part) + "\n")


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the parsed lines of a file with one JSON value per line; empty if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _calls(page: Path) -> Iterator[str]:
    found = [line for line in lines(beside(page, "calls.jsonl")) if not line.get("ended")]
    if not found:
        return
    yield f"{CALLS}\n"
    rows = [
        [
            line["model"],
            line["case"],
            line.get("arm", ""),
            f"{line['step_ms']:.1f}" if "step_ms" in line else "",
            _host(line) if "host_ms" in line else "",
            size(line["moved_bytes"]) if "moved_bytes" in line else "",
            size(line["peak_bytes"]) if "peak_bytes" in line else "",
            f"{line['compile_s']:.1f}" if "compile_s" in line else "",
            {True: "yes", False: "**no**", None: ""}[line.get("equal")],
        ]
        for line in found
        if "failed" not in line
    ]
    yield str(tabulate(rows, CALLS_HEADERS, tablefmt="github", disable_numparse=True))
    yield from (f"\n* **{line['case']}, {line['model']}: {line['failed']}**" for line in found if "failed" in line)


def _host(line: Mapping[str, Any]) -> str:
    return f"{'' if line['host_waits'] else 'at most '}{line['host_ms']:.1f}"


def _graphs(page: Path) -> Iterator[str]:
    found = lines(beside(page, "graphs.jsonl"))
    if found:
        yield "## A step as one CUDA graph\n"
    for line in found:
        figures = [line[key] for key in ("says", "failed") if key in line]
        rest = {k: v for k, v in line.items() if k not in ("check", "says", "failed", "ended", "seconds")}
        figures += [f"{k} {round(v, 3) if isinstance(v, float) else v}" for k, v in rest.items()]
        if figures:
            yield f"* {line['check']}: {', '.join(figures)}"


def _card(page: Path) -> Iterator[str]:
    facts = read(beside(page, "card.json"))
    yield "## The GPU alone\n"
    if not facts:
        yield "Not measured: `make card PARTS=facts`."
    for part in facts.values():
        yield from (f"* {line}" for line in part["says"])


def _parts(done: Mapping[str, Any]) -> Iterator[str]:
    if done.get("parts"):
        yield "## Results of the parts\n"
    for name, part in done.get("parts", {}).items():
        yield f"* {name}, {part['seconds']:.0f} s: {part['says']}"
        yield from (f"  * {line}" for line in part["more"])


def _begun(log: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the turns in a log, by case.  If a case was started several times, only the turns of the last start
    count."""
    found: dict[str, list[dict[str, Any]]] = {}
    title = ""
    for line in lines(log):
        if "case" in line:
            title = line["case"]
            found[title] = []
        elif title:
            found[title].append(line)
    return found


def _cut_off(steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines about a case that did not end: the median time of each arm's measured turns."""
    yield f"Cut off after {len(steps)} measured turns of its arms{':' if steps else '.'}\n"
    arms = defaultdict(list)
    for step in steps:
        arms[step["arm"]].append(step["seconds"])
    for name, found in arms.items():
        yield f"* {name}: {seconds(median(found))} per step, median of {len(found)}"
