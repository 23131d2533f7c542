"""Segments: assigns the nodes of an ATen graph to segments, each of which becomes a region (regions.py)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from torch.fx import GraphModule, Node

from .discover import Discovery, collective_kind, is_view, is_wait_tensor, nbytes
from .recompute import to_recompute
from .symbolic_sizes import is_size, symbol_nodes, symbols_of


class Segments:
    """Assigns the nodes of the source graph to segments, each of which becomes a region.

    ``of``: for each node that is computed in a single segment, the number of this segment.  ``lazy``: nodes that each segment
    computes for itself if it needs them.  ``recomputed``: nodes in ``lazy`` that :meth:`recompute` has added.  Top-level
    nodes (:meth:`is_top_level`) are in none of these three.
    """

    def __init__(self, graph: GraphModule, discovery: Discovery, blocks: Mapping[str, str], group_bytes: int) -> None:
        self.graph = graph
        self.discovery = discovery
        self.blocks = blocks
        self.group_bytes = group_bytes
        self.of: dict[Node, int] = {}
        streamable = {w.node for w in discovery.weights if w.keep is None}
        self.lazy: dict[Node, None] = {v: None for v, w in discovery.weight_views.items() if w in streamable}
        self.lazy |= {n: None for n in graph.graph.nodes if is_size(n) and not self._needed_at_top_level(n)}
        self.recomputed = dict[Node, None]()
        self.block_of: dict[int, str] = {}
        self.symbols: dict[int, list[Node]] = {}
        self.sent: set[Node] = set()  # nodes that compute symbols, and that a later segment takes as inputs

    def assign(self) -> None:
        streamed = {w.node: nbytes(w.node) for w in self.discovery.weights if w.keep is None}
        labels = block_labels(self.graph, self.blocks)
        current, block, held, group = -1, "", dict[Node, None](), 0
        cut_here = True
        for node in self.graph.graph.nodes:
            if self.is_top_level(node):
                cut_here = cut_here or (node.op == "call_function")
                continue
            if node in self.lazy:
                continue
            if node.target is operator.getitem:
                self.of[node] = self.of[node.all_input_nodes[0]]
                continue
            here = labels[node]
            fresh = {w: streamed[w] for w in self._weights(node) if w in streamed and w not in held}
            full = bool(held) and bool(fresh) and group + sum(fresh.values()) > self.group_bytes
            if cut_here or here != block or full:
                current, block, held, group = current + 1, here, {}, 0
                self.block_of[current] = block
                fresh = {w: streamed[w] for w in self._weights(node) if w in streamed}
                cut_here = False
            held.update(dict.fromkeys(fresh))
            group += sum(fresh.values())
            self.of[node] = current

    def dissolve(self) -> None:
        """Move segments that contain only views into neighbouring segments.  With Ulysses, there are such segments between
        all-to-alls."""
        for segment, nodes in self._members().items():
            if not all(is_view(n) for n in nodes):
                continue
            targets = {node: self._home_of_view(node, segment) for node in nodes}
            for node in nodes:
                base = node.all_input_nodes[0]
                if base in targets:
                    targets[node] = targets[base]
                elif base in self.lazy:
                    targets[node] = None
            if any(t is None and self._needed_at_top_level(n) for n, t in targets.items()):
                continue
            for node, target in targets.items():
                if target is None:
                    del self.of[node]
                    self.lazy[node] = None
                else:
                    self.of[node] = target

    def recompute(self, sizes: Mapping[str, int]) -> None:
        """Make each segment recompute values that are cheaper to recompute than to pass between regions.  ``sizes``: values
        of the symbols in the sizes of tensors."""
        streamed = {w.node for w in self.discovery.weights if w.keep is None}
        self.recomputed = to_recompute(self.graph.graph, self.of, self.lazy, streamed, sizes)
        self.lazy |= self.recomputed
        self.of = {node: segment for node, segment in self.of.items() if node not in self.recomputed}

    def merge(self, groups: Sequence[Sequence[int]]) -> None:
        """Merge the segments of each group.  ``groups``: for each group, the positions of its segments in program order."""
        segments = [self.of[item[0]] for item in self.skeleton() if not isinstance(item, Node)]
        first = {segments[i]: segments[group[0]] for group in groups for i in group}
        self.of = {node: first.get(segment, segment) for node, segment in self.of.items()}

    def find_symbols(self) -> None:
        """Find the symbols in the sizes of each segment's tensors, and the nodes that compute these symbols.

        These nodes become inputs of the segment's region.  Otherwise Inductor would have to derive each symbol from the sizes
        of the tensor inputs.  This is possible only if the size of an input is the symbol itself.
        """
        nodes = symbol_nodes(self.graph)
        needed: dict[int, set[str]] = {}
        for node, segment in self.of.items() if nodes else ():
            for value in self._with_operands(node):
                needed.setdefault(segment, set()).update(symbols_of(value.meta.get("val")))
        for segment, names in needed.items():
            used = [nodes[name] for name in sorted(names) if name in nodes]
            self.symbols[segment] = [n for n in used if self.of.get(n, -1) < segment]
            self.sent |= {n for n in self.symbols[segment] if n in self.of}

    def _with_operands(self, node: Node) -> Iterable[Node]:
        """Yield a node and its operands.  For an operand that is recomputed, also yield the operands of this operand."""
        yield node
        for operand in node.all_input_nodes:
            if operand in self.recomputed:
                yield from self._with_operands(operand)
            else:
                yield operand

    def skeleton(self) -> Iterable[list[Node] | Node]:
        """Yield segments (as lists of nodes), collectives and completions, in program order."""
        members = self._members()
        for node in self.graph.graph.nodes:
            if node.op == "call_function" and self.is_top_level(node):
                yield node
            elif nodes := members.pop(self.of.get(node, -1), None):
                yield nodes

    def _members(self) -> dict[int, list[Node]]:
        """Return the nodes of each segment, in program order."""
        members: dict[int, list[Node]] = {}
        for node, segment in self.of.items():
            members.setdefault(segment, []).append(node)
        return members

    def is_top_level(self, node: Node) -> bool:
        """Whether a node stays outside all regions: inputs, outputs, collectives and their completions."""
        if node.op != "call_function":
            return True
        # A getitem that takes one result of a coalesced collective stays outside all regions, like the collective.
        if node.target is operator.getitem:
            return self.is_top_level(node.all_input_nodes[0]) and node.all_input_nodes[0].op == "call_function"
        return collective_kind(node) is not None or is_wait_tensor(node)

    def _home_of_view(self, node: Node, segment: int) -> int | None:
        """Return the segment to which a view can be moved, that is, the segment that computes the operand of the view.
        Return None if each region that reads the view must compute the view itself.  ``segment``: segment of the view."""
        home = self.of.get(node.all_input_nodes[0])
        return home if home != segment else None

    def _needed_at_top_level(self, node: Node) -> bool:
        return any(self.is_top_level(user) for user in node.users)

    def _weights(self, node: Node) -> tuple[Node, ...]:
        views = self.discovery.weight_views
        return tuple(dict.fromkeys(views.get(a, a) for a in node.all_input_nodes))


def block_labels(graph: GraphModule, blocks: Mapping[str, str]) -> dict[Node, str]:
    """Return the name of the block of each call node, or an empty string for nodes outside blocks.

    A node without a module stack belongs to the root module or comes from functionalization.  Such a node is treated as a
    part of a block if the nearest nodes with a stack, before and after it, are both in this block.
    """
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    by_stack: dict[Node, str] = {}
    for node in calls:
        stack = node.meta.get("nn_module_stack") or {}
        keys = [str(k).split("@")[0] for k in stack]
        if keys:
            by_stack[node] = next((blocks[k] for k in keys if k in blocks), "")
    labels: dict[Node, str] = {}
    after = {}
    following = ""
    for node in reversed(calls):
        after[node] = following = by_stack.get(node, following)
    current = ""
    for node in calls:
        labels[node] = current = by_stack.get(node, current if current == after[node] else "")
    return labels


def reads_from_outside(user: Node, members: set[Node], segments: Segments) -> bool:
    if user in segments.lazy:
        return any(reads_from_outside(u, members, segments) for u in user.users)
    return user not in members
