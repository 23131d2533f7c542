"""What a call of a component teaches the budget of its pipeline; what is said when that is too little; and calls that run
out of device memory: weights give way, the call runs again, and they come back."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import FAST
from helpers import memory_named
from pipelines import (
    EAGER,
    FLUX,
    WAN,
    Allocator,
    Applied,
    expected,
    held,
    is_plain,
    models,
    plain,
    same_weights,
)
from small_pipelines import small_pipeline

import chunkflow_compile
from chunkflow_compile import ChunkflowError, apply, explain, programs, remove
from chunkflow_compile.pipeline.budget import Budget, Phase, budget_of
from chunkflow_compile.pipeline.oom_retry import RngSnapshot
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.runtime.arena import Arena

pytestmark = pytest.mark.usefixtures("kept_dynamo")

# The options of all pipelines but ``shared``, so that one compilation is enough for them.  Slices of so few tokens have other
# bits on a CPU.
RESIDENT: dict[str, Any] = {"hardware": FAST, "split": 1}


@pytest.fixture(scope="module")
def shared(kept_dynamo: None) -> Iterator[tuple[Any, Budget]]:
    """A pipeline that has been called, and its budget."""
    pipe = apply(small_pipeline("wan"), memory="4MiB", disable=["cycle"], split=1, **EAGER)
    Allocator(budget_of(pipe))
    for _ in range(2):
        WAN.generate(pipe)
    yield pipe, budget_of(pipe)
    remove(pipe)
    assert is_plain(pipe) and same_weights(pipe, plain("wan"))


def test_a_result_is_returned_though_it_took_too_much(shared: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The decoder's call succeeded: the video is there.  That it took too much is said once, and once more if it grows."""
    pipe, budget = shared
    allocator, goal = Allocator(budget), budget.phase_of(pipe.vae).budget
    for activations, told in ((8 << 20, 1), (8 << 20, 1), (9 << 20, 2), (1000, 2)):
        allocator.sizes = {"vae": activations}
        assert torch.equal(WAN.generate(pipe), expected("wan"))
        said = "A call of vae took more than the budget: memory=4.0 MiB is too little for vae (AutoencoderKLWan): its"
        assert caplog.text.count(said) == told
        assert budget.phase_of(pipe.vae).budget == goal, "a smaller call may fit"
    small = torch.randn(1, pipe.vae.config.z_dim, 1, 2, 2)
    assert torch.equal(pipe.vae.decode(small)[0], plain("wan").vae.decode(small)[0])


