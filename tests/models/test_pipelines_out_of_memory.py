"""A call of an applied pipeline that runs out of device memory: weights give way, it runs again, and they come back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_pipelines import small_pipeline
from test_pipelines import EAGER, WAN, Counting, same_weights

from chunkflow_compile import ChunkflowError, apply, explain, programs, remove
from chunkflow_compile.pipeline.budget import Budget, Phase, budget_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet")


def test_out_of_memory_in_a_phase(caplog: pytest.LogCaptureFixture) -> None:
    """Weights give way, and the call runs again; a second time it is an error that names the component."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1GiB", **EAGER)
    budget = budget_of(pipe)
    assert budget is not None
    for seed in range(2):
        assert torch.equal(WAN.generate(pipe, seed), WAN.generate(twin, seed))
    assert any(phase.arena.nbytes for phase in budget.phases)
    left = {"transformer": 1, "vae": 1}
    calls = {"transformer": 0, "vae": 0}

    def fail(name: str, *_: Any) -> None:
        calls[name] += 1
        if calls[name] > 1 and left[name]:  # in the middle: some of the decoder's cached frames are written
            left[name] -= 1
            raise torch.OutOfMemoryError(f"no room in {name}")

    hooks = [
        pipe.transformer.condition_embedder.register_forward_pre_hook(functools.partial(fail, "transformer")),
        pipe.vae.decoder.mid_block.register_forward_pre_hook(functools.partial(fail, "vae")),
    ]
    assert torch.equal(WAN.generate(pipe, 5), WAN.generate(twin, 5))
    assert left == {"transformer": 0, "vae": 0} and sum(phase.retries for phase in budget.phases) == 2
    assert (
        "vae ran out of memory: weights give way" in caplog.text
        and "vae ran out of memory once; weights gave way" in str(explain(pipe))
    )
    left["vae"] = 9
    with pytest.raises(
        ChunkflowError, match=r"vae \(AutoencoderKLWan\) does not fit .*: no room in vae .*enable_tiling"
    ):
        WAN.generate(pipe, 6)
    for hook in hooks:
        hook.remove()
    assert torch.equal(WAN.generate(pipe, 7), WAN.generate(twin, 7))
    remove(pipe)
    assert same_weights(pipe, twin)


def test_a_step_cache_does_not_run_twice() -> None:
    """A cache has changed its state when a call runs out of memory: that is an error, and the next generation is right."""
    from diffusers import FirstBlockCacheConfig

    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    for p in (pipe, twin):
        p.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e-6))
    apply(pipe, memory="1GiB", **EAGER)
    assert torch.equal(WAN.generate(pipe), want := WAN.generate(twin))
    fails = [True]

    def fail(*_: Any) -> None:
        if fails:
            fails.pop()
            raise torch.OutOfMemoryError("no room")

    hook = pipe.transformer.norm_out.register_forward_pre_hook(fail)
    with pytest.raises(ChunkflowError, match=r"transformer \(WanTransformer3DModel\) does not fit"):
        WAN.generate(pipe)
    hook.remove()
    pipe.transformer._reset_stateful_cache()
    assert torch.equal(WAN.generate(pipe), want)


class Pressed(Counting):
    """As ``Counting``; a call of the transformer that has more weights on the device than ``room`` runs out of memory."""

    def __init__(self, budget: Budget, phase: Phase) -> None:
        super().__init__()
        self.budget, self.phase = budget, phase
        self.room: int | None = None
        self.failed = self.held = 0

    def check(self, *_: Any) -> None:
        self.held = self.phase.arena.held
        if self.room is not None and self.held > self.room:
            self.failed += 1
            raise torch.OutOfMemoryError("no room")


def settle(pipe: Any, phase: Phase, allocator: Pressed, want: torch.Tensor, held: int = 600_000) -> None:
    """Call a pipeline until its transformer runs as a cycle, with as many weights on the device as it may have."""
    for _ in range(40):
        assert torch.equal(WAN.generate(pipe), want)
        if allocator.held > held:
            return
        phase.arena.cycles.wait_planned()
    raise AssertionError(f"{phase.name} holds {allocator.held}, with the goal {phase.goal}")


@pytest.fixture
def pressed() -> Iterator[tuple[Any, Phase, Pressed]]:
    pipe = small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    budget = budget_of(pipe)
    phase = budget.phase_of(pipe.transformer)
    allocator = budget._allocator = Pressed(budget, phase)
    pipe.transformer.norm_out.register_forward_pre_hook(allocator.check)
    yield pipe, phase, allocator
    remove(pipe)


def test_a_failure_that_passes_does_not_cost_residency_for_good(pressed: tuple[Any, Phase, Pressed]) -> None:
    pipe, phase, allocator = pressed
    twin = small_pipeline("wan")
    want = WAN.generate(twin)
    settle(pipe, phase, allocator, want)
    full, goal = allocator.held, phase.goal
    allocator.room = 3 * full // 4
    assert torch.equal(WAN.generate(pipe), want)
    assert allocator.failed == phase.retries == 1 and allocator.held <= full // 2
    allocator.room = None
    assert torch.equal(WAN.generate(pipe), want)
    assert phase.goal == goal, "in the next generation it is planned for what the activations leave"
    settle(pipe, phase, allocator, want, held=full - 1)
    assert phase.goal == goal and allocator.held == full
    assert phase.retries == 1


