"""``chunkflow_compile.compile``: one block of each kind is compiled, and guards tell blocks apart that differ."""

from __future__ import annotations

import fcntl
import inspect
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from clocks import OwnClock
from conftest import EAGER, OPTIONS, WITHIN
from helpers import InTurn, Stack, Terminal, check_small, check_steps, graphs, small_twins, twins
from torch import nn
from torch._dynamo.callback import CallbackTrigger, callback_handler

import chunkflow_compile
from chunkflow_compile import cycles, offload, programs, restore
from chunkflow_compile.catalog.small import SMALL_MODELS, Size
from chunkflow_compile.frontend.block_kinds import kinds_of, parts_of, repeated_blocks
from chunkflow_compile.frontend.compile import compile_by_kind
from chunkflow_compile.lowering import inductor
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights import progress as bars
from chunkflow_compile.weights.leaves import leaves_of

SIZE = Size(layers=4, singles=4)
MIN_BYTES = OPTIONS["min_bytes"]

pytestmark = pytest.mark.usefixtures("no_grad")
LONG = ("flux", "hunyuanvideo", "qwen-image")


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=pytest.mark.long if f in LONG else ()) for f in sorted(SMALL_MODELS)]
)
def test_a_kind_is_compiled_once(family: str) -> None:
    model, twin = small_twins(family, SIZE)
    chunkflow_compile.compile(model, **EAGER)
    blocks = repeated_blocks(twin)
    parts = parts_of(twin, blocks.values(), MIN_BYTES)
    covered = [m for part in (*blocks.values(), *parts.values()) for m in part.modules()]
    assert {type(b).__name__ for b in blocks.values()} <= set(twin._repeated_blocks)  # type: ignore[arg-type]
    assert set(twin._repeated_blocks) <= {type(m).__name__ for m in covered}  # type: ignore[arg-type]
    check_small(model, twin, family, SIZE, range(4))
    once = len(kinds_of(blocks)) + len(parts)
    assert once <= graphs() <= once + 1, "the first single block gets a slice, with other strides"
    route = cycles(model)[0]
    newest = route.measurements[-1]
    assert newest.primed_bytes == 0 and newest.moved_bytes == route.cycle.plan.moved_bytes > 0
    large = sum(t.nbytes for t in leaves_of(twin) if t.nbytes >= MIN_BYTES)
    streamed = {id(buffer): buffer.nbytes for p in programs(model) for buffer in p.buffers.values()}
    assert sum(streamed.values()) == large, "no large weight is outside the parts"


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.layer_idx


def test_a_counter_in_each_block_is_found(caplog: pytest.LogCaptureFixture) -> None:
    """More blocks than Dynamo's default limit of 8 compilations: each still streams."""
    model, twin = twins(lambda: InTurn(Block(i) for i in range(9)))
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        chunkflow_compile.compile(model, **EAGER)
    assert "The 9 blocks of Block differ in layer_idx, which their code reads" in caplog.text
    check_steps(model, twin, 3, (4, 32))
    # Before 2.13, blocks beyond the limit run eagerly.
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        assert len(programs(model)) == 9 and all(p.plan.moved_bytes for p in programs(model))


def test_a_model_without_repeated_blocks_is_compiled_whole(caplog: pytest.LogCaptureFixture) -> None:
    model, twin = twins(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))))
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        assert chunkflow_compile.compile(model, **{**EAGER, "group_bytes": 1, "slowdown": 1000.0}) is model
    assert [r.message for r in caplog.records] == ["Sequential has no repeated blocks: it is compiled whole"]
    check_steps(model, twin, 2, (4, 64))
    assert programs(model)[0].plan.moved_bytes > 0
    restore(model)
    check_steps(model, twin, 1, (4, 64))


