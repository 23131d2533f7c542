"""Joins lines into a listing, with a note at the end of each line.

A block with the same structure as the previous block is folded, that is, shown as one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from chunkflow_compile.units import size

from .annotate import HEADER, FlopNotes
from .lines import INPUTS, PROOF, Line
from .record import fine

# The width of the program text in columns.  It is enough for the call of a region with its first inputs.  A line with a
# note is 160 columns wide.
COLUMN = 96


@dataclass(frozen=True)
class _ListingPart:
    """Consecutive lines in one part of a listing.

    ``shape``: a key for comparing parts.  It is equal for two parts if they differ only in names.
    """

    name: str
    lines: tuple[Line, ...]
    shape: tuple[tuple[str, ...], ...]


def render(lines: Sequence[Line], annotator: FlopNotes | None = None, *, full: bool = True) -> str:
    """Return the listing as text.  It begins with the lines about the proof.

    ``annotator``: the object that makes the notes, or None for a listing without notes.  ``full``: whether to show
    everything.  If not, long lines are cut off, and of consecutive equal parts only the first is shown.
    """
    text = [line.text for line in lines if line.part == PROOF]
    lines = lines[len(text) :]
    text += [] if annotator is None else [f"#{' ' * (COLUMN - 1)}# {HEADER}"]
    if full:
        text += [_line_text(line, annotator, False) for line in lines]
        return "\n".join(text) + "\n"
    for first, *others in _equal_parts(_wired_parts(lines)):
        text += _heading(first)
        text += [_line_text(line, annotator, True) for line in first.lines]
        if others:
            text.append(_folded(first, others, annotator))
    return "\n".join(text) + "\n"


def _wired_parts(lines: Sequence[Line]) -> list[_ListingPart]:
    """Divide lines into parts, and compute the shape of each part.

    In a shape, an operand is identified by its position if it is defined in the same part, in the previous part or in the
    inputs of its block.  All other operands are identified by their names.
    """
    parts: list[_ListingPart] = []
    place: dict[str, tuple[str, int]] = {}
    before = ""
    for name, group in groupby(lines, key=lambda line: line.part):
        members = tuple(group)
        for number, line in enumerate(line for line in members if line.defines):
            place[line.defines] = name, number
        near = {name: "own", before: "before", f"{INPUTS} of {name}": "inputs"}

        def wire(operand: str, near: dict[str, str] = near) -> str:
            part, number = place.get(operand, ("", -1))
            return f"{near[part]} {number}" if part and part in near else operand

        parts.append(
            _ListingPart(name, members, tuple((line.like, *map(wire, line.uses)) for line in members if line.like))
        )
        before = name
    return parts


def _equal_parts(parts: Iterable[_ListingPart]) -> list[list[_ListingPart]]:
    """Group the parts.  Consecutive parts with the same shape form one group.  A part outside blocks is never grouped with
    other parts."""
    groups: list[list[_ListingPart]] = []
    for part in parts:
        before = groups[-1][-1] if groups else part
        if groups and part.name and before.name and part.shape == before.shape:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def _heading(part: _ListingPart) -> list[str]:
    regions = [line.region for line in part.lines if line.region is not None]
    if not regions:
        return []
    numbers = f"region {regions[0]}" if len(regions) == 1 else f"regions {regions[0]} to {regions[-1]}"
    return [f"# {part.name or 'outside blocks'}: {numbers}"]


def _line_text(line: Line, annotator: FlopNotes | None, short: bool) -> str:
    long = short and len(line.text) > COLUMN and (line.op or line.region is not None or line.node is not None)
    text = line.text if not long else f"{line.text[: COLUMN - 4]} ..."
    note = annotator.note(line) if annotator is not None else None
    return text if note is None else f"{text:<{COLUMN}}# {note}"


def _folded(first: _ListingPart, others: Sequence[_ListingPart], annotator: FlopNotes | None) -> str:
    names = others[0].name if len(others) == 1 else f"{others[0].name} .. {others[-1].name}"
    lines = sum(len(part.lines) for part in others)
    head = f"# {names}: as {first.name}, {lines} lines folded"
    if annotator is None:
        return head
    notes = [[(line, note) for line in part.lines if (note := annotator.note(line))] for part in others]
    said = [_range([sum(n.cost_s or 0.0 for i, n in noted if i.region is not None) for noted in notes])]
    copied = [sum(n.nbytes or 0 for i, n in noted if i.copy is not None) for noted in notes]
    if any(copied):
        low, high = size(min(copied)), size(max(copied))
        said.append(f"{low if low == high else f'{low} .. {high}'} copied in each")
    slacks = [(n.slack_s, part.name) for part, noted in zip(others, notes, strict=True) for _, n in noted]
    least = min(((s, name) for s, name in slacks if s is not None), default=None)
    if least is not None:
        said.append(f"least {'slack' if least[0] >= 0 else 'slack: waits'} {fine(abs(least[0]))} in {least[1]}")
    return f"{head}: {'; '.join(s for s in said if s)}" if any(said) else head


def _range(seconds: Sequence[float]) -> str:
    low, high = min(seconds) * 1e3, max(seconds) * 1e3
    if not high:
        return ""
    return f"{low:.3f} ms of compute each" if high - low < 5e-4 else f"{low:.3f} .. {high:.3f} ms of compute"
