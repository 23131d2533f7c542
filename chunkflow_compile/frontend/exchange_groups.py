"""Exchange groups: the number of groups of heads on which the ranks of a model agree.

All ranks of an exchange must divide it alike: another number of all-to-alls on one of them would mix up their data, or let
the others wait without end.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import collective_kind, group_name
from chunkflow_compile.passes.graph.exchanges import NoGroups, exchanges
from chunkflow_compile.passes.graph.head_groups import in_head_groups
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.names import ExchangeGroups
from chunkflow_compile.passes.pipeline import Settings, groups_for
from chunkflow_compile.weights.groups import Group, StoreEnded, group_named, numbers

# Fields of the record that a rank posts: the value of the option, the number of groups that it means here, and the reason
# if there is none.
_WANTED, _GROUPS, _FAILED = "wanted", "groups", "failed"
_NOTE = "the exchanges of attention are"


def agreed_groups(traced: Traced, settings: Settings) -> tuple[ExchangeGroups, tuple[str, ...]]:
    """The number of groups that all ranks take for this graph, False for none, and what there is to say of it.

    Where each rank may choose, all take the smallest number that one chooses.  Raises ChunkflowError, on all ranks, if the
    ranks pass different values of the option, or if one of them cannot divide its exchanges as it is told to.
    """
    wanted, exchanged = settings.goal.exchange_groups, _exchanged(traced)
    if not exchanged:
        return False, ()
    groups = [group for name in exchanged if (group := group_named(name)) is not None]
    if not wanted:
        _tell(groups, traced)
        return False, ()
    chosen, note, failed = _chosen(traced, settings)
    for group in groups:
        chosen = min(chosen, _meet(group, traced, {_WANTED: wanted, _GROUPS: chosen, _FAILED: failed and str(failed)}))
    if failed is not None:
        raise failed
    return chosen > 1 and chosen, (note,) if note else ()


def _chosen(traced: Traced, settings: Settings) -> tuple[int, str, NoGroups | None]:
    """The number of groups that this rank takes, a note on it, and why it cannot take the one that it is given."""
    wanted = settings.goal.exchange_groups
    if wanted == "auto":
        choice = groups_for(traced, settings)
        form = f"in {choice.groups} groups of heads" if choice.groups > 1 else "whole"
        return choice.groups, f"{_NOTE} {form}: {choice.why}", None
    try:
        if wanted > 1 and not exchanges(traced.graph.graph):
            return 1, f"exchange_groups={wanted} changes nothing here: no attention is between all-to-alls", None
        in_head_groups(traced, wanted)
    except NoGroups as error:
        return 1, "", NoGroups(f"exchange_groups={wanted}: {error}")
    return wanted, f"{_NOTE} in {wanted} groups of heads" if wanted > 1 else "", None


def _exchanged(traced: Traced) -> Collection[str]:
    """The process groups of the all-to-alls of a graph."""
    nodes = (node for node in traced.graph.graph.nodes if collective_kind(node) == "all-to-all")
    return dict.fromkeys(group_name(node) for node in nodes).keys()


def _occasion(traced: Traced) -> str:
    """The same on all ranks for the same part of a model."""
    names = "\n".join(parameter.name for parameter in traced.parameters)
    return f"exchange groups {hashlib.sha256(names.encode()).hexdigest()[:16]}"


def _tell(groups: Collection[Group], traced: Traced) -> None:
    """Let ranks that want groups know that this one does not, without waiting for them."""
    for group in groups:
        with contextlib.suppress(StoreEnded):
            group.post(_occasion(traced), {_WANTED: False, _GROUPS: 1, _FAILED: None})


def _meet(group: Group, traced: Traced, mine: Mapping[str, Any]) -> int:
    """The number of groups that the ranks of a process group take.  Raises ChunkflowError if they cannot agree."""
    key = group.post(_occasion(traced), mine)
    values = group.posted(key, group.timeout.total_seconds())
    if missing := group.missing(values):
        raise ChunkflowError(
            f"{numbers(missing).capitalize()} did not say into how many groups of heads exchanges are divided: compile the "
            "same model on all ranks."
        )
    for rank, value in values.items():
        if value[_FAILED] and not mine[_FAILED]:
            raise ChunkflowError(f"Rank {rank} cannot divide its exchanges: {value[_FAILED]}")
    wanted: dict[int, ExchangeGroups] = {rank: value[_WANTED] for rank, value in values.items()}
    if len({*wanted.values()}) > 1:
        said = ", ".join(f"{value!r} on rank {rank}" for rank, value in sorted(wanted.items()))
        raise ChunkflowError(
            f"The ranks pass different values of exchange_groups ({said}): pass the same on all of them."
        )
    return min(int(value[_GROUPS]) for value in values.values())
