"""The source of a weight: which lane its copies take, and what digests and stored plans say of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import CHUNK, MACHINE, problem, weight

from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.names import Lane
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import HOST, Problem, Source

IN_A_FILE, COMPRESSED = Source(file=True), Source(values=3 * CHUNK)
ALL = Source(file=True, values=3 * CHUNK, ranks=2)


@pytest.mark.parametrize(
    ("source", "lane", "reads", "shard"),
    [
        (HOST, "copy", False, 0),
        (IN_A_FILE, "copy", True, 0),
        (COMPRESSED, "copy", False, 0),
        (Source(file=True, values=3 * CHUNK), "copy", True, 0),
        (Source(ranks=2), "pull", False, CHUNK),
        (ALL, "pull", False, CHUNK),
    ],
)
def test_the_lane_comes_from_the_source(source: Source, lane: Lane, reads: bool, shard: int) -> None:
    """A sharded weight is pulled, wherever the bytes are that its rank has itself."""
    assert (source.lane, source.reads_file, source.shard_bytes(2 * CHUNK)) == (lane, reads, shard)


def test_digests_and_stored_plans_do_not_know_the_class() -> None:
    """They are those of problems that had a flag for each of its fields, and a plan that was stored is the same again."""
    sources = [HOST, IN_A_FILE, COMPRESSED, ALL]
    weights = [replace(weight(i, 2 * CHUNK, (i // 2,)), source=source) for i, source in enumerate(sources)]
    found = problem([5, 5], weights)
    assert found.digest == "56578c592b481243"
    assert (found.piece_bytes, found.unpacked_bytes) == (CHUNK, 3 * CHUNK)
    assert Problem.from_body(found.body) == found
    machine = replace(
        MACHINE, peer_bandwidth=2e6 * CHUNK, collective_bandwidth=4e6 * CHUNK, drive_bandwidth=1e6 * CHUNK
    )
    plan = place(found, machine, Goal(policy="layerwise"), chunk_bytes=CHUNK)
    assert plan.digest == "48aa7ca7f163612e"
    assert Plan.from_json(plan.to_json()) == plan and [w.source for w in plan.weights] == [HOST] * 3 + [Source(ranks=2)]
