"""The drive: weights that find no room in host memory stay in a file, and every step reads them from there.

A weight that is a part of its checkpoint stays in it.  Any other one (cast, split, quantised, or written before) goes to a
scratch file in its final layout.  The scratch file has no name, and is gone with the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.problem import Problem

from .bytes import as_weight, flat_bytes, memory_of
from .checkpoint import FilePart
from .mapping import Descriptor, map_file, whole_pages
from .source import DriveBytes, DriveFile

# File systems in memory: a scratch file there would take what it is to save.
_IN_MEMORY = ("tmpfs", "ramfs")


class Drive:
    """The files of the weights of one model that are on the drive."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: of the scratch file; by default that for temporary files."""
        self._files: dict[str, DriveFile] = {}
        self._folder = folder or Path(tempfile.gettempdir())
        self._scratch: DriveFile | None = None
        self._end = 0

    def part(self, part: FilePart) -> DriveBytes:
        """A weight that stays in its checkpoint."""
        if part.path not in self._files:
            self._files[part.path] = DriveFile(Descriptor(os.open(part.path, os.O_RDONLY)), part.path, part.modified)
        return DriveBytes(self._files[part.path], part.offset, part.nbytes)

    def keep(self, weight: torch.Tensor) -> tuple[torch.Tensor, DriveBytes]:
        """Write a dense host tensor to the scratch file; return a mapping of it there, and its bytes there.

        Raises ChunkflowError if the file system is full, or is in memory itself.
        """
        file = self._scratch = self._scratch or self._made(weight.nbytes)
        begin, size = self._end, whole_pages(weight.nbytes)
        try:
            os.ftruncate(file.descriptor.number, begin + size)
            view, done = memoryview(memory_of(flat_bytes(weight))).cast("B"), 0
            while done < len(view):
                done += os.pwritev(file.descriptor.number, [view[done:]], begin + done)
        except OSError as error:
            raise ChunkflowError(_no_scratch(self._folder, error.strerror or str(error))) from error
        file.sums.add(begin, view)
        mapped = map_file(file.descriptor, weight.nbytes, mmap.MAP_SHARED, begin)
        if mapped is None:
            raise ChunkflowError(_no_scratch(self._folder, "a weight in it cannot be mapped"))
        self._end += size
        return as_weight(mapped, weight), DriveBytes(file, begin, weight.nbytes)

    def _made(self, nbytes: int) -> DriveFile:
        if (kind := _file_system(self._folder)) in _IN_MEMORY:
            raise ChunkflowError(_no_scratch(self._folder, f"it is in memory itself ({kind})"))
        if (free := shutil.disk_usage(self._folder).free) < nbytes:
            raise ChunkflowError(_no_scratch(self._folder, f"{free} bytes are free"))
        try:
            with tempfile.TemporaryFile(prefix="chunkflow-", dir=self._folder) as made:
                return DriveFile(Descriptor(os.dup(made.fileno())), f"the scratch file in {self._folder}")
        except OSError as error:
            raise ChunkflowError(_no_scratch(self._folder, error.strerror or str(error))) from error


def for_the_drive(weights: Sequence[tuple[str, int]], budget: int) -> frozenset[str]:
    """The names of the weights, given with their bytes in the order of a step, that go to the drive, so that the others take
    at most ``budget``.  They are spread evenly over the step, because the drive reads all the time."""
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
    for name, nbytes in weights:  # what rounding has left above the budget
        if kept > budget and name not in chosen:
            chosen.add(name)
            kept -= nbytes
    return frozenset(chosen)


def with_drive(problem: Problem, budget: int) -> Problem:
    """The problem with at most ``budget`` bytes of its weights in host memory, and the others on the drive."""
    streamed = sorted((w for w in problem.weights if w.keep is None and w.uses), key=lambda w: (w.uses[0], w.name))
    drive = for_the_drive([(w.name, w.nbytes) for w in streamed], budget)
    return replace(problem, weights=tuple(replace(w, drive=w.name in drive) for w in problem.weights))


def _no_scratch(folder: Path, cause: str) -> str:
    fix = "Set TMPDIR to a folder on a drive, or raise host_memory."
    return f"There is no room for a scratch file in {folder}: {cause}. {fix}"


def _file_system(folder: Path) -> str:
    """The kind of the file system of a folder, empty if the machine does not say."""
    found, best = "", -1
    with contextlib.suppress(OSError):
        where = folder.resolve()
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            mount = Path(before.split()[4])
            if where.is_relative_to(mount) and len(mount.parts) > best:
                found, best = after.split()[0], len(mount.parts)
    return found
