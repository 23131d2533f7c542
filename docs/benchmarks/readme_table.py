"""The chart and the table of the README: forwards measured on single GPUs, and forwards planned for others.

    python docs/benchmarks/readme_table.py           # from the JSON of the GPUs' pages and from readme_planned.json
    python docs/benchmarks/readme_table.py --plan    # plans first: traces five models, twenty minutes of one core

Measured forwards are those of the cases in ``h100.json`` and ``h200.json``.  Planned ones are what ``chunkflow
simulate`` predicts, on regions cut at blocks and collectives only.  Every label (model, frames, resolution, form of the
timestep, forwards per step) is made from the workload that a case records.  Needs no network; the chart needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.catalog.eager_cost import eager_cost
from chunkflow_compile.catalog.presets import Preset, Workload, preset
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

# Page, its case, the GPU, and the arms of ChunkFlow that are shown.
MEASURED = (
    ("h200", "wan2.2-ti2v-5b, frames 81", "H200", ("chunkflow",)),
    ("h100", "flux.1-dev, height 1024, width 1024", "H100", ("chunkflow", "chunkflow@25%", "chunkflow@50%")),
)
MODELS = {
    "flux.1-dev": "FLUX.1-dev",
    "qwen-image": "Qwen-Image",
    "wan2.2-ti2v-5b": "Wan2.2 5B",
    "wan2.2-t2v-a14b": "Wan2.2 A14B",
    "hunyuanvideo": "HunyuanVideo",
}


@dataclass(frozen=True)
class Gpus:
    """GPUs of one host: their profile, how many ranks run on them, and the nominal memory of each in GiB (data sheet)."""

    profile: str
    ranks: int
    nominal_gib: int


GPUS = {
    "RTX 4090": Gpus("rtx-4090-pcie", 1, 24),
    "RTX 5090": Gpus("rtx-5090-pcie", 1, 32),
    "H100": Gpus("h100-nvlink", 1, 80),
    "8 x H100": Gpus("h100-nvlink", 8, 80),
    "H200": Gpus("h200", 1, 141),
}
# A way fits if its bytes are at most the nominal memory of a GPU less this, for the CUDA context, the workspaces of libraries
# and fragmentation.  Memory that other processes hold is not subtracted.
RESERVED_GIB = 1
# Preset, GPUs, and sizes other than the usual ones.  The first is what the H200 measured with one timestep per sample, as
# the pipeline calls the model.
CASES: tuple[tuple[str, str, Mapping[str, int]], ...] = (
    ("wan2.2-ti2v-5b", "H200", {"frames": 81}),
    *((model, gpus, {}) for model in MODELS for gpus in ("RTX 4090", "RTX 5090", "H100", "8 x H100")),
)
# As in several_gpus.py: regions cut at blocks and collectives only, and large chunks.
GROUP_BYTES, CHUNK_BYTES = 1 << 40, 64 << 20
PLAIN, GROUP, CHUNKFLOW = "plain", "group offload", "ChunkFlow"


@dataclass(frozen=True, kw_only=True)
class Way:
    """Seconds of one forward, and bytes of weights and activations on each GPU."""

    forward_s: float
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured or planned of a workload on ``gpus``, a key of :data:`GPUS`.

    ``ways``: by name; those that do not fit are included.  ``once_s``: seconds of copies per generation under model
    offload, None if they were not measured.  ``how``: measured or planned.
    """

    workload: Workload
    gpus: str
    ways: Mapping[str, Way]
    once_s: float | None
    how: str

    @property
    def available(self) -> int:
        """Bytes of a GPU that a way may take: the nominal ones less those reserved."""
        return GPUS[self.gpus].nominal_gib - RESERVED_GIB << 30

    def fits(self, way: str) -> bool:
        return self.ways[way].nbytes <= self.available


def measured(folder: Path = BENCHMARKS) -> list[Row]:
    """The rows that were measured.  Raises ChunkflowError if a page's JSON, or a case of it, is missing."""
    rows = []
    for page, case, gpus, arms in MEASURED:
        path = folder / f"{page}.json"
        if not path.exists():
            raise ChunkflowError(
                f"{path} is missing: it has what was measured on the {gpus}. Restore it from version control."
            )
        cases = json.loads(path.read_text())["cases"]
        if case not in cases:
            raise ChunkflowError(f"{path} has no case {case!r}; it has {', '.join(cases)}.")
        workload, found = Workload.from_json(cases[case]["workload"]), cases[case]["record"]
        for arm in arms:
            named = {PLAIN: "inductor", GROUP: "diffusers-group-offload-compiled", CHUNKFLOW: arm}
            ways = {  # a step of the benchmark is one forward
                way: Way(forward_s=found["arms"][a]["step_s"], nbytes=found["peak_bytes"][a])
                for way, a in named.items()
            }
            rows.append(Row(workload=workload, gpus=gpus, ways=ways, once_s=None, how="measured"))
    return rows


