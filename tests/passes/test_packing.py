"""The packed form of a bfloat16 weight: every value comes back bit for bit, in twelve bits and a tenth at most."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from chunkflow_compile.passes.packing import UNPACK, Layout, pack, saves, unpack_into

EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
# Values of a weight that has room for all of EVERY as escapes, and for those that Gaussian values have anyway.
ROOMY = 352 * (len(EVERY) + 4000)
# A sixteenth of EVERY in random order.
SHUFFLED = EVERY[torch.randperm(len(EVERY), generator=torch.Generator().manual_seed(1))[: len(EVERY) // 16]]


def packed_of(values: torch.Tensor) -> torch.Tensor | None:
    out = torch.full((Layout.of(values.numel()).words,), -1, dtype=torch.int32)
    return out if pack(values, out) else None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.int16), b.view(torch.int16))


def back(packed: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpacked into memory, where it must write every value, and by the op."""
    into = torch.full_like(values, 7.0)
    unpack_into(packed, into)
    return into, UNPACK(packed, list(values.shape))


@pytest.mark.parametrize("every", [EVERY, SHUFFLED], ids=["in order", "shuffled"])
def test_every_value_comes_back(every: torch.Tensor) -> None:
    values = torch.randn(ROOMY * len(every) // len(EVERY), generator=torch.Generator().manual_seed(0))
    values = values.mul_(0.02).bfloat16()
    values[4096 : 4096 + len(every)] = every
    assert packed_of(values[: len(every) + 8192]) is None, "too many escapes"
    packed = packed_of(values)
    assert packed is not None
    into, by_op = back(packed, values)
    assert same(into, values) and same(by_op, values)


def _nan(g: torch.Generator, count: int) -> torch.Tensor:
    """NaN of both signs, each with a payload."""
    payload = torch.randint(1, 128, (count,), generator=g) | 0x7F80
    sign = torch.randint(0, 2, (count,), generator=g) << 15
    return (payload | sign).to(torch.int16).view(torch.bfloat16)


def _normal(g: torch.Generator, count: int) -> torch.Tensor:
    scale = 2.0 ** torch.randint(-60, 60, (1,), generator=g)
    return (torch.randn(count, generator=g) * scale).bfloat16()


def _denormal(g: torch.Generator, count: int) -> torch.Tensor:
    bits = torch.randint(0, 128, (count,), generator=g) | torch.randint(0, 2, (count,), generator=g) << 15
    return bits.to(torch.int16).view(torch.bfloat16)


def _mixed(g: torch.Generator, count: int) -> torch.Tensor:
    """Gaussian values with a few of every other kind among them."""
    values = _normal(g, count)
    for kind in (_nan, _denormal, _zeros, _infinite):
        at = torch.randint(0, count, (count // 5000 + 1,), generator=g)
        values[at] = kind(g, len(at))
    return values


def _zeros(g: torch.Generator, count: int) -> torch.Tensor:
    return (torch.randint(0, 2, (count,), generator=g) << 15).to(torch.int16).view(torch.bfloat16)


def _infinite(g: torch.Generator, count: int) -> torch.Tensor:
    return torch.where(torch.randn(count, generator=g) > 0, torch.inf, -torch.inf).bfloat16()


def _heavy(g: torch.Generator, count: int) -> torch.Tensor:
    return (torch.randn(count, generator=g) / torch.rand(count, generator=g).add(1e-3)).bfloat16()


def _any_bits(g: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(0, 1 << 16, (count,), generator=g).to(torch.int16).view(torch.bfloat16)


# Kinds of values, and whether a weight of them has to fit.
KINDS: tuple[tuple[Callable[[torch.Generator, int], torch.Tensor], bool], ...] = (
    (_normal, False),
    (_heavy, False),
    (_mixed, False),
    (_zeros, True),
    (_nan, True),
    (_infinite, True),
    (_denormal, True),
    (_any_bits, False),
)


def test_random_weights_come_back() -> None:
    """One thousand of odd sizes, views that begin at an odd value among them.  Those that do not fit say so."""
    g, fitted = torch.Generator().manual_seed(0), 0
    for i in range(1000):
        kind, must = KINDS[i % len(KINDS)]
        most = 150_000 if i % 50 == 0 else 3000
        count = i // len(KINDS) if i < 100 else int(torch.randint(1, most, (1,), generator=g))
        start = i // len(KINDS) % 2
        values = kind(g, count + start)[start:] if count + start else torch.empty(0, dtype=torch.bfloat16)
        packed = packed_of(values)
        assert packed is not None or not must, (i, kind.__name__, count)
        if packed is None:
            continue
        fitted += 1
        into, by_op = back(packed, values)
        assert same(into, values) and same(by_op, values), (i, kind.__name__, count)
    assert fitted > 700


@pytest.mark.parametrize(
    "shape", [(1537, 129), *(pytest.param(shape, marks=pytest.mark.long) for shape in ((1,), (2, 3, 4, 5)))]
)
def test_inductor_unpacks_the_same_bits(shape: tuple[int, ...]) -> None:
    """Also for a reader in the same graph."""
    g = torch.Generator().manual_seed(len(shape))
    values = _normal(g, torch.Size(shape).numel()).view(shape)
    values.view(-1)[:1] = torch.nan
    packed = packed_of(values)
    assert packed is not None
    torch._dynamo.reset()
    compiled = torch.compile(lambda p: (UNPACK(p, list(shape)), UNPACK(p, list(shape)).neg()), fullgraph=True)
    alone, negative = compiled(packed)
    assert same(alone, values) and same(negative, values.neg())


def test_the_same_values_have_the_same_bytes() -> None:
    """On threads too, and whatever was in the memory before."""
    values = _mixed(torch.Generator().manual_seed(3), 3 * (1 << 20) + 11)
    first = packed_of(values)
    assert first is not None
    with ThreadPoolExecutor(2) as pool:
        again = torch.zeros_like(first)
        assert pack(values, again, run=pool.map)
    assert torch.equal(first, again)


def test_twelve_bits_and_a_tenth() -> None:
    for count in (1 << 20, 3072 * 3072, 12288 * 3072):
        assert 8 * Layout.of(count).nbytes / count <= 12.1
        assert saves(count)
    assert packed_of(_normal(torch.Generator().manual_seed(0), 3072 * 3072)) is not None, "Gaussian values have room"
    assert not saves(1) and not saves(64)


@pytest.mark.parametrize("at_end", [True, False])
def test_a_wrong_base_and_a_dropped_escape_give_other_bits(at_end: bool) -> None:
    values = torch.full((4096,), 0.5, dtype=torch.bfloat16)
    values[-1 if at_end else 17] = 1e30
    packed, layout = packed_of(values), Layout.of(4096)
    assert packed is not None
    assert same(back(packed, values)[0], values)
    wrong_base, dropped = packed.clone(), packed.clone()
    wrong_base[-1] += 1
    dropped[layout.body :][: layout.room] = 0
    for mutant in (wrong_base, dropped):
        assert not any(same(value, values) for value in back(mutant, values))
