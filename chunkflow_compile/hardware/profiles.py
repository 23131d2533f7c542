"""Load hardware profiles by name or from a file.  The built-in profiles are the JSON files in this folder, and the
profiles that siblings.py derives from them."""

from __future__ import annotations

import difflib
import functools
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from chunkflow_compile.passes.cost.timings import AS_MEASURED
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware

from .caches import user_cache, warn_once
from .scaled import Properties, scaled, similar_profile
from .siblings import SIBLINGS

if TYPE_CHECKING:
    import torch

# The name with which :func:`load_profile` loads the profile that chunkflow calibrate has measured on this machine.
MEASURED = "measured"
CPU = "cpu"
# The name of the estimated profile of a GPU that has no other profile.  This name stands for the current GPU of the process;
# "scaled:1" stands for the GPU with number 1.
SCALED = "scaled"


def profile_names() -> list[str]:
    """Return the names of the built-in profiles."""
    return sorted([*(p.stem for p in Path(__file__).parent.glob("*.json")), *SIBLINGS])


def measured_path() -> Path:
    """Return the path to which ``chunkflow calibrate`` writes the profile of this machine if ``--out`` is not given.

    Raises ChunkflowError if this user has no home folder.
    """
    return user_cache() / "hardware.json"


def measured_profile() -> tuple[Path | None, str]:
    """Return two values: the path of the profile that ``chunkflow calibrate`` has written, and an error message.

    The path is None if there is no such profile, or if it cannot be accessed.  The message is empty, unless the profile
    cannot be accessed.
    """
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
    """Return the path from :func:`measured_profile`, which may be None.  Warn if the profile cannot be accessed."""
    path, fault = measured_profile()
    if fault:
        warn_once(f"A profile of chunkflow calibrate cannot be looked for. {fault}")
    return path


def default_profile(device: torch.device) -> str:
    """Return the name of the default profile for a device.  If there is no profile for the GPU, warns that an estimated
    profile is used."""
    if device.type != "cuda":
        return CPU
    import torch

    properties = torch.cuda.get_device_properties(device)
    known = profile_of_card(properties.name)
    if known is None:
        warnings.warn(
            f"No hardware profile is of {properties.name}: plans use {similar_profile(properties)}, scaled by what its "
            "driver tells of it. Run chunkflow calibrate once on this machine.",
            stacklevel=2,
        )
    return known or (SCALED if device.index is None else f"{SCALED}:{device.index}")


def profile_of_card(card: str) -> str | None:
    """Return the name of the profile for a GPU model, or None if there is no profile for it.  A profile that was measured
    on this machine takes precedence over built-in profiles."""
    if (measured := _measured_path()) is not None and f"{card}, torch" in str(_read_profile(measured).sources):
        return MEASURED
    return next((profile for profile in profile_names() if card in _read_built_in(profile).cards), None)


def is_of_machine(profile: str, device: torch.device | None = None) -> bool:
    """Whether the profile of a plan describes the machine on which the plan runs.

    True for a profile that was measured on that machine or given as a file, and for the built-in profile of its GPU.
    False for the built-in CPU profile, which was measured on another CPU, and for scaled profiles, which are estimates.
    ``profile``: the name of the profile in the plan.  ``device``: the device on which the plan runs; if it is None, the
    profile of any GPU is accepted.
    """
    if profile.endswith(AS_MEASURED):
        return True
    if profile == CPU or profile.startswith(SCALED):
        return False
    if device is None or profile not in profile_names():
        return True
    if device.type != "cuda":
        return False
    import torch

    # ``cards`` is empty in the profile of a whole machine.  Such a profile is never used by default, so the user has chosen
    # it for this machine.
    cards = _read_built_in(profile).cards
    return not cards or torch.cuda.get_device_properties(device).name in cards


def _scaled(name: str) -> Hardware:
    import torch

    if not torch.cuda.is_available():
        raise ChunkflowError(f"hardware={name!r} is scaled for the card of this machine, but there is none.")
    number, count = name.removeprefix(SCALED)[1:], torch.cuda.device_count()
    if number and int(number) >= count:
        raise ChunkflowError(f"hardware={name!r}: this machine has {count} cards, of which 0 is the first.")
    properties: Properties = torch.cuda.get_device_properties(int(number) if number else torch.cuda.current_device())
    return scaled(properties, _read_built_in(similar_profile(properties)))


def load_profile(name: str | Path) -> Hardware:
    """Load a built-in profile by its name, a file by its path, or ``"measured"``.

    Raises ChunkflowError if there is no such profile, or if a figure in it is missing or out of range.
    """
    if not isinstance(name, (str, Path)):
        raise ChunkflowError(
            f"hardware={name!r} is not a name: use one that chunkflow hardware lists, or the path of a JSON file."
        )
    if str(name) == MEASURED:
        if (measured := _measured_path()) is None:
            raise ChunkflowError("hardware='measured', but this machine is not measured yet: run chunkflow calibrate.")
        return _read_profile(measured)
    if re.fullmatch(rf"{SCALED}(:\d+)?", str(name)):
        return _scaled(str(name))
    if str(name) in profile_names():
        return _read_built_in(str(name))
    if isinstance(name, Path) or Path(name).suffix or os.sep in name or Path(name).is_file():
        return _read_profile(Path(name))
    raise ChunkflowError(
        f"There is no hardware profile {str(name)!r}; the nearest are {', '.join(_nearest(str(name)))}. Use one of them, a "
        f"JSON file, or {MEASURED!r}; chunkflow hardware lists all."
    )


def _nearest(name: str) -> list[str]:
    """Return the three names of built-in profiles that are most similar to ``name``.  Names that contain ``name`` come
    first.  Hyphens are ignored."""
    bare = {profile.replace("-", ""): profile for profile in profile_names()}
    wanted = re.sub(r"[\W_]", "", name.lower())
    close = difflib.get_close_matches(wanted, bare, n=len(bare), cutoff=0.0)
    return [bare[one] for one in sorted(close, key=lambda one: wanted not in one)[:3]]


@functools.cache
def _read_built_in(name: str) -> Hardware:
    if (sibling := SIBLINGS.get(name)) is not None:
        return sibling.profile(name, _read_built_in(sibling.like))
    return _read_profile(Path(__file__).parent / f"{name}.json")


def _read_profile(path: Path) -> Hardware:
    try:
        return Hardware.from_json(path.read_text())
    except ChunkflowError as error:
        raise ChunkflowError(f"{path}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ChunkflowError(f"The hardware profile {path} cannot be read: {cause}.") from error
