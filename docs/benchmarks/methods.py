"""Make the page methods.md: forwards measured on single GPUs and forwards planned for other GPUs, method by method.

``make readme-table`` writes the page.  Measured forwards are from ``h100.json`` and ``h200.json``.  Planned forwards, in
``readme_planned.json``, are the predictions of ``chunkflow simulate`` with regions that are cut only at blocks and
collectives.  All labels (model, frames, resolution, form of the timestep, forwards per step) are made from the recorded
workloads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from textwrap import fill
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.catalog.presets import OutputSizes, Preset, Workload, preset
from chunkflow_compile.catalog.quiet import quiet_diffusers
from chunkflow_compile.cli.planning_arguments import preset_call, trace_entry
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.shard import on_peers
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import DEFAULT_MIN_BYTES
from chunkflow_compile.passes.placement.choice import to_peers
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.report.pictures import check_picture, new_axes, save_figure
from chunkflow_compile.simulate.group_offload import play_group_offload, round_trip_s

BENCHMARKS = Path(__file__).parent
DOCS = BENCHMARKS.parent
PAGE = BENCHMARKS / "methods.md"
PLANNED = BENCHMARKS / "readme_planned.json"
CHART = DOCS / "measured.png"
# The measurements that are shown: a page of measurements, a case on this page, the GPU, and the arms of ChunkFlow.
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
    """GPUs of the same model in one host, with one rank per GPU."""

    profile: str
    ranks: int

    @property
    def nominal_gib(self) -> int:
        """The memory of one GPU according to its data sheet, in GiB."""
        return load_profile(self.profile).memory_bytes >> 30


GPUS = {
    "RTX 4090": Gpus("rtx-4090-pcie", 1),
    "RTX 5090": Gpus("rtx-5090-pcie", 1),
    "H100": Gpus("h100-nvlink", 1),
    "8 x H100": Gpus("h100-nvlink", 8),
    "H200": Gpus("h200", 1),
}
# The memory of a GPU that is reserved for the CUDA context, the workspaces of libraries and fragmentation.  A method fits
# if its bytes are at most the nominal memory minus this reserve.  Memory that other processes hold is not subtracted.
RESERVED_GIB = 1
# The cases to plan: a preset, the GPUs, and the sizes that differ from the preset's sizes.  The first case was measured
# on the H200 with one timestep per sample; it is planned with one timestep per token, as its pipeline calls the model.
CASES: tuple[tuple[str, str, Mapping[str, int]], ...] = (
    ("wan2.2-ti2v-5b", "H200", {"frames": 81}),
    *((model, gpus, {}) for model in MODELS for gpus in ("RTX 4090", "RTX 5090", "H100", "8 x H100")),
)
# Settings with which plans take little time: regions are cut only at blocks and collectives, and chunks are large.
GROUP_BYTES, CHUNK_BYTES = 1 << 40, 64 << 20
# The maximum number of characters in a line of a page.
WIDTH = 128
PLAIN, GROUP, CHUNKFLOW = "torch.compile", "group offload", "ChunkFlow"


@dataclass(frozen=True, kw_only=True)
class Way:
    """The figures of a method: the seconds of one forward, and the bytes of weights and activations on each GPU."""

    forward_s: float
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measured or planned figures of a workload.  ``gpus``: a key of :data:`GPUS`.

    ``ways``: the figures by method, including methods that do not fit.  ``once_s``: the seconds of copies per generation
    with model offload, or None if they were not measured.  ``how``: "measured" or "planned".
    """

    workload: Workload
    gpus: str
    ways: Mapping[str, Way]
    once_s: float | None
    how: str

    @property
    def available(self) -> int:
        """The bytes of GPU memory that a method may use: the nominal memory minus the reserve."""
        return GPUS[self.gpus].nominal_gib - RESERVED_GIB << 30

    def fits(self, way: str) -> bool:
        return self.ways[way].nbytes <= self.available


def measured(folder: Path = BENCHMARKS) -> list[Row]:
    """Return the measured rows.  Raises ChunkflowError if a JSON file or a case in it is missing."""
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
            ways = {  # in these benchmarks, a step is one forward
                way: Way(forward_s=found["arms"][a]["step_s"], nbytes=found["peak_bytes"][a])
                for way, a in named.items()
            }
            rows.append(Row(workload=workload, gpus=gpus, ways=ways, once_s=None, how="measured"))
    return rows


