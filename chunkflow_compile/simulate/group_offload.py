"""diffusers' group offload, predicted: ``enable_group_offload(offload_type="block_level", use_stream=True)``.

``chunkflow bench`` runs it as an alternative.  In diffusers 0.42 (``hooks/group_offloading.py``), group offload works as
follows:

* Each group with a stream contains one block, whatever ``num_blocks_per_group`` says.  A block is a module of a ModuleList or
  Sequential that is a direct child of the model.  Blocks of nested lists, as in text encoders, do not count.
* All other weights form one more group, which has no stream.  **Each call begins by copying them to the device from memory
  that is not pinned, and ends by copying them into new tensors on the host.**  Neither copy overlaps with anything.
* Each parameter is copied separately.  Before a block computes, the host waits for the copies of the block, which come from
  pinned memory, and issues the copies of the next block.  So the copies of the first block do not overlap with compute, and
  copies do not overlap with the previous call.

The compute time is taken from the compiled program: blocks are compiled one by one (``compile_repeated_blocks``), and the
loss of fusion across blocks is not counted.  Host time for hooks and guards is not counted either; it matters if it
exceeds the compute and copy time of a block.  Both would make a step longer, so the prediction is a lower bound.  With
``record_stream=True``, copies may run more than two blocks ahead.  If all blocks are equal, this does not shorten a step,
and it needs more device memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES
from chunkflow_compile.passes.placement.policies import block_regions, weights_of_blocks
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.problem import HOST, Problem, Weight
from chunkflow_compile.passes.step import Copy, Evict, Op, Record, Run, Scheduler, Wait

from .played_steps import PlayedStep


def play_group_offload(problem: Problem, hardware: Hardware) -> PlayedStep:
    """Simulate a call with group offload and with blocks that are compiled one by one."""
    blocks = [b for b in block_regions(problem) if _is_group(problem.regions[b[0]].block)]
    # copied from host memory, and each weight as a whole
    groups = [[replace(w, source=HOST) for w in own] for own in weights_of_blocks(problem, blocks)]
    sizes = [sum(w.nbytes for w in group) for group in groups]
    outside = problem.total_bytes - sum(sizes)
    begins = {first: b for b, (first, _) in enumerate(blocks)}
    ends = {last: b for b, (_, last) in enumerate(blocks)}
    copied = tuple(w for group in groups for w in group)
    played = replace(problem, weights=copied)
    ops = list(_copied(groups[0], 0)) if groups else []
    for op in Scheduler(played, DEFAULT_CHUNK_BYTES).step({}):
        block = begins.get(op.region) if isinstance(op, Run) else None
        if block is not None:
            ops += [Wait("compute", block, tuple(w.name for w in groups[block]))] if groups[block] else []
            ops += _copied(groups[block + 1], block + 1) if block + 1 < len(groups) else ()
        ops.append(op)
        if isinstance(op, Run) and op.region in ends:
            ops += [Evict(w.name) for w in groups[ends[op.region]]]
    simulator = Simulator(played, hardware, max((w.nbytes for w in copied), default=1))
    timeline = simulator.play(tuple(ops))
    moving_s = round_trip_s(outside, hardware)
    return PlayedStep(
        timeline=replace(
            timeline, step_s=timeline.step_s + moving_s, exposed_s=timeline.exposed_s + moving_s, spans=()
        ),
        device_bytes=outside + max((a + b for a, b in pairwise([*sizes, 0])), default=0),
        moved_bytes=problem.total_bytes,
    )


def _copied(group: Sequence[Weight], block: int) -> Iterator[Op]:
    """Yield the copies of a block, and the event that the compute of this block waits for."""
    yield from (Copy("copy", w.name, 0, 1, 0) for w in group)
    yield Record("copy", block)


def round_trip_s(nbytes: int, hardware: Hardware) -> float:
    """Return the seconds to copy a module to the device and back with ``module.to``, which diffusers uses without a
    stream."""
    return nbytes / hardware.pageable_bandwidth + nbytes / hardware.new_pages_bandwidth


def _is_group(block: str) -> bool:
    """Whether a block is in a list that is a direct child of the model, such as ``blocks.3``."""
    return len(block.split(".")) == 2
