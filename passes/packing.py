"""Packing: a bfloat16 weight in twelve bits a value, without loss.

Of the eight bits of an exponent a trained or random weight uses few values: sixteen in a row cover more than 99.9 % of its
values, so four bits say which.  Sign and mantissa stay as they are, eight bits.  Values with another exponent are *escapes*:
their code is what they are above the base, modulo 16, and a list says how many times 16 is to be added.

A packed weight is one int32 tensor of one dimension, see :class:`Layout`:

    frames      of 8 h values each: 2 h words of signs and mantissas, a byte a value; h words of exponents, a nibble a value
    escapes     for each segment of at most 2,048 frames ``room`` words: in 27 bits which of its values, above them how many
                times 16; unused ones add 0, to values apart, because adding to one word many times is slow on a GPU
    base        the exponent of code 0

A frame holds its values as words of two, in four rows of h.  Row k has the bytes k % 2 and k % 2 + 2 of the words of row
k // 2, and the nibbles k and k + 4 of the codes.  So an op works on two values at once, without a table or a branch, and what
a GPU reads several times lies close together.  All of it is int32 until the end: Inductor makes one kernel of the words,
and a second one of the escapes, which adds to the result of the first.  The sum of a word is exact in whatever order two
escapes come to it.

The op ``unpack_2`` stands before the reader of a packed weight, in its region.  Inductor keeps code by the op's name and
arguments, for the machine: another layout of the packed form needs another name, or old code reads it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

# Values of a frame, at most: a frame of 96 KiB is read several times, and stays in a cache of a GPU or of a core.
_FRAME = 1 << 16
# Frames of a segment, at most: 27 bits say which of its values escapes.
_SEGMENT = 1 << 27 - 16
# One escape in so many values has room: 12 + 32 / 352 bits a value.  Trained weights have one in 400 to one in 10,000,
# Gaussian ones one in 12,000.
_VALUES_PER_ESCAPE = 352
# Words that lie at multiples of 16 bytes are loaded four at a time.
_ALIGNED = 4
# Values from which the base is chosen: another base costs escapes, but is never wrong.
_SAMPLE = 1 << 16
# Frames that are packed or unpacked at a time: 1 MiB of values, which a core's cache holds.
_PIECE = 8
# Frames that a thread takes at once.
_SHARE = 32
# Values between those to which unused escapes add 0, one in 16 bytes.
_APART = 8
# Words of which the largest is sought at a time.
_GROUP = 64

_SIGNS, _MANTISSAS, _CODES = 0x00800080, 0x007F007F, 0x000F000F
_EXPONENTS, _BOTH, _OUTSIDE = 0x00FF00FF, 0x00010001, 0x01F001F0
# What makes an exponent greater by 16.
_SIXTEEN = 16 << 7

# Runs a function on each item: map, or that of a pool of threads.
Run = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]


class Layout(NamedTuple):
    """Of a packed weight: its frames, ``h`` of them (see the note above), frames of a segment, and room for its escapes."""

    frames: int
    h: int
    segment: int
    room: int

    @staticmethod
    def of(numel: int) -> Layout:
        """That of a weight of so many values."""
        frames = max(1, -(-numel // _FRAME))
        segments = -(-frames // _SEGMENT)
        room = _aligned(-(-numel // (segments * _VALUES_PER_ESCAPE)))
        return Layout(frames, _aligned(-(-numel // (8 * frames))), -(-frames // segments), room)

    @property
    def segments(self) -> int:
        return -(-self.frames // self.segment)

    @property
    def body(self) -> int:
        """Words of all frames."""
        return 3 * self.h * self.frames

    @property
    def words(self) -> int:
        return self.body + self.segments * self.room + _ALIGNED

    @property
    def nbytes(self) -> int:
        return 4 * self.words


def _aligned(words: int) -> int:
    return -(-words // _ALIGNED) * _ALIGNED


def saves(numel: int) -> bool:
    """Whether packing makes a weight of so many values smaller by a fifth or more; small ones are mostly padding."""
    return 5 * Layout.of(numel).nbytes <= 8 * numel


def can_pack(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the values of a weight can be packed, if few escape, and take fewer bytes.  ``dtype``: that it is to have."""
    return dtype == torch.bfloat16 and weight.is_contiguous() and saves(weight.numel())


