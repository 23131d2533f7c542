"""What the planning commands have traced, in this user's cache folder, so that each model is traced once.

An entry is a file of three lines of JSON: the key, which is all that the value depends on; a digest of the value; and the
value.  A file that is anything else, or whose key is another, is ignored and written again.  A folder that cannot be written
means that nothing is kept.  Imports no torch until an entry is made.
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
# Most bytes of all entries; those that were used last are kept.  An entry takes half a megabyte to two.
MOST_BYTES = 128 << 20
# Of the form of an entry: raised when a file of the form before could be read as another value.
_SCHEMA = 1

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Entry(Generic[Value]):
    """One value in the cache.  ``kind``: what it is.  ``key``: all that it depends on, but for the versions of the packages,
    which are added.  ``write``: the value in JSON's types; ValueError for a value that cannot be kept.  ``read``: the value
    from them."""

    kind: str
    key: Mapping[str, Any]
    write: Callable[[Value], Any]
    read: Callable[[Any], Value]

    def get(self, make: Callable[[], Value]) -> Value:
        """The value that is kept, or else the one that ``make`` returns, which is kept from then on."""
        if (found := self.find()) is not None:
            return found
        value = make()
        self.keep(value)
        return value

    def find(self) -> Value | None:
        """The value that is kept, or None."""
        path = self._path
        with contextlib.suppress(Exception):  # whatever a file holds that is no entry, it must not end a command
            if path is not None:
                key, digest, body = path.read_text().split("\n", 2)
                if key == self._key and digest == _digest(body):
                    value = self.read(json.loads(body))
                    os.utime(path)  # so that it is not the first to be removed
                    return value
        return None

    def keep(self, value: Value) -> None:
        """Write the value, at once for other processes; do nothing if that is not possible."""
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
        """None if nothing is to be kept."""
        if os.environ.get(VARIABLE) == "0":
            return None
        with contextlib.suppress(ChunkflowError):
            return user_cache() / "traces" / f"{self.kind}-{_digest(self._key)}.json"
        return None


def _versions() -> dict[str, Any]:
    """What a trace depends on, other than the model and its sizes."""
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
        # such as the backend of attention
        "settings": {name: value for name, value in os.environ.items() if name.startswith("DIFFUSERS_")},
    }


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


@functools.cache
def _source_digest() -> str:
    """A digest of the source of this package, which changes more often than its version where it is worked on."""
    digest = hashlib.sha256()
    for root in _roots():
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _roots() -> Iterator[Path]:
    from chunkflow_compile import passes

    for package in (chunkflow_compile, passes):  # the passes are not inside the package in a source tree
        yield from map(Path, package.__path__)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _replace(path: Path, text: str) -> None:
    """Write a file whole: another process sees the old one or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _prune(folder: Path) -> None:
    """Remove the files used longest ago, as far as all together are larger than :data:`MOST_BYTES`."""
    found = list[tuple[float, str, int]]()
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            state = path.stat()
            found.append((state.st_mtime, path.name, state.st_size))
    total = 0
    for _, name, nbytes in sorted(found, reverse=True):
        total += nbytes
        if total > MOST_BYTES:
            (folder / name).unlink(missing_ok=True)
