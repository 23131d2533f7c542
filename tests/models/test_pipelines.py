"""Whole pipelines of diffusers, small and random, within one budget: alone, on two ranks, and several of one's components."""

from __future__ import annotations

import copy
import gc
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from clocks import OwnClock
from conftest import WITHIN
from helpers import graphs
from pipelines import (
    EAGER,
    FLUX,
    MIN_BYTES,
    WAN,
    Applied,
    bytes_moved,
    bytes_read,
    check_transfers,
    expected,
    held,
    is_plain,
    models,
    placed,
    plain,
    same_weights,
)
from small_pipelines import SMALL_PIPELINES, small_pipeline

from chunkflow_compile import ChunkflowError, apply, explain, programs, remove
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.pipeline.budget import Budget, budget_of
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights.host_weight import HostWeight

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("kept_dynamo")
TOLERANCE = 1e-4  # of Inductor, for images between 0 and 1; measured 5e-6
CALLS: list[dict[str, Any]] = [{}, {"prompt": "two cats"}, {"num_inference_steps": 2}]


def memory_of(name: str) -> str:
    """A budget in which most weights stream.  The largest weights of some have 1 and 2.3 MiB, and a transformer that edits
    an image has as many activations as weights."""
    if name == "wan-i2v":
        pytest.importorskip("ftfy")  # which diffusers' pipeline needs
    return {"z-image": "3MiB", "sd3": "3MiB", "sd3.5": "3MiB", "qwen-image-edit": "2MiB"}.get(name, "1MiB")


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of budgets."""
    return [r.getMessage() for r in caplog.records if r.name == "chunkflow_compile.pipeline.budget"]


@pytest.mark.parametrize(
    ("name", "lowering"),
    [
        *(pytest.param(n, "eager", marks=() if n == "wan2.2" else pytest.mark.long) for n in SMALL_PIPELINES),
        *(pytest.param(n, "inductor", marks=pytest.mark.long) for n in SMALL_PIPELINES),
    ],
)
def test_a_pipeline(
    name: str,
    lowering: str,
    applied: Applied,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Several prompts and numbers of steps: equal to the plain pipeline, within the budget; removed bit for bit.  It prints
    nothing, and logs a line for each component after apply and after the first generation."""
    caplog.set_level(logging.INFO, "chunkflow_compile")
    pipe, budget = applied(name, memory_of(name), lowering=lowering)
    most = list[int]()
    lines = [f"pipe.{n} ({type(m).__name__}): " for n, m in models(pipe).items()]
    said = logged(caplog)
    assert all(any(text.startswith(line) and "its first call compiles it" in text for text in said) for line in lines)
    placement_of(pipe.transformer).progress.now = OwnClock(tick=2.0).now
    for phase in budget.phases:
        large = [t for t in phase.weights if t.nbytes >= MIN_BYTES]
        assert large and sum(isinstance(t, HostWeight) for t in large) >= len(large) - 1  # one may be tied
        phase.root.register_forward_hook(lambda *_: most.append(held(budget)), always_call=True)
    for seed, changed in enumerate(CALLS):
        want, got = expected(name, seed, **changed), SMALL_PIPELINES[name].generate(pipe, seed, **changed)
        assert torch.equal(got, want) if lowering == "eager" else torch.allclose(got, want, rtol=0, atol=TOLERANCE)
        # in its first call a component has no goal yet, so it may take what plans leave for the unforeseen
        room = budget.usable if seed else budget.total
        assert len(most) >= len(budget.phases) and max(most) <= room, "components give way to each other"
        most.clear()
        again = logged(caplog)[len(said) :]
        assert len(again) == len(lines) and all(" each" in text for text in again), "after the first generation"
        figures = budget.figures().phases
        assert all(p.predicted_s for p in figures if p.name.startswith("transformer"))
        assert not any(p.activations for p in figures), "nothing counts them on a CPU"
    assert not torch.equal(expected(name), expected(name, 1, **CALLS[1]))
    for phase in budget.phases:
        fetched = bytes_moved(phase)
        if phase.name == "vae":
            fetched += placement_of(phase.root).store.counts.fetched_bytes
        assert phase.calls and fetched >= max(1, bytes_read(phase)), phase.name
        if phase.name.startswith("transformer"):  # encoders have weights that a generation does not read
            assert bytes_read(phase) == phase.streamed, phase.name
    assert "transformer" in str(explain(pipe))
    assert not capsys.readouterr().out
    assert "pipe.transformer: compiled " in caplog.text
    assert torch.equal(SMALL_PIPELINES[name].generate(remove(pipe)), expected(name))


