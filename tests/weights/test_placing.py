"""Placing a model: parameters look as before, their bytes are in the host store, and nothing is lost."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OPTIONS, RESIDENT
from helpers import WIDE, Stack
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from chunkflow_compile import ChunkflowError, offload, programs, restore
from chunkflow_compile.frontend.backend import chunkflow
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.host_weight import HostWeight

MIN_BYTES = 4096


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack().eval()


def placed() -> Stack:
    model = stack()
    offload(model, min_bytes=MIN_BYTES)
    return model


def compiled(model: nn.Module, **options: int) -> nn.Module:
    return torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, **options})


class Root(nn.Module):
    """Three weights of its own; with a region for each, streaming them saves memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a @ self.b @ self.c


def test_large_parameters_keep_their_shape_and_device_without_memory_there() -> None:
    model, twin = placed(), stack()
    moved = [n for n, p in model.named_parameters() if buffer_of(p) is not None]
    assert moved == [n for n, p in twin.named_parameters() if p.numel() * 4 >= MIN_BYTES] != []
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert isinstance(p, nn.Parameter)
        assert (type(p), p.shape, p.dtype, p.device, p.stride()) == (
            HostWeight if name in moved else nn.Parameter,
            q.shape,
            q.dtype,
            q.device,
            q.stride(),
        )


def test_packing_takes_over_the_bytes_without_a_copy() -> None:
    model = stack()
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    offload(model, min_bytes=MIN_BYTES)
    buffers = {n: buffer for n, p in model.named_parameters() if (buffer := buffer_of(p)) is not None}
    assert {n: h.host.data_ptr() for n, h in buffers.items()} == {n: before[n] for n in buffers}
    restore(model)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before


def test_restore_is_bit_for_bit_and_leaves_no_trace() -> None:
    model, twin = placed(), stack()
    before = set(twin.__dict__)
    restore(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q) and not p.__dict__
    assert set(model.__dict__) == before
    assert all(not m._forward_pre_hooks and "_apply" not in m.__dict__ for m in model.modules())
    assert copy.deepcopy(model) is not model
    x = torch.randn(4, 8)
    assert torch.equal(model(x), twin(x))


def test_state_dict_reads_the_host_copy() -> None:
    model, twin = placed(), stack()
    state = model.state_dict()
    assert list(state) == list(twin.state_dict())
    assert all(torch.equal(state[n], v) for n, v in twin.state_dict().items())
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert all(torch.equal(v, state[n]) for n, v in torch.load(buffer).items())


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_writes_the_host_copy_and_the_next_step_uses_it(assign: bool, no_grad: None) -> None:
    model, x = placed(), torch.randn(4, 8)
    run = compiled(model)
    run(x)
    torch.manual_seed(1)
    other = Stack().eval()
    model.load_state_dict(other.state_dict(), assign=assign)
    if not assign:  # assign replaces the small parameters, and Dynamo may compile again
        assert len(programs(model)) == 1
    for _ in range(3):
        torch.testing.assert_close(run(x), other(x))
    restore(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_load_state_dict_still_reports_what_does_not_fit() -> None:
    model = placed()
    state = model.state_dict()
    state["blocks.0.up.weight"] = torch.zeros(3, 3)
    del state["blocks.1.up.weight"]
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing key.*blocks.1.up.weight.*size mismatch for blocks.0.up.weight"
    ):
        model.load_state_dict(state)


def test_save_pretrained_writes_the_weights(tmp_path: Path) -> None:
    size = Size()
    model, twin = small_model("wan", size), small_model("wan", size)
    offload(model, min_bytes=MIN_BYTES)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert saved.keys() == twin.state_dict().keys()
    assert all(torch.equal(saved[n], v) for n, v in twin.state_dict().items())


