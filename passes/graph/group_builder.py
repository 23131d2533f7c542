"""Group builder: builds the graph that computes the attention of one group of heads (head_groups.py)."""

from __future__ import annotations

from collections.abc import Collection

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node

from .slice_graphs import Builder, Step
from .slice_parts import NoRule, Part, shape_of


class GroupBuilder(Builder):
    """Builds the graph that computes the attention of one group of heads.

    ``received``: completions of the all-to-alls before attention.  The graph takes parts of the received values as inputs.
    ``attended``: parts of the attention result that the graph reads.
    """

    def __init__(
        self, values: Collection[Node], received: Collection[Node], attention: Node, fake: FakeTensorMode | None
    ) -> None:
        super().__init__(values, fake=fake, closed=True)
        self.received = received
        self.attention = attention
        self.attended: list[Part | None] = []
        self.taken: dict[Node, tuple[Part, Node]] = {}

    def is_by_heads(self) -> bool:
        """Return whether the graph needs attention only for some of the heads, but for all samples and all queries."""
        heads = len(shape_of(self.attention.all_input_nodes[0])) - 3
        return bool(self.attended) and all(
            part is not None and (part.dim, part.outer) == (heads, 1) for part in self.attended
        )

    def _step(self, node: Node, part: Part | None) -> Step:
        if node is self.attention or node.args[:1] == (self.attention,):
            self.attended.append(part)
        return super()._step(node, part)

    def _can_take(self, node: Node, part: Part | None) -> bool:
        return super()._can_take(node, part) or node in self.received

    def _take(self, node: Node, part: Part | None) -> Node:
        if node not in self.received:
            return super()._take(node, part)
        if part is None:
            raise NoRule(f"an op before attention reads all heads of {node}, as a norm across heads does")
        if node not in self.taken:
            size = part.outer * part.count
            given = super()._take(node, Part(part.dim, size, 0, size))
            if self.fake is not None:
                with self.fake:
                    given.meta = {"val": given.meta["val"].new_empty(given.meta["val"].shape)}
            self.taken[node] = part, given
        if self.taken[node][0] != part:
            raise NoRule(f"attention needs several parts of {node}")
        return self.taken[node][1]