# Height and width of images whose convolutions have more than 20480 elements: torch takes another kernel for less on a CPU.
DECODED = {
    "flux": [(64, 64), (80, 64), (64, 96), (96, 80)],
    "hunyuanvideo": [(64, 64), (96, 64), (64, 128), (128, 96)],
    "ltx": [(64, 64), (96, 64), (64, 128), (128, 96)],
}


@pytest.mark.long
@pytest.mark.parametrize("name", DECODED)
def test_the_third_size_compiles_nothing(name: str, applied: Applied) -> None:
    """Neither the transformer nor the decoder, which is equal to the eager one at each size."""
    pipe, _ = applied(name, "16MiB", lowering="inductor")
    counts = []
    for seed, (height, width) in enumerate(DECODED[name]):
        changed = {"height": height, "width": width}
        want, got = expected(name, seed, **changed), SMALL_PIPELINES[name].generate(pipe, seed, **changed)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
        counts.append(graphs())
    assert any(p.plan.moved_bytes > 0 for p in programs(pipe.vae))
    assert counts[0] < counts[1] == counts[2] == counts[3]


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL_PIPELINES)
def test_sizes_in_turns_and_a_callback(name: str, applied: Applied) -> None:
    memory_of(name)
    # two images of SD3 have 5.2 MiB of activations
    small, (pipe, _) = SMALL_PIPELINES[name], applied(name, "8MiB" if name in ("sd3", "sd3.5") else "4MiB")
    most = {"qwen-image-edit": 96, "ltx": 128}.get(name, 64)
    more = {"num_frames": 17} if "num_frames" in small.call else {"num_images_per_prompt": 2}
    if name == "qwen-image-edit":
        more = {}  # it makes one
    told: list[int] = []

    def tell(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        told.append(step)
        return {"latents": 0.9 * tensors["latents"]}

    for changed in ({"height": most}, {}, {"width": most, **more}, {"height": most, "width": most}, {}):
        told.clear()
        want, got = (small.generate(p, callback_on_step_end=tell, **changed) for p in (plain(name), pipe))
        assert torch.equal(got, want) and told == [*range(small.call["num_inference_steps"])] * 2, changed


def on_rank(rank: int) -> None:
    """Several generations, equal to the plain pipeline on the same ranks; each phase moves what its plan says."""
    os.environ["CHUNKFLOW_PROGRESS"] = "0"
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    for p in (pipe, twin):
        enable_ulysses(p.transformer, 2)
    apply(pipe, memory="512KiB", **EAGER)  # less than any component has
    budget = budget_of(pipe)
    assert budget is not None and {phase.name for phase in budget.phases} == set(models(pipe))
    for seed, changed in enumerate(CALLS):
        want, got = WAN.generate(twin, seed, **changed), WAN.generate(pipe, seed, **changed)
        assert torch.equal(got, want), f"generation {seed} differs from the plain pipeline's on rank {rank}"
    for phase in budget.phases:
        assert phase.streamed > 0.9 * sum(t.nbytes for t in phase.weights)
        check_transfers(phase, generations=len(CALLS))
    collectives = sum(m.collectives for p in programs(pipe.transformer) for m in p.measurements)
    assert collectives > 0, "the ranks shared the sequence"

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    # A rank does not run a call again that the others do not: the first failure is an error, which names the component.
    hook = pipe.vae.decoder.mid_block.register_forward_pre_hook(fail)
    with pytest.raises(ChunkflowError, match=r"vae \(AutoencoderKLWan\) does not fit .* no room"):
        WAN.generate(pipe)
    hook.remove()
    assert [p.retries for p in budget.phases] == [0, 0, 0]
    want = WAN.generate(twin)
    assert torch.equal(WAN.generate(pipe), want)
    remove(pipe)
    assert is_plain(pipe) and same_weights(pipe, twin) and torch.equal(WAN.generate(pipe), want)


@pytest.mark.long
def test_a_pipeline_at_ulysses_2(on_ranks: Callable[..., None]) -> None:
    on_ranks(on_rank)


IMAGE = {"image": torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)), "strength": 1.0}


