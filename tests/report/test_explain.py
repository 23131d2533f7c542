"""What ``explain`` says of a model at any time of its life, and of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import EAGER
from helpers import Block, InTurn, check_steps, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, cycles, explain, programs, replan, restore
from chunkflow_compile.report.explain import Explanation
from chunkflow_compile.report.phases import PhaseFigures, PipelineFigures
from chunkflow_compile.report.record import seconds
from chunkflow_compile.runtime.measurement import seconds_of_calls

NOT_YET = "No program of this model has run yet: compile it with ChunkFlow and call it first, also after restore"

pytestmark = pytest.mark.usefixtures("no_grad")


class Parts(InTurn):
    """Blocks and a head: four parts by kind."""

    def __init__(self) -> None:
        super().__init__(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


def explained(model: nn.Module) -> tuple[Explanation, str]:
    found = explain(model)
    assert isinstance(found, Explanation)
    return found, " ".join(str(found).split())


def step(model: nn.Module, twin: nn.Module) -> None:
    check_steps(model, twin, 1, (4, 32))


@pytest.mark.parametrize("disable", [(), ("cycle",)])
def test_a_part_of_a_model_is_explained_as_one_until_a_pass_over_all_is_measured(disable: tuple[str, ...]) -> None:
    model, twin = twins(Parts)
    chunkflow_compile.compile(model, **EAGER, disable=disable)
    with pytest.raises(ChunkflowError, match=NOT_YET):
        explain(model)
    for calls in (1, 2):
        step(model, twin)
        found, text = explained(model)
        medians = {p: sorted(m.step_s for m in p.measurements) for p in programs(model)}
        longest = max(medians, key=lambda p: sum(medians[p]))
        names = {p: next(iter(p.call.names().values())).rpartition(".")[0] for p in medians}
        (name,) = (name for name in names.values() if f"a call of {name.removesuffix('.up')}" == found.figures[0].name)
        assert found.plan == longest.plan.digest and name == names[longest]
        assert found.figures[0].measured == pytest.approx(sum(medians[longest]) / calls)
        predicted_s = sum(p.plan.predicted.step_s for p in medians if p.plan.predicted is not None)
        measured_s = sum(sum(m) / calls for m in medians.values())
        assert f"takes longest of the {len(medians)} parts of this model" in text and len(medians) == 4
        assert f"A call of each takes {seconds(predicted_s)} as predicted and {seconds(measured_s)} as measured" in text
        assert f"medians of {calls} call" in text
        assert ("runs as one cycle, from the third on" in text) == (not disable)
    step(model, twin)
    if disable:
        assert "parts of this model" in explained(model)[1]
        return
    for _ in range(2):  # the first is cold, and then one is warm
        found, text = explained(model)
        (bound,) = cycles(model)
        predicted = bound.cycle.plan.predicted
        assert predicted is not None and found.figures[0].name == "a pass over 4 calls"
        of_calls = seconds_of_calls(bound.cycle)
        assert min(of_calls) > 0 and sum(of_calls) == pytest.approx(predicted.step_s)
        assert found.figures[0].predicted == predicted.step_s and len(found.windows) == len(bound.cycle.problem.regions)
        assert "medians of 1 pass;" in text and "parts of this model" not in text
        step(model, twin)
    replan(model, as_measured=True)
    assert "Once a pass over all of them is measured, that is explained" in explained(model)[1]
    step(model, twin)
    found, text = explained(model)
    assert found.hardware.endswith("as measured") and found.figures[0].name == "a pass over 4 calls"
    restore(model)
    with pytest.raises(ChunkflowError, match=NOT_YET):
        explain(model)


def test_a_model_of_one_program() -> None:
    model, twin = twins(Parts)
    model.compile(backend="chunkflow", fullgraph=True, options=EAGER)
    for _ in range(2):
        step(model, twin)
        found, text = explained(model)
        assert found.figures[0].name == "a call of the model" and "parts of this model" not in text
        assert found.plan == programs(model)[0].plan.digest


def phase(**figures: Any) -> PhaseFigures:
    plain: dict[str, Any] = {"name": "vae", "model": "VAE", "weights": 2, "streamed": 1, "on_device": 1}
    plain |= {"activations": None, "calls": 1, "predicted_s": 1.0, "measured_s": 1.05, "retries": 0, "hardware": "cpu"}
    return PhaseFigures(**{**plain, **figures})


def test_a_table_of_a_pipeline_says_where_the_profile_does_not_fit() -> None:
    far = "Some calls take far from what was predicted: the profile 'cpu' does not fit this machine, or the machine was busy"
    fix = "run chunkflow calibrate and apply with hardware='measured'"
    for measured_s, said in ((1.05, False), (1.5, True), (0.5, True), (None, False)):
        text = " ".join(str(PipelineFigures((phase(measured_s=measured_s),), 100)).split())
        assert (far in text and fix in text) == said == ("calibrate" in text), measured_s
    assert "calibrate" not in str(PipelineFigures((phase(predicted_s=None, measured_s=9.0),), 100))
    for counted, phases in (
        (False, (phase(),)),
        (True, (phase(), phase(activations=3))),
    ):  # nothing counts them on a CPU
        assert ("activations" in str(PipelineFigures(phases, 100)).split("budget:")[0]) == counted