def planned(path: Path = PLANNED) -> list[Row]:
    """Return the planned rows.  Raises ChunkflowError if their file is missing."""
    if not path.exists():
        raise ChunkflowError(f"{path} is missing: it has the planned forwards. Write it again with --plan.")
    return [_row(body) for body in json.loads(path.read_text())]


def _row(body: Mapping[str, Any]) -> Row:
    ways = {name: Way(**way) for name, way in body["ways"].items()}
    return Row(**{**body, "workload": Workload.from_json(body["workload"]), "ways": ways})


def cases() -> Iterator[tuple[Workload, str]]:
    """Yield the workloads to plan, each with its GPUs, in the order of the table."""
    for model, gpus, sizes in CASES:
        known = preset(model)
        yield known.workload(replace(known.sizes, **sizes)), gpus


def plan(workload: Workload, ranks: int) -> list[Row]:
    """Trace a workload for ``ranks`` ranks, and return its rows for all GPUs in CASES with this number of ranks."""
    known = preset(workload.model)
    cut = make_cut(transformer_traced(known, workload.sizes, ranks), GROUP_BYTES)
    return [_on(workload, cut, gpus) for each, gpus in cases() if each == workload and GPUS[gpus].ranks == ranks]


def transformer_traced(known: Preset, sizes: OutputSizes, ranks: int) -> Traced:
    """Trace the transformer of one of ``ranks`` ranks, or read its trace from the user's cache folder."""
    key, trace = preset_call(known, ranks, sizes, DEFAULT_MIN_BYTES, None, 1)
    return replace(trace_entry(key).get(trace), fused=True)


def _on(workload: Workload, cut: Cut, gpus: str) -> Row:
    hardware, ranks, problem = load_profile(GPUS[gpus].profile), GPUS[gpus].ranks, cut.problem
    activations = problem.live_bytes
    planned = partial(place, hardware=hardware, chunk_bytes=CHUNK_BYTES)
    group = play_group_offload(problem, hardware)
    ways = {
        PLAIN: _way(planned(problem, goal=Goal(policy="resident")), activations),
        GROUP: Way(forward_s=group.timeline.step_s, nbytes=group.device_bytes + activations),
    }
    row = Row(
        workload=workload,
        gpus=gpus,
        ways=ways,
        once_s=round_trip_s(problem.total_bytes, hardware),
        how="planned",
    )
    smallest = partial(planned, goal=Goal())
    problem = with_peers(cut, hardware, ranks, smallest)
    chosen = smallest(problem)
    if chosen.device_bytes < group.device_bytes:  # plan with the memory of group offload
        chosen = planned(problem, goal=Goal(memory=group.device_bytes))
    if chosen.device_bytes + activations > row.available:
        chosen = planned(problem, goal=Goal(memory=row.available - activations))
    return replace(row, ways={**ways, CHUNKFLOW: _way(chosen, activations)})


def with_peers(cut: Cut, hardware: Hardware, ranks: int, plan: Callable[[Problem], Plan]) -> Problem:
    """Return the problem of a cut, with those weights sharded over the ranks for which ``plan`` then makes the best plan.

    No weight is sharded if the hardware does not support peers.
    """
    if hardware.why_no_peers(ranks):
        return cut.problem
    names = to_peers(cut, plan, ranks, budget=False, host_rate=hardware.rate_during_pulls(ranks))
    return on_peers(cut, names, ranks).problem


def _way(plan: Plan, activations: int) -> Way:
    assert plan.predicted is not None
    return Way(forward_s=plan.predicted.step_s, nbytes=plan.device_bytes + activations)


def table(rows: Sequence[Row]) -> str:
    """Return the table of the page."""
    return tabulate(
        [
            (
                MODELS[row.workload.model],
                row.workload.sizes,
                row.workload.timestep,
                row.workload.forwards,
                row.gpus,
                _cell(row, PLAIN),
                "" if row.once_s is None else f"{row.once_s:.0f} s" if row.fits(PLAIN) else "does not fit",
                _cell(row, GROUP),
                _cell(row, CHUNKFLOW),
                row.how,
            )
            for row in rows
        ],
        headers=(
            "model",
            "output",
            "one timestep per",
            "forwards per step",
            "GPU",
            f"`{PLAIN}`",
            "model offload, extra per generation",
            GROUP,
            f"**{CHUNKFLOW}**",
            "",
        ),
        tablefmt="github",
    )


