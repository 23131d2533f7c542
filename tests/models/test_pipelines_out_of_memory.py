"""A call of an applied pipeline that runs out of device memory: weights give way, it runs again, and they come back."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from conftest import FAST
from pipelines import WAN, Allocator, Applied, expected, held

from chunkflow_compile import ChunkflowError, explain, programs
from chunkflow_compile.pipeline.budget import Budget, Phase
from chunkflow_compile.pipeline.oom_retry import RngSnapshot


def test_out_of_memory_in_a_phase(applied: Applied, caplog: pytest.LogCaptureFixture) -> None:
    """Weights give way, and the call runs again; a second time it is an error that names the component."""
    pipe, budget = applied(memory="1GiB")
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
    assert "vae ran out of memory once; weights gave way" in str(explain(pipe))
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
        raise AssertionError(f"{self.phase.name} holds {self.held}, with the goal {self.phase.goal}")


@pytest.fixture
def pressed(applied: Applied) -> Pressed:
    return Pressed(*applied(hardware=FAST))


def test_a_failure_that_passes_does_not_cost_residency_for_good(pressed: Pressed) -> None:
    pipe, phase = pressed.pipe, pressed.phase
    pressed.settle()
    full, goal = pressed.held, phase.goal
    pressed.room = 3 * full // 4
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    assert pressed.failed == phase.retries == 1 and pressed.held <= full // 2
    pressed.room = None
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    assert phase.goal == goal, "in the next generation it is planned for what the activations leave"
    pressed.settle(full - 1)
    assert phase.goal == goal and pressed.held == full
    assert phase.retries == 1
    with pytest.raises(ChunkflowError, match=r"too little for transformer"):
        pressed.budget._set_goal(phase, phase.kept + 1)
    assert phase.goal == goal, "a plan that is refused is no goal"
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
    pipe, budget = applied(memory=700_000, disable=["cycle"])
    allocator, trimmed = Caching(budget), []
    for seed in range(5):
        assert torch.equal(WAN.generate(pipe, seed), expected("wan", seed))
        trimmed.append(allocator.trimmed)
        assert 300_000 < allocator.most <= budget.total
        if seed == 2:
            budget.total = 1 << 30
    assert all(p.calls > 1 and p.goal is not None for p in budget.phases)
    assert sum(m.moved_bytes for p in programs(pipe.transformer) for m in p.measurements) > 0
    assert trimmed[0] >= 3, "before the first call of each phase, whose needs are not known"
    assert trimmed[1] < trimmed[2] and trimmed[3] == trimmed[4]
