"""The read bandwidth of an SSD, measured by reads of a file that bypass the page cache."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

# Bytes per read.  The runtime's reads have a similar size: one or more chunks, each of 16 MiB by default.
_READ_BYTES = 8 << 20
# Minimum size of the file.  For a smaller file, the latency of the first read would dominate.
_LEAST = 64 << 20
_LONGEST_S = 3.0


def drive_rate(path: Path) -> float:
    """Read a file for at most three seconds, and return the read bandwidth of its SSD in bytes/s.

    ``path``: the file, or a folder whose largest file is read.  Raises ChunkflowError if the file cannot be read, or if
    it is smaller than 64 MiB.
    """
    try:
        files = (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        file = max(files, key=lambda p: p.stat().st_size)
        nbytes = file.stat().st_size
        if nbytes < _LEAST:
            raise ChunkflowError(
                f"{file} has {size(nbytes)}, too little to measure a drive: give a checkpoint of {size(_LEAST)} or more."
            )
        number = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except ValueError as error:
        raise ChunkflowError(f"The folder {path} has no files: give the folder of a checkpoint.") from error
    except OSError as error:
        raise ChunkflowError(
            f"{path} cannot be read without the page cache: {error.strerror or error}. Give a file on a local drive."
        ) from error
    buffer = memoryview(mmap.mmap(-1, _READ_BYTES))  # mmap aligns it to a page, as direct reads require
    with os.fdopen(number, "rb", buffering=0) as drive:
        done, begin = 0, time.perf_counter()
        while done + _READ_BYTES <= nbytes and time.perf_counter() - begin < _LONGEST_S:
            done += drive.readinto(buffer)
        return done / (time.perf_counter() - begin)