def test_a_mode_and_options_go_to_inductor_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = Mock(wraps=lambda module, inputs, config_patches: lambda *given: module(*given))  # tuning takes long
    monkeypatch.setattr(inductor, "compile_fx", lower)
    model, twin = twins(lambda: Stack(2))
    given = {**OPTIONS, "min_bytes": 64, "inductor": {"max_fusion_size": 8}}
    chunkflow_compile.compile(model, mode="max-autotune-no-cudagraphs", **given)
    x = torch.randn(4, 8)
    torch.testing.assert_close(model(x), twin(x))
    patches = [call.kwargs["config_patches"] for call in lower.call_args_list]
    assert patches and all(p["max_autotune"] and p["max_fusion_size"] == 8 for p in patches)
    assert programs(model)[0].plan.moved_bytes > 0
    lowered = [p for p in programs(model) if not any(inspect.ismethod(r) for r in p.variant.regions.values())]
    names = {buffer.name.partition(".")[0] for p in lowered for buffer in p.buffers.values()}
    assert names == {"blocks"}, "the parts around them run op by op"


class Odd(Stack):
    """Two parts of one kind, and one that forward does not call."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(3)
        self.before, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x + self.before(x))
        if self.fails:
            raise ValueError("a fault of the model")
        return found


def progress(patch: pytest.MonkeyPatch, model: nn.Module, options: Any = EAGER, terminal: bool = True) -> str:
    """What is shown while a model is compiled and called.  Other compilations are not shown afterwards."""
    shown = Terminal(terminal)
    patch.setattr(sys, "stderr", shown)
    chunkflow_compile.compile(model.eval(), **options)
    for _ in range(3):
        with pytest.raises(ValueError) if getattr(model, "fails", False) else nullcontext():
            model(torch.randn(4, 8))
    before = shown.getvalue()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert shown.getvalue() == before and not callback_handler.start_callbacks
    torch._dynamo.reset()
    return before


def test_progress_of_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first one to the last, or to the end of a call that fails, on a terminal."""
    never_called = chunkflow_compile.compile(Odd().eval(), **EAGER)
    shown = progress(monkeypatch, Stack(3), OPTIONS)
    for said in ("tracing", "planning", "lowering region 1 of"):
        assert f"] Stack: compiling blocks.0 (1 of 1): {said}" in shown
    assert "planning 3 calls that repeat" in shown
    whole = progress(monkeypatch, nn.Sequential(nn.Linear(8, 8)), OPTIONS)
    assert "Sequential: compiling (1 of 1): tracing" in whole
    assert "Sequential: compiling (1 of 1): lowering region 1 of 1" in whole
    for fails in (False, True):
        odd = progress(monkeypatch, Odd(fails), {**EAGER, "min_bytes": 64})
        # torch's own modules are called by name too
        assert "Odd: compiling before (1 of 4): tracing" in odd and "Odd: compiling blocks.0 (3 of 4): tracing" in odd
    chunkflow_compile.restore(never_called)
    assert progress(monkeypatch, Stack(3), terminal=False) == ""
    monkeypatch.setenv("CHUNKFLOW_PROGRESS", "0")
    assert progress(monkeypatch, Stack(3)) == ""


