"""How much host memory this process may still take: of the machine, and of the control groups that it is in.

Both hierarchies of Linux are read, v1 and v2, with all ancestors: in a container the machine's own figure means nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import parse_bytes, size

# Says how much memory the machine has, where /proc/meminfo says less: a virtual machine may get it as it is used.
VARIABLE = "CHUNKFLOW_HOST_MEMORY"

# Left to the kernel's watermarks, the page cache, and the rest of the pipeline.
RESERVED_SHARE = 0.05
LEAST_RESERVED = 1 << 30
# A v1 group without a limit says so with a number near 2**63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class HostMemory:
    """``total``: bytes of the machine, or the limit of the group that leaves the least.  ``free``: bytes that this process
    may still take, page cache that can be dropped included.  ``limit``: the file of that group's limit, or the environment
    variable that says the total; None if the machine itself leaves the least.
    """

    total: int
    free: int
    limit: Path | str | None = None

    @property
    def by(self) -> str:
        """What limits it, in words that follow "free"."""
        if self.limit is None:
            return ""
        return f" by {VARIABLE}" if self.limit == VARIABLE else f" below {self.limit}"

    @property
    def reserve(self) -> int:
        """Bytes that are not to be pinned or filled."""
        return max(LEAST_RESERVED, int(RESERVED_SHARE * self.total))


@dataclass
class Room:
    """Bytes that may still be pinned, and what limits them."""

    left: int
    why: str

    def take(self, nbytes: int) -> bool:
        """Whether there is room for them; if not, there is none for what comes after either."""
        self.left = self.left - nbytes if nbytes <= self.left else -1
        return self.left >= 0


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The least of what the machine and each control group leave.  ``root``: where the file systems are, for tests.

    Raises ChunkflowError if the environment says a total that is no size.
    """
    machine = meminfo(root)
    memory = HostMemory(machine.get("MemTotal", 0), machine.get("MemAvailable", 0))
    if (said := os.environ.get(VARIABLE)) is not None:
        total = parse_bytes(said, VARIABLE)
        memory = HostMemory(total, max(0, total - (memory.total - memory.free)), VARIABLE)
    for group in _groups(root):
        try:
            limit, used = _limit(group), _used(group)
        except (OSError, ValueError):  # the root group has no limit, and a group may vanish
            continue
        if limit is not None and limit[1] - used < memory.free:
            memory = HostMemory(limit[1], max(0, limit[1] - used), limit[0])
    return memory


def local_ranks(otherwise: int = 1) -> int:
    """The processes of this job on this machine; ``otherwise``: where no launcher says how many."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", otherwise)))


def no_room(nbytes: int) -> str | None:
    """Why so many bytes cannot be taken now, None if they can: what the kernel does beyond a limit is to kill.

    A small reserve does for few bytes.
    """
    memory = host_memory()
    reserve = min(memory.reserve, nbytes)
    if nbytes + reserve <= memory.free or not memory.total:  # a machine that does not say
        return None
    grows = "" if memory.by else f" (where memory grows as it is used, {VARIABLE}=64GiB says how much there will be)"
    return f"{size(memory.free)} are free{memory.by}, and {size(reserve)} must stay free{grows}"


def check_room(nbytes: int) -> None:
    """Raise ChunkflowError if there is no room for so many bytes of weights."""
    if (cause := no_room(nbytes)) is not None:
        raise ChunkflowError(
            f"The weights take {size(nbytes)} more of host memory, and {cause}. Load them in a smaller dtype, leave some on "
            "the drive with host_memory=, or raise the limit."
        )


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """Bytes by name, from /proc/meminfo; none where there is no such file."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith("kB")}


def _groups(root: Path) -> Iterator[Path]:
    """The folders of the memory groups of this process, each with its ancestors."""
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
    """The path of a group below the group that is mounted; a container may see only its own."""
    try:
        return PurePosixPath(path).relative_to(mounted)
    except ValueError:
        return PurePosixPath()


def _limit(group: Path) -> tuple[Path, int] | None:
    """The file and the bytes of the lowest limit of a group; None if it has none."""
    names = ("memory.max", "memory.high") if (group / "memory.current").exists() else ("memory.limit_in_bytes",)
    texts = [(group / name, (group / name).read_text().strip()) for name in names if (group / name).exists()]
    limits = [(path, int(text)) for path, text in texts if text != "max" and int(text) < _NO_LIMIT]
    return min(limits, key=lambda limit: limit[1], default=None)


def _used(group: Path) -> int:
    """Bytes that a group uses, without its page cache, which the kernel can drop.  What is read twice becomes active."""
    name, total = ("memory.current", "")
    if not (group / name).exists():
        name, total = "memory.usage_in_bytes", "total_"
    cache = (f"{total}inactive_file", f"{total}active_file")
    rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int((group / name).read_text()) - sum(int(row[1]) for row in rows if row[0] in cache)
