"""A FLUX pipeline with a ControlNet, an image adapter, and a LoRA through the pipeline's own calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import flux_with_controlnet
from small_pipelines import SMALL_PIPELINES, small_pipeline

from chunkflow_compile import ChunkflowError, apply, programs, remove
from chunkflow_compile.pipeline.budget import budget_of

pytest.importorskip("transformers")
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("no_grad")]
FLUX = SMALL_PIPELINES["flux"]
TOLERANCE = 1e-4  # of Inductor


def image_adapter(transformer: Any) -> dict[str, Any]:
    """Random weights of an image adapter, as its file has them."""
    config, width, rng = transformer.config, 64, torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return 0.5 * torch.randn(shape, generator=rng)

    text = config.joint_attention_dim
    attention: dict[str, torch.Tensor] = {}
    for i in range(config.num_layers):
        attention |= {f"{i}.to_k_ip.weight": random(width, text), f"{i}.to_v_ip.weight": random(width, text)}
        attention |= {f"{i}.to_k_ip.bias": random(width), f"{i}.to_v_ip.bias": random(width)}
    projection = {"proj.weight": random(4 * text, text), "proj.bias": random(4 * text)}
    projection |= {"norm.weight": torch.ones(text), "norm.bias": torch.zeros(text)}
    return {"image_proj": projection, "ip_adapter": attention}


def test_an_image_adapter() -> None:
    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    apply(pipe, "cpu", memory="2MiB", min_bytes=2048)
    plain = FLUX.generate(twin)
    assert torch.allclose(FLUX.generate(pipe), plain, rtol=0, atol=TOLERANCE)
    for p in (pipe, twin):
        p.transformer._load_ip_adapter_weights([image_adapter(p.transformer)])
    embeds = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(4))
    images = {"ip_adapter_image_embeds": [embeds], "negative_ip_adapter_image_embeds": [torch.zeros_like(embeds)]}
    want = FLUX.generate(twin, **images)
    assert not torch.allclose(want, plain, atol=10 * TOLERANCE)
    assert torch.allclose(FLUX.generate(pipe, **images), want, rtol=0, atol=TOLERANCE)
    remove(pipe)
    assert torch.equal(FLUX.generate(pipe, **images), want)


def test_an_image_adapter_with_an_image_encoder() -> None:
    """The encoder comes with the adapter, after ``apply``: it is placed by calling that again."""
    from PIL import Image
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    apply(pipe, "cpu", memory="2MiB", min_bytes=2048, lowering="eager")
    plain = FLUX.generate(twin)
    assert torch.equal(FLUX.generate(pipe), plain)
    for p in (pipe, twin):
        torch.manual_seed(0)
        config = CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=32,
            patch_size=16,
            projection_dim=64,
        )
        processor = CLIPImageProcessor(crop_size=32, size=32)
        p.register_modules(image_encoder=CLIPVisionModelWithProjection(config).eval(), feature_extractor=processor)
        p.transformer._load_ip_adapter_weights([image_adapter(p.transformer)])
    image = {"ip_adapter_image": Image.new("RGB", (32, 32), (1, 200, 30))}
    with pytest.raises(ChunkflowError, match=r"pipe\.image_encoder was added after apply"):
        FLUX.generate(pipe, **image)
    apply(pipe)
    for scale in (1.0, 0.3):
        for p in (pipe, twin):
            p.set_ip_adapter_scale(scale)
        want = FLUX.generate(twin, **image)
        assert torch.equal(FLUX.generate(pipe, **image), want) and not torch.equal(want, plain)
    phase = budget_of(pipe).phase_of(pipe.image_encoder)
    assert phase.calls and sum(m.moved_bytes + m.primed_bytes for p in programs(phase.root) for m in p.measurements)
    for p in (pipe, twin):
        p.unload_ip_adapter()
    assert torch.equal(FLUX.generate(pipe), FLUX.generate(twin))
    remove(pipe)


def test_a_lora_of_the_pipeline() -> None:
    """load_lora_weights, set_adapters, fuse_lora, unfuse_lora, disable_lora, unload_lora_weights."""
    pytest.importorskip("peft")
    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    apply(pipe, "cpu", memory="2MiB", min_bytes=2048)
    plain = FLUX.generate(twin)
    assert torch.allclose(FLUX.generate(pipe), plain, rtol=0, atol=TOLERANCE)
    rng = torch.Generator().manual_seed(5)
    state = {}
    for block in ("transformer_blocks.0", "single_transformer_blocks.1"):
        for name in ("to_q", "to_k"):
            state[f"transformer.{block}.attn.{name}.lora_A.weight"] = torch.randn(16, 64, generator=rng)
            state[f"transformer.{block}.attn.{name}.lora_B.weight"] = 0.1 * torch.randn(64, 16, generator=rng)
    seen = [plain]
    for change in (
        lambda p: p.load_lora_weights(dict(state), adapter_name="new"),
        lambda p: p.set_adapters(["new"], [0.5]),
        lambda p: p.fuse_lora(),
        lambda p: p.unfuse_lora(),
        lambda p: p.disable_lora(),
        lambda p: p.enable_lora(),
        lambda p: p.unload_lora_weights(),
    ):
        change(twin)
        change(pipe)
        seen.append(FLUX.generate(twin))
        assert torch.allclose(FLUX.generate(pipe), seen[-1], rtol=0, atol=TOLERANCE), len(seen)
    assert not torch.allclose(seen[1], plain, atol=10 * TOLERANCE) and not torch.allclose(
        seen[2], seen[1], atol=TOLERANCE
    )
    assert torch.allclose(seen[-1], plain, rtol=0, atol=TOLERANCE)
    remove(pipe)


def test_a_controlnet() -> None:
    pipe, twin = (flux_with_controlnet(small_pipeline("flux").components) for _ in range(2))
    call = {"control_image": torch.rand(1, 3, 32, 32), "controlnet_conditioning_scale": 1.0}
    apply(pipe, "cpu", memory="2MiB", min_bytes=2048)
    for seed in range(2):
        want = FLUX.generate(twin, seed, **call)
        assert torch.allclose(FLUX.generate(pipe, seed, **call), want, rtol=0, atol=TOLERANCE)
    weaker = FLUX.generate(twin, 1, **{**call, "controlnet_conditioning_scale": 0.1})
    assert not torch.allclose(weaker, want, atol=10 * TOLERANCE)
    budget = budget_of(pipe)
    assert budget is not None
    (phase,) = [p for p in budget.phases if p.name == "controlnet"]
    assert phase.calls == 6 and sum(p.plan.moved_bytes for p in programs(phase.root)) > 0
    remove(pipe)
