"""Reports why the first step takes long: the time that each phase of compilation took in this process.

torch measures its compilations with ``torch._dynamo.utils.dynamo_timed``, which ChunkFlow's passes use, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# For each phase, the names of the timers whose seconds are added.  If a name begins with "-", its seconds are subtracted.
_PHASES: Mapping[str, tuple[str, ...]] = {
    "placing weights": ("chunkflow.place",),
    "Dynamo": ("_compile.compile_inner", "-OutputGraph.call_user_compiler"),
    "AOTAutograd": ("chunkflow.aot", "-chunkflow.program"),
    "discovery and cut": ("chunkflow.regions",),
    "planning": ("chunkflow.planned",),
    "rewriting and proof": ("chunkflow.rewritten", "chunkflow.verified"),
    "lowering": ("chunkflow.lowering",),
    "binding": ("chunkflow.bind",),
}


def first_step_phases(timer: Mapping[str, Sequence[float]]) -> tuple[tuple[str, float], ...]:
    """Return each phase that has run, with its duration in seconds.

    ``timer``: the value of ``torch._dynamo.utils.compilation_time_metrics``.
    """
    phases = []
    for phase, names in _PHASES.items():
        seconds = sum(-sum(timer.get(n[1:], ())) if n.startswith("-") else sum(timer.get(n, ())) for n in names)
        if seconds > 0:
            phases.append((phase, seconds))
    return tuple(phases)


def first_step_line(phases: Sequence[tuple[str, float]]) -> str:
    """Return a sentence with the time of each phase.  The longest phase comes first."""
    longest = sorted(phases, key=lambda phase: -phase[1])
    total = sum(seconds for _, seconds in phases)
    said = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in longest)
    return f"compiling took {total:.1f} s in this process so far: {said}"