def test_progress_of_a_model_that_calls_itself() -> None:
    """And whose compiled code is dropped in a call."""

    class Twice(Stack):
        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            return super().forward(self(x, False) if again else x)

    model, twin = twins(lambda: Twice(3))
    chunkflow_compile.compile(model, **EAGER)
    check_steps(model, twin, 2)
    dropped = model.register_forward_hook(lambda *_: torch.compiler.reset())
    check_steps(model, twin, 2)
    dropped.remove()
    check_steps(model, twin, 1)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_for_each_long_compilation(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also for other sizes, later; by a clock on which each takes two seconds, or a little less."""
    model, shown = Stack(3).eval(), Terminal(terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    offload(model, "cpu", min_bytes=MIN_BYTES)
    placement: Any = placement_of(model)
    compile_by_kind(model, placement, EAGER, None, name="pipe.transformer")
    caplog.set_level(logging.INFO, "chunkflow_compile.placed.compile_progress")
    for rows, tick in ((4, 2.0), (6, 2.0), (9, 2.0)):
        placement.progress.now = OwnClock(tick=tick).now
        model(torch.randn(rows, 8))
    with ExitStack() as recording:  # in another thread, until this one plans: Dynamo does not say when this one begins
        recording.enter_context(callback_handler.install_callbacks(CallbackTrigger.CUDAGRAPH_RECORDING, ""))
        monkeypatch.setattr(placement.progress, "say", lambda _: recording.close())
        placement.progress.now = OwnClock(tick=99.0).now
        model(torch.randn(1, 8))
    other = Stack(2).eval()
    chunkflow_compile.compile(other, **EAGER)
    quick: Any = placement_of(other)
    quick.progress.now = OwnClock(tick=1.9).now
    other(torch.randn(4, 8))
    said = [r.getMessage() for r in caplog.records if r.name == "chunkflow_compile.placed.compile_progress"]
    first, again = (
        "pipe.transformer: compiling blocks.0 (1 of 1)",
        "pipe.transformer: compiling blocks.0 for other inputs",
    )
    ended = [
        "pipe.transformer: compiled blocks.0 in 2.0 s",
        "pipe.transformer: compiled blocks.0 for other inputs in 2.0 s",
    ]
    assert said == [first, ended[0], again, ended[1], again]
    assert all((f"chunkflow: {line}\n" in shown.getvalue()) == terminal for line in ended)
    assert (f"{again}: tracing" in shown.getvalue()) == terminal == bool(shown.getvalue())


def test_progress_of_a_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the backend on, also of a model that was not placed before; its time goes on while nothing else is said."""
    for place in (True, False):
        model, shown = Stack(3).eval(), Terminal(True)
        if place:
            offload(model, "cpu", min_bytes=MIN_BYTES)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", shown)
            model.compile(backend="chunkflow", options=EAGER)
            model(torch.randn(4, 8))
        for said in ("tracing", "planning"):
            assert f"] Stack: compiling (graph 1): {said}" in shown.getvalue()
        assert programs(model)[0].plan.moved_bytes > 0


def test_a_line_updates_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is closed, and not where there is no terminal."""
    monkeypatch.setattr(bars, "TICK_S", 0.001)
    for terminal in (True, False):
        monkeypatch.setattr(sys, "stderr", shown := Terminal(terminal))
        bar = bars.line("compiling")
        tickers = [thread for thread in threading.enumerate() if thread.name == "chunkflow progress"]
        assert bool(tickers) == terminal
        drawn, ends = 0, time.monotonic() + WITHIN
        while terminal and drawn < 5 and time.monotonic() < ends:
            drawn = shown.getvalue().count("chunkflow [00:0")
        bar.close()
        for ticker in tickers:
            ticker.join(WITHIN)
            assert drawn >= 5 and not ticker.is_alive()
        assert terminal or not shown.getvalue()


def test_a_line_on_a_terminal_without_a_size() -> None:
    """As that of a container or a script: tqdm alone draws nothing there."""
    script = "from chunkflow_compile.weights.progress import line; line('compiling').close()"
    for rows, columns in ((0, 0), (24, 80)):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        subprocess.run([sys.executable, "-c", script], stderr=theirs, check=True, timeout=WITHIN)
        shown = os.read(ours, 4096)
        os.close(ours)
        os.close(theirs)
        assert b"chunkflow [00:00] compiling" in shown, (rows, columns)


def test_blocks_of_a_list_of_one_stage() -> None:
    model = nn.ModuleDict({"stages": nn.ModuleList([Stack(3)])})
    assert list(repeated_blocks(model)) == [f"stages.0.blocks.{n}" for n in range(3)]


class Pairs(nn.Module):
    """Lists of a block and a Linear, which nothing calls as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Block(2), nn.Linear(32, 32)]) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, linear in self.layers:  # type: ignore[misc]
            x = linear(block(x))
        return x


@pytest.mark.parametrize("whole", [False, True])
def test_blocks_of_lists_in_a_list(whole: bool) -> None:
    model, twin = twins(Pairs)
    options = {**EAGER, "min_bytes": 1024}
    if whole:
        model.compile(backend="chunkflow", fullgraph=True, options=options)
    else:
        chunkflow_compile.compile(model, **options)
    check_steps(model, twin, 3, (4, 32))
    found = programs(model)
    compiled = graphs()
    assert compiled == (1 if whole else 2), "one of each kind, also of torch's own modules"
    assert all(p.measurements[-1].moved_bytes > 0 for p in found)
    blocks = {region.block for region in found[0].program.problem.regions}
    assert not whole or blocks == {f"layers.{n}.{m}" for n in range(3) for m in (0, 1)}
    if not whole:
        chunkflow_compile.compile(again := twins(Pairs)[0], **options)
        check_steps(again, twin, 2, (4, 32))
        assert graphs() == compiled, "another model of the class runs what was compiled"