def test_an_eager_call_is_right_and_says_once_what_it_moved(no_grad: None) -> None:
    model, twin, x = placed(), stack(), torch.randn(4, 8)
    nbytes = sum(buffer.nbytes for p in model.parameters() if (buffer := buffer_of(p)) is not None)
    with pytest.warns(UserWarning, match=rf"Stack runs outside its compiled form: ops have fetched {nbytes} bytes"):
        assert torch.equal(model(x), twin(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(x), twin(x))
    assert torch.equal(model.blocks[1].down(torch.ones(4, 64)), twin.blocks[1].down(torch.ones(4, 64)))


def test_ops_outside_the_compiled_parts_are_named(no_grad: None) -> None:
    model, twin = placed(), stack()
    read = [p for p in model.blocks[0].parameters() if isinstance(p, HostWeight)]
    with pytest.warns(
        UserWarning, match=rf"outside the compiled parts of Stack read {len(read)} of its \d+ .* blocks.0"
    ):
        for _ in range(2 * len(model.blocks)):
            x = torch.randn(4, model.blocks[0].up.in_features)
            assert torch.equal(model.blocks[0](x), twin.blocks[0](x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_a_model_of_its_own(copied: Callable[[nn.Module], nn.Module], no_grad: None) -> None:
    model, twin, x = placed(), stack(), torch.randn(4, 8)
    run = compiled(model)
    run(x)
    other = copied(model)
    model.blocks[0].up.weight.zero_()
    assert torch.equal(other(x), twin(x))
    again = compiled(other)
    for _ in range(3):
        x = torch.randn(4, 8)
        torch.testing.assert_close(again(x), twin(x))
    assert programs(other)[0].plan.moved_bytes > 0 and len(programs(model)) == 1
    for m in (other, model):
        restore(m)
    assert all(torch.equal(p, q) for p, q in zip(other.parameters(), twin.parameters(), strict=True))


def test_a_model_changes_its_type_in_host_memory(no_grad: None) -> None:
    model, twin, x = placed(), stack(), torch.randn(4, 8)
    run = compiled(model)
    run(x)
    for m in (model, twin):
        m.to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert all(isinstance(b.up.weight, HostWeight) for b in model.blocks)
    for _ in range(3):
        x = torch.randn(4, 8, dtype=torch.float64)
        torch.testing.assert_close(run(x), twin(x))
    model.to("cpu")
    with pytest.raises(
        ChunkflowError, match=r"offloaded for cpu, so the model cannot be moved to meta: call .*restore"
    ):
        model.to("meta")
    restore(model)
    assert torch.equal(model(x), twin(x))


def test_compiling_an_unplaced_model_places_it_at_its_first_call(no_grad: None) -> None:
    model, twin, x = stack(), stack(), torch.randn(4, 8)
    run = compiled(model)
    assert all(buffer_of(p) is None for p in model.parameters())
    torch.testing.assert_close(run(x), twin(x))
    moved = [n for n, p in model.named_parameters() if buffer_of(p) is not None]
    assert moved == ["blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "blocks.1.down.weight"]
    assert all(torch.equal(v, twin.state_dict()[n]) for n, v in model.state_dict().items())
    assert len(programs(model)) == 1


def test_placing_and_restoring_in_turns_compiles_twice(no_grad: None) -> None:
    model, twin = stack(), stack()
    compiled_times = 0

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compiled_times
        compiled_times += 1
        return chunkflow(graph, inputs, options=OPTIONS)

    run = torch.compile(model, backend=counted, fullgraph=True)
    for turn in range(20):
        for _ in range(2):
            x = torch.randn(4, 8)
            torch.testing.assert_close(run(x), twin(x))
        (restore if turn % 3 else offload_again)(model)
        assert compiled_times <= 2


def offload_again(model: nn.Module) -> None:
    restore(model)
    offload(model, min_bytes=MIN_BYTES)


def test_a_compiled_model_works_again_after_restore(no_grad: None) -> None:
    model, twin = stack(), stack()
    run = compiled(model)
    for step in range(6):
        x = torch.randn(4, 8)
        torch.testing.assert_close(run(x), twin(x))
        if step % 2:
            restore(model)
            torch.testing.assert_close(model(x), twin(x))
            assert programs(model) == ()


@pytest.mark.parametrize("placed_first", [False, True])
def test_a_weight_of_the_root_module_is_streamed_and_guarded(placed_first: bool, no_grad: None) -> None:
    model, twin, x = Root(), Root(), torch.randn(4, 64)
    if placed_first:
        offload(model, min_bytes=MIN_BYTES)
    run = compiled(model, group_bytes=1)
    for _ in range(3):
        torch.testing.assert_close(run(x), twin(x))
    assert torch.equal(model(x), twin(x))
    assert len(programs(model)) == 1
    assert programs(model)[0].plan.moved_bytes == 3 * 64 * 64 * 4
    restore(model)
    torch.testing.assert_close(model(x), twin(x))


def test_tied_and_overlapping_parameters_stay_together(no_grad: None) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(3))
            self.b.weight = self.a.weight
            whole = torch.randn(128, 64)
            self.d, self.e = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.d.weight, self.e.weight = nn.Parameter(whole[:64]), nn.Parameter(whole[64:])
            whole = torch.randn(96, 64)
            self.f, self.g = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            self.f.weight, self.g.weight = nn.Parameter(whole[:64]), nn.Parameter(whole[32:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.g(self.f(self.e(self.d(self.c(self.b(self.a(x))))))) / 1e4

    model, twin, x = Shared(), Shared(), torch.randn(4, 64)
    run = compiled(model, group_bytes=1)
    for _ in range(2):
        torch.testing.assert_close(run(x), twin(x), rtol=1e-4, atol=1e-4)
    why = {w.name: w.why for w in programs(model)[0].plan.weights}
    assert "tied: also b.weight" in why["a.weight"]
    assert "shares memory" in why["f.weight"] and "shares memory" in why["g.weight"]
    assert not any("shares memory" in why[name] for name in ("c.weight", "d.weight", "e.weight"))
    assert programs(model)[0].plan.moved_bytes > 0


@pytest.mark.long
def test_two_arms_on_one_model_agree(no_grad: None) -> None:
    """The resident program reads the parameters in place; then the streaming program empties them."""
    model, size = small_model("wan", WIDE), {"chunk_bytes": 1 << 18}
    resident = torch.compile(model, backend="chunkflow", fullgraph=True, options={**RESIDENT, **size})
    inputs = small_inputs("wan", WIDE, 0)
    first = resident(**inputs)[0]
    streamed = torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, **size})
    assert torch.equal(streamed(**inputs)[0], first)
    assert torch.equal(resident(**inputs)[0], first)
    assert [p.plan.policy for p in programs(model)] == ["chunkflow", "resident"], "the resident program was bound again"


class Corners(nn.Module):
    """More than Linear layers: a convolution in channels_last, a buffer that changes, constants."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(16, 32, 3, padding=1, dtype=dtype).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList([nn.Linear(64, 64, dtype=dtype) for _ in range(3)])
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        self.calls.add_(1)
        x = self.conv(x).flatten(1).unflatten(1, (-1, 64)) * torch.tensor(2.0)
        for block in self.blocks:
            x = block(x)
        return x, x + torch.arange(64), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inference", [False, True])
def test_dtypes_strides_buffers_and_constants(dtype: torch.dtype, inference: bool) -> None:
    model, twin = Corners(dtype).eval(), Corners(dtype).eval()
    run = compiled(model)
    with torch.inference_mode() if inference else torch.no_grad():
        for call in range(3):
            x = torch.randn(1, 16, 8, 8, dtype=dtype)
            first, second, nothing = run(x)
            torch.testing.assert_close(first, twin(x)[0], rtol=2e-2, atol=2e-2)
            assert second.shape == first.shape and nothing is None
            assert model.calls == call + 1
    (runner,) = programs(model)
    assert {w.name for w in runner.plan.streamed} == {"conv.weight", *(f"blocks.{i}.weight" for i in range(3))}
    restore(model)
    assert all(
        torch.equal(p, q) and p.stride() == q.stride()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_the_tensors_inside_a_tensor_subclass_stream(no_grad: None) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))).eval()
        data = model[0].weight.data
        model[0].weight = nn.Parameter(TwoTensor(data, data.clone()))
        return model

    model, x = make(), torch.randn(4, 64)
    run = compiled(model, group_bytes=1)
    expected = x @ model[0].weight.a.t() @ model[1].weight.t() @ model[2].weight.t() @ model[3].weight.t()
    for _ in range(2):
        out = run(x)
        torch.testing.assert_close(out.a if isinstance(out, TwoTensor) else out, expected)
    (runner,) = programs(model)
    assert {w.name for w in runner.plan.streamed} == {"0.weight.a", "0.weight.b", "1.weight", "2.weight", "3.weight"}


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload", "load_checkpoint_and_dispatch"])
def test_a_model_whose_weights_accelerate_keeps(how: str, tmp_path: Path, no_grad: None) -> None:
    """The error names accelerate and the call that loads the weights, and that call does."""
    accelerate = pytest.importorskip("accelerate")
    model, twin, x = stack(), stack(), torch.randn(4, 8)
    if how == "load_checkpoint_and_dispatch":
        torch.save(twin.state_dict(), tmp_path / "weights.bin")
        with accelerate.init_empty_weights():
            model = Stack().eval()
        model = accelerate.load_checkpoint_and_dispatch(
            model, str(tmp_path / "weights.bin"), {"": "disk"}, offload_folder=str(tmp_path / "folder")
        )
        undo = "load it again without device_map, offload_folder"
    else:
        given = {} if how == "cpu_offload" else {"offload_dir": str(tmp_path)}
        getattr(accelerate, how)(model, execution_device=torch.device("cpu"), **given)
        undo = r"call accelerate\.hooks\.remove_hook_from_module\(model, recurse=True\)"
    match = rf"accelerate keeps the weights of Stack, .* for its call: {undo}"
    with pytest.raises(ChunkflowError, match=match):
        offload(model, min_bytes=MIN_BYTES)
    with pytest.raises(BackendCompilerFailed, match=match):
        torch.compile(model, backend="chunkflow", options=OPTIONS)(x)
    torch._dynamo.reset()
    assert torch.equal(model(x), twin(x)), "the model is usable"
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert any(p.is_meta for p in model.parameters()) == (how == "load_checkpoint_and_dispatch")
    if how != "load_checkpoint_and_dispatch":
        offload(model, min_bytes=MIN_BYTES)
        torch.testing.assert_close(compiled(model)(x), twin(x))


def test_a_module_of_torchscript() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(64, 64)))
    with pytest.raises(ChunkflowError, match=r"module of TorchScript, which torch\.compile does not trace"):
        offload(model, min_bytes=MIN_BYTES)
    assert not any(isinstance(p, HostWeight) for p in model.parameters())


def test_a_model_under_group_offloading() -> None:
    from diffusers.hooks import apply_group_offloading

    model, cpu = stack(), torch.device("cpu")
    apply_group_offloading(model, cpu, cpu, offload_type="leaf_level")
    with pytest.raises(ChunkflowError, match=r"Stack is under diffusers' group offloading, .* load the model again"):
        offload(model, min_bytes=MIN_BYTES)


def test_the_buckets_of_distributed_data_parallel(one_rank: None) -> None:
    """torch splits the graph for gradients: a sentence, and what it says runs."""
    torch.manual_seed(0)
    model, x = Stack(layers=4, width=256).eval(), torch.randn(4, 8)  # more than one bucket
    expected, wrapped = model(x), nn.parallel.DistributedDataParallel(model)
    with pytest.raises(BackendCompilerFailed, match=r"buckets of gradients.* torch\.compile\(model\.module\)"):
        torch.compile(wrapped, backend="chunkflow", options=OPTIONS)(x)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=False):
        run = torch.compile(wrapped, backend="chunkflow", options=OPTIONS)
        for _ in range(3):
            torch.testing.assert_close(run(x), expected)
    assert programs(model)[0].measurements[-1].moved_bytes > 0
