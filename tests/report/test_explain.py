"""What ``explain`` says of a model at any time of its life, and of a pipeline."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import EAGER, FAST
from helpers import Block, InTurn, check_steps, memory_named, twins
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, cycles, explain, programs, replan, restore
from chunkflow_compile.hardware.profiles import is_of_machine
from chunkflow_compile.report.explanation import Explanation
from chunkflow_compile.report.phases import PhaseFigures, PipelineFigures
from chunkflow_compile.report.record import seconds
from chunkflow_compile.report.summary import advice
from chunkflow_compile.runtime.measurement import seconds_of_calls
from chunkflow_compile.units import size

NOT_YET = "No program of this model has run yet: compile it with ChunkFlow and call it first, also after restore"

SLOW = EAGER["hardware"]

pytestmark = pytest.mark.usefixtures("no_grad")


class Parts(InTurn):
    """Blocks and a head: four parts by kind."""

    def __init__(self) -> None:
        super().__init__(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(super().forward(x))


def explained(model: nn.Module) -> tuple[Explanation, str]:
    found = explain(model, details=True)
    assert isinstance(found, Explanation)
    assert str(explain(model)).splitlines() == str(found).splitlines()[:5]
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


def test_five_lines_come_first() -> None:
    """The step, stalls, device memory, host memory, what to change; the rest with ``details``."""
    model, twin = twins(Parts)
    chunkflow_compile.compile(model, **EAGER)
    for _ in range(6):
        step(model, twin)
    found, _ = explained(model)
    (bound,) = cycles(model)
    plan = bound.cycle.plan
    assert bound.measurements[-1].moved_bytes == plan.moved_bytes > 0
    assert plan.predicted is not None
    large = sum(t.nbytes for t in twin.parameters() if t.nbytes >= EAGER["min_bytes"])
    lines = dict(line.split(":", 1) for line in str(explain(model)).splitlines())
    assert [*lines] == ["step", "stalls", "device memory", "host memory", "to go faster"]
    assert lines["step"].strip().startswith(f"{seconds(found.figures[0].measured)} for a pass over 4 calls (median of")
    assert f"{seconds(plan.predicted.step_s)} planned" in lines["step"]
    assert f"{size(plan.device_bytes)} of {size(sum(w.nbytes for w in plan.weights))}" in lines["device memory"]
    assert f"{size(large)} of weights; {size(plan.moved_bytes)} copied" in lines["host memory"]
    assert "details" not in found.to_json()


def test_what_to_change_follows_from_the_longest_wait() -> None:
    rest = {"moved_bytes": 8 << 20, "budget": 1 << 30, "weight_bytes": 4 << 30}
    more = "more memory than 1.00 GiB (all weights: 4.00 GiB), pack=True, or quantised weights"
    for waits, said in (
        ({"waited_s": 0.3}, more),
        ({"waited_s": 0.3, "budget": 4 << 30}, "pack=True, or quantised weights"),
        ({"waited_s": 0.1, "host_s": 0.2}, "the host launches work more slowly than it runs: cudagraphs=True"),
        ({"waited_s": 0.1, "collective_s": 0.2}, "collectives are the limit"),
        ({"waited_s": 0.01}, "all copies overlap with compute: compute is the limit"),
        ({"waited_s": 0.0, "moved_bytes": 0}, "nothing is copied in a step: compute is the limit"),
    ):
        assert advice(step_s=1.0, **{**rest, **waits}).startswith(said), waits


@pytest.mark.parametrize("known", [True, False])
def test_predictions_are_for_a_machine_that_was_measured(known: bool) -> None:
    """The profile of CPUs was measured on another one."""
    model, twin = twins(Parts)
    options = {k: v for k, v in EAGER.items() if k not in ("hardware", "slowdown")}
    chunkflow_compile.compile(model, **options, weight_memory=48 << 10, **({"hardware": SLOW} if known else {}))
    for calls in range(1, 7):
        step(model, twin)
        if calls in (2, 6):  # of a part, and of a cycle
            found, text = explained(model)
            text, counted = re.subn(r"activations: \S+ KiB predicted ", "", text)  # depends on no machine
            assert counted == 1
            assert ("predicted" in text) == ("planned)" in text) == ("ratio" in text) == known, text
            assert ("Predictions are not shown: the profile 'cpu' was not made for this machine" in text) != known
    assert found.windows and found.figures[0].predicted, "the figures have them"
    replan(model, as_measured=True)
    for _ in range(4):
        step(model, twin)
    assert "predicted" in explained(model)[1], "from what this machine took"


def test_which_profiles_are_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="NVIDIA H200"))
    for profile, device, known in (
        ("h200", cuda, True),
        ("h200, as measured", cuda, True),
        ("rtx-4090-pcie", cuda, False),
        ("scaled for NVIDIA RTX 4070", cuda, False),
        ("scaled for NVIDIA RTX 4070, as measured", cuda, True),
        ("hardware", cuda, True),  # what chunkflow calibrate has written
        ("hardware", torch.device("cpu"), True),
        ("h200", torch.device("cpu"), False),
        ("cpu", torch.device("cpu"), False),
        ("cpu", None, False),
        ("h200", None, True),
    ):
        assert is_of_machine(profile, device) == known, (profile, device)


def test_weights_that_are_all_small_are_said_to_be(caplog: pytest.LogCaptureFixture, applied: Any) -> None:
    """By compile, by torch.compile, by apply, and by explain of both."""
    why = "nothing streams: all weights are smaller than min_bytes=1.0 MiB (the largest, "
    small = {k: v for k, v in EAGER.items() if k != "min_bytes"}
    for whole in (False, True):
        # each warning is logged once per process
        model, twin = twins(lambda width=16 + 16 * whole: InTurn(Block(width) for _ in range(3)))
        if whole:
            model.compile(backend="chunkflow", fullgraph=True, options=small)
        else:
            chunkflow_compile.compile(model, **small)
        for _ in range(2):
            check_steps(model, twin, 1, (4, 16 + 16 * whole))
        said = [r.getMessage() for r in caplog.records if "nothing streams" in r.getMessage()]
        assert len(said) == 1 and said[0].startswith(f"InTurn: {why}blocks.0.up.weight, has ")
        assert f"host memory:    {why}blocks.0.up.weight, has " in str(explain(model))
        caplog.clear()
    pipe, _ = applied("wan", memory="64MiB", min_bytes=1 << 20)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "nothing streams" in r.getMessage()]
    assert len(said) == 3 and any(line.startswith(f"pipe.transformer: {why}") for line in said)
    shown = str(explain(pipe))
    assert f"host memory:    {why}" in shown and shown.count(why) == 1, "of one component only"
    caplog.clear()
    applied("wan", memory="64MiB")
    assert "nothing streams" not in caplog.text


def phase(**figures: Any) -> PhaseFigures:
    plain: dict[str, Any] = {"name": "vae", "model": "VAE", "weights": 2, "streamed": 1, "on_device": 1}
    plain |= {"activations": None, "calls": 1, "predicted_s": 1.0, "measured_s": 1.05, "retries": 0, "hardware": "cpu"}
    return PhaseFigures(**{**plain, **figures})


def test_five_lines_of_a_pipeline() -> None:
    """The component that takes longest in all its calls, with its waits."""
    fast = phase(
        name="transformer", calls=20, predicted_s=0.1, measured_s=0.2, stalled_s=0.05, moved=7, weights=1 << 30
    )
    text = str(PipelineFigures((phase(), fast), 2 << 30, most=1 << 30))
    assert (
        text
        == """\
