"""Profiles by name or file.  The built-in ones lie beside this module, one JSON file each."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware

# What ``hardware="measured"`` reads.
MEASURED = "measured"
CPU = "cpu"
# Part of a card's name -> the built-in profile that is nearest to it; the first that fits.
CARDS = {
    "H200": "h200",
    "H100 NVL": "h100-pcie-x2",
    "H100 PCIe": "h100-pcie-x2",
    "H100": "h100-nvlink",
    "L40S": "l40s-pcie",
    "5090": "rtx-5090-pcie",
    "4090": "rtx-4090-pcie",
}
# For a card that no profile knows: a slow link keeps more weights on the device.
_CAREFUL = "rtx-4090-pcie"


def profile_names() -> list[str]:
    """The built-in profiles."""
    return sorted(p.stem for p in Path(__file__).parent.glob("*.json"))


def measured_path() -> Path:
    """Where ``chunkflow calibrate`` leaves this machine's profile when it is given no other place."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "chunkflow" / "hardware.json"


def default_profile(device: torch.device) -> str:
    """The profile for a device where none is named; warns if nothing is known of it."""
    if device.type != "cuda":
        return CPU
    name = torch.cuda.get_device_name(device)
    if measured_path().exists() and name in str(_read(measured_path()).sources):
        return MEASURED
    found = next((profile for part, profile in CARDS.items() if part in name), None)
    if found is None:
        warnings.warn(
            f"No hardware profile knows {name}: it is planned for as {_CAREFUL}. Run chunkflow calibrate once here.",
            stacklevel=2,
        )
    return found or _CAREFUL


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
