"""Divides each exchange of a model into groups of attention heads; the ranks agree on the number of groups.

An exchange is an all-to-all before or after attention, as in Ulysses attention.  All ranks must divide an exchange in the
same way.  If one rank ran a different number of all-to-alls than the others, the ranks would receive wrong data or wait
forever.

Each rank posts a record in every process group that an exchange of the graph uses, and reads the records that the other ranks
of this process group have posted.  There are always two rounds.  Each rank posts its record in both rounds, even after an
error, because another rank may be waiting for the record.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunkflow_compile.passes.cutting import groups_for
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import collective_kind, group_name
from chunkflow_compile.passes.graph.exchanges import NoGroups
from chunkflow_compile.passes.graph.head_groups import in_head_groups
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.names import ExchangeGroups
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.weights.groups import Group, StoreEnded, group_named, numbers
from chunkflow_compile.weights.rounds import cause_of

# The keys of the record that a rank posts.  "wanted" is the value of the option exchange_groups.  "groups" is the number of
# groups of heads that the rank chooses.  "failed" is None, or a pair: the number of a rank that failed and its error message.
_WANTED, _GROUPS, _FAILED = "wanted", "groups", "failed"
_NOTE = "the exchanges of attention are"
# The number of times that a rank posts a record in each of its process groups.  Each record contains what the rank knows so
# far: the smallest number of groups of heads that any rank has chosen, and an error, if any.  In its first process group, the
# rank posts before it has read the records of the other process groups.  Therefore a second round over all of its process
# groups follows.
_ROUNDS = 2


@dataclass(frozen=True)
class _Choice:
    """The choice of this rank for the exchanges (all-to-alls around attention) of a graph.

    ``groups``: the number of groups of heads.  ``note``: a note for the user.  ``traced``: the graph; its exchanges are
    already divided if the user has passed the number of groups.  ``error``: the error because of which this rank cannot
    choose, or None.
    """

    groups: int
    note: str
    traced: Traced
    error: Exception | None = None


def agreed_groups(traced: Traced, settings: Settings, alone: bool = False) -> tuple[Traced, tuple[str, ...]]:
    """Divide the exchanges (all-to-alls around attention) of a graph into groups of heads, after the ranks have agreed on the
    number of groups.  Return the graph, and notes for the user.

    If the option exchange_groups is "auto", each rank chooses a number, and all ranks use the smallest of these numbers.
    ``alone``: whether only this rank compiles the graph, as in a survey (survey.py).  If so, the rank uses the number that it
    chooses itself.
    Raises ChunkflowError on all ranks if the ranks pass different values of exchange_groups, or if one of the ranks cannot
    divide its exchanges into the given number of groups.
    """
    wanted, exchanged = settings.goal.exchange_groups, _exchanged(traced)
    if not exchanged:
        return traced, ()
    groups = [] if alone else [group for name in exchanged if (group := group_named(name)) is not None]
    if not wanted:
        _post_none(groups, traced)
        return traced, ()
    mine = _choice(traced, settings)
    chosen = _agreed(groups, wanted, mine)
    note = mine.note
    if chosen < mine.groups:
        note = f"{note}; another rank chooses {chosen}, which all ranks use"
    divided = mine.traced if mine.traced.exchange_groups == chosen else in_head_groups(traced, chosen)
    return divided, (note,) if note else ()


def _choice(traced: Traced, settings: Settings) -> _Choice:
    """Choose the number of groups of heads for this rank."""
    wanted = settings.goal.exchange_groups
    try:
        if wanted == "auto":
            choice = groups_for(traced, settings)
            form = f"in {choice.groups} groups of heads" if choice.groups > 1 else "whole"
            return _Choice(choice.groups, f"{_NOTE} {form}: {choice.why}", traced)
        divided = in_head_groups(traced, wanted)
    except NoGroups as error:
        return _Choice(1, "", traced, NoGroups(f"exchange_groups={wanted}: {error}"))
    except Exception as error:  # noqa: BLE001  # raised again after it was posted for the other ranks
        return _Choice(1, "", traced, error)
    if divided.exchange_groups == 1 < wanted:
        return _Choice(1, f"exchange_groups={wanted} changes nothing here: no attention is between all-to-alls", traced)
    return _Choice(wanted, f"{_NOTE} in {wanted} groups of heads" if wanted > 1 else "", divided)


def _exchanged(traced: Traced) -> Collection[str]:
    """Return the names of the process groups that the all-to-alls in a graph use."""
    nodes = (node for node in traced.graph.graph.nodes if collective_kind(node) == "all-to-all")
    return dict.fromkeys(group_name(node) for node in nodes).keys()


def _occasion(traced: Traced) -> str:
    """Return the key under which the ranks post their records about a graph.  All ranks compute the same key."""
    names = "\n".join(parameter.name for parameter in traced.parameters)
    return f"exchange groups {hashlib.sha256(names.encode()).hexdigest()[:16]}"


def _rounds(groups: Sequence[Group]) -> Iterator[Group]:
    for _ in range(_ROUNDS):
        yield from groups


def _post_none(groups: Sequence[Group], traced: Traced) -> None:
    """Post records which say that this rank does not divide exchanges into groups of heads.  Do not wait for other ranks.

    If another rank divides exchanges, it reads these records and raises an error.
    """
    for group in _rounds(groups):
        with contextlib.suppress(StoreEnded):
            group.post(_occasion(traced), {_WANTED: False, _GROUPS: 1, _FAILED: None})


def _agreed(groups: Sequence[Group], wanted: ExchangeGroups, mine: _Choice) -> int:
    """Return the number of groups of heads that all ranks will use.

    Raises the error in ``mine`` if there is one, and ChunkflowError if the ranks cannot agree.
    """
    chosen, error, occasion = mine.groups, mine.error, _occasion(mine.traced)

    def post(group: Group) -> str:
        failed = None if error is None else _report(error, group.rank)
        return group.post(occasion, {_WANTED: wanted, _GROUPS: chosen, _FAILED: failed})

    for group in _rounds(groups):
        key = post(group)
        if error is not None:
            continue
        values = group.posted(key, group.timeout.total_seconds())
        try:
            chosen = min(chosen, _smallest(group, values))
        except ChunkflowError as found:
            error = found
        if group.missing(values):
            post(group)  # posted() has withdrawn the record of this rank: post it again for ranks that read it later
    if error is not None:
        raise error
    return chosen


class _ErrorOfRank(ChunkflowError):
    """An error on another rank.  ``rank``: the number of that rank.  ``cause``: the message of its error."""

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"Exchanges are not divided because of an error on rank {rank}: {cause}")
        self.rank, self.cause = rank, cause


def _report(error: Exception, rank: int) -> tuple[int, str]:
    """Return the number of the rank on which ``error`` has occurred, and the error message.

    ``rank``: the number of this rank.
    """
    return (error.rank, error.cause) if isinstance(error, _ErrorOfRank) else (rank, cause_of(error))


def _smallest(group: Group, values: Mapping[int, Any]) -> int:
    """Return the smallest number of groups of heads that the ranks of a process group have posted.

    ``values``: a mapping from each rank to its record.  Raises ChunkflowError if the ranks cannot agree.
    """
    for value in values.values():
        if value is not None and value[_FAILED] is not None:
            raise _ErrorOfRank(*value[_FAILED])
    if missing := group.missing(values):
        raise ChunkflowError(
            f"{numbers(missing).capitalize()} did not compile this graph within {group.timeout.total_seconds():g} s, and all "
            "ranks must divide its exchanges alike: call the same model on all ranks with inputs of the same sizes, so that "
            "all of them compile it, or none compiles it again (TORCH_LOGS=recompiles shows why a rank does)."
        )
    wanted: dict[int, ExchangeGroups] = {rank: value[_WANTED] for rank, value in values.items()}
    if len({*wanted.values()}) > 1:
        said = ", ".join(f"{value!r} on rank {rank}" for rank, value in sorted(wanted.items()))
        raise ChunkflowError(
            f"The ranks pass different values of exchange_groups ({said}): pass the same on all of them."
        )
    return min(int(value[_GROUPS]) for value in values.values())
