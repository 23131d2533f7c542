"""Fusion: models the kernels that Inductor generates for a region, and the bytes of the values that these kernels store.

Inductor is modelled as follows:

* Matrix products, attention and ops on complex numbers are separate kernels that Inductor does not generate.
* A pointwise value is computed inside the kernels that read it.  A pointwise value has a separate kernel only if it is an
  output of the region, an operand of a kernel that Inductor does not generate, or the result of many reads or ops.
* Pointwise ops and reductions that iterate over the same number of elements are fused.  A value is never stored if its only
  reader is the kernel that computes it.
* A value is freed after the last kernel that reads it.  A pointwise kernel overwrites an operand of the same size if no
  later kernel reads this operand.  A value can also reuse the memory of a freed value of the same size and dtype.
* Inductor considers several orders of the kernels, and uses the order with the lowest peak memory.

Without Inductor, each op is a kernel, and the kernels run in program order.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch.fx import Node

from .kernel_order import (
    Kernel,
    OrderedKernels,
    by_node,
    fewest_bytes_first,
    in_dependency_order,
    kernels_after,
    runs_between,
)
from .kernels import Values, bases_of, tensor_bytes, tensors

# Ops that Inductor computes elementwise although torch does not tag them as pointwise.
_POINTWISE = frozenset(
    (
        "_softmax",
        "_to_copy",
        "arange",
        "clone",
        "constant_pad_nd",
        "copy",
        "copy_",
        "embedding",
        "empty",
        "empty_like",
        "full",
        "full_like",
        "gather",
        "index",
        "index_select",
        "native_group_norm",
        "native_layer_norm",
        "ones_like",
        "repeat",
        "select_scatter",
        "slice_scatter",
        "zeros",
        "zeros_like",
    )
)
_REDUCTIONS = frozenset(
    ("all", "amax", "amin", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum", "var", "var_mean")
)
# Matrix products with an ``out=`` variant.  Inductor can choose the memory of their results.
_WITH_OUT = frozenset(("_int_mm", "_scaled_mm", "addmm", "baddbmm", "bmm", "mm"))
# View ops that do not change the order of the elements.
_IN_ORDER = frozenset(("_unsafe_view", "reshape", "squeeze", "unsqueeze", "view"))
# The defaults of Inductor's realize_reads_threshold, realize_acc_reads_threshold and realize_opcount_threshold: a value with
# more reads or ops is stored ("realized") instead of being computed inside its readers.
_MOST_SHARED_READS, _MOST_READS, _MOST_OPS = 4, 8, 30
_COPY = torch.ops.aten.copy.default
_READ_NO_VALUES = frozenset(
    ("empty_like", "full_like", "new_empty", "new_full", "new_zeros", "ones_like", "zeros_like")
)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The live bytes of a region, kernel by kernel.  ``own``: for each kernel of the region, the bytes that are live while
    the kernel runs, counting only values that the region computes.  ``until``: for each input, the position of the last
    kernel that reads it, or -1 if no kernel reads it."""

    own: tuple[int, ...]
    until: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RegionNodes:
    """The inputs and outputs of a region, as nodes of the whole graph.  ``key``: regions with equal keys have equal
    profiles."""

    key: object
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True)
class Storages:
    """The memory of a graph's values.  ``values``: for each node, its value, as fake tensors.  ``weights``: nodes whose
    memory is not counted.  ``fused``: whether Inductor fuses the ops.  ``own``: nodes with view ops that allocate memory
    nevertheless, see :func:`bases_of`.  ``profiles``: profiles that were already computed, by region key."""

    values: Values
    weights: Collection[Node]
    fused: bool
    own: Collection[Node] = ()
    profiles: dict[object, Profile] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def bases(self) -> Mapping[Node, Node]:
        return bases_of(self.values, self.own)

    @cached_property
    def position(self) -> Mapping[Node, int]:
        return {node: i for i, node in enumerate(self.values)}

    def nbytes(self, base: Node) -> int:
        if base in self.weights or base.op == "get_attr":
            return 0
        return tensor_bytes(self.values[base])

    def profile(self, part: RegionNodes) -> Profile:
        if part.key not in self.profiles:
            self.profiles[part.key] = _Kernels(self, part).profile()
        return self.profiles[part.key]


