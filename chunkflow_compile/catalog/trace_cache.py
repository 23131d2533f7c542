"""A cache for the traces of the planning commands, in the cache folder of the user, so that each model is traced once.

An entry is a file of three lines of JSON: the key, which contains everything that the value depends on, a digest of the
value, and the value.  A file with any other content, or with another key, is ignored and overwritten.  If the folder
cannot be written, nothing is cached. torch is imported only when an entry is created.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import chunkflow_compile
from chunkflow_compile.hardware.caches import user_cache
from chunkflow_compile.passes.errors import ChunkflowError

# ``CHUNKFLOW_CACHE=0`` in the environment turns the cache off.
VARIABLE = "CHUNKFLOW_CACHE"
# Maximum bytes of all entries together; the most recently used entries are kept.  An entry takes between half a megabyte
# and two.
MOST_BYTES = 128 << 20
# Version of the format of an entry: raised when a file in the previous format could be misread as another value.
_SCHEMA = 1

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class CacheEntry(Generic[Value]):
    """One value in the cache.

    ``kind``: what the value is.  ``key``: everything that it depends on, apart from the versions of the packages, which
    are added.
    ``write``: converts the value to JSON types; raises ValueError for a value that cannot be cached.  ``read``: the
    inverse.
    """

    kind: str
    key: Mapping[str, Any]
    write: Callable[[Value], Any]
    read: Callable[[Any], Value]

    def get(self, make: Callable[[], Value]) -> Value:
        """Return the cached value.  If there is none, return the result of ``make``, and cache it."""
        if (found := self.find()) is not None:
            return found
        value = make()
        self.keep(value)
        return value

    def find(self) -> Value | None:
        """Return the cached value, or None."""
        path = self._path
        with contextlib.suppress(Exception):  # a file with unexpected content must not end a command
            if path is not None:
                key, digest, body = path.read_text().split("\n", 2)
                if key == self._key and digest == _digest(body):
                    value = self.read(json.loads(body))
                    os.utime(path)  # so that it is not removed first
                    return value
        return None

    def keep(self, value: Value) -> None:
        """Write the value atomically, so that other processes never see a partial file; do nothing if that is not
        possible."""
        path = self._path
        with contextlib.suppress(OSError, ValueError):
            if path is not None:
                body = json.dumps(self.write(value), separators=(",", ":"))
                path.parent.mkdir(parents=True, exist_ok=True)
                _replace(path, f"{self._key}\n{_digest(body)}\n{body}")
                _prune(path.parent)

    @property
    def _key(self) -> str:
        return json.dumps({"kind": self.kind, **_versions(), "of": self.key}, sort_keys=True, default=sorted)

    @property
    def _path(self) -> Path | None:
        """The file of this entry; None if caching is disabled or not possible."""
        if os.environ.get(VARIABLE) == "0":
            return None
        with contextlib.suppress(ChunkflowError):
            return user_cache() / "traces" / f"{self.kind}-{_digest(self._key)}.json"
        return None


def _versions() -> dict[str, Any]:
    """Return everything that a trace depends on apart from the model and its sizes."""
    import torch

    return {
        "schema": _SCHEMA,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "diffusers": _version("diffusers"),
        "transformers": _version("transformers"),
        "chunkflow": chunkflow_compile.__version__,
        "source": _source_digest(),
        # such as the attention backend
        "settings": {name: value for name, value in os.environ.items() if name.startswith("DIFFUSERS_")},
    }


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


@functools.cache
def _source_digest() -> str:
    """Return a digest of this package's source, which changes more often than its version during development."""
    digest = hashlib.sha256()
    for root in _roots():
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _roots() -> Iterator[Path]:
    from chunkflow_compile import passes

    for package in (chunkflow_compile, passes):  # in a source tree the passes are not inside the package
        yield from map(Path, package.__path__)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _replace(path: Path, text: str) -> None:
    """Write a file atomically: another process sees either the old file or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _prune(folder: Path) -> None:
    """Remove the least recently used files until the others take at most :data:`MOST_BYTES`."""
    found = list[tuple[float, str, int]]()
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it
            state = path.stat()
            found.append((state.st_mtime, path.name, state.st_size))
    total = 0
    for _, name, nbytes in sorted(found, reverse=True):
        total += nbytes
        if total > MOST_BYTES:
            (folder / name).unlink(missing_ok=True)