step:           200.0 ms for a call of transformer (20 calls, 100.0 ms planned); vae 1050.0 ms
stalls:         50.0 ms, 25 % of it, waiting for weights
device memory:  1.00 GiB at most, within a budget of 2.00 GiB for weights and activations
host memory:    2 B of 1.00 GiB of weights stream from it
to go faster:   pack=True, or quantised weights"""
    )
    guess = replace(fast, profiled=False)
    shown = str(PipelineFigures((guess,), 2 << 30, details=True))
    assert "planned)" not in shown and "predicted" not in shown
    assert "Predictions are not shown: the profile 'cpu'" in shown
    assert "no component was called yet" in str(PipelineFigures((phase(calls=0, measured_s=None),), 100))


def test_a_table_of_a_pipeline_says_where_the_profile_does_not_fit() -> None:
    far = "Some calls take far from what was predicted: the profile 'cpu' does not fit this machine, or the machine was busy"
    fix = "run chunkflow calibrate and compile with hardware='measured'"
    for measured_s, said in ((1.05, False), (1.5, True), (0.5, True), (None, False)):
        text = " ".join(str(PipelineFigures((phase(measured_s=measured_s),), 100, details=True)).split())
        assert (far in text and fix in text) == said == ("calibrate" in text), measured_s
    assert "calibrate" not in str(PipelineFigures((phase(predicted_s=None, measured_s=9.0),), 100, details=True))
    for counted, phases in (
        (False, (phase(),)),
        (True, (phase(), phase(activations=3))),
    ):  # nothing counts them on a CPU
        assert ("activations" in PipelineFigures(phases, 100)._details()) == counted


SYMBOLIC = (
    "blocks are not split: The sizes of the graph are symbolic: it can be computed in slices only at fixed sizes."
)


@pytest.mark.parametrize(
    "tokens, options, said",
    [
        (64, {"split": 2}, "blocks run in 2 slices of the tokens"),
        (63, {"split": 2}, "blocks are not split: 63 tokens cannot be divided into 2 slices of one size."),
        (48, {"split": 2, "dynamic": True}, SYMBOLIC),
        (48, {"memory": "100KiB", "hardware": FAST, "dynamic": True}, SYMBOLIC),  # too slow
    ],
)
def test_slices_of_blocks_and_why_others_are_whole(
    tokens: int, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Parts().eval()
    chunkflow_compile.offload(model, min_bytes=64)
    dynamic = options.pop("dynamic", False)
    chosen = {**options, "lowering": "eager", "min_bytes": 64}
    model.compile(backend="chunkflow", fullgraph=True, dynamic=dynamic, options=chosen)
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(1, tokens, 32))
    found = explain(model)
    assert not [note for note in found.notes if "the model is not split" in note], "the head is outside of the blocks"
    (live,) = {program.program.problem.live_bytes for program in programs(model)}
    assert said in found.notes and f"activations: {size(live)} predicted" in found.notes
    peak = found.device_bytes + (3 << 20)  # as a GPU's allocator counts it
    monkeypatch.setattr(sys.modules["chunkflow_compile.pipeline.explain"], "_peak", lambda _: peak)
    assert f"activations: {size(live)} predicted, 3.0 MiB measured" in explain(model).notes


class Pooled(nn.Module):
    """A block that needs all tokens at once."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale(x.mean(1, keepdim=True))