class _Kernels:
    """The kernels of one region, in an order in which they can run."""

    def __init__(self, storages: Storages, part: RegionNodes) -> None:
        self.storages, self.part = storages, part
        self.bases, self.values = storages.bases, storages.values
        self.outputs = {self.bases[n] for n in part.outputs}
        nodes = sorted(_between(part), key=storages.position.__getitem__)
        if storages.fused:
            nodes = _near_readers(nodes, part.outputs)
        made = [n for n in nodes if self.bases[n] is n and tensors(self.values[n])]
        self.readers: dict[Node, list[Node]] = {}
        for node in made:
            for base in dict.fromkeys(self.bases[a] for a in _operands(node)):
                self.readers.setdefault(base, []).append(node)
        self.alone = {n for n in made if _is_alone(n, self.values)} if storages.fused else set(made)
        self.joined = {n for n in made if _is_cat(n)} if storages.fused else set[Node]()
        self.kernels = self._lowered(made)
        if storages.fused:
            self._fuse()

    def profile(self) -> Profile:
        nbytes = self._stored()
        for kernel in self.kernels:
            kernel.writes &= nbytes.keys()
        orders = [self.kernels]
        if self.storages.fused:
            orders.append(fewest_bytes_first(self.kernels, nbytes, self.outputs))
        made = [OrderedKernels(order, nbytes, self.outputs, self.joined) for order in orders]
        chosen = min(made, key=lambda made: made.expected_peak)
        own = chosen.in_place(self._reused) if self.storages.fused else chosen.expected
        last = {base: i for i, kernel in enumerate(chosen.order) for base in kernel.reads}
        return Profile(own=tuple(own), until=tuple(last.get(self.bases[n], -1) for n in self.part.inputs))

    def _reused(self, base: Node) -> object:
        """Return the reuse key of a value (see :meth:`OrderedKernels.in_place`), or None if the value cannot reuse memory."""
        if base in self.alone and _name(base) not in _WITH_OUT:
            return None
        return tensors(self.values[base])[0].dtype, tensor_bytes(self.values[base])

    def _lowered(self, made: Sequence[Node]) -> list[Kernel]:
        """Return the kernels before fusion: one kernel for each value that Inductor realizes, that is, stores in memory
        (:meth:`_is_realized`)."""
        kernels, inlined = list[Kernel](), dict[Node, tuple[Kernel, int]]()
        for node in made:
            kernel, ops = Kernel(set(), {node}, set(), self._size(node)), 1
            operands = _operands(node)
            if node in self.alone:
                kernels += [inlined.pop(b)[0] for b in dict.fromkeys(self.bases[a] for a in operands) if b in inlined]
            for argument in operands:
                base = self.bases[argument]
                read, more = inlined.get(base, (Kernel({base}, set(), set(), 0), 0))
                if node in self.joined:  # each operand of a concatenation has a kernel that copies it into the result
                    kernel = Kernel(set(), {node}, set(), _elements(self.values[argument]))
                    kernels.append(kernel)
                kernel.reads |= read.reads
                kernel.strided |= read.strided if self._in_order(argument) else read.reads
                ops += more
            if node not in self.joined:
                if self._is_realized(node, len(kernel.reads), ops):
                    kernels.append(kernel)
                else:
                    inlined[node] = kernel, ops
        return [*kernels, *(inlined.pop(b)[0] for n in self.part.outputs if (b := self.bases[n]) in inlined)]

    def _is_realized(self, node: Node, reads: int, ops: int) -> bool:
        if node in self.part.outputs or node in self.alone or not _is_pointwise(node):
            return True
        shared = len(self.readers.get(node, ())) > 1
        return (shared and reads > _MOST_SHARED_READS) or reads > _MOST_READS or ops + reads > _MOST_OPS

    def _size(self, node: Node) -> int:
        if node in self.alone:
            return 0
        sizes = [_elements(self.values[node])]
        return max(sizes if _is_pointwise(node) else sizes + [_elements(self.values[a]) for a in node.all_input_nodes])

    def _in_order(self, argument: Node) -> bool:
        """Return whether the elements of a value are stored in the order in which a kernel iterates over them."""
        while self.bases[argument] is not argument and argument not in self.part.inputs:
            if _name(argument) not in _IN_ORDER and not _is_result(argument, self.bases):
                return False
            argument = argument.all_input_nodes[0]
        return True

    def _fuse(self) -> None:
        """Fuse pairs of kernels that iterate over the same number of elements and that read or write the same memory.  A pair
        is not fused if another kernel must run between the two.  Pairs that share the most bytes are fused first."""
        users: dict[Node, list[int]] = {}
        for i, kernel in enumerate(self.kernels):
            for base in kernel.reads | kernel.writes if kernel.size else ():
                users.setdefault(base, []).append(i)
        shared: dict[tuple[int, int], int] = {}
        for base, sharing in users.items():
            for pair in combinations(sharing, 2):
                if self.kernels[pair[0]].size == self.kernels[pair[1]].size:
                    shared[pair] = shared.get(pair, 0) + tensor_bytes(self.values[base])
        groups, after = list(self.kernels), kernels_after(self.kernels)
        for i, j in sorted(shared, key=lambda pair: (-shared[pair], pair)):
            first, second = groups[i], groups[j]
            if first is second or first.strided & second.writes or second.strided & first.writes:
                continue
            if runs_between(after, first, second) or runs_between(after, second, first):
                continue
            first.fuse(second)
            groups = [first if kernel is second else kernel for kernel in groups]
            after[first] = (after[first] | after.pop(second)) - {first, second}
            for following in after.values():
                if second in following:
                    following.remove(second)
                    following.add(first)
            after[first].discard(first)
        self.kernels = in_dependency_order([*dict.fromkeys(groups)])

    def _stored(self) -> dict[Node, int]:
        """Return the size in bytes of each value that is stored in memory.  A value is not stored if its only reader is the
        kernel that computes it."""
        writers, readers = (by_node(self.kernels, name) for name in ("writes", "reads"))
        return {
            base: self.storages.nbytes(base)
            for base, kernels in writers.items()
            if base in self.outputs or len(kernels) > 1 or readers.get(base, set()) != kernels
        }


