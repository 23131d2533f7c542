"""Races of programs whose exchanges around attention are in groups of heads.

A legal program computes the numbers of the model, whose exchanges are whole, bit for bit, on every schedule.  ``verify``
rejects one in which a group computes too early, takes what belongs to another, or loses a weight that it still reads.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS, Mutation, caught, listed
from random_programs import POOL, Bench, Choices, Spec, choices, examples, specs
from schedules import goes_wrong, matches
from torch.fx import Node

from chunkflow_compile.passes.graph.discover import is_wait_tensor
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.program.verify import check, verify

STEPS = 3

pytestmark = pytest.mark.usefixtures("one_rank")

groups = st.sampled_from([2, 4])


def attending(spec: Spec, count: int) -> Spec:
    """The spec with attention in its first layer, and in others that exchange, in so many groups."""
    first, *others = (replace(layer, attends=True, beside=False) for layer in spec.layers)
    # On a CPU, attention of a single head of six elements rounds differently from attention of four such heads.
    width = 32 if count == 4 and spec.width == 24 else spec.width
    return replace(spec, width=width, layers=(replace(first, exchange=True), *others), groups=count)


drawn = st.builds(attending, specs, groups)
# Models of one or two layers, which all short tests share.
SMALL = [attending(spec, 2 + 2 * (i % 2)) for i, spec in enumerate(spec for spec in POOL if len(spec.layers) < 3)]
pooled = st.sampled_from(SMALL[:4])


@pytest.mark.parametrize(("models", "programs"), [(pooled, 20), pytest.param(drawn, 200, marks=pytest.mark.long)])
def test_random_programs(
    models: st.SearchStrategy[Spec], programs: int, record_property: Callable[[str, object], None]
) -> None:
    count: Counter[str] = Counter()
    seen: set[str] = set()

    @examples(300, 60)
    @given(models, st.lists(choices, min_size=10, max_size=10))
    def check_all(spec: Spec, plans: list[Choices]) -> None:
        if len(seen) >= programs:
            return
        found = Bench(spec)
        assert found.problem.exchange_groups == spec.groups
        for chosen in plans:
            program = found.program(chosen)
            if program.plan.digest in seen:
                continue
            seen.add(program.plan.digest)
            verify(program)
            count["runs"] += matches(found, [(program, x) for x in found.inputs(STEPS)], chosen.seed)

    check_all()
    assert len(seen) >= programs
    record_property("counts", f"{len(seen)} different programs with groups: {count['runs']} runs, 0 mismatches")


def of_groups(program: Program) -> list[Node]:
    """The calls of the regions that compute the attention of a group."""
    grouped = {region.name for region in program.problem.regions if region.groups > 1}
    return [node for node in program.module.graph.nodes if node.op == "call_module" and node.name in grouped]


def attend_before_the_exchange_has_arrived(program: Program, rng: random.Random) -> Program | None:
    """The completion of what a group receives comes after its attention, which reads what is being received."""
    region = rng.choice(of_groups(program))
    wait = rng.choice([node for node in region.all_input_nodes if is_wait_tensor(node)])
    region.replace_input_with(wait, wait.all_input_nodes[0])
    region.append(wait)
    return program


def swap_the_results_of_two_groups(program: Program, rng: random.Random) -> Program | None:
    first, second = rng.sample(of_groups(program), 2)
    results = [next(iter(node.users)) for node in (first, second)]
    for node, other in zip(results, (second, first), strict=True):
        node.args = (other, *node.args[1:])
    return program


def swap_what_two_groups_receive(program: Program, rng: random.Random) -> Program | None:
    first, second = rng.sample(of_groups(program), 2)
    first.args, second.args = second.args, first.args
    return program


def copy_over_what_the_other_group_reads(program: Program, rng: random.Random) -> Program | None:
    """A weight gets the slot of another, which its copies overwrite while groups compute."""
    streamed = [weight for weight in program.plan.streamed if weight.offset is not None]
    if len(streamed) < 2:
        return None
    moved, victim = rng.sample(streamed, 2)
    weights = tuple(replace(w, offset=victim.offset) if w is moved else w for w in program.plan.weights)
    return replace(program, plan=replace(program.plan, weights=weights))


OF_GROUPS = (
    attend_before_the_exchange_has_arrived,
    swap_the_results_of_two_groups,
    swap_what_two_groups_receive,
    copy_over_what_the_other_group_reads,
)


SAMPLED = [
    *(pytest.param(m, pooled, id=m.__name__) for m in OF_GROUPS),
    *(pytest.param(m, drawn, id=f"{m.__name__}, any model", marks=pytest.mark.long) for m in (*OF_GROUPS, *MUTATIONS)),
]


@pytest.mark.parametrize(("mutation", "models"), SAMPLED)
def test_what_verify_accepts_is_right_and_what_is_wrong_it_rejects(
    mutation: Mutation, models: st.SearchStrategy[Spec], record_property: Callable[[str, object], None]
) -> None:
    count: Counter[str] = Counter()

    @examples(310, 6)
    @given(models, st.lists(choices, min_size=2, max_size=2), st.integers(0, 2**16))
    def check_all(spec: Spec, plans: list[Choices], seed: int) -> None:
        found = Bench(spec)
        for chosen in plans:
            program = mutation(found.program(chosen), random.Random(seed))
            if program is None:
                continue
            program.module.recompile()
            refused = bool(list(check(program)))
            wrong = goes_wrong(found, [(program, x) for x in found.inputs(STEPS)], chosen.seed)
            count.update(caught(refused, wrong))

    check_all()
    assert count["mutants"] and count["caught by verify"]
    record_property("counts", f"{mutation.__name__}: {listed(count)}")
