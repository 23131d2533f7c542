"""What users of diffusers combine with an offloaded and compiled transformer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from torch import nn

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.weights.host_weight import HostWeight

SIZE = Size(layers=1, singles=1)
MIN_BYTES = OPTIONS["min_bytes"]

peft = pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def on_one_program() -> Iterator[None]:
    with torch.no_grad():
        yield


def pair(name: str = "wan") -> tuple[nn.Module, nn.Module]:
    """The same model twice: offloaded and compiled in place, and as it is."""
    model, twin = small_model(name, SIZE), small_model(name, SIZE)
    offload(model, min_bytes=MIN_BYTES)
    model.compile(backend="chunkflow", fullgraph=True, options={**OPTIONS, "lowering": "eager"})
    return model, twin


def assert_same(model: nn.Module, twin: nn.Module, name: str = "wan", steps: int = 2) -> None:
    for step in range(steps):
        inputs = small_inputs(name, SIZE, step)
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
    assert programs(model)[-1].plan.moved_bytes > 0


def adapter(model: nn.Module, name: str, rank: int = 4, scale: float = 0.1) -> None:
    """Add an adapter with random weights, as load_lora_weights does."""
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
    torch.manual_seed(rank)
    model.add_adapter(config, adapter_name=name)
    for key, parameter in model.named_parameters():
        if "lora_" in key and f".{name}." in key:
            parameter.data = scale * torch.randn(parameter.shape)


@pytest.mark.long
def test_an_adapter_before_and_after() -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    for m in (model, twin):
        adapter(m, "first")
    offload(model, min_bytes=MIN_BYTES)
    model.compile(backend="chunkflow", fullgraph=True, options={**OPTIONS, "lowering": "eager"})
    assert_same(model, twin)
    for m in (model, twin):
        adapter(m, "second", rank=64)
        m.set_adapters(["first", "second"], [0.5, 0.25])
    assert_same(model, twin)
    late = [p for n, p in model.named_parameters() if ".second." in n and p.nbytes >= MIN_BYTES]
    assert late and all(isinstance(p, HostWeight) for p in late), "it streams without a second offload"
    for m in (model, twin):
        m.disable_lora()
    assert_same(model, twin)
    for m in (model, twin):
        m.enable_lora()
        m.delete_adapters("second")
    assert_same(model, twin)
    for m in (model, twin):
        m.unload_lora()
    assert_same(model, twin)
    restore(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("safe", [False, True])
def test_fusing_an_adapter(safe: bool) -> None:
    model, twin = pair()
    assert_same(model, twin)
    for m in (model, twin):
        adapter(m, "first")
    assert_same(model, twin)
    for m in (model, twin):
        m.fuse_lora(safe_fusing=safe)
    assert_same(model, twin)
    for m in (model, twin):
        m.unfuse_lora()
    assert_same(model, twin)


def test_swapping_an_adapter_in_place() -> None:
    model, twin = pair()
    for m in (model, twin):
        adapter(m, "first", rank=64)
    assert_same(model, twin)
    before = len(programs(model))
    for seed in range(3):
        for m in (model, twin):
            torch.manual_seed(seed)
            for key, parameter in m.named_parameters():
                if "lora_" in key:
                    parameter.copy_(0.1 * torch.randn(parameter.shape))
        assert_same(model, twin)
    assert len(programs(model)) == before, "nothing was compiled again"


@pytest.mark.long
def test_fused_projections() -> None:
    model, twin = pair("flux")
    assert_same(model, twin, "flux")
    for m in (model, twin):
        m.fuse_qkv_projections()
    assert_same(model, twin, "flux")


def test_a_model_moves_between_devices_and_types() -> None:
    model, twin = pair()
    assert_same(model, twin)
    model.to("cpu")
    assert_same(model, twin)
    other = copy.deepcopy(twin)
    average = 0.75
    for m in (model, twin):
        for p, q in zip(m.parameters(), other.parameters(), strict=True):
            p.mul_(average).add_(q, alpha=1 - average)
    assert_same(model, twin)


def test_layerwise_casting() -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    for m in (model, twin):
        m.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    offload(model, min_bytes=MIN_BYTES // 4)
    large = {n for n, p in [*model.named_parameters(), *model.named_buffers()] if p.nbytes >= MIN_BYTES // 4}
    inputs = small_inputs("wan", SIZE, 0)
    assert torch.equal(model(**inputs)[0], twin(**inputs)[0]), "eager"
    options = {**OPTIONS, "lowering": "eager", "min_bytes": MIN_BYTES // 4}
    model.compile(backend="chunkflow", fullgraph=True, options=options)
    assert_same(model, twin)
    (program,) = programs(model)
    assert {w.name for w in program.plan.weights if w.offset is not None} == large
    weight = model.get_parameter("blocks.0.attn1.to_q.weight")
    assert isinstance(weight, HostWeight) and weight.dtype == torch.float8_e4m3fn, "cast copies do not replace it"
    model.to(torch.float64)
    assert weight.dtype == torch.float64, "the user's own call is no cast of the hook"


def pipeline() -> Any:
    """A pipeline of tiny random parts."""
    import diffusers

    torch.manual_seed(0)
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0)
    return diffusers.WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae.eval(), scheduler=scheduler, transformer=small_model("wan", SIZE)
    )


def generate(pipe: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    text = pipe.transformer.config.text_dim
    prompts = {
        name: torch.randn(1, 8, text, generator=generator) for name in ("prompt_embeds", "negative_prompt_embeds")
    }
    sizes = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
    made = pipe(**prompts, **sizes, generator=generator, output_type="latent", guidance_scale=4.0)
    frames: torch.Tensor = made.frames
    return frames


@pytest.mark.long
def test_a_pipeline_under_model_cpu_offload() -> None:
    """Accelerate's hooks leave the graph, with every backend; so without fullgraph."""
    pytest.importorskip("accelerate")
    pipe, plain = pipeline(), pipeline()
    offload(pipe.transformer, min_bytes=MIN_BYTES)
    pipe.transformer.compile(backend="chunkflow", options={**OPTIONS, "lowering": "eager"})
    assert torch.equal(generate(pipe, 0), generate(plain, 0))
    pipe.to("cpu")
    assert torch.equal(generate(pipe, 1), generate(plain, 1))
    pipe.enable_model_cpu_offload(device="cpu")
    for seed in range(2):
        assert torch.equal(generate(pipe, seed), generate(plain, seed))
    assert [m.moved_bytes for m in programs(pipe.transformer)[-1].measurements][-1] > 0


@pytest.mark.long
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_sizes_than_dynamo_compiles() -> None:
    """Those past the limit run eagerly, and right."""
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    offload(model, min_bytes=MIN_BYTES)
    model.compile(backend="chunkflow", dynamic=False, options={**OPTIONS, "lowering": "eager"})
    for length in (5, 6, 7, 8, 5):
        inputs = small_inputs("wan", SIZE, length)
        text = inputs["encoder_hidden_states"]
        inputs["encoder_hidden_states"] = torch.randn(1, length, text.shape[-1])
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
    assert len(programs(model)) == 2


@pytest.mark.parametrize("placed", [True, False])
def test_a_compiled_forward(placed: bool) -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    if placed:
        offload(model, min_bytes=MIN_BYTES)
    model.forward = torch.compile(model.forward, backend="chunkflow", options={**OPTIONS, "lowering": "eager"})
    assert_same(model, twin, steps=3)
