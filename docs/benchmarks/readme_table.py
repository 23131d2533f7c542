"""The chart and the table of the README: steps measured on single cards, and steps planned for others.

    python docs/benchmarks/readme_table.py           # from the JSON of the cards' pages and from readme_planned.json
    python docs/benchmarks/readme_table.py --plan    # first plans again: traces five models, twenty minutes of one core

Measured steps are those of the cases in ``h100.json`` and ``h200.json``.  Planned ones are what ``chunkflow
simulate`` predicts, on regions cut at blocks and collectives only.  Needs no network; the chart needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.catalog.eager_cost import eager_cost
from chunkflow_compile.catalog.presets import Preset, preset
from chunkflow_compile.catalog.quiet import quiet_diffusers
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.peers import on_peers
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.passes.placement.choice import to_peers
from chunkflow_compile.passes.placement.place import DEFAULT_SLOWDOWN, place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.report.pictures import check_picture, new_axes, save_figure
from chunkflow_compile.simulate.group_offload import play_group_offload, there_and_back_s

BENCHMARKS = Path(__file__).parent
DOCS = BENCHMARKS.parent
README = DOCS.parent / "README.md"
PLANNED = BENCHMARKS / "readme_planned.json"
CHART = DOCS / "measured.png"
# The script writes what lies between <!-- NAME: make readme-table --> and the end after it.
PART, END = "<!-- {}: make readme-table -->\n", "<!-- end -->\n"

# Page, its case, the preset, the card, and the arms of ChunkFlow that are shown.
MEASURED = (
    ("h200", "wan2.2-ti2v-5b, frames 81", "wan2.2-ti2v-5b", "H200", ("chunkflow",)),
    (
        "h100",
        "flux.1-dev, height 1024, width 1024",
        "flux.1-dev",
        "H100",
        ("chunkflow", "chunkflow@25%", "chunkflow@50%"),
    ),
)
MODELS = {
    "flux.1-dev": "FLUX.1-dev",
    "qwen-image": "Qwen-Image",
    "wan2.2-ti2v-5b": "Wan2.2 5B",
    "wan2.2-t2v-a14b": "Wan2.2 A14B",
    "hunyuanvideo": "HunyuanVideo",
}
# Title, profile, ranks, and GiB of a card by its data sheet.
CARDS = (
    ("RTX 4090", "rtx-4090-pcie", 1, 24),
    ("RTX 5090", "rtx-5090-pcie", 1, 32),
    ("H100", "h100-nvlink", 1, 80),
    ("8 x H100", "h100-nvlink", 8, 80),
)
# Of a card for the CUDA context, the libraries' work space and fragmentation.
RESERVED = 1 << 30
# As in several_gpus.py: regions cut at blocks and collectives only, and large chunks.
GROUP_BYTES, CHUNK_BYTES = 1 << 40, 64 << 20
PLAIN, GROUP, CHUNKFLOW = "plain", "group offload", "ChunkFlow"


@dataclass(frozen=True, kw_only=True)
class Way:
    """Seconds of a step, and bytes of weights and activations on each card."""

    step_s: float
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model on a card.  ``ways``: by name; a way that does not fit has a step, too.  ``once_s``: seconds of copies a
    generation under model offload, None if they were not measured.  ``room``: bytes that fit."""

    model: str
    card: str
    ways: Mapping[str, Way]
    once_s: float | None
    room: int
    how: str


def measured(folder: Path = BENCHMARKS) -> list[Row]:
    """The rows that were measured.  Raises ChunkflowError if a page's JSON, or a case of it, is missing."""
    rows = []
    for page, case, model, card, arms in MEASURED:
        path = folder / f"{page}.json"
        if not path.exists():
            raise ChunkflowError(
                f"{path} is missing: it has what was measured on the {card}. Restore it from version control."
            )
        cases = json.loads(path.read_text())["cases"]
        if case not in cases:
            raise ChunkflowError(f"{path} has no case {case!r}; it has {', '.join(cases)}.")
        found = cases[case]["record"]
        for arm in arms:
            named = {PLAIN: "inductor", GROUP: "diffusers-group-offload-compiled", CHUNKFLOW: arm}
            ways = {
                way: Way(step_s=found["arms"][a]["step_s"], nbytes=found["peak_bytes"][a]) for way, a in named.items()
            }
            rows.append(Row(model=model, card=card, ways=ways, once_s=None, room=1 << 60, how="measured"))
    return rows


