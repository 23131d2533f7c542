"""Labels: short names of regions, for the picture of a step and for reports."""

from __future__ import annotations

from itertools import groupby

from chunkflow_compile.passes.plan import RegionLabel
from chunkflow_compile.passes.problem import Problem, Region


def region_labels(problem: Problem) -> tuple[RegionLabel, ...]:
    """Return one label per region.  It contains the names of the region's large weights inside their block or, without
    such weights, the type of the region's main op."""
    large = {w.name for w in problem.weights if w.keep is None}
    return tuple(RegionLabel(r.block, _what(r, large)) for r in problem.regions)


def weight_label(name: str, block: str) -> str:
    """Return the name of a weight inside its block."""
    return name.removeprefix(f"{block}.").removesuffix(".weight")


def _what(region: Region, large: set[str]) -> str:
    names = sorted(weight_label(name, region.block) for name in region.weights if name in large)
    if not names:
        return region.cost.op or "elementwise"
    short = []
    for parent, group in groupby(names, key=lambda name: name.rpartition(".")[0]):
        leaves = ",".join(name.rpartition(".")[2] for name in group)
        short.append(f"{parent}.{leaves}" if parent else leaves)
    return " ".join(short)
