"""The verifier accepts every program of the passes, and names what is wrong with any other."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Stack, UlyssesStack, cut_of, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import collective_kind
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.ops import EVICT, PREFETCH, WAIT
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.program.rewrite import Program, rewrite
from chunkflow_compile.passes.program.verify import check, verify

WEIGHT = "blocks.1.up.weight"


@cache  # tests change copies of it
def stack_program() -> Program:
    cut = cut_of(Stack(4), torch.randn(4, 8))
    return rewrite(cut, plan_of(cut.problem))


@cache
def traced_stack(layers: int) -> Traced:
    torch._dynamo.reset()
    return trace(Stack(layers), {"x": torch.randn(4, 8)}, 0)


@cache
def ulysses_program() -> Program:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        cut = cut_of(UlyssesStack(), torch.randn(4, 32))
    finally:
        dist.destroy_process_group()
    return rewrite(cut, plan_of(cut.problem))


def mutated(program: Program, change: Callable[[Program], None]) -> Program:
    copied = replace(program, module=copy.deepcopy(program.module))
    change(copied)
    return copied


def find(program: Program, target: Any, weight: str) -> Node:
    return next(n for n in program.module.graph.nodes if n.target is target and n.args[0] == weight)


def reader(program: Program, weight: str) -> Node:
    (placeholder,) = (n for n in program.module.graph.nodes if n.name == program.weight_inputs[weight])
    return next(iter(placeholder.users))


def remove_wait(program: Program) -> None:
    program.module.graph.erase_node(find(program, WAIT, WEIGHT))


def move_wait_after_its_use(program: Program) -> None:
    reader(program, WEIGHT).append(find(program, WAIT, WEIGHT))


def move_wait_before_its_prefetch(program: Program) -> None:
    find(program, PREFETCH, WEIGHT).prepend(find(program, WAIT, WEIGHT))


def move_evict_before_the_last_use(program: Program) -> None:
    reader(program, WEIGHT).prepend(find(program, EVICT, WEIGHT))


def remove_evict(program: Program) -> None:
    program.module.graph.erase_node(find(program, EVICT, WEIGHT))


def never_prefetch_a_chunk(program: Program) -> None:
    node = find(program, PREFETCH, WEIGHT)
    node.args = (node.args[0], 1, *node.args[2:])


def never_prefetch_a_weight(program: Program) -> None:
    program.module.graph.erase_node(find(program, PREFETCH, WEIGHT))


def prefetch_twice(program: Program) -> None:
    node = find(program, PREFETCH, WEIGHT)
    with program.module.graph.inserting_after(node):
        program.module.graph.call_function(PREFETCH, node.args)


def prefetch_over_a_live_weight(program: Program) -> None:
    """Starts the copy of a weight of block 3 while block 1, which owns the slot, still computes."""
    early = find(program, PREFETCH, "blocks.3.up.weight")
    reader(program, WEIGHT).prepend(early)
    early.args = (*early.args[:3], 1)


def prefetch_for_the_wrong_step(program: Program) -> None:
    node = find(program, PREFETCH, WEIGHT)
    node.args = (*node.args[:4], True)


def prefetch_chunks_that_do_not_exist(program: Program) -> None:
    node = [n for n in program.module.graph.nodes if n.target is PREFETCH and n.args[0] == WEIGHT][-1]
    node.args = (*node.args[:2], node.args[2] + 2, *node.args[3:])


def return_a_weight(program: Program) -> None:
    (output,) = program.module.graph.find_nodes(op="output")
    placeholder = next(n for n in program.module.graph.nodes if n.name == program.weight_inputs[WEIGHT])
    output.args = ((placeholder,),)


MUTATIONS: dict[Callable[[Program], None], str] = {
    remove_wait: rf"{WEIGHT}: region_2 .* may read .* missing edge: prefetch\('{WEIGHT}', chunk 0, window=\d\) -> wait",
    move_wait_after_its_use: rf"{WEIGHT}: region_2 .* may read before prefetch",
    move_wait_before_its_prefetch: rf"{WEIGHT}: region_2 .* may read before prefetch",
    move_evict_before_the_last_use: rf"{WEIGHT}: evict\('{WEIGHT}'\) .* comes before its reader region_2",
    remove_evict: rf"{WEIGHT}: evicted 0 times in step 0",
    never_prefetch_a_chunk: rf"{WEIGHT}: chunk 0 is prefetched 0 times for step 0",
    never_prefetch_a_weight: rf"{WEIGHT}: chunk 0 is prefetched 0 times",
    prefetch_chunks_that_do_not_exist: rf"{WEIGHT}: chunks \[2, 3\] are prefetched, but it has 2",
    return_a_weight: rf"{WEIGHT}: output reads it outside a region",
    prefetch_twice: rf"{WEIGHT}: chunk 0 is prefetched 2 times",
    prefetch_over_a_live_weight: r"blocks.3.up.weight: .* overwrites .* blocks.1.* while region_2 .* missing edge",
    prefetch_for_the_wrong_step: rf"{WEIGHT}: prefetch.* overwrites the slot of {WEIGHT} .* while region_2",
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_rejects_a_mutated_program(mutation: Callable[[Program], None]) -> None:
    program = stack_program()
    verify(program)
    broken = mutated(program, mutation)
    violations = list(check(broken))
    assert any(re.search(MUTATIONS[mutation], v) for v in violations), violations
    with pytest.raises(ChunkflowError, match="not safe to run"):
        verify(broken)


def test_rejects_two_overlapping_slots() -> None:
    program = stack_program()
    offset = next(w.offset for w in program.plan.weights if w.name == "blocks.1.down.weight")
    weights = tuple(replace(w, offset=offset) if w.name == WEIGHT else w for w in program.plan.weights)
    broken = replace(program, plan=replace(program.plan, weights=weights))
    assert any(re.search(f"overwrites the slot of .*{WEIGHT}|{WEIGHT}: .* overwrites", v) for v in check(broken))


def test_rejects_a_slot_outside_the_arena_and_one_off_alignment() -> None:
    program = stack_program()
    small = replace(program, plan=replace(program.plan, arena_bytes=program.plan.arena_bytes - 256))
    assert any("outside the arena" in v for v in check(small))
    weights = tuple(replace(w, offset=w.offset + 16) if w.offset is not None else w for w in program.plan.weights)
    assert any(
        "not a multiple of 256" in v for v in check(replace(program, plan=replace(program.plan, weights=weights)))
    )


@pytest.mark.parametrize("chunk_bytes", [-1, 0, 1 << 20])
def test_rejects_chunks_that_the_weights_do_not_have(chunk_bytes: int) -> None:
    program = stack_program()
    found = list(check(replace(program, plan=replace(program.plan, chunk_bytes=chunk_bytes))))
    assert any("windows do not fit its" in v or "not a positive size" in v for v in found)


def partly_resident_program() -> Program:
    """The link has time for a part of the weights only: some chunks of a weight stay resident."""
    machine = replace(load_profile("h100-pcie-x2"), h2d_bandwidth=1e6, launch_s=1e-3, eta_pref=1.0)
    cut = cut_of(Stack(4), torch.randn(4, 8))
    for room in range(20000, 80000, 256):
        plan = place(cut.problem, machine, chunk_bytes=1024, memory=room)
        if any(None in w.windows for w in plan.streamed):
            return rewrite(cut, plan)
    raise AssertionError("no plan keeps a part of a weight")


def test_rejects_a_copy_of_a_chunk_that_stays_and_one_over_it() -> None:
    program = partly_resident_program()
    verify(program)
    partly = next(w for w in program.plan.streamed if None in w.windows)
    kept = partly.windows.index(None)

    def copy_it(copied: Program) -> None:
        node = find(copied, PREFETCH, partly.name)
        with copied.module.graph.inserting_after(node):
            copied.module.graph.call_function(PREFETCH, (partly.name, kept, kept + 1, *node.args[3:]))

    violations = list(check(mutated(program, copy_it)))
    assert any(f"{partly.name}: chunk {kept} is prefetched 1 times" in v and "stays" in v for v in violations)
    other = next(w for w in program.plan.streamed if w.name != partly.name)
    moved = tuple(replace(w, offset=partly.offset) if w is other else w for w in program.plan.weights)
    violations = list(check(replace(program, plan=replace(program.plan, weights=moved))))
    assert any(
        re.search(rf"overwrites the slot of {partly.name} at byte \d+ while region_\d+ .* may still use it", v)
        for v in violations
    ), violations


def test_rejects_a_swapped_pair_of_collectives() -> None:
    program = ulysses_program()
    verify(program)

    def swap(copied: Program) -> None:
        """v's all-to-all before k's: another rank would exchange k for v."""
        first, second = (n for n in copied.module.graph.nodes if n.name in ("all_to_all_single", "all_to_all_single_4"))
        first.meta, second.meta = second.meta, first.meta

    violation = next(iter(check(mutated(program, swap))))
    assert violation.startswith("collective 0 is all_to_all_single_4, but the traced graph has all_to_all_single there")


def test_rejects_a_collective_moved_before_another() -> None:
    program = ulysses_program()

    def move(copied: Program) -> None:
        collectives = [n for n in copied.module.graph.nodes if collective_kind(n) is not None]
        collectives[0].prepend(collectives[1])

    assert any("collective 0 is all_to_all_single_1" in v for v in check(mutated(program, move)))


def test_rejects_a_region_that_reads_another_weight() -> None:
    program = stack_program()

    def swap(copied: Program) -> None:
        call = reader(copied, WEIGHT)
        other = next(n for n in copied.module.graph.nodes if n.name == copied.weight_inputs["blocks.0.up.weight"])
        call.args = (call.args[0], other, *call.args[2:])

    assert any("region_2 reads blocks.0.up.weight" in v for v in check(mutated(program, swap)))


def swap_operands_of_a_collective(copied: Program) -> None:
    first, second = [n for n in copied.module.graph.nodes if collective_kind(n) is not None][:2]
    first.args, second.args = (second.args[0], *first.args[1:]), (first.args[0], *second.args[1:])


def change_the_group_of_a_collective(copied: Program) -> None:
    node = next(n for n in copied.module.graph.nodes if collective_kind(n) is not None)
    node.args = (*node.args[:-1], "1")


def drop_a_completion(copied: Program) -> None:
    node = next(n for n in copied.module.graph.nodes if n.name == "wait_tensor")
    node.replace_all_uses_with(node.all_input_nodes[0])
    copied.module.graph.erase_node(node)


def call_other_code(copied: Program) -> None:
    nodes = {n.name: n for n in copied.module.graph.nodes}
    nodes["region_1"].target = nodes["region_0"].target


def return_another_value(copied: Program) -> None:
    (output,) = copied.module.graph.find_nodes(op="output")
    other = next(n for n in copied.module.graph.nodes if n.name == "wait_tensor")
    output.args = ((other,),)


def swap_lowered_code(copied: Program) -> None:
    first, second = copied.module.lowered_0, copied.module.lowered_1
    copied.module.lowered_0, copied.module.lowered_1 = second, first


def move_an_unknown_weight(copied: Program) -> None:
    node = next(n for n in copied.module.graph.nodes if n.target is WAIT)
    node.args = ("nothing",)


def complete_after_the_reader(copied: Program) -> None:
    nodes = {n.name: n for n in copied.module.graph.nodes}
    nodes["region_1"].append(nodes["wait_tensor"])


def hand_a_region_a_number(copied: Program) -> None:
    call = next(n for n in copied.module.graph.nodes if n.name == "region_1")
    call.args = (*call.args, 3)


def swap_two_inputs(copied: Program) -> None:
    """The executor takes inputs by position."""
    first, second = copied.module.graph.find_nodes(op="placeholder")[:2]
    first.prepend(second)


def take_an_output_of_itself(copied: Program) -> None:
    """A cycle of values, which no check may follow for ever."""
    node = next(n for n in copied.module.graph.nodes if n.target is operator.getitem)
    node.replace_input_with(node.all_input_nodes[0], node)


@pytest.mark.parametrize(
    ("mutation", "violation"),
    [
        (take_an_output_of_itself, r"^getitem\w* takes getitem\w*, which comes only after it"),
        (swap_two_inputs, r"^\w+ is input 0, but the traced graph has input 1"),
        (return_another_value, r"^output is return .*, but the traced graph has return"),
        (swap_lowered_code, r"^lowered_0 holds other code"),
        (move_an_unknown_weight, r"^nothing: wait\w* moves it, but it is not streamed"),
        (complete_after_the_reader, r"^region_1 takes wait_tensor, which comes only after it"),
        (hand_a_region_a_number, r"^region_1 is .*the value 3"),
        (swap_operands_of_a_collective, r"^all_to_all_single is .*clone_1.*traced graph has .*clone'"),
        (change_the_group_of_a_collective, r"^all_to_all_single is .*'1'.* traced graph has .*'0'"),
        (drop_a_completion, r"^wait_tensor of the traced graph is missing"),
        (call_other_code, r"^region_1 is "),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_rejects_changed_data_flow(mutation: Callable[[Program], None], violation: str) -> None:
    violations = list(check(mutated(ulysses_program(), mutation)))
    assert any(re.search(violation, v) for v in violations), violations


def test_rejects_regions_out_of_order() -> None:
    program = stack_program()

    def swap(copied: Program) -> None:
        nodes = {n.name: n for n in copied.module.graph.nodes}
        nodes["region_2"].append(nodes["region_1"])

    assert any("region 1 is region_2" in v for v in check(mutated(program, swap)))


@settings(max_examples=25)
@given(
    layers=st.integers(1, 6),
    policy=st.sampled_from(["chunkflow", "layerwise", "layerwise-barrier"]),
    room=st.floats(0, 1),
    chunk=st.sampled_from([256, 1024, 4096, 1 << 20]),
    group=st.sampled_from([1, 9000, 1 << 20]),
)
def test_accepts_every_plan_that_place_makes(layers: int, policy: str, room: float, chunk: int, group: int) -> None:
    cut = make_cut(traced_stack(layers), group)
    goal: dict[str, Any] = {"policy": policy}
    if policy == "chunkflow":
        goal["memory"] = 32768 + int(room * cut.problem.total_bytes)
    plan = plan_of(cut.problem, chunk_bytes=chunk, **goal)
    verify(rewrite(cut, plan))
    assert plan == type(plan).from_json(plan.to_json())
