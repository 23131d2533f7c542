"""Lifetimes of the values of a step: after which node each is no longer needed."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from chunkflow_compile.passes.graph.discover import collective_kind, is_wait_tensor


def releases(number: Mapping[Node, int]) -> dict[Node, list[int]]:
    """Node -> the values, by ``number``, that are dropped after it.

    The compute stream drops a value after its last reader.  If that is a collective, it does so after the collective's
    completion, for which compute has waited.  Outputs are not dropped, because the caller gets them.
    """
    release: dict[Node, list[int]] = {}
    for node, value in number.items():
        ends = [over(reader, number) for reader in node.users if reader in number]
        last = max(ends, key=number.__getitem__, default=node)
        if node.op != "output" and last.op != "output":
            release.setdefault(last, []).append(value)
    return release


def over(reader: Node, number: Mapping[Node, int]) -> Node:
    """The node after which ``reader`` has read its operands: the last completion of a collective, else ``reader``."""
    if collective_kind(reader) is None:
        return reader
    completions = [u for v in (reader, *reader.users) for u in v.users if is_wait_tensor(u)]
    return max(completions, key=number.__getitem__, default=reader)
