"""Handles hoisting during compilation: chooses the preamble that computes the rows for a graph, and warns if nothing is
hoisted."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from chunkflow_compile.frontend.preconditions import warn_once
from chunkflow_compile.options import Options
from chunkflow_compile.passes.graph.hoist import split
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.hoisting import Hoisting
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.passes.program.cycle import block_of
from chunkflow_compile.placed.placement import Placement, placement_of
from chunkflow_compile.runtime.graph import CompiledGraph
from chunkflow_compile.runtime.hoisted import Preamble
from chunkflow_compile.runtime.single_call import SingleCall
from chunkflow_compile.units import size

_log = logging.getLogger(__name__)

_NOTHING_IN_BLOCKS = (
    "hoist=True changes nothing for %s and the blocks of its kind: products of small inputs alone, such as the timestep, "
    "read none of their weights"
)
_NOT_BY_AUTO = (
    "hoist='auto' hoists nothing: a step is not predicted to be shorter, or no product qualifies. If compile() compiled this "
    "model whole for it, hoist=False compiles it by block type, which takes less time"
)
_A_PART = (
    "hoist=True changes nothing for the part of the model that reads {name}, although {count} of its weights ({nbytes}) "
    "could be hoisted: only whole models and blocks that repeat are hoisted. If a graph break divides the model, remove it; "
    "fullgraph=True shows where it is."
)


def preamble_of(
    placement: Placement | None,
    hoisting: Hoisting,
    chosen: Options,
    of_blocks: bool,
    make: Callable[[], CompiledGraph],
) -> Preamble:
    """Return the preamble for a graph.  If the model was compiled for another input size before, and the preamble of that
    size computes the same rows, return that preamble.

    ``placement``: the placement of the model, or None to compile a new preamble.  ``chosen``: the options of the graph.
    ``of_blocks``: whether all blocks of a block type run this graph.  ``make``: a function that compiles the preamble.
    """
    key = hoisting.halves.key, chosen
    found = None if placement is None else placement.preamble(key)
    # the input of a block is not the timestep itself, but an embedding that the model computes from the timestep
    follow = _unknown if of_blocks else _timesteps_of
    return found or Preamble(make(), hoisting.halves, hoisting.rows, key, follow, _share)


def warn_if_not_hoisted(traced: Traced, settings: Settings, by_kind: bool) -> None:
    """Warn if hoist=True has no effect on a part of a model, or if hoist="auto" has no effect on a whole model.

    If hoist=True has no effect on a whole model, :func:`hoisting_of` raises an error instead.
    ``by_kind``: whether the model is compiled block by block.  If so, there is no warning for parts outside the blocks.
    """
    if settings.goal.hoist == "auto" and not settings.part:
        _log.warning(_NOT_BY_AUTO)
    if settings.goal.hoist is not True or settings.goal.policy != "chunkflow" or not settings.part:
        return
    name = next((p.name for p in traced.parameters if p.keep is None), "")
    if traced.repeats is not None:
        _log.warning(_NOTHING_IN_BLOCKS, block_of(name))
    elif not by_kind and (halves := split(traced)) is not None:
        warn_once(_A_PART.format(name=name, count=len(halves.hoisted), nbytes=size(halves.hoisted_bytes)))


def _timesteps_of(program: SingleCall) -> torch.Tensor | None:
    """Return the timesteps of the noise schedule for which a pipeline calls the model of ``program``, or None if they are not
    known."""
    placement = _placement_of(program)
    return None if placement is None else placement.timesteps()


def _unknown(program: SingleCall) -> None:
    """Return None instead of timesteps, because the inputs of blocks are not timesteps."""


def _share(preamble: Preamble, program: SingleCall) -> None:
    """Register a preamble with the placement of ``program``, the program that computes the preamble's rows.

    Preambles with the same hoisted weights get equal shares of the memory for rows.
    """
    if (placement := _placement_of(program)) is not None:
        placement.share(preamble)
        same = [each for each in placement.preambles if each.hoisted == preamble.hoisted]
        for each in same:
            each.limit(len(same))


def _placement_of(program: SingleCall) -> Placement | None:
    root = next((buffer.store.root for buffer in program.call.buffers.values()), None)
    return None if root is None else placement_of(root)
