"""This machine: versions, GPUs and their PCIe links, memory, and the available collective backends."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chunkflow_compile.hardware.caches import Folder, compile_cache, temporary_folder
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.limits import HostMemory, host_memory

from .profiles import measured_profile

if TYPE_CHECKING:
    import torch

LIBRARIES = ("diffusers", "transformers", "accelerate", "peft", "matplotlib", "prometheus-client", "torch-tensorrt")
# Name of a library that some command needs -> the extra (optional dependencies) of this package that installs the library.
EXTRAS = {
    "diffusers": "diffusers",
    "transformers": "diffusers",
    "peft": "adapters",
    "matplotlib": "pictures",
    "prometheus-client": "metrics",
}
_QUERY = ("pci.bus_id", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A CUDA device.

    ``link``: the current (generation, width) of its PCIe link.  An idle GPU reduces the generation.  ``most_link``: the
    maximum (generation, width).  ``numa``: its NUMA node, or None if unknown.
    """

    name: str
    memory_bytes: int
    link: tuple[int, int] | None = None
    most_link: tuple[int, int] | None = None
    numa: int | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts that ``chunkflow doctor`` checks.

    ``cuda_build``: the CUDA version that torch was built for, or None for a CPU build.  ``libraries``: name -> version,
    or None if the library is not installed.
    ``huge_pages``: the kernel's settings for huge pages in private and in shared memory, such as ``madvise``; empty if
    unknown.  ``pinnable_bytes``: the limit on locked memory in bytes, or None if there is no limit.
    ``profile_fault``: the error if the file of a measured profile cannot be accessed; empty otherwise.
    """

    python: str
    torch: str
    cuda_build: str | None
    driver: str | None
    gpus: tuple[Gpu, ...]
    cpus: int
    numa_nodes: int
    memory: HostMemory
    huge_pages: tuple[str, str]
    pinnable_bytes: int | None
    gloo: bool
    nccl: bool
    compiler: str | None
    triton: bool
    libraries: Mapping[str, str | None]
    profile: str | None
    profile_fault: str
    compile_cache: Folder
    temporary: Folder

    def host_copies(self, ranks: int) -> int:
        """Return the number of copies of a model that ``ranks`` ranks keep in host memory.  Each rank uses one GPU, and
        there is one copy per NUMA node of these GPUs (``node_of`` in weights/node.py)."""
        return max(1, len({gpu.numa for gpu in self.gpus[:ranks]})) if self.numa_nodes > 1 else 1


def check_installed(what: str, name: str) -> None:
    """Raise ChunkflowError if a library that ``what`` needs is not installed.  ``name``: a key of ``EXTRAS``."""
    if importlib.util.find_spec(name) is None:
        raise ChunkflowError(f"{what} needs {name}, which is not installed: {install_line(EXTRAS[name])}.")


def install_line(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    The command lists the packages of the extra, because this package is not in a registry.  A source tree that is not
    installed has no metadata; then the command names the source tree and the extra.
    """
    try:
        listed = importlib.metadata.requires("chunkflow-compile") or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    pairs = [line.partition(";") for line in listed]
    wanted = [name.strip() for name, _, marker in pairs if f'extra == "{extra}"' in marker.replace("'", '"')]
    return shlex.join(["pip", "install", *(wanted or [f"{Path(__file__).parent.parent.parent}[{extra}]"])])


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the number of CPU threads."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def look() -> Machine:
    """Inspect this machine.  Allocates nothing on a GPU, and changes nothing, except that it creates a missing compile
    cache folder.

    A GPU build of torch is imported.  Importing torch takes more CPU time than the rest of the inspection, so the files
    of a CPU build are inspected instead.  A CPU build is imported only if its files do not show that it supports gloo.
    """
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "this package needs it"
    folder = Path(spec.origin).parent
    (profile, fault), driver = measured_profile(), _nvidia(("driver_version",))
    build = runpy.run_path(str(folder / "version.py"))
    for_gpus = bool(build["cuda"] or build["hip"])
    locked_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    gloo, nccl = (True, False) if not for_gpus and _binds_gloo(folder) else _backends()
    return Machine(
        python=platform.python_version(),
        torch=build["__version__"],
        cuda_build=build["cuda"],
        driver=driver[0][0] if driver else None,
        gpus=tuple(_gpus()) if for_gpus else (),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        memory=host_memory(),
        huge_pages=(_huge_pages("enabled"), _huge_pages("shmem_enabled")),
        pinnable_bytes=None if locked_limit == resource.RLIM_INFINITY else locked_limit,
        gloo=gloo,
        nccl=nccl,
        compiler=next((c for c in (os.environ.get("CXX"), "g++", "clang++") if c and shutil.which(c)), None),
        triton=importlib.util.find_spec("triton") is not None,
        libraries={name: _release_of(name) for name in LIBRARIES},
        profile=None if profile is None else str(profile),
        profile_fault=fault,
        compile_cache=compile_cache(),
        temporary=temporary_folder(),
    )


def _binds_gloo(folder: Path) -> bool:
    """Whether the symbols of torch's library include gloo's process group.  Also False if the library cannot be
    read."""
    try:
        with (
            (folder / "lib" / "libtorch_python.so").open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
        ):
            return library.find(b"N4c10d16ProcessGroupGlooE") >= 0
    except OSError:  # on systems other than Linux, the library has another name
        return False


def _backends() -> tuple[bool, bool]:
    """Return whether this build of torch supports gloo, and whether it supports NCCL."""
    import torch.distributed as dist

    return dist.is_available() and dist.is_gloo_available(), dist.is_available() and dist.is_nccl_available()


def _gpus() -> Iterator[Gpu]:
    import torch

    links = {row[0].upper(): row for row in _nvidia(_QUERY)}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        # GPUs are matched by bus id, because torch may number them differently from nvidia-smi, or see fewer GPUs
        bus = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
        row = links.get("{:08X}:{:02X}:{:02X}.0".format(*bus))
        yield Gpu(
            name=properties.name,
            memory_bytes=properties.total_memory,
            link=_link(row, 1, 3),
            most_link=_link(row, 2, 4),
            numa=_numa(row[0]) if row else None,
        )


def _link(row: list[str] | None, generation: int, width: int) -> tuple[int, int] | None:
    if row is None or not (row[generation].isdigit() and row[width].isdigit()):
        return None
    return int(row[generation]), int(row[width])


def _numa(bus: str) -> int | None:
    """Return the NUMA node of the device with this PCI bus id, or None if it is unknown.  In a bus id from nvidia-smi, the
    domain has eight digits; in a bus id from the kernel, it has four."""
    name = bus.lower()[4:] if len(bus) == 16 else bus.lower()
    try:
        node = int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _nvidia(fields: tuple[str, ...]) -> list[list[str]]:
    """Query ``fields`` from nvidia-smi.  Return one row per GPU, or no rows if there is no driver."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _huge_pages(name: str) -> str:
    """Return the active value of a kernel setting for huge pages; empty if the setting cannot be read.  The kernel puts
    the active value in brackets, as in "always [madvise] never"."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage", name).read_text()
    except OSError:
        return ""
    return text.partition("[")[2].partition("]")[0]


def _release_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
