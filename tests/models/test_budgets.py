"""What a call of a component teaches the budget of its pipeline, and what is said when that is too little."""

from __future__ import annotations

import copy
import gc
import logging
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import memory_named
from pipelines import EAGER, FLUX, WAN, Allocator, Applied, expected, is_plain, models, plain, same_weights
from small_pipelines import small_pipeline

import chunkflow_compile
from chunkflow_compile import ChunkflowError, apply, explain, remove
from chunkflow_compile.model.placement import placement_of
from chunkflow_compile.pipeline.budget import Budget, budget_of


@pytest.fixture(autouse=True)
def fresh_dynamo(request: pytest.FixtureRequest) -> None:
    """In the place of that of all tests: what ``shared`` has compiled stays for the next test of it."""
    if "shared" not in request.fixturenames:
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Any, Budget]]:
    """A pipeline that has been called, and its budget."""
    pipe = apply(small_pipeline("wan"), memory="4MiB", disable=["cycle"], **EAGER)
    Allocator(budget_of(pipe))
    for _ in range(2):
        WAN.generate(pipe)
    yield pipe, budget_of(pipe)
    remove(pipe)
    assert is_plain(pipe) and same_weights(pipe, plain("wan"))


def test_a_result_is_returned_though_it_took_too_much(shared: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The decoder's call succeeded: the video is there.  That it took too much is said once, and once more if it grows."""
    pipe, budget = shared
    allocator, goal = Allocator(budget), budget.phase_of(pipe.vae).goal
    for activations, told in ((8 << 20, 1), (8 << 20, 1), (9 << 20, 2), (1000, 2)):
        allocator.sizes = {"vae": activations}
        assert torch.equal(WAN.generate(pipe), expected("wan"))
        said = "A call of vae took more than the budget: memory=4.0 MiB is too little for vae (AutoencoderKLWan): its"
        assert caplog.text.count(said) == told
        assert budget.phase_of(pipe.vae).goal == goal, "a smaller call may fit"
    small = torch.randn(1, pipe.vae.config.z_dim, 1, 2, 2)
    assert torch.equal(pipe.vae.decode(small)[0], plain("wan").vae.decode(small)[0])


def test_a_goal_that_falls_is_planned_at_once(shared: Any) -> None:
    """However little it falls: the plans would take more than is left.  A goal that rises as little is left alone."""
    pipe, budget = shared
    phase, little = budget.phase_of(pipe.transformer), budget.total // 200
    Allocator(budget, transformer=1000 + little)
    WAN.generate(pipe)
    goal = phase.goal
    assert goal == budget.usable - phase.activations + phase.kept
    assert phase.activations == 1000 + little + sum(p.kept for p in budget.phases)
    budget.total += little
    WAN.generate(pipe)
    assert phase.goal == goal
    budget.total -= little


def test_other_phases_give_way_to_an_arena_that_grows(shared: Any) -> None:
    """A cycle fetches a weight for each call that reads it: its arena may be larger than the weights of the phase."""
    pipe, budget = shared
    Allocator(budget)
    phase = budget.phase_of(pipe.transformer)
    others = budget._held_beside(phase)
    assert phase.streamed < phase.goal - phase.kept and others > 0
    size, seen = phase.goal - phase.kept - others // 2, list[int]()
    phase.arena.reserve(size)
    assert budget._held_beside(phase) == others, "outside of its calls, none gives way"
    held = phase.arena.held
    budget._set_goal(phase, held + phase.kept)
    assert phase.arena.held == held, "it has room within the new goal"
    budget._set_goal(phase, held + phase.kept - 1)
    assert phase.arena.held == 0

    @torch.compiler.disable
    def grow(*_: Any) -> None:
        phase.arena.reserve(size)
        seen.append(budget._held_beside(phase) + phase.arena.held + phase.activations)

    handle = pipe.transformer.proj_out.register_forward_pre_hook(grow)
    beside = phase.activations
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    handle.remove()
    assert size < max(seen) <= budget.usable
    assert phase.activations == beside, "weights that gave way are no activations"


def test_restore_of_a_component_is_refused(shared: Any) -> None:
    """Its weights would be on the device beside the budget."""
    pipe, _ = shared
    for model in (pipe.vae, pipe.vae.decoder):
        with pytest.raises(
            ChunkflowError, match=r"is pipe\.vae of an applied pipeline, .*: call chunkflow_compile\.remove\(pipe\)"
        ):
            chunkflow_compile.restore(model)
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    chunkflow_compile.restore(copy.deepcopy(pipe.vae))
    with pytest.raises(ChunkflowError, match=r"WanPipeline is not applied: call .*apply\(pipe\) first"):
        explain(plain("wan"))


def test_components_called_with_gradients_enabled(applied: Applied, caplog: pytest.LogCaptureFixture) -> None:
    """As in the plain pipeline; they run without, which is said once."""
    pipe, _ = applied()
    call = {"prompt": "a cat", "do_classifier_free_guidance": False, "max_sequence_length": 32}
    want = plain("wan").encode_prompt(**call)[0]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = pipe.encode_prompt(**call)[0]
            assert torch.allclose(got, want, atol=1e-6) and not got.requires_grad
    assert caplog.text.count("runs without gradients") == 1 and torch.is_grad_enabled()


def test_host_memory_after_a_component_was_replaced(quiet: None) -> None:
    """It is for all components: the new one gets what those that stay do not take."""
    pipe = small_pipeline("wan")
    bound = sum(p.nbytes for m in models(pipe).values() for p in m.parameters()) // 2
    apply(pipe, memory="1MiB", host_memory=bound, **EAGER)

    def held() -> int:
        return sum(placement_of(m).store.held_bytes for m in models(pipe).values())

    assert 0 < held() <= bound
    pipe.transformer = small_pipeline("wan", seed=1).transformer
    apply(pipe)
    assert placement_of(pipe.transformer).store.held_bytes > 0 and held() <= bound


def test_a_component_that_is_kept_does_not_keep_the_others(quiet: None) -> None:
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    WAN.generate(pipe)
    vae, budget, gone = pipe.vae, budget_of(pipe), weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert gone() is None and [phase.name for phase in budget.phases] == ["vae"]
    latents = torch.randn(1, 16, 2, 4, 4)
    with torch.no_grad():
        assert torch.equal(vae.decode(latents)[0], twin.vae.decode(latents)[0])
    twin.vae = vae
    remove(twin)
    assert torch.equal(WAN.generate(twin), expected("wan")) and same_weights(twin, plain("wan"))


@pytest.mark.long
def test_the_advice_can_be_followed(quiet: None, caplog: pytest.LogCaptureFixture) -> None:
    """Each component has too little at most once, and then there is enough memory for it."""
    memory, short = 1024, list[str]()
    for _ in range(6):
        pipe = small_pipeline("flux")
        caplog.clear()
        try:
            apply(pipe, memory=memory, **EAGER)
            Allocator(budget_of(pipe), transformer=100_000, text_encoder=300_000)
            for seed in range(2):
                got = FLUX.generate(pipe, seed, num_inference_steps=2)
                assert torch.equal(got, expected("flux", seed, num_inference_steps=2))
            said = next((r.getMessage() for r in caplog.records if "took more than the budget" in r.getMessage()), None)
        except ChunkflowError as error:
            said = str(error)
        if said is None:
            break
        short.append(re.search(r"too little for (pipe\.)?(\w+)", said)[2])
        advised = memory_named(said)
        assert "at least memory='" in said and advised > memory, "more than what was too little"
        memory = advised
        remove(pipe)
    assert len(short[1:]) == len(set(short[1:])) >= 1, short
    assert budget_of(pipe).total == memory
