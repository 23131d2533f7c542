"""``chunkflow pipeline``: a generation planned without weights."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Block, InTurn, cut_of, memory_named
from torch import nn
from two_blocks import timed

from chunkflow_compile.catalog.eager_cost import eager_cost
from chunkflow_compile.catalog.presets import OutputSizes, Preset
from chunkflow_compile.catalog.published import PUBLISHED, Encoder, Published
from chunkflow_compile.catalog.small import SMALL_MODELS, Size
from chunkflow_compile.cli import pipeline
from chunkflow_compile.cli.arguments import FORMS
from chunkflow_compile.cli.main import main
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.headroom import budget_for
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut, whole_blocks
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.hoist import split as split_halves
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.report.generation_tables import Limits, generation_answer, generation_tables
from chunkflow_compile.simulate.generation import GROUP_OFFLOAD, MODEL_OFFLOAD, Component, generations, least_budget
from chunkflow_compile.units import size

pytest.importorskip("transformers")


def test_what_an_eager_call_takes() -> None:
    """Two products and a sum: counted by hand."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.two(x)

    cost = eager_cost(lambda: (Sum(), {"x": torch.randn(16, 64)}), torch.float32)
    weight, inputs, output = 64 * 32 * 4, 16 * 64 * 4, 16 * 32 * 4
    assert cost.weights == 2 * weight
    assert cost.flops == 2 * 2 * 16 * 64 * 32
    assert cost.activations == inputs + 3 * output, "the inputs, both products and their sum"
    assert cost.traffic >= 2 * (weight + inputs + output) + 3 * output


ENCODER = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 256, "num_heads": 4, "num_layers": 1}


def _small() -> Published:
    """A small Wan of two experts, with its encoder and its VAE."""
    config = {**SMALL_MODELS["wan"](Size(layers=2, heads=8)), "in_channels": 16, "out_channels": 16, "text_dim": 64}
    preset = Preset(
        name="small",
        family="wan",
        config=config,
        sizes=OutputSizes(height=64, width=64, frames=5, text=8),
        forwards=2,
        spatial=8,
        temporal=4,
    )
    return Published(
        transformer=preset,
        experts=2,
        encoders=(Encoder(name="text_encoder", class_name="UMT5EncoderModel", config=ENCODER, tokens=8, calls=2),),
        vae="AutoencoderKLWan",
        vae_config={"base_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        channels=16,
        scale=8,
        steps=5,
    )


COMPONENTS = dict[tuple[str, int], list[Component]]()
components_of = pipeline._components


def traced_once(found: Published, sizes: OutputSizes, steps: int, *rest: Any) -> list[Component]:
    """The components of a pipeline; those of the same sizes are the same."""
    key = f"{found.name} {sizes}", steps
    if key not in COMPONENTS:
        COMPONENTS[key] = list(components_of(found, sizes, steps, *rest))
    return COMPONENTS[key]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "small", _small())  # type: ignore[arg-type]
    monkeypatch.setattr(pipeline, "_components", traced_once)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["pipeline", "small", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.usefixtures("small")
def test_a_generation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, picture, timeline = tmp_path / "small.json", tmp_path / "small.png", tmp_path / "trace.json"
    code, out, _ = run(capsys, "--json", str(file), "--picture", str(picture), "--timeline", str(timeline))
    found: dict[str, Any] = json.loads(file.read_text())
    assert code == 0 and "small, 5 frames of 64x64, 5 steps" in out and picture.stat().st_size > 5000
    assert max(map(len, out.splitlines()[:-1])) <= 100, "the last lines are paths"
    assert re.match(
        r"[\d.]+ s per generation, [\d.]+ s per forward, [\d.]+ times all-resident; peak .* of GPU memory;", out
    )
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.endswith(("yes", "NO"))}
    assert rows["chunkflow"] == rows["torch.compile"] == "yes" and "the memory of rtx-4090-pcie, 24.00 GiB" in out
    ways, memory = found["ways"], found["memory"]
    phases = {way: {p["name"]: p for p in g["phases"]} for way, g in ways.items()}
    assert list(phases["chunkflow"]) == ["text_encoder", "transformer", "transformer_2", "vae"]
    assert [p["calls"] for p in phases["plain"].values()] == [2, 6, 4, 2], "the decoder runs once for each latent frame"
    component = next(c for c in next(iter(COMPONENTS.values())) if c.name == "transformer")
    assert component.cut is not None
    whole = whole_blocks(component.cut, Settings(hardware=load_profile("rtx-4090-pcie"))).problem
    assert phases["plain"]["transformer"]["activations"] == whole.live_bytes > 0
    assert "determine the minimum of GPU memory: pipe.vae.enable_tiling()" in " ".join(out.split())
    total = phases["plain"]["vae"]["weights"]
    assert all(p["weights"] == total for p in phases["plain"].values())
    assert sum(p["weights"] for p in phases[MODEL_OFFLOAD].values()) == total
    most = {way: max(p["weights"] + p["activations"] for p in g.values()) for way, g in phases.items()}
    assert most["chunkflow"] <= memory == found["least"]
    # weights below min_bytes stay on the device: here all of them
    assert most[MODEL_OFFLOAD] < most["chunkflow"] <= most["plain"]
    check_timeline(json.loads(timeline.read_text())["traceEvents"], [*phases["chunkflow"].values()])
    host = {way: sum(p["host"] for p in g["phases"]) for way, g in ways.items()}
    assert host["plain"] == 0 < host[MODEL_OFFLOAD] == total == host[GROUP_OFFLOAD] >= host["chunkflow"] > 0.9 * total
    code, out, _ = run(capsys, "--memory", "1GiB", "--split", "1", "--json", "-")
    assert code == 0 and json.loads(out)["memory"] == 1 << 30
    resident = {p["name"]: p["seconds"] for p in json.loads(out)["ways"]["chunkflow"]["phases"]}
    assert all(resident[name] <= p["seconds"] for name, p in phases["chunkflow"].items())


