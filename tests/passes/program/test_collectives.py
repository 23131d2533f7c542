"""Compute and collectives keep out of each other's memory: what the verifier accepts, and the sentences for the rest."""

from __future__ import annotations

import copy
import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import mutations
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # defines _dtensor::shard_dim_alltoall for fake tensors
from helpers import Coalesced, UlyssesStack, cut_of, fake_ranks, plan_of
from mutations import Mutation
from torch import nn
from torch.fx import Graph, GraphModule, Node

from chunkflow_compile.passes.graph.discover import completion_of
from chunkflow_compile.passes.program.collectives import check_collectives
from chunkflow_compile.passes.program.happens_before import HappensBefore
from chunkflow_compile.passes.program.lifetimes import releases
from chunkflow_compile.passes.program.memory import effects_of, program_memory
from chunkflow_compile.passes.program.rewrite import Program, issued, rewrite
from chunkflow_compile.passes.program.verify import check, verify
from chunkflow_compile.passes.step import Evaluate, Finish, Release, Run, Start

OPS = torch.ops._c10d_functional


class Beside(nn.Module):
    """A region, ``side``, beside an all-reduce: it reads what the all-reduce sends, and that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side, self.down = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.group = dist.group.WORLD.group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        moved = OPS.all_reduce(hidden.view(-1), "sum", self.group)
        beside = torch.relu(self.side(hidden))
        return self.down(OPS.wait_tensor(moved).view(x.shape)) + beside


class Sharded(nn.Module):
    """DTensor's all-to-all, which completes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.group = dist.group.WORLD.group_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.ops._dtensor.shard_dim_alltoall(self.up(x), 0, 1, self.group).reshape(-1, 32))


@cache  # tests change copies of it
def program_of(make: Callable[[], nn.Module]) -> Program:
    torch._dynamo.reset()
    with fake_ranks():
        cut = cut_of(make(), torch.randn(4, 32))
    program = rewrite(cut, plan_of(cut.problem))
    verify(program)
    return program


def copied(make: Callable[[], nn.Module]) -> Program:
    program = program_of(make)
    return replace(program, module=copy.deepcopy(program.module))


def violations(program: Program) -> list[str]:
    """Those of the collectives alone."""
    return list(check_collectives(program, program_memory(program)))


def node(program: Program, name: str) -> Node:
    return next(n for n in program.module.graph.nodes if n.name == name)


