"""``save`` and ``load``: carry a model's lowered regions and plans to another process or machine of the same kind.

The file is a zip archive: a manifest, the plans, and for each region what Inductor's ``CompiledArtifact.save`` writes.
``load`` puts the regions into Inductor's caches, where the next compilation finds them by Inductor's own keys, which cover
the graph, the configuration, the device and torch, and checks their guards; lowering adds the vector instructions of a
CPU.  So a region is never used where it does not fit.  The plans lie beside them (plan_cache.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.convert_frame import compile_lock
from torch._inductor.standalone_compile import CompiledArtifact

from chunkflow_compile.lowering.warm_up import vector_instructions
from chunkflow_compile.model.offload import programs
from chunkflow_compile.model.plan_cache import DiskPlans
from chunkflow_compile.passes.errors import ChunkflowError, first_line

_log = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_PLAN = "plan_"
_FORMAT = 3
# What zipfile and json raise on bytes that were changed.
_DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
)


def save(model: nn.Module, path: str | Path) -> int:
    """Write the lowered regions and the plans of a compiled model to a file; return the number of regions.

    Several processes may write the same path.  Raises ChunkflowError if the model has run no program lowered by Inductor
    (call it once first), or if the file cannot be written.
    """
    regions = {id(region): region for s in programs(model) for region in s.code.regions.values()}
    artifacts = [region for region in regions.values() if isinstance(region, CompiledArtifact)]
    if not artifacts:
        cause = "runs no regions lowered by Inductor" if regions else "has run no program of ChunkFlow"
        raise ChunkflowError(
            f"There is nothing to save: {type(model).__name__} {cause}. Compile it, call it once, then save."
        )
    target = Path(path)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}_", dir=target.parent) as folder:
            part = Path(folder, target.name)
            saved = _write_archive(part, artifacts, _plans(model))
            if saved:
                part.replace(target)  # a reader never sees half of it, and of several ranks one is the last
    except OSError as error:
        raise ChunkflowError(f"{path} cannot be written: {error.strerror or error}.") from error
    if not saved:
        raise ChunkflowError(f"No region of {type(model).__name__} can be saved; the log says why of each.")
    return saved


def _write_archive(part: Path, artifacts: Sequence[CompiledArtifact], plans: Mapping[str, str]) -> int:
    """Write the archive; return the number of regions in it."""
    digests = dict[str, str]()
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, artifact in enumerate(artifacts):
            one = part.with_name(f"region_{number}")
            try:
                artifact.save(path=str(one), format="binary")
            except Exception as error:  # noqa: BLE001  such as an op that cannot be pickled: it is compiled anew
                _log.warning("region %d of %d cannot be saved (%s)", number + 1, len(artifacts), first_line(error))
                continue
            digests[one.name] = hashlib.sha256(one.read_bytes()).hexdigest()
            archive.write(one, one.name)
        for name, text in plans.items():
            archive.writestr(name, text)
        entries = {"regions": digests, "plans": {n: hashlib.sha256(t.encode()).hexdigest() for n, t in plans.items()}}
        archive.writestr(_MANIFEST, json.dumps({**_machine_key(), **entries}, indent=1, sort_keys=True))
    return len(digests)


def _plans(model: nn.Module) -> dict[str, str]:
    """The plans of a model's programs and cycles, by their names in the archive."""
    caches = [s.code.settings.cache for s in programs(model)]
    texts = [cache.texts() for cache in caches if isinstance(cache, DiskPlans)]
    return {f"{_PLAN}{key}": text for found in texts for key, text in found.items()}


def load(path: str | Path) -> int:
    """Put what a file of ``save`` holds into the caches on disk; return the number of regions.

    Call it before the first call of the compiled model.  A file of another machine or release, or one that is damaged, is
    ignored with a warning: the model then compiles as without it.  As with ``torch.load``, only load files you trust.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read(_MANIFEST))
            entries = {**manifest["regions"], **manifest["plans"]}
            if outside := [name for name in entries if Path(name).name != name]:
                raise ValueError(f"{outside[0]!r} is no name of a region")
            blobs = {name: archive.read(name) for name in entries}
        damaged = [n for n, blob in blobs.items() if hashlib.sha256(blob).hexdigest() != entries[n]]
    except _DAMAGED as error:
        return _ignored(path, f"it cannot be read ({first_line(error)})")
    if damaged:
        return _ignored(path, f"{damaged[0]} is not what was saved")
    for what, here in _machine_key().items():
        if manifest.get(what) != here:
            return _ignored(path, f"it was saved with {what} {manifest.get(what)}, here it is {here}")
    if torch._inductor.config.force_disable_caches:
        return _ignored(path, "Inductor's caches are switched off (force_disable_caches)")
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in manifest["regions"]:
                one = Path(folder, name)
                one.write_bytes(blobs[name])
                try:
                    CompiledArtifact.load(path=str(one), format="binary")  # the caches have it now
                except Exception as error:  # noqa: BLE001  whatever Inductor cannot read is compiled anew
                    return _ignored(path, f"{name} cannot be loaded ({first_line(error)})")
    except OSError as error:
        return _ignored(path, f"there is no room for a temporary file ({first_line(error)})")
    if (cache := DiskPlans.here()) is not None:
        for name in manifest["plans"]:
            cache.put(name.removeprefix(_PLAN), blobs[name].decode())
    return len(manifest["regions"])


def _machine_key() -> dict[str, Any]:
    """What a file of regions is for.  Without a GPU, Inductor's kernels are for the vector instructions of the CPU."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()) if torch.cuda.is_available() else None
    instructions = "any"
    if gpu is None:
        with compile_lock:  # Inductor's search for them is not made for two threads
            instructions = str(vector_instructions())
    return {
        "format": _FORMAT,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "instructions": instructions,
        "gpu": "none" if gpu is None else f"{gpu.name} {gpu.major}.{gpu.minor}",
    }


def _ignored(path: str | Path, why: str) -> int:
    _log.warning("%s is ignored: %s; regions are compiled", path, why)
    return 0