def made_from(pipe: Any) -> Any:
    from diffusers import FluxImg2ImgPipeline

    made = FluxImg2ImgPipeline.from_pipe(pipe)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_pipeline_made_from_an_applied_one(again: bool, quiet: None) -> None:
    """It replaces the other, which is dropped.  ``apply`` finds the components placed; ``remove`` undoes those that no
    applied pipeline has, also if it is not applied itself."""
    twin = made_from(small_pipeline("flux"))
    want = [FLUX.generate(twin, seed, **IMAGE) for seed in range(2)]
    pipe = apply(small_pipeline("flux"), memory="2MiB", **EAGER)
    made = made_from(pipe)
    assert remove(made) is made and placed(pipe) == {*models(pipe)}, "pipe has them"
    del pipe
    gc.collect()
    if again:
        apply(made)
        assert placed(made) == {*models(made)} == {phase.name for phase in budget_of(made).phases}
        assert all(torch.equal(FLUX.generate(made, seed, **IMAGE), want[seed]) for seed in range(2))
    remove(made)
    assert is_plain(made) and same_weights(made, twin)
    assert torch.equal(FLUX.generate(made, 0, **IMAGE), want[0])


def test_pipelines_that_share_components(applied: Applied) -> None:
    from diffusers import WanPipeline

    pipe, budget = applied()
    other = apply(WanPipeline(**pipe.components))
    assert budget_of(other) is budget
    own = apply(WanPipeline(**{**pipe.components, "vae": small_pipeline("wan", seed=2).vae}))
    assert "vae" in placed(own) and own.vae is not pipe.vae
    remove(own)
    assert "vae" not in placed(own) and placed(pipe) == {*models(pipe)}
    remove(other)
    assert torch.equal(WAN.generate(pipe), expected("wan")), "its components are still applied"
    assert placed(pipe) == {*models(pipe)}
    check_calls_that_wait(pipe, budget)


def check_calls_that_wait(pipe: Any, budget: Budget) -> None:
    """Calls of a shallow copy, while the pipeline is removed, run one at a time: the scheduler counts the steps of one
    generation."""
    other = copy.copy(pipe)

    def tell(*_: Any) -> dict[str, Any]:
        time.sleep(0.02)  # another thread runs
        return {}

    def serve(seed: int) -> torch.Tensor:
        return WAN.generate((pipe, other)[seed % 2], seed, callback_on_step_end=tell)

    assert torch.equal(WAN.generate(other), expected("wan"))
    turn, waiting = budget.turn, threading.Semaphore(0)
    with ThreadPoolExecutor() as pool:
        with turn():
            budget.turn = lambda: (waiting.release(), turn())[1]  # type: ignore[assignment]
            served = pool.map(serve, range(4))
            assert all(waiting.acquire(timeout=WITHIN) for _ in range(4))
            remove(pipe)
        assert all(torch.equal(got, expected("wan", seed)) for seed, got in enumerate(served))
    assert is_plain(remove(other)) and same_weights(other, plain("wan"))


def test_applied_again_it_compiles_nothing(quiet: None) -> None:
    """Also with another budget; and what ``remove`` has undone is freed, though Dynamo keeps what it has compiled."""
    pipe, kept, compiled = small_pipeline("wan"), list[Counter[str]](), 0
    for seed, memory in enumerate(("1MiB", "2MiB", "2MiB")):
        apply(pipe, memory=memory, **EAGER)
        assert torch.equal(WAN.generate(pipe, seed), expected("wan", seed))
        phases = budget_of(pipe).phases
        assert bytes_moved(budget_of(pipe).phase_of(pipe.transformer)) > 0
        arenas = [weakref.ref(phase.arena) for phase in phases]
        remove(pipe)
        del phases
        gc.collect()
        assert not any(arena() for arena in arenas)
        kept.append(Counter(type(o).__name__ for o in gc.get_objects()))
        compiled = graphs() if seed == 0 else compiled
        assert graphs() == compiled
    for name in (
        "HostWeight",
        "HostBuffer",
        "HostStore",
        "Placement",
        "SingleCall",
        "Variant",
        "ShapeEnv",
        "FakeTensor",
    ):
        assert kept[2][name] == kept[1][name], name
