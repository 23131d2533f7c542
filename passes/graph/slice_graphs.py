"""Slice graphs: builds the graph of a phase (slices.py).  This graph computes parts of some values of a region's graph.  The
slice rules (slice_rules.py) determine the ops and operands of this graph."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from .discover import is_view
from .slice_parts import NoRule, Operand, Part, Sliced, is_attention, is_light, is_reshape, op_name, shape_of
from .slice_rules import sliced

# The alignment in bytes that Inductor expects of its inputs (torch._inductor.utils.ALIGNMENT).
ALIGNMENT = 16


@dataclass(frozen=True)
class Slice:
    """The slice of a value that run ``i`` of a phase uses: ``value.narrow(dim, offset + i * size, size)``."""

    dim: int
    offset: int
    size: int


@dataclass
class Walk:
    """The result of a walk through a region's graph, from the values that a phase computes (its roots) back to its inputs.

    ``taken``: for each input of the phase, the placeholder in the graph of the phase.  An input is a node and the slice that
    the phase takes of the node's value, or None for the whole value.  ``needs``: values that earlier phases must compute,
    because they must be complete before the phase starts.  The entry of a value contains the dimensions along which the value
    can be computed slice by slice, and the reason why it is needed.
    """

    taken: dict[tuple[Node, Slice | None], Node] = field(default_factory=dict)
    needs: dict[Node, tuple[tuple[int, ...], str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """The way in which a builder computes a node or a part of a node.

    ``reads``: nodes and parts of nodes that must be computed first.  ``call``: node whose op computes the value, or None if
    the value is an input of the phase.  ``item``: if the op has several results, the index of the value among them, otherwise
    None.  ``operands``: args and kwargs of the op, with an Operand for each node.  If the value is just a part of an operand,
    ``operands`` is this Operand.
    """

    reads: tuple[tuple[Node, Part | None], ...]
    call: Node | None = None
    item: Any = None
    operands: Any = None


class Builder:
    """Builds the graph of a phase.

    ``values``: nodes that earlier phases compute.  ``streams``: inputs of which phases take slices (slices.py); empty if
    these inputs are not known yet.  ``fake``: FakeTensorMode in which metadata is computed, or None to compute no metadata.
    Without metadata, only ``found`` can be used.  ``closed``: whether this phase must compute everything except ``values``.
    Otherwise the phase may leave more values to earlier phases (``needs`` in ``found``).
    """

    def __init__(
        self,
        values: Collection[Node],
        streams: Collection[Node] = (),
        fake: FakeTensorMode | None = None,
        closed: bool = False,
    ) -> None:
        self.values = values
        self.streams = streams
        self.fake = fake
        self.closed = closed
        self.graph = Graph()
        self.found = Walk()
        self._anchor = self.graph._root
        self._copies: dict[tuple[Node, Part | None], Node] = {}
        self._calls: dict[tuple[Node, str], Node] = {}
        self._steps: dict[tuple[Node, Part | None], Step] = {}
        self._making: Node | None = None
        self._inline = False

    def root(self, node: Node, part: Part | None) -> Node:
        """Add the ops that compute a root (a value that the phase computes) or a part of a root, and return the resulting
        node.  If ``part`` is None, the root is computed as a whole, and no values are added to ``found.needs``."""
        self._making, self._inline = node, part is None
        todo: list[tuple[Node, Part | None]] = [(node, part)]
        while todo:  # not a recursive function, because it could exceed Python's recursion limit
            key = todo[-1]
            if key in self._copies:
                todo.pop()
                continue
            if key not in self._steps:
                self._steps[key] = self._step(*key)
            missing = [k for k in self._steps[key].reads if k not in self._copies]
            todo += reversed(missing)
            if not missing:
                self._copies[key] = self._write(key, self._steps[key])
        return self._copies[node, part]

    def _step(self, node: Node, part: Part | None) -> Step:
        """Determine how to compute a node or a part of a node.  Values that earlier phases must compute are added to
        ``found.needs``."""
        if node.op == "placeholder" or (self._is_given(node) and self._can_take(node, part)):
            return Step(())
        call, item = (node.args[0], node.args[1]) if node.target is operator.getitem else (node, None)
        assert isinstance(call, Node)
        if call.op == "get_attr":
            raise NoRule(f"{call} is a nested graph")
        rule: Sliced | Operand = Sliced(call.args, dict(call.kwargs))
        if part is not None:
            try:
                rule = sliced(call, part, item)  # type: ignore[arg-type]
            except NoRule as reason:
                if node is self._making or self.closed:
                    raise
                self.found.needs.setdefault(node, ((), str(reason)))
                return Step(())
            if self._is_merged(node, rule):
                self.found.needs.setdefault(node, ((), "the tokens of an input are merged with another dimension"))
                return Step(())
        reads = list[tuple[Node, Part | None]]()

        def read(operand: Any) -> Any:
            operand = Operand(operand) if isinstance(operand, Node) else operand
            if isinstance(operand, Operand):
                reads.append((operand.node, operand.part))
                if operand.part is None:
                    self._note(operand, call)
            return operand

        given: Any = rule if isinstance(rule, Operand) else (rule.args, rule.kwargs)
        given = map_aggregate(given, read)
        return Step(tuple(reads), call, item, given)

    def _is_merged(self, node: Node, rule: Sliced | Operand) -> bool:
        """Return whether a node is a view of an input, and the needed part of the view is not a single range along one
        dimension of the input.  ``rule``: result of the slice rule of the node's op for this part."""
        if (
            self.closed
            or self._inline
            or node is self._making
            or not is_view_of_input(node)
            or isinstance(rule, Operand)
        ):
            return False
        part = rule.args[0].part
        return part is not None and part.outer != 1 and rule.args[0].node.op == "placeholder"

    def _note(self, operand: Operand, reader: Node) -> None:
        """Add an operand to ``found.needs`` if an earlier phase should compute it.  This is the case if the operand depends
        on split inputs, or if it is too expensive to compute it in each run.  Instead of the operand, a value from which the
        operand is computed may be added (:meth:`_base`).  ``reader``: node that reads the whole operand."""
        node, along = operand.node, operand.along
        if (
            self.closed
            or self._inline
            or self._is_given(node)
            or not (self._is_split(node, along) or self._is_heavy(node))
        ):
            return
        base, dims = self._base(node, along)
        if base is not self._making and not self._is_given(base):
            self.found.needs[base] = (dims, f"{op_name(reader)} reads all of it")

    def _write(self, key: tuple[Node, Part | None], step: Step) -> Node:
        """Add a node, or a part of a node, to the graph.  The operands of the node must already be in the graph."""
        node, part = key
        if step.call is None:
            return self._take(node, part)
        if isinstance(step.operands, Operand):
            return self._copies[step.operands.node, step.operands.part]
        args, kwargs = map_aggregate(
            step.operands, lambda x: self._copies[x.node, x.part] if isinstance(x, Operand) else x
        )
        call = step.call, repr((args, kwargs))
        if call not in self._calls:
            self._calls[call] = self._made(step.call, step.call.target, args, kwargs)
        made = self._calls[call]
        return made if step.item is None else self._made(node, operator.getitem, (made, step.item), {})

    def _is_given(self, node: Node) -> bool:
        if node is self._making:
            return False
        return node.op == "placeholder" or node in self.values or node in self.found.needs

    def _is_split(self, node: Node, along: tuple[int, ...]) -> bool:
        """Return whether an earlier phase can compute a node slice by slice.  For this, the node must depend on split inputs,
        and ``along``, the dimensions along which it can be split, must not be empty.  If the split inputs are not known yet,
        the node is assumed to depend on them."""
        return bool(along) and (not self.streams or depends_on(node, self.streams))

    def _is_heavy(self, node: Node) -> bool:
        """Return whether computing a node takes a heavy op, that is, an op for which :func:`is_light` returns False.  If each
        run of a phase computed the node, the heavy op would be repeated for every slice."""
        todo, seen = [node], set[Node]()
        while todo:
            n = todo.pop()
            if n in seen or n.op != "call_function" or self._is_given(n):
                continue
            if n.target is not operator.getitem and not is_light(n):
                return True
            seen.add(n)
            todo += n.all_input_nodes
        return False

    def _base(self, node: Node, along: tuple[int, ...]) -> tuple[Node, tuple[int, ...]]:
        """Return the value that an earlier phase is to compute, and from which this phase then computes ``node``.  Also
        return the dimensions of this value that correspond to ``along``.

        ``along``: dimensions along which ``node`` can be computed slice by slice.  If there are such dimensions, the value is
        the base of which ``node`` is a view.  Otherwise this phase computes ``node`` from the value by a chain of light ops
        with one operand each.  The chain is as long as possible.
        """
        while not self._is_given(node) and len(node.all_input_nodes) == 1:
            if along:
                dims = [self._behind(node, dim) for dim in along] if is_reshape(node) else [None]
                if None in dims:
                    break
                along = tuple(d for d in dims if d is not None)
            elif node.target is not operator.getitem and not is_light(node):
                break
            if not along and node.target is operator.getitem and not is_light(node.all_input_nodes[0]):
                break
            node = node.all_input_nodes[0]
        return node, along

    def _behind(self, view: Node, dim: int) -> int | None:
        """Return the dimension of a view's operand that corresponds to dimension ``dim`` of the view, or None if there is no
        such dimension."""
        size = shape_of(view)[dim]
        try:
            rule = sliced(view, Part(dim, size, 0, size))
        except NoRule:
            return None
        part = rule.args[0].part if isinstance(rule, Sliced) else None
        alone = part is not None and part.outer == 1 and shape_of(view.all_input_nodes[0])[part.dim] == size
        return part.dim if part is not None and alone else None

    def _can_take(self, node: Node, part: Part | None) -> bool:
        """Return whether a phase can take a part of an input, or of a value from an earlier phase, as a slice."""
        return part is None or part.outer == 1

    def _take(self, node: Node, part: Part | None) -> Node:
        if part is not None and part.outer != 1:
            raise NoRule(f"the tokens of {node} are merged with another dimension")
        taken = None if part is None else Slice(part.dim, part.start, part.count)
        key = (node, taken)
        if key not in self.found.taken:
            with self.graph.inserting_after(self._anchor):
                self._anchor = self.graph.placeholder(f"in_{len(self.found.taken)}")
            self._anchor.meta = {"val": part_of(node, taken, self.fake)}
            self.found.taken[key] = self._anchor
        return self.found.taken[key]

    def destination(self, node: Node, part: Slice) -> Node:
        """Add a placeholder for the new memory to which the phase writes a slice of a node."""
        with self.graph.inserting_after(self._anchor):
            self._anchor = self.graph.placeholder(f"out_{node.name}")
        self._anchor.target = self._anchor.name  # makes targets unique if a node has several placeholders
        self._anchor.meta = {"val": part_of(node, part, self.fake)}
        return self._anchor

    def _made(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        if is_attention(node) and self.fake is not None:
            args, kwargs = map_aggregate((args, kwargs), lambda x: self._contiguous(x) if _is_spread(x) else x)
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {name: value for name, value in node.meta.items() if name != "val"}
        if self.fake is None:
            return made
        try:
            made.meta["val"] = self._computed(made)
        except (RuntimeError, ValueError):
            if op_name(node) not in ("view", "_unsafe_view"):
                raise
            # the operand is a slice of a batch and not contiguous, so a view is possible only of a contiguous copy
            self.graph.erase_node(made)
            source = self._made(
                node, torch.ops.aten.clone.default, args[:1], {"memory_format": torch.contiguous_format}
            )
            made = self._made(node, target, (source, *args[1:]), kwargs)
        return made

    def _contiguous(self, operand: Any) -> Node:
        """Return a contiguous copy of an operand."""
        return self._made(operand, torch.ops.aten.clone.default, (operand,), {"memory_format": torch.contiguous_format})

    def _computed(self, node: Node) -> Any:
        """Return the result of a call on fake tensors."""
        assert self.fake is not None and callable(node.target)
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])  # type: ignore[misc]
        with self.fake:
            value = node.target(*args, **kwargs)
            if isinstance(value, torch.Tensor) and value.storage_offset() and not is_view(node):
                # FakeTensorMode caches results, so this result may have the storage offset of an operand of an earlier call.
                # The offset is removed, because equal regions must have equal keys.
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return value


