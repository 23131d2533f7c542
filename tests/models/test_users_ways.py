"""What users of diffusers combine with an offloaded and compiled transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import OPTIONS
from pipelines import WAN, expected
from small_pipelines import small_pipeline
from torch import nn

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.weights.host_weight import HostWeight

SIZE = Size(layers=1, singles=1)
MIN_BYTES = OPTIONS["min_bytes"]
EAGER = {**OPTIONS, "lowering": "eager"}

pytestmark = pytest.mark.usefixtures("no_grad")


class Pair:
    """The same model twice: offloaded and compiled in place, and as it is."""

    def __init__(self, name: str = "wan", prepare: Callable[[Any], None] = lambda m: None) -> None:
        self.name = name
        self.model, self.twin = small_model(name, SIZE), small_model(name, SIZE)
        for m in self.both:
            prepare(m)
        offload(self.model, min_bytes=MIN_BYTES)
        self.model.compile(backend="chunkflow", fullgraph=True, options=EAGER)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.model, self.twin

    def check(self, steps: int = 2) -> None:
        for step in range(steps):
            inputs = small_inputs(self.name, SIZE, step)
            assert torch.equal(self.model(**inputs)[0], self.twin(**inputs)[0])
        assert programs(self.model)[-1].plan.moved_bytes > 0


def adapter(model: nn.Module, name: str, rank: int = 4, scale: float = 0.1) -> None:
    """Add an adapter with random weights, as load_lora_weights does."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
    torch.manual_seed(rank)
    model.add_adapter(config, adapter_name=name)
    for key, parameter in model.named_parameters():
        if "lora_" in key and f".{name}." in key:
            parameter.data = scale * torch.randn(parameter.shape)


def second_adapter(m: Any) -> None:
    adapter(m, "second", rank=64)
    m.set_adapters(["first", "second"], [0.5, 0.25])


def without_the_second(m: Any) -> None:
    m.enable_lora()
    m.delete_adapters("second")


@pytest.mark.long
def test_adapters() -> None:
    """Before the model is placed and after its first call, two at once, fused, and gone again."""
    pair = Pair(prepare=lambda m: adapter(m, "first"))
    pair.check()
    for change in (
        second_adapter,
        lambda m: m.disable_lora(),
        without_the_second,
        lambda m: m.fuse_lora(),
        lambda m: m.unfuse_lora(),
        lambda m: m.fuse_lora(safe_fusing=True),
        lambda m: m.unfuse_lora(),
        lambda m: m.unload_lora(),
    ):
        for m in pair.both:
            change(m)
        pair.check()
        if change is second_adapter:
            late = [p for n, p in pair.model.named_parameters() if ".second." in n and p.nbytes >= MIN_BYTES]
            assert late and all(isinstance(p, HostWeight) for p in late), "it streams without a second offload"
    restore(pair.model)
    assert all(torch.equal(p, q) for p, q in zip(pair.model.parameters(), pair.twin.parameters(), strict=True))


def test_values_that_change_in_place_and_a_move() -> None:
    """An adapter is swapped, weights are averaged, the model moves to where it is: nothing is compiled again."""
    pair = Pair()
    for m in pair.both:
        adapter(m, "first", rank=64)
    pair.check()
    before = len(programs(pair.model))
    for seed in range(2):
        for m in pair.both:
            torch.manual_seed(seed)
            for key, parameter in m.named_parameters():
                if "lora_" in key:
                    parameter.copy_(0.1 * torch.randn(parameter.shape))
        pair.check()
    pair.model.to("cpu")
    pair.check()
    for m in pair.both:
        for p in m.parameters():
            p.mul_(0.75).add_(0.25 * p.mean())
    pair.check()
    assert len(programs(pair.model)) == before


@pytest.mark.long
def test_fused_projections() -> None:
    pair = Pair("flux")
    pair.check()
    for m in pair.both:
        m.fuse_qkv_projections()
    pair.check()


@pytest.mark.long
def test_layerwise_casting() -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    for m in (model, twin):
        m.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    offload(model, min_bytes=MIN_BYTES // 4)
    large = {n for n, p in [*model.named_parameters(), *model.named_buffers()] if p.nbytes >= MIN_BYTES // 4}
    inputs = small_inputs("wan", SIZE, 0)
    assert torch.equal(model(**inputs)[0], twin(**inputs)[0]), "eager"
    model.compile(backend="chunkflow", fullgraph=True, options={**EAGER, "min_bytes": MIN_BYTES // 4})
    for step in range(2):
        inputs = small_inputs("wan", SIZE, step)
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
    (program,) = programs(model)
    assert set(program.program.offloaded) == large and program.plan.moved_bytes > 0
    weight = model.get_parameter("blocks.0.attn1.to_q.weight")
    assert isinstance(weight, HostWeight) and weight.dtype == torch.float8_e4m3fn, "cast copies do not replace it"
    model.to(torch.float64)
    assert weight.dtype == torch.float64, "the user's own call is no cast of the hook"


@pytest.mark.long
def test_a_pipeline_under_model_cpu_offload() -> None:
    """Accelerate's hooks leave the graph, with every backend; so without fullgraph."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    pipe = small_pipeline("wan")
    offload(pipe.transformer, min_bytes=MIN_BYTES)
    pipe.transformer.compile(backend="chunkflow", options=EAGER)
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    pipe.to("cpu")
    assert torch.equal(WAN.generate(pipe, 1), expected("wan", 1))
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
    for step in range(3):
        inputs = small_inputs("wan", SIZE, step)
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
    assert programs(model)[-1].plan.moved_bytes > 0
