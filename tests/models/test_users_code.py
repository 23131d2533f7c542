"""What users write around and inside a model that streams: loops, other weights for a call, layers outside it, and what
diffusers has for its transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import EAGER, OPTIONS
from helpers import Block, Stack, check_small, check_steps, small_twins, twins
from pipelines import WAN, expected
from small_pipelines import small_pipeline
from torch import nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch.func import functional_call
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import gelu, linear

import chunkflow_compile
from chunkflow_compile import offload, programs
from chunkflow_compile.catalog.small import Size, small_inputs
from chunkflow_compile.weights.host_weight import HostWeight

WAYS = ("lazy", "whole", "by kind")
LENGTH = 32
SIZE = Size(layers=1, singles=1)
MIN_BYTES = OPTIONS["min_bytes"]

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:.*runs outside its compiled form"),
]


def placed(model: Any, way: str, **options: Any) -> Any:
    """Compiled as it is, after offload, or by kind."""
    given = {**EAGER, **options}
    if way == "by kind":
        return chunkflow_compile.compile(model, **given)
    if way == "whole":
        offload(model, min_bytes=given["min_bytes"])
    model.compile(backend="chunkflow", fullgraph=True, options=given)
    return model


def check_moved(model: nn.Module) -> None:
    """What was planned was moved, and that is not nothing."""
    assert sum(p.plan.moved_bytes for p in programs(model)) > 0
    assert all(p.measurements[0].moved_bytes == p.plan.moved_bytes for p in programs(model))


class Looped(Block):
    """Its weights are read in the body of a loop, and one in the condition too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up.weight

        def again(i: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return i + 1, y + 0.1 * self.down(gelu(linear(y, up)))

        start = torch.zeros((), dtype=torch.int64), x
        return torch.while_loop(lambda i, y: (i < 3) & (up[0, 0] < 100), again, start)[1]


class Mapped(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + map_over(lambda row: self.down(gelu(self.up(row))), x)


class Scanned(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(carried: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            carried = carried + 0.1 * self.down(gelu(self.up(row)))
            return carried, carried.clone()

        return x + scan(step, torch.zeros_like(x[0]), x)[1]


class Branched(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.down(gelu(self.up(y))), lambda y: y - self.down(self.up(y)), (x,))


class Attends(nn.Module):
    """flex_attention with a learnt bias, and with a mask that is a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(2, LENGTH, LENGTH))
        self.register_buffer("kept", torch.rand(4, LENGTH, LENGTH) > 0.3)
        self.kept |= torch.eye(LENGTH, dtype=torch.bool)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        bias, kept = self.bias, self.kept
        mask = create_block_mask(lambda b, h, i, j: kept[h, i, j], 1, 2, LENGTH, LENGTH, device=x.device)
        y = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + bias[h, i, j], block_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Blocks(Stack):
    """Two of each class."""

    def __init__(self, *classes: Callable[[int], nn.Module]) -> None:
        super().__init__(0)
        self.blocks.extend(cls(32) for cls in classes for _ in range(2))


LOOPS, FLEX = (Looped, Mapped, Scanned, Branched), (Attends,)


@pytest.mark.parametrize(
    ("classes", "way"),
    [
        pytest.param(LOOPS, "by kind", id="loops-by kind"),
        pytest.param(FLEX, "whole", id="flex_attention-whole", marks=pytest.mark.long),
        pytest.param(LOOPS, "whole", id="loops-whole", marks=pytest.mark.long),
        pytest.param(FLEX, "by kind", id="flex_attention-by kind", marks=pytest.mark.long),
    ],
)
def test_weights_that_functions_of_torch_capture(classes: Any, way: str) -> None:
    model, twin = twins(partial(Blocks, *classes))
    placed(model, way)
    for _ in range(2):
        x = torch.randn(2, LENGTH, 8)
        torch.testing.assert_close(model(x), twin(x))
    check_moved(model)


def values(kind: Callable[[torch.Tensor], torch.Tensor], part: str, seed: int) -> dict[str, torch.Tensor]:
    """Other values for the weights of a Stack whose names have ``part`` in them."""
    torch.manual_seed(seed)
    return {name: kind(torch.randn_like(p) / 4) for name, p in Stack().named_parameters() if part in name}


@pytest.mark.parametrize(
    ("part", "way"),
    [
        pytest.param(*case, marks=() if case in (("", "lazy"), ("blocks.1.up", "by kind")) else pytest.mark.long)
        for case in itertools.product(("", "head", "blocks.1.up"), WAYS)
    ],
)
def test_functional_call(part: str, way: str) -> None:
    """Also the first call, with tensors and with parameters; each keeps its values for its call."""
    model, twin = twins(Stack)
    placed(model, way, min_bytes=512)
    seed = 0
    for kind in (torch.Tensor.clone, partial(nn.Parameter, requires_grad=False)):
        for _ in range(2):
            seed, x, other = seed + 1, torch.randn(4, 8), values(kind, part, seed)
            assert torch.equal(functional_call(model, other, (x,)), functional_call(twin, other, (x,)))
            assert torch.equal(model(x), twin(x))
    assert torch.equal(functional_call(model, dict(model.named_parameters()), (x,)), twin(x))
    assert all(torch.equal(v, twin.state_dict()[name]) for name, v in model.state_dict().items())
    check_moved(model)


def adapt(model: nn.Module, rank: int) -> nn.ModuleList:
    """Put functions in place of the forwards of layers, which add what layers outside the model compute."""
    torch.manual_seed(3)
    outside = nn.ModuleList()
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        down = nn.Linear(layer.in_features, rank, bias=False)
        up = nn.Linear(rank, layer.out_features, bias=False)
        layer.forward = partial(_added, layer.forward, down, up)
        outside.extend((down, up))
    return outside


def _added(forward: Any, down: nn.Module, up: nn.Module, x: torch.Tensor) -> torch.Tensor:
    added: torch.Tensor = forward(x) + up(down(x))
    return added


@pytest.mark.parametrize(
    ("when", "way"),
    [
        pytest.param(
            *case, marks=() if case in (("after a call", "lazy"), ("after a call", "by kind")) else pytest.mark.long
        )
        for case in itertools.product(("before placing", "after placing", "after a call"), WAYS)
    ],
)
def test_layers_outside_the_model(when: str, way: str) -> None:
    """Those below ``min_bytes`` are inputs like any other."""
    model, twin = twins(Stack)
    if when == "before placing":
        outside = adapt(model, 4)
    placed(model, way)
    if when == "after a call":
        model(torch.randn(4, 8))
    if when != "before placing":
        outside = adapt(model, 4)
    adapt(twin, 4)
    check_steps(model, twin, 3)
    check_moved(model)
    assert not any(isinstance(p, HostWeight) for p in outside.parameters())


@pytest.mark.parametrize("way", [*(pytest.param(way, marks=pytest.mark.long) for way in WAYS[:2]), WAYS[2]])
def test_large_layers_outside_the_model(way: str) -> None:
    """They are refused until they are placed too; then they stream."""
    model, twin = twins(Stack)
    outside = adapt(placed(model, way), 64)
    adapt(twin, 64)
    with pytest.raises(chunkflow_compile.ChunkflowError, match=r"several models.* in one torch.nn.ModuleList"):
        model(torch.randn(4, 8))
    assert not any(isinstance(p, HostWeight) for p in outside.parameters())
    for part in (outside, *([model] if way == "lazy" else [])):
        offload(part, min_bytes=MIN_BYTES)
    check_steps(model, twin, 3)
    check_moved(model)
    assert any(isinstance(p, HostWeight) for p in outside.parameters())


def small_pair(name: str = "wan") -> tuple[Any, Any]:
    """The same model twice: offloaded and compiled in place, and as it is."""
    model, twin = small_twins(name, SIZE)
    offload(model, min_bytes=MIN_BYTES)
    model.compile(backend="chunkflow", fullgraph=True, options=EAGER)
    return model, twin


def check(model: Any, twin: Any, name: str = "wan") -> None:
    check_small(model, twin, name, SIZE, range(2))
    assert programs(model)[-1].plan.moved_bytes > 0


def test_values_that_change_in_place_and_a_move() -> None:
    """An adapter is swapped, weights are averaged, the model moves to where it is: nothing is compiled again."""
    peft = pytest.importorskip("peft")
    both = model, twin = small_pair()
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
    both = small_pair("flux")
    check(*both, "flux")
    for m in both:
        m.fuse_qkv_projections()
    check(*both, "flux")


@pytest.mark.long
def test_layerwise_casting() -> None:
    """Float8 weights stay what they are when the hook casts a layer for its call, and change with the user's own cast."""
    model, twin = small_twins("wan", SIZE)
    for m in (model, twin):
        m.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    offload(model, min_bytes=MIN_BYTES // 4)
    large = {n for n, p in [*model.named_parameters(), *model.named_buffers()] if p.nbytes >= MIN_BYTES // 4}
    check_small(model, twin, "wan", SIZE, [0])  # eagerly
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
    model, twin = small_twins("wan", SIZE)
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
    model, twin = twins(Stack)
    model.forward = torch.compile(model.forward, backend="chunkflow", options=EAGER)
    check_steps(model, twin, 2)
    check_moved(model)
