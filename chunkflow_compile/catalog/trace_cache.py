"""A cache for the planning commands, in the user's cache folder, so that each model is traced only once.

An entry is a file with three lines of JSON: the key, which contains everything that the value depends on; a digest of the
value; and the value.  A file with any other content or with another key is ignored and overwritten.  If the folder cannot
be written, nothing is cached.  torch is imported only when an entry is created.
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

# The environment variable CHUNKFLOW_CACHE.  The value 0 disables the cache.
VARIABLE = "CHUNKFLOW_CACHE"
# The maximum size of all entries in bytes.  The least recently used entries are removed first.  An entry takes 0.5 to 2
# MB.
MOST_BYTES = 128 << 20
# The version of the format.  It must be raised if a file in the previous format could be misread as another value.
_SCHEMA = 1

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class CacheEntry(Generic[Value]):
    """One value in the cache.

    ``kind``: the type of the value.  ``key``: everything that the value depends on, except the versions of packages,
    which are added to the key.  ``write``: a function that converts the value to JSON types; it raises ValueError if the
    value cannot be cached.  ``read``: the inverse of ``write``.
    """

    kind: str
    key: Mapping[str, Any]
    write: Callable[[Value], Any]
    read: Callable[[Any], Value]

    def get(self, make: Callable[[], Value]) -> Value:
        """Return the cached value.  If there is none, call ``make``, and cache and return its result."""
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
                    os.utime(path)  # mark the entry as recently used
                    return value
        return None

    def keep(self, value: Value) -> None:
        """Write the value atomically, so that other processes never see a partial file.  If it cannot be written, do
        nothing."""
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
        """Return the file of this entry, or None if caching is disabled or not possible."""
        if os.environ.get(VARIABLE) == "0":
            return None
        with contextlib.suppress(ChunkflowError):
            return user_cache() / "traces" / f"{self.kind}-{_digest(self._key)}.json"
        return None


def _versions() -> dict[str, Any]:
    """Return everything that a trace depends on, except the model and its sizes."""
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
        # the settings of diffusers, such as the attention backend
        "settings": {name: value for name, value in os.environ.items() if name.startswith("DIFFUSERS_")},
    }


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


@functools.cache
def _source_digest() -> str:
    """Return a digest of this package's source, because the source changes more often than the version during
    development."""
    digest = hashlib.sha256()
    for root in _roots():
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _roots() -> Iterator[Path]:
    from chunkflow_compile import passes

    for package in (chunkflow_compile, passes):  # in a source tree, ``passes`` is outside of ``chunkflow_compile``
        yield from map(Path, package.__path__)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _replace(path: Path, text: str) -> None:
    """Write a file atomically, so that other processes see either the old file or the new file."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _prune(folder: Path) -> None:
    """Remove the least recently used files until the remaining files take at most :data:`MOST_BYTES`."""
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
