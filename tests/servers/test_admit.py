"""``admit`` says before a request what ``explain`` says after it, and moves and compiles nothing."""

from __future__ import annotations

import inspect
import pickle
import subprocess
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from helpers import graphs
from pipelines import plain
from problems import CHUNK, MACHINE, blocks_problem
from small_pipelines import SMALL_PIPELINES, small_pipeline

from chunkflow_compile import ChunkflowError, admit, apply, cycles, explain, programs, remove
from chunkflow_compile.catalog.families import FAMILIES
from chunkflow_compile.catalog.weightless import trace_without_weights
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.placement.splitting import REPEATS
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.runtime.device_base import Device
from chunkflow_compile.servers import admit as admit_module
from chunkflow_compile.servers.admit import _KNOWN, Admitter, _branches
from chunkflow_compile.servers.forecast import Forecast, tokens_of

SIZES = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "max_sequence_length")


def moved(pipe: Any) -> int:
    found = (m for p in programs(pipe.transformer) for m in p.measurements)
    return sum(m.moved_bytes + m.primed_bytes for m in found)


def _refuse_to_wait(device: Device, wait: bool = False) -> None:
    assert not wait, "a request may be running"


def sizes_of(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name in SIZES}


@pytest.mark.parametrize(
    "name, branches", [pytest.param("wan", 2, marks=pytest.mark.long), pytest.param("flux", 1, marks=pytest.mark.long)]
)
def test_it_says_what_explain_says_after_the_run(name: str, branches: int) -> None:
    pipe = apply(small_pipeline(name), memory="2MiB", min_bytes=2048, lowering="eager")
    call = {**SMALL_PIPELINES[name].call}
    for scale in (1, 2):
        request = {**call, "height": scale * call["height"], "width": scale * call["width"]}
        before = graphs(), len(programs(pipe.transformer)), moved(pipe)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Device, "collect", _refuse_to_wait)
            answer = admit(pipe, **sizes_of(request))
        assert (graphs() - before[0], len(programs(pipe.transformer)), moved(pipe)) == (0, *before[1:])
        for _ in range(2):
            pipe(**request)
        pipe(**request)
        phase = next(p for p in explain(pipe).phases if p.name == "transformer")
        assert phase.predicted_s is not None
        assert answer.fits and answer.step_s == pytest.approx(branches * phase.predicted_s, rel=0.1)
        planned = cycles(pipe.transformer)[0].cycle.plan.device_bytes
        assert answer.device_bytes - answer.activation_bytes == pytest.approx(planned, rel=0.1)
        assert answer.total_s >= request["num_inference_steps"] * answer.step_s
    assert answer.host_bytes > 10**6 and answer.budget == 2 << 20
    same = [admit(pipe, **sizes_of(request)).to_json() for _ in range(2)]
    assert same[0] == same[1]
    elsewhere = pickle.loads(pickle.dumps(pipe.__dict__["_chunkflow_admitter"]))
    assert elsewhere.admit(**sizes_of(request)).step_s == answer.step_s, "asked in another process"
    check_refusals(pipe, {**sizes_of(request)})
    remove(pipe)
    with pytest.raises(ChunkflowError, match="is not a compiled pipeline"):
        admit(pipe, height=32, width=32)


def check_refusals(pipe: Any, sizes: dict[str, Any]) -> None:
    """What does not fit, neither in slices; and what is no request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forecast, "activations_at", lambda *_: 2 << 20)
        answer = admit(pipe, **sizes)
    assert not answer.fits and "give compile at least memory=" in answer.reason and "no: " in str(answer)
    multiple = 4 if type(pipe).__name__ == "FluxPipeline" else 16  # of these small ones
    for wrong, says in (
        ({"hight": 32}, "has no argument 'hight'; did you mean 'height'"),
        ({"height": 33, "width": 32}, f"height=33 is not a multiple of {multiple}, as"),
    ):
        with pytest.raises(ChunkflowError, match=says):
            admit(pipe, **wrong)
    if "num_frames" in sizes:
        with pytest.raises(ChunkflowError, match="num_frames=6 is not 4 k"):
            admit(pipe, **{**sizes, "num_frames": 6})


def test_an_answer_follows_from_three_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between their sizes, a step of both branches takes what a trace of that size would; asked here or elsewhere."""
    problems = {rows: blocks_problem(4, compute=rows + rows**2 / 64) for rows in (16, 32, 48, 64)}
    chosen = Settings(hardware=MACHINE, chunk_bytes=CHUNK)
    forecast = Forecast(chosen, (16, 32, 64), tuple(problems[n] for n in (16, 32, 64)))
    monkeypatch.setattr(Admitter, "_traced", lambda *_: (forecast,))
    monkeypatch.setattr(admit_module, "tokens_of", lambda shape: shape.width)
    pipe = apply(small_pipeline("wan"), memory="2MiB", min_bytes=2048, lowering="eager")
    sizes = {**sizes_of({**SMALL_PIPELINES["wan"].call}), "width": 48 * 8}
    answer = admit(pipe, **sizes)
    (plan,) = forecast.plans.values()
    expected = Simulator(problems[48], chosen.hardware, chosen.chunk_bytes).step_under(plan)
    assert answer.step_s == pytest.approx(2 * expected, rel=0.01)
    assert answer.fits and answer.device_bytes == plan.device_bytes and answer.budget == 2 << 20
    assert answer.total_s >= sizes["num_inference_steps"] * answer.step_s
    elsewhere = pickle.loads(pickle.dumps(pipe.__dict__["_chunkflow_admitter"]))
    assert elsewhere.admit(**sizes).to_json() == answer.to_json() == admit(pipe, **sizes).to_json()
    check_refusals(pipe, sizes)
    remove(pipe)
    with pytest.raises(ChunkflowError, match="is not a compiled pipeline"):
        admit(pipe, height=32, width=32)


