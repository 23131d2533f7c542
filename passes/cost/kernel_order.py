"""Kernel order: finds orders in which the kernels of a region can run, and computes how many bytes of their results are live
while each kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch.fx import Node


@dataclass(eq=False)
class Kernel:
    """A kernel, or several fused kernels.  ``reads`` and ``writes``: nodes whose memory the kernel reads and writes.
    ``strided``: nodes whose elements the kernel does not read in the order in which they are stored.  ``size``: number of
    elements that the kernel iterates over, or 0 if the kernel cannot be fused."""

    reads: set[Node]
    writes: set[Node]
    strided: set[Node]
    size: int

    def fuse(self, other: Kernel) -> None:
        """Fuse ``other`` into this kernel."""
        self.reads |= other.reads
        self.writes |= other.writes
        self.strided |= other.strided


def by_node(kernels: Sequence[Kernel], name: str) -> dict[Node, set[Kernel]]:
    found: dict[Node, set[Kernel]] = {}
    for kernel in kernels:
        for base in getattr(kernel, name):
            found.setdefault(base, set()).add(kernel)
    return found


def kernels_after(kernels: Sequence[Kernel]) -> dict[Kernel, set[Kernel]]:
    """Return, for each kernel, the kernels that read its results."""
    readers = by_node(kernels, "reads")
    return {k: {r for base in k.writes for r in readers.get(base, ()) if r is not k} for k in kernels}


def runs_between(after: Mapping[Kernel, set[Kernel]], first: Kernel, second: Kernel) -> bool:
    """Return whether another kernel must run after ``first`` and before ``second``."""
    seen, todo = set[Kernel](), [k for k in after[first] if k is not second]
    while todo:
        kernel = todo.pop()
        if kernel is second:
            return True
        if kernel not in seen:
            seen.add(kernel)
            todo += after[kernel]
    return False


def in_dependency_order(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the kernels in an order in which each kernel runs after the kernels whose results it reads.  If several kernels
    can run next, the one that comes first in ``kernels`` is chosen."""
    after = kernels_after(kernels)
    missing = dict.fromkeys(kernels, 0)
    for kernel in chain.from_iterable(after.values()):
        missing[kernel] += 1
    order, left = list[Kernel](), list(kernels)
    while left:
        kernel = next(k for k in left if not missing[k])
        left.remove(kernel)
        order.append(kernel)
        for reader in after[kernel]:
            missing[reader] -= 1
    return order


def fewest_bytes_first(
    kernels: Sequence[Kernel], nbytes: Mapping[Node, int], outputs: Collection[Node]
) -> list[Kernel]:
    """Return the kernels in a greedy order that keeps the peak of live bytes low.

    Among the kernels that can run next without raising the peak, the one after which the fewest bytes are live is chosen.  If
    every kernel that can run next raises the peak, the one whose results take the fewest bytes is chosen.
    """
    after, unread, alive = kernels_after(kernels), by_node(kernels, "reads"), set[Node]()
    missing = dict.fromkeys(kernels, 0)
    for kernel in chain.from_iterable(after.values()):
        missing[kernel] += 1
    now, most, order, left = 0, 0, list[Kernel](), list(kernels)
    while left:
        sizes = dict[Kernel, tuple[int, int]]()
        for kernel in left:
            if not missing[kernel]:
                made = sum(nbytes[b] for b in kernel.writes - alive)
                freed = sum(nbytes[b] for b in kernel.reads & alive if unread[b] == {kernel} and b not in outputs)
                sizes[kernel] = made, made - freed
        kernel = min(sizes, key=lambda k: (sizes[k][0] if now + sizes[k][0] > most else 0, sizes[k][1]))
        most, now = max(most, now + sizes[kernel][0]), now + sizes[kernel][1]
        left.remove(kernel)
        order.append(kernel)
        alive |= kernel.writes
        for base in kernel.reads:
            unread[base].discard(kernel)
        for reader in after[kernel]:
            missing[reader] -= 1
    return order


class OrderedKernels:
    """Kernels in a given order, and the live bytes of the values that they compute.  ``expected``: for each kernel,
    Inductor's estimate of the bytes that are live while the kernel runs.  The estimate ignores the reuse of memory.  It
    counts the operands of a concatenation in addition to the result."""

    def __init__(
        self,
        order: Sequence[Kernel],
        nbytes: Mapping[Node, int],
        outputs: Collection[Node],
        joined: Collection[Node],
    ) -> None:
        self.order, self.nbytes, self.joined = order, nbytes, joined
        self.dying: list[list[Node]] = [[] for _ in order]
        last = {base: i for i, kernel in enumerate(order) for base in (*kernel.writes, *kernel.reads) if base in nbytes}
        for base, i in last.items():
            if base not in outputs:
                self.dying[i].append(base)
        self.expected = list[int]()
        written = {base: i for i, kernel in enumerate(order) for base in kernel.writes}
        now, alive = 0, set[Node]()
        for i, kernel in enumerate(order):
            now += sum(nbytes[b] for b in kernel.writes - alive)
            alive |= kernel.writes
            self.expected.append(now + sum(nbytes[b] for b in kernel.writes if b in joined and written[b] == i))
            now -= sum(nbytes[b] for b in self.dying[i])
        self.expected_peak = max(self.expected, default=0)

    def in_place(self, reused: Callable[[Node], object]) -> list[int]:
        """Return, for each kernel, the bytes that are allocated while the kernel runs, if new values reuse the memory of
        freed values.

        The memory of a freed value stays allocated until the value that reuses it is computed.  Memory is not reused if
        keeping it allocated would raise the expected peak.  ``reused``: function that returns the reuse key of a value.  A
        value can reuse the memory of a freed value with an equal key.  A value with the key None reuses no memory.
        """
        expected, own = list(self.expected), list[int]()
        dead: dict[object, list[int]] = {}
        now, alive = 0, set[Node]()
        for i, kernel in enumerate(self.order):
            dying = sorted(self.dying[i], key=lambda b: b.name)
            own.append(0)
            for base in sorted(kernel.writes - alive, key=lambda b: (-self.nbytes[b], b.name)):
                alive.add(base)
                old = next((b for b in dying if self._overwrites(kernel, base, b)), None)
                if old is not None:
                    dying.remove(old)
                    continue
                size, ends = self.nbytes[base], dead.get(reused(base))
                now += size
                if ends and size + max(expected[ends[-1] + 1 : i], default=0) <= max(self.expected_peak, size):
                    for k in range(ends.pop() + 1, i):
                        expected[k] += size
                        own[k] += size
            own[i] += now
            for base in dying:
                now -= self.nbytes[base]
                if (kind := reused(base)) is not None:
                    dead.setdefault(kind, []).append(i)
        return own

    def _overwrites(self, kernel: Kernel, new: Node, old: Node) -> bool:
        alike = self.nbytes[old] == self.nbytes[new] and old not in kernel.strided and old not in kernel.writes
        return alike and bool(kernel.size) and new not in self.joined and old not in self.joined
