"""Tenants: the programs that run in an arena, alone or in cycles."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Protocol

from torch.fx import GraphModule

from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.program.verify import verify_together


class Owner(Protocol):
    """The interface of a program or a cycle whose weights are in the memory of an arena."""

    def unbind(self) -> None:
        """Wait for work in flight.  Then drop every reference to the arena's memory, so that this memory can be freed."""


class Tenant(Owner, Protocol):
    """The interface of a program that runs in an arena, alone or as part of cycles.

    ``budget``: a pair, which consists of an id of the program's model and of the maximum bytes that the offloaded weights of
    this model may occupy on the device.  The bytes are None if there is no limit.  If the program has no influence on the
    limit of the arena's memory, ``budget`` is None instead of a pair.  ``reads``: ids of the weights that the program reads;
    programs that read the same weights have the same ids.  ``stale``: whether the program can never run again, because one of
    its weights was dropped, moved or stored in other memory.
    """

    @property
    def program(self) -> Program: ...

    @property
    def budget(self) -> tuple[int, int | None] | None: ...

    @property
    def reads(self) -> tuple[int, ...]: ...

    @property
    def stale(self) -> bool: ...

    def close(self) -> None:
        """End the program.  Afterwards, the program can never run again."""


class Tenants:
    """Weak references to the programs that run in an arena, and the pairs of programs that have been verified together.

    Not thread-safe: the caller holds the lock of the arena.
    """

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Tenant]] = []
        self._proved: weakref.WeakKeyDictionary[GraphModule, weakref.WeakSet[GraphModule]] = weakref.WeakKeyDictionary()

    @property
    def programs(self) -> list[Tenant]:
        """The programs that still exist, oldest first."""
        return [program for ref in self._refs if (program := ref()) is not None]

    def add(self, program: Tenant, when_collected: Callable[[object], None]) -> None:
        """Add a program.  ``when_collected``: a function to call after the program was garbage-collected."""
        self._refs.append(weakref.ref(program, when_collected))

    def remove(self, program: Tenant) -> None:
        self._refs = [ref for ref in self._refs if ref() is not program]

    def prune(self) -> bool:
        """Forget the programs that were garbage-collected; return whether any program is left."""
        self._refs = [ref for ref in self._refs if ref() is not None]
        return bool(self._refs)

    def prove(self, program: Program) -> None:
        """Verify a program together with each program of the arena.  Each pair of modules is verified only once.

        Raises FindingError if two programs cannot safely share an arena.
        """
        mine = program.module
        for other in (tenant.program for tenant in self.programs):
            theirs = other.module
            if theirs is not mine and mine not in self._proved.setdefault(theirs, weakref.WeakSet()):
                verify_together(other, program)
                self._proved[theirs].add(mine)
                self._proved.setdefault(mine, weakref.WeakSet()).add(theirs)

    def close_stale(self) -> None:
        """End each stale program (see :class:`Tenant`), for example the programs that read a weight of a deleted adapter.
        An ended program keeps no references to its weights, so its other weights can be freed, too."""
        stale: dict[tuple[int, ...], bool] = {}  # a cache, because several programs read the same weights
        for program in self.programs:
            if program.reads not in stale:
                stale[program.reads] = program.stale
            if stale[program.reads]:
                program.close()

    def most_bytes(self) -> float:
        """Return the sum of the budgets of all models; infinity if a model has no limit.

        The budget of a model is the smallest budget of its programs, because a program with larger activations leaves less
        memory for weights.  If any program of a model has no limit, the model has no limit.
        """
        budgets: dict[int, float] = {}
        for program in self.programs:
            if program.budget is None:
                continue
            model, budget = program.budget
            most_bytes = math.inf if budget is None else budget
            unlimited = math.inf in (most_bytes, budgets.get(model))
            budgets[model] = math.inf if unlimited else min(most_bytes, budgets.get(model, most_bytes))
        return sum(budgets.values())
