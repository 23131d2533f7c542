"""Resident steps of the paper's configurations with exchanges in groups of heads, which are not part of the paper.

All blocks of one block type add the same time to a resident step.  So the step of the whole model is extrapolated from a
graph with a few blocks of each type, and from graphs with one more block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paper_cases import CASES, CHUNK, DEGREE, MACHINE, TIMESTEP, Case
from tqdm import tqdm

from chunkflow_compile.catalog.presets import preset
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.graph.head_groups import in_head_groups, possible_groups
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.placement.exchanging import MOST_GROUPS
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.step import Scheduler

# The number of blocks of each type in the smallest graph.
FEW = 2


def group_row(case: Case) -> dict[str, Any]:
    """Return a row of paper.json: the resident step by number of groups.  One group means whole exchanges."""
    kinds = [name for name in ("num_layers", "num_single_layers") if name in preset(case.model).config]
    few = dict.fromkeys(kinds, FEW)
    base = steps_by_groups(traced(case, few))
    steps = dict(base)
    for kind in kinds:
        more = steps_by_groups(traced(case, {**few, kind: FEW + 1}))
        left = preset(case.model).config[kind] - FEW
        steps = {groups: step_s + left * (more[groups] - base[groups]) for groups, step_s in steps.items()}
    best = min(steps, key=lambda groups: (steps[groups], groups))
    seconds = {str(groups): round(step_s * case.forwards, 3) for groups, step_s in sorted(steps.items())}
    return {
        "configuration": case.name,
        "resident, s": seconds["1"],
        "in groups, s": seconds[str(best)],
        "groups": best,
        "to whole exchanges": round(steps[best] / steps[1], 3),
        "by groups, s": seconds,
    }


def traced(case: Case, layers: Mapping[str, int]) -> Traced:
    """Trace a configuration.  ``layers``: the number of blocks by configuration parameter."""
    full = preset(case.model)
    few = replace(full, config={**full.config, **layers}, timestep=TIMESTEP)
    return few.trace(DEGREE, case.sizes)


def steps_by_groups(whole: Traced) -> dict[int, float]:
    """Return the seconds of the resident step by number of groups."""
    steps = dict[int, float]()
    for groups in (1, *(count for count in possible_groups(whole) if count <= MOST_GROUPS)):
        problem = make_cut(in_head_groups(whole, groups)).problem
        step = Scheduler(problem, CHUNK).step({})
        steps[groups] = Simulator(problem, load_profile(MACHINE), CHUNK).play(step, spans=False).step_s
    return steps


def group_rows() -> list[dict[str, Any]]:
    return [group_row(case) for case in tqdm(CASES, unit="case", desc="head groups")]
