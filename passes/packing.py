"""Packing: compresses a bfloat16 weight to twelve bits per value, without loss.

A bfloat16 value has a sign and a mantissa, eight bits together, and an exponent of eight bits.  Trained and random weights
use few exponents: sixteen consecutive exponents cover more than 99.9 % of the values of a weight.  The first of these
sixteen is the *base* of the weight.  The packed form stores the sign and mantissa unchanged, and replaces the exponent by a
*code* of four bits: the difference between exponent and base, modulo 16.  A value whose exponent is not one of the sixteen
is an *escape*: a list stores its position and the multiple of 16 to add to its code.

A packed weight is a one-dimensional int32 tensor with three parts, see :class:`Layout`:

    frames      each frame stores 8 h values (h is a field of Layout): 2 h words with signs and mantissas, one byte per value,
                and h words with codes, four bits per value
    escapes     a list of ``room`` words for each segment of at most 2,048 frames.  The low 27 bits of a word are the position
                of the value in the segment, and the higher bits are the multiple of 16.  Unused words add 0 to values that
                are far apart, because a GPU is slow if many threads add to the same word
    base        the exponent whose code is 0

Unpacking a frame gives four rows of h words with two values each; :func:`_words` defines which bits of the frame a row takes.
Each operation unpacks two values at once, without a table or a branch.  The words that a GPU reads several times are close
together.  Inductor generates one kernel that unpacks the frames, and a second kernel that adds the escapes to the result of
the first.  If the second kernel adds two escapes to the same word, the sum is exact in either order.

In a region, the op ``unpack_2`` unpacks a packed weight before another op reads it.  Inductor caches code by the op's name
and arguments.  So if the layout of the packed form changes, the op needs a new name.  Otherwise, cached code for the old
layout would read the new layout.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

# The maximum number of values in a frame.  A frame is read several times; with at most 96 KiB it stays in a cache of the GPU
# or of a CPU core.
_FRAME = 1 << 16
# The maximum number of frames in a segment: the position of an escape (a value whose exponent does not fit in its code) in a
# segment has 27 bits.
_SEGMENT = 1 << 27 - 16
# The lists have space for one escape per 352 values, so a value takes 12 + 32 / 352 bits.  Trained weights have one escape
# per 400 to 10,000 values.  Gaussian weights have one escape per 12,000 values.
_VALUES_PER_ESCAPE = 352
# The parts of a packed weight are aligned to four words, because a GPU loads four words at a time from an address that is
# aligned to 16 bytes.
_ALIGNED = 4
# The approximate number of values from which the base is chosen.  A bad choice leads to more escapes, but never to wrong
# values.
_SAMPLE = 1 << 16
# The number of frames that are packed or unpacked at a time: 1 MiB of values, which fits in a core's cache.
_PIECE = 8
# The number of frames in each unit of work that a thread takes.
_SHARE = 32
# The distance between the values to which two successive unused words of a list of escapes add 0, as a number of values.
# This distance is 16 bytes.
_APART = 8
# The number of words in a group, see _nonzero.
_GROUP = 64

_SIGNS, _MANTISSAS, _CODES = 0x00800080, 0x007F007F, 0x000F000F
_EXPONENTS, _BOTH, _OUTSIDE = 0x00FF00FF, 0x00010001, 0x01F001F0
# The increment that adds 16 to an exponent.
_SIXTEEN = 16 << 7

# A function that applies a function to each item: ``map``, or the ``map`` method of a thread pool.
Run = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]


class Layout(NamedTuple):
    """The layout of a packed weight.  ``frames``: number of frames.  ``h``: words per row (see the module docstring).
    ``segment``: frames per segment.  ``room``: words for escapes per segment."""

    frames: int
    h: int
    segment: int
    room: int

    @staticmethod
    def of(numel: int) -> Layout:
        """Return the layout of a weight with ``numel`` values."""
        frames = max(1, -(-numel // _FRAME))
        segments = -(-frames // _SEGMENT)
        room = _aligned(-(-numel // (segments * _VALUES_PER_ESCAPE)))
        return Layout(frames, _aligned(-(-numel // (8 * frames))), -(-frames // segments), room)

    @property
    def segments(self) -> int:
        return -(-self.frames // self.segment)

    @property
    def body(self) -> int:
        """The number of words in all frames."""
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
    """Return whether packing makes a weight with ``numel`` values smaller by a fifth or more.  Packing does not make a small
    weight smaller, because its packed form is mostly padding."""
    return 5 * Layout.of(numel).nbytes <= 8 * numel


def can_pack(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether packing supports a weight and makes it smaller.  :func:`pack` still fails if the weight has too many
    escapes, that is, values whose exponents do not fit in the codes.  ``dtype``: dtype to which the weight will be converted
    first."""
    return dtype == torch.bfloat16 and weight.is_contiguous() and saves(weight.numel())


