"""The first step: where the time of compiling has gone in this process.

torch's own timer counts its compilations (``torch._dynamo.utils.dynamo_timed``), and ChunkFlow's passes count there too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Phase -> names of the timer that it is the sum of, less those that begin with "-".
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
    """Seconds of each phase, none where a phase did not run.  ``timer``: ``torch._dynamo.utils.compilation_time_metrics``."""
    found = []
    for phase, names in _PHASES.items():
        seconds = sum(-sum(timer.get(n[1:], ())) if n.startswith("-") else sum(timer.get(n, ())) for n in names)
        if seconds > 0:
            found.append((phase, seconds))
    return tuple(found)


def first_step_line(phases: Sequence[tuple[str, float]]) -> str:
    """The phases as a sentence, the longest first."""
    longest = sorted(phases, key=lambda phase: -phase[1])
    total = sum(seconds for _, seconds in phases)
    said = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in longest)
    return f"compiling took {total:.1f} s in this process so far: {said}"
