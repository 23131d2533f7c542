"""What a call of a component teaches the budget of its pipeline, and what is said when that is too little."""

from __future__ import annotations

import copy
import gc
import logging
import re
import weakref
from typing import Any

import pytest
import torch
from small_pipelines import small_pipeline
from test_pipelines import EAGER, FLUX, WAN, Counting, models, same_weights

import chunkflow_compile
from chunkflow_compile import ChunkflowError, apply, explain, programs, remove
from chunkflow_compile.model.placement import placement_of
from chunkflow_compile.pipeline.budget import Budget, budget_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet")


class Uneven(Counting):
    """As ``Counting``, by component: the others take 1000 bytes."""

    def __init__(self, budget: Budget, **sizes: int) -> None:
        super().__init__()
        self.budget, self.sizes = budget, sizes

    def peak(self) -> int:
        self.activations = self.sizes.get(self.budget._last[-1].name, 1000)
        return super().peak() + sum(p.kept for p in self.budget.phases)


def test_a_result_is_returned_though_it_took_too_much(caplog: pytest.LogCaptureFixture) -> None:
    """The decoder's call succeeded: the video is there.  That it took too much is said once, and once more if it grows."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    budget = budget_of(pipe)
    assert budget is not None
    allocator = budget._allocator = Uneven(budget)
    want = WAN.generate(twin)
    assert torch.equal(WAN.generate(pipe), want)
    goal = budget.phase_of(pipe.vae).goal
    for activations, told in ((2 << 20, 1), (2 << 20, 1), (3 << 20, 2), (1000, 2)):
        allocator.sizes = {"vae": activations}
        assert torch.equal(WAN.generate(pipe), want)
        said = "A call of vae took more than the budget: memory=1048576 bytes is too little for vae (AutoencoderKLWan): its"
        assert caplog.text.count(said) == told
        assert budget.phase_of(pipe.vae).goal == goal, "a smaller call may fit"
    small = {"height": 16, "width": 16}
    assert torch.equal(WAN.generate(pipe, **small), WAN.generate(twin, **small))
    remove(pipe)


@pytest.mark.long
def test_the_advice_can_be_followed(caplog: pytest.LogCaptureFixture) -> None:
    """Each component has too little at most once, and then there is enough memory for it."""
    memory, short = 1024, list[str]()
    for _ in range(6):
        pipe, twin = small_pipeline("flux"), small_pipeline("flux")
        caplog.clear()
        try:
            apply(pipe, memory=memory, **EAGER)
            budget = budget_of(pipe)
            assert budget is not None
            budget._allocator = Uneven(budget, transformer=100_000, text_encoder=300_000)
            for seed in range(2):
                got, want = (FLUX.generate(p, seed, num_inference_steps=2) for p in (pipe, twin))
                assert torch.equal(got, want)
            said = next((r.getMessage() for r in caplog.records if "took more than the budget" in r.getMessage()), None)
        except ChunkflowError as error:
            said = str(error)
        if said is None:
            break
        short.append(re.search(r"too little for (pipe\.)?(\w+)", said)[2])
        (advised,) = re.findall(r"at least memory=(\d+)", said)
        assert int(advised) > memory, "more than what was too little"
        memory = int(advised)
        remove(pipe)
    assert len(short[1:]) == len(set(short[1:])) >= 1, short
    assert budget.total == memory
    remove(pipe)


def test_a_goal_that_falls_is_planned_at_once() -> None:
    """However little it falls: the plans would take more than is left.  A goal that rises as little is left alone."""
    pipe = small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    budget = budget_of(pipe)
    assert budget is not None
    allocator = budget._allocator = Uneven(budget)
    phase = budget.phase_of(pipe.transformer)
    little = budget.total // 200
    for activations in (1000, 1000, 1000 + little):
        allocator.sizes = {"transformer": activations}
        WAN.generate(pipe)
    assert phase.goal == budget.usable - phase.activations + phase.kept
    assert phase.activations == 1000 + little + sum(p.kept for p in budget.phases)
    goal = phase.goal
    budget.total += little
    WAN.generate(pipe)
    assert phase.goal == goal
    remove(pipe)


def test_other_phases_give_way_to_an_arena_that_grows() -> None:
    """A cycle fetches a weight for each call that reads it: its arena may be larger than the weights of the phase."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="4MiB", **{**EAGER, "disable": ["cycle"]})
    budget = budget_of(pipe)
    assert budget is not None
    budget._allocator = Uneven(budget)
    for _ in range(2):
        WAN.generate(pipe)
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
    assert torch.equal(WAN.generate(pipe), WAN.generate(twin))
    handle.remove()
    assert size < max(seen) <= budget.usable
    assert phase.activations == beside, "weights that gave way are no activations"
    remove(pipe)


