"""What users of diffusers combine with an offloaded and compiled transformer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import EAGER, OPTIONS
from pipelines import WAN, expected
from small_pipelines import small_pipeline

from chunkflow_compile import offload, programs
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.weights.host_weight import HostWeight

SIZE = Size(layers=1, singles=1)
MIN_BYTES = OPTIONS["min_bytes"]

pytestmark = pytest.mark.usefixtures("no_grad")


def pair(name: str = "wan") -> tuple[Any, Any]:
    """The same model twice: offloaded and compiled in place, and as it is."""
    model, twin = small_model(name, SIZE), small_model(name, SIZE)
    offload(model, min_bytes=MIN_BYTES)
    model.compile(backend="chunkflow", fullgraph=True, options=EAGER)
    return model, twin


def check(model: Any, twin: Any, name: str = "wan") -> None:
    for step in range(2):
        inputs = small_inputs(name, SIZE, step)
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
    assert programs(model)[-1].plan.moved_bytes > 0


def test_values_that_change_in_place_and_a_move() -> None:
    """An adapter is swapped, weights are averaged, the model moves to where it is: nothing is compiled again."""
    peft = pytest.importorskip("peft")
    both = model, twin = pair()
    config = peft.LoraConfig(r=64, target_modules=["to_q", "to_k", "to_v"])
    for m in both:
        m.add_adapter(config, adapter_name="first")
    before = 0
    for seed in range(3):
        for m in both:
            torch.manual_seed(seed)
            for key, parameter in m.named_parameters():
                if "lora_" in key:
                    parameter.copy_(0.1 * torch.randn(parameter.shape))
        check(model, twin)
        before = before or len(programs(model))
    model.to("cpu")
    check(model, twin)
    for m in both:
        for p in m.parameters():
            p.mul_(0.75).add_(0.25 * p.mean())
    check(model, twin)
    assert len(programs(model)) == before


@pytest.mark.long
def test_fused_projections() -> None:
    both = pair("flux")
    check(*both, "flux")
    for m in both:
        m.fuse_qkv_projections()
    check(*both, "flux")


@pytest.mark.long
def test_layerwise_casting() -> None:
    """Float8 weights stay what they are when the hook casts a layer for its call, and change with the user's own cast."""
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    for m in (model, twin):
        m.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    offload(model, min_bytes=MIN_BYTES // 4)
    large = {n for n, p in [*model.named_parameters(), *model.named_buffers()] if p.nbytes >= MIN_BYTES // 4}
    inputs = small_inputs("wan", SIZE, 0)
    assert torch.equal(model(**inputs)[0], twin(**inputs)[0]), "eager"
    model.compile(backend="chunkflow", fullgraph=True, options={**EAGER, "min_bytes": MIN_BYTES // 4})
    check(model, twin)
    assert set(programs(model)[0].program.offloaded) == large
    weight = model.get_parameter("blocks.0.attn1.to_q.weight")
    assert isinstance(weight, HostWeight) and weight.dtype == torch.float8_e4m3fn
    model.to(torch.float64)
    assert weight.dtype == torch.float64


@pytest.mark.long
def test_a_pipeline_under_model_cpu_offload() -> None:
    """Accelerate's hooks leave the graph, with every backend; so without fullgraph."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    pipe = small_pipeline("wan")
    offload(pipe.transformer, min_bytes=MIN_BYTES)
    pipe.transformer.compile(backend="chunkflow", options=EAGER)
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    pipe.enable_model_cpu_offload(device="cpu")
    for seed in range(2):
        assert torch.equal(WAN.generate(pipe, seed), expected("wan", seed))
    assert programs(pipe.transformer)[-1].measurements[-1].moved_bytes > 0


@pytest.mark.long
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_sizes_than_dynamo_compiles() -> None:
    """Those past the limit run eagerly, and right."""
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    offload(model, min_bytes=MIN_BYTES)
    model.compile(backend="chunkflow", dynamic=False, options=EAGER)
    for length in (5, 6, 7, 8, 5):
        inputs = small_inputs("wan", SIZE, length)
        text = inputs["encoder_hidden_states"]
        inputs["encoder_hidden_states"] = torch.randn(1, length, text.shape[-1])
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
    assert len(programs(model)) == 2


def test_a_compiled_forward() -> None:
    """It is placed at its first call, and its method is what the user compiled."""
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    model.forward = torch.compile(model.forward, backend="chunkflow", options=EAGER)
    check(model, twin)
