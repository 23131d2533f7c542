"""Make the generated parts of the README (its first figures, the tables of GPUs, the charts) and the page methods.md.

    python docs/benchmarks/readme_table.py           # from the JSON files in this folder
    python docs/benchmarks/readme_table.py --plan    # plans again first: traces five models, more than an hour of one core

The rows of the table are planned (``readme_gpus.json``) or measured (``h100.json``).  All labels (model, frames,
resolution, form of the timestep, forwards per step) are made from the recorded workloads.  The script needs no network.
Charts need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import methods
import readme_gpus
from methods import BENCHMARKS, CHUNKFLOW, DOCS, GROUP, MODELS, PLAIN, filled
from readme_gpus import (
    EXAMPLE,
    GIB,
    GPUS,
    HOST_OF_32_GB,
    IN_ITS_MEMORY,
    MODEL,
    ON_SSD,
    PACKED,
    SSD,
    Row,
)
from runs import replaced
from tabulate import tabulate

from chunkflow_compile.catalog.presets import Workload, preset
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import GROUP_OFFLOAD
from chunkflow_compile.report.pictures import check_picture, new_axes, save_figure

README = DOCS.parent / "README.md"
CHART = DOCS / "on_your_gpu.png"
# The script replaces each text between <!-- NAME: make readme-table --> and the next <!-- end -->.
PART, END = "<!-- {}: make readme-table -->\n", "<!-- end -->\n"
# The GPU in :data:`GPUS` whose measurements are shown.
MEASURED_ON = "H100 SXM"
# The ticks of the axis of times, in seconds.
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
# The machines in several_gpus.json that the README shows, with their titles in the table.  The names of ChunkFlow's plans
# begin with one of OURS.
SEVERAL = BENCHMARKS / "several_gpus.json"
SEVERAL_GPUS = {"2 x rtx-4090-pcie": "2 x 24 GB: RTX 4090", "4 x l40s-pcie": "4 x 48 GB: L40S"}
OURS = ("host, ", "the mix, ")
COLOURS = ("#4c78a8", "#f2a541", "#d64545", "#59a14f", "#9c6ade", "#7f7f7f")


def measured() -> tuple[methods.Row, methods.Row]:
    """Return two measured rows of FLUX.1-dev: with a plan that is as fast as all weights on the GPU, and with a plan in
    about the memory of group offload."""
    small, _, fast = (row for row in methods.measured() if row.gpus == "H100")
    return fast, small


def table(rows: Sequence[Row]) -> str:
    """Return a table with a row per GPU and model.  The measured row follows the planned rows of the same GPU."""
    lines = []
    for name in GPUS:
        lines += [_planned(row) for row in rows if row.gpu == name]
        lines += [_measured(*measured())] if name == MEASURED_ON else []
    head = (
        "GPU",
        "model",
        "`memory=`",
        "forward",
        "step",
        "fastest with",
        GROUP,
        f"{CHUNKFLOW}, same memory",
        MODEL,
        "",
    )
    return tabulate(lines, headers=head, tablefmt="github", disable_numparse=True)


def _planned(row: Row) -> tuple[str, ...]:
    on = row.on
    if row.fits(CHUNKFLOW):
        way = row.ways[CHUNKFLOW]
        best = "" if row.fastest is None else f"**{seconds(row.step_s(row.fastest))}**, `{row.fastest}`"
        ours = (f"{on.budget} GiB", seconds(way.forward_s), f"**{seconds(row.step_s(CHUNKFLOW))}**", best)
    else:
        ours = (needed(row.least), "", "", "")
    same = figures(row, IN_ITS_MEMORY) if IN_ITS_MEMORY in row.ways else ""
    others = [figures(row, way) if row.fits(way) else needed(row.ways[way].nbytes) for way in (GROUP, MODEL)]
    return (label(row.gpu), MODELS[row.workload.model], *ours, others[0], same, others[1], row.how)


def _measured(ours: methods.Row, same: methods.Row) -> tuple[str, ...]:
    """Return the cells of the measured row, which is for the transformer alone.  ``ours``, ``same``: see
    :func:`measured`."""
    times = [
        row.workload.forwards * row.ways[way].forward_s
        for row, way in ((ours, CHUNKFLOW), (ours, GROUP), (same, CHUNKFLOW))
    ]
    mine, group = ours.ways[CHUNKFLOW], ours.ways[GROUP]
    again = f"{seconds(times[2])}, {gib(same.ways[CHUNKFLOW].nbytes)}"
    cells = (gib(mine.nbytes), seconds(mine.forward_s), f"**{seconds(times[0])}**", "")
    model = MODELS[ours.workload.model]
    return (label(MEASURED_ON), model, *cells, f"{seconds(times[1])}, {gib(group.nbytes)}", again, "", ours.how)


def label(name: str) -> str:
    """Return the label of a GPU in the first column."""
    return f"{GPUS[name].memory} GB: {name}"


def figures(row: Row, way: str) -> str:
    """Return the time per step and the GPU memory as text."""
    return f"{seconds(row.step_s(way))}, {gib(row.ways[way].nbytes)}"


def seconds(value: float) -> str:
    """Return a time in seconds as text."""
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} s"


def gib(nbytes: float) -> str:
    """Return a size as text."""
    return f"{nbytes / GIB:.1f} GiB"


def needed(nbytes: int) -> str:
    """Return the text of a cell for a method that does not fit."""
    return f"needs {gib(nbytes)}"


def models(rows: Sequence[Row]) -> str:
    """Return a table with one row per model: its output, its calls, and its host memory."""
    lines = []
    for row in (row for row in rows if row.gpu == EXAMPLE):
        work, host = row.workload, (gib(row.host), gib(row.host_packed))
        lines.append((MODELS[work.model], work.sizes, work.timestep, work.forwards, *host, _short(row)))
    head = ("model", "output", "one timestep per", "forwards per step", "host memory", f"with `{PACKED}`")
    on = f"step with `host_memory={_size(HOST_OF_32_GB)}`, {EXAMPLE}, SSD of {SSD / 1e9:g} GB/s"
    return tabulate(lines, headers=(*head, on), tablefmt="github", disable_numparse=True)


def _short(row: Row) -> str:
    """Return the cell for a machine with 32 GB of host memory."""
    return seconds(row.step_s(ON_SSD)) if ON_SSD in row.ways else "all weights fit"


def _example(rows: Sequence[Row]) -> Row:
    """Return the row of the README's examples.  Raises ChunkflowError if it is not planned."""
    for row in rows:
        if (row.workload.model, row.gpu) == ("flux.1-dev", EXAMPLE):
            return row
    raise ChunkflowError(f"The planned rows lack flux.1-dev on the {EXAMPLE}. Plan them with --plan.")


