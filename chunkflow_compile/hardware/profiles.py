"""Profiles by name or file.  The built-in ones are in this folder, one JSON file each."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware

from .caches import warn_once

if TYPE_CHECKING:
    import torch

# Names the profile that chunkflow calibrate has written.
MEASURED = "measured"
CPU = "cpu"
# Part of a card's name -> the nearest built-in profile; the first match counts.
CARDS = {
    "H200": "h200",
    "H100 NVL": "h100-pcie-x2",
    "H100 PCIe": "h100-pcie-x2",
    "H100": "h100-nvlink",
    "L40S": "l40s-pcie",
    "5090": "rtx-5090-pcie",
    "4090": "rtx-4090-pcie",
}
# For an unknown card: with a slow link, plans keep more weights on the device.
_CAREFUL = "rtx-4090-pcie"


def profile_names() -> list[str]:
    """The built-in profiles."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.json"))


def measured_path() -> Path:
    """The path to which ``chunkflow calibrate`` writes this machine's profile without ``--out``.

    Raises ChunkflowError if this user has no home folder.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise ChunkflowError("This user has no home folder: set HOME or XDG_CACHE_HOME.") from error
    return Path(base) / "chunkflow" / "hardware.json"


def measured_profile() -> tuple[Path | None, str]:
    """The file that ``chunkflow calibrate`` has written, None if there is none; and why it cannot be looked for, if so."""
    try:
        path = measured_path()
        path.stat()
    except ChunkflowError as error:
        return None, str(error)
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, f"{path} cannot be read ({error.strerror or error}): set XDG_CACHE_HOME to a folder of this user."
    return path, ""


def _measured_path() -> Path | None:
    """The same, with a warning."""
    path, fault = measured_profile()
    if fault:
        warn_once(f"A profile of chunkflow calibrate cannot be looked for. {fault}")
    return path


def default_profile(device: torch.device) -> str:
    """The name of the default profile of a device.  Warns if no profile fits the card."""
    if device.type != "cuda":
        return CPU
    import torch

    name = torch.cuda.get_device_name(device)
    if (measured := _measured_path()) is not None and name in str(_read_profile(measured).sources):
        return MEASURED
    found = next((profile for part, profile in CARDS.items() if part in name), None)
    if found is None:
        warnings.warn(
            f"No hardware profile fits {name}: plans use {_CAREFUL}. Run chunkflow calibrate once on this machine.",
            stacklevel=2,
        )
    return found or _CAREFUL


def load_profile(name: str | Path) -> Hardware:
    """A built-in profile by its name, a file by its path, or ``"measured"``.

    Raises ChunkflowError if there is no such profile, or if a figure in it is missing or out of range.
    """
    if not isinstance(name, (str, Path)):
        raise ChunkflowError(
            f"hardware={name!r} is not a name: use one of {', '.join(profile_names())}, or the path of a JSON file."
        )
    if str(name) == MEASURED:
        if (measured := _measured_path()) is None:
            raise ChunkflowError("hardware='measured', but this machine is not measured yet: run chunkflow calibrate.")
        return _read_profile(measured)
    if str(name) in profile_names():
        return _read_profile(Path(__file__).parent / f"{name}.json")
    if Path(name).is_file():
        return _read_profile(Path(name))
    raise ChunkflowError(
        f"There is no hardware profile {str(name)!r}: use one of {', '.join(profile_names())}, a JSON file, or "
        f"{MEASURED!r}."
    )


def _read_profile(path: Path) -> Hardware:
    try:
        return Hardware.from_json(path.read_text())
    except ChunkflowError as error:
        raise ChunkflowError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ChunkflowError(f"The hardware profile {path} cannot be read: {error}.") from error
