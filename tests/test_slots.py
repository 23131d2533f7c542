"""Slots never overlap while their weights are alive, and the arena is not much larger than what is alive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chunkflow_compile.passes.plan import ALIGNMENT, align
from chunkflow_compile.passes.slots import Lifetime, assign_slots


def peak_bytes(lifetimes: list[Lifetime], windows: int) -> int:
    """The most bytes alive in one window: no packing is smaller."""
    alive = [0] * max(windows, 1)
    for life in lifetimes:
        for k in range(min(life.length, windows)):
            alive[(life.start + k) % windows] += align(life.nbytes)
    return max(alive)


@st.composite
def lifetimes(draw: st.DrawFn) -> tuple[list[Lifetime], int]:
    windows = draw(st.integers(1, 12))
    one = st.builds(Lifetime, st.integers(0, windows - 1), st.integers(1, windows), st.integers(1, 5000))
    return draw(st.lists(one, max_size=24)), windows


@given(lifetimes())
def test_weights_alive_together_never_share_bytes(case: tuple[list[Lifetime], int]) -> None:
    lives, windows = case
    offsets, arena = assign_slots(lives, windows)
    for i, (a, at) in enumerate(zip(lives, offsets, strict=True)):
        assert at % ALIGNMENT == 0
        assert at + a.nbytes <= arena
        for b, bt in list(zip(lives, offsets, strict=True))[i + 1 :]:
            alive = {(a.start + k) % windows for k in range(a.length)} & {
                (b.start + k) % windows for k in range(b.length)
            }
            assert not alive or at + a.nbytes <= bt or bt + b.nbytes <= at


@given(lifetimes())
def test_the_arena_is_at_least_what_is_alive_and_at_most_everything(case: tuple[list[Lifetime], int]) -> None:
    lives, windows = case
    offsets, arena = assign_slots(lives, windows)
    assert peak_bytes(lives, windows) <= arena <= sum(align(life.nbytes) for life in lives)
    assert assign_slots(list(lives), windows) == (offsets, arena)


def test_equal_blocks_pack_without_loss() -> None:
    lives = [Lifetime(k, 2, nbytes) for k in range(12) for nbytes in (1024, 4096, 512)]
    assert assign_slots(lives, 12)[1] == peak_bytes(lives, 12) == 2 * (1024 + 4096 + 512)