def legend() -> str:
    """Return a text that explains "does not fit"."""
    nominal = ", ".join(f"{name} {gpus.nominal_gib} GiB" for name, gpus in GPUS.items() if gpus.ranks == 1)
    return filled(
        f"*Does not fit*: weights and activations take more than the nominal memory of a GPU ({nominal}) less "
        f"{RESERVED_GIB} GiB for the CUDA context, the workspaces of libraries and fragmentation. Memory that other "
        "processes hold is not subtracted."
    )


def filled(text: str) -> str:
    """Wrap a text to lines of at most WIDTH characters.  A number and its unit stay on one line."""
    together = re.sub(r"(?<=\d) (?=s\b|ms|GiB)", "\u00a0", text)
    return fill(together, width=WIDTH, break_long_words=False, break_on_hyphens=False).replace("\u00a0", " ")


def _cell(row: Row, way: str) -> str:
    if not row.fits(way):
        return f"{row.ways[way].nbytes / 2**30:.0f} GiB: does not fit"
    return ", ".join(figures(row.ways[way]))


def figures(way: Way) -> tuple[str, str]:
    """Return the time and the memory as text."""
    time = f"{way.forward_s:.1f} s" if way.forward_s >= 10 else f"{way.forward_s:.2f} s"
    if way.forward_s < 1:
        time = f"{1e3 * way.forward_s:.0f} ms"
    return time, f"{way.nbytes / 2**30:.1f} GiB"


def groups(shown: Sequence[Row]) -> dict[str, dict[str, Way]]:
    """Return the bars of the chart: for the label of each workload and GPU, the figures of each method by the label of
    its bar."""
    bars = dict[str, dict[str, Way]]()
    for row in shown:
        known, forwards = row.workload, f"{row.workload.forwards} forward{'s' * (row.workload.forwards > 1)} per step"
        mine = bars.setdefault(f"{MODELS[known.model]}, {known}, {forwards}, {row.gpus}: {row.how}", {})
        ours = f"{CHUNKFLOW}, {figures(row.ways[CHUNKFLOW])[1]}"
        mine |= {**row.ways, ours: row.ways[CHUNKFLOW]}
        mine.pop(CHUNKFLOW)
    return bars