MUTATIONS: dict[Mutation, str] = {
    mutations.remove_a_completion: r"(all_to_all\w*): nothing completes \1 \(step 0\); missing edge: \1 -> wait_tensor$",
    mutations.complete_after_the_reader: (
        r"(all_to_all\w*): (region_\d) \(step 0\) may read before \1 \(step 0\) is over; "
        r"missing edge: \1 -> wait_tensor\w* -> \2$"
    ),
    mutations.complete_another_collective: (
        r"(all_to_all\w*): (region_\d) \(step 0\) may read before \1 \(step 0\) is over; "
        r"missing edge: \1 -> wait_tensor -> \2$"
    ),
    mutations.release_before_the_completion: (
        r"(\w+): release of \1 \(step 0\) comes before (all_to_all\w*) \(step 0\) is over; "
        r"missing edge: \2 -> wait_tensor\w* -> release of \1$"
    ),
    mutations.release_before_the_reader: (
        r"(\w+): (\w+) reads it after its release, which comes after \1; missing edge: \2 -> release of \1$"
    ),
    mutations.take_before_another_reader: (
        r"(\w+): (region_\d) reads it after (region_\d) has taken it; missing edge: \2 -> \3$"
    ),
    mutations.write_beside_a_collective: (
        r"\w+: (zero\w*) \(step 0\) may write it while (all_to_all\w*) \(step 0\) still reads it; "
        r"missing edge: \2 -> wait_tensor\w* -> \1$"
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_every_mutation_is_refused_with_the_missing_edge(mutation: Mutation) -> None:
    for seed in range(5):
        broken = mutation(copied(UlyssesStack), random.Random(seed))
        assert broken is not None
        found = violations(broken)
        assert any(re.match(MUTATIONS[mutation], v) for v in found), found
        assert set(found) <= set(check(broken))


def test_a_region_takes_no_value_that_a_collective_still_reads() -> None:
    """The region is the last to read it in the order of issue, but it does not come after the completion."""
    program = copied(Beside)
    assert hidden_of(program) in program.releases["region_1"], "the collective reads a view, which stays"
    sent = node(program, "all_reduce").all_input_nodes[0].name
    assert sent in program.releases["wait_tensor"]
    edge = f"missing edge: all_reduce -> wait_tensor -> release of {sent}"
    told = f"{sent}: release of {sent} (step 0) comes before all_reduce (step 0) is over; {edge}"
    assert violations(mutations.released(program, sent, "region_1")) == [told]


def test_values_are_released_before_the_region_that_reads_them_last_and_after_any_other_reader() -> None:
    ops = {node.name: ops for node, ops in issued(program_of(Beside))}
    assert ops["region_1"] == (Release(("side_weight", "mm")), Run(1))
    assert ops["relu"] == (Evaluate("compute", "relu"), Release(("region_1",)))
    assert ops["wait_tensor"] == (Finish(0), Release(("view", "all_reduce")))


def test_a_region_may_read_what_a_collective_reads_beside_it() -> None:
    program = program_of(Beside)
    names = [n.name for n in program.module.graph.nodes]
    assert names.index("all_reduce") < names.index("region_1") < names.index("wait_tensor")


def writing(program: Program, region: str, value: str) -> Program:
    """The program with a region that sets one of its inputs to zero."""
    call = node(program, region)
    target = str(call.target)
    module = copy.deepcopy(program.regions[target].module)
    inputs = module.graph.find_nodes(op="placeholder")
    with module.graph.inserting_after(inputs[-1]):
        module.graph.call_function(torch.ops.aten.zero_.default, (inputs[call.args.index(node(program, value))],))
    return replace(program, regions={**program.regions, target: replace(program.regions[target], module=module)})


def hidden_of(program: Program) -> str:
    """What the region beside the collective reads."""
    return next(a.name for a in node(program, "region_1").all_input_nodes if a.op == "call_function")


def test_a_region_that_writes_what_a_collective_reads_is_refused() -> None:
    """The region writes the matrix; the collective sends a view of it."""
    program = copied(Beside)
    sent, hidden = node(program, "all_reduce").all_input_nodes[0].name, hidden_of(program)
    assert sent != hidden
    edge = "all_reduce -> wait_tensor -> region_1"
    told = f"{sent}: region_1 (step 0) may write it while all_reduce (step 0) still reads it; missing edge: {edge}"
    broken = writing(program, "region_1", hidden)
    assert violations(broken) == [told]
    node(broken, "region_1").prepend(node(broken, "wait_tensor"))  # now it is completed before
    broken = replace(broken, releases=releases(broken.module.graph))
    assert violations(broken) == []


def test_a_region_that_writes_before_the_collective_reads_is_refused() -> None:
    """Nothing runs at once, but the collective sends other bytes than in the traced graph."""
    program = copied(Beside)
    broken = writing(program, "region_1", hidden_of(program))
    region, collective = node(broken, "region_1"), node(broken, "all_reduce")
    for moved in (region, *region.users):
        collective.prepend(moved)
    found = violations(replace(broken, releases=releases(broken.module.graph)))
    assert any("region_1 (step 0) may write it while all_reduce (step 0) still reads it" in v for v in found), found


def test_a_buffer_that_a_collective_writes_is_not_read_beside_it() -> None:
    program = copied(Beside)
    node(program, "all_reduce").target = OPS.all_reduce_.default
    sent = node(program, "all_reduce").all_input_nodes[0].name
    edge = "all_reduce -> wait_tensor -> region_1"
    told = f"{sent}: region_1 (step 0) may read it before all_reduce (step 0) has written it; missing edge: {edge}"
    assert violations(program) == [told]


def test_a_region_does_not_write_a_streamed_weight() -> None:
    program = copied(Beside)
    weight = next(w.name for w in program.plan.streamed)
    placeholder = program.weight_inputs[weight]
    reader = next(iter(node(program, placeholder).users)).name
    told = f"{weight}: {reader} writes it, but its slot is filled from host memory only"
    assert told in list(check(writing(program, reader, placeholder)))


def test_a_collective_that_completes_itself() -> None:
    program = program_of(Sharded)
    order = HappensBefore((program,), 1)
    found = [(type(each.op), each.label) for each in order.ops if each.collectives or isinstance(each.op, Release)]
    name = "shard_dim_alltoall"
    assert [pair for pair in found if pair[0] is not Release] == [(Start, name), (Finish, f"completion of {name}")]
    assert [kind for kind, _ in found][:2] == [Start, Finish]


def test_a_completion_of_several_collectives_belongs_to_none_of_them() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    gather, wait = (getattr(OPS, op).default for op in ("all_gather_into_tensor", "wait_tensor"))
    alone, *together = (graph.call_function(gather, (x, 2, "0")) for _ in range(3))
    completion = graph.call_function(wait, (alone,))
    graph.call_function(wait, (together,))
    assert completion_of(alone) is completion
    assert [completion_of(collective) for collective in together] == [None, None]


def test_elements_of_a_coalesced_collective_are_results_of_it() -> None:
    program = copied(partial(Coalesced, 32, 32))
    order = HappensBefore((program,), 1)
    assert [each.label for each in order.ops if isinstance(each.op, Evaluate) and each.stream == "collective"] == [
        "getitem",
        "getitem_1",
    ]
    completions = [n for n in program.module.graph.nodes if n.name.startswith("wait_tensor")]
    for completion in completions:
        completion.replace_all_uses_with(completion.all_input_nodes[0])
    reader = next(n for n in program.module.graph.nodes if n.name == "region_1")
    for completion in completions:
        reader.append(completion)
    found = violations(replace(program, releases=releases(program.module.graph)))
    assert any(re.match(r"getitem: \w+ \(step 0\) may read before getitem \(step 0\) is over;", v) for v in found), (
        found
    )


def test_two_collectives_are_ordered_only_by_a_completion() -> None:
    """They may belong to groups whose streams know nothing of each other."""
    program = program_of(UlyssesStack)
    order = HappensBefore((program,), 1)
    first, second = [i for i, each in enumerate(order.ops) if isinstance(each.op, Start)][:2]
    assert order.ordered(first, second) and not order.ordered(second, first)
    order.graph.remove_edges_from([*order.graph.out_edges(first)])
    order._clocks = order._count()
    assert not order.ordered(first, second)


def graph_of(build: Callable[[Graph, Node, Node], object]) -> GraphModule:
    graph = Graph()
    inputs = graph.placeholder("x"), graph.placeholder("y")
    graph.output(build(graph, *inputs))
    return GraphModule({}, graph)


def effects() -> Iterator[tuple[Callable[[Graph, Node, Node], object], set[int], list[set[int | str]]]]:
    """Graphs, the inputs that they write, and the memory of their outputs."""
    aten = torch.ops.aten
    yield lambda g, x, y: (g.call_function(aten.add.Tensor, (x, y)),), set(), [{"add_tensor"}]
    yield lambda g, x, y: (g.call_function(aten.view.default, (y, [-1])),), set(), [{1}]
    yield lambda g, x, y: (g.call_function(aten._unsafe_view.default, (y, [-1])),), set(), [{1}]
    yield lambda g, x, y: (g.call_function(aten.copy_.default, (x, y)),), {0}, [{0, "copy__default"}]
    yield lambda g, x, y: (g.call_function(aten.add.out, (x, x), {"out": y}),), {1}, [{1, "add_out"}]
    yield lambda g, x, y: (g.call_function(aten._foreach_add_.Scalar, ([x, y], 1)), x)[1:], {0, 1}, [{0}]

    def through_a_split(g: Graph, x: Node, y: Node) -> object:
        part = g.call_function(operator.getitem, (g.call_function(aten.split.Tensor, (x, 2)), 1))
        g.call_function(aten.mul_.Tensor, (part, y))
        return (part, y)

    yield through_a_split, {0}, [{0}, {1}]


@pytest.mark.parametrize(("build", "writes", "outputs"), effects())
def test_memory_follows_the_schemas(
    build: Callable[[Graph, Node, Node], object], writes: set[int], outputs: list[set[int | str]]
) -> None:
    found = effects_of(graph_of(build))
    assert found.writes == writes
    assert [set(o) for o in found.outputs] == outputs
