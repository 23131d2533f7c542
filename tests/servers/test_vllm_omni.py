"""The plug-in of vLLM-Omni, loaded by its own loader, on its own transformers, runner, offloading and LoRA."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HERE
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _resolve_process_group

if find_spec("vllm_omni") is None:
    pytest.skip("vllm_omni is not installed: make test-vllm-omni makes an environment with it", allow_module_level=True)

import vllm_omni_server
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.distributed import a2a_permute
from vllm_omni.diffusion.distributed.comm import all_to_all_4D
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager
from vllm_omni_server import WRAPPED, Worker, call, plugged_in, ranks

from chunkflow_compile import cycles, programs
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.discover import collective_kind, completes_itself, crossing_bytes, group_name
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.servers.vllm_omni import plug_in
from chunkflow_compile.units import parse_bytes

# Weights of 4 KiB are large; on this machine all copies hide, so that as much streams as the budget asks for.
OPTIONS: dict[str, Any] = {
    "min_bytes": 4096,
    "chunk_bytes": 4096,
    "group_bytes": 1 << 18,
    "hardware": str(HERE / "slow_compute.json"),
    "lowering": "eager",
}
# Of HunyuanVideo, one weight has 16 MiB: a size in its code.
MEMORY = {name: "22MiB" if name.startswith("Hunyuan") else "1MiB" for name in vllm_omni_server.NAMES}


def requests(worker: Worker, sizes: tuple[int, ...] = (8, 12, 8), tolerance: float = 0) -> None:
    """Serve requests of these sizes, of steps whose inputs change.

    Checks first that weights were copied, as many bytes as planned, within the budget; then that no output differs by more
    than ``tolerance``: ATen ops, run as they are, have the numbers of eager mode.
    """
    twin, model = worker.twin().transformer, worker.load()
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, size in enumerate(sizes):
        with worker.request():
            expected = [call(twin, worker.name, 10 * number + step, size) for step in range(4)]
        with worker.request():
            for step, wanted in enumerate(expected):
                pairs.append((call(model, worker.name, 10 * number + step, size), wanted))
    route = cycles(model)[0]
    plan = route.cycle.plan
    assert 0 < plan.device_bytes <= parse_bytes(MEMORY[worker.name], "memory")
    assert route.measurements[-1].moved_bytes == plan.moved_bytes > 0
    assert max(float((found - wanted).abs().max()) for found, wanted in pairs) <= tolerance


@pytest.mark.parametrize("name", vllm_omni_server.NAMES)
def test_transformers_of_the_server_stream(name: str, tmp_path: Path) -> None:
    with torch.no_grad(), ranks(f"{tmp_path}/meeting"), plugged_in(MEMORY[name], **OPTIONS):
        requests(Worker(name, 0, 1))


def test_inductor_compiles_the_regions_by_default(tmp_path: Path) -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "lowering"}
    with torch.no_grad(), ranks(f"{tmp_path}/meeting"), plugged_in(MEMORY["Wan"], **options):
        requests(Worker("Wan", 0, 1), tolerance=1e-5)


def serve_on_a_rank(rank: int, name: str) -> None:
    """The blocks, with their all-to-alls, are whole: the breaks at the server's hooks and loggers lie between them."""
    with ranks("", rank, 2), plugged_in(MEMORY[name], **OPTIONS):
        worker = Worker(name, rank, 2)
        requests(worker, (8, 12))
        found = [program.program.problem for program in programs(worker.runner.pipeline.transformer)]
        exchanges = {sum(c.kind == "all-to-all" for c in problem.collectives) for problem in found}
        assert max(exchanges) == 4 and exchanges <= {0, 4}, "q, k, v and the output, in one program"
        assert not counters["graph_break"]


@pytest.mark.parametrize("name", vllm_omni_server.ULYSSES)
def test_transformers_stream_on_two_ranks_of_ulysses(name: str, on_ranks: Callable[..., None]) -> None:
    on_ranks(serve_on_a_rank, name)


def save_lora(folder: Path, modules: dict[str, tuple[int, int]], rank: int = 4) -> str:
    """An adapter as PEFT saves it.  ``modules``: outputs and inputs of each layer."""
    torch.manual_seed(7)
    parts = {}
    for name, (rows, columns) in modules.items():
        parts[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns) / 4
        parts[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, rank) / 4
    targets = sorted({name.rpartition(".")[2] for name in modules})
    known = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(known))
    save_file(parts, folder / "adapter_model.safetensors")
    return str(folder)


def test_a_lora_of_the_server_is_applied_and_streams(tmp_path: Path) -> None:
    """Its manager replaces layers by wrappers after the model has run, and takes the adapter away again."""
    layers = {
        f"transformer.transformer_blocks.{n}.attn.{p}": (128, 128) for n in range(2) for p in ("to_out", "to_add_out")
    }
    path = save_lora(tmp_path, layers)
    name = "Qwen-Image"
    with torch.no_grad(), ranks(f"{tmp_path}/meeting"), plugged_in(MEMORY[name], **OPTIONS):
        worker = Worker(name, 0, 1)
        twin, model = worker.twin(), worker.load()
        with worker.request():
            plain = call(model, name, 0)
            pipes = twin, worker.runner.pipeline
            managers = [DiffusionLoRAManager(pipe, torch.device("cpu"), torch.float32) for pipe in pipes]
            request = LoRARequest(lora_name="style", lora_int_id=1, lora_path=path)
            for manager in managers:
                manager.set_active_adapter(request, 0.5)
            for step in range(4):
                found, wanted = call(model, name, step), call(twin.transformer, name, step)
                assert sum(program.measurements[-1].moved_bytes for program in programs(model)) > 0
                assert torch.equal(found, wanted)
            assert not torch.equal(call(model, name, 0), plain)
            for manager in managers:
                manager.set_active_adapter(None)
            assert torch.equal(call(model, name, 0), plain)