def draw(shown: Sequence[Row], path: Path) -> None:
    """Draw the chart.  Raises ChunkflowError if matplotlib is not installed."""
    check_picture(path)
    bars = groups(shown)
    figure, axes = new_axes(9.0, 1.1 + 0.21 * sum(1.5 + len(ways) for ways in bars.values()), columns=2)
    colours = {PLAIN: "#9aa5b1", GROUP: "#f2a541", CHUNKFLOW: "#4c78a8"}
    for axis, unit, scale in zip(axes, ("time of one forward, ms", "GPU memory, GiB"), (1e3, 2**-30), strict=True):
        y, ticks, most = 0.0, dict[float, str](), 0.0
        for title, ways in bars.items():
            if axis is axes[0]:
                white = {"facecolor": "white", "edgecolor": "none", "pad": 1}
                axis.text(0, y, title, fontsize=8, weight="bold", va="center", bbox=white).set_in_layout(False)
                axis.set_zorder(1)  # so that long titles are drawn over the right axis
            for name, way in ways.items():
                y += 1
                value = scale * (way.forward_s if scale > 1 else way.nbytes)
                hatch = "" if title.endswith("measured") else "///"
                color = colours[name.partition(",")[0]]
                drawn = axis.barh(y, value, color=color, edgecolor="white", hatch=hatch, height=0.75)
                axis.bar_label(drawn, fmt="%.0f" if scale > 1 else "%.1f", padding=3, fontsize=8)
                ticks[y], most = name, max(most, value)
            y += 1.5
        axis.set(xlabel=unit, xlim=(0, 1.18 * most), ylim=(y - 0.75, -0.75))
        axis.set_yticks(list(ticks), ticks.values() if axis is axes[0] else [""] * len(ticks), fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.patch.set_visible(False)
    save_figure(figure, path)


def digest(shown: Sequence[Row]) -> str:
    """Return a digest of the data in the chart, with which a test finds an outdated chart without drawing it."""
    bars = {title: {name: asdict(way) for name, way in ways.items()} for title, ways in groups(shown).items()}
    return sha256(json.dumps(bars, sort_keys=True).encode()).hexdigest()[:12]


def pair(rows: Sequence[Row]) -> tuple[Row, Row]:
    """Return two rows for the same model, sizes and GPU.  The first is measured, with a form of the timestep that its
    pipeline does not use.  The second is planned, with the form that the pipeline uses.

    Raises ChunkflowError if there is no such pair.
    """
    for row in rows:
        as_called = replace(row.workload, timestep=preset(row.workload.model).timestep)
        for other in rows:
            if other.workload == as_called != row.workload and (other.gpus, row.how) == (row.gpus, "measured"):
                return row, other
    raise ChunkflowError("The planned forwards lack the measured one as the pipeline calls it. Plan it with --plan.")


def all_rows() -> list[Row]:
    """Return the rows of the table, in order.  The rows of :func:`pair` come first."""
    return sorted([*measured(), *planned()], key=lambda row: row.gpus != MEASURED[0][2])


def in_chart(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the chart: all measured rows, and the planned row of :func:`pair`."""
    called = pair(rows)[1]
    return [row for row in rows if row.how == "measured" or row is called]


def headline(rows: Sequence[Row]) -> str:
    """Return the most important measurements in sentences."""
    run, called = pair(rows)
    page = next(page for page, _, gpus, _ in MEASURED if gpus == run.gpus)

    def said(row: Row, way: str) -> str:
        return " and ".join(figures(row.ways[way]))

    return filled(
        f"Measured on [one {run.gpus}]({page}.md) with random weights: one forward of "
        f"{MODELS[run.workload.model]} ({run.workload}) takes **{said(run, CHUNKFLOW)}** of GPU memory, versus "
        f"{said(run, PLAIN)} with `torch.compile` alone and {said(run, GROUP)} with diffusers' group offload. "
        f"The pipeline of this model passes one timestep per {called.workload.timestep} and runs {called.workload.forwards} "
        f"forwards per step: such a forward ({called.workload}) is {called.how}, not measured, at "
        f"{said(called, CHUNKFLOW)}, versus {said(called, PLAIN)}, and {said(called, GROUP)}; planned memory includes "
        "predicted activations."
    )


ABOUT = """
Each cell gives the time of one forward of the transformer in bfloat16 and the memory that it takes on each GPU. A denoising
step runs as many forwards as the table says: two with classifier-free guidance, because these pipelines call the transformer
once per branch, and one where guidance is distilled into the model. Planned rows show the output and the form of the timestep
that the model's pipeline in diffusers uses; measured rows show their own.

* *Measured*: memory is the peak that the allocator reports, weights and activations.
* *Planned*: what `chunkflow simulate` predicts for a compiled model. Memory is the sum of the planned weights and the
  [predicted activations](../activations.md) of compiled code. For Wan2.2 A14B the figures are for one of its two experts.
* ChunkFlow is given the smallest [budget](../glossary.md#budget) that keeps a forward within 2 % of `torch.compile` with
  everything on the GPU, but no less memory than group offload takes, and no more than the GPU provides.
* Model offload (`enable_model_cpu_offload`) matches `torch.compile` in time and memory. The column is the time that it spends
  on copies, once per generation.

Compare the predictions with [our measurements](h100.md) and with [published step
times](published.md). Whole pipelines on GPUs of 12 to 80 GB are in [the README](../../README.md#on-your-gpu).
"""


def page(rows: Sequence[Row]) -> str:
    """Return the page.  The title of the picture contains the digest of the chart."""
    chart = f'![time and GPU memory of one forward on single GPUs](../{CHART.name} "{digest(in_chart(rows))}")'
    return (
        "# Step time and memory, method by method\n\n`make readme-table` writes this page.\n\n"
        f"{headline(rows)}\n\n{chart}\n\n{table(rows)}\n\n{legend()}\n{ABOUT}"
    )


def plan_again(models: Sequence[str]) -> None:
    """Plan the given models, and keep the rows of all others.  The file is written after each workload."""
    quiet_diffusers()
    order = list(cases())
    todo = dict.fromkeys((w, GPUS[gpus].ranks) for w, gpus in order if w.model in models)
    for workload, ranks in tqdm(todo, desc="workloads and ranks"):
        found = {(row.workload, row.gpus): row for row in (planned() if PLANNED.exists() else [])}
        found |= {(row.workload, row.gpus): row for row in plan(workload, ranks)}
        rows = [_as_json(found[case]) for case in order if case in found]  # drops rows of former cases
        PLANNED.write_text(json.dumps(rows, indent=1) + "\n")


def _as_json(row: Row) -> dict[str, Any]:
    body = asdict(row)
    for way in body["ways"].values():
        way["forward_s"] = round(way["forward_s"], 6)
    return body | {"once_s": None if row.once_s is None else round(row.once_s, 3)}