def _size(nbytes: int) -> str:
    return f'"{nbytes // GIB}GiB"'


def several(path: Path = SEVERAL) -> str:
    """Return a table with one row per model on two GPUs and on four GPUs of one host, from the figures of
    several_gpus.md.

    Raises ChunkflowError if their file is missing.
    """
    if not path.exists():
        raise ChunkflowError(
            f"{path} is missing: it contains the plans for several GPUs. Write it again: make several-gpus."
        )
    body, lines = json.loads(path.read_text()), []
    for machine, name in SEVERAL_GPUS.items():
        memory = body["machines"][machine]["card, GB"]
        for title, model in body["machines"][machine]["models"].items():
            work = Workload.from_json(body["workloads"][title])
            if work.sizes.height * work.sizes.width < preset(work.model).sizes.height * preset(work.model).sizes.width:
                continue  # the table shows each model only at its usual sizes
            ways = {way: found for way, found in model["ways"].items() if isinstance(found, dict)}
            ours = [way for way in ways if way.startswith(OURS) and ways[way]["GB"] < memory - 2]
            best = min(ours, key=lambda way: (ways[way]["ms"], ways[way]["GB"]))
            cells = []
            for way in (ways[best], ways[GROUP_OFFLOAD], ways["resident"]):
                step_s, needs = work.forwards * way["ms"] / 1e3, way["GB"] > memory
                cells.append(f"needs {way['GB']} GB" if needs else f"{seconds(step_s)}, {way['GB']} GB")
            lines.append((name, MODELS[work.model], work.sizes, work.forwards, *cells, "planned"))
    head = ("GPUs", "model", "output", "forwards per step", f"{CHUNKFLOW}: step, weights per GPU")
    return tabulate(
        lines,
        headers=(*head, GROUP, f"{MODEL}: all weights", ""),
        tablefmt="github",
        disable_numparse=True,
    )


