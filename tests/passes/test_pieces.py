"""How a weight is dealt out in pieces: every byte once, wherever a copy begins and ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chunkflow_compile.passes.pieces import STRIPE, parts, piece_bytes

SIZES = st.one_of(st.integers(0, 5000), st.integers(0, 5 * STRIPE), st.integers(1, 5).map(lambda n: n * STRIPE))


@given(nbytes=SIZES, ranks=st.integers(2, 9), first=st.integers(0, 8), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_the_parts_of_a_range(nbytes: int, ranks: int, first: int, cut: tuple[float, float]) -> None:
    begin, end = sorted(int(share * nbytes) for share in cut)
    whole = {(p.owner, p.begin, p.offset) for p in parts(0, nbytes, nbytes, ranks)}
    found = sorted(parts(begin, end, nbytes, ranks, first % ranks), key=lambda p: p.begin)
    at = begin
    for part in found:
        assert part.begin == at and 0 < part.nbytes <= STRIPE // ranks + 256
        at += part.nbytes
        # where the same bytes lie when the whole weight is dealt out
        assert any(o == part.owner and 0 <= part.begin - b == part.offset - f < STRIPE for o, b, f in whole)
    assert at == end or begin == end


@given(nbytes=SIZES, ranks=st.integers(2, 9))
def test_a_piece_has_its_parts_and_no_byte_twice(nbytes: int, ranks: int) -> None:
    size = piece_bytes(nbytes, ranks)
    assert size % 256 == 0 and nbytes <= ranks * size <= nbytes + ranks * 256
    for owner in range(ranks):
        end = 0
        for part in sorted((p for p in parts(0, nbytes, nbytes, ranks) if p.owner == owner), key=lambda p: p.offset):
            assert part.offset >= end
            end = part.offset + part.nbytes
        assert end <= size


def test_ranks_begin_with_others() -> None:
    """A chunk comes from all ranks in equal parts, from the next rank on."""
    chunk = [*parts(STRIPE, 2 * STRIPE, 4 * STRIPE, 4, first=2)]
    assert [p.owner for p in chunk] == [2, 3, 0, 1] and {p.nbytes for p in chunk} == {STRIPE // 4}
