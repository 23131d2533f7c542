"""Compile a placed component of a pipeline, and register its calls with the budget as a phase (phase.py)."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from chunkflow_compile.frontend.adapters import ADAPTED
from chunkflow_compile.frontend.block_kinds import repeated_blocks
from chunkflow_compile.frontend.compile import compile_by_kind, compiled_whole
from chunkflow_compile.options import Options
from chunkflow_compile.pipeline.budget import Budget
from chunkflow_compile.pipeline.phase import Phase
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.placed.streamable import GGUF, class_of
from chunkflow_compile.weights.leaves import tensors_of

_log = logging.getLogger(__name__)

# The names of components that run in every denoising step.  Hoisting applies only to these components.
STEPPED = (*ADAPTED, "controlnet")


def compile_phase(
    phase: Phase, budget: Budget, left: int, options: Mapping[str, Any], chosen: Options, dynamic: bool | None
) -> None:
    """Compile a placed component, and register its calls with the budget as a phase.

    ``left``: the usable bytes of the budget minus the small weights of all components.
    """
    model, placement = phase.root, placement_of(phase.root)
    assert placement is not None
    if phase.name not in STEPPED:  # hoisted rows would stay allocated after the component's only call
        options = {name: value for name, value in options.items() if name != "hoist"}
    if not phase.counts:
        options = {name: value for name, value in options.items() if name != "split"}
    # If plans do not cover predicted activations, the first call measures the activations.  Before this measurement, weights
    # may use the whole budget.
    expected = replace(chosen.goal, memory=max(0, left + phase.kept), activations=phase.counts)
    # The arena and the goal are not passed as options of the backend: whenever an option changes, Dynamo recompiles, and also
    # keeps the code that it has compiled for the old options.
    placement.belong_to(functools.partial(_owner, phase.name, weakref.ref(budget)), phase.arena, expected)
    # the names of the methods whose calls are intercepted; empty if calls of the model itself are intercepted
    methods: tuple[str, ...] = ()
    if isinstance(decoder := getattr(model, "decoder", None), nn.Module) and hasattr(model, "decode"):
        placement.store.expect_eager_reads()
        # The decoders of Wan and Qwen-Image keep a list of frames, and each call changes this list.  Dynamo would compile
        # each block again for every state of the list.
        keeps_frames = "feat_cache" in inspect.signature(decoder.forward).parameters
        # If regions run eagerly, compiling a decoder has no benefit.  On a CPU, a compiled AutoencoderKL would even fail,
        # because its group norms would run as ATen ops.  It fails in the same way with torch's backend aot_eager.
        if repeated_blocks(decoder) and not keeps_frames and chosen.lowering != "eager":
            compile_by_kind(decoder, placement, options, dynamic, name=f"pipe.{phase.name}", levels=True)
        methods = tuple(name for name in ("encode", "decode") if hasattr(model, name))
    elif any(class_of(tensor) == GGUF for _, tensor in tensors_of(model)):
        _log.warning(
            "pipe.%s runs eagerly, and each op fetches its weights: torch.compile does not trace ops on GGUF weights, which "
            "stay on the device",
            phase.name,
        )
        placement.store.expect_eager_reads()
    else:
        # A component that runs once per generation gets no CUDA graph, because the memory of the graph would stay allocated.
        if phase.name not in STEPPED:
            options = {**options, "cudagraphs": False}
        # The first plan of a model that is compiled as one graph may keep as many weights on the device as the goal allows.
        if phase.counts or compiled_whole(model, options):
            placement.aim_for(expected)
        compile_by_kind(model, placement, options, dynamic, name=f"pipe.{phase.name}")
    budget.add(phase, methods)


def _owner(name: str, ref: weakref.ref[Budget]) -> str | None:
    """Return a description of a component for error messages; None if the budget has no compiled pipeline any more.

    ``name``: the name of the component.  ``ref``: a weak reference to the budget.
    """
    budget = ref()
    return f"pipe.{name} of a compiled pipeline" if budget is not None and budget.pipelines else None