def headline(rows: Sequence[Row]) -> str:
    """Return the README's first figures: planned for a GPU on which the model does not fit, and measured on the H100."""
    row, (ours, _) = _example(rows), measured()
    model, on = MODELS[row.workload.model], f"{row.on.memory} GB {row.gpu}"
    mine, alone = (methods.figures(ours.ways[way]) for way in (CHUNKFLOW, PLAIN))
    group = f"{seconds(row.step_s(GROUP))} and {gib(row.ways[GROUP].nbytes)}"
    return filled(
        f"{model} in bfloat16 ({row.workload.sizes}) on a {on} is planned at "
        f"**{seconds(row.step_s(CHUNKFLOW))} per step with `memory={_size(row.on.budget * GIB)}`**; group offload in "
        f"diffusers takes {group}, and model offload "
        f"{needed(row.ways[MODEL].nbytes)}. Measured on one H100: {mine[0]} and {mine[1]} per forward, versus {alone[0]} and "
        f"{alone[1]} with `torch.compile` alone, which holds all weights on the GPU."
    )


def short_of_ram(rows: Sequence[Row]) -> str:
    """Return a paragraph on how to run with 32 GB of RAM, with the step times."""
    row = _example(rows)
    call = f"compile(pipe, memory={_size(row.on.budget * GIB)}"
    times = {way: seconds(row.step_s(way)) for way in (CHUNKFLOW, PACKED, ON_SSD)}
    return filled(
        f"**With 32 GB of RAM** the {gib(row.host)} of {MODELS[row.workload.model]} do not fit next to the operating system. "
        f"`{call}, pack=True)` packs the bfloat16 weights without loss into {gib(row.host_packed)}, planned at "
        f"{times[PACKED]} per step on the {row.gpu}, compared with {times[CHUNKFLOW]} if all weights fit: the GPU unpacks "
        f"the weights that it streams. `{call}, host_memory={_size(HOST_OF_32_GB)})` leaves the other weights on an SSD and "
        "reads them from there when they are copied to the GPU, those that stay on the GPU once; it is planned at "
        f"{times[ON_SSD]} per step with an SSD that reads {SSD / 1e9:g} GB/s. `from_pretrained` only maps files of the same "
        "dtype, so loading needs no more memory. Both arguments can be combined. [More about host "
        "memory](docs/host_memory.md)."
    )


