"""The verifier accepts every program of the passes, and names what is wrong with any other."""

from __future__ import annotations

import copy
import operator
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import mutations
import pytest
import torch
from helpers import Stack, cut_of, plan_of, ulysses_cut
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import Mutation
from torch.fx import Node

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.discover import collective_kind
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.ops import PREFETCH, WAIT
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.program.cycle import Cycle
from chunkflow_compile.passes.program.rewrite import Program, rewrite
from chunkflow_compile.passes.program.verify import check, verify

WEIGHT = "blocks.1.up.weight"


@cache  # tests change copies of it
def stack_program() -> Program:
    cut = cut_of(Stack(4), torch.randn(4, 8))
    return verified(rewrite(cut, plan_of(cut.problem)))


@cache
def ulysses_program() -> Program:
    cut = ulysses_cut()
    return verified(rewrite(cut, plan_of(cut.problem)))


def verified(program: Program) -> Program:
    verify(program)
    return program


@cache
def traced_stack(layers: int) -> Traced:
    torch._dynamo.reset()
    return trace(Stack(layers), {"x": torch.randn(4, 8)}, 0)


def copied(program: Program) -> Program:
    return replace(program, module=copy.deepcopy(program.module))


def mutated(program: Program, change: Callable[[Program], object]) -> Program:
    found = copied(program)
    change(found)
    return found


def find(program: Program, target: Any, weight: str) -> Node:
    return next(
        n
        for n in program.module.graph.nodes
        if n.target is target and weight in (mutations.weights_of(n) if target is WAIT else n.args)
    )


def reader(program: Program, weight: str) -> Node:
    (placeholder,) = (n for n in program.module.graph.nodes if n.name == program.weight_inputs[weight])
    return next(iter(placeholder.users))


# Mutations at a random place, and what is said of the weight there.
AT_RANDOM: dict[Mutation, str] = {
    mutations.remove_a_wait: r"region_\d .* may read .* missing edge: prefetch\('\1', chunk \d, window=\d.*\) -> wait",
    mutations.wait_after_the_reader: r"region_\d .* may read before prefetch",
    mutations.evict_before_the_reader: r"evict\('\1'\) .* comes before its reader region_\d",
    mutations.remove_an_evict: r"evicted 0 times in step 0",
    mutations.forget_a_chunk: r"chunk \d is prefetched 0 times for step 0",
    mutations.remove_a_prefetch: r"chunk 0 is prefetched 0 times",
    mutations.prefetch_twice: r"chunk \d is prefetched 2 times",
    mutations.prefetch_before_its_window: r".* overwrites .* while region_\d .* missing edge",
    mutations.prefetch_for_the_other_step: r"prefetch.* overwrites the slot of \S+ .* while region_\d",
    mutations.another_slot: r".* overwrites the slot of",
}


@pytest.mark.parametrize("mutation", AT_RANDOM, ids=lambda m: m.__name__)
def test_rejects_a_mutated_program(mutation: Mutation) -> None:
    said = list[str]()
    for seed in range(8):
        broken = mutation(copied(stack_program()), random.Random(seed))
        if broken is not None and (violations := list(check(broken))):
            said += violations
            with pytest.raises(ChunkflowError, match="not safe to run"):
                verify(broken)
    assert any(re.match(rf"(\S+): {AT_RANDOM[mutation]}", v) for v in said), said


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
    for room in range(60_000, 80_000, 1024):
        plan = place(cut.problem, machine, Goal(memory=room), chunk_bytes=1024)
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


def move_wait_before_its_prefetch(program: Program) -> None:
    find(program, PREFETCH, WEIGHT).prepend(find(program, WAIT, WEIGHT))


def prefetch_chunks_that_do_not_exist(program: Program) -> None:
    node = [n for n in program.module.graph.nodes if n.target is PREFETCH and n.args[0] == WEIGHT][-1]
    node.args = (*node.args[:2], node.args[2] + 2, *node.args[3:])


def return_a_weight(program: Program) -> None:
    (output,) = program.module.graph.find_nodes(op="output")
    placeholder = next(n for n in program.module.graph.nodes if n.name == program.weight_inputs[WEIGHT])
    output.args = ((placeholder,),)


def read_another_weight(copied: Program) -> None:
    call = reader(copied, WEIGHT)
    other = next(n for n in copied.module.graph.nodes if n.name == copied.weight_inputs["blocks.0.up.weight"])
    call.args = (call.args[0], other, *call.args[2:])


def swap_two_regions(copied: Program) -> None:
    nodes = {n.name: n for n in copied.module.graph.nodes}
    nodes["region_2"].append(nodes["region_1"])