def planned(path: Path = PLANNED) -> list[Row]:
    """The rows that are planned.  Raises ChunkflowError if their file is missing."""
    if not path.exists():
        raise ChunkflowError(f"{path} is missing: it has the planned steps. Write it again with --plan.")
    rows = []
    for row in json.loads(path.read_text()):
        ways = {name: Way(**way) for name, way in row.pop("ways").items()}
        rows.append(Row(**row, ways=ways))
    return rows


def plan(model: str, ranks: int) -> list[Row]:
    """A model on all cards in hosts of so many, traced once."""
    known = preset(model)
    cut = make_cut(replace(known.trace(ranks), fused=True), GROUP_BYTES)
    activations = _activations(known) // ranks  # those of a rank are of its part of the tokens
    return [
        _on(known, cut, activations, title, load_profile(profile), ranks, gib << 30)
        for title, profile, count, gib in CARDS
        if count == ranks
    ]


def _activations(known: Preset) -> int:
    import torch

    cost = eager_cost(partial(known.build, known.sizes, torch.device("cpu")), torch.bfloat16)
    return cost.activations


def _on(known: Preset, cut: Cut, activations: int, card: str, hardware: Hardware, ranks: int, capacity: int) -> Row:
    problem, room = cut.problem, capacity - RESERVED
    planned = partial(place, hardware=hardware, chunk_bytes=CHUNK_BYTES)
    group = play_group_offload(problem, hardware)
    ways = {
        PLAIN: _way(planned(problem, policy="resident"), known.forwards, activations),
        GROUP: Way(step_s=group.timeline.step_s * known.forwards, nbytes=group.device_bytes + activations),
    }
    smallest = partial(planned, slowdown=DEFAULT_SLOWDOWN)
    if not hardware.why_no_peers(ranks):
        rate = hardware.rate_beside_pulls(ranks)
        problem = on_peers(cut, to_peers(cut, smallest, ranks, budget=False, host_rate=rate), ranks).problem
    chosen = smallest(problem)
    if chosen.device_bytes < group.device_bytes:  # in the same bytes, then
        chosen = planned(problem, memory=group.device_bytes)
    if chosen.device_bytes + activations > room:
        chosen = planned(problem, memory=room - activations)
    ways[CHUNKFLOW] = _way(chosen, known.forwards, activations)
    once_s = there_and_back_s(problem.total_bytes, hardware)
    return Row(model=known.name, card=card, ways=ways, once_s=once_s, room=room, how="planned")


def _way(plan: Plan, forwards: int, activations: int) -> Way:
    assert plan.predicted is not None
    return Way(step_s=plan.predicted.step_s * forwards, nbytes=plan.device_bytes + activations)


def table(rows: Sequence[Row]) -> str:
    """The table of the README."""
    return tabulate(
        [
            (
                MODELS[row.model],
                row.card,
                _cell(row, PLAIN),
                "" if row.once_s is None else f"{row.once_s:.0f} s" if _fits(row, PLAIN) else "does not fit",
                _cell(row, GROUP),
                _cell(row, CHUNKFLOW),
                row.how,
            )
            for row in rows
        ],
        headers=("model", "card", "plain `torch.compile`", "model offload adds", "group offload", "**ChunkFlow**", ""),
        tablefmt="github",
    )


def _fits(row: Row, way: str) -> bool:
    return row.ways[way].nbytes <= row.room


def _cell(row: Row, way: str) -> str:
    found = row.ways[way]
    if not _fits(row, way):
        return f"{found.nbytes / 2**30:.0f} GiB: does not fit"
    step = f"{found.step_s:.1f} s" if found.step_s >= 10 else f"{found.step_s:.2f} s"
    if found.step_s < 1:
        step = f"{1e3 * found.step_s:.0f} ms"
    return f"{step}, {found.nbytes / 2**30:.1f} GiB"


