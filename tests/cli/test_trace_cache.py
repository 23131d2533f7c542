"""The planning commands trace a preset once: later ones read what was traced from this user's cache folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import MODEL, SIZES
from helpers import run_python

from chunkflow_compile.catalog import presets, trace_cache
from chunkflow_compile.catalog.presets import PRESETS, OutputSizes, Preset
from chunkflow_compile.catalog.sizes import Size
from chunkflow_compile.catalog.small import SMALL_MODELS
from chunkflow_compile.catalog.trace_cache import CacheEntry
from chunkflow_compile.cli.main import main
from chunkflow_compile.passes.graph.traced import Traced

SMALL = Preset(
    name="small",
    family="wan",
    config={**SMALL_MODELS["wan"](Size(layers=2, head_dim=64)), "in_channels": 16, "out_channels": 16, "text_dim": 64},
    sizes=OutputSizes(height=64, width=64, frames=5, text=8),
    forwards=2,
    spatial=8,
    temporal=4,
)
GOAL = ("--hardware", "rtx-4090-pcie", "--min-bytes", "64KiB", "--chunk-bytes", "256KiB", "--weight-memory", "3MiB")
TRACED = dict[Any, Traced]()
trace_of = Preset.trace


class Traces:
    """Counts how often a preset was traced, and lists the files of the cache."""

    def __init__(self, folder: Path) -> None:
        self.count = 0
        self.folder = folder / "chunkflow" / "traces"

    def trace(self, model: Preset, *call: Any) -> Traced:
        self.count += 1
        # of all models of this name alike: their traces are counted, and nothing looks into more than one
        if (model.name, call) not in TRACED:
            TRACED[model.name, call] = trace_of(model, *call)
        return TRACED[model.name, call]

    def files(self, kind: str = "") -> list[Path]:
        return sorted(self.folder.glob(f"{kind}*.json"))


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Traces:
    found = Traces(tmp_path / "cache")
    monkeypatch.setenv("CHUNKFLOW_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(presets, "PRESETS", {**PRESETS, "small": SMALL})
    monkeypatch.setattr(Preset, "trace", lambda model, *call: found.trace(model, *call))
    return found


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., bytes]:
    """Plans the small preset; gives the plan's bytes."""

    def run(*arguments: str, command: str = "plan", goal: tuple[str, ...] = GOAL) -> bytes:
        out = tmp_path / "out.json"
        assert main([command, "small", *arguments, *goal, "--json", str(out)]) == 0
        return out.read_bytes()

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--regional",),
        pytest.param(("--pack",), marks=pytest.mark.long),
        pytest.param(("--pack", "auto"), marks=pytest.mark.long),
        pytest.param(("--ulysses", "2"), marks=pytest.mark.long),
        pytest.param(("--lowering", "eager"), marks=pytest.mark.long),
    ],
)
def test_a_plan_is_the_same_with_and_without_the_cache(
    arguments: tuple[str, ...], traces: Traces, plan: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte: traced, then of the same question, then of another budget, for which the graph is cut again."""
    more = (*GOAL[:-1], "4MiB")
    with monkeypatch.context() as patch:
        patch.setenv("CHUNKFLOW_CACHE", "0")
        expected = plan(*arguments), plan(*arguments, goal=more)
    assert traces.count == 2 and not traces.files() and expected[0] != expected[1]
    assert plan(*arguments) == expected[0] and traces.count == 3
    assert len(traces.files("trace")) == len(traces.files("problem")) == 1
    assert plan(*arguments) == expected[0] == plan(*arguments)
    assert plan(*arguments, goal=more) == expected[1] and traces.count == 3, "the graph is read"
    assert (len(traces.files("trace")), len(traces.files("problem"))) == (1, 2)


def test_every_command_asks_the_cache(traces: Traces, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> str:
        assert main([*arguments, *GOAL]) == 0
        return capsys.readouterr().out

    simulate = ("simulate", "small", "--policy", "chunkflow")
    commands = [("plan", "small", "--weights"), ("why", "small", "blocks.1.ffn.net.2.weight"), simulate]
    commands += [("dump", "small", "--stage", "regions"), ("plan", "small", "--host-memory", "3MiB")]
    first = [shown(*command) for command in commands]
    assert traces.count == 1, "they are all of one graph"
    assert [shown(*command) for command in commands] == first and traces.count == 1


@pytest.mark.long
def test_what_changes_the_graph_is_traced_anew(traces: Traces, plan: Callable[..., bytes]) -> None:
    for number, arguments in enumerate(((), ("--quantize", "int8"), ("--cfg-parallel", "2"))):
        plan(*arguments)
        assert traces.count == number + 1, arguments
    assert main(["plan", MODEL, *SIZES]) == 0
    assert len(traces.files("trace")) == traces.count, "a user's own model is not kept"


@pytest.mark.parametrize("kind", ["trace", "problem"])
def test_a_file_that_is_no_entry_is_written_again(kind: str, traces: Traces, plan: Callable[..., bytes]) -> None:
    expected = plan()
    (file,) = traces.files(kind)
    good = file.read_text()
    key = good.partition("\n")[0]
    other = good.replace("blocks.1", "blocks.2")
    for text in (other, f"{key}\n{trace_cache._digest('[]')}\n[]", f"{key}\n{trace_cache._digest('7')}\n7"):
        count = traces.count
        file.write_text(text)
        if kind == "trace":  # which is read where the problem is not there
            traces.files("problem")[0].unlink()
        assert plan() == expected, text[:20]
        assert file.read_text() == good and traces.count == count + (kind == "trace")
    file.write_bytes(b"\xff\xfe")
    traces.files("problem")[0].unlink()
    assert plan() == expected and file.read_text() == good
    assert other != good
    assert not [f for f in traces.folder.iterdir() if f not in traces.files()], "no file is left over"


def text_entry(number: int) -> CacheEntry[str]:
    return CacheEntry(kind="text", key={"number": number}, write=str, read=str)


def test_a_file_with_other_contents_is_not_found(traces: Traces) -> None:
    text_entry(0).keep("blocks.1")
    (file,) = traces.files("text")
    good = file.read_bytes()
    _, digest, body = good.split(b"\n", 2)
    other = good.replace(b"blocks.1", b"blocks.2")
    assert other != good
    for contents in (b"", b"{}", good[:-3], other, b"\0\xc3\xbf", b"\xff\xfe", b"{}\n%s\n%s" % (digest, body)):
        file.write_bytes(contents)
        assert text_entry(0).find() is None, contents
    file.write_bytes(good)
    assert text_entry(0).find() == "blocks.1"


def test_an_entry_of_other_versions_is_not_read(
    traces: Traces, plan: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = plan()
    for name in ("_source_digest", "_version"):
        monkeypatch.setattr(trace_cache, name, lambda *_: "another")
        assert plan() == expected
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "native")
    assert plan() == expected
    monkeypatch.setattr(presets, "PRESETS", {"small": replace(SMALL, config={**SMALL.config, "eps": 1e-5})})
    plan()
    assert traces.count == len(traces.files("trace")) == 5


def test_a_folder_that_cannot_be_written_keeps_nothing(
    traces: Traces, plan: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = plan()
    (tmp_path / "file").write_text("")
    for folder in ("/proc/1/cache", str(tmp_path / "file")):  # root may write any other
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        assert plan() == expected
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert plan() == expected and traces.count == 4


def test_the_files_used_longest_ago_are_removed(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    def file_of(number: int) -> Path:
        before = set(traces.files())
        text_entry(number).keep("x" * 100_000)
        (made,) = set(traces.files()) - before
        return made

    files = [file_of(number) for number in range(3)]
    torn = traces.folder / ".torn"
    torn.write_text("by a process that was killed")
    for age, file in enumerate((torn, *files)):
        os.utime(file, (1000 + age, 1000 + age))
    assert text_entry(0).find() == "x" * 100_000, "from here on it was used last"
    monkeypatch.setattr(trace_cache, "MOST_BYTES", 350_000)
    files.append(file_of(3))
    assert [file.exists() for file in (torn, *files)] == [False, True, False, True, True]
    assert text_entry(1).find() is None


def test_importing_it_reads_nothing() -> None:
    code = (
        "import os, sys; os.environ = None; import chunkflow_compile.catalog.trace_cache; "
        "assert 'torch' not in sys.modules"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
