"""The mistakes that people are most likely to make: each is an error that says what was meant, before any weight moves."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from helpers import Stack, stack
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, apply, compile, explain, offload, remove, restore
from chunkflow_compile.cli import pipeline, planning_arguments
from chunkflow_compile.cli.main import main
from chunkflow_compile.options import ALIASES, BackendOptions, Options, PipelineOptions
from chunkflow_compile.servers.settings import settings_from
from chunkflow_compile.units import Size, parse_bytes

EAGER: dict[str, Any] = {"min_bytes": 4096, "lowering": "eager"}
FLUX = "black-forest-labs/FLUX.1-dev"


@cache
def pipe() -> Any:
    """A pipeline that no test changes: each raises before."""
    pytest.importorskip("transformers")
    from small_pipelines import small_pipeline

    return small_pipeline("wan")


def called(model: nn.Module, **options: Any) -> Any:
    """Through torch.compile, which hands the options to the backend in the first call."""
    return torch.compile(model, backend="chunkflow", options={**EAGER, **options})(torch.randn(4, 8))


# Every size of the Python API: how it is given, and its name.
SIZES: list[tuple[Callable[..., Any], str]] = [
    *((lambda m, **size: compile(m, **EAGER, **size), name) for name in ("memory", "host_memory", "pin_memory")),
    *((lambda _, **size: compile(pipe(), **EAGER, **size), name) for name in ("memory", "host_memory", "pin_memory")),
    *((called, name) for name in ("memory", "pin_memory")),
    (lambda m, **size: offload(m, min_bytes=4096, **size), "host_memory"),
]
NO_UNIT = [
    (12, "memory=12 is 12 bytes; did you mean '12GiB'?"),
    ("12", "memory='12' is 12 bytes; did you mean '12GiB'?"),
    (" 12.5 ", "memory=' 12.5 ' is 12.5 bytes; did you mean '12.5GiB'?"),
    (12.5, "memory=12.5 is 12.5 bytes; did you mean '12.5GiB'?"),
    ("12288", "memory='12288' is 12288 bytes; did you mean '12288MiB'?"),
    (0.9, "memory=0.9 is less than a byte: give a size such as '12GiB', not a share of the memory."),
    ("1.5B", "memory='1.5B' is a fraction of a byte: give whole bytes, or a text such as '8GiB'."),
    (1e9 + 0.5, "memory=1000000000.5 is a fraction of a byte: give whole bytes, or a text such as '8GiB'."),
    (-1, "memory=-1 is not a size: give bytes, or a text such as '8GiB' or '500MB'."),
    (float("nan"), "memory=nan is not a size: give bytes, or a text such as '8GiB' or '500MB'."),
    (float("inf"), "memory=inf is not a size: give bytes, or a text such as '8GiB' or '500MB'."),
    ("80%", "memory='80%' is not a size: give bytes, or a text such as '8GiB' or '500MB'."),
    ("auto", "memory='auto' is not a size: give bytes, or a text such as '8GiB' or '500MB'."),
    (True, "memory=True is not a size: give bytes, or a text such as '8GiB' or '500MB'."),
    (["8GiB"], "memory=['8GiB'] is not a size: give one for all parts together, such as '8GiB'."),
    ({"vae": 1}, "memory={'vae': 1} is not a size: give one for all parts together, such as '8GiB'."),
    ("cuda", "memory='cuda' is not a size, but a device: pass device='cuda', and memory as a text such as '8GiB'."),
]
BY_NAME = "takes all arguments but the first by name; did you mean"
MISTAKES: list[tuple[Callable[[Any], Any], str]] = [
    *(
        (
            lambda m, give=give, name=name, value=value: give(m, **{name: value}),
            re.sub(r"^memory=|and memory as", lambda found, name=name: found[0].replace("memory", name), said),
        )
        for value, said in NO_UNIT
        for give, name in SIZES
    ),
    (lambda _: settings_from({"CHUNKFLOW_MEMORY": "12"}), "CHUNKFLOW_MEMORY='12' is 12 bytes; did you mean '12GiB'?"),
    (lambda m: offload(m, min_bytes=0.5), "min_bytes=0.5 is a fraction of a byte: give whole bytes, or a text such as"),
    (lambda m: compile(m, chunk_bytes="1KB"), "Option chunk_bytes=1000 must be a multiple of 256, the alignment of"),
    (lambda m: apply(pipe(), "12GiB"), f"apply {BY_NAME} memory='12GiB'?"),
    (lambda m: compile(pipe(), "12GiB"), f"compile {BY_NAME} memory='12GiB'?"),
    (lambda m: compile(pipe(), torch.bfloat16), f"compile {BY_NAME} dtype=torch.bfloat16?"),
    (lambda m: apply(pipe(), "cuda"), f"apply {BY_NAME} device='cuda'?"),
    (lambda m: apply(pipe(), torch.bfloat16), f"apply {BY_NAME} dtype=torch.bfloat16?"),
    (lambda m: apply(pipe(), {"memory": "8GiB"}), f"apply {BY_NAME} memory='8GiB'?"),
    (lambda m: compile(m, "12GiB"), f"compile {BY_NAME} memory='12GiB'?"),
    (lambda m: compile(m, "cuda:0"), f"compile {BY_NAME} device='cuda:0'?"),
    (
        lambda m: offload(m, "12GiB"),
        "device='12GiB' is a size, not a device: a budget is memory='12GiB'; as device give",
    ),
    (lambda m: compile(m, device="12GiB"), "device='12GiB' is a size, not a device: a budget is memory='12GiB'; as "),
    (
        lambda m: apply(pipe(), device="8G"),
        "device='8G' is a size, not a device: a budget is memory='8G'; as device give",
    ),
    *(
        (lambda m, f=f, load=load: f(load()), said)
        for f in (compile, apply, restore, remove)
        for load, said in (
            (
                lambda: FLUX,
                f"'{FLUX}' is a name, not a model or a pipeline: load it first, such as with DiffusionPipeline.",
            ),
            (lambda: Path("/m"), "such as with DiffusionPipeline.from_pretrained('/m')."),
            (
                lambda: Stack,
                "Stack is a class, not a model or a pipeline: pass an instance, as Stack.from_pretrained(...) ",
            ),
            (lambda: type(pipe()), "pass an instance, as WanPipeline.from_pretrained(...) returns."),
            (
                lambda: pipe().components,
                "This dict is neither a model nor a diffusers pipeline: pass the pipeline itself, ",
            ),
            (
                lambda: stack().forward,
                "This method is neither a model nor a diffusers pipeline: pass a torch.nn.Module or ",
            ),
            (
                lambda: None,
                "This NoneType is neither a model nor a diffusers pipeline: pass a torch.nn.Module or a pipe",
            ),
        )
    ),
    *(
        (
            lambda m, f=f: f(pipe()),
            "This WanPipeline is a pipeline, not a model: pass one component, such as pipe.transfor",
        )
        for f in (offload, chunkflow_compile.programs)
    ),
    (
        lambda m: offload(FLUX),
        f"'{FLUX}' is a name, not a model: load it first, such as with FluxTransformer2DModel.from_",
    ),
    (
        lambda m: offload(Stack),
        "Stack is a class, not a model: pass an instance, as Stack.from_pretrained(...) returns.",
    ),
    (lambda m: offload(m.forward), "This method is not a model: pass a torch.nn.Module."),
    (
        lambda m: apply(m),
        "apply takes a diffusers pipeline, not Stack: for a model, call chunkflow_compile.compile(model).",
    ),
    (
        lambda m: remove(m),
        "remove takes a diffusers pipeline, not Stack: for a model, call chunkflow_compile.restore(model)",
    ),
    *(
        (
            lambda m, given=given: explain(given()),
            f"This {name} is neither a model nor a compiled pipeline: call chunkflow_compile.compile(",
        )
        for given, name in ((lambda: FLUX, "str"), (pipe, "WanPipeline"))
    ),
    # what one of the two does not take
    (
        lambda m: compile(m, adapters=64),
        "adapters applies to pipelines; this is a model: call chunkflow_compile.enable_adap",
    ),
    (
        lambda m: compile(m, dtype={"default": torch.bfloat16}),
        "dtype by component applies to pipelines; this is a model: give the Stack one dtype, such as torch.bfloat16.",
    ),
    *(
        (
            lambda m, f=f, name=name, value=value: f(pipe(), **{name: value}),
            f"{name} applies to models; this is a pipeline, whose budget plans each component: leave out {name}, and set ",
        )
        for f in (compile, apply)
        for name, value in (
            ("arena", None),
            ("plan", "p.json"),
            ("policy", "chunkflow"),
            ("slowdown", 1.1),
            ("weight_memory", "1GiB"),
        )
    ),
    (
        lambda m: restore(pipe(), "cpu"),
        "device applies to models; this is a pipeline: call restore(pipe), which returns its",
    ),
    (lambda m: restore(pipe(), device="cuda"), "were, then pipe.to(device)."),
    *(
        (
            lambda m, f=f: f(pipe(), fullgraph=True),
            "fullgraph is an argument of torch.compile: pass options of ChunkFlow by ",
        )
        for f in (compile, apply)
    ),
    *((lambda m, f=f: f(m, memry=3), "Unknown option 'memry'; did you mean 'memory'? ") for f in (compile, called)),
    (lambda m: compile(pipe(), memry=3), "Unknown option 'memry'; did you mean 'memory'? Options are device, memory, "),
    (lambda m: called(m, device="cuda"), "Unknown option 'device'; did you mean "),
    (
        torch.enable_grad()(called),
        "ChunkFlow runs inference only, and gradients are enabled: call the model under torch.no",
    ),
    (lambda m: called(m, memory="8KiB"), "memory=8.0 KiB is too little: the program needs "),
]


@pytest.mark.parametrize(("call", "sentence"), MISTAKES, ids=[f"{i}-{s[:40]}" for i, (_, s) in enumerate(MISTAKES)])
def test_a_likely_mistake_says_what_was_meant(call: Callable[[Any], Any], sentence: str, no_grad: None) -> None:
    """The error has no other text, whoever raises it, and what it was about is as it was."""
    model, twin, x = stack(), stack(), torch.randn(4, 8)
    parts = {id(p): type(p) for m in (model, *modules(pipe())) for p in m.parameters()}
    with pytest.raises(ChunkflowError, match=re.escape(sentence)) as raised:
        call(model)
    assert "\n" not in str(raised.value)
    assert parts == {id(p): type(p) for m in (model, *modules(pipe())) for p in m.parameters()}
    assert all(not m._compiled_call_impl for root in (model, *modules(pipe())) for m in root.modules())
    assert torch.equal(model(x), twin(x)) and not chunkflow_compile.programs(model)


def modules(pipe: Any) -> Iterator[nn.Module]:
    return (m for m in pipe.components.values() if isinstance(m, nn.Module))


def test_a_mistake_in_replan(no_grad: None) -> None:
    model = compile(stack(), **EAGER)
    model(torch.randn(4, 8))
    before = [p.plan for p in chunkflow_compile.programs(model)]
    with pytest.raises(ChunkflowError, match=r"^memory=12 is 12 bytes; did you mean '12GiB'\?$"):
        chunkflow_compile.replan(model, memory=12)
    assert before and before == [p.plan for p in chunkflow_compile.programs(model)]


def test_a_compiled_pipeline_keeps_its_components(applied: Callable[..., tuple[Any, Any]]) -> None:
    pipe, _ = applied("wan")
    said = r"This model is pipe\.transformer of a compiled pipeline, .*: call chunkflow_compile\.restore\(pipe\) first"
    for wrong in (compile, offload, restore):
        with pytest.raises(ChunkflowError, match=said):
            wrong(pipe.transformer)


def test_dynamo_adds_nothing_to_an_error_of_the_backend(no_grad: None) -> None:
    """The last line is the sentence, and of the frames of torch there is the call of the wrapper only."""
    with pytest.raises(ChunkflowError) as raised:
        called(stack(), memry=3)
    shown = "".join(traceback.format_exception(raised.value)).rstrip()
    assert shown.splitlines()[-1].endswith(str(raised.value)) and "reporting a bug" not in shown
    assert "raised:" not in shown and "convert_frame" not in shown


@pytest.mark.skipif("name" not in inspect.signature(torch.compile).parameters, reason="a later release has it")
def test_a_name_that_torch_hands_to_the_backend(no_grad: None) -> None:
    model, twin, x = stack(), stack(), torch.randn(4, 8)
    run = torch.compile(model, backend="chunkflow", options=dict(EAGER), name="stack")
    assert torch.equal(run(x), twin(x)) and chunkflow_compile.programs(model)


ACCEPTED: dict[Size, int] = {
    12.5e9: 12_500_000_000,
    "12.5e9": 12_500_000_000,
    "12G": 12 * 10**9,
    "12g": 12 * 10**9,
    "12Gi": 12 << 30,
    "12 GiB": 12 << 30,
    "12GB ": 12 * 10**9,
    "12gib": 12 << 30,
    "1.3MiB": 1_363_148,
    "12B": 12,
    "0": 0,
    0: 0,
    40_000: 40_000,
}


def test_sizes_as_people_write_them(no_grad: None) -> None:
    assert {given: parse_bytes(given, "memory") for given in ACCEPTED} == ACCEPTED
    assert parse_bytes(64, "chunk_bytes") == parse_bytes("64", "chunk_bytes") == 64, "whose name says that it is bytes"
    model, twin, x = stack(), stack(), torch.randn(4, 8)
    compile(
        model, min_bytes="4KiB", chunk_bytes="4KiB", group_bytes=8e3, memory="40 KiB", lowering="eager", hardware="cpu"
    )
    assert torch.equal(model(x), twin(x))
    (program,) = chunkflow_compile.programs(model)[-1:]
    assert program.plan.streamed and program.plan.chunk_bytes == 4096


def test_on_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that takes a size, before it traces anything."""

    def traced(*_: Any) -> None:
        raise AssertionError("it is traced")

    monkeypatch.setattr(planning_arguments, "_trace", traced)
    monkeypatch.setattr(pipeline, "_components", traced)
    model = {"plan": [], "simulate": [], "dump": [], "why": ["x"], "timeline": ["--out", "x.json"], "pipeline": []}
    for command, more in model.items():
        host = ("--host-memory",) if command in ("plan", "why", "timeline") else ()
        for option in ("--memory", *(() if command == "pipeline" else ("--weight-memory",)), *host):
            for given, said in (
                ("14", "14 bytes; did you mean '14GiB'?"),
                ("16000", "16000 bytes; did you mean '16000MiB'?"),
            ):
                assert main([command, "flux.1-dev", *more, option, given]) == 2
                assert capsys.readouterr().err == f"chunkflow: {option} {given!r} is {said}\n", command


