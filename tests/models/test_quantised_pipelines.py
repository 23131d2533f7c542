"""Pipelines with a quantised transformer: what streams, what stays on the device, and what apply refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelines import EAGER, WAN, bytes_moved, bytes_read, check_transfers, expected, is_plain, same_weights
from quantisers import GGUFParameter, Int8Params, layerwise_casting, nf4, quanto, replace_linear, torchao
from small_pipelines import small_pipeline
from torch import nn

from chunkflow_compile import ChunkflowError, apply, programs, remove
from chunkflow_compile.pipeline.budget import budget_of
from chunkflow_compile.pipeline.components import check_component
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves_of, stream_inside

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet", "kept_dynamo")
MIN_BYTES = 1024
OPTIONS = {**EAGER, "min_bytes": MIN_BYTES, "memory": "512KiB"}  # less than the quantised transformer and the encoder
NF4 = nf4(True)
NARROW = (torch.int8, torch.uint8, torch.float8_e4m3fn)


def gguf(blocks: nn.ModuleList) -> None:
    library = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    def make(linear: nn.Linear) -> nn.Module:
        kind = library.GGMLQuantizationType.Q8_0
        made = GGUFLinear(linear.in_features, linear.out_features, compute_dtype=torch.float32)
        values = torch.from_numpy(library.quantize(linear.weight.detach().numpy(), kind))
        made.weight = GGUFParameter(values, quant_type=kind)
        return made

    replace_linear(blocks, make)


def by_name(kind: type[nn.Parameter]) -> Callable[[nn.Module], None]:
    """Gives the weights a class that stands for one of a library, by its name; the values are not quantised."""

    def quantise(blocks: nn.Module) -> None:
        for module in blocks.modules():
            if type(module) is nn.Linear:
                module.weight = kind(module.weight.data, requires_grad=False)

    return quantise


def quantised_pair(quantise: Callable[[nn.Module], None]) -> tuple[Any, Any]:
    pair = small_pipeline("wan"), small_pipeline("wan")
    for pipe in pair:
        quantise(pipe.transformer.blocks)
    return pair


STEPS = {"num_inference_steps": 2}


def generate(pipe: Any, twin: Any) -> torch.Tensor:
    """Check generations of an applied pipeline against the plain one; return the first."""
    wanted = [WAN.generate(twin, seed, **STEPS) for seed in range(3)]
    for seed, want in enumerate(wanted):
        assert torch.equal(WAN.generate(pipe, seed, **STEPS), want)
    return wanted[0]


def assert_removed(pipe: Any, twin: Any, wanted: torch.Tensor) -> None:
    remove(pipe)
    assert is_plain(pipe) and same_weights(pipe, twin) and torch.equal(WAN.generate(pipe, **STEPS), wanted)


@pytest.mark.parametrize(
    "quantise",
    [
        torchao("Int8WeightOnlyConfig"),
        *(pytest.param(kind, marks=pytest.mark.long) for kind in (quanto, NF4, layerwise_casting)),
    ],
)
def test_a_quantised_transformer(quantise: Callable[[nn.Module], None]) -> None:
    """Its quantised bytes stream, and the image is that of the plain quantised pipeline, bit for bit."""
    if quantise not in (NF4, layerwise_casting) and not stream_inside():
        pytest.skip("needs torch 2.13")
    pipe, twin = quantised_pair(quantise)
    small = {t.nbytes for t in leaves_of(twin.transformer.blocks) if t.dtype in NARROW}
    assert small and max(small) < 64 * 256 * 4, "it is quantised"
    apply(pipe, **OPTIONS)
    large = [t for t in leaves_of(pipe.transformer) if t.nbytes >= MIN_BYTES]
    assert sum(t.dtype in NARROW for t in large) == 30
    assert all(isinstance(t, HostWeight) for t in large)
    wanted = generate(pipe, twin)
    assert not torch.equal(wanted, expected("wan", **STEPS))
    for phase in budget_of(pipe).phases:
        check_transfers(phase, generations=3)
        assert phase.name != "transformer" or bytes_read(phase) == phase.streamed
    assert_removed(pipe, twin, wanted)


@pytest.mark.parametrize("quantise", [by_name(GGUFParameter), pytest.param(gguf, marks=pytest.mark.long)])
def test_a_transformer_that_runs_eagerly(
    quantise: Callable[[nn.ModuleList], None], caplog: pytest.LogCaptureFixture
) -> None:
    """torch.compile fails on GGUF weights: they stay on the device, what is beside them is fetched op by op."""
    pipe, twin = quantised_pair(quantise)
    apply(pipe, **{**OPTIONS, "memory": "2MiB"})
    assert "pipe.transformer runs eagerly" in caplog.text and "GGUF weights, which stay on the device" in caplog.text
    wanted = generate(pipe, twin)
    phases = {phase.name: phase for phase in budget_of(pipe).phases}
    eager = phases.pop("transformer")
    assert eager.calls == 3 * 2 * 2 and not programs(eager.root)
    assert eager.kept > sum(t.nbytes for t in leaves_of(eager.root) if type(t).__name__ == "GGUFParameter") > 0
    assert all(isinstance(p, HostWeight) for p in eager.root.patch_embedding.parameters() if p.nbytes >= MIN_BYTES)
    check_transfers(phases["vae"], generations=3)
    assert bytes_moved(phases["text_encoder"]) > 0
    assert_removed(pipe, twin, wanted)


def test_what_is_refused_beside_quantised_weights() -> None:
    """Another device, because nothing here moves their scales, which are no parameters; and a cast that would change
    what is beside them.  Other components are cast."""
    pipe, _ = quantised_pair(by_name(Int8Params))
    check_component("transformer", pipe.transformer, torch.device("cpu"))
    said = r"pipe\.transformer .* has int8 weights of bitsandbytes on cpu, .*: load it on cuda:0, .* torchao or quanto"
    with pytest.raises(ChunkflowError, match=said):
        check_component("transformer", pipe.transformer, torch.device("cuda:0"))
    said = (
        r"pipe\.transformer .* has weights of bitsandbytes\.nn\.modules\.Int8Params, .* so patch_embedding\.weight is "
        r"not cast to torch\.bfloat16: load the component with torch_dtype=torch\.bfloat16, or leave it out, dtype=\{"
    )
    with pytest.raises(ChunkflowError, match=said):
        apply(pipe, dtype=torch.bfloat16, **OPTIONS)
    assert is_plain(pipe)
    apply(pipe, dtype={"default": torch.bfloat16, "transformer": None}, **{**OPTIONS, "memory": "2MiB"})
    assert pipe.vae.dtype == torch.bfloat16 and pipe.transformer.patch_embedding.weight.dtype == torch.float32
    remove(pipe)
    apply(pipe, dtype=torch.float32, **{**OPTIONS, "memory": "4MiB"})
    remove(pipe)