def planned(path: Path = PLANNED) -> list[Row]:
    """The rows that are planned.  Raises ChunkflowError if their file is missing."""
    if not path.exists():
        raise ChunkflowError(f"{path} is missing: it has the planned forwards. Write it again with --plan.")
    return [_row(body) for body in json.loads(path.read_text())]


def _row(body: Mapping[str, Any]) -> Row:
    ways = {name: Way(**way) for name, way in body["ways"].items()}
    return Row(**{**body, "workload": Workload.from_json(body["workload"]), "ways": ways})


def cases() -> Iterator[tuple[Workload, str]]:
    """The workloads that are planned, each with its GPUs, in the order of the table."""
    for model, gpus, sizes in CASES:
        known = preset(model)
        yield known.workload(replace(known.sizes, **sizes)), gpus


def plan(workload: Workload, ranks: int) -> list[Row]:
    """A workload on all GPUs of ``ranks`` ranks that it is planned for, traced once."""
    known = preset(workload.model)
    cut = make_cut(replace(known.trace(ranks, workload.sizes), fused=True), GROUP_BYTES)
    activations = _activations(known, workload) // ranks  # those of a rank are of its part of the tokens
    return [
        _on(workload, cut, activations, gpus)
        for each, gpus in cases()
        if each == workload and GPUS[gpus].ranks == ranks
    ]


def _activations(known: Preset, workload: Workload) -> int:
    import torch

    return eager_cost(partial(known.build, workload.sizes, torch.device("cpu")), torch.bfloat16).activations


def _on(workload: Workload, cut: Cut, activations: int, gpus: str) -> Row:
    hardware, ranks, problem = load_profile(GPUS[gpus].profile), GPUS[gpus].ranks, cut.problem
    planned = partial(place, hardware=hardware, chunk_bytes=CHUNK_BYTES)
    group = play_group_offload(problem, hardware)
    ways = {
        PLAIN: _way(planned(problem, policy="resident"), activations),
        GROUP: Way(forward_s=group.timeline.step_s, nbytes=group.device_bytes + activations),
    }
    row = Row(
        workload=workload,
        gpus=gpus,
        ways=ways,
        once_s=there_and_back_s(problem.total_bytes, hardware),
        how="planned",
    )
    smallest = partial(planned, slowdown=DEFAULT_SLOWDOWN)
    if not hardware.why_no_peers(ranks):
        rate = hardware.rate_beside_pulls(ranks)
        problem = on_peers(cut, to_peers(cut, smallest, ranks, budget=False, host_rate=rate), ranks).problem
    chosen = smallest(problem)
    if chosen.device_bytes < group.device_bytes:  # give it the same bytes
        chosen = planned(problem, memory=group.device_bytes)
    if chosen.device_bytes + activations > row.available:
        chosen = planned(problem, memory=row.available - activations)
    return replace(row, ways={**ways, CHUNKFLOW: _way(chosen, activations)})


def _way(plan: Plan, activations: int) -> Way:
    assert plan.predicted is not None
    return Way(forward_s=plan.predicted.step_s, nbytes=plan.device_bytes + activations)


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
    order = list(cases())
    todo = dict.fromkeys((w, GPUS[gpus].ranks) for w, gpus in order if w.model in models)
    for workload, ranks in tqdm(todo, desc="workloads and ranks"):
        found = {(row.workload, row.gpus): row for row in (planned() if PLANNED.exists() else [])}
        found |= {(row.workload, row.gpus): row for row in plan(workload, ranks)}
        rows = [_as_json(found[case]) for case in order if case in found]  # a case that is gone leaves no row
        PLANNED.write_text(json.dumps(rows, indent=1) + "\n")


def _as_json(row: Row) -> dict[str, Any]:
    body = asdict(row)
    for way in body["ways"].values():
        way["forward_s"] = round(way["forward_s"], 6)
    return body | {"once_s": None if row.once_s is None else round(row.once_s, 3)}


if __name__ == "__main__":
    sys.exit(main())
