"""Problems and machines made of numbers, for tests of placement: nothing is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.problem import Collective, Problem, Region, RegionCost, Weight

CHUNK = 1024
# 1000 FLOP take a microsecond, and so does the copy of a chunk.
MACHINE = Hardware(
    name="numbers",
    gemm_flops={"float32": 1e11},
    eta_gemm=0.01,
    memory_bandwidth=1e14,
    h2d_bandwidth=CHUNK * 1e6,
    eta_pref=1.0,
    launch_s=0.0,
    chunk_s=0.0,
    collective_latency_s=0.0,
    collective_bandwidth=CHUNK * 1e6,
    shared_link=True,
    copy_slowdown=2.0,
    collective_slowdown=2.0,
)


def weight(index: int, nbytes: int, uses: tuple[int, ...], keep: str | None = None) -> Weight:
    name = f"w{index}"
    return Weight(
        name=name,
        names=(name,),
        index=index,
        nbytes=nbytes,
        dtype="uint8",
        shape=(nbytes,),
        stride=(1,),
        uses=uses,
        keep=keep,
    )


def problem(
    compute: Sequence[float], weights: Sequence[Weight], collectives: Sequence[tuple[int, float]] = (), blocks: int = 1
) -> Problem:
    """``compute``: microseconds of each region; ``collectives``: (region that waits for it, microseconds)."""
    regions = tuple(
        Region(
            index=k,
            name=f"region_{k}",
            key="k",
            block=f"blocks.{k * blocks // len(compute)}",
            nodes=1,
            weights=tuple(w.name for w in weights if k in w.uses),
            cost=RegionCost(flops=round(1000 * c), dtype="float32"),
        )
        for k, c in enumerate(compute)
    )
    together = tuple(
        Collective(name=f"c{i}", kind="all-to-all", nbytes=round(s * CHUNK), before=k, until=k)
        for i, (k, s) in enumerate(sorted(collectives))
    )
    return Problem(regions=regions, collectives=together, weights=tuple(weights))


@st.composite
def small_problems(draw: st.DrawFn, chunks: int = 5) -> Problem:
    """Two to four regions and at most ``chunks`` chunks of weights; the last chunk of a weight may be short."""
    regions = draw(st.integers(2, 4))
    compute = draw(st.lists(st.integers(1, 6), min_size=regions, max_size=regions))
    weights, left = [], chunks
    while left and len(weights) < 4:
        size = draw(st.integers(1, min(3, left)))
        nbytes = size * CHUNK - draw(st.sampled_from([0, 0, CHUNK // 2]))
        first = draw(st.integers(0, regions - 1))
        last = draw(st.sampled_from([first, first, first, min(first + 1, regions - 1)]))
        weights.append(weight(len(weights), nbytes, tuple(sorted({first, last}))))
        left -= size
        if draw(st.booleans()):
            break
    collectives = draw(st.lists(st.tuples(st.integers(1, regions - 1), st.integers(1, 4)), max_size=3))
    found = problem(compute, weights, collectives, blocks=2)
    engine = draw(st.sampled_from(["sm", "sm", "copy"]))
    return replace(found, collectives=tuple(replace(c, engine=engine) for c in found.collectives))


def machines() -> st.SearchStrategy[Hardware]:
    shared = st.builds(
        lambda copy, collective: replace(MACHINE, copy_slowdown=copy, collective_slowdown=collective),
        st.sampled_from([1.0, 2.0, 3.0]),
        st.sampled_from([1.0, 2.0, 3.0]),
    )
    apart = st.just(replace(MACHINE, shared_link=False, copy_slowdown=1.0, collective_slowdown=1.0))
    return st.builds(
        lambda link, compute, latency, rate: replace(
            link,
            compute_slowdown=compute,
            collective_latency_s=latency * 1e-6,
            h2d_bandwidth=CHUNK * rate * 1e6,
        ),
        shared | apart,
        st.sampled_from([1.0, 1.0, 1.1, 1.5]),
        st.sampled_from([0.0, 0.0, 0.5, 2.0]),
        st.sampled_from([0.5, 1.0, 2.0]),
    )


def blocks_problem(blocks: int, compute: float = 40.0, exchange: float = 4.0) -> Problem:
    """Equal Ulysses blocks: projections, three all-to-alls, attention, an all-to-all back, output projection and MLP."""
    weights: list[Weight] = []
    times: list[float] = []
    collectives: list[tuple[int, float]] = []
    for _ in range(blocks):
        first = len(times)
        for share, sizes in ((0.15, (1, 1, 1)), (0.4, ()), (0.2, (1, 1)), (0.25, (4, 4))):
            weights += [weight(len(weights) + i, s * CHUNK - 64, (len(times),)) for i, s in enumerate(sizes)]
            times.append(share * compute)
        collectives += [(first + 1, exchange)] * 3 + [(first + 2, exchange)]
    return problem(times, weights, collectives, blocks=blocks)
