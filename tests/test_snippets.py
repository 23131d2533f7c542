"""The code in the pages: it parses, commands take the options that are shown, and what runs without a GPU is run."""

from __future__ import annotations

import ast
import copy
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from conftest import EAGER, HERE
from helpers import Stack
from small_pipelines import SMALL_PIPELINES, small_pipeline
from torch import nn

import chunkflow_compile
from chunkflow_compile.catalog.small import Size, small_model
from chunkflow_compile.cli.main import _parser

ROOT = HERE.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
MARK = "needs a GPU"
_BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Code that cannot run in a test: it needs a GPU, or the weights of a published model.
_NEEDS_A_GPU = re.compile(r"cuda|nccl|from_pretrained\(|\bpeers=|\bmake (?:card|test-gpu|bench-gpu)\b")
_COMMAND = re.compile(r"^(?:\S*/)?chunkflow (.*)$")


_SMALL = Size(layers=2, heads=2, head_dim=16, frames=1, height=4, width=4, text=4)


class Snippet(NamedTuple):
    """A block of code on a page, from a line on."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(language: str, pages: list[Path] = PAGES) -> Iterator[Snippet]:
    for path in pages:
        page = path.read_text()
        for block in _BLOCK.finditer(page):
            if block[1] == language:
                yield Snippet(str(path.relative_to(ROOT)), page.count("\n", 0, block.start()) + 2, language, block[2])


USED_FIRST = [ROOT / "README.md", ROOT / "docs" / "guide.md"]
SHOWN = [*snippets("python", USED_FIRST), *snippets("sh", USED_FIRST)]
RUN = [
    snippet
    for snippet in SHOWN
    if snippet.language == "python" and MARK not in snippet.text and not _NEEDS_A_GPU.search(snippet.text)
]


@pytest.mark.parametrize("snippet", snippets("python"), ids=lambda snippet: snippet.place)
def test_python_parses(snippet: Snippet) -> None:
    assert ast.parse(snippet.text)


@pytest.mark.parametrize("snippet", snippets("sh"), ids=lambda snippet: snippet.place)
def test_a_command_takes_the_options_that_are_shown(snippet: Snippet) -> None:
    for line in snippet.text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|[|>]", line):
            if command := _COMMAND.match(part.strip()):
                _, unknown = _parser().parse_known_args(shlex.split(command[1], comments=True))
                assert not unknown, line


@pytest.mark.parametrize("snippet", SHOWN, ids=lambda snippet: snippet.place)
def test_what_needs_a_gpu_is_marked(snippet: Snippet) -> None:
    """Python by the block, commands by the line: in a comment."""
    parts = [snippet.text] if snippet.language == "python" else snippet.text.splitlines()
    assert [part for part in parts if _NEEDS_A_GPU.search(part) and MARK not in part] == []


def _called(_: Path) -> nn.Module:
    """A model whose parts run as a cycle."""
    model = Stack().eval()
    chunkflow_compile.compile(model, device="cpu", **{**EAGER, "min_bytes": 0})
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(4, 8))
    return model


def _saved(_: Path) -> nn.Module:
    """A model of diffusers, which can save itself."""
    return chunkflow_compile.offload(small_model("wan", _SMALL), min_bytes=2048)


def _fresh(_: Path) -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)).bfloat16()


def _applied(_: Path) -> Any:
    return chunkflow_compile.apply(small_pipeline("wan"), memory="2MiB", min_bytes=2048, lowering="eager")


def _exchange() -> None:
    @torch.library.custom_op("mylib::ulysses_exchange", mutates_args=())
    def exchange(x: torch.Tensor, group_name: str) -> torch.Tensor:
        return x.clone()


# What snippets use without defining it.
NAMES: dict[str, Callable[[Path], Any]] = {
    "model": _called,
    "transformer": _called,
    "pipe": _applied,
    "other": lambda folder: small_model("wan", _SMALL, seed=1).state_dict(),
    "folder": lambda folder: folder / "saved",
    "reject": lambda folder: print,
    "device": lambda folder: "cpu",
    **{
        name: lambda folder, value=value: value
        for name, value in {"chunkflow_compile": chunkflow_compile, "torch": torch, "copy": copy, "nn": nn}.items()
    },
    "Path": lambda folder: Path,
    "dist": lambda folder: dist,
}


def marked(snippet: Snippet) -> Any:
    """A test of it; one that traces a model in another process takes long."""
    return pytest.param(snippet, id=snippet.place, marks=pytest.mark.long if "admit(" in snippet.text else ())


@pytest.mark.parametrize("snippet", map(marked, RUN))
def test_what_needs_no_gpu_runs(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is shown, but a pipeline gets the sizes of a small one."""
    monkeypatch.chdir(tmp_path)
    sizes = SMALL_PIPELINES["wan"].call
    text = re.sub(r"\b(height|width|num_frames)=\d+", lambda size: f"{size[1]}={sizes[size[1]]}", snippet.text)
    tree = ast.parse(text)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names = {name: make(tmp_path) for name, make in NAMES.items() if name in used}
    if re.search(r"(?:offload|compile)\(\s*model\b", snippet.text):
        names["model"] = _fresh(tmp_path)
        names["layer"] = names["model"][0]
    if "save_pretrained" in snippet.text:
        names["model"] = _saved(tmp_path)
    if "mylib" in snippet.text:
        _exchange()
    if "save_cache_artifacts" in snippet.text:
        assert torch.compile(torch.sin)(torch.ones(4)).shape == (4,)
    exec(compile(tree, snippet.place, "exec"), names)