class Wide(nn.Module):
    """A feed-forward whose inner values are eight times as wide as its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def test_a_generation_in_slices() -> None:
    """The smallest budget is that of slices; with it, they are planned, and less is refused with the minimum."""
    cut = cut_of(InTurn(Wide() for _ in range(2)), torch.randn(1, 512, 64))
    component = Component(
        name="transformer", weights=cut.problem.total_bytes, small=0, activations=None, calls=1, cut=cut
    )
    machine = load_profile("rtx-4090-pcie")
    least, whole = (least_budget([replace(component, split=split)], machine) for split in ("auto", 1))
    assert least < budget_for(cut.problem.live_bytes) < whole, "whole blocks need more for activations alone"
    ways = generations([component], machine, least)
    mine, plain = ways["chunkflow"][0], ways["plain"][0]
    assert mine.bytes <= least and mine.activations < plain.activations / 2
    limits = Limits(budget=least, card=machine.name, card_bytes=machine.memory_bytes)
    assert re.search(r"transformer: blocks run in \d+ slices of the tokens", generation_tables(ways, limits))
    halved = generations([replace(component, split=2)], machine, 2 * whole)["chunkflow"][0]
    assert halved.notes == ("blocks run in 2 slices of the tokens",), "as the user says"
    assert not generations([component], machine, 2 * whole)["chunkflow"][0].notes
    for split in ("auto", 1, 2):
        each = replace(component, split=split)
        with pytest.raises(ChunkflowError, match=r"its activations take up to .*Give memory="):
            generations([each], machine, least_budget([each], machine) - 64)


def test_the_minimum_is_for_all_components() -> None:
    """It is stated if the first one has too little, too, and is just enough."""
    machine = load_profile("rtx-4090-pcie")
    cuts = {
        name: cut_of(InTurn(Wide() for _ in range(2)), torch.randn(1, n, 64)) for name, n in (("a", 64), ("b", 512))
    }
    components = [
        Component(name=name, weights=cut.problem.total_bytes, small=100, activations=None, calls=1, cut=cut)
        for name, cut in cuts.items()
    ]
    with pytest.raises(ChunkflowError, match=r"too little for a: .*, and another component needs ") as told:
        generations(components, machine, 50_000)
    least = memory_named(told.value)
    generations(components, machine, least)
    with pytest.raises(ChunkflowError, match="too little for b: ") as told:
        generations(components, machine, int(0.99 * least))
    assert memory_named(told.value) == least


def test_a_generation_of_hoisted_weights() -> None:
    """Within one budget, where the link is the bound: the rows are computed once, before the first call."""
    model, inputs = timed()
    traced = trace(model, inputs, min_bytes=64)
    cut, halves = make_cut(traced), split_halves(traced)
    assert halves is not None
    weights = cut.problem.total_bytes
    component = Component(name="transformer", weights=weights, small=0, activations=0, calls=50, cut=cut, halves=halves)
    machine = replace(load_profile("rtx-4090-pcie"), h2d_bandwidth=1e6)
    memory = budget_for(24_000)
    ways = {name: generations([replace(component, hoist=FORMS[name])], machine, memory) for name in FORMS}
    phases = {name: way["chunkflow"][0] for name, way in ways.items()}
    assert phases["auto"] == phases["yes"] and phases["yes"].seconds < 0.8 * phases["no"].seconds
    assert phases["yes"].loading_s > phases["no"].loading_s, "the rows"
    assert all(phase.weights <= 24_000 for phase in phases.values())
    assert ways["yes"]["plain"] == ways["no"]["plain"]


def test_a_generation_of_packed_weights() -> None:
    """Within one budget, where the link is the bound: the planned way is faster, the others stay as they are."""
    cut = cut_of(InTurn(Block(256) for _ in range(8)).bfloat16(), torch.randn(64, 256).bfloat16())
    weights = cut.problem.total_bytes
    component = Component(name="transformer", weights=weights, small=0, activations=0, calls=4, cut=cut)
    machine, forms = replace(load_profile("rtx-4090-pcie"), h2d_bandwidth=1e9), ("no", "yes", "auto")
    components = {pack: [replace(component, pack=FORMS[pack])] for pack in forms}
    least = {pack: least_budget(given, machine) for pack, given in components.items()}
    assert least["auto"] == min(least.values()) < least["yes"], "the values of a weight are on the device too"
    memory = budget_for(weights // 2)
    ways = {pack: generations(given, machine, memory) for pack, given in components.items()}
    seconds = {pack: way["chunkflow"][0].seconds for pack, way in ways.items()}
    assert seconds["auto"] <= seconds["yes"] < 0.8 * seconds["no"]
    assert all(way["chunkflow"][0].weights <= weights // 2 for way in ways.values())
    for name in ("plain", GROUP_OFFLOAD):
        assert ways["yes"][name] == ways["no"][name]
    limits = Limits(budget=memory, card=machine.name, card_bytes=machine.memory_bytes)
    shown = generation_tables(ways["yes"], limits)
    marks = {line.split()[0]: line.split()[-1] for line in shown.splitlines() if line.endswith(("yes", "NO"))}
    assert marks == {"torch.compile": "NO", "model": "NO", "group": "yes", "chunkflow": "yes"}, shown
    assert generation_answer(ways["yes"], limits).endswith(f", which does not fit the budget, {size(memory)}")
    assert "does not" not in generation_answer(ways["yes"], replace(limits, budget=None)), "24 GiB hold it"
    host = {way: phases[0].host for way, phases in ways["yes"].items()}
    assert host["plain"] == 0 < host["chunkflow"] < 0.8 * host[GROUP_OFFLOAD] == 0.8 * weights, "packed"


def check_timeline(events: list[dict[str, Any]], phases: list[dict[str, Any]]) -> None:
    """Phases one after another, the bytes of each, and the regions of two of its calls inside it."""
    slices = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "phase"}
    begins, ends = ([slices[p["name"]][i] for p in phases] for i in (0, 1))
    assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
    counted = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "on the device"]
    assert counted == [*(p["weights"] + p["activations"] for p in phases), 0]
    regions = [e for e in events if e.get("cat") == "compute"]
    inside = [[e for e in regions if begin <= e["ts"] < end] for begin, end in zip(begins, ends, strict=True)]
    assert sum(map(len, inside)) == len(regions), "regions outside of the phases"
    assert all(inside[:-1]) and not inside[-1], "the decoder runs eagerly"
    assert {e["args"]["call"] for e in inside[1]} >= {0, 1}


@pytest.mark.usefixtures("small")
def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, "--memory", "300KiB", "--split", "1")  # the minimum of slices takes seconds
    assert code == 2 and "--memory 300.0 KiB is too little for " in error and "Give --memory '" in error
    assert "activations take up to" in error
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "--split", "half")
    assert "argument --split: 'half' is neither auto nor a number of at least 1" in capsys.readouterr().err
    assert run(capsys, "--steps", "1")[2].endswith("--steps must be at least 2.\n")
    assert run(capsys, "--steps", "0")[2].endswith("--steps must be at least 2.\n")
    assert "is not a multiple of 8" in run(capsys, "--height", "63")[2]
    assert "tracing" not in (said := run(capsys, "--memory", "foo")[2]) and "--memory 'foo' is not a size" in said
    assert main(["pipeline", "flux.1-dev", "--frames", "5"]) == 2
    assert capsys.readouterr().err.endswith("generates images: leave out frames.\n")
    assert main(["pipeline", "flux.2"]) == 2
    assert "There is no pipeline 'flux.2': use one of flux.1-dev" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", ["flux.1-dev", "wan2.2-t2v-a14b", "qwen-image", "hunyuanvideo"])
def test_the_published_pipelines(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FLUX.1 fits 12 GiB and Wan2.2 A14B 24 GiB at 720p, as fast as with all weights on the device; 480p fits 5 GiB."""
    file, room = tmp_path / "found.json", 12 if name == "flux.1-dev" else 24
    assert main(["pipeline", name, "--memory", f"{room}GiB", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    phases = {way: g["phases"] for way, g in found["ways"].items()}
    most = {way: max(p["weights"] + p["activations"] for p in phases[way]) for way in phases}
    assert found["least"] <= most["chunkflow"] <= room << 30 < most["plain"]
    steps = {way: next(p["seconds"] for p in phases[way] if p["name"] == "transformer") for way in phases}
    if name == "qwen-image":  # its prompts are short: compute hides the copies of half of its weights only
        assert steps["chunkflow"] < 1.4 * steps["plain"]
    else:
        assert steps["chunkflow"] <= 1.02 * steps["plain"]
    if name != "flux.1-dev":  # at 720p
        assert found["least"] < 10 << 30
        assert main(["pipeline", name, "--height", "480", "--width", "832", "--json", str(file)]) == 0
        assert json.loads(file.read_text())["least"] < 5 << 30
