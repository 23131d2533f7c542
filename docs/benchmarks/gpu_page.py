"""The page of a card, from the files beside it: each part of a run adds to them, so a run that is cut off loses nothing.

For the page gpu.md: gpu.json has the cases, gpu_card.json the facts of the card, gpu_hardware.json its profile,
gpu_parts.json how the parts of make card ended, and gpu_steps.jsonl a line for each measured turn.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from chunkflow_compile.cli.calibrate import profile_table as describe_profile
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.report.record import seconds

ABOUT = """\
# On a GPU

Real models at full size, random weights in bfloat16, one card. `resident`, `layerwise` and `chunkflow` are programs of one
compilation; `inductor` is plain `torch.compile` with all weights on the card, measured twice: `inductor-again` is the same
compiled model, and how far the two differ is the noise. `diffusers-group-offload` is diffusers' own offload as its
documentation recommends it, also compiled by repeated blocks. The calls that make each arm stand below each table.

The arms take turns, in random order in each round. A turn is a warm-up step, a step with marks between its parts, from
which *waited*, *collectives* and *copied at* are, and then three steps in a row without marks. The time of a step is a third
of what passes between an event before these three and one after them: copies for the next step run inside it, as in a
sampler that calls the model again and again. Inputs are made before, and outputs compared after. *Peak* is what the
allocator held for the arm in these steps: weights, activations, inputs and outputs. *Host* is the time until the call of one
more step returned, with nothing queued before it. *Differs by* is the largest difference from the output of `resident` in
these steps, over the largest value of that output. Of two arms, a ratio is the median over the rounds, with the least and
the largest.

In the loopback cases, one process acts as two ranks, and its all-to-alls go through pinned host memory: by the copy
engines, or by kernels that write and read it, as NCCL does without peer access. The two may share the link with copies of
weights in different ways.
"""

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
    parts += [CANNOT_SHOW, "\n".join(_card(page)), "\n".join(_parts(done))]
    if (profile := beside(page, "hardware.json")).exists():
        parts += ["## Its profile", f"```\n{describe_profile(Hardware.from_json(profile.read_text()))}\n```"]
    cases: Mapping[str, Any] = body.get("cases", {})
    for title, case in cases.items():
        parts += [f"## {title}", *case["says"]]
    for title, steps in _begun(beside(page, "steps.jsonl")).items():
        if title not in cases:
            parts += [f"## {title}", "\n".join(_cut_off(steps))]
    page.write_text("\n\n".join(part for part in parts if part) + "\n")


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
    for text in log.read_text().splitlines() if log.exists() else ():
        line = json.loads(text)
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