@pytest.mark.parametrize(
    "edge, says",
    [
        (16, r"latent of 1x2x2 .*: its 1 tokens must be divisible by the Ulysses degree, which is 2"),
        (32, "Unsupported: x$"),
    ],
)
def test_sizes_that_ranks_cannot_share_say_so(edge: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another failure is told by its last line."""
    pipe = apply(small_pipeline("wan"), memory="2MiB", min_bytes=2048, lowering="eager")
    failed = subprocess.CompletedProcess((), 1, b"", b"Traceback\nUnsupported: x\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ChunkflowError, match=says):
        replace(Admitter.of(pipe), ulysses=2).admit(height=edge, width=edge, num_frames=1)


@pytest.mark.parametrize("name, expand", [*((name, False) for name in _KNOWN), ("wan", True)])
def test_it_traces_the_call_that_the_pipeline_makes(name: str, expand: bool) -> None:
    """With expand_timesteps (Wan2.2 5B) a pipeline passes one timestep per token."""
    small, calls = SMALL_PIPELINES[name], list[dict[str, Any]]()
    pipe = small.build()
    if expand:
        pipe.register_to_config(expand_timesteps=True)
    hook = pipe.transformer.register_forward_pre_hook(lambda _m, _args, given: calls.append(given), with_kwargs=True)
    small.generate(pipe, output_type="latent")
    hook.remove()
    admitter = Admitter.of(apply(pipe, memory="2MiB", min_bytes=2048, lowering="eager"))
    assert admitter.family == name
    inputs = FAMILIES[name].inputs(admitter.config, admitter._shape({**admitter.defaults, **small.call}), None)
    assert [calls[0][n].shape for n in ("hidden_states", "timestep")] == [
        inputs[n].shape for n in ("hidden_states", "timestep")
    ]
    assert inputs["timestep"].ndim == 1 + expand


@pytest.mark.long  # it traces a model in several numbers of slices
def test_activations_are_those_alive_in_compiled_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at a size that was not traced, between those that were; in as few slices as the budget needs."""
    pipe = apply(small_pipeline("wan"), memory="2MiB", min_bytes=2048, lowering="eager")
    admitter = Admitter.of(pipe)
    sizes = {**sizes_of({**SMALL_PIPELINES["wan"].call}), "height": 128, "width": 192}
    shape = admitter._shape({**admitter.defaults, **sizes})
    (whole,), slices = (admitter.trace(shape, repeats) for repeats in (REPEATS[:1], REPEATS[1:]))
    between = replace(shape, width=3 * shape.width // 2)
    build = partial(FAMILIES["wan"].model_and_inputs, admitter.config, between, admitter.dtype)
    problem = make_cut(replace(trace_without_weights(build, 1, 2048, admitter.dtype), fused=False)).problem
    assert whole.activations_at(tokens_of(between)) == pytest.approx(problem.live_bytes, rel=0.05)
    known = {REPEATS[:1]: (whole,), REPEATS[1:]: slices}
    monkeypatch.setattr(Admitter, "_traced", lambda _, __, repeats: known[repeats])
    needed = [each.least + each.problems[1].live_bytes for each in (whole, *slices)]
    assert needed[-1] < 0.8 * needed[0] and len(slices) > 2
    for usable, each in ((needed[0], whole), (needed[0] - 1, slices[0]), (needed[-1], slices[-1])):
        answer = replace(admitter, usable=usable, forecasts={}).admit(**sizes)
        assert answer.fits and answer.activation_bytes == each.problems[1].live_bytes
    assert not replace(admitter, usable=min(needed) - 1, forecasts={}).admit(**sizes).fits


@pytest.mark.parametrize("name", ["wan", "flux", "hunyuanvideo", "qwen-image"])
@pytest.mark.parametrize("scale", [None, 1.0, 4.0])
@pytest.mark.parametrize("negative", [None, "rain"])
def test_it_counts_the_forwards_that_the_pipeline_runs(name: str, scale: float | None, negative: str | None) -> None:
    """Guidance needs a scale, and in pipelines with true_cfg_scale a negative prompt too."""
    pipe, calls = plain(name), list[Any]()
    call: dict[str, Any] = {k: v for k, v in SMALL_PIPELINES[name].call.items() if k != "negative_prompt"}
    known = "true_cfg_scale" if name != "wan" else "guidance_scale"
    call |= {"num_inference_steps": 1, "output_type": "latent", "negative_prompt": negative}
    call |= {} if scale is None else {known: scale}
    hook = pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        pipe(**call)
    finally:
        hook.remove()
    defaults = {n: p.default for n, p in inspect.signature(type(pipe).__call__).parameters.items()}
    assert len(calls) == _branches({**defaults, **call})