@pytest.mark.long
def test_a_failure_that_stays_comes_once_in_a_generation(pressed: tuple[Any, Phase, Pressed]) -> None:
    """What the activations take changes meanwhile."""
    pipe, phase, allocator = pressed
    want = WAN.generate(small_pipeline("wan"))
    settle(pipe, phase, allocator, want)
    allocator.room = 3 * allocator.held // 4
    for count in range(1, 4):
        before = phase.calls
        allocator.activations += 1000
        assert torch.equal(WAN.generate(pipe), want)
        phase.arena.cycles.wait_planned()
        assert phase.calls > before + 1 and phase.retries <= count
    assert phase.retries > 0


def test_a_plan_that_is_refused_is_no_goal(pressed: tuple[Any, Phase, Pressed]) -> None:
    pipe, phase, allocator = pressed
    want = WAN.generate(small_pipeline("wan"))
    for _ in range(2):
        WAN.generate(pipe)
    goal = phase.goal
    with pytest.raises(ChunkflowError, match=r"too little for transformer"):
        allocator.budget._set_goal(phase, phase.kept + 1)
    assert phase.goal == goal
    assert torch.equal(WAN.generate(pipe), want)


@pytest.mark.parametrize("listed", [False, True])
def test_a_retried_call_draws_the_same_numbers(listed: bool) -> None:
    """torch's own generator and those among the arguments are as before the call that ran out of memory."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    left = [True]

    def draw(fails: bool, module: Any, args: Any, output: Any) -> Any:
        own = module.__dict__["drawn_from"]
        noise = torch.randn(1) + sum(torch.randn(1, generator=g) for g in own)
        if fails and left:
            left.pop()
            raise torch.OutOfMemoryError("no room")
        return (output[0] + noise, *output[1:])

    states = []
    for p, fails in ((twin, False), (pipe, True)):
        generators = [torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)]
        p.transformer.__dict__["drawn_from"] = generators
        handle = p.transformer.register_forward_hook(functools.partial(draw, fails))
        given = {"generators": generators} if listed else {"generator": generators[0], "other": {"one": generators[1]}}
        forward = type(p.transformer).forward

        def call(*args: Any, forward: Callable[..., Any] = forward, model: Any = p.transformer, **kwargs: Any) -> Any:
            for name in ("generators", "generator", "other"):
                kwargs.pop(name, None)
            return forward(model, *args, **kwargs)

        p.transformer.forward = call
        torch.manual_seed(3)
        x = torch.randn(1, 16, 2, 8, 8, generator=torch.Generator().manual_seed(1))
        text = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            out = p.transformer(x, torch.tensor([500]), text, return_dict=False, **given)[0]
        states.append((out, torch.get_rng_state(), *(g.get_state() for g in generators)))
        handle.remove()
        del p.transformer.forward, p.transformer.__dict__["drawn_from"]
    assert not left and budget_of(pipe).phase_of(pipe.transformer).retries == 1
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    remove(pipe)
    assert same_weights(pipe, twin)


class Caching(Counting):
    """As ``Counting``; it keeps what the activations of each phase took until it is trimmed.

    ``most``: the most bytes that it had from the device when a call began.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self.budget = budget
        self.cached = self.most = self.trimmed = 0
        self.phase: Phase | None = None

    def begin(self) -> None:
        if self.phase is not self.budget._last[-1]:  # what another phase left has another size
            self.phase = self.budget._last[-1]
            self.cached += self.activations
        self.most = max(self.most, self.reserved())

    def reserved(self) -> int:
        return self.cached + sum(p.arena.held + p.kept for p in self.budget.phases)

    def trim(self) -> None:
        self.trimmed += 1
        self.cached = 0


@pytest.mark.parametrize(("memory", "trims"), [(700_000, True), (1 << 30, False)])
def test_what_the_allocator_keeps_counts_against_the_budget(memory: int, trims: bool) -> None:
    """It is given back before a phase that would not fit beside it, and kept where there is room: then steps are faster."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory=memory, **{**EAGER, "disable": ["cycle"]})
    budget = budget_of(pipe)
    allocator = budget._allocator = Caching(budget)
    allocator.activations = 100_000
    settled = []
    for seed in range(3):
        assert torch.equal(WAN.generate(pipe, seed), WAN.generate(twin, seed))
        settled.append(allocator.trimmed)
    assert all(p.calls > 1 and p.goal is not None for p in budget.phases)
    assert sum(m.moved_bytes for p in programs(pipe.transformer) for m in p.measurements) > 0
    assert settled[0] >= 3, "before the first call of each phase, whose needs are not known"
    assert (settled[2] > settled[1]) is trims
    assert 300_000 < allocator.most <= budget.total
    remove(pipe)
