"""The page of a card, from the files beside it: each part of a run adds to them, so a run that is cut off loses nothing.

For the page gpu.md: gpu.json has the cases, gpu_card.json the facts of the card, gpu_hardware.json its profile,
gpu_parts.json how the parts of make card ended, gpu_steps.jsonl a line for each measured turn, gpu_calls.jsonl what users
call, and gpu_graphs.jsonl whether a step can be one CUDA graph.
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
# On a GPU

Real models at full size, random weights in bfloat16, one card. `resident`, `layerwise` and `chunkflow` are programs of one
compilation; `inductor` is plain `torch.compile`, all weights on the card, measured twice, which shows the noise.
`diffusers-group-offload` is as diffusers recommends it, also compiled by repeated blocks. The calls of each arm stand below
each table.

The arms take turns, in random order. A turn is a warm-up step, one with marks between its parts, from which *waited*,
*collectives* and *copied at* are, and three in a row without; a step is a third of what passes between events before and
after these three, so copies for the next step run inside it. *Peak* is what the allocator held in them. *Host* is the host's
own work in the call of one more step: after every 50 instructions of a program or launches of Triton's kernels it waits for
the card, and its clock stands still then. Where it never stood still, it may have waited: *at most*. *Differs by* is the
largest difference from the output of `resident`, over its largest value. A ratio of two arms is the median over the rounds,
with the least and the largest.

In the loopback cases, one process acts as two ranks, and its all-to-alls go through pinned host memory: by the copy
engines, or by kernels, as in NCCL without peer access.
"""

CALLS = """\
## What users call

Each case is a process of its own. A step is a call of the transformer, the median of rows of four; *first* is the seconds of
the first call, which compiles, or of the first generation of a pipeline, of four steps. *Equal*: outputs are those with all
weights on the card, bit for bit; those of a pipeline are compared with those of `compile` in another process."""
CALLS_HEADERS = ("model", "case", "arm", "step, ms", "host, ms", "moved a step", "peak", "first, s", "equal")

DRY = """\
**A rehearsal on small models, without a card: its figures mean nothing. No kernel computes in the cases, so no output is
right.**"""

CANNOT_SHOW = """\
## What one card cannot show

* How the collectives of NCCL and the copies of weights slow each other: there is no other card to exchange with. The
  loopback case stands for it.
* Exchanges with peers over PCIe or NVLink.
* Several processes that read one copy of the weights, each for its own card.
* A process for any card but the first: whether a helper thread opens a context on the first one."""


def beside(page: Path, name: str) -> Path:
    """The file of a page with this name, such as ``card.json``."""
    return page.with_name(f"{page.stem}_{name}")


def read(path: Path) -> Any:
    """What a JSON file has, {} if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def write(page: Path) -> None:
    """Write the page from what there is."""
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
    """What a file of JSON lines has, none if there is no file."""
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
        yield "## Whether a step can be one CUDA graph\n"
    for line in found:
        figures = [line[key] for key in ("says", "failed") if key in line]
        rest = {k: v for k, v in line.items() if k not in ("check", "says", "failed", "ended", "seconds")}
        figures += [f"{k} {round(v, 3) if isinstance(v, float) else v}" for k, v in rest.items()]
        if figures:
            yield f"* {line['check']}: {', '.join(figures)}"


def _card(page: Path) -> Iterator[str]:
    facts = read(beside(page, "card.json"))
    yield "## The card by itself\n"
    if not facts:
        yield "Not measured: `make card PARTS=facts`."
    for part in facts.values():
        yield from (f"* {line}" for line in part["says"])


def _parts(done: Mapping[str, Any]) -> Iterator[str]:
    if done.get("parts"):
        yield "## How the parts ended\n"
    for name, part in done.get("parts", {}).items():
        yield f"* {name}, {part['seconds']:.0f} s: {part['says']}"
        yield from (f"  * {line}" for line in part["more"])


def _begun(log: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of each case that was begun; those of its last run."""
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
    """What a case has measured that did not end."""
    yield f"Cut off after {len(steps)} measured turns of its arms{':' if steps else '.'}\n"
    arms = defaultdict(list)
    for step in steps:
        arms[step["arm"]].append(step["seconds"])
    for name, found in arms.items():
        yield f"* {name}: a step takes {seconds(median(found))}, median of {len(found)}"