def test_what_was_refused_is_not_planned_again(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one size take about the same activations: the plans for what they leave are made once."""
    pipe, budget = shared
    allocator, asked = Allocator(budget), list[str]()
    WAN.generate(pipe)
    plan_for = Phase.plan_for
    monkeypatch.setattr(Phase, "plan_for", lambda phase, memory: [asked.append(phase.name), plan_for(phase, memory)])
    for activations, times in ((8 << 20, 1), (8 << 20, 1), ((8 << 20) + 1000, 1), (9 << 20, 2), (1000, 2)):
        allocator.sizes = {"transformer": activations}
        assert torch.equal(WAN.generate(pipe), expected("wan"))
        assert asked.count("transformer") == times


def test_phases_that_have_no_plan_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One shares its arena with another, whose activations leave too little: it is refused once, until more is left."""
    budget, arena, asked = Budget(torch.device("cpu"), 1 << 20), Arena(), list[int]()
    layers = [torch.nn.Linear(8, 8) for _ in range(2)]
    first, second = (Phase(f"part{i}", layer, arena, budget.forget) for i, layer in enumerate(layers))
    plan_for = Phase.plan_for
    monkeypatch.setattr(Phase, "plan_for", lambda phase, memory: [asked.append(memory), plan_for(phase, memory)])
    for phase in (first, second):
        budget.add(phase, ())
    budget._note(first, 0, 0, 500_000)
    assert first.budget is not None
    asked.clear()
    for peak, times in ((1 << 20, 1), (1 << 20, 1), ((1 << 20) + 1000, 1), (2 << 20, 2)):
        with pytest.raises(ChunkflowError, match=r"memory=1.0 MiB is too little for part\d"):
            budget._note(second, 0, 0, peak)
        assert second.budget is None and second.activations == 0 and len(asked) == times
    budget._note(second, 0, 0, 500_000)
    assert second.budget is not None


def test_a_goal_that_falls_is_planned_at_once(shared: Any) -> None:
    """However little it falls: the plans would take more than is left.  A goal that rises as little is left alone."""
    pipe, budget = shared
    phase, little = budget.phase_of(pipe.transformer), budget.total // 200
    Allocator(budget, transformer=1000 + little)
    WAN.generate(pipe)
    goal = phase.budget
    assert goal == budget.usable - phase.activations + phase.kept
    assert phase.activations == 1000 + little + sum(p.kept for p in budget.phases)
    budget.total += little
    WAN.generate(pipe)
    assert phase.budget == goal
    budget.total -= little


def test_a_shared_arena_takes_what_the_budgets_of_its_phases_allow() -> None:
    budget, arena = Budget(torch.device("cpu"), 1 << 20), Arena()
    layers = [torch.nn.Linear(size, size, bias=False) for size in (4, 8)]
    first, second = (Phase(f"part{i}", layer, arena, budget.forget) for i, layer in enumerate(layers))
    for phase in (first, second):
        budget.add(phase, ())
    assert budget.most_bytes(arena) is None, "none is planned"
    second.plan_for(1000)
    assert second.kept == 8 * 8 * 4 and budget.most_bytes(arena) == 1000 - second.kept
    first.plan_for(2000)
    assert budget.most_bytes(arena) == 2000 - first.kept
    assert budget.most_bytes(Arena()) is None
    budget.forget(first)
    assert budget.most_bytes(arena) is None, "the other has the arena alone"


def test_other_phases_give_way_to_an_arena_that_grows(shared: Any) -> None:
    """A cycle fetches a weight for each call that reads it: its arena may be larger than the weights of the phase."""
    pipe, budget = shared
    Allocator(budget)
    WAN.generate(pipe)  # the test before may have ended its programs, and with them the arenas
    phase = budget.phase_of(pipe.transformer)
    others = budget._held_by_others(phase)
    assert phase.streamed < phase.budget - phase.kept and others > 0
    size, seen = phase.budget - phase.kept - others // 2, list[int]()
    phase.arena.reserve(size)
    assert budget._held_by_others(phase) == others, "outside of its calls, none gives way"
    held = phase.arena.held
    budget._set_budget(phase, held + phase.kept)
    assert phase.arena.held == held, "it has room within the new goal"
    budget._set_budget(phase, held + phase.kept - 1)
    assert phase.arena.held == 0

    @torch.compiler.disable
    def grow(*_: Any) -> None:
        phase.arena.reserve(size)
        seen.append(budget._held_by_others(phase) + phase.arena.held + phase.activations)

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
        said = r"is pipe\.vae of a compiled pipeline, .*: call chunkflow_compile\.restore\(pipe\)"
        with pytest.raises(ChunkflowError, match=said):
            chunkflow_compile.restore(model)
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    chunkflow_compile.restore(copy.deepcopy(pipe.vae))
    with pytest.raises(
        ChunkflowError, match=r"WanPipeline is neither .* nor a compiled pipeline: call .*compile\(pipe\) first"
    ):
        explain(plain("wan"))


def test_components_called_with_gradients_enabled(applied: Applied, caplog: pytest.LogCaptureFixture) -> None:
    """As in the plain pipeline; they run without, which is said once."""
    pipe, _ = applied(**RESIDENT)
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
    apply(pipe, memory="1MiB", **EAGER, **RESIDENT)
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
    """Each component has too little at most once, and then has enough."""
    memory, short = 1024, list[str]()
    for _ in range(6):
        pipe = small_pipeline("flux")
        caplog.clear()
        try:
            apply(pipe, memory=f"{memory}B", **EAGER)  # a number so small would be refused
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
    assert short[1:] == ["transformer", "text_encoder"], "the first is the largest weight of all"
    assert budget_of(pipe).total == memory


def test_out_of_memory_in_a_phase(applied: Applied, caplog: pytest.LogCaptureFixture) -> None:
    """Weights give way, and the call runs again; a second time it is an error that names the component."""
    pipe, budget = applied(memory="1GiB", **RESIDENT)
    for seed in range(2):
        assert torch.equal(WAN.generate(pipe, seed), expected("wan", seed))
    assert any(phase.arena.nbytes for phase in budget.phases)
    left = {"transformer": 1, "vae": 1}
    calls = {"transformer": 0, "vae": 0}

    def fail(name: str, *_: Any) -> None:
        calls[name] += 1
        if calls[name] > 1 and left[name]:  # in the middle: some of the decoder's cached frames are written
            left[name] -= 1
            torch.randn(1)
            raise torch.OutOfMemoryError(f"no room in {name}")

    hooks = [
        pipe.transformer.condition_embedder.register_forward_pre_hook(functools.partial(fail, "transformer")),
        pipe.vae.decoder.mid_block.register_forward_pre_hook(functools.partial(fail, "vae")),
    ]
    numbers = torch.get_rng_state()
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    assert torch.equal(torch.get_rng_state(), numbers), "what a call drew before it failed is drawn again"
    assert left == {"transformer": 0, "vae": 0} and sum(phase.retries for phase in budget.phases) == 2
    assert "vae ran out of memory: weights give way" in caplog.text
    assert re.search(
        r"to go faster:   more memory: (vae, transformer|transformer, vae) ran out of 1.00 GiB", str(explain(pipe))
    )
    assert "vae ran out of memory once; weights gave way" in str(explain(pipe, details=True))
    left["vae"] = 9
    with pytest.raises(
        ChunkflowError, match=r"vae \(AutoencoderKLWan\) does not fit .*: no room in vae .*enable_tiling"
    ):
        WAN.generate(pipe)
    for hook in hooks:
        hook.remove()
    assert torch.equal(WAN.generate(pipe), expected("wan"))


class Pressed(Allocator):
    """A call of the transformer that has more weights on the device than ``room`` runs out of memory."""

    def __init__(self, pipe: Any, budget: Budget) -> None:
        super().__init__(budget)
        self.pipe = pipe
        self.phase: Phase = budget.phase_of(pipe.transformer)  # type: ignore[assignment]
        self.room: int | None = None
        self.failed = self.held = 0
        pipe.transformer.norm_out.register_forward_pre_hook(self.check)

    def check(self, *_: Any) -> None:
        self.held = self.phase.arena.held
        if self.room is not None and self.held > self.room:
            self.failed += 1
            raise torch.OutOfMemoryError("no room")

    def settle(self, least: int = 600_000) -> None:
        """Call the pipeline until its transformer runs as a cycle, with as many weights on the device as it may have."""
        for _ in range(40):
            assert torch.equal(WAN.generate(self.pipe), expected("wan"))
            if self.held > least:
                return
        raise AssertionError(f"{self.phase.name} holds {self.held}, with the budget {self.phase.budget}")


@pytest.fixture
def pressed(applied: Applied) -> Pressed:
    return Pressed(*applied(**RESIDENT))


def test_a_failure_that_passes_does_not_cost_residency_for_good(pressed: Pressed) -> None:
    pipe, phase = pressed.pipe, pressed.phase
    pressed.settle()
    full, goal = pressed.held, phase.budget
    pressed.room = 3 * full // 4
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    assert pressed.failed == phase.retries == 1 and pressed.held <= full // 2
    pressed.room = None
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    assert phase.budget == goal, "in the next generation it is planned for what the activations leave"
    pressed.settle(full - 1)
    assert phase.budget == goal and pressed.held == full
    assert phase.retries == 1
    with pytest.raises(ChunkflowError, match=r"too little for transformer"):
        pressed.budget._set_budget(phase, phase.kept + 1)
    assert phase.budget == goal, "a plan that is refused is no goal"
    assert torch.equal(WAN.generate(pipe), expected("wan"))


@pytest.mark.long
def test_a_failure_that_stays_comes_once_in_a_generation(pressed: Pressed) -> None:
    """What the activations take changes meanwhile."""
    phase = pressed.phase
    pressed.settle()
    pressed.room = 3 * pressed.held // 4
    for count in range(1, 4):
        before = phase.calls
        pressed.activations += 1000
        assert torch.equal(WAN.generate(pressed.pipe), expected("wan"))
        assert phase.calls > before + 1 and phase.retries <= count
    assert phase.retries > 0


def test_a_retried_call_draws_the_same_numbers() -> None:
    """torch's own generator and those among the arguments, also in lists and dicts, are as before the call."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    call = functools.partial(print, generators[:1], generator=generators[1], other={"one": generators[2]})
    before = [torch.get_rng_state(), *(g.get_state() for g in generators)]
    taken = RngSnapshot(torch.device("cpu"), call)
    torch.randn(1)
    for generator in generators:
        torch.randn(1, generator=generator)
    taken.rewind()
    after = [torch.get_rng_state(), *(g.get_state() for g in generators)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


class Caching(Allocator):
    """It keeps what the activations of each phase took until it is trimmed.

    ``most``: the most bytes that it had from the device when a call began.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__(budget, 100_000)
        self.cached = self.most = self.trimmed = 0
        self.phase: Phase | None = None

    def begin(self) -> None:
        if self.phase is not self.budget._last[-1]:  # what another phase left has another size
            self.phase = self.budget._last[-1]
            self.cached += self.activations
        self.most = max(self.most, self.reserved())

    def reserved(self) -> int:
        return self.cached + held(self.budget)

    def trim(self) -> None:
        self.trimmed += 1
        self.cached = 0


def test_what_the_allocator_keeps_counts_against_the_budget(applied: Applied) -> None:
    """It is given back before a phase that would not fit beside it, and kept where there is room: then steps are faster."""
    pipe, budget = applied(memory=700_000, disable=["cycle"], split=1)
    allocator, trimmed = Caching(budget), []
    for seed in range(5):
        assert torch.equal(WAN.generate(pipe, seed), expected("wan", seed))
        trimmed.append(allocator.trimmed)
        assert 300_000 < allocator.most <= budget.total
        if seed == 2:
            budget.total = 1 << 30
    assert all(p.calls > 1 and p.budget is not None for p in budget.phases)
    assert sum(m.moved_bytes for p in programs(pipe.transformer) for m in p.measurements) > 0
    assert trimmed[0] >= 3, "before the first call of each phase, whose needs are not known"
    assert trimmed[1] < trimmed[2] and trimmed[3] == trimmed[4]
