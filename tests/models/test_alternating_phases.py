"""Components that take turns in every step, such as a ControlNet and a transformer: both stay on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import flux_with_controlnet
from test_pipelines import EAGER, FLUX
from torch import nn

from chunkflow_compile import apply, programs, remove
from chunkflow_compile.alternating import Alternating
from chunkflow_compile.models.small_pipelines import small_pipeline
from chunkflow_compile.phases import Budget, Phase, budget_of

pytest.importorskip("transformers")
CALL = {"control_image": torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)), "num_inference_steps": 5}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CHUNKFLOW_PROGRESS", "0")
    yield


def vacated(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the memory of each phase is freed from now on."""
    count = Counter[str]()
    free = budget._vacate

    def vacate(phases: Any) -> None:
        chosen = [*phases]
        count.update(p.name for p in chosen if p.arena.held)
        free(chosen)

    monkeypatch.setattr(budget, "_vacate", vacate)
    return count


def primed(phase: Phase) -> int:
    return sum(m.primed_bytes for program in programs(phase.root) for m in program.measurements)


def phases_of(pipe: Any) -> tuple[Budget, Phase, Phase]:
    budget = budget_of(pipe)
    assert budget is not None
    both = [budget.phase_of(model) for model in (pipe.controlnet, pipe.transformer)]
    assert both[0] is not None and both[1] is not None
    return budget, both[0], both[1]


class Small(Phase):
    """Of which what counts is said."""

    def __init__(self, name: str, streamed: int, least: int) -> None:
        super().__init__(name, nn.Linear(1, 1), torch.device("cpu"))
        self.said = streamed, least
        self.goal = 1
        self.arena = SimpleNamespace(tenants=[1])  # type: ignore[assignment]

    streamed = property(lambda self: self.said[0])  # type: ignore[assignment]
    least = property(lambda self: self.said[1])  # type: ignore[assignment]
    kept = property(lambda self: 0)  # type: ignore[assignment]


def test_which_phases_alternate() -> None:
    """Those that begin three times in one generation; encoders begin twice, and what is called alone has no turns."""
    encoder, control, transformer = (Small(n, 100, 10) for n in ("encoder", "control", "transformer"))
    found = Alternating()
    order = [encoder, control, encoder, control, transformer, control, transformer]
    assert not any(found.begins(phase) for phase in order * 3), "outside of a generation"
    for _ in range(2):
        found.generation()
        assert not any(found.begins(phase) for phase in order)
        assert not found.ended()
    found.generation()
    assert not any(found.begins(phase) for phase in order)
    assert found.begins(transformer) == {control, transformer}
    found.join({control, transformer})
    assert not found.begins(control) and not found.ended()
    found.generation()
    found.begins(encoder)
    assert not found.ended(), "none of them ran"
    found.generation()
    found.begins(control)
    assert found.ended() and {*found.part()} == {control, transformer}


def test_shares() -> None:
    """The least of each first, the rest by their weights; nothing if there is no room for the least of all."""
    one, two = Small("one", 110, 10), Small("two", 320, 20)
    found = Alternating()
    found.join([one, two])
    assert found.shares(29) is None
    assert found.shares(30) == {one: 10, two: 20}
    assert found.shares(70) == {one: 20, two: 50}
    assert found.shares(430) == {one: 110, two: 320}, "all of it"
    assert {*found.part(for_good=True)} == {one, two} and not found.members


@pytest.mark.long
def test_both_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With less room than their weights: neither gives way, and no step fetches again what it had."""
    pipe, twin = (
        flux_with_controlnet(small_pipeline("flux").components),
        flux_with_controlnet(small_pipeline("flux").components),
    )
    apply(pipe, memory="2MiB", **EAGER)
    budget, control, transformer = phases_of(pipe)
    assert control.streamed + transformer.streamed > budget.usable
    for seed in range(3):
        assert torch.equal(FLUX.generate(pipe, seed, **CALL), FLUX.generate(twin, seed, **CALL))
        for phase in (control, transformer):
            phase.arena.courses.settle()
    before = {phase: phase.goal for phase in (control, transformer)}
    count, steps = vacated(budget, monkeypatch), []

    def begin(*_: Any) -> None:
        steps.append((primed(control), primed(transformer), control.arena.held, transformer.arena.held))

    handle = pipe.controlnet.register_forward_pre_hook(begin)
    assert torch.equal(FLUX.generate(pipe, 3, **CALL), FLUX.generate(twin, 3, **CALL))
    handle.remove()
    assert len(steps) == 5 and {s[:2] for s in steps[2:]} == {steps[2][:2]}, "only the first step is cold"
    assert all(min(step[2:]) > 0 for step in steps[1:])
    assert count["controlnet"] + count["transformer"] <= 2, "for the encoders and the decoder"
    assert before == {phase: phase.goal for phase in (control, transformer)}
    assert control.goal + transformer.goal <= budget.usable - max(control.beside, transformer.beside) + sum(
        p.kept for p in (control, transformer)
    )
    remove(pipe)


@pytest.mark.long
def test_without_the_other_one_has_all_the_room() -> None:
    """A generation of another pipeline, which has no ControlNet."""
    from diffusers import FluxPipeline

    pipe, twin = flux_with_controlnet(small_pipeline("flux").components), small_pipeline("flux")
    apply(pipe, memory="2MiB", **EAGER)
    budget, control, transformer = phases_of(pipe)
    FLUX.generate(pipe, **CALL)
    shared = transformer.goal
    assert {*budget._alternating.members} == {control, transformer}
    other = FluxPipeline(**{name: part for name, part in pipe.components.items() if name != "controlnet"})
    other.set_progress_bar_config(disable=True)
    apply(other)
    for seed in range(2):
        assert torch.equal(FLUX.generate(other, seed), FLUX.generate(twin, seed))
    assert not budget._alternating.members
    assert shared < transformer.goal == budget.usable - transformer.beside + transformer.kept
    remove(other)
    remove(pipe)


@pytest.mark.long
def test_only_one_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they give way to each other, and the plans are not made again and again."""
    pipe, twin = (
        flux_with_controlnet(small_pipeline("flux").components),
        flux_with_controlnet(small_pipeline("flux").components),
    )
    apply(pipe, memory="1MiB", **EAGER)
    budget, control, transformer = phases_of(pipe)
    count = vacated(budget, monkeypatch)
    assert torch.equal(FLUX.generate(pipe, **CALL), FLUX.generate(twin, **CALL))
    least = sum(phase.least - phase.kept for phase in (control, transformer))
    assert not budget._alternating.members and budget._alternating._apart
    assert max(control.least, transformer.least) <= budget.usable - sum(p.kept for p in budget.phases) < least
    assert all(budget.usable - p.beside + p.kept == p.goal for p in (control, transformer))
    assert min(count["controlnet"], count["transformer"]) >= 4
    remove(pipe)
