"""Phases of a block, run slice by slice, against the block as a whole: bit for bit."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_split import blocks
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from chunkflow_compile.catalog.families import FAMILIES
from chunkflow_compile.catalog.sizes import Config, Size
from chunkflow_compile.catalog.small import SMALL_MODELS
from chunkflow_compile.catalog.weightless import trace_without_weights
from chunkflow_compile.passes.cost.count import region_cost
from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.graph import slice_rules
from chunkflow_compile.passes.graph.coarsen import grouped
from chunkflow_compile.passes.graph.discover import discover
from chunkflow_compile.passes.graph.keys import structural_key
from chunkflow_compile.passes.graph.regions import Cut, cut
from chunkflow_compile.passes.graph.rotary import in_real_arithmetic
from chunkflow_compile.passes.graph.slice_check import check_phases
from chunkflow_compile.passes.graph.slice_parts import Operand, Part, Sliced
from chunkflow_compile.passes.graph.slice_rules import Rule
from chunkflow_compile.passes.graph.slices import Phase, Slice, Whole, phases

# Slices of 16 rows and more: kernels of the CPU add up products of fewer rows in another order.
SIZES: Mapping[str, Any] = {"height": 16, "width": 16, "frames": 1, "text": 16, "layers": 1, "singles": 1}
_HEADS = {"num_layers": 1, "num_attention_heads": 4, "attention_head_dim": 16}
CONFIGS: Mapping[str, Config] = {
    "sd3": {
        **_HEADS,
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "joint_attention_dim": 32,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 16,
        "qk_norm": "rms_norm",
        "dual_attention_layers": (0,),
    },
    "ltx": {**_HEADS, "in_channels": 16, "out_channels": 16, "cross_attention_dim": 64, "caption_channels": 32},
}


@cache
def blocks_of(family: str, dtype: torch.dtype, degree: int = 1, **sizes: Any) -> Cut:
    """The graph of a small model, with one region per block, or several with collectives between them."""
    size = Size(**{"batch": 1, **SIZES, **sizes})
    config = CONFIGS[family] if family in CONFIGS else SMALL_MODELS[family](size)
    traced = in_real_arithmetic(
        trace_without_weights(
            lambda: FAMILIES[family].model_and_inputs(config, size, dtype), degree, min_bytes=64, dtype=dtype
        )
    )
    found = discover(traced)
    return cut(traced, found, groups=grouped(cut(traced, found), None))


def random_inputs(module: GraphModule) -> list[torch.Tensor]:
    """Values for the inputs of a graph, with their strides."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for node in module.graph.find_nodes(op="placeholder"):
        meta = node.meta["val"]
        value = torch.empty_strided(tuple(meta.shape), meta.stride(), dtype=meta.dtype)
        if meta.is_floating_point() or meta.is_complex():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=value.dtype) / 4)
        else:
            value.fill_(1)
        values.append(value)
    return values


def taken(value: torch.Tensor, part: Slice | None, call: int) -> torch.Tensor:
    return value if part is None else value.narrow(part.dim, part.offset + call * part.size, part.size)


