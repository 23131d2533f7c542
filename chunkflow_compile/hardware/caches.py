"""The folders of caches: ChunkFlow's own, and the one of torch's compile caches.

Inductor compiles in the latter, and torch makes it while its compiler is imported.  In a container it may be read-only, full,
or of another user: then an error names the variable that sets another one.  Imports no torch, whose import may be what fails.
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
# The first kernel for the CPU takes 150 MB, most of it a precompiled header; one for a GPU takes less than this.
_LEAST_BYTES = 32 << 20
# Linking a library takes less than a second.
_LINKING_S = 10.0
FIX = f"set {FOLDER_VARIABLE} to a folder that can be written"


@dataclass(frozen=True)
class Folder:
    """``free``: bytes, None if unknown.  ``fault``: why it cannot be used, empty if it can."""

    path: str
    free: int | None = None
    fault: str = ""


def user_cache() -> Path:
    """ChunkFlow's folder among the caches of this user.  Raises ChunkflowError if this user has no home folder."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise ChunkflowError("This user has no home folder: set HOME or XDG_CACHE_HOME.") from error
    return Path(base) / "chunkflow"


def temporary_folder() -> Folder:
    """The folder for temporary files."""
    try:
        path = tempfile.gettempdir()
    except OSError as error:
        return Folder("none", fault=error.strerror or str(error))
    return Folder(path, shutil.disk_usage(path).free)


def compile_cache() -> Folder:
    """The folder of torch's compile caches, which is made if it is missing, as torch does."""
    path = os.environ.get(FOLDER_VARIABLE)
    if not path:
        temporary = temporary_folder()
        if temporary.fault:
            return temporary
        path = os.path.join(temporary.path, _own_name())
    return _looked_at(os.path.abspath(path))


def use_compile_cache() -> Folder:
    """The same, and let torch use it."""
    folder = compile_cache()
    if not folder.fault:
        os.environ[FOLDER_VARIABLE] = folder.path  # as torch does, but 2.11 fails for a user without an account
    return folder


@contextlib.contextmanager
def importing_torch() -> Iterator[None]:
    """A context in which torch's compiler is imported, which makes the folder.  Raises ChunkflowError if that fails."""
    folder = use_compile_cache()
    try:
        yield
    except OSError as error:
        if not folder.fault:
            raise
        raise _unusable(folder) from error


def check_compile_cache(needed: bool) -> None:
    """Raise ChunkflowError if the folder of the compile caches cannot be used and is ``needed``."""
    folder = use_compile_cache()
    if folder.fault and needed:
        raise _unusable(folder, ", or run without it: options={'lowering': 'eager'}")


def _unusable(folder: Folder, otherwise: str = "") -> ChunkflowError:
    return ChunkflowError(
        f"Inductor has no folder to compile in: {folder.path} cannot be used ({folder.fault}). To go on, {FIX}{otherwise}."
    )


def remove_torn() -> bool:
    """Remove the libraries in the compile caches that were written in part, and warn.  Return whether there were any.

    A process that was killed leaves them, and Inductor takes whatever is there for the whole.
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
    """Whether an ELF file of 64 bits goes on to the end of its section headers, which come last; others count as whole.

    So does one that was written just now: another process may still be at it.
    """
    try:
        with library.open("rb") as file:
            head, state = file.read(64), os.fstat(file.fileno())
    except OSError:  # another process removes it
        return True
    if time.time() - state.st_mtime < _LINKING_S:
        return True
    if head[:4] != b"\x7fELF" or len(head) < 64:
        return False
    begin, (each, count) = struct.unpack_from("<Q", head, 0x28)[0], struct.unpack_from("<HH", head, 0x3A)
    return head[4] != 2 or bool(begin + each * count <= state.st_size)


@functools.cache
def warn_once(text: str) -> None:
    """Warn once in a process, although each model and each graph finds it again."""
    warnings.warn(text, stacklevel=3)


def _looked_at(path: str) -> Folder:
    """Try a folder as Inductor uses it."""
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
    """As torch names the folder: torch itself cannot be asked before it is imported."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    return "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
