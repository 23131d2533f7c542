"""``replan``: gives a compiled model another plan between two calls, without compiling again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from chunkflow_compile.model.offload import cycles, programs
from chunkflow_compile.model.placement import placements_of
from chunkflow_compile.options import Options
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import Policy
from chunkflow_compile.runtime.codes import Code
from chunkflow_compile.runtime.cycles import Cycles
from chunkflow_compile.runtime.measurement import measured


def replan(
    model: nn.Module,
    *,
    memory: int | str | None = None,
    slowdown: float | None = None,
    policy: Policy | None = None,
    plan: str | Path | None = None,
    as_measured: bool = False,
) -> nn.Module:
    """Give every program of a compiled or placed model another plan, from its next call on; return ``model``.

    Set the goal as in the options of the backend; without one, the current goal is kept.  ``as_measured``: plan from
    the measured times of the calls so far, instead of the profile's rates.  The new plan is verified, and no output
    changes.  The next call starts cold.  Sizes that come later are planned for the same goal, unless it is a plan.
    Programs that run as a cycle (see ``cycles``) are planned together: for another goal when their order has repeated
    again, and ``as_measured`` from their times and the time between them.
    Raises ChunkflowError, and changes nothing, if there is no such plan or if the model has not run yet.
    """
    found = list(programs(model))
    if not found:
        raise ChunkflowError("No program of this model runs yet: compile it with ChunkFlow and call it first.")
    goal: dict[str, Any] = {}
    if (memory, slowdown, policy, plan) != (None, None, None, None):
        chosen = Options(memory=memory, slowdown=slowdown, policy=policy or "chunkflow", plan=plan)
        goal = {
            "memory": chosen.memory_bytes(),
            "slowdown": slowdown,
            "policy": chosen.policy,
            "plan": chosen.given_plan(),
        }
        if chosen.policy != "chunkflow":  # plans of other policies do not depend on it
            goal["yields"] = chosen.yields
    elif as_measured:
        goal = {"plan": None}  # a plan from a file would run whatever was measured
    running = cycles(model) if as_measured else ()
    together = [p for p in found if any(p.key in bound.keys for bound in running)]
    if "policy" not in goal:
        found = [p for p in found if p not in together]
    codes, shared = [], dict[int, Code]()
    for program in found:
        code = program.current.code  # of the newest goal, which may not have run yet
        if as_measured and program not in together:
            codes.append(code.remade(**goal, timings=measured(program.plan, program.measurements).timings()))
        else:  # blocks of one kind share their code
            key = id(code)
            shared[key] = shared.get(key) or code.remade(**goal)
            codes.append(shared[key])
    for bound in running if "policy" not in goal else ():
        with bound.arena.lock():
            Cycles.of(bound.arena).replan(bound)
    if goal.get("plan") is None and "policy" in goal:  # a given plan is for one size
        for placement in placements_of(model):
            placement.goal = {**placement.goal, **{name: goal[name] for name in goal if name != "plan"}}
    for program, code in zip(found, codes, strict=True):
        program.current.code, program.current.by_itself = code, False
    return model
