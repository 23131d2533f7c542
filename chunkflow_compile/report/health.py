"""Health checks: find out what prevents or slows down runs on a machine, and suggest fixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from chunkflow_compile.hardware.caches import FIX
from chunkflow_compile.hardware.machine import EXTRAS, Gpu, Machine, install_line
from chunkflow_compile.hardware.read_time import ReadTime
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.releases import NEWEST, OLDEST, TESTED, release_of
from chunkflow_compile.units import size
from chunkflow_compile.weights.limits import VARIABLE, HostMemory

from .record import fitted, prose

Verdict = Literal["ok", "note", "missing"]
# If less host memory than this (in bytes) is free, the finding on host memory suggests a fix.  Models that need streaming
# are larger than this.
_SMALL_HOST = 16 << 30


@dataclass(frozen=True)
class Finding:
    """One finding about a machine.

    ``verdict``: "missing" if the finding prevents a run, "note" if it costs speed or a feature, and "ok" otherwise.
    ``fix``: instructions for the user, empty if nothing has to be done.
    """

    what: str
    found: str
    verdict: Verdict = "ok"
    fix: str = ""


def findings(machine: Machine, program: str = "chunkflow") -> tuple[Finding, ...]:
    """Return all findings, in the order in which a run uses the parts of the machine.

    ``program``: the name of the command-line program.
    """
    return (
        Finding("python", machine.python),
        _torch(machine.torch),
        _cuda(machine),
        *(_gpu(i, gpu) for i, gpu in enumerate(machine.gpus)),
        Finding("cpu", f"{machine.cpus} cores, {machine.numa_nodes} NUMA node{'s' * (machine.numa_nodes != 1)}"),
        *_copies(machine),
        *_graphs(machine),
        *_memory(machine),
        *_collectives(machine),
        *_compilers(machine),
        *_libraries(machine),
        *_folders(machine),
        _profile_finding(machine.profile, machine.profile_fault, program),
    )


def copy_rates(profile: Hardware | None, ranks: int, program: str = "chunkflow") -> Finding:
    """Return a finding on copy rates: the rate of one rank alone, and the rate per rank if ``ranks`` ranks copy at once.

    ``profile``: the profile of this machine, or None.
    """
    if profile is None:
        return Finding("copies", "at no known rate: no profile is of this machine")
    alone = f"{profile.copy_rate / 1e9:.1f} GB/s alone"
    if ranks < 2:
        return Finding("copies", f"{alone} (profile {profile.name})")
    together = f"{profile.shared_by(ranks).copy_rate / 1e9:.1f} GB/s each of {ranks} at once"
    if profile.host_bandwidth:
        return Finding("copies", f"{alone}, {together} (profile {profile.name})")
    fix = f"{ranks} ranks may read the host's memory more slowly than one: run {program} calibrate --ranks {ranks}"
    return _noted("copies", f"{alone}, and as if so for {ranks} at once (profile {profile.name})", fix)


def host_memory_for(model: str, read_time: ReadTime, ranks: int, memory: HostMemory, copies: int = 1) -> Finding:
    """Return a finding on whether the streamed weights of a model fit in host memory.

    ``read_time``: the size of these weights, and the time to read them if they are not in the page cache.  ``ranks``: the
    number of ranks on this machine that run the model.  ``copies``: the number of copies of the weights in host memory (see
    Machine.host_copies).
    """
    shared = f", {'one copy' if copies == 1 else f'{copies} copies'} for {ranks} ranks" if ranks > 1 else ""
    taken = copies * read_time.nbytes
    needs = f"{size(taken)} of host memory{shared}; {read_time}"
    reserve = min(taken, memory.reserve)  # offload leaves this many bytes free
    if (left := memory.free - taken) >= reserve:
        return Finding(model, f"{needs}; {size(left)} left")
    fix = (
        "load it in a smaller dtype or quantised, leave some of it on the drive with host_memory=, or free or add host "
        "memory; in a container, raise its memory limit"
    )
    return Finding(model, f"{needs}; {size(memory.free)} free, and {size(reserve)} must stay free", "missing", fix)


def engines(reason: str | None) -> Finding:
    """Return a finding on whether regions can be lowered with TensorRT.

    ``reason``: the reason why regions cannot be lowered with TensorRT, or None if they can.
    """
    if reason is None:
        return Finding("lowering='tensorrt'", "usable; experimental, never run")
    return Finding("lowering='tensorrt'", f"not usable: {reason.partition(':')[0]}")


def health_table(listed: tuple[Finding, ...]) -> str:
    """Return a table of the findings, with the fixes below the table."""
    table = fitted([(f.what, f.found, f.verdict) for f in listed], ("what", "found", ""))
    fixes = [_fix(f) for f in listed if f.fix]
    return "\n\n".join([table, *fixes]) if fixes else f"{table}\n\nnothing is missing"


def _fix(finding: Finding) -> str:
    """Return the text of a fix, wrapped into lines.  A pip command stays on one line, so that users can copy it."""
    text, pip, packages = f"{finding.what}: {finding.fix}".partition(": pip ")
    return f"{prose(text)}:\n  pip {packages}" if pip else prose(text)


def _noted(what: str, state: str, fix: str) -> Finding:
    """Return a finding that does not prevent a run.

    ``fix``: instructions for the user.  If ``fix`` is empty, the verdict is "ok"; otherwise, the verdict is "note".
    """
    return Finding(what, state, "note" if fix else "ok", fix)


def _needed(what: str, state: str | None, fix: str) -> Finding:
    return Finding(what, "none", "missing", fix) if state is None else Finding(what, state)


def _torch(version: str) -> Finding:
    if OLDEST <= release_of(version) <= NEWEST:
        return Finding("torch", version)
    return Finding("torch", version, "note", f"ChunkFlow is tested on {TESTED}: install one of these if this one fails")


def _cuda(machine: Machine) -> Finding:
    build = f"torch built for CUDA {machine.cuda_build}" if machine.cuda_build else "a CPU build of torch"
    driver = f", driver {machine.driver}" if machine.driver else ", no NVIDIA driver"
    if machine.gpus:
        return Finding("CUDA", build + driver)
    if not machine.driver:
        return Finding("CUDA", build + driver, "note", "no GPU: models run on the CPU, but can be planned for GPUs")
    fix = "this torch cannot use the GPU: install a CUDA build of torch"
    if machine.cuda_build:
        fix = "torch sees no GPU: CUDA_VISIBLE_DEVICES may hide it, or the driver is too old for this build"
    return Finding("CUDA", build + driver, "missing", fix)


def _gpu(index: int, gpu: Gpu) -> Finding:
    parts = [gpu.name, size(gpu.memory_bytes)]
    fix = ""
    if gpu.link is not None:
        parts.append(f"PCIe {gpu.link[0]} x{gpu.link[1]}")
    if gpu.numa is not None:
        parts.append(f"NUMA node {gpu.numa}")
    if gpu.link is not None and gpu.most_link is not None:
        if gpu.link[1] < gpu.most_link[1]:
            fix = f"its link runs {gpu.link[1]} of {gpu.most_link[1]} lanes: check the slot, the riser and the BIOS"
        elif gpu.link[0] < gpu.most_link[0]:
            fix = (
                f"its link runs at generation {gpu.link[0]} of {gpu.most_link[0]}, as links do when idle: check again "
                "while something copies"
            )
    return _noted(f"GPU {index}", ", ".join(parts), fix)


def _copies(machine: Machine) -> Iterator[Finding]:
    if (gpus := len(machine.gpus)) > 1:
        copies = machine.host_copies(gpus)
        each = f"{copies}, one for each NUMA node with GPUs" if copies > 1 else "one"
        yield Finding("host copies", f"{each}, of a model that {gpus} ranks share")


def _graphs(machine: Machine) -> Iterator[Finding]:
    if machine.gpus:
        on_rocm = "not used on ROCm, which runs the copies and the kernels of a graph one after the other"
        yield Finding("CUDA graphs", "a step can be one: cudagraphs=True" if machine.cuda_build else on_rocm)


def _memory(machine: Machine) -> Iterator[Finding]:
    memory = machine.memory
    state, fix = f"{size(memory.free)} free of {size(memory.total)}", ""
    if memory.limit is not None:
        state += f" ({memory.limit})"
    if memory.free < _SMALL_HOST:
        fix = "the host holds all streamed weights: a model of 14 billion parameters takes 28 GB in bfloat16"
        if memory.limit is None:
            fix += f"; where memory grows as it is used, {VARIABLE}=64GiB says how much there will be"
    yield _noted("host memory", state, fix)
    private, shared = machine.huge_pages
    yield Finding("huge pages", f"private: {private or 'none'} shared: {shared or 'none'}")
    if machine.pinnable_bytes is None:
        yield Finding("pinnable memory", "no limit")
        return
    limit = f"limit {size(machine.pinnable_bytes)}"
    # The limit applies to mlock, but not to cudaHostRegister, with which ChunkFlow pins memory.  So ChunkFlow may be able to
    # pin more memory than the limit that is reported here.
    fix = "copies from unpinned memory are slow: raise the limit with ulimit -l unlimited" if machine.gpus else ""
    yield _noted("pinnable memory", limit if machine.gpus else f"{limit}, enough without a GPU", fix)


def _collectives(machine: Machine) -> Iterator[Finding]:
    fix = "" if machine.gloo else "ranks on CPUs need it, and so does chunkflow demo"
    yield _noted("gloo", "available" if machine.gloo else "not in this torch", fix)
    if machine.nccl:
        yield Finding("NCCL", "available")
    elif machine.gpus:
        fix = "several GPUs need it" if len(machine.gpus) > 1 else ""
        yield Finding("NCCL", "not in this torch", "missing" if fix else "note", fix)
    else:
        yield Finding("NCCL", "not in this torch; only GPUs need it")


def _compilers(machine: Machine) -> Iterator[Finding]:
    fix = "Inductor needs one for the CPU: install g++ or set CXX; lowering='eager' works without"
    yield _needed("C++ compiler", machine.compiler, fix)
    if machine.gpus:
        fix = "Inductor needs it for GPUs: install a CUDA build of torch, which includes it"
        yield _needed("triton", "available" if machine.triton else None, fix)


def _libraries(machine: Machine) -> Iterator[Finding]:
    users = {
        "diffusers": "the presets, the demo and diffusers pipelines need it",
        "peft": "LoRA adapters need it",
        "matplotlib": "pictures need it",
        "prometheus-client": "metrics for Prometheus need it",
    }
    for name, version in machine.libraries.items():
        fix = f"{users[name]}: {install_line(EXTRAS[name])}" if name in users and not version else ""
        yield _noted(name, version or "not installed", fix)


def _folders(machine: Machine) -> Iterator[Finding]:
    for what, folder, fix in (
        ("compile cache", machine.compile_cache, FIX),
        ("temporary files", machine.temporary, "set TMPDIR to a folder that this user can write"),
    ):
        free = "" if folder.free is None else f", {size(folder.free)} free"
        state = f", not usable: {folder.fault}" if folder.fault else free
        yield _noted(what, folder.path + state, fix if folder.fault else "")


def _profile_finding(path: str | None, fault: str, program: str) -> Finding:
    if fault:
        return Finding("hardware profile", "not looked for", "note", fault)
    if path:
        return Finding("hardware profile", f"measured, {path}")
    fix = f"plans are only as good as the profile: run {program} calibrate"
    return Finding("hardware profile", "not measured", "note", fix)
