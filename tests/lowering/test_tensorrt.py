"""Regions as TensorRT engines, on a stand-in of torch-tensorrt's interface.  No engine is built here."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import json
import logging
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HERE, OPTIONS
from helpers import Stack, twins
from small_pipelines import SMALL_PIPELINES
from torch import nn

from chunkflow_compile import ChunkflowError, apply, explain, offload, programs, remove
from chunkflow_compile.lowering.tensorrt import SETTINGS, why_not_tensorrt

# Release -> names of the arguments of torch_tensorrt.dynamo.compile, read from its wheel.
PUBLISHED: Mapping[str, list[str]] = json.loads((HERE / "lowering" / "torch_tensorrt_compile.json").read_text())
GIVEN = {"exported_program", "arg_inputs", "device", *SETTINGS}


def test_the_arguments_exist() -> None:
    """In the published releases, and in the one that may be installed."""
    assert PUBLISHED and all({*names} >= GIVEN for names in PUBLISHED.values())
    assert SETTINGS["attn_bias_is_causal"] is False, "by default every mask is taken for a causal one"
    spec = importlib.util.find_spec("torch_tensorrt")
    if spec is None or spec.origin is None:
        return
    body = ast.parse((Path(spec.origin).parent / "dynamo" / "_compiler.py").read_text()).body
    found = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == "compile")
    assert {a.arg for a in (*found.args.args, *found.args.kwonlyargs)} >= GIVEN


class Input:
    def __init__(self, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


class Engine(nn.Module):
    """Stands for a built engine."""

    def __init__(self, engines: Engines, module: torch.fx.GraphModule) -> None:
        super().__init__()
        self.engines, self.graph = engines, [module]

    def forward(self, *args: torch.Tensor) -> Any:
        self.engines.runs += 1
        assert all(a.is_contiguous() for a in args)
        return [o.clone(memory_format=torch.contiguous_format) for o in self.graph[0](*args)]


Engine.__module__ = "torch_tensorrt.dynamo.runtime"


class Around(nn.Module):
    """Stands for the graph module around a built engine."""

    def __init__(self, engine: nn.Module) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *args: torch.Tensor) -> Any:
        return self.engine(*args)


class Engines:
    """What torch_tensorrt.dynamo.compile is asked for.  ``unsupported``: a word in the names of ops without a converter."""

    def __init__(self, unsupported: str) -> None:
        self.unsupported = unsupported
        self.built: list[torch.fx.GraphModule] = []
        self.runs = 0

    def compile(
        self, exported_program: Any, inputs: Any = None, *, arg_inputs: Any = None, device: Any = None, **settings: Any
    ) -> Callable[..., Any]:
        assert inputs is None and settings == SETTINGS and isinstance(device, torch.device)
        module = exported_program.module()
        given = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
        assert [(tuple(v.shape), v.dtype) for v in given] == [(i.shape, i.dtype) for i in arg_inputs]
        assert not exported_program.state_dict, "the weights are inputs"
        ops = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
        missing = [op for op in ops if self.unsupported in op]
        if len(missing) == len(ops):  # before it looks at require_full_compilation
            return module
        if missing:
            raise AssertionError(f"Not all operations are supported: {missing[0]}\nmore lines")
        self.built.append(module)
        return Around(Engine(self, module))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Engines]:
    def install(unsupported: str) -> Engines:
        made = Engines(unsupported)
        package = types.ModuleType("torch_tensorrt")
        package.__spec__ = importlib.machinery.ModuleSpec("torch_tensorrt", None)
        package.Input, package.dynamo = Input, types.SimpleNamespace(compile=made.compile)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch_tensorrt", package)
        for user in ("frontend.backend", "pipeline.apply"):  # there is no GPU
            monkeypatch.setattr(f"chunkflow_compile.{user}.check_tensorrt", lambda device: None)
        return made

    return install


class Normed(Stack):
    """With a norm, which is in the region of the head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(nn.functional.layer_norm(x, x.shape[-1:]))


def notes_of_a_run(found: Engines, caplog: pytest.LogCaptureFixture) -> tuple[str, ...]:
    """Of the regions that are no engine."""
    model, twin = twins(Normed)
    offload(model, "cpu", min_bytes=OPTIONS["min_bytes"])
    model.compile(backend="chunkflow", fullgraph=True, options={**OPTIONS, "lowering": "tensorrt"})
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 8)
            assert torch.allclose(model(x), twin(x), rtol=0, atol=1e-5)
    (program,) = programs(model)
    refused = [r.message for r in caplog.records if "goes to Inductor" in r.message]
    assert len(found.built) + len(refused) == len(program.program.regions) and program.plan.moved_bytes > 0
    notes = tuple(note for note in explain(model).notes if not note.startswith("activations: "))
    assert notes == tuple(refused)
    assert "goes to Inductor: TensorRT says" in " ".join(str(explain(model, details=True)).split())
    return notes


def test_what_is_not_supported_goes_to_inductor(
    engines: Callable[[str], Engines], caplog: pytest.LogCaptureFixture
) -> None:
    found = engines("layer_norm")
    (note,) = notes_of_a_run(found, caplog)
    assert "TensorRT says AssertionError: Not all operations are supported: aten" in note
    assert found.built and found.runs >= 3


@pytest.mark.long
def test_a_region_without_any_supported_op(engines: Callable[[str], Engines], caplog: pytest.LogCaptureFixture) -> None:
    """torch-tensorrt returns its graph as it was: that is no engine."""
    found = engines("")  # which is in the name of every op
    notes = notes_of_a_run(found, caplog)
    assert not found.built
    assert all("goes to Inductor: TensorRT says NotImplementedError: none of its ops is supported" in n for n in notes)


@pytest.mark.long
def test_the_notes_of_a_pipeline(engines: Callable[[str], Engines], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("CHUNKFLOW_PROGRESS", "0")
    engines("")
    small = SMALL_PIPELINES["wan"]
    pipe, twin = small.build(), small.build()
    apply(pipe, device="cpu", memory="1MiB", min_bytes=2048, lowering="tensorrt")
    assert torch.allclose(small.generate(pipe), small.generate(twin), rtol=0, atol=1e-4)
    assert "transformer: " in (said := " ".join(str(explain(pipe, details=True)).split()))
    assert "goes to Inductor: TensorRT says NotImplementedError: none of its ops is supported" in said
    remove(pipe)


def test_it_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    before = model.state_dict()
    model.compile(backend="chunkflow", fullgraph=True, options={**OPTIONS, "lowering": "tensorrt"})
    with torch.no_grad(), pytest.raises(Exception, match="lowering='tensorrt' cannot be used on cpu") as raised:
        model(torch.randn(4, 8))
    assert isinstance(raised.value.__cause__ or raised.value, ChunkflowError) or "ChunkflowError" in str(raised.value)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    if importlib.util.find_spec("torch_tensorrt") is None:
        assert "is not installed: pip install" in (why_not_tensorrt() or "")
    package = types.ModuleType("torch_tensorrt")
    package.__spec__ = importlib.machinery.ModuleSpec("torch_tensorrt", None)
    monkeypatch.setitem(sys.modules, "torch_tensorrt", package)
    assert why_not_tensorrt(torch.device("cpu")) == "TensorRT needs a GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "cannot be imported" in (why_not_tensorrt() or "")
