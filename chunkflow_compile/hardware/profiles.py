"""Profiles by name or file.  The built-in ones lie beside this module, one JSON file each."""

from __future__ import annotations

import os
from pathlib import Path

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware

# What ``hardware="measured"`` reads.
MEASURED = "measured"
DEFAULT = "cpu"


def profile_names() -> list[str]:
    """The built-in profiles."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.json"))


def measured_path() -> Path:
    """Where ``chunkflow calibrate`` leaves this machine's profile when it is given no other place."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "chunkflow" / "hardware.json"


def load_profile(name: str | Path) -> Hardware:
    """A built-in profile by its name, a file by its path, or ``"measured"``.

    Raises ChunkflowError if there is none, naming the profiles, or if a figure of it is missing or absurd.
    """
    if not isinstance(name, (str, Path)):
        raise ChunkflowError(f"hardware={name!r} is no name: give one of {', '.join(profile_names())}, or a JSON file.")
    if str(name) == MEASURED:
        if not measured_path().exists():
            raise ChunkflowError("hardware='measured', but this machine is not measured yet: run chunkflow calibrate.")
        return _read(measured_path())
    if str(name) in profile_names():
        return _read(Path(__file__).parent / f"{name}.json")
    if Path(name).is_file():
        return _read(Path(name))
    raise ChunkflowError(
        f"There is no hardware profile {str(name)!r}: give one of {', '.join(profile_names())}, a JSON file, or "
        f"{MEASURED!r}."
    )


def _read(path: Path) -> Hardware:
    try:
        return Hardware.from_json(path.read_text())
    except ChunkflowError as error:
        raise ChunkflowError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ChunkflowError(f"The hardware profile {path} cannot be read: {error}.") from error
