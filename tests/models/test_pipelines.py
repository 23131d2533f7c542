"""Whole pipelines of diffusers, small and random, within one budget."""

from __future__ import annotations

import gc
import re
import threading
from typing import Any

import pytest
import torch
from small_pipelines import SMALL_PIPELINES, small_pipeline
from torch import nn

from chunkflow_compile import apply, explain, programs, remove
from chunkflow_compile.model.placement import placement_of
from chunkflow_compile.pipeline.budget import Budget, Phase, budget_of
from chunkflow_compile.weights.host_weight import HostWeight

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet")
MIN_BYTES = 2048
EAGER = {"min_bytes": MIN_BYTES, "lowering": "eager", "device": "cpu"}
INDUCTOR = {"min_bytes": MIN_BYTES, "device": "cpu"}
WAN, FLUX = SMALL_PIPELINES["wan"], SMALL_PIPELINES["flux"]
TOLERANCE = 1e-4  # of Inductor, for images between 0 and 1; measured 5e-6


def models(pipe: Any) -> dict[str, nn.Module]:
    return {name: m for name, m in pipe.components.items() if isinstance(m, nn.Module)}


def same_weights(pipe: Any, twin: Any) -> bool:
    return all(
        torch.equal(p, q) and type(p) is type(q)
        for name, model in models(twin).items()
        for p, q in zip(model.state_dict().values(), models(pipe)[name].state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(n, EAGER, marks=() if n == "wan2.2" else pytest.mark.long, id=n) for n in SMALL_PIPELINES),
        *(pytest.param(n, INDUCTOR, marks=pytest.mark.long, id=f"{n}-inductor") for n in SMALL_PIPELINES),
    ],
)
def test_a_pipeline(name: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Several prompts and numbers of steps: equal to the plain pipeline, within the budget; removed bit for bit."""
    if name == "wan-i2v":
        pytest.importorskip("ftfy")  # which diffusers' pipeline needs
    small = SMALL_PIPELINES[name]
    pipe, twin = small.build(), small.build()
    memory = "3MiB" if name in ("z-image", "sd3", "sd3.5") else "1MiB"  # their largest have 1 and 2.3 MiB
    assert apply(pipe, memory=memory, **options) is pipe
    printed = capsys.readouterr().out
    budget = budget_of(pipe)
    assert budget is not None and all(n in printed for n in models(pipe))
    for phase in budget.phases:
        large = [t for t in phase.weights if t.nbytes >= MIN_BYTES]
        assert large and sum(isinstance(t, HostWeight) for t in large) >= len(large) - 1  # one may be tied
    seen = []
    calls: list[dict[str, Any]] = [{}, {"prompt": "two cats"}, {"num_inference_steps": 2}]
    for seed, changed in enumerate(calls):
        want, got = small.generate(twin, seed, **changed), small.generate(pipe, seed, **changed)
        assert torch.allclose(got, want, rtol=0, atol=TOLERANCE) if options is INDUCTOR else torch.equal(got, want)
        assert sum(p.arena.held for p in budget.phases) + sum(p.kept for p in budget.phases) <= budget.total
        seen.append(want)
        table = capsys.readouterr().out
        assert ("predicted" in table) == (seed == 0), "the table follows the first generation"
        figures = budget.figures().phases
        assert all(p.predicted_s for p in figures if p.name.startswith("transformer"))
        assert not any(p.activations for p in figures), "nothing counts them on a CPU"
    assert not torch.equal(seen[0], seen[1])
    for phase in budget.phases:
        steps = [m for program in programs(phase.root) for m in program.measurements]
        fetched = sum(m.moved_bytes + m.primed_bytes for m in steps)
        if phase.name == "vae":
            fetched += placement_of(phase.root).store.fetched_bytes
        read = {
            id(buffer): buffer.host.nbytes for program in programs(phase.root) for buffer in program.buffers.values()
        }
        assert phase.calls and fetched >= max(1, sum(read.values())), phase.name
        if phase.name.startswith("transformer"):  # encoders have weights that a generation does not read
            assert sum(read.values()) == phase.streamed, phase.name
    assert "transformer" in str(explain(pipe))
    assert remove(pipe) is pipe and type(pipe) is type(twin) and budget_of(pipe) is None
    assert same_weights(pipe, twin)
    assert not any(isinstance(t, HostWeight) for m in models(pipe).values() for t in m.parameters())
    assert torch.equal(small.generate(pipe), seen[0])


@pytest.mark.long
def test_a_larger_batch_keeps_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a new size, compiled or planned after the components were given their parts of the budget."""
    pipe, twin, held = WAN.build(), WAN.build(), list[int]()
    apply(pipe, memory="500KiB", **EAGER)
    budget = budget_of(pipe)
    assert budget is not None
    noted = Budget._note

    def note(self: Budget, phase: Phase, *rest: Any) -> None:
        held.append(sum(p.arena.held + p.kept for p in self.phases))
        noted(self, phase, *rest)

    monkeypatch.setattr(Budget, "_note", note)
    for seed, count in enumerate((1, 2, 2)):
        want, got = (WAN.generate(p, seed, num_videos_per_prompt=count) for p in (twin, pipe))
        assert torch.equal(got, want)
    assert held and max(held[len(held) // 3 :]) <= budget.total


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n in SMALL_PIPELINES if n != "wan"])
def test_sizes_in_turns_and_a_callback(name: str) -> None:
    if name == "wan-i2v":
        pytest.importorskip("ftfy")
    small = SMALL_PIPELINES[name]
    pipe, twin = small.build(), small.build()
    apply(pipe, memory="4MiB", **EAGER)
    most = {"qwen-image-edit": 96, "ltx": 128}.get(name, 64)
    more = {"num_frames": 17} if "num_frames" in small.call else {"num_images_per_prompt": 2}
    if name == "qwen-image-edit":
        more = {}  # it makes one
    told: list[int] = []

    def tell(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        told.append(step)
        return {"latents": 0.9 * tensors["latents"]}

    for changed in ({"height": most}, {}, {"width": most, **more}, {"height": most, "width": most}, {}):
        want = small.generate(twin, callback_on_step_end=tell, **changed)
        steps, told[:] = [*told], []
        assert torch.equal(small.generate(pipe, callback_on_step_end=tell, **changed), want), changed
        assert told == steps and len(steps) == small.call["num_inference_steps"]
        told.clear()
    remove(pipe)
    assert same_weights(pipe, twin)


def test_the_small_sd35_has_what_sd3_has_not() -> None:
    """Normed queries and keys, blocks with two attentions, and a step that leaves out a block."""
    plain, pipe = (small_pipeline(name).transformer.transformer_blocks for name in ("sd3", "sd3.5"))
    assert all(block.attn.norm_q is None and block.attn2 is None for block in plain)
    assert all(block.attn.norm_q is not None and block.attn.norm_added_k is not None for block in pipe)
    assert [block.attn2 is not None for block in pipe] == [True, True, False]
    pipe, skipped = small_pipeline("sd3.5"), []
    pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: skipped.append(kwargs.get("skip_layers")), with_kwargs=True
    )
    SMALL_PIPELINES["sd3.5"].generate(pipe)
    assert skipped == [None, None, [1], None, [1]]


@pytest.mark.long
def test_what_people_do_with_a_pipeline() -> None:
    """Callbacks, sizes in turns, an adapter through the pipeline, another pipeline of the same components, threads."""
    peft = pytest.importorskip("peft")
    from diffusers import WanPipeline

    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    told: list[int] = []

    def tell(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        told.append(step)
        return tensors

    for changed in (
        {"height": 48},
        {"num_frames": 9},
        {"height": 48},
        {"prompt": "a much longer prompt of more words"},
    ):
        want = WAN.generate(twin, **changed)
        assert torch.equal(WAN.generate(pipe, callback_on_step_end=tell, **changed), want), changed
    assert told == [0, 1, 2] * 4

    config = peft.LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k"], init_lora_weights=False)
    for p in (pipe, twin):
        torch.manual_seed(1)
        p.transformer.add_adapter(config, adapter_name="new")
    plain = WAN.generate(twin)
    assert torch.equal(WAN.generate(pipe), plain)
    for p in (pipe, twin):
        p.set_adapters(["new"], [0.5])
    assert not torch.equal(want := WAN.generate(twin), plain)
    assert torch.equal(WAN.generate(pipe), want)
    for p in (pipe, twin):
        p.unload_lora_weights()

    other = WanPipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    apply(other)
    assert budget_of(other) is budget_of(pipe)
    want = [WAN.generate(twin, seed) for seed in range(4)]
    got: dict[int, torch.Tensor] = {}

    def serve(seed: int) -> None:
        got[seed] = WAN.generate((pipe, other)[seed % 2], seed)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[seed], want[seed]) for seed in range(4)), "one generation at a time"
    remove(other)
    assert torch.equal(WAN.generate(pipe), want[0]), "its components are still applied"
    remove(pipe)
    assert same_weights(pipe, twin)