def draw(rows: Sequence[Row], path: Path) -> None:
    """The chart: steps and peak memory of what was measured.  Raises ChunkflowError without matplotlib."""
    check_picture(path)
    figure, axes = new_axes(9.0, 2.9, columns=2)
    labels, colours = list[str](), {PLAIN: "#9aa5b1", GROUP: "#f2a541", CHUNKFLOW: "#4c78a8"}
    bars: list[tuple[Way, str]] = []
    for before, row in zip([None, *rows], rows, strict=False):
        again = before is not None and (before.model, before.card) == (row.model, row.card)
        for way in [CHUNKFLOW] if again else [PLAIN, GROUP, CHUNKFLOW]:
            bars.append((row.ways[way], way))
            labels.append(f"{MODELS[row.model]}, {row.card}: {way}")
    for axis, values, unit in zip(
        axes,
        ([1e3 * way.step_s for way, _ in bars], [way.nbytes / 2**30 for way, _ in bars]),
        ("a step, ms", "peak of the card, GiB"),
        strict=True,
    ):
        drawn = axis.barh(range(len(bars)), values, color=[colours[name] for _, name in bars], height=0.7)
        axis.bar_label(drawn, fmt="%.0f" if unit.endswith("ms") else "%.1f", padding=3, fontsize=8)
        axis.set(xlabel=unit, xlim=(0, 1.18 * max(values)))
        axis.set_yticks(range(len(bars)), labels if axis is axes[0] else [""] * len(bars), fontsize=8)
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def digest(rows: Sequence[Row]) -> str:
    """Of what the chart shows, so that a stale one is found without drawing it."""
    shown = json.dumps(
        [{"card": r.card, "ways": {n: asdict(w) for n, w in r.ways.items()}} for r in rows], sort_keys=True
    )
    return sha256(shown.encode()).hexdigest()[:12]


def headline(row: Row) -> str:
    """The first sentence with figures."""
    page, *_ = next(case for case in MEASURED if case[2:4] == (row.model, row.card))
    plain, group, ours = (_cell(row, way).replace(", ", " in ") for way in (PLAIN, GROUP, CHUNKFLOW))
    return (
        f"Measured on [one {row.card}](docs/benchmarks/{page}.md), random weights: "
        f"a step of {MODELS[row.model]} takes **{ours}** of the card, where\n"
        f"plain `torch.compile` takes {plain}, and diffusers' group offload {group}."
    )


def written(readme: str, rows: Sequence[Row], shown: Sequence[Row]) -> str:
    """The README with this table, and with this chart's digest as its title.  ``shown``: of the chart.

    Raises ChunkflowError if it has no place for one of them.
    """
    chart = f'![step time and peak memory, measured on single cards](docs/{CHART.name} "{digest(shown)}")'
    for name, body in (("chart", f"{headline(shown[0])}\n\n{chart}"), ("table", table(rows))):
        before, begin, rest = readme.partition(PART.format(name))
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ChunkflowError(
                f"README.md has no place for the {name}: put {PART.format(name).strip()} and {END.strip()} around it."
            )
        readme = f"{before}{begin}{body}\n{end}{after}"
    return readme


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="plan again, into readme_planned.json")
    parser.add_argument("--models", default=",".join(MODELS), help="with --plan: those to plan again, others are kept")
    arguments = parser.parse_args(given)
    try:
        if arguments.plan:
            _plan_again(arguments.models.split(","))
        shown = measured()
        rows = [*shown, *planned()]
        draw(shown, CHART)
        README.write_text(written(README.read_text(), rows, shown))
    except ChunkflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _plan_again(models: Sequence[str]) -> None:
    """Plan the models, and keep the rows of others; the file is written after each."""
    quiet_diffusers()
    order = [(model, title) for model in MODELS for title, *_ in CARDS]
    for model, ranks in tqdm([(m, r) for m in models for r in sorted({c[2] for c in CARDS})], desc="models and ranks"):
        new = plan(model, ranks)
        replaced = {(row.model, row.card) for row in new}
        kept = [row for row in (planned() if PLANNED.exists() else []) if (row.model, row.card) not in replaced]
        rows = sorted([*kept, *new], key=lambda row: order.index((row.model, row.card)))
        PLANNED.write_text(json.dumps([_as_json(row) for row in rows], indent=1) + "\n")


def _as_json(row: Row) -> dict[str, Any]:
    body = asdict(row)
    for way in body["ways"].values():
        way["step_s"] = round(way["step_s"], 6)
    return body | {"once_s": None if row.once_s is None else round(row.once_s, 3)}


if __name__ == "__main__":
    sys.exit(main())
