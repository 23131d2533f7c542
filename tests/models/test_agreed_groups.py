"""The ranks agree on the number of groups of heads, and no rank waits for one that has failed or does not come.

Each rank is a thread.  The first two ranks exchange heads, and so do the last two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import UlyssesStack, fake_ranks
from torch.fx import Graph, GraphModule

from chunkflow_compile.frontend import exchange_groups
from chunkflow_compile.frontend.exchange_groups import agreed_groups
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.discover import collective_kind
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.placement.exchanging import GroupChoice
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.weights.groups import Group

MEMBERS = {"first": (0, 1), "last": (1, 2)}
# The process groups of the exchanges in the graph of each rank.
GROUPS = [("first",), ("first", "last"), ("last",)]
HANGS = 60.0

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture(scope="module")
def traced() -> Traced:
    with fake_ranks():
        return trace(UlyssesStack(2, 32, 4), {"x": torch.randn(4, 32)}, 0)


def of_rank(traced: Traced, rank: int) -> Traced:
    """The graph whose exchanges are in the process groups of a rank."""
    graph, values, names = Graph(), dict[Any, Any](), cycle(GROUPS[rank])
    for node in traced.graph.graph.nodes:
        values[node] = copy = graph.node_copy(node, values.__getitem__)
        if collective_kind(node) is not None:
            copy.args = (*copy.args[:3], next(names))
    return replace(traced, graph=GraphModule(traced.graph, graph))


class Ranks:
    """Ranks that are threads.  ``timeout_s``: seconds for which a rank waits for the others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, traced: Traced) -> None:
        self.timeout_s = 10 * HANGS
        self._traced, self._store, self._local = traced, dist.HashStore(), threading.local()
        monkeypatch.setattr(exchange_groups, "group_named", self._group)
        monkeypatch.setattr(exchange_groups, "groups_for", lambda traced, settings: self._local.choose())
        monkeypatch.setattr(exchange_groups, "in_head_groups", lambda t, n: replace(t, exchange_groups=n))

    def _group(self, name: str) -> Group:
        return Group(self._store, self._local.rank, MEMBERS[name], timedelta(seconds=self.timeout_s))

    def agree(self, options: Sequence[Any], choices: Sequence[Any] = (1, 1, 1)) -> list[Any]:
        """The number of groups or the error of each rank; None for a rank that takes no part.

        ``options``: what each rank passes, or None.  ``choices``: the numbers that they choose, or their errors.
        """
        results: list[Any] = [None] * len(options)

        def choose(choice: int | Exception) -> GroupChoice:
            if isinstance(choice, Exception):
                raise choice
            return GroupChoice(choice, "chosen")

        def work(rank: int) -> None:
            self._local.rank, self._local.choose = rank, lambda: choose(choices[rank])
            settings = Settings(hardware=load_profile("cpu"), goal=Goal(exchange_groups=options[rank]))
            try:
                results[rank] = agreed_groups(of_rank(self._traced, rank), settings)[0].exchange_groups
            except Exception as error:  # noqa: BLE001 - the test reads it
                results[rank] = error

        threads = [
            threading.Thread(target=work, args=(rank,), daemon=True)
            for rank, option in enumerate(options)
            if option is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS)
            assert not thread.is_alive(), "a rank waits"
        return results


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, traced: Traced) -> Ranks:
    return Ranks(monkeypatch, traced)


AUTO = ("auto",) * 3


@pytest.mark.parametrize("choices", [(4, 4, 2), (2, 4, 4), (4, 2, 4), (1, 2, 4)])
def test_the_smallest_number_reaches_ranks_of_other_groups(choices: tuple[int, ...], ranks: Ranks) -> None:
    for _ in range(2):
        assert ranks.agree(AUTO, choices) == [min(choices)] * 3


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("make", [ValueError, ChunkflowError])
def test_an_error_reaches_all_ranks(rank: int, make: Callable[[str], Exception], ranks: Ranks) -> None:
    """Whatever the error, no other rank waits, and all of them can agree afterwards."""
    mine = make("it is broken")
    choices = [mine if r == rank else 2 for r in range(3)]
    for other, found in enumerate(ranks.agree(AUTO, choices)):
        assert found is mine if other == rank else isinstance(found, ChunkflowError)
        assert other == rank or f"because of an error on rank {rank}: " in str(found)
        assert str(found).endswith("it is broken")
    assert ranks.agree(AUTO, (2, 2, 2)) == [2] * 3


def test_a_rank_without_the_option(ranks: Ranks) -> None:
    first, middle, last = ranks.agree((2, 2, False))
    assert last == 1 and isinstance(middle, ChunkflowError) and isinstance(first, ChunkflowError)
    assert "different values of exchange_groups (2 on rank 1, False on rank 2)" in str(middle)
    assert str(first) == f"Exchanges are not divided because of an error on rank 1: {middle}"
    assert ranks.agree((2, 2, 2)) == [2] * 3


def test_a_rank_that_compiles_alone(ranks: Ranks) -> None:
    """Its error names the causes.  A rank that comes later does not wait for it."""
    ranks.timeout_s = 0.0
    (error, *_) = ranks.agree((2, None, None))
    assert str(error).startswith(
        "Rank 1 did not compile this graph within 0 s, and all ranks must divide its exchanges "
    )
    assert "TORCH_LOGS=recompiles" in str(error)
    ranks.timeout_s = 10 * HANGS
    (_, late, last) = ranks.agree((None, 2, 2))
    assert str(late) == str(last) == f"Exchanges are not divided because of an error on rank 0: {error}"
    assert ranks.agree((4, 4, 4)) == [4] * 3
