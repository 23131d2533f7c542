"""The plug-in of vLLM-Omni, loaded by its own loader, on its own transformers, runner, offloading and LoRA."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HERE
from torch._dynamo.utils import counters

if find_spec("vllm_omni") is None:
    pytest.skip("vllm_omni is not installed: make test-vllm-omni makes an environment with it", allow_module_level=True)

import vllm_omni_server
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager
from vllm_omni_server import Worker, call, plugged_in, ranks

from chunkflow_compile import cycles, programs
from chunkflow_compile.model.placement import placement_of
from chunkflow_compile.passes.errors import ChunkflowError
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


def requests(worker: Worker, sizes: tuple[int, ...] = (8, 12, 8)) -> str:
    """Serve requests of these sizes, of steps whose inputs change; return what was counted.

    First that weights were copied, as many bytes as planned, within the budget; then that no output differs.
    """
    twin, model = worker.twin().transformer, worker.load()
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, size in enumerate(sizes):
        with worker.request():
            expected = [call(twin, worker.name, 10 * number + step, size) for step in range(4)]
        with worker.request():
            for step, wanted in enumerate(expected):
                pairs.append((call(model, worker.name, 10 * number + step, size), wanted))
                programs(model)[0].arena.cycles.wait_planned()
    route = cycles(model)[0]
    plan = route.cycle.plan
    assert 0 < plan.device_bytes <= parse_bytes(MEMORY[worker.name], "memory")
    assert route.measurements[-1].moved_bytes == plan.moved_bytes > 0
    worst = max(float((found - wanted).abs().max()) for found, wanted in pairs)
    assert worst == 0, "lowering='eager' has the numbers of eager mode"
    return f"{len(programs(model))} programs, {plan.moved_bytes} bytes a step, difference {worst}"


@pytest.mark.parametrize("name", vllm_omni_server.NAMES)
def test_transformers_of_the_server_stream(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    with torch.no_grad(), ranks(f"{tmp_path}/meeting"), plugged_in(MEMORY[name], **OPTIONS):
        record_property("counts", f"vLLM-Omni {name}: {requests(Worker(name, 0, 1))}")


def serve_on_a_rank(rank: int, name: str, folder: str) -> None:
    with ranks("", rank, 2), plugged_in(MEMORY[name], **OPTIONS):
        Path(folder, str(rank)).write_text(requests(Worker(name, rank, 2)))


@pytest.mark.parametrize("name", vllm_omni_server.ULYSSES)
def test_transformers_stream_on_two_ranks_of_ulysses(
    name: str, tmp_path: Path, on_ranks: Callable[..., None], record_property: Callable[[str, object], None]
) -> None:
    on_ranks(serve_on_a_rank, name, str(tmp_path))
    for rank in range(2):
        record_property("counts", f"vLLM-Omni {name}, Ulysses 2, rank {rank}: {(tmp_path / str(rank)).read_text()}")


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
    layers = {f"transformer.transformer_blocks.{n}.attn.{p}": (128, 128) for n in range(2) for p in ("to_out", "to_add_out")}
    path = save_lora(tmp_path, layers)
    name = "Qwen-Image"
    with torch.no_grad(), ranks(f"{tmp_path}/meeting"), plugged_in(MEMORY[name], **OPTIONS):
        worker = Worker(name, 0, 1)
        twin, model = worker.twin(), worker.load()
        with worker.request():
            plain = call(model, name, 0)
            managers = [
                DiffusionLoRAManager(pipe, torch.device("cpu"), torch.float32) for pipe in (twin, worker.runner.pipeline)
            ]
            request = LoRARequest(lora_name="style", lora_int_id=1, lora_path=path)
            for manager in managers:
                manager.set_active_adapter(request, 0.5)
            for step in range(4):
                found, wanted = call(model, name, step), call(twin.transformer, name, step)
                programs(model)[0].arena.cycles.wait_planned()
                assert torch.equal(found, wanted)
            assert not torch.equal(call(model, name, 0), plain)
            assert sum(m.measurements[-1].moved_bytes for m in programs(model)) > 0
            for manager in managers:
                manager.set_active_adapter(None)
            assert torch.equal(call(model, name, 0), plain)