def run(module: GraphModule, found: Sequence[Phase], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a graph, by its phases.  Fresh memory is full of NaN; inputs may be overwritten."""
    placeholders = module.graph.find_nodes(op="placeholder")
    values: dict[Node, torch.Tensor] = dict(zip(placeholders, inputs, strict=True))
    for phase in found:
        if not phase.writes:
            inputs_of = [taken(values[n], part, 0) for n, part in zip(phase.inputs, phase.slices, strict=True)]
            values.update(zip(phase.outputs, phase.module(*inputs_of), strict=True))
        for write in phase.writes:
            if write.over is not None:
                values[write.value] = inputs[write.over]
            elif write.value not in values:
                meta = write.value.meta["val"]
                fresh = torch.empty_strided(tuple(meta.shape), meta.stride(), dtype=meta.dtype)
                values[write.value] = fresh.fill_(float("nan"))
        for call in range(phase.repeat if phase.writes else 0):
            inputs_of = [taken(values[n], part, call) for n, part in zip(phase.inputs, phase.slices, strict=True)]
            inputs_of += [taken(values[w.value], w.slice, call) for w in phase.writes if w.over is None]
            phase.module(*inputs_of)
    (returned,) = module.graph.output_node().args
    return [values[n] for n in returned]  # type: ignore[union-attr,index]


def assert_equal_in_slices(module: GraphModule, repeat: int) -> tuple[Phase, ...]:
    """The phases of a graph compute what the graph computes, in place where they may."""
    inputs = random_inputs(module)
    wanted = module(*[x.clone() for x in inputs])
    found = phases(module, repeat, range(len(inputs)))
    check_phases(module, found)
    for got, want in zip(run(module, found, inputs), wanted, strict=True):
        assert torch.equal(got, want)
    assert max(phase.repeat for phase in found) == repeat
    return found


def assert_blocks_equal(pieces: Cut, repeats: Sequence[int]) -> list[tuple[Phase, ...]]:
    """The blocks of each type, in slices, compute what they compute as a whole."""
    names = {r.info.block for r in pieces.regions if re.search(r"blocks\.0$", r.info.block)}
    modules = {r.info.key: r.module for r in pieces.regions if r.info.block in names and "refiner" not in r.info.block}
    assert modules
    return [assert_equal_in_slices(module, repeat) for module in modules.values() for repeat in repeats]


@pytest.mark.parametrize(
    ("family", "dtype", "sizes"),
    [
        ("ltx", torch.float32, {"height": 8, "width": 8}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("wan", torch.bfloat16, {"timestep": "token"}),
                ("wan", torch.float32, {}),
                ("hunyuanvideo", torch.float32, {}),
                ("wan", torch.bfloat16, {"batch": 2}),
                ("flux", torch.bfloat16, {"height": 8, "width": 8}),
                ("qwen-image", torch.bfloat16, {"height": 8, "width": 8}),
                ("sd3", torch.float32, {}),
            )
        ),
    ],
)
def test_a_block_in_slices_is_bit_equal(family: str, dtype: torch.dtype, sizes: dict[str, Any]) -> None:
    assert_blocks_equal(blocks_of(family, dtype, **sizes), (1, 2, 4))


def test_a_block_of_several_ranks_is_sliced_between_its_collectives() -> None:
    """Its regions return flat views of what is sent to other ranks, and read what comes from them in another shape."""
    found = blocks_of("wan", torch.bfloat16, degree=2, frames=2, timestep="token")
    regions = [r for r in found.regions if r.info.block == "blocks.0"]
    assert len(regions) == 3
    for region in regions:
        for repeat in (2, 4):
            assert_equal_in_slices(region.module, repeat)


def _flops(module: GraphModule) -> float:
    return region_cost({n: n.meta.get("val") for n in module.graph.nodes}).flops


def test_phases_can_be_costed_and_have_equal_keys_in_equal_blocks() -> None:
    first, second = [region.module for region in blocks()[1].regions]
    found, others = phases(first, 4, ()), phases(second, 4, ())
    assert [structural_key(p.module, 0) for p in found] == [structural_key(p.module, 1) for p in others]
    assert sum(_flops(p.module) * p.repeat for p in found) == _flops(first)


def graph_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> GraphModule:
    """The ATen graph of a function of float32 tensors."""
    with torch.no_grad():
        return make_fx(function, tracing_mode="fake")(*[torch.zeros(shape) for shape in shapes])


WIDTH, TOKENS = 32, 64
Values = list[torch.Tensor]


def _attend(values: Values, heads: int = 2) -> torch.Tensor:
    """Queries, keys and values are the newest three."""
    q, k, v = [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (values * 3)[-3:]]
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _rotated(values: Values) -> torch.Tensor:
    first, second = values[-1].unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([-second, first], -1).flatten(-2) + values[0]


def _joined(values: Values) -> torch.Tensor:
    """A short stream in front, attended to with the long one, and left out again."""
    joint = torch.cat([values[-1][:, :16] * 2, values[-1]], 1)
    return _attend([joint, joint + 1, joint * 2])[:, 16:]


# Each computes a further value from those before: rows by themselves, unless it attends.  None is a function that kernels of
# the CPU approximate differently for strided memory, as they do gelu.
STEPS: Mapping[str, Callable[[Values, torch.Tensor], torch.Tensor]] = {
    "product": lambda values, weight: values[-1] @ weight,
    "sum": lambda values, weight: values[-1] + values[0],
    "older": lambda values, weight: values[len(values) // 2] * 0.5,
    "norm": lambda values, weight: functional.layer_norm(values[-1], (WIDTH,)),
    "rms": lambda values, weight: values[-1] * (values[-1].square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "relu": lambda values, weight: values[-1].relu(),
    "modulated": lambda values, weight: values[-1] * (1 + (weight[:1] @ weight)[:, None]),
    "gated": lambda values, weight: torch.cat([x * y for x, y in [values[-1].chunk(2, -1)]] * 2, -1),
    "moved": lambda values, weight: values[-1].permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "attention": lambda values, weight: _attend(values),
    "rotated": lambda values, weight: _rotated(values),
    "joined": lambda values, weight: _joined(values),
}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=6),
    batch=st.sampled_from([1, 2]),
    repeat=st.sampled_from([2, 4]),
)
def test_a_random_graph_in_slices_is_bit_equal(names: list[str], batch: int, repeat: int) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        values = [x, x + 1]
        for name in names:
            values.append(STEPS[name](values, weight))
        return (values[-1] + x,)

    assert_equal_in_slices(graph_of(function, (batch, TOKENS, WIDTH), (WIDTH, WIDTH)), repeat)


def test_a_stream_that_is_read_whole_is_not_overwritten() -> None:
    """Here the keys and values are the stream itself, as in a single block that is cut before its projections."""
    graph = graph_of(lambda x: (x + _attend([x]),), (1, TOKENS, WIDTH))
    (body,) = assert_equal_in_slices(graph, 4)
    assert set(body.slices) == {None, Slice(1, 0, 16)}
    assert [write.over for write in body.writes] == [None]
    (write,) = body.writes
    module = copy.deepcopy(body.module)
    *_, target = module.graph.find_nodes(op="placeholder")
    target.replace_all_uses_with(module.graph.find_nodes(op="placeholder")[body.slices.index(write.slice)])
    module.graph.erase_node(target)
    wrong = replace(body, module=module, writes=(replace(write, over=0),))
    with pytest.raises(FindingError, match="overwrites x_1 slice by slice, and reads other parts of it"):
        check_phases(graph, (wrong,))


def test_a_stream_that_is_returned_or_of_others_is_not_overwritten() -> None:
    graph = graph_of(lambda x: (x.sin() + x, x), (1, TOKENS, WIDTH))
    assert [w.over for phase in phases(graph, 4, {0}) for w in phase.writes] == [None]
    graph = graph_of(lambda x: (x.sin() + x,), (1, TOKENS, WIDTH))
    assert [w.over for phase in phases(graph, 4, {0}) for w in phase.writes] == [0]
    assert [w.over for phase in phases(graph, 4, ()) for w in phase.writes] == [None]


def test_each_part_of_a_value_is_an_argument_with_its_own_name() -> None:
    """Two streams of one length, as one: they are kept whole in the end, but no error of Python says so."""
    graph = graph_of(lambda x, y: (torch.cat([x * 2, y + 1], 1),), (1, TOKENS, WIDTH), (1, TOKENS, WIDTH))
    (body,) = phases(graph, 4, ())
    names = [n.target for n in body.module.graph.find_nodes(op="placeholder")]
    assert len(body.writes) == 2 and len(names) == len({*names})


def test_slices_between_aligned_addresses_say_so() -> None:
    """Inductor then reads no vectors.  So are the tokens of HunyuanVideo, whose stream has them in its last stride."""
    graph = graph_of(lambda x: (x.transpose(1, 2).sin() + 1,), (1, WIDTH, 36))
    (phase,) = assert_equal_in_slices(graph, 4)
    assert [n.meta["val"].storage_offset() for n in phase.module.graph.find_nodes(op="placeholder")] == [1, 1]


@pytest.mark.parametrize(
    ("function", "shape", "reason"),
    [
        (lambda x: (x.mean(1, keepdim=True) + x,), (1, TOKENS, WIDTH), "mean"),
        (lambda x: (x + x.flip(1),), (1, TOKENS, WIDTH), "flip works along the dimension"),
        (lambda x: (functional.conv1d(x, x[:4, :, :1]) * 2,), (TOKENS, 4, WIDTH), "convolution"),
        (lambda x: (x + 1,), (1, 66, WIDTH), "66 tokens cannot be divided into 4 slices"),
        (lambda x: (x,), (1, TOKENS, WIDTH), "computes no tensor"),
    ],
)
def test_what_cannot_be_sliced_stays_whole_and_says_why(
    function: Callable[..., Any], shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(Whole, match=reason):
        phases(graph_of(function, shape), 4, ())


def test_symbolic_sizes_stay_whole() -> None:
    graph = make_fx(lambda x: (x + 1,), tracing_mode="symbolic")(torch.zeros(1, TOKENS, WIDTH))
    with pytest.raises(Whole, match="symbolic"):
        phases(graph, 4, ())


def test_opaque_attention_stays_whole_and_is_named() -> None:
    with torch.library._scoped_library("slices_test", "FRAGMENT") as library:
        library.define("attend(Tensor q, Tensor k, Tensor v) -> Tensor")
        library.impl("attend", lambda q, k, v: torch.empty_like(q), "CompositeExplicitAutograd")
        op = torch.ops.slices_test.attend
        graph = graph_of(lambda x, w: (x + op(x @ w, x, x),), (1, TOKENS, WIDTH), (WIDTH, WIDTH))
        with pytest.raises(Whole, match=r"slices_test\.attend"):
            phases(graph, 4, ())


def _joint() -> GraphModule:
    """Two streams that attend to each other."""

    def function(
        text: torch.Tensor, image: torch.Tensor, table: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        k, v = [torch.cat([text @ w, image @ w], 1) * table for w in (weight, weight * 2)]
        return text + _attend([text, k, v]), image + _attend([image, k, v])

    return graph_of(function, (1, 16, WIDTH), (1, TOKENS, WIDTH), (16 + TOKENS, WIDTH), (WIDTH, WIDTH))


def _changed(found: Sequence[Phase], index: int, **changes: Any) -> tuple[Phase, ...]:
    return (*found[:index], replace(found[index], **changes), *found[index + 1 :])


def _moved(part: Slice | None, by: int) -> Slice | None:
    return part and replace(part, offset=part.offset + by)


def _mutants(found: tuple[Phase, ...]) -> Iterator[tuple[str, tuple[Phase, ...]]]:
    """``found``: text's keys and values, the image's, text, image."""
    assert [p.repeat for p in found] == [1, 4, 1, 4]
    keys, body = found[1], found[3]
    for i in range(len(found)):
        yield "before all of it is computed|No phase computes", (*found[:i], *found[i + 1 :])
    yield "before all of it is computed", (*found[2:], *found[:2])
    yield "before all of it is computed", _changed(found, 1, repeat=1)  # of one slice only
    yield "twice", (found[0], *found)
    yield "again", (*found[:2], *found[1:])
    overlapping = tuple(replace(w, slice=replace(w.slice, offset=0)) for w in keys.writes)
    yield "other slices", _changed(found, 1, writes=overlapping)
    at = [Slice(p.dim, 0, p.size) if p and p.offset == 16 else p for p in keys.slices]
    assert at != list(keys.slices)
    yield "other slices", _changed(found, 1, slices=tuple(at))  # the positions of other tokens
    yield "not in it", _changed(found, 1, slices=tuple(_moved(p, 32) for p in keys.slices))
    swapped = tuple(replace(w, value=v) for w, v in zip(keys.writes, keys.outputs[::-1], strict=True))
    yield "other results|another value", _changed(found, 1, writes=swapped, outputs=keys.outputs[::-1])
    whole = [i for i, p in enumerate(body.slices) if p is None and body.inputs[i] in keys.outputs]
    one = [Slice(1, 0, 16) if i in whole else p for i, p in enumerate(body.slices)]
    yield "takes other inputs", _changed(found, 3, slices=tuple(one))  # the keys of one slice
    (write,) = body.writes
    assert write.over is not None
    streams = [n for n, p in zip(body.inputs, body.slices, strict=True) if p == write.slice]
    read = (*keys.inputs, *streams)
    yield "takes other inputs", _changed(found, 1, inputs=read, slices=(*keys.slices, None))
    yield "read later", (*found[:3], body, replace(found[2], inputs=(*found[2].inputs, *streams)))
    yield "no part|other parts", _changed(found, 3, writes=(replace(write, over=0),))


def test_wrong_phases_are_rejected() -> None:
    graph = _joint()
    found = assert_equal_in_slices(graph, 4)
    for fault, mutant in _mutants(found):
        with pytest.raises(FindingError, match=fault):
            check_phases(graph, mutant)
    with pytest.raises(FindingError, match="does not own"):
        check_phases(graph, found, owned=())


def _one_chunk(rule: Rule, node: Node, part: Part, item: int | None) -> Any:
    """Attention to the keys and values of the same tokens as the queries."""
    given = rule(node, part, item)
    assert isinstance(given, Sliced)
    return replace(given, args=tuple(replace(x, part=part) if isinstance(x, Operand) else x for x in given.args))


def _from_the_start(rule: Rule, node: Node, part: Part, item: int | None) -> Any:
    """The first tokens of what is cut off, whichever are left."""
    given = rule(node, part, item)
    if not isinstance(given, Operand) or given.part is None:
        return given
    return replace(given, part=replace(given.part, start=part.start))


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        pytest.param(["slice"], _from_the_start, id="a slice at the wrong offset"),
        pytest.param([n for n in slice_rules._RULES if "attention" in n], _one_chunk, id="K and V of one chunk only"),
    ],
)
def test_wrong_rules_give_other_bits(names: list[str], wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof follows the rules, so it finds no fault in them: the comparison with whole graphs does."""
    graph = graph_of(lambda x: (_joined([x]),), (1, TOKENS, WIDTH))
    assert_equal_in_slices(graph, 4)
    for name in names:
        monkeypatch.setitem(slice_rules._RULES, name, partial(wrong, slice_rules._RULES[name]))
    inputs = random_inputs(graph)
    found = phases(graph, 4, ())
    check_phases(graph, found)
    (wanted,), (got,) = graph(*inputs), run(graph, found, inputs)
    assert not torch.allclose(got, wanted, atol=1e-3)
