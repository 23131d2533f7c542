"""Components that take turns in every step, such as a ControlNet and a transformer: their weights share an arena."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers import flux_with_controlnet
from small_pipelines import small_pipeline
from test_pipelines import EAGER, FLUX

from chunkflow_compile import apply, cycles, explain, programs, remove
from chunkflow_compile.pipeline.budget import Budget, Phase, budget_of

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet")
CALL = {"control_image": torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)), "num_inference_steps": 5}


def applied(memory: str) -> tuple[Any, Any, Budget, Phase, Phase]:
    """A pipeline, its plain twin, the budget, and the phases of its ControlNet and transformer."""
    pipe, twin = (flux_with_controlnet(small_pipeline("flux").components) for _ in range(2))
    apply(pipe, memory=memory, **EAGER)
    budget = budget_of(pipe)
    assert budget is not None
    control, transformer = (budget.phase_of(model) for model in (pipe.controlnet, pipe.transformer))
    assert control is not None and transformer is not None and control.arena is transformer.arena
    return pipe, twin, budget, control, transformer


def primed(phase: Phase) -> int:
    return sum(m.primed_bytes for program in programs(phase.root) for m in program.measurements)


def arenas(budget: Budget) -> int:
    """Bytes of weights on the device."""
    return sum(arena.held for arena in {p.arena for p in budget.phases}) + sum(p.kept for p in budget.phases)


@pytest.mark.parametrize("memory", ["2MiB", pytest.param("1MiB", marks=pytest.mark.long)])
def test_both_stay_on_the_device(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With less room than their weights: neither gives way, no step fetches again what it had, the budget is kept.

    In 1 MiB even the least that their own plans take has no room side by side.
    """
    pipe, twin, budget, control, transformer = applied(memory)
    assert control.streamed + transformer.streamed > budget.usable
    most, steps, count = list[int](), list[tuple[int, int]](), Counter[str]()

    def begin(*_: Any) -> None:
        steps.append((primed(control), primed(transformer)))

    def end(*_: Any) -> None:
        most.append(arenas(budget))

    for model in (pipe.controlnet, pipe.transformer):
        model.register_forward_hook(end, always_call=True)
    pipe.controlnet.register_forward_pre_hook(begin)
    for seed in range(3):
        assert torch.equal(FLUX.generate(pipe, seed, **CALL), FLUX.generate(twin, seed, **CALL))
        control.arena.cycles.wait_planned()
    before = control.goal, transformer.goal
    steps.clear()
    free = budget._vacate

    def vacate(phases: Any) -> None:
        chosen = [*phases]
        count.update(p.name for p in chosen if p.arena.held)
        free(chosen)

    monkeypatch.setattr(budget, "_vacate", vacate)
    assert torch.equal(FLUX.generate(pipe, 3, **CALL), FLUX.generate(twin, 3, **CALL))
    assert len(steps) == 5 and {*steps[2:]} == {steps[2]}, "only the first step is cold"
    assert len(most) == 40 and max(most) <= budget.usable
    assert count["controlnet"] + count["transformer"] <= 2, "for the encoders and the decoder"
    assert before == (control.goal, transformer.goal)
    (cycle,) = cycles(pipe.transformer)
    figures = {p.name: p for p in budget.figures().phases}
    predicted = [figures[name].predicted_s for name in ("controlnet", "transformer")]
    assert min(predicted) > 0 and sum(predicted) == pytest.approx(cycle.cycle.plan.predicted.step_s)
    remove(pipe)


@pytest.mark.parametrize("size", [32, pytest.param(48, marks=pytest.mark.long)])
def test_steps_without_the_controlnet_and_other_sizes(size: int) -> None:
    """The ControlNet is left out in the last steps of a generation, and in all steps of another pipeline."""
    from diffusers import FluxPipeline

    pipe, twin, budget, control, transformer = applied("2MiB")
    for seed, until in enumerate((1.0, 0.5, 0.5, 1.0)):
        given = {**CALL, "control_guidance_end": until}
        if seed % 2:
            given.update(height=size, width=size)
        assert torch.equal(FLUX.generate(pipe, seed, **given), FLUX.generate(twin, seed, **given))
        assert arenas(budget) <= budget.usable
        transformer.arena.cycles.wait_planned()
    other, plain = (
        FluxPipeline(**{name: part for name, part in p.components.items() if name != "controlnet"})
        for p in (pipe, twin)
    )
    for p in (other, plain):
        p.set_progress_bar_config(disable=True)
    apply(other)
    assert budget.phase_of(other.transformer) is transformer
    for seed in range(2):
        assert torch.equal(FLUX.generate(other, seed), FLUX.generate(plain, seed))
    assert transformer.goal == budget.usable - transformer.activations + transformer.kept
    remove(pipe)
    assert control not in budget.phases and transformer.arena.grows is not None
    assert torch.equal(FLUX.generate(other, 2), FLUX.generate(plain, 2))
    remove(other)


@pytest.mark.long
def test_out_of_memory() -> None:
    """The call runs again on a smaller plan of both, and the next generation has the whole budget."""
    pipe, twin, _, control, transformer = applied("2MiB")
    held, fails = list[int](), list[bool]()

    def check(*_: Any) -> None:
        held.append(transformer.arena.held)
        if fails:
            fails.pop()
            raise torch.OutOfMemoryError("no room")

    pipe.transformer.norm_out.register_forward_pre_hook(check)
    for seed in range(4):
        held.clear()
        if seed == 2:
            fails.append(True)
        goals = control.goal, transformer.goal
        assert torch.equal(FLUX.generate(pipe, seed, **CALL), FLUX.generate(twin, seed, **CALL))
        control.arena.cycles.wait_planned()
        if seed == 2:
            assert max(held[1:]) <= held[0] // 2 and transformer.retries == 1 and control.retries == 0
            assert control.goal == transformer.goal < min(goals)
    assert (control.goal, transformer.goal) == goals or min(control.goal, transformer.goal) > held[0]
    assert "controlnet: shares memory on the device with" in str(explain(pipe))
    remove(pipe)