def pack(values: torch.Tensor, out: torch.Tensor, run: Run = map) -> bool:
    """Pack ``values`` (bfloat16, contiguous, in host memory) into ``out`` (int32 [Layout.words]).

    ``run``: distributes the work over threads.  The result is deterministic.  If ``out`` has no space for all escapes,
    returns False and leaves ``out`` undefined.
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
    """Return the lists of escapes (see the module docstring) as a packed weight stores them, or None if they do not fit.
    ``words``: ascending positions of the words that contain escapes."""
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
    """Return the base: the exponent that, together with the next fifteen, covers the most values of a sample."""
    sample = bits[:: len(bits) // _SAMPLE | 1].to(torch.int64)  # with an odd step, every column of a matrix is sampled
    counts = torch.bincount((sample >> 7) & 0xFF, minlength=256)
    return int(counts.unfold(0, 16, 1).sum(1).argmax())


def _pack_frames(flat: torch.Tensor, layout: Layout, base: int, first: int, out: torch.Tensor) -> torch.Tensor:
    """Pack consecutive frames.  Return the positions of the words that contain an escape."""
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
        # subtract the base from both exponents of a word; adding 256 first keeps the subtraction from borrowing from the
        # other exponent.  A difference above 15 has one of the bits of ``outside`` set; its value is an escape
        here.add_(bias).bitwise_xor_(none)
        escapes.append(_nonzero(torch.bitwise_and(here, outside, out=other).view(-1)) + 4 * h * begin)
        here.bitwise_and_(codes)
        torch.bitwise_or(rows[:, :, 0], rows[:, :, 1].bitwise_left_shift_(four), out=other[:, :2])
        torch.bitwise_or(other[:, 0], other[:, 1].bitwise_left_shift_(eight), out=into[:, 2])
    return torch.cat(escapes)


def _number(value: int) -> torch.Tensor:
    """Return a number as an int32 tensor, with which an op is a third faster than with a Python number."""
    return torch.tensor(value, dtype=torch.int32)


def _nonzero(words: torch.Tensor) -> torch.Tensor:
    """Return the positions of nonzero words; no word may be negative.  Only few groups of words contain a nonzero word, so
    these groups are found first, by their maximum."""
    groups = words.view(-1, math.gcd(len(words), _GROUP))
    some = groups.amax(1).nonzero().view(-1)
    row, column = groups[some].nonzero().unbind(1)
    return some[row] * groups.shape[1] + column


def _as_words(values: torch.Tensor, count: int, base: int) -> torch.Tensor:
    """Return contiguous bfloat16 values as ``count`` int32 words of two values each.  Missing values at the end are
    filled with a value that is not an escape."""
    if len(values) < 2 * count or values.storage_offset() % 2:
        padded = torch.full((2 * count,), base << 7, dtype=torch.int16).view(torch.bfloat16)
        padded[: len(values)] = values
        values = padded
    return values.view(torch.int32)


def unpack(packed: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Unpack a packed weight to bfloat16 values of the given shape."""
    numel = math.prod(shape)
    layout = Layout.of(numel)
    words = _words(packed, layout, 0, layout.frames).flatten()
    at, times = _escapes(packed, layout)
    added = times * ((at & 1).to(torch.int32) * 0xFFFF + 1) * _SIXTEEN  # in the low or the high half of the word
    words = words.index_put((at >> 1,), added, accumulate=True)[: -(-numel // 2)]
    return words.view(torch.bfloat16)[:numel].view(shape)


def unpack_into(packed: torch.Tensor, out: torch.Tensor, run: Run = map) -> None:
    """Unpack a packed weight into ``out`` (bfloat16, contiguous), using little additional memory.

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
    """Return the words of frames ``[first, end)`` as int32 [frames, 2, 2, h], without adding the escapes."""
    h, frames = layout.h, end - first
    planes = packed[3 * h * first : 3 * h * end].view(frames, 3 * h)
    row = torch.arange(4, device=packed.device, dtype=torch.int32).view(1, 2, 2, 1)
    signs = planes[:, : 2 * h].view(frames, 2, 1, h) >> (row & 1) * 8
    codes = (planes[:, 2 * h :].view(frames, 1, 1, h) >> row * 4) & _CODES
    exponents = codes * 128 + packed[-1] * _SIGNS
    return ((signs & _SIGNS) << 8) | (signs & _MANTISSAS) | exponents


def _escapes(packed: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of the escapes (int64), and the multiples of 16 to add to their exponents (int32)."""
    listed = packed[layout.body : -_ALIGNED].view(layout.segments, layout.room)
    segment = torch.arange(layout.segments, device=packed.device).view(-1, 1) * (8 * layout.h * layout.segment)
    return ((listed & (1 << 27) - 1) + segment).view(-1), (listed >> 27).view(-1)


_OPS = torch.library.Library("chunkflow", "FRAGMENT")
_OPS.define("unpack_2(Tensor packed, int[] shape) -> Tensor")
_OPS.impl("unpack_2", unpack, "CompositeImplicitAutograd")  # so that AOTAutograd traces its implementation
UNPACK = torch.ops.chunkflow.unpack_2.default