def _between(part: RegionNodes) -> set[Node]:
    """Return the nodes that are computed between the inputs and the outputs of a region."""
    found, todo = set[Node](), [*part.outputs]
    while todo:
        node = todo.pop()
        if node not in found and node not in part.inputs and node.op != "placeholder":
            found.add(node)
            todo += node.all_input_nodes
    return found


def _near_readers(nodes: Sequence[Node], outputs: Collection[Node]) -> list[Node]:
    """Return the nodes in the order that Inductor's reorder_for_locality gives them: each node is close to its readers."""
    order, members, seen = list(nodes), set(nodes), set[Node]()

    def move_before(position: int, operands: Iterable[Node]) -> None:
        for node in operands:
            if node not in members or node in seen or node.target is operator.getitem:
                continue
            if all(user in seen or user not in members for user in node.users):
                order.remove(node)
                order.insert(position - 1, node)

    move_before(len(order), outputs)
    for position in range(len(order) - 1, -1, -1):
        seen.add(order[position])
        move_before(position, order[position].all_input_nodes)
    return order


def _operands(node: Node) -> list[Node]:
    """Return the operands whose values a node reads.  Operands of which the node needs only the size are left out."""
    if _name(node) in _READ_NO_VALUES:
        return []
    return [n for n in node.all_input_nodes if not (node.target is _COPY and n is node.args[0])]


def _elements(value: Any) -> int:
    return max((t.numel() for t in tensors(value)), default=0)


def _name(node: Node) -> str:
    return str(node.target.overloadpacket.__name__) if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_cat(node: Node) -> bool:
    return _name(node) in ("cat", "stack")


def _is_result(node: Node, bases: Mapping[Node, Node]) -> bool:
    """Return whether a node is one result of an op that returns several results."""
    return node.target is operator.getitem and bases[node] is node.args[0]


def _is_pointwise(node: Node) -> bool:
    target: Any = node.target
    return _name(node) in _POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ())


def _is_alone(node: Node, values: Values) -> bool:
    """Return whether a node runs as a separate kernel, which Inductor neither generates nor fuses."""
    used = [t for n in (node, *node.all_input_nodes) for t in tensors(values[n])]
    if any(t.is_complex() for t in used):
        return True
    return not (_is_pointwise(node) or _is_cat(node) or _name(node) in _REDUCTIONS)
