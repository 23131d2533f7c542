"""The pictures of the paper's evaluation, drawn from the rows of paper.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paper_cases import CASES, ROOMY
from paper_formulas import knee as knee_of
from paper_tables import Row

from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.report.pictures import new_axes, save_figure

COLORS = {
    "resident": "#999999",
    "layerwise": "#e0a458",
    "layerwise-barrier": "#b5523b",
    "chunkflow": "#2a6f97",
    ROOMY: "#7fb7d6",
}


def draw_steps(arms: Sequence[Row], path: Path) -> None:
    _draw_bars(arms, "step, s", "predicted step time, s", path)


def draw_memory(arms: Sequence[Row], path: Path) -> None:
    _draw_bars(arms, "weights, GiB", "weights on each GPU, GiB", path, scale="log")


def _draw_bars(arms: Sequence[Row], figure_of: str, label: str, path: Path, scale: str = "linear") -> None:
    """Draw one panel per model, one group of bars per size, and one bar per arm.  ``figure_of``: the column of paper.json
    that contains the height of a bar."""
    heights = {(row["configuration"], row["arm"]): row[figure_of] for row in arms}
    figure, axes = new_axes(12, 4, columns=3)
    for panel, model in zip(axes, dict.fromkeys(case.model for case in CASES), strict=True):
        mine = [case for case in CASES if case.model == model]
        for i, (arm, color) in enumerate(COLORS.items()):
            places = [k + 0.16 * (i - 2) for k in range(len(mine))]
            panel.bar(places, [heights[case.name, arm] for case in mine], 0.16, label=arm, color=color)
        panel.set_xticks(range(len(mine)), [str(case.size) for case in mine])
        panel.set_yscale(scale)
        panel.set_xlabel("samples" if model == "flux.1-dev" else "frames")
        panel.set_title(model, fontsize=10)
    axes[0].set_ylabel(label)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8)
    save_figure(figure, path)


def draw_breakdown(arms: Sequence[Row], path: Path) -> None:
    figure, axes = new_axes(12, 4.6)
    labels, base = [], 0.0
    parts = ("compute", "collectives", "H2D stall", "contention")
    colors = ("#2a6f97", "#8fb996", "#e0a458", "#b5523b")
    for case in CASES:
        for row in (row for row in arms if row["configuration"] == case.name and row["arm"] != ROOMY):
            bottom = 0.0
            for part, color in zip(parts, colors, strict=True):
                height = row[f"{part}, %"] / 100 * row["to resident"]
                axes.bar(base, height, 0.8, bottom=bottom, color=color, label=part if not labels else None)
                bottom += height
            labels.append((base, f"{case.name} {row['arm']}"))
            base += 1
        base += 0.8
    axes.set_xticks([x for x, _ in labels], [t for _, t in labels], rotation=90, fontsize=6)
    axes.margins(x=0.01)
    axes.set_ylim(top=1.06 * max(row["to resident"] for row in arms))
    axes.set_ylabel("step time / resident")
    axes.legend(fontsize=8)
    save_figure(figure, path)


def draw_roofline(rows: Sequence[Row], machine: Hardware, path: Path) -> None:
    intensities = {row["configuration"]: row["FLOP/byte"] for row in rows}
    figure, axes = new_axes(8, 4.6)
    roof = machine.flops("bfloat16")
    knee = knee_of(
        peak=machine.gemm_flops["bfloat16"],
        eta_comp=machine.eta_gemm,
        h2d=machine.h2d_bandwidth,
        eta_pref=machine.eta_pref,
    )
    spread = (knee / 8, knee * 8)
    axes.plot([spread[0], knee, spread[1]], [spread[0] * machine.copy_rate, roof, roof], color="black")
    axes.axvline(knee, linestyle=":", color="gray")
    axes.annotate(f"knee I* = {knee:,.0f} FLOP/byte", (knee, roof / 7), rotation=90, ha="right", fontsize=8)
    axes.annotate("GPU roof", (spread[1], roof), ha="right", va="bottom", fontsize=8)
    axes.annotate("H2D roof", (spread[0] * 1.2, spread[0] * 1.2 * machine.copy_rate), ha="left", va="top", fontsize=8)
    looks = {"wan2.2-ti2v-5b": ("o", "#2a6f97"), "flux.1-dev": ("s", "#e0a458"), "hunyuanvideo": ("^", "#b5523b")}
    for below, (model, (marker, color)) in enumerate(looks.items()):
        for case in (case for case in CASES if case.model == model):
            intensity = intensities[case.name]
            point = (intensity, min(roof, intensity * machine.copy_rate))
            axes.plot(*point, marker, color=color, label=model if case.size in (41, 4, 9) else None)
            axes.annotate(
                str(case.size),
                point,
                (0, -14 - 11 * below),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=color,
            )
    axes.legend(fontsize=8, loc="lower right", title="frames or samples")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs of a block on one rank, per byte of its weights")
    axes.set_ylabel("FLOP/s while its weights are copied")
    save_figure(figure, path)