def pack(values: torch.Tensor, out: torch.Tensor, run: Run = map) -> bool:
    """Pack bfloat16 ``values``, contiguous in host memory, into ``out``, int32 [Layout.words].

    ``run``: spreads the work over threads.  The same values have the same bytes.  Returns False, with ``out`` undefined, if
    there are more escapes than ``out`` has room for.
    """
    flat = values.reshape(-1)
    layout = Layout.of(flat.numel())
    base = _base(flat.view(torch.int16))
    escapes = run(lambda first: _pack_frames(flat, layout, base, first, out), range(0, layout.frames, _SHARE))
    listed = _listed(flat, torch.cat([*escapes]), layout, base)
    if listed is None:
        return False
    out[layout.body : -_ALIGNED].copy_(listed)
    out[-_ALIGNED:].fill_(base)
    return True


def _listed(flat: torch.Tensor, words: torch.Tensor, layout: Layout, base: int) -> torch.Tensor | None:
    """The escapes of values in these words, in order, as the packed weight lists them; None if they have no room."""
    at = (2 * words.view(-1, 1) + torch.arange(2)).view(-1)
    at = at[at < len(flat)]
    times = ((flat.view(torch.int16)[at].to(torch.int64) >> 7 & 0xFF) - base) >> 4
    at, times = at[times != 0], times[times != 0]
    values = 8 * layout.h * layout.segment
    counts = torch.bincount(at // values, minlength=layout.segments)
    if int(counts.max()) > layout.room:
        return None
    listed = (torch.arange(layout.room) * _APART).repeat(layout.segments, 1)
    for row, segment in zip(listed, (times << 27 | at % values).split(counts.tolist()), strict=True):
        row[: len(segment)] = segment
    return listed.to(torch.int32).view(-1)


def _base(bits: torch.Tensor) -> int:
    """The exponent from which sixteen in a row cover most of a sample."""
    sample = bits[:: len(bits) // _SAMPLE | 1].to(torch.int64)  # an odd step comes to every column
    counts = torch.bincount((sample >> 7) & 0xFF, minlength=256)
    return int(counts.unfold(0, 16, 1).sum(1).argmax())


def _pack_frames(flat: torch.Tensor, layout: Layout, base: int, first: int, out: torch.Tensor) -> torch.Tensor:
    """Pack the frames of a share; return the positions of their words with an escape."""
    h, end = layout.h, min(first + _SHARE, layout.frames)
    signs, mantissas, exponents, outside, codes, bias, none, four, seven, eight = map(
        _number, (_SIGNS, _MANTISSAS, _EXPONENTS, _OUTSIDE, _CODES, (256 - base) * _BOTH, 256 * _BOTH, 4, 7, 8)
    )
    buffers, escapes = torch.empty(2, _PIECE, 4, h, dtype=torch.int32), [torch.empty(0, dtype=torch.int64)]
    for begin in range(first, end, _PIECE):
        count = min(_PIECE, end - begin)
        words = _as_words(flat[8 * h * begin :][: 8 * h * count], 4 * h * count, base).view(count, 4, h)
        into = out[3 * h * begin :][: 3 * h * count].view(count, 3, h)
        here, other = buffers[:, :count]
        torch.bitwise_right_shift(words, eight, out=other).bitwise_and_(signs)
        torch.bitwise_and(words, mantissas, out=here).bitwise_or_(other)
        rows = here.view(count, 2, 2, h)
        torch.bitwise_or(rows[:, :, 0], rows[:, :, 1].bitwise_left_shift_(eight), out=into[:, :2])
        torch.bitwise_right_shift(words, seven, out=here).bitwise_and_(exponents)
        # 256 more than the code, so that nothing is borrowed from the other value; then 0 to 15, or bits above them
        here.add_(bias).bitwise_xor_(none)
        escapes.append(_nonzero(torch.bitwise_and(here, outside, out=other).view(-1)) + 4 * h * begin)
        here.bitwise_and_(codes)
        torch.bitwise_or(rows[:, :, 0], rows[:, :, 1].bitwise_left_shift_(four), out=other[:, :2])
        torch.bitwise_or(other[:, 0], other[:, 1].bitwise_left_shift_(eight), out=into[:, 2])
    return torch.cat(escapes)


def _number(value: int) -> torch.Tensor:
    """For an op on int32: a third faster than a number of Python."""
    return torch.tensor(value, dtype=torch.int32)


def _nonzero(words: torch.Tensor) -> torch.Tensor:
    """The positions of words above zero, none of which is below: first of groups, because few have one."""
    groups = words.view(-1, math.gcd(len(words), _GROUP))
    some = groups.amax(1).nonzero().view(-1)
    row, column = groups[some].nonzero().unbind(1)
    return some[row] * groups.shape[1] + column


def _as_words(values: torch.Tensor, count: int, base: int) -> torch.Tensor:
    """Contiguous bfloat16 values as so many int32 words of two, after the last with values that are no escapes."""
    if len(values) < 2 * count or values.storage_offset() % 2:
        padded = torch.full((2 * count,), base << 7, dtype=torch.int16).view(torch.bfloat16)
        padded[: len(values)] = values
        values = padded
    return values.view(torch.int32)


def unpack(packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The values of a packed weight, bfloat16 of this shape."""
    numel = math.prod(shape)
    layout = Layout.of(numel)
    words = _words(packed, layout, 0, layout.frames).flatten()
    at, times = _escapes(packed, layout)
    added = times * ((at & 1).to(torch.int32) * 0xFFFF + 1) * _SIXTEEN  # in the low or the high half of the word
    words = words.index_put((at >> 1,), added, accumulate=True)[: -(-numel // 2)]
    return words.view(torch.bfloat16)[:numel].view(shape)


def unpack_into(packed: torch.Tensor, out: torch.Tensor, run: Run = map) -> None:
    """Write the values of a packed weight to ``out``, bfloat16, contiguous, with little memory besides.

    ``run``: as for :func:`pack`.
    """
    flat = out.view(-1)
    layout = Layout.of(len(flat))

    def unpack_frames(first: int) -> None:
        words = _words(packed, layout, first, min(first + _PIECE, layout.frames)).flatten()
        target = flat[8 * layout.h * first :][: 2 * len(words)]
        target.copy_(words.view(torch.bfloat16)[: len(target)])

    deque(run(unpack_frames, range(0, layout.frames, _PIECE)), maxlen=0)
    at, times = _escapes(packed, layout)
    escaped, bits = times != 0, flat.view(torch.int16)
    bits[at[escaped]] += (times[escaped] * _SIXTEEN).to(torch.int16)


def _words(packed: torch.Tensor, layout: Layout, first: int, end: int) -> torch.Tensor:
    """The words of frames ``[first, end)``, int32 [frames, 2, 2, h]; escapes lack what is to be added."""
    h, frames = layout.h, end - first
    planes = packed[3 * h * first : 3 * h * end].view(frames, 3 * h)
    row = torch.arange(4, device=packed.device, dtype=torch.int32).view(1, 2, 2, 1)
    signs = planes[:, : 2 * h].view(frames, 2, 1, h) >> (row & 1) * 8
    codes = (planes[:, 2 * h :].view(frames, 1, 1, h) >> row * 4) & _CODES
    exponents = codes * 128 + packed[-1] * _SIGNS
    return ((signs & _SIGNS) << 8) | (signs & _MANTISSAS) | exponents


def _escapes(packed: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Which values escape, int64, and how many times 16 is to be added to their exponents, int32."""
    listed = packed[layout.body : -_ALIGNED].view(layout.segments, layout.room)
    segment = torch.arange(layout.segments, device=packed.device).view(-1, 1) * (8 * layout.h * layout.segment)
    return ((listed & (1 << 27) - 1) + segment).view(-1), (listed >> 27).view(-1)


_OPS = torch.library.Library("chunkflow", "FRAGMENT")
_OPS.define("unpack_2(Tensor packed, int[] shape) -> Tensor")
_OPS.impl("unpack_2", unpack, "CompositeImplicitAutograd")  # so that AOTAutograd traces what it does
UNPACK = torch.ops.chunkflow.unpack_2.default