def _is_spread(operand: Any) -> bool:
    """Return whether the elements of a head are not adjacent in memory.  Attention kernels do not support such an operand."""
    return isinstance(operand, Node) and operand.meta["val"].dim() > 0 and operand.meta["val"].stride(-1) != 1


def is_view_of_input(node: Node) -> bool:
    """Return whether a node is an input, or a reshaped view of an input."""
    while is_reshape(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def depends_on(node: Node, inputs: Collection[Node]) -> bool:
    """Return whether a node is one of ``inputs``, or is computed from one of ``inputs``."""
    seen, todo = set[Node](), [node]
    while todo:
        if (n := todo.pop()) in inputs:
            return True
        if n not in seen:
            seen.add(n)
            todo += n.all_input_nodes
    return False


def part_of(node: Node, part: Slice | None, fake: FakeTensorMode | None) -> Any:
    """Return the metadata of a node, or of a slice of a node.

    If some slices start at unaligned addresses, the metadata has an unaligned storage offset.  Inductor then generates no
    vector loads.
    """
    value = node.meta["val"]
    if part is None or fake is None:
        return value
    shape, strides = [part.size if d == part.dim else n for d, n in enumerate(value.shape)], value.stride()
    step = value.element_size() * strides[part.dim]
    offset = int(part.offset * step % ALIGNMENT > 0 or part.size * step % ALIGNMENT > 0)
    elements = offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    with fake:
        if not offset:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
        return torch.empty(elements, dtype=value.dtype, device=value.device).as_strided(shape, strides, offset)