CODE = """\
from pathlib import Path

import torch
from torch import nn

import chunkflow_compile
from chunkflow_compile import apply, compile, remove, restore


class Pipe:
    @property
    def components(self) -> dict[str, object]:
        return {}


m, pipe = nn.Linear(), Pipe()
compile(m, memory="8GiB", min_bytes="1MiB", lowering="eager", mode="max-autotune", dynamic=False, slowdown=1.1)
compile(model=m, device="cuda", dtype=torch.bfloat16)
compile(pipe, memory=12.5e9, device="cuda", cudagraphs="auto", adapters=64, dtype={"vae": torch.float32})
apply(pipe, memory=12.5e9, device="cuda", cudagraphs="auto")
one: nn.Linear = restore(compile(m), "cpu")
all: Pipe = remove(restore(apply(compile(pipe))))
reveal_type(compile(m))
reveal_type(compile(pipe))
reveal_type(restore(m))
reveal_type(restore(pipe))
compile(m, memry=3)
compile(m, memory=[1])
compile(m, lowering="fast")
compile(m, "12GiB")
compile(m, adapters=64)
compile(m, dtype={"vae": torch.float32})
compile(pipe, "12GiB")
compile(pipe, memry=3)
compile(pipe, arena=None)
compile(pipe, slowdown=1.1)
compile(Path("/m"))
compile("m")
restore(pipe, "cpu")
restore(None)
apply(pipe, "12GiB")
apply(pipe, memry=3)
apply(pipe, arena=None)
apply(m)
"""
FIRST_ERROR, FIRST_OF_APPLY = 27, 41
REVEALED = {23: "Linear", 24: "Pipe", 25: "Linear", 26: "Pipe"}
OF_APPLY = [
    'Argument 2 to "apply" has incompatible type "str"; expected "Never"',
    'Unexpected keyword argument "memry" for "apply"; did you mean "memory"?',
    'Unexpected keyword argument "arena" for "apply"',
    'Value of type variable "PipelineT" of "apply" cannot be "Linear"',
]
# As much of torch as the signatures name: to follow the whole takes minutes.
TORCH = "class dtype: ...\nclass device: ...\nbfloat16: dtype\nfloat32: dtype\n"


