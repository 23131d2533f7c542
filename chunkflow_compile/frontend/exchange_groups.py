"""Exchange groups: the ranks of a model agree into how many groups of attention heads each exchange is divided.

All ranks must divide an exchange in the same way.  If one rank ran a different number of all-to-alls than the others, the
ranks would receive wrong data or wait forever.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from chunkflow_compile.passes.cutting import groups_for
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import collective_kind, group_name
from chunkflow_compile.passes.graph.exchanges import NoGroups, exchanges
from chunkflow_compile.passes.graph.head_groups import in_head_groups
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.names import ExchangeGroups
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.weights.groups import Group, StoreEnded, group_named, numbers

# The fields of the record that a rank posts: the value of the option, the number of groups that the rank chooses, and the
# error if the rank cannot divide its exchanges (otherwise None).
_WANTED, _GROUPS, _FAILED = "wanted", "groups", "failed"
_NOTE = "the exchanges of attention are"


def agreed_groups(traced: Traced, settings: Settings, alone: bool = False) -> tuple[ExchangeGroups, tuple[str, ...]]:
    """Return the number of groups that all ranks use for this graph, and notes for the user.

    The number is False if exchanges are not divided.
    ``alone``: whether only this rank compiles the graph, as in a survey: it uses its own choice then.
    With "auto", each rank chooses a number, and all ranks use the smallest of these numbers.
    Raises ChunkflowError on all ranks if the ranks pass different values of the option, or if one of the ranks cannot divide
    its exchanges into the given number of groups.
    """
    wanted, exchanged = settings.goal.exchange_groups, _exchanged(traced)
    if not exchanged:
        return False, ()
    groups = [] if alone else [group for name in exchanged if (group := group_named(name)) is not None]
    if not wanted:
        _post_none(groups, traced)
        return False, ()
    mine, note, failed = _chosen(traced, settings)
    chosen = mine
    # A rank in several groups passes on the smallest number that it has seen.  After two rounds, all ranks of a mesh have the
    # smallest number of all.
    for group in groups * min(len(groups), 2):
        chosen = min(chosen, _agree(group, traced, {_WANTED: wanted, _GROUPS: chosen, _FAILED: failed and str(failed)}))
    if chosen < mine:
        note = f"{note}; another rank chooses {chosen}, which all ranks use"
    if failed is not None:
        raise failed
    return chosen > 1 and chosen, (note,) if note else ()


def _chosen(traced: Traced, settings: Settings) -> tuple[int, str, NoGroups | None]:
    """Return the number of groups that this rank chooses, a note on this choice, and an error or None.

    There is an error if exchanges cannot be divided into the number of groups that the user has passed.
    """
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
    """Return the names of the process groups that the all-to-alls in a graph use."""
    nodes = (node for node in traced.graph.graph.nodes if collective_kind(node) == "all-to-all")
    return dict.fromkeys(group_name(node) for node in nodes).keys()


def _occasion(traced: Traced) -> str:
    """Return a store key for this part of the model.  The key is the same on all ranks."""
    names = "\n".join(parameter.name for parameter in traced.parameters)
    return f"exchange groups {hashlib.sha256(names.encode()).hexdigest()[:16]}"


def _post_none(groups: Collection[Group], traced: Traced) -> None:
    """Post that this rank does not divide exchanges, without waiting for other ranks.

    If another rank does divide exchanges, it reads this record and raises an error.
    """
    for group in groups:
        with contextlib.suppress(StoreEnded):
            group.post(_occasion(traced), {_WANTED: False, _GROUPS: 1, _FAILED: None})


def _agree(group: Group, traced: Traced, mine: Mapping[str, Any]) -> int:
    """Return the number of groups that the ranks of a process group agree on.

    Raises ChunkflowError if the ranks cannot agree.  ``mine``: the record of this rank.
    """
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
