"""Predictions for other systems that shard the weights of a model over the ranks.  ChunkFlow only simulates these
methods.

``distributed-layerwise``: the distributed layerwise offload (DLO) of vLLM-Omni for Ulysses ranks (issue 5396, pull
request 5397).  Each rank has 1/N of every block in host memory.  When a block begins, each rank copies its shard of the
next block to the device, and then the ranks all-gather the shards.  ``fsdp``: each device keeps a shard of every block
(``fully_shard`` in torch; HSDP in vLLM-Omni, pull request 1339).  When a block begins, the ranks all-gather the next
block.

Both methods keep two slots, each for a whole block.  Weights outside blocks are resident; blocks are not.  The last block
fetches the first block for the next call.  A gather is simulated as a collective: it has the latency of a collective, and
N - 1 shards arrive at each rank over the same interconnect.  It is queued with the collectives of the model, because
collectives of several communicators must not run at the same time.  A gather is queued when a block begins (``fsdp``) or
when the rank's shard has arrived (``distributed-layerwise``).  This is the best case: if a gather were issued on the
communicator of Ulysses before its shard has arrived, it would delay the exchanges after it.  Neither copies on the device
before and after a gather nor host time are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, Lane, Sharded
from chunkflow_compile.passes.placement.policies import block_regions, weights_of_blocks
from chunkflow_compile.passes.placement.timeline import Playback, Played, Simulator
from chunkflow_compile.passes.problem import HOST, Collective, Problem
from chunkflow_compile.passes.step import Copy, Finish, Op, Run, Scheduler, Start, Step

from .played_steps import PlayedStep


def why_not(problem: Problem, ranks: int) -> str:
    """Return a sentence on why the weights of a problem cannot be sharded over ``ranks`` ranks; empty if they can be
    sharded."""
    if ranks < 2:
        return "It splits each block among ranks, and there is one only: give --ulysses 2 or more."
    if not any(_block_bytes(problem)):
        return "It splits blocks among ranks, and no block of a ModuleList has weights that it alone reads."
    return ""


def play_sharded(way: Sharded, problem: Problem, hardware: Hardware, ranks: int) -> PlayedStep:
    """Simulate a call of a problem whose blocks are sharded over ``ranks`` ranks.  Raises ChunkflowError if the weights
    cannot be sharded, see :func:`why_not`."""
    if why := why_not(problem, ranks):
        raise ChunkflowError(f"Policy {way} is not for this model on so many ranks. {why}")
    blocks = block_regions(problem)
    sizes = _block_bytes(problem)
    shards = [-(-size // ranks) for size in sizes]
    begins = [first for first, _ in blocks]
    given = len(problem.collectives)
    gathers = tuple(
        Collective(
            name=f"gather_{b}", kind="all-gather", nbytes=(ranks - 1) * shard, before=first, until=first, ranks=ranks
        )
        for b, (first, shard) in enumerate(zip(begins, shards, strict=True))
    )
    some = problem.weights[0]
    copied = tuple(
        replace(some, name=f"shard_{b}", nbytes=shard, uses=(first,), source=HOST)
        for b, (first, shard) in enumerate(zip(begins, shards, strict=True))
    )
    played = replace(problem, weights=copied, collectives=(*problem.collectives, *gathers))
    ops = list[Op]()
    for op in Scheduler(played, DEFAULT_CHUNK_BYTES).step({}):
        if isinstance(op, Start) and op.collective >= given:
            continue  # a gather is issued when the previous block begins, or when its shard has arrived
        if isinstance(op, Run) and op.region in begins:
            after = (begins.index(op.region) + 1) % len(begins)
            copy = Copy("copy", f"shard_{after}", 0, 1, op.region, next_step=not after)
            ops.append(Start(given + after) if way == "fsdp" else copy)
        ops.append(op)
    simulator = Simulator(played, hardware, max(shards))
    shard_of = {given + b: "" if way == "fsdp" else f"shard_{b}" for b in range(len(blocks))}
    kept = sum(shards) if way == "fsdp" else 0
    return PlayedStep(
        timeline=_Gathering(simulator, tuple(ops), shard_of).play(),
        device_bytes=2 * max(sizes) + kept + problem.total_bytes - sum(sizes),
        moved_bytes=sum(sizes),
    )


class _Gathering(Playback):
    """Simulates a step in which compute waits for gathers.  If the shard of a gather must be copied first, the gather is
    issued when the copy has arrived."""

    def __init__(self, simulator: Simulator, step: Step, shard_of: Mapping[int, str]) -> None:
        """``shard_of``: for the index of each gather, the name of the shard whose copy it waits for; empty if the shard
        is on the device already."""
        super().__init__(simulator, step, spans=False)
        self.shard_of = shard_of
        self.gather_of = {shard: gather for gather, shard in shard_of.items()}

    def _run(self, item: Played) -> None:
        if not isinstance(item, Finish) or item.collective not in self.shard_of:
            super()._run(item)
            return
        reached = self.now
        if shard := self.shard_of[item.collective]:
            self._advance_to(self.lanes["copy"], shard)
        self._advance_to(self.collectives, item.collective)
        self.step.exposed_s += self.now - reached

    def _end_copy(self, lane: Lane) -> None:
        shard = self.lanes[lane].ops[0].op.weight
        super()._end_copy(lane)
        super()._run(Start(self.gather_of[shard]))


def _block_bytes(problem: Problem) -> list[int]:
    """Return, for each block, the bytes of the weights that only this block reads."""
    return [sum(w.nbytes for w in own) for own in weights_of_blocks(problem, block_regions(problem))]
