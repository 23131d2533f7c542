"""Adapters in slots of whole pipelines: ``apply(adapters=)``, text encoders, and ``remove``."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from adapters import Library, State
from helpers import graphs
from pipelines import EAGER, FLUX, MIN_BYTES, WAN, Applied, held, is_plain, plain, same_weights
from small_encoders import TEXT
from small_pipelines import small_pipeline

from chunkflow_compile import ChunkflowError, apply, enable_adapters, programs, remove, use_adapters
from chunkflow_compile.frontend.adapter_slots import Slotted
from chunkflow_compile.pipeline.budget import budget_of
from chunkflow_compile.weights.host_weight import HostWeight

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_grad", "quiet")
OF_IMAGE_ADAPTERS = ("image_encoder", "feature_extractor")
STEPS = {"num_inference_steps": 2}
# The layers of the adapters in make test: each layer with slots adds a tenth to the graph of a block.
LAYERS = ("to_q", "to_v")


CHANGES = (
    lambda p: p.set_adapters("a0", 0.5),
    lambda p: p.set_adapters(["a1", "a0"], [0.5, 0.25]),
    lambda p: p.fuse_lora(),
    lambda p: p.unfuse_lora(),
    lambda p: p.disable_lora(),
    lambda p: p.enable_lora(),
)


def generate(pipe: Any, seed: int, **given: Any) -> torch.Tensor:
    """Latents of Wan without a text encoder, or images of FLUX."""
    if pipe.text_encoder is None:
        given |= {"prompt": None, "prompt_embeds": torch.ones(1, 8, TEXT), "guidance_scale": 1.0}
        return WAN.generate(pipe, seed, **STEPS, output_type="latent", **given)
    return FLUX.generate(pipe, seed, **STEPS, **given)


def load(pipe: Any, state: State, name: str) -> None:
    pipe.load_lora_weights({k: v.clone() for k, v in state.items()}, adapter_name=name)


def check(pipe: Any, twin: Any, seed: int) -> None:
    assert torch.allclose(generate(pipe, seed), generate(twin, seed), rtol=0, atol=1e-5)


def test_an_applied_pipeline() -> None:
    """Wan without its text encoder, which these adapters do not change.  No choice of slices is searched."""
    both = pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    for p in both:
        p.text_encoder = None
    library = Library(twin.transformer)
    adapters = {"rank": 16, "slots": 2, "targets": [*LAYERS, "ffn.net.2"]}
    apply(pipe, memory="2MiB", adapters=adapters, split=1, **EAGER)
    budget = budget_of(pipe)
    assert torch.equal(generate(pipe, 0), generate(twin, 0))
    compiled = graphs()
    for number, rank in enumerate((4, 16)):
        for p in both:
            load(p, library.adapter(number, rank, LAYERS), f"a{number}")
    for change in CHANGES[1:4]:  # test_adapters.py makes all changes to a model
        for p in both:
            change(p)
        check(pipe, twin, 1)
        assert held(budget) <= budget.usable
    check_threads(pipe, twin)
    for p in both:
        p.delete_adapters("a1")
        p.unload_lora_weights()
    check(pipe, twin, 1)
    for p in both:
        load(p, library.adapter(3, 8, LAYERS), "again")
    check(pipe, twin, 2)
    assert graphs() == compiled
    remove(pipe)
    block = pipe.transformer.blocks[0]
    assert type(block.attn1.to_q) is peft.tuners.lora.Linear, "its adapter is loaded"
    assert not [*block.attn1.to_q.buffers()] and type(block.ffn.net[2]) is torch.nn.Linear
    assert torch.equal(generate(pipe, 2), generate(twin, 2))
    pipe.unload_lora_weights()
    assert is_plain(pipe) and not any(isinstance(m, Slotted) for m in pipe.transformer.modules())


@pytest.mark.long
def test_adapters_without_slots(applied: Applied) -> None:
    """Loaded after the first call, two at once, fused, and gone again."""
    (pipe, _), twin = applied("flux", "2MiB"), small_pipeline("flux")
    library, seen = Library(twin.transformer), [generate(pipe, 0)]
    for p in (pipe, twin):
        for number, rank in enumerate((4, 64)):
            load(p, library.adapter(number, rank), f"a{number}")
    for change in (*CHANGES, lambda p: p.fuse_lora(safe_fusing=True), lambda p: p.unfuse_lora()):
        for p in (pipe, twin):
            change(p)
        seen.append(generate(twin, 0))
        assert torch.equal(generate(pipe, 0), seen[-1]), len(seen)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen[:3], 2))
    late = [p for n, p in pipe.transformer.named_parameters() if ".a1." in n and p.nbytes >= MIN_BYTES]
    assert late and all(isinstance(p, HostWeight) for p in late), "it streams without a second apply"
    for p in (pipe, twin):
        p.unload_lora_weights()
    assert torch.equal(generate(pipe, 0), generate(twin, 0))
    for p in (pipe, twin):  # fusing and undoing it rounds
        p.transformer.load_state_dict(plain("flux").transformer.state_dict())


@pytest.mark.long
@pytest.mark.parametrize("named", [True, False])
def test_a_control_lora(named: bool) -> None:
    """diffusers widens the first layer for it, and resets it: with slots from the first, and without."""
    from diffusers import FluxControlPipeline
    from PIL import Image

    both = pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    library, image = Library(twin.transformer), Image.new("RGB", (32, 32), (1, 200, 30))
    parts = [{n: part for n, part in p.components.items() if n not in OF_IMAGE_ADAPTERS} for p in both]
    control, other = (FluxControlPipeline(**part) for part in parts)
    targets = ["to_q", "to_k", "to_v", "to_out.0", *(["x_embedder"] if named else [])]
    apply(pipe, memory="2MiB", adapters={"rank": 8, "slots": 2, "targets": targets}, **EAGER)
    apply(control)
    for p in both:
        load(p, library.adapter(0, 4), "style")
    check(pipe, twin, 0)
    for number, reset in enumerate((False, True, True), 1):
        state = library.adapter(number, 4)
        for side, shape in (("A", (4, 32)), ("B", (64, 4))):
            state[f"transformer.x_embedder.lora_{side}.weight"] = 0.3 * torch.randn(shape)
        for p in (control, other):
            load(p, state, "control")
            if number == 1:
                p.set_adapters(["style", "control"], [0.5, 1.0])
        got, want = (generate(p, number, control_image=image) for p in (control, other))
        assert torch.allclose(got, want, rtol=0, atol=1e-5)
        for p in (control, other):
            p.unload_lora_weights(reset_to_overwritten_params=reset)
        if reset:
            check(pipe, twin, number)
    assert pipe.transformer.config.in_channels == twin.transformer.config.in_channels == 16
    assert sum(p.measurements[-1].moved_bytes for p in programs(pipe.transformer)) > 0
    for p in (control, pipe):
        remove(p)
    assert is_plain(pipe) and same_weights(pipe, twin)
    assert torch.equal(generate(pipe, 4), generate(twin, 4))


def check_threads(pipe: Any, twin: Any) -> None:
    """Requests of several threads, each with adapters of its own; afterwards those from before are active."""
    for p in (pipe, twin):
        p.set_adapters("a1", 0.25)
    expected = generate(twin, 3)
    wanted: list[tuple[Any, Any]] = [("a0", None), ("a1", 0.5), (["a0", "a1"], [0.5, 2.0]), (None, None), ([], None)]

    def request(number: int) -> torch.Tensor:
        with torch.no_grad(), use_adapters(pipe, *wanted[number]):
            return generate(pipe, number)

    with ThreadPoolExecutor() as pool:
        answers = [*pool.map(request, range(len(wanted)))]
    with pytest.raises(ValueError, match="nobody"), use_adapters(pipe, ["a0", "nobody"]):
        pass
    with pytest.raises(ChunkflowError, match="a pipeline that loads adapters"), use_adapters(pipe.transformer, "a0"):
        pass
    assert torch.allclose(generate(pipe, 3), expected, rtol=0, atol=1e-5), "those from before"
    for number, (names, weights) in enumerate(wanted):
        if names:
            twin.enable_lora()
            twin.set_adapters(names, weights)
        else:
            twin.disable_lora()
        assert torch.allclose(answers[number], generate(twin, number), rtol=0, atol=1e-5)
    twin.enable_lora()


def test_what_apply_refuses_leaves_the_pipeline_as_it_was() -> None:
    pipe = small_pipeline("flux")
    for adapters, said in (
        ({"ranks": 3}, "adapters has 'ranks'"),
        (0, "adapters=0 must"),
        ({"targets": ["no"]}, "no layers for"),
    ):
        with pytest.raises(ChunkflowError, match=said):
            apply(pipe, memory="2MiB", adapters=adapters, **EAGER)
        assert is_plain(pipe)
    with pytest.raises(ChunkflowError, match="is too little for"):
        apply(pipe, memory="1KiB", adapters=16, **EAGER)
    assert is_plain(pipe) and not any(isinstance(m, Slotted) for m in pipe.transformer.modules())


@pytest.mark.long
def test_a_text_encoder() -> None:
    """It has slots of its own, also after the pipeline has unloaded its adapters."""
    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    library = Library(twin.text_encoder, "text_encoder")
    enable_adapters(pipe.text_encoder, rank=8, targets=["q_proj", "k_proj", "v_proj"])
    apply(pipe, memory="2MiB", **EAGER)
    assert torch.equal(generate(pipe, 0), generate(twin, 0))
    compiled = graphs()
    for number, rank in enumerate((4, 8)):
        for p in (pipe, twin):
            load(p, library.adapter(number, rank, ("q_proj", "v_proj")), f"a{number}")
            p.set_adapters(f"a{number}")
        check(pipe, twin, 1)
    assert not torch.allclose(generate(pipe, 1), generate(small_pipeline("flux"), 1))
    for p in (pipe, twin):
        p.unload_lora_weights()
    check(pipe, twin, 1)
    for p in (pipe, twin):
        load(p, library.adapter(2, 8, ("q_proj", "v_proj")), "again")
    check(pipe, twin, 1)
    assert graphs() == compiled
    remove(pipe)
    assert any(isinstance(m, Slotted) for m in pipe.text_encoder.modules()), "slots of before apply stay"
