"""The errors for a budget that is too small for a component of a pipeline.  Each message says what the user can change."""

from __future__ import annotations

from chunkflow_compile.hardware.headroom import budget_for
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.pipeline.phase import Phase
from chunkflow_compile.units import enough, size


def out_of_memory_again(phase: Phase, total: int, error: BaseException) -> ChunkflowError:
    """Return the error for a call that ran out of memory in its retry, or that ran out of memory and cannot be retried.

    ``total``: the size of the budget in bytes.  ``error``: the error that the call raised.
    """
    tiling = f", or pipe.{phase.name}.enable_tiling()." if hasattr(phase.root, "enable_tiling") else "."
    return ChunkflowError(
        f"{phase.name} ({type(phase.root).__name__}) does not fit a budget of {size(total)} with its weights "
        f"streamed: {str(error).splitlines()[0]} Call restore(pipe), then compile with more "
        f"memory, or call the pipeline with smaller sizes{tiling}"
    )


def no_plan(phase: Phase, needed: int, total: int, symbolic: bool) -> ChunkflowError:
    """Return the error for a program that has no plan within the budget.

    ``needed``: the minimum bytes for the program and the small weights of all phases.  ``total``: the size of the budget in
    bytes.  ``symbolic``: whether the program was compiled with symbolic sizes.  If so, fixed sizes may help.
    """
    fixed = " or with dynamic=False (blocks are split only at fixed sizes)" if symbolic else ""
    return ChunkflowError(
        f"memory={size(total)} is too little for {phase.name} ({type(phase.root).__name__}): one of its programs "
        f"needs {size(needed)}, for its predicted activations and as few of its weights as possible. Call restore(pipe), "
        f"then compile with at least memory={enough(budget_for(needed))!r}{fixed}, or call the pipeline with "
        "smaller sizes."
    )


def no_memory_for_weights(
    phase: Phase, largest: Phase, budget: int, total: int, error: ChunkflowError
) -> ChunkflowError:
    """Return the error for a phase that has no plan within the memory that activations leave free.

    ``largest``: the phase with the largest activations among the phases that share the arena.  ``budget``: the bytes that are
    left for weights.  ``total``: the size of the budget in bytes.  ``error``: the error that the planner raised.
    """
    least = phase.least
    calls, whose = "its calls", "its"
    if largest is not phase:
        calls, whose = f"calls of {largest.name}, with which it takes turns,", "their"
    needs = f", which need {size(least)}" if budget < least else f": {error}"
    return ChunkflowError(
        f"memory={size(total)} is too little for {phase.name} ({type(phase.root).__name__}): {calls} take "
        f"{size(largest.activations - largest.kept)} in addition to {whose} weights, mostly activations, so "
        f"{size(max(0, budget))} are left for the weights{needs}. Call restore(pipe), then compile with at least "
        f"memory={enough(budget_for(least + largest.activations - phase.kept))!r}, or the pipeline with smaller sizes."
    )