class WithPooled(InTurn):
    def __init__(self) -> None:
        super().__init__(Block(32) for _ in range(2))
        self.pooled = nn.ModuleList(Pooled() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.pooled):
            x = block(x)
        return x


def test_blocks_that_a_budget_cannot_split_say_why() -> None:
    model = WithPooled().eval()
    x = torch.randn(1, 1024, 32)
    chunkflow_compile.offload(model, min_bytes=64)

    def run(memory: int) -> None:
        torch._dynamo.reset()
        options = {"memory": memory, "lowering": "eager", "min_bytes": 64}
        model.compile(backend="chunkflow", fullgraph=True, options=options)
        model(x)

    with pytest.raises(Exception, match="too little") as told:
        run(100 << 10)
    run(memory_named(told.value))
    notes = explain(model).notes
    assert any(re.match(r"blocks run in \d+ slices of the tokens", note) for note in notes)
    assert any(note.startswith("pooled are not split: The graph cannot be computed in slices: ") for note in notes)


def test_a_vae_that_determines_the_peak_can_decode_in_tiles() -> None:
    """It is said where it has the most activations, and does not decode in tiles."""
    transformer = phase(name="transformer", activations=5)
    for vae, said in (
        (phase(activations=9, tileable=True), True),
        (phase(activations=9), False),
        (phase(activations=3, tileable=True), False),
        (phase(tileable=True), False),
    ):
        assert ("pipe.vae.enable_tiling()" in PipelineFigures((transformer, vae), 100)._details()) == said
