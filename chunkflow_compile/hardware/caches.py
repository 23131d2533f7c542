"""The cache folders: ChunkFlow's own, and the folder of torch's compile caches.

Inductor compiles in torch's folder, which torch creates while its compiler is imported.  In a container, torch's folder
may be read-only, full, or owned by another user.  ChunkFlow's error then names the environment variable that selects
another folder.  This module does not import torch, because importing torch may fail if the folder cannot be used.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import getpass
import os
import re
import shutil
import struct
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Minimum number of free bytes in the folder of the compile caches.  A kernel for a GPU takes less space than this.  The
# first kernel for the CPU takes 150 MB, mostly for a precompiled header.
_LEAST_BYTES = 32 << 20
# A library that is younger than this (in seconds) may be incomplete, because it is still being linked.  Linking takes
# less than a second.
_LINKING_S = 10.0
FIX = f"set {FOLDER_VARIABLE} to a folder that can be written"


@dataclass(frozen=True)
class Folder:
    """A folder, and whether it can be used.

    ``free``: the free bytes of its file system, or None if unknown.  ``fault``: the reason why the folder cannot be
    used; empty if it can be used.
    """

    path: str
    free: int | None = None
    fault: str = ""


def user_cache() -> Path:
    """Return ChunkFlow's folder in the user's cache folder.  Raises ChunkflowError if this user has no home folder."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise ChunkflowError("This user has no home folder: set HOME or XDG_CACHE_HOME.") from error
    return Path(base) / "chunkflow"


def temporary_folder() -> Folder:
    """Return the folder for temporary files."""
    try:
        path = tempfile.gettempdir()
    except OSError as error:
        return Folder("none", fault=error.strerror or str(error))
    return Folder(path, shutil.disk_usage(path).free)


def compile_cache() -> Folder:
    """Return the folder of torch's compile caches.  Create the folder if it is missing, as torch would."""
    path = os.environ.get(FOLDER_VARIABLE)
    if not path:
        temporary = temporary_folder()
        if temporary.fault:
            return temporary
        path = os.path.join(temporary.path, _own_name())
    return _tested_folder(os.path.abspath(path))


def use_compile_cache() -> Folder:
    """Return the folder from :func:`compile_cache`, and configure torch to use it."""
    folder = compile_cache()
    if not folder.fault:
        # torch would choose the same folder, but torch 2.11 raises an error if the user has no account
        os.environ[FOLDER_VARIABLE] = folder.path
    return folder


@contextlib.contextmanager
def importing_torch() -> Iterator[None]:
    """A context in which torch's compiler is imported.  Raises ChunkflowError if the import fails because the folder of
    the compile caches cannot be used."""
    folder = use_compile_cache()
    try:
        yield
    except OSError as error:
        if not folder.fault:
            raise
        raise _unusable(folder) from error


def check_compile_cache(needed: bool) -> None:
    """Raise ChunkflowError if the folder of the compile caches is ``needed`` and cannot be used."""
    folder = use_compile_cache()
    if folder.fault and needed:
        raise _unusable(folder, ", or run without it: options={'lowering': 'eager'}")


def _unusable(folder: Folder, otherwise: str = "") -> ChunkflowError:
    return ChunkflowError(
        f"Inductor has no folder to compile in: {folder.path} cannot be used ({folder.fault}). To go on, {FIX}{otherwise}."
    )


def remove_torn() -> bool:
    """Remove truncated libraries from the compile caches, and warn.  Returns whether there were such libraries.

    A killed process leaves truncated libraries behind, and Inductor assumes that any existing file is complete.
    """
    folder = compile_cache().path
    torn = [path for path in Path(folder).rglob("*.so") if not _is_whole(path)]
    for path in torn:
        path.unlink(missing_ok=True)
    if torn:
        warnings.warn(
            f"{len(torn)} libraries in {folder} were written in part, perhaps by a process that was killed, and are compiled "
            "anew.",
            stacklevel=2,
        )
    return bool(torn)


def _is_whole(library: Path) -> bool:
    """Whether a library is complete.  A 64-bit ELF file is complete if it contains its section headers, which are at
    its end.

    A 32-bit ELF file counts as complete; a file in another format counts as incomplete.  A library that is younger than
    ``_LINKING_S`` seconds counts as complete, because another process may still be linking it.
    """
    try:
        with library.open("rb") as file:
            head, state = file.read(64), os.fstat(file.fileno())
    except OSError:  # another process has removed it
        return True
    if time.time() - state.st_mtime < _LINKING_S:
        return True
    if head[:4] != b"\x7fELF" or len(head) < 64:
        return False
    begin, (each, count) = struct.unpack_from("<Q", head, 0x28)[0], struct.unpack_from("<HH", head, 0x3A)
    return head[4] != 2 or bool(begin + each * count <= state.st_size)


@functools.cache
def warn_once(text: str) -> None:
    """Warn once per process, even if several models or graphs cause the same warning."""
    warnings.warn(text, stacklevel=3)


def _tested_folder(path: str) -> Folder:
    """Return the folder at ``path``, after testing whether Inductor can write and run libraries there."""
    try:
        os.makedirs(path, exist_ok=True)
        system = os.statvfs(path)
        free = system.f_bavail * system.f_frsize
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
    except FileExistsError:
        return Folder(path, fault=os.strerror(errno.ENOTDIR))
    except OSError as error:
        return Folder(path, fault=error.strerror or str(error))
    if system.f_flag & os.ST_NOEXEC:
        return Folder(path, free, "no program can be run from there: noexec")
    if free < _LEAST_BYTES:
        return Folder(path, free, f"{size(free)} are free")
    return Folder(path, free)


def _own_name() -> str:
    """Return the name that torch chooses for its folder of compile caches, without importing torch."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