def test_an_unsupported_release_of_the_server_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkflow_compile.servers.settings.version", lambda name: "0.31.0")
    theirs = [getattr(owner, name) for owner, name in WRAPPED]
    with pytest.raises(ChunkflowError, match=r"^This is vllm-omni 0\.31\.0, and"), plugged_in("8GiB"):
        pass
    assert [getattr(owner, name) for owner, name in WRAPPED] == theirs


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enforce_eager": True}, "enforce_eager leaves the transformer uncompiled"),
        ({"enable_layerwise_offload": True}, "The server offloads the transformer itself (layer_wise)"),
        ({"enable_cpu_offload": True}, "The server offloads the transformer itself (model_level)"),
        (
            {"diffusion_offload_config": {"mode": "layer", "components": ["dit", "text_encoder"]}},
            "The server offloads the transformer itself (layer_wise)",
        ),
    ],
)
def test_settings_that_contradict_are_refused_before_anything_is_loaded(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with ranks(f"{tmp_path}/meeting"), plugged_in("8GiB"):
        worker = Worker("Wan", 0, 1, **given)
        with pytest.raises(ChunkflowError) as refused:
            worker.load()
        assert str(refused.value).startswith(said)
        assert worker.runner.pipeline is None


def test_a_pipeline_that_compiles_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_omni_server.Pipeline, "setup_compile", lambda self: None, raising=False)
    refused = pytest.raises(ChunkflowError, match=r"^Pipeline compiles itself \(setup_compile\)")
    with ranks(f"{tmp_path}/meeting"), plugged_in("8GiB"), refused:
        Worker("Wan", 0, 1).load()


def test_too_little_memory_ends_the_first_call(tmp_path: Path) -> None:
    """Which is the server's own warm-up, before it takes a request."""
    with torch.no_grad(), ranks(f"{tmp_path}/meeting"), plugged_in("100kB", **OPTIONS):
        once = [getattr(owner, name) for owner, name in WRAPPED]
        plug_in()
        assert [getattr(owner, name) for owner, name in WRAPPED] == once, "it may be called again"
        worker = Worker("Wan", 0, 1)
        model = worker.load()
        with worker.request(), pytest.raises(BackendCompilerFailed, match=r"memory=97\.7 KiB is too little"):
            call(model, "Wan", 0)


def test_the_encoder_may_be_offloaded_by_the_server(tmp_path: Path) -> None:
    """Its backend runs beside ours, and ends with it."""
    given = {"diffusion_offload_config": {"mode": "module", "components": ["text_encoder"]}}
    with torch.no_grad(), ranks(f"{tmp_path}/meeting"), plugged_in(MEMORY["Wan"], **OPTIONS):
        worker = Worker("Wan", 0, 1, **given)
        twin, model = worker.twin().transformer, worker.load()
        assert placement_of(model) is not None
        with worker.request():
            assert torch.equal(call(model, "Wan", 0), call(twin, "Wan", 0))
        backend = worker.runner.offload_backend
        assert backend.is_enabled()
        backend.shutdown()
        backend.disable()
        assert placement_of(model) is None and not backend.is_enabled()


def serve_fused(rank: int) -> None:
    """Wan with the server's fused all-to-alls: its ops, and on a CPU what it does where they are not built."""
    with ranks("", rank, 2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(a2a_permute, "ensure_a2a_permute_available", lambda: None)  # compiles CUDA
        for op, dims in ((a2a_permute.ulysses_qkv_fwd, (2, 1)), (a2a_permute.ulysses_o_rev, (1, 2))):
            op.register_kernel("cpu")(
                lambda x, group, world, dims=dims: all_to_all_4D(x, *dims, group=_resolve_process_group(group))
            )
        with plugged_in(MEMORY["Wan"], **OPTIONS):
            worker = Worker("Wan", rank, 2, fused=True)
            requests(worker, (8,))
            found = [p.program for p in programs(worker.runner.pipeline.transformer)]
            assert max(sum(c.kind == "all-to-all" for c in program.problem.collectives) for program in found) == 4
            assert any("ulysses_qkv_fwd" in str(n.target) for program in found for n in program.module.graph.nodes)


def test_the_fused_exchanges_of_the_server_are_planned_as_collectives(on_ranks: Callable[..., None]) -> None:
    on_ranks(serve_fused, fresh=True)


def test_the_bytes_of_the_fused_exchanges() -> None:
    """Their kernels need CUDA; what the plan knows of them is what their fake kernels return."""
    with plugged_in("8GiB"):
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        forth = graph.call_function(torch.ops.vllm_omni_a2a.ulysses_qkv_fwd.default, (x, "sp", 2))
        back = graph.call_function(torch.ops.vllm_omni_a2a.ulysses_o_rev.default, (forth, "sp", 2))
        with FakeTensorMode():
            x.meta["val"] = torch.empty(1, 8, 4, 16, dtype=torch.bfloat16, device="cuda")
            for node in (forth, back):
                group = node.args[1:]
                node.meta["val"] = node.target(node.args[0].meta["val"], *group)
        assert tuple(back.meta["val"].shape) == (1, 8, 4, 16)
        for node in (forth, back):
            assert collective_kind(node) == "all-to-all" and group_name(node) == "sp" and completes_itself(node)
            assert crossing_bytes(node, 2) == 1 * 8 * 4 * 16 * 2 // 2