def chart_data(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the data of the charts.  For each model, there are a curve per GPU and single points, in GiB and seconds per
    step."""
    data = dict[str, dict[str, Any]]()
    order = list(MODELS)
    for row in sorted((row for row in rows if row.curve), key=lambda row: order.index(row.workload.model)):
        work = row.workload
        forwards = f"{work.forwards} forward{'s' * (work.forwards > 1)} per step"
        panel = data.setdefault(f"{MODELS[work.model]}, {work}, {forwards}", {"curves": {}, "points": []})
        curve = [(nbytes / GIB, work.forwards * forward_s) for nbytes, forward_s in row.curve]
        panel["curves"][label(row.gpu)] = curve
        panel["points"] += [
            (label(row.gpu), way, row.ways[way].nbytes / GIB, row.step_s(way))
            for way in (GROUP, MODEL)
            if row.fits(way)
        ]
        if row.gpu == MEASURED_ON:
            panel["points"] += [
                (label(row.gpu), "measured", way.nbytes / GIB, work.forwards * way.forward_s)
                for way in (each.ways[CHUNKFLOW] for each in measured() if each.workload == work)
            ]
    return data


def digest(rows: Sequence[Row]) -> str:
    """Return a digest of the data in the charts, with which a test finds outdated charts without drawing them."""
    return sha256(json.dumps(chart_data(rows), sort_keys=True).encode()).hexdigest()[:12]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a chart for each model.  Raises ChunkflowError if matplotlib is not installed."""
    check_picture(path)
    data = chart_data(rows)
    figure, axes = new_axes(10.0, 9.5, columns=2, heights=(1.0, 1.0, 1.0))
    names = [label(name) for name in GPUS]
    colour = dict(zip(names, COLOURS, strict=True))
    markers = {
        GROUP: ("x", f"{GROUP}, planned"),
        MODEL: ("s", f"{MODEL}, planned"),
        "measured": ("*", "ChunkFlow, measured"),
    }
    *panels, last = axes.flat
    for axis, (title, panel) in zip(panels, data.items(), strict=True):
        for name, curve in panel["curves"].items():
            axis.plot(*zip(*curve, strict=True), color=colour[name], marker=".", markersize=4, linewidth=1.4)
        for name, way, nbytes, step_s in panel["points"]:
            size = 9 if way == "measured" else 6
            axis.plot(nbytes, step_s, markers[way][0], color=colour[name], markersize=size, markerfacecolor="none")
        model, output, rest = title.split(", ", 2)
        axis.set_title(f"{model}, {output}\n{rest}", fontsize=9)
        axis.set(xlabel="GPU memory, GiB", ylabel="time per step, s", yscale="log", xscale="log")
        values = [step_s for curve in panel["curves"].values() for _, step_s in curve]
        axis.set_xticks(sizes := [2, 4, 8, 16, 32, 64], map(str, sizes))
        axis.set_yticks(times := [t for t in TICKS if min(values) / 2 < t < 2 * max(values)], [f"{t:g}" for t in times])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    last.axis("off")
    for name in names:
        last.plot([], [], color=colour[name], marker=".", label=f"ChunkFlow, {name}, planned")
    for mark, meaning in markers.values():
        last.plot([], [], mark, color="black", markerfacecolor="none", label=meaning)
    last.legend(loc="center", frameon=False, fontsize=9)
    save_figure(figure, path)


def written(readme: str, rows: Sequence[Row]) -> str:
    """Return the README with its generated parts replaced.  The title of the picture contains the digest of the charts.

    Raises ChunkflowError if the README lacks the lines around a part.
    """
    chart = f'![time per step over GPU memory, one chart per model](docs/{CHART.name} "{digest(rows)}")'
    gpus = f"{table(rows)}\n\n{chart}\n\n{models(rows)}\n\n{short_of_ram(rows)}"
    for name, body in (("figures", headline(rows)), ("gpus", gpus), ("several", several())):
        readme = replaced(README.name, readme, name, PART.format(name), END, body)
    return readme


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="plan again, into readme_gpus.json and readme_planned.json")
    parser.add_argument("--models", default=",".join(MODELS), help="with --plan: those to plan again, others are kept")
    arguments = parser.parse_args(given)
    try:
        if arguments.plan:
            readme_gpus.plan_again(arguments.models.split(","))
            methods.plan_again(arguments.models.split(","))
        rows, forwards = readme_gpus.planned(), methods.all_rows()
        text, page = written(README.read_text(), rows), methods.page(forwards)
        draw(rows, CHART)
        methods.draw(methods.in_chart(forwards), methods.CHART)
        README.write_text(text)
        methods.PAGE.write_text(page)
    except ChunkflowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