def test_host_memory_after_a_component_was_replaced() -> None:
    """It is for all components: the new one gets what those that stay do not take."""
    pipe = small_pipeline("wan")
    weights = {n: sum(p.nbytes for p in m.parameters()) for n, m in models(pipe).items()}
    bound = sum(weights.values()) // 2
    apply(pipe, memory="1MiB", host_memory=bound, **EAGER)

    def held() -> int:
        return sum(placement_of(m).store.held_bytes for m in models(pipe).values())

    assert 0 < held() <= bound
    pipe.transformer = small_pipeline("wan", seed=1).transformer
    apply(pipe)
    assert placement_of(pipe.transformer).store.held_bytes > 0 and held() <= bound
    remove(pipe)


@pytest.mark.long
def test_figures_are_those_of_the_newest_call() -> None:
    """Programs for other sizes do not count; and the time is that of the programs, not until the host returns."""
    pipe = small_pipeline("flux")
    apply(pipe, memory="3MiB", **{**EAGER, "disable": ["cycle"]})
    seen = {}
    for size in (32, 64, 32):
        FLUX.generate(pipe, height=size, width=size, num_inference_steps=2)
        (figures,) = [p for p in budget_of(pipe).figures().phases if p.name == "transformer"]
        seen.setdefault(size, []).append(figures.predicted_s)
        assert figures.measured_s == pytest.approx(newest_s(pipe.transformer), rel=0.9)
    first, last = seen[32]
    assert last <= 1.01 * first, "plans may be other ones, and are no slower"
    assert len(programs(pipe.transformer)) > 5
    remove(pipe)


def newest_s(model: Any) -> float:
    """Seconds of the newest step of each block, those for one size."""
    steps = {}
    for program in programs(model):
        if program.measurements:
            steps[frozenset(id(buffer) for buffer in program.buffers.values())] = program.measurements[-1].step_s
    return sum(steps.values())


def test_restore_of_a_component_is_refused() -> None:
    """Its weights would be on the device beside the budget."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    for model in (pipe.vae, pipe.vae.decoder):
        with pytest.raises(
            ChunkflowError, match=r"is pipe\.vae of an applied pipeline, .*: call chunkflow_compile\.remove\(pipe\)"
        ):
            chunkflow_compile.restore(model)
    assert torch.equal(WAN.generate(pipe), WAN.generate(twin))
    other = copy.deepcopy(pipe.vae)
    chunkflow_compile.restore(other)
    remove(pipe)
    chunkflow_compile.restore(pipe.vae)
    assert same_weights(pipe, twin)


def test_explain_of_a_pipeline_that_is_not_applied() -> None:
    pipe = small_pipeline("wan")
    for _ in range(2):
        with pytest.raises(
            ChunkflowError, match=r"WanPipeline is not applied: call chunkflow_compile\.apply\(pipe\) first"
        ):
            explain(pipe)
        apply(pipe, memory="1MiB", **EAGER)
        remove(pipe)


def test_components_called_with_gradients_enabled(caplog: pytest.LogCaptureFixture) -> None:
    """As in the plain pipeline; they run without, which is said once."""
    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    apply(pipe, memory="2MiB", **EAGER)
    want = twin.encode_prompt("a cat", None, max_sequence_length=32)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = pipe.encode_prompt("a cat", None, max_sequence_length=32)
    for a, b in zip(got[:2], want[:2], strict=True):
        assert torch.allclose(a, b, atol=1e-6) and not a.requires_grad
    assert caplog.text.count("runs without gradients") == 1 and torch.is_grad_enabled()
    remove(pipe)


def test_a_component_that_is_kept_does_not_keep_the_others() -> None:
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
    want, twin.vae = WAN.generate(twin), vae
    remove(twin)
    assert torch.equal(WAN.generate(twin), want) and same_weights(twin, small_pipeline("wan"))