def test_type_checkers_know_the_options(tmp_path: Path) -> None:
    """And which belong to a model, and which to a pipeline.  mypy follows only the modules with the public signatures."""
    pytest.importorskip("mypy")
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.pyi").write_text(TORCH)
    (tmp_path / "torch" / "nn.pyi").write_text("class Module: ...\nclass Linear(Module): ...\n")
    followed = ("", ".pipeline.api", ".pipeline.apply", ".options", ".units", ".passes.names", ".lowering.lower")
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = skip\nignore_missing_imports = True\n"
        + "".join(f"[mypy-chunkflow_compile{name}]\nfollow_imports = silent\n" for name in followed)
        + "".join(f"[mypy-{name}]\nfollow_imports = silent\n" for name in ("typing_extensions", "torch", "torch.nn"))
    )
    root = Path(chunkflow_compile.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", ".cache", "own.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": f"{tmp_path}:{root}"},
        capture_output=True,
        text=True,
    )
    revealed = re.findall(r'^own\.py:(\d+): note: Revealed type is "(?:[\w.]+\.)?(\w+)"', done.stdout, re.M)
    assert {int(line): kind for line, kind in revealed} == REVEALED, done.stdout + done.stderr
    said = {int(line): text for line, text in re.findall(r"^own\.py:(\d+): error: (.*?)(?:  \[|$)", done.stdout, re.M)}
    assert [*said] == [*range(FIRST_ERROR, len(CODE.splitlines()) + 1)], done.stdout + done.stderr
    for line, text in said.items():
        of_apply = line >= FIRST_OF_APPLY
        assert (OF_APPLY[line - FIRST_OF_APPLY] if of_apply else "No overload variant of ") in text, (line, text)
    assert (
        done.stdout.count(
            'Unexpected keyword argument "memry" for overloaded function "compile"; did you mean "memory"'
        )
        == 2
    )


def test_the_types_of_options_are_those_of_the_backend() -> None:
    """Sizes in bytes may be text, which is read before an Options is made."""
    fields = {ALIASES.get(name, name): kind for name, kind in get_type_hints(Options).items()}
    given = get_type_hints(BackendOptions)
    texts = {"min_bytes": Size, "chunk_bytes": Size, "group_bytes": Size | None}
    assert given == {**fields, **texts}
    decided = {
        "memory",
        "weight_memory",
        "arena",
        "slowdown",
        "plan",
        "policy",
    }  # for each component; memory is an argument
    assert get_type_hints(PipelineOptions).keys() == given.keys() - decided
