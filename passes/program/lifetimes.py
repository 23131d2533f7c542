"""Lifetimes: determines at which node of a program the executor drops each value.

The resulting table is a part of the Program, and verify checks it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from chunkflow_compile.passes.graph.discover import collective_kind, is_wait_tensor, list_of
from chunkflow_compile.passes.ops import transfer_of


def releases(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, for the name of each node, the names of the values to drop there.

    A value is dropped at the last node that reads it.  If this node is a region, the region takes the value over, and its
    code frees the memory after the last use in the region.  At any other node, the executor drops the value after the node
    has read it.  A value that a collective reads or produces is dropped after compute has waited for the end of the
    collective.  Outputs of the graph are not dropped, because the caller gets them, and neither is the empty result of a
    region without outputs.
    """
    number = {node: i for i, node in enumerate(graph.nodes)}
    release: dict[str, list[str]] = {}
    for node in number:
        if node.op == "output" or transfer_of(node) is not None:
            continue
        last = max((over(user, number) for user in (node, *node.users)), key=number.__getitem__)
        if last.op not in ("placeholder", "output") and (last is not node or node.op != "call_module"):
            release.setdefault(last.name, []).append(node.name)
    return {node: tuple(values) for node, values in release.items()}


def over(node: Node, number: Mapping[Node, int]) -> Node:
    """Return the node after which compute knows that ``node`` has read its operands and produced its result.

    For a collective, and for a node that takes an element of a collective's results, this is the last node that waits for
    the end of the collective.  For any other node, this is the node itself.  ``number``: positions of the nodes.
    """
    collective = list_of(node) or node
    if collective_kind(collective) is None:
        return node
    completions = [u for v in (collective, *collective.users) for u in v.users if is_wait_tensor(u)]
    return max((node, *completions), key=number.__getitem__)