def swap_two_collectives(copied: Program) -> None:
    """v's all-to-all before k's: another rank would exchange k for v."""
    first, second = (n for n in copied.module.graph.nodes if n.name in ("all_to_all_single", "all_to_all_single_4"))
    first.meta, second.meta = second.meta, first.meta


def move_a_collective(copied: Program) -> None:
    first, second = [n for n in copied.module.graph.nodes if collective_kind(n) is not None][:2]
    first.prepend(second)


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
    node.args = (node.args[0], ("nothing",))


def copy_in_another_lane(copied: Program) -> None:
    node = next(n for n in copied.module.graph.nodes if n.target is PREFETCH)
    node.args = (*node.args[:5], "pull")


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
    ("program", "mutation", "violation"),
    [
        (stack_program, move_wait_before_its_prefetch, rf"^{WEIGHT}: region_2 .* may read before prefetch"),
        (stack_program, prefetch_chunks_that_do_not_exist, rf"^{WEIGHT}: chunks \[2, 3\] are prefetched, but it has 2"),
        (stack_program, return_a_weight, rf"^{WEIGHT}: output reads it outside a region"),
        (stack_program, read_another_weight, r"region_2 reads blocks.0.up.weight"),
        (stack_program, swap_two_regions, r"region 1 is region_2"),
        (ulysses_program, swap_two_collectives, r"^collective 0 is all_to_all_single_4, .* all_to_all_single there"),
        (ulysses_program, move_a_collective, r"collective 0 is all_to_all_single_1"),
        (ulysses_program, take_an_output_of_itself, r"^getitem\w* takes getitem\w*, which comes only after it"),
        (ulysses_program, swap_two_inputs, r"^\w+ is input 0, but the traced graph has input 1"),
        (ulysses_program, return_another_value, r"^output is return .*, but the traced graph has return"),
        (ulysses_program, swap_lowered_code, r"^lowered_0 holds other code"),
        (ulysses_program, move_an_unknown_weight, r"^nothing: wait\w* moves it, but it is not streamed"),
        (stack_program, copy_in_another_lane, r"^\S+: prefetch\w* copies it in lane 'pull', but the plan has another"),
        (ulysses_program, complete_after_the_reader, r"^region_1 takes wait_tensor, which comes only after it"),
        (ulysses_program, hand_a_region_a_number, r"^region_1 is .*the value 3"),
        (ulysses_program, swap_operands_of_a_collective, r"^all_to_all_single is .*clone_1.*traced graph has .*clone'"),
        (ulysses_program, change_the_group_of_a_collective, r"^all_to_all_single is .*'1'.* traced graph has .*'0'"),
        (ulysses_program, drop_a_completion, r"^wait_tensor of the traced graph is missing"),
        (ulysses_program, call_other_code, r"^region_1 is "),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_rejects_changed_data_flow(
    program: Callable[[], Program], mutation: Callable[[Program], None], violation: str
) -> None:
    violations = list(check(mutated(program(), mutation)))
    assert any(re.search(violation, v) for v in violations), violations


@settings(max_examples=15)
@given(
    layers=st.integers(1, 4),
    policy=st.sampled_from(["chunkflow", "layerwise", "layerwise-barrier"]),
    room=st.floats(0, 1),
    chunk=st.sampled_from([256, 1024, 4096, 1 << 20]),
    group=st.sampled_from([1, 9000, 1 << 20]),
    joined=st.booleans(),
)
def test_accepts_every_plan_that_place_makes(
    layers: int, policy: str, room: float, chunk: int, group: int, joined: bool
) -> None:
    cut = make_cut(traced_stack(layers), group)
    goal: dict[str, Any] = {"policy": policy, "joins": (len(cut.problem.regions),) if joined else ()}
    if policy == "chunkflow":
        goal["memory"] = 32768 + int(room * cut.problem.total_bytes)
    plan = plan_of(cut.problem, chunk_bytes=chunk, **goal)
    verify(rewrite(cut, plan))
    assert plan == type(plan).from_json(plan.to_json())


def test_what_is_added_to_a_program_after_its_proof_is_not_in_its_ops() -> None:
    """An executor makes a cycle of a program by itself, as the proof does."""
    cut = cut_of(Stack(2), torch.randn(4, 8))
    program = rewrite(cut, plan_of(cut.problem))
    verify(program)
    (proved,) = Cycle.of(copied(program)).ops
    find(program, PREFETCH, WEIGHT).append(program.module.graph.call_function(PREFETCH, ("x", 0, 1, 0, False, "copy")))
    assert Cycle.of(program).ops == (proved,) != Cycle.of(copied(program)).ops
