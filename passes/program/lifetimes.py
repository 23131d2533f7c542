"""Lifetimes: determines at which node the executor drops each value of a step.

The resulting table is part of the program.  The executor drops values according to this table, and verify checks it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Graph, Node

from chunkflow_compile.passes.graph.discover import collective_kind, is_wait_tensor, list_of
from chunkflow_compile.passes.ops import transfer_of


def releases(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return the names of the values to drop at each node, by the name of the node.

    The compute stream drops a value at its last reader.  If this is a region, the region takes over the value, so that
    its code frees the memory after the last use inside.  After any other node, the value is dropped.  If the collective
    stream reads or makes the value, compute drops it at the collective's completion or later, after it has waited for
    the collective.  Outputs of the graph are not dropped, because the caller gets them.  The results of regions without
    outputs are not dropped, either.
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
    """Return the node after which ``node`` has read its operands and made its result.  ``number``: positions of the
    nodes.

    If ``node`` is a collective, or takes an element of a collective's results, the returned node is the last completion
    of this collective.  Otherwise it is ``node`` itself.
    """
    collective = list_of(node) or node
    if collective_kind(collective) is None:
        return node
    completions = [u for v in (collective, *collective.users) for u in v.users if is_wait_tensor(u)]
    return max((node, *completions), key=number.__getitem__)
