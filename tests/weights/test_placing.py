"""Placing a model: parameters look as before, their bytes are in the host store, and nothing is lost."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Stack, check_steps
from safetensors.torch import load_file
from test_host_weight import EAGER, MIN_BYTES, compiled, pair, stack
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from chunkflow_compile import ChunkflowError, offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_model
from chunkflow_compile.frontend.backend import chunkflow
from chunkflow_compile.units import size
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of
from chunkflow_compile.weights.host_weight import HostWeight


class Root(nn.Module):
    """Three weights of its own; with a region for each, streaming them saves memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.a @ self.b @ self.c


def test_what_is_moved_looks_as_before_and_comes_back() -> None:
    """Only large weights move, their bytes are not copied, and restore leaves no trace."""
    model, twin = stack(), stack()
    attributes, memory = set(model.__dict__), {n: p.data_ptr() for n, p in model.named_parameters()}
    offload(model, min_bytes=MIN_BYTES)
    buffers = {n: buffer for n, p in model.named_parameters() if (buffer := buffer_of(p)) is not None}
    assert [*buffers] == [n for n, p in twin.named_parameters() if p.numel() * 4 >= MIN_BYTES] != []
    assert {n: buffer.host.data_ptr() for n, buffer in buffers.items()} == {n: memory[n] for n in buffers}
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert isinstance(p, nn.Parameter) and type(p) is (HostWeight if name in buffers else nn.Parameter)
        assert (p.shape, p.dtype, p.device, p.stride()) == (q.shape, q.dtype, q.device, q.stride())
    restore(model)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == memory
    assert all(torch.equal(p, q) and not p.__dict__ for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert set(model.__dict__) == attributes
    assert all(not m._forward_pre_hooks and "_apply" not in m.__dict__ for m in model.modules())
    check_steps(copy.deepcopy(model), twin, 1)


def test_load_state_dict_still_reports_what_does_not_fit() -> None:
    model, _ = pair()
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


def test_eager_calls_are_right_and_said_once(no_grad: None) -> None:
    """Of the whole model, and of a part of it."""
    (model, twin), x = pair(), torch.randn(4, 8)
    nbytes = sum(buffer.nbytes for p in model.parameters() if (buffer := buffer_of(p)) is not None)
    with pytest.warns(UserWarning, match=rf"Stack runs outside its compiled form: ops have fetched {size(nbytes)} of"):
        assert torch.equal(model(x), twin(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model(x), twin(x))
    assert torch.equal(model.blocks[1].down(torch.ones(4, 64)), twin.blocks[1].down(torch.ones(4, 64)))
    model, twin = pair()
    read = sum(isinstance(p, HostWeight) for p in model.blocks[0].parameters())
    with pytest.warns(UserWarning, match=rf"outside the compiled parts of Stack read {read} of its \d+ .* blocks.0"):
        for _ in range(2 * len(model.blocks)):
            x = torch.randn(4, model.blocks[0].up.in_features)
            assert torch.equal(model.blocks[0](x), twin.blocks[0](x))


def test_a_copy_is_a_model_of_its_own(no_grad: None) -> None:
    model, twin = pair()
    run = compiled(model)
    check_steps(run, twin, 1)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    model.blocks[0].up.weight.zero_()
    for other in copies:
        check_steps(other, twin, 1)
        again = compiled(other)
        check_steps(again, twin, 3)
        assert programs(other)[0].plan.moved_bytes > 0 and len(programs(model)) == 1
    for m in (*copies, model):
        restore(m)
    for other in copies:
        assert all(torch.equal(p, q) for p, q in zip(other.parameters(), twin.parameters(), strict=True))


def test_placing_and_restoring_in_turns_compiles_twice(no_grad: None) -> None:
    """A model that is not placed is placed by its first call, also after ``restore``."""
    model, twin = stack(), stack()
    compiled_times = 0

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compiled_times
        compiled_times += 1
        return chunkflow(graph, inputs, options=EAGER)

    run = torch.compile(model, backend=counted, fullgraph=True)
    assert all(buffer_of(p) is None for p in model.parameters())
    for turn in range(20):
        check_steps(run, twin, 2)
        assert {type(buffer_of(p)) for p in model.parameters() if p.nbytes >= MIN_BYTES} == {HostBuffer}
        restore(model)
        assert programs(model) == ()
        check_steps(model, twin, 1)
        if turn % 3 == 0:
            offload(model, min_bytes=MIN_BYTES)
        assert compiled_times <= 2


def test_a_weight_of_the_root_module_is_streamed_and_guarded(no_grad: None) -> None:
    model, twin = Root(), Root()
    run = compiled(model, group_bytes=1)
    check_steps(run, twin, 3, (4, 64))
    check_steps(model, twin, 1, (4, 64))
    assert len(programs(model)) == 1
    assert programs(model)[0].plan.moved_bytes == 3 * 64 * 64 * 4
    restore(model)
    check_steps(model, twin, 1, (4, 64))


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

    model, twin = Shared(), Shared()
    run = compiled(model, group_bytes=1)
    check_steps(run, twin, 2, (4, 64))
    why = {w.name: w.why for w in programs(model)[0].plan.weights}
    assert "tied: also b.weight" in why["a.weight"]
    assert "shares memory" in why["f.weight"] and "shares memory" in why["g.weight"]
    assert not any("shares memory" in why[name] for name in ("c.weight", "d.weight", "e.weight"))
    assert programs(model)[0].plan.moved_bytes > 0


@pytest.mark.long
def test_two_arms_on_one_model_agree(no_grad: None) -> None:
    """The resident program reads the parameters in place; then the streaming program empties them."""
    model, twin = stack(), stack()
    resident = compiled(model, policy="resident", slowdown=None)
    check_steps(resident, twin, 1)
    streamed = compiled(model)
    check_steps(streamed, twin, 1)
    check_steps(resident, twin, 1)
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


@pytest.mark.parametrize(
    ("dtype", "inference", "lowering"),
    [pytest.param(torch.bfloat16, False, "inductor", marks=pytest.mark.long), (torch.float16, True, "eager")],
)
def test_dtypes_strides_buffers_and_constants(dtype: torch.dtype, inference: bool, lowering: str) -> None:
    model, twin = Corners(dtype).eval(), Corners(dtype).eval()
    run = compiled(model, lowering=lowering)
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


@pytest.mark.parametrize("how", ["cpu_offload", "load_checkpoint_and_dispatch"])
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
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        undo = r"call accelerate\.hooks\.remove_hook_from_module\(model, recurse=True\)"
    match = rf"accelerate keeps the weights of Stack, .* for its call: {undo}"
    with pytest.raises(ChunkflowError, match=match):
        offload(model, min_bytes=MIN_BYTES)
    with pytest.raises(BackendCompilerFailed, match=match):
        torch.compile(model, backend="chunkflow", options=EAGER)(x)
    torch._dynamo.reset()
    assert torch.equal(model(x), twin(x)), "the model is usable"
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert any(p.is_meta for p in model.parameters()) == (how == "load_checkpoint_and_dispatch")
    if how != "load_checkpoint_and_dispatch":
        offload(model, min_bytes=MIN_BYTES)
        assert torch.equal(compiled(model)(x), twin(x))


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
        torch.compile(wrapped, backend="chunkflow", options=EAGER)(x)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(optimize_ddp=False):
        run = torch.compile(wrapped, backend="chunkflow", options=EAGER)
        for _ in range(3):
            assert torch.equal(run(x), expected)
    assert programs(model)[0].measurements[-1].moved_bytes > 0
