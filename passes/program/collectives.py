"""Collectives: proves that compute and concurrent collectives do not conflict in memory.

* Compute waits for the end of every collective, unless the collective is synchronous.
* No op reads the result of a collective before the collective has ended.
* While an op writes to memory, no other op uses this memory.  A collective uses its operands and its results from its
  start to its end.  If one of two ops writes to memory that both ops use, the two ops run in the order of the traced graph.
  The schema of an op says which memory the op writes to (memory.py).
* No value is released while a collective may use it.  No op reads a value after its release, except the region that takes the
  value over.  The checked releases are exactly the releases that the executor carries out.

Contract
    The checks read only a program and its order, and do not trust the passes that made them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from chunkflow_compile.passes.graph.discover import awaited, collective_kind, is_wait_tensor, list_of
from chunkflow_compile.passes.step import released_by

from .happens_before import HappensBefore
from .memory import Memory
from .rewrite import Program, issued, source_of


def check_collectives(program: Program, memory: Memory, order: HappensBefore | None = None) -> Iterator[str]:
    """Yield a sentence for each violation that involves the collectives or the releases of a program.  ``order``: order of
    this program alone, or None if it has not been computed yet."""
    yield from _check_readers_of_released(program)
    if not any(collective_kind(node) is not None for node in program.module.graph.nodes):
        return
    order = order or HappensBefore((program,), 1)
    completions: dict[str, str] = {}
    for node in program.module.graph.nodes:
        for collective in awaited(node) if is_wait_tensor(node) else ():
            completions.setdefault(collective.name, node.name)
    for step in range(order.steps):
        ops = {each.label: i for i, each in enumerate(order.ops) if each.step == step and each.is_node}
        checks = _StepCollectives(program, order, memory, completions, ops)
        yield from checks.check_completions()
        yield from checks.check_readers()
        yield from checks.check_memory()
        yield from checks.check_releases(step)


def _check_readers_of_released(program: Program) -> Iterator[str]:
    """Check that no op reads a value after its release.  A region may read the values that are released directly before it
    runs, because it takes these values over and frees them itself."""
    names = {node.name for node in program.module.graph.nodes}
    for at, values in program.releases.items():
        for value in values:
            if at not in names or value not in names:
                yield f"{value}: its release comes after {at}, and one of these is not in the program"
    released: dict[str, Node] = {}
    for node, ops in issued(program):
        taken: tuple[str, ...] = ()  # the values that the next op takes over if it runs a region
        for op in ops:
            if values := released_by(op):
                taken = values
                released |= dict.fromkeys(taken, node)
                continue
            for value in (operand.name for operand in node.all_input_nodes):
                if value in released and not (node.op == "call_module" and value in taken):
                    yield _late(value, node.name, released.pop(value))
            taken = ()


def _late(value: str, reader: str, at: Node) -> str:
    """Return the sentence for an op that reads a value after its release.  ``at``: node at which the value is released."""
    if at.op == "call_module":
        return f"{value}: {reader} reads it after {at.name} has taken it; missing edge: {reader} -> {at.name}"
    return (
        f"{value}: {reader} reads it after its release, which comes after {at.name}; missing edge: "
        f"{reader} -> release of {value}"
    )


@dataclass(frozen=True)
class _StepCollectives:
    """The checks of one step.  ``completions``: for each collective, the first node that waits for its end.  ``ops``: for
    each node, the index of its op.  ``reported``: pairs of nodes for which a violation has already been reported.
    """

    program: Program
    order: HappensBefore
    memory: Memory
    completions: Mapping[str, str]
    ops: Mapping[str, int]
    reported: set[tuple[str, str]] = field(default_factory=set)

    def check_completions(self) -> Iterator[str]:
        for op in (i for i in self.ops.values() if self.order.ops[i].starts):
            if not any(True for _ in self.order.graph.successors(op)):
                name = self.order.ops[op].label
                yield f"{name}: nothing completes {self.order.ops[op]}; missing edge: {name} -> wait_tensor"

    def check_readers(self) -> Iterator[str]:
        """Check that the results of a collective are read after its end.

        Two kinds of nodes need not come after the end, because they read no bytes: the node that waits for the end, and nodes
        that only take one element from the list of the collective's results.
        """
        order = self.order
        for node in self.program.module.graph.nodes:
            written = self.ops.get(node.name)
            if written is None or order.ops[written].stream != "collective":
                continue
            for user in node.users:
                read = self.ops.get(user.name)
                if read is None or is_wait_tensor(user) or list_of(user) is not None:
                    continue
                if not order.ordered(written, read):
                    self.reported.add((order.ops[written].collectives[0], user.name))
                    yield (
                        f"{node.name}: {order.ops[read]} may read before {order.ops[written]} is over; missing edge: "
                        f"{self._end(written)} -> {order.ops[read].label}"
                    )

    def check_memory(self) -> Iterator[str]:
        """If a collective and another op use the same memory, and one of the two writes to it, check that the two are
        ordered."""
        users: dict[str, list[str]] = {}
        for name in self.ops:
            if uses := self.memory.uses.get(name):
                for place in uses.reads | uses.writes:
                    users.setdefault(place, []).append(name)
        turns = _turns(self.program)
        for name, uses in self.memory.uses.items():
            if name not in self.ops or not self.order.ops[self.ops[name]].starts:
                continue
            for place in sorted(uses.reads | uses.writes):
                for other in users[place]:
                    if place not in uses.writes and place not in self.memory.uses[other].writes:
                        continue
                    first, then = self._sorted(name, other, turns)
                    if other != name and (first, then) not in self.reported:
                        self.reported.add((first, then))
                        yield from self._check_pair(first, then, place)

    def _sorted(self, one: str, other: str, turns: Mapping[str, tuple[int, int, int]]) -> tuple[str, str]:
        """Return two nodes in the order of the traced graph.  If one of them is not in the traced graph, return them in
        the order of issue."""
        if one in turns and other in turns:
            return (one, other) if turns[one] < turns[other] else (other, one)
        return (one, other) if self.ops[one] < self.ops[other] else (other, one)

    def _check_pair(self, first: str, then: str, place: str) -> Iterator[str]:
        before, after = self.ops[first], self.ops[then]
        if self.order.ordered(before, after):
            return
        ops, earlier, later = self.order.ops, self.memory.uses[first], self.memory.uses[then]
        edge = f"missing edge: {self._end(before)} -> {ops[after].label}"
        value = self._value(first if ops[before].starts else then, place)
        if place in later.writes:
            doing = "writes" if place in earlier.writes else "reads"
            yield f"{value}: {ops[after]} may write it while {ops[before]} still {doing} it; {edge}"
        else:
            yield f"{value}: {ops[after]} may read it before {ops[before]} has written it; {edge}"

    def _value(self, collective: str, place: str) -> str:
        """Return the name of the operand or result of a collective that may be stored in the memory ``place``."""
        node = next(n for n in self.program.module.graph.nodes if n.name == collective)
        return next((n.name for n in (*node.all_input_nodes, node) if place in self.memory.of[n.name]), place)

    def check_releases(self, step: int) -> Iterator[str]:
        """Check that a value is released only after every collective that uses it has ended."""
        order = self.order
        nodes = {node.name: node for node in self.program.module.graph.nodes}
        for i, each in enumerate(order.ops):
            if each.step != step:
                continue
            for value in (v for v in each.releases if v in nodes):
                for user in (nodes[value], *nodes[value].users):
                    used = self.ops.get(user.name, i)
                    if order.ops[used].stream == "collective" and not order.ordered(used, i):
                        yield (
                            f"{value}: {each} comes before {order.ops[used]} is over; missing edge: "
                            f"{self._end(used)} -> {each.label}"
                        )

    def _end(self, op: int) -> str:
        """Return the text for the start of an edge that is missing after an op: the name of the op.  For a collective, the
        name of the node that waits for its end follows."""
        used = self.order.ops[op]
        if used.stream != "collective":
            return used.label
        return f"{used.label} -> {self.completions.get(used.collectives[0], 'wait_tensor')}"


def _turns(program: Program) -> dict[str, tuple[int, int, int]]:
    """Return sort keys that put the regions and collectives of a program in the order of the traced graph."""
    places = {r.name: (r.index, 1, 0) for r in program.problem.regions}
    places |= {c.name: (c.before, 0, i) for i, c in enumerate(program.problem.collectives)}
    sources = {node.name: source_of(node) for node in program.module.graph.nodes}
    return {name: places[source] for name, source in sources.items() if source in places}