class Counting:
    """An allocator that says what a test sets."""

    def __init__(self) -> None:
        self.activations = 1000
        self.budget: Any = None

    def begin(self) -> None:
        pass

    def peak(self) -> int:
        return self.activations + sum(p.arena.held for p in self.budget.phases)

    def reserved(self) -> int | None:
        return None

    def trim(self) -> None:
        pass


def test_components_give_way_in_the_first_generation() -> None:
    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    apply(pipe, memory="700KiB", **EAGER)
    budget = budget_of(pipe)
    assert budget is not None
    most = []
    for phase in budget.phases:
        phase.root.register_forward_hook(
            lambda *_: most.append(sum(p.arena.held + p.kept for p in budget.phases)), always_call=True
        )
    for seed in range(2):
        assert torch.equal(FLUX.generate(pipe, seed), FLUX.generate(twin, seed))
    assert len(most) == 10 and max(most) <= budget.usable
    remove(pipe)


def test_a_call_that_is_too_large_and_smaller_ones_after_it(caplog: pytest.LogCaptureFixture) -> None:
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    budget = budget_of(pipe)
    assert budget is not None
    counting = budget._allocator = Counting()
    counting.budget = budget
    assert torch.equal(WAN.generate(pipe), want := WAN.generate(twin))
    counting.activations = 1 << 20
    assert torch.equal(WAN.generate(pipe), want)
    assert re.search(r"memory=1048576 bytes is too little for text_encoder .* smaller sizes", caplog.text)
    counting.activations = 1000
    for _ in range(2):
        assert torch.equal(WAN.generate(pipe), want)
    remove(pipe)


def test_pipelines_that_share_some_components() -> None:
    from diffusers import WanPipeline

    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    dropped = apply(WanPipeline(**pipe.components))
    own = apply(WanPipeline(**{**pipe.components, "vae": small_pipeline("wan", seed=2).vae}))

    def placed(model: nn.Module) -> bool:
        return any(isinstance(p, HostWeight) for p in model.parameters())

    assert placed(own.vae) and own.vae is not pipe.vae
    remove(own)
    assert not placed(own.vae) and placed(pipe.vae) and placed(pipe.transformer)
    del dropped
    gc.collect()
    remove(pipe)
    assert not any(map(placed, models(pipe).values()))
    assert same_weights(pipe, twin)
