"""Random cycles: models that run in turns under one random legal plan, in their order or with jumps."""

from __future__ import annotations

import copy
import os
import random
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st
from random_programs import Bench, Choices, Runs, Spec, anywhere, choices, pooled, random_plan

from chunkflow_compile.passes.program.cycle import Call, Cycle, problem_of, write
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.arena_contents import ArenaContents
from chunkflow_compile.runtime.executor import Executor
from chunkflow_compile.weights.mapping import Descriptor
from chunkflow_compile.weights.peer_pieces import Pieces
from chunkflow_compile.weights.source import Bytes, DriveBytes, WeightFile

Turn = tuple[Program, torch.Tensor]
# The models of a cycle, the order of the calls, whether calls of one model share its weights, and the plan's choices.
Drawn = tuple[list[Spec], list[int], bool, Choices]
_CALLS = (
    st.lists(pooled, min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=2, max_size=4),
    st.booleans(),
)
# Cycles of weights in host memory, and cycles that also draw where the weights are.
cycles: st.SearchStrategy[Drawn] = st.tuples(*_CALLS, choices)
cycles_anywhere: st.SearchStrategy[Drawn] = st.tuples(*_CALLS, anywhere)


def in_a_file(values: Sequence[Bytes]) -> list[DriveBytes]:
    """These bytes, in a file that has no name."""
    with tempfile.TemporaryFile() as made:
        file, begins = WeightFile(Descriptor(os.dup(made.fileno())), "the file"), list[int]()
        for each in values:
            assert isinstance(each, torch.Tensor)
            begins.append(made.tell())
            made.write(bytes(each.tolist()))
    return [DriveBytes(file, begin, each.numel()) for begin, each in zip(begins, values, strict=True)]


class CycleBench(Runs):
    """A cycle of random models, with its weights."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        found, order, shared, self.chosen = drawn
        self.pieces: dict[str, Pieces] = {}
        self.benches = [Bench(spec, self.chosen) for spec in found]
        self.of = [self.benches[i % len(found)] for i in order]
        calls = []
        for number, bench in enumerate(self.of):
            prefix = f"{self.benches.index(bench)}." if shared else f"{number}."
            names = {w.name: prefix + w.name for w in bench.problem.weights}
            self.weights |= {names[n]: bench.weights[n] for n in names}
            self.pieces |= {names[n]: bench.pieces[n] for n in bench.pieces}
            calls.append(Call(bench.cut, names, {}))
        in_files = sorted(self.weights.keys() - self.pieces.keys())[::2] if self.chosen.drive else []
        self.files = dict(zip(in_files, in_a_file([super(CycleBench, self).source(n) for n in in_files]), strict=True))
        calls = [replace(call, in_files=frozenset(in_files).intersection(call.names.values())) for call in calls]
        self.calls = calls
        self.cycle = write(calls, random_plan(problem_of(calls), self.chosen, inside=True))
        self.states = weakref.WeakKeyDictionary[Arena, ArenaContents]()

    def source(self, name: str) -> Bytes:
        return self.pieces.get(name) or self.files.get(name) or super().source(name)

    def running(self, cycle: Cycle) -> CycleBench:
        """The bench for another cycle of the same calls, such as a mutated one."""
        other = copy.copy(self)
        other.cycle, other.states = cycle, weakref.WeakKeyDictionary()
        return other

    def turns(self, jumps: float, count: int) -> list[Turn]:
        """Calls in their order, with jumps to any other call at random."""
        rng, call = random.Random(self.chosen.seed), 0
        found = []
        for _ in range(count):
            if rng.random() < jumps:
                call = rng.randrange(len(self.of))
            found.append((self.cycle.calls[call], torch.randn_like(self.of[call].x)))
            call = (call + 1) % len(self.of)
        return found

    def expected(self, turns: Sequence[Turn]) -> list[torch.Tensor]:
        """The outputs of the models themselves."""
        number = {id(call): i for i, call in enumerate(self.cycle.calls)}
        return [self.of[number[id(program)]].model(x) for program, x in turns]

    def executor(self, program: Program, arena: Arena) -> Executor:
        state = self.states.setdefault(arena, ArenaContents(arena.streams, self.cycle.events))
        binding = self.bind(arena, self.cycle.plan, program.weight_inputs, state)
        return self.start(program, binding, cycle=self.cycle)
