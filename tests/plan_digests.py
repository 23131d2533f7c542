"""The digests of the plans of presets, in ``plan_digests.json``: no change of the passes' code may change one unseen.

PYTHONPATH=.:tests python tests/plan_digests.py             # writes all, after a change that is meant to alter plans
PYTHONPATH=.:tests python tests/plan_digests.py flux.1-dev  # some
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem, Source

FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Case:
    """A preset on so many ranks.  ``peers``: every second weight lies in pieces on their devices."""

    preset: str
    degree: int = 1
    peers: bool = False

    def __str__(self) -> str:
        return f"{self.preset}, {self.degree} ranks{', pieces' * self.peers}"

    def problem(self) -> Problem:
        """The problem at the finest cut."""
        found = make_cut(PRESETS[self.preset].trace(self.degree)).problem
        if not self.peers:
            return found
        pulled = {w.name for w in [w for w in found.weights if w.keep is None][::2]}
        sharded = Source(ranks=self.degree)
        return replace(
            found, weights=tuple(replace(w, source=sharded) if w.name in pulled else w for w in found.weights)
        )


CASES = (
    *map(Case, PRESETS),
    Case("wan2.2-ti2v-5b", 2),
    Case("flux.1-dev", 4),
    Case("wan2.2-ti2v-5b", 2, peers=True),
)


def plans(case: Case, problem: Problem) -> Iterator[tuple[str, Plan]]:
    """The plans of a case at three budgets; if it has collectives, others too."""
    machine = load_profile("h100-nvlink" if case.peers else "h100-pcie-x2")
    least = least_memory(problem, machine, DEFAULT_CHUNK_BYTES)
    most = problem.total_bytes + problem.piece_bytes + problem.unpacked_bytes
    for name, memory in (("least", least), ("half", (least + most) // 2), ("all", most)):
        yield name, place(problem, machine, Goal(memory=memory), chunk_bytes=DEFAULT_CHUNK_BYTES)
    if problem.collectives:
        joins = (len(problem.regions),)
        half = (least + most) // 2
        yield "half, hard", place(problem, machine, Goal(memory=half, yields="hard"), chunk_bytes=DEFAULT_CHUNK_BYTES)
        yield "half, joined", place(problem, machine, Goal(memory=half), joins=joins, chunk_bytes=DEFAULT_CHUNK_BYTES)
        yield "barriers", place(problem, machine, Goal(policy="layerwise-barrier"), chunk_bytes=DEFAULT_CHUNK_BYTES)


def digests(case: Case) -> dict[str, str]:
    """The digest of the problem, and those of its plans."""
    problem = case.problem()
    return {"problem": problem.digest, **{name: plan.digest for name, plan in plans(case, problem)}}


def main(names: list[str]) -> None:
    kept = json.loads(FILE.read_text()) if FILE.exists() and names else {}
    found = {str(case): digests(case) for case in CASES if not names or case.preset in names}
    FILE.write_text(json.dumps({**kept, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
