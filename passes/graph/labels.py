"""Labels: makes short names of regions, for reports and for the picture of a step."""

from __future__ import annotations

from itertools import groupby

from chunkflow_compile.passes.plan import RegionLabel
from chunkflow_compile.passes.problem import Problem, Region


def region_labels(problem: Problem) -> tuple[RegionLabel, ...]:
    """Return a label for each region.  A label contains the names of the region's weights that may be streamed, without the
    name of the block.  If a region reads no weight that may be streamed, the label contains the main op of the region."""
    large = {w.name for w in problem.weights if w.keep is None}
    return tuple(RegionLabel(r.block, _what(r, large)) for r in problem.regions)


def weight_label(name: str, block: str) -> str:
    """Return the name of a weight without the name of its block and without ``.weight``."""
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
