"""Values of a step: behind which node nobody needs one any more."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from chunkflow_compile.passes.graph.discover import collective_kind, is_wait_tensor


def releases(number: Mapping[Node, int]) -> dict[Node, list[int]]:
    """Node -> the values, by ``number``, that are dropped behind it.

    Compute drops them, behind their last reader; what a collective reads, behind its completion, where compute has
    waited for it.  The outputs themselves stay: the caller takes them.
    """
    release: dict[Node, list[int]] = {}
    for node, value in number.items():
        ends = [over(reader, number) for reader in node.users if reader in number]
        last = max(ends, key=number.__getitem__, default=node)
        if node.op != "output" and last.op != "output":
            release.setdefault(last, []).append(value)
    return release


def over(reader: Node, number: Mapping[Node, int]) -> Node:
    """The node behind which ``reader`` has read its operands: the completion of a collective, any other itself."""
    if collective_kind(reader) is None:
        return reader
    completions = [u for v in (reader, *reader.users) for u in v.users if is_wait_tensor(u)]
    return max(completions, key=number.__getitem__, default=reader)
