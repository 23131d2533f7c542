"""Weights on the SSD: weights that do not fit in host memory stay in a file, from which every step reads them.

A weight whose values are in its checkpoint stays there.  Any other weight (cast, split, quantised, or already written) is
written to a scratch file in its final layout.  Ranks that share weights share one scratch file.  A scratch file has no
name, and disappears with the last process that has it open.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.units import size

from .backing import FileSlice
from .bytes import as_weight, memory_of
from .mapping import Descriptor, whole_pages
from .source import DriveBytes, WeightFile

# File systems that are in memory themselves: a scratch file there would use the memory that it is meant to save.
_IN_MEMORY = ("tmpfs", "ramfs")
_FIX = "Set TMPDIR to a folder on a drive, or raise host_memory."


class Scratch:
    """A file without a name to which weights are written.  Each weight begins at a page boundary."""

    def __init__(self, descriptor: Descriptor, where: str) -> None:
        """``where``: the location of the file, for error messages."""
        self.where = where
        self.file = WeightFile(descriptor, f"the scratch file {where}")
        self._end = 0

    @staticmethod
    def made(nbytes: int) -> Scratch:
        """Create a scratch file for ``nbytes`` of weights in the folder for temporary files.

        Raises ChunkflowError if there is no such folder, or if its file system is full or is in memory itself.
        """
        try:
            folder = Path(tempfile.gettempdir())
        except OSError as error:
            raise ChunkflowError(_no_room("in a folder for temporary files", "there is none")) from error
        where = f"in {folder}"
        if (kind := _file_system(folder)) in _IN_MEMORY:
            raise ChunkflowError(_no_room(where, f"it is in memory itself ({kind})"))
        try:
            if (free := shutil.disk_usage(folder).free) < nbytes:
                raise ChunkflowError(_no_room(where, f"{size(free)} are free"))
            with tempfile.TemporaryFile(prefix="chunkflow-", dir=folder) as opened:
                return Scratch(Descriptor(os.dup(opened.fileno())), where)
        except OSError as error:
            raise ChunkflowError(_no_room(where, error.strerror or str(error))) from error

    def keep(self, weight: torch.Tensor) -> FileSlice:
        """Append a dense host tensor to the file, and return the part of the file that contains the tensor.  Raises the
        same errors as :meth:`write`."""
        begin, self._end = self._end, self._end + whole_pages(weight.nbytes)
        self.write(begin, weight)
        return self.kept(begin, weight)

    def kept(self, begin: int, like: torch.Tensor) -> FileSlice:
        """Return the weight that is stored at the byte offset ``begin``, with the shape, strides and dtype of
        ``like``."""
        part = DriveBytes(self.file, begin, like.nbytes)
        return FileSlice(as_weight(part.mapped(), like), part)

    def write(self, begin: int, weight: torch.Tensor) -> None:
        """Write a dense host tensor at the offset ``begin``, a page boundary.  Raises ChunkflowError if the file system
        is full."""
        number, view, done = self.file.descriptor.number, memory_of(weight), 0
        try:
            os.ftruncate(number, begin + whole_pages(weight.nbytes))
            while done < len(view):
                done += os.pwritev(number, [view[done:]], begin + done)
        except OSError as error:
            raise ChunkflowError(_no_room(self.where, error.strerror or str(error))) from error


def for_the_drive(weights: Sequence[tuple[str, int]], budget: int) -> frozenset[str]:
    """Choose the weights to leave on the SSD, so that the other weights take at most ``budget`` bytes of host memory.

    ``weights``: names and bytes in the order of the model.  The chosen weights are spread evenly over the model,
    because programs read the SSD throughout a step.
    """

    weights = [(name, nbytes) for name, nbytes in weights if nbytes]  # an empty weight cannot be mapped
    total = sum(nbytes for _, nbytes in weights)
    if total <= budget:
        return frozenset()
    chosen, due, kept = set[str](), 0.0, total
    for name, nbytes in weights:
        due += nbytes * (1 - budget / total)
        if due >= nbytes / 2:
            chosen.add(name)
            due -= nbytes
            kept -= nbytes
    for name, nbytes in weights:  # after rounding, the kept weights may still exceed the budget
        if kept > budget and name not in chosen:
            chosen.add(name)
            kept -= nbytes
    return frozenset(chosen)


def with_drive(problem: Problem, names: Collection[str]) -> Problem:
    """Return ``problem`` with ``source.file`` set to True for the weights in ``names``, and to False for all others."""
    return replace(
        problem, weights=tuple(replace(w, source=replace(w.source, file=w.name in names)) for w in problem.weights)
    )


def in_files(cut: Cut, names: Collection[str]) -> Cut:
    """Return ``cut`` with ``source.file`` set to True for the weights in ``names``, and to False for all others."""
    weights = tuple(w.with_source(file=w.parameter.name in names) for w in cut.discovery.weights)
    discovery, problem = replace(cut.discovery, weights=weights), with_drive(cut.problem, names)
    return replace(cut, discovery=discovery, problem=problem, raw=None if cut.raw is None else in_files(cut.raw, names))


def _no_room(where: str, cause: str) -> str:
    return f"There is no room for a scratch file {where}: {cause}. {_FIX}"


def _file_system(folder: Path) -> str:
    """Return the type of the file system of a folder, or an empty string if it is unknown."""

    kind, best = "", -1  # if two mounts have the same path, the later one hides the earlier one
    with contextlib.suppress(OSError):
        where = folder.resolve()
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            mount = Path(before.split()[4])
            if where.is_relative_to(mount) and len(mount.parts) >= best:
                kind, best = after.split()[0], len(mount.parts)
    return kind
