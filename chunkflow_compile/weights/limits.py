"""The host memory that this process may still take, limited by the machine and by the control groups of the process.

In a container, the limit of a control group (cgroup v1 or v2) counts, and not the free memory of the machine.  The
limits of all ancestors of a group apply as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import parse_bytes, size

# The environment variable that states the memory of the machine.  Users set it on a virtual machine whose memory grows
# when it is used, because /proc/meminfo then shows less memory than the machine can get.
VARIABLE = "CHUNKFLOW_HOST_MEMORY"

# Host memory to leave free for the kernel, the page cache, and the rest of the pipeline: RESERVED_SHARE of the total,
# but at least LEAST_RESERVED bytes.
RESERVED_SHARE = 0.05
LEAST_RESERVED = 1 << 30
# A reported limit of this size or more means that there is no limit: cgroup v1 then reports a number near 2**63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class HostMemory:
    """The host memory of this process.

    ``total``: the limit under which this process has the smallest amount of free memory, in bytes.  It is the memory of
    the machine, or the limit of a control group of this process.
    ``free``: bytes that this process may still take, including page cache that can be dropped.
    ``limit``: the file from which the limit of the control group was read, or the name of the environment variable that
    states ``total``; None if ``total`` is the memory that the machine reports."""

    total: int
    free: int
    limit: Path | str | None = None

    @property
    def by(self) -> str:
        """The source of the limit, as the words that follow "are free" in a message; empty if the machine sets the limit."""
        if self.limit is None:
            return ""
        return f" by {VARIABLE}" if self.limit == VARIABLE else f" below {self.limit}"

    @property
    def reserve(self) -> int:
        """Bytes of host memory that must stay free: they are neither pinned nor filled with weights."""
        return max(LEAST_RESERVED, int(RESERVED_SHARE * self.total))


@dataclass
class PinAllowance:
    """A limit on pinned memory.  ``left``: the bytes that may still be pinned; negative after a request that did not fit.
    ``why``: an explanation of the limit."""

    left: int
    why: str

    def take(self, nbytes: int) -> bool:
        """Reserve ``nbytes`` if they fit, and return whether they fit.  After a request that did not fit, no later request
        fits, either."""
        self.left = self.left - nbytes if nbytes <= self.left else -1
        return self.left >= 0


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Return the host memory of this process.  Several limits may apply: the memory of the machine, and the limits of
    control groups.  The result describes the limit under which the smallest amount of memory is free.

    ``root``: the folder that contains ``proc`` and ``sys``; only tests set it.
    Raises ChunkflowError if the environment variable is set to something that is not a size.
    """
    machine = meminfo(root)
    memory = HostMemory(machine.get("MemTotal", 0), machine.get("MemAvailable", 0))
    if (said := os.environ.get(VARIABLE)) is not None:
        total = parse_bytes(said, VARIABLE)
        memory = HostMemory(total, max(0, total - (memory.total - memory.free)), VARIABLE)
    for group in _groups(root):
        try:
            limit, used = _limit(group), _used(group)
        except (OSError, ValueError):  # the root group has no file with its usage, and a group may vanish
            continue
        if limit is not None and limit[1] - used < memory.free:
            memory = HostMemory(limit[1], max(0, limit[1] - used), limit[0])
    return memory


def local_ranks(otherwise: int = 1) -> int:
    """Return the number of processes of this job on this machine, or the value ``otherwise`` if no launcher provides this
    number."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", otherwise)))


def no_room(nbytes: int) -> str | None:
    """Return why ``nbytes`` do not fit in host memory now, or None if they do.  The kernel would kill a process that
    exceeds a limit.

    After the allocation, the reserve must still be free.  If ``nbytes`` is less than the reserve, it is enough that
    another ``nbytes`` are free after the allocation.
    """
    memory = host_memory()
    reserve = min(memory.reserve, nbytes)
    if nbytes + reserve <= memory.free or not memory.total:  # ``total`` is 0 if /proc/meminfo cannot be read
        return None
    grows = "" if memory.by else f" (where memory grows as it is used, {VARIABLE}=64GiB says how much there will be)"
    return f"{size(memory.free)} are free{memory.by}, and {size(reserve)} must stay free{grows}"


def check_room(nbytes: int) -> None:
    """Raise ChunkflowError if ``nbytes`` of weights do not fit in host memory."""
    if (cause := no_room(nbytes)) is not None:
        raise ChunkflowError(
            f"The weights take {size(nbytes)} more of host memory, and {cause}. Load them in a smaller dtype, leave some on "
            "the drive with host_memory=, or raise the limit."
        )


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """Return the fields of /proc/meminfo as name -> bytes; empty if there is no such file."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith("kB")}


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the memory control groups of this process and of all their ancestors."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        mine = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for before, separator, after in (line.partition(" - ") for line in mounts):
        if not separator:
            continue
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        if kind == "cgroup2":
            path = next((p for number, _, p in mine if number == "0"), None)
        elif kind == "cgroup" and "memory" in options.split(","):
            path = next((p for _, controllers, p in mine if "memory" in controllers.split(",")), None)
        else:
            continue
        if path is not None:
            mount, below = root / fields[4].lstrip("/"), _below(path, fields[3])
            yield from (mount / each for each in reversed((below, *below.parents)))


def _below(path: str, mounted: str) -> PurePosixPath:
    """Return the path of a group relative to the mounted group.  The path is empty if the group is not below the mounted
    group, as in a container that sees only its own group."""
    try:
        return PurePosixPath(path).relative_to(mounted)
    except ValueError:
        return PurePosixPath()


def _limit(group: Path) -> tuple[Path, int] | None:
    """Return the lowest limit of a group as (file, bytes), or None if the group has no limit."""
    names = ("memory.max", "memory.high") if (group / "memory.current").exists() else ("memory.limit_in_bytes",)
    texts = [(group / name, (group / name).read_text().strip()) for name in names if (group / name).exists()]
    limits = [(path, int(text)) for path, text in texts if text != "max" and int(text) < _NO_LIMIT]
    return min(limits, key=lambda limit: limit[1], default=None)


def _used(group: Path) -> int:
    """Return the bytes that a group uses, without its page cache, which the kernel can drop.  Active file pages count
    as cache, too, because a page of a file becomes active when it is read twice."""
    name, total = ("memory.current", "")
    if not (group / name).exists():
        name, total = "memory.usage_in_bytes", "total_"
    cache = (f"{total}inactive_file", f"{total}active_file")
    rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / name).read_text()) - sum(int(row[1]) for row in rows if row[0] in cache)
