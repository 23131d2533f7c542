"""Weights on the drive: read from the checkpoint or a scratch file in every step."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import diffusers
import pytest
import torch
from conftest import OPTIONS as SLOW
from conftest import WITHIN
from fake_cuda import FakeCuda
from helpers import Stack, Tabled, in_memory, load_stack, save_stack, stack_inputs
from hypothesis import given
from hypothesis import strategies as st
from surviving import fail_at
from torch import nn
from torch._dynamo.utils import counters

import chunkflow_compile
from chunkflow_compile import Arena, ChunkflowError, cycles, offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.hardware.emulated import on_emulated_link
from chunkflow_compile.hardware.profiles import CPU, load_profile
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.step import Copy, reads
from chunkflow_compile.runtime.read_ahead import InRing
from chunkflow_compile.units import size
from chunkflow_compile.weights import drive, limits
from chunkflow_compile.weights.drive import for_the_drive
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of
from chunkflow_compile.weights.limits import HostMemory
from chunkflow_compile.weights.source import WeightFile

SIZE = Size(layers=1)
LEAST = 1024
OPTIONS = {"lowering": "eager", "min_bytes": LEAST, "chunk_bytes": 4096, "policy": "layerwise"}
NAME, OTHER = "blocks.1.up.weight", "blocks.2.up.weight"
CHANGED = "was changed while its weights were read"

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(save_stack(tmp_path))


@pytest.fixture
def placed(saved: Path) -> tuple[nn.Module, nn.Module]:
    """A model whose weights are on the drive, and its twin in memory."""
    model = load_stack(str(saved))
    return offload(model, min_bytes=LEAST, host_memory=0), in_memory(load_stack(str(saved)))


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)


def same(model: nn.Module, twin: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@contextlib.contextmanager
def full() -> Iterator[None]:
    """There is no host memory left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "host_memory", lambda: HostMemory(1 << 30, 5))
        yield


def buffers(model: nn.Module) -> dict[str, HostBuffer]:
    return {name: buffer for name, p in model.named_parameters() if (buffer := buffer_of(p)) is not None}


def read_so_far(model: nn.Module) -> int:
    return sum(file.read_bytes for file in {h.backing.bytes.file for h in buffers(model).values() if h.source.file})


def large(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters() if p.nbytes >= LEAST)


def planned_reads(plan: Plan, drive: list[HostBuffer]) -> int:
    """Bytes that the copies of a step take from the drive: whole chunks, and what is left of the last one of a weight."""
    sizes = {buffer.name: buffer.nbytes for buffer in drive}
    return sum(
        min(plan.chunk_bytes * (i + 1), sizes[w.name]) - plan.chunk_bytes * i
        for w in plan.streamed
        if w.name in sizes
        for i, window in enumerate(w.windows)
        if window is not None
    )


@contextlib.contextmanager
def counted_reads() -> Iterator[list[int]]:
    """The bytes that copies take from the drive are added to the last number of the list."""
    plain, taken = InRing.values, list[int]()

    def values(self: InRing) -> torch.Tensor:
        found = plain(self)
        taken[-1] += found.numel()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InRing, "values", values)
        yield taken


def steps(run: Any, twin: Any, seed: int = 0) -> None:
    for step in range(3):
        if isinstance(twin, Stack):
            found: dict[str, Any] = stack_inputs(seed + step)
        else:
            found = small_inputs("wan", SIZE, seed + step)
        inputs = {k: v.to(twin.dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in found.items()}
        assert torch.equal(run(**inputs)[0], twin(**inputs)[0])


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
def test_half_of_the_weights_on_the_drive(tmp_path: Path, dtype: torch.dtype) -> None:
    small_model("wan", SIZE).save_pretrained(tmp_path / "wan")  # type: ignore[operator]
    kind = diffusers.WanTransformer3DModel
    model = kind.from_pretrained(tmp_path / "wan")
    twin = in_memory(kind.from_pretrained(tmp_path / "wan", torch_dtype=dtype))
    budget = large(twin) // 2
    offload(model, min_bytes=LEAST, host_memory=budget, dtype=None if dtype == torch.float32 else dtype)
    placed = buffers(model).values()
    drive = [h for h in placed if h.source.file]
    assert sum(h.nbytes for h in placed if not h.source.file) <= budget
    assert 0.4 < sum(h.nbytes for h in drive) / sum(h.nbytes for h in placed) < 0.7
    kept = [h.name for h in drive if twin.get_parameter(h.name).dtype == torch.float32]
    assert [h.name for h in drive if not h.backing.in_scratch_file] == kept, (
        "those that are not cast stay in the checkpoint"
    )
    run = compiled(model)
    before = read_so_far(model)
    steps(run, twin)
    (program,) = programs(model)
    streamed = {w.name for w in program.plan.streamed}
    each = sum(h.nbytes for h in drive if h.name in streamed)
    assert [m.moved_bytes for m in program.measurements] == [program.plan.moved_bytes] * 3
    primed = sum(m.primed_bytes for m in program.measurements)
    found = read_so_far(model) - before
    assert 0 < 3 * each <= found <= 4 * each + primed, "as the plan says, those of a cold start, and those read ahead"
    copies = program.arena.streams.copy
    copies.synchronize()
    with counted_reads() as taken:
        for seed in range(3):
            taken.append(0)
            steps(run, twin, seed)
            copies.synchronize()  # with those that a step begins for the next one
    assert taken == [3 * planned_reads(program.plan, drive)] * 3, "of warm steps"
    restore(model)
    assert same(model, twin)
    del run, program, drive, placed, copies
    torch._dynamo.reset()
    gc.collect()
    assert not any("chunkflow-" in os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())


def test_a_model_that_shares_the_graph_of_one_in_memory(saved: Path) -> None:
    """It is planned for its own weights in files, and nothing is compiled again."""
    twin, model = in_memory(load_stack(str(saved))), offload(load_stack(str(saved)), min_bytes=LEAST, host_memory=0)
    steps(compiled(offload(load_stack(str(saved)), min_bytes=LEAST)), twin)
    run, lowered = compiled(model), counters["stats"]["unique_graphs"]
    steps(run, twin)
    assert counters["stats"]["unique_graphs"] == lowered
    (program,) = programs(model)
    assert {op.weight for op in reads(program.program.ops)} == {w.name for w in program.plan.streamed}


@pytest.mark.parametrize(("scratch", "by_kind"), [(False, True), (True, False)])
def test_a_weight_on_the_drive_is_written(saved: Path, scratch: bool, by_kind: bool) -> None:
    model, twin = load_stack(str(saved)), in_memory(load_stack(str(saved)))
    for m in (model, twin):
        if scratch:
            m.requires_grad_(False)
            for p in m.parameters():
                p.add_(0)  # written: no longer a part of the file
    offload(model, min_bytes=LEAST, host_memory=0)
    found = buffers(model)
    assert {h.backing.in_scratch_file for h in found.values()} == {scratch} and all(
        h.source.file for h in found.values()
    )
    if by_kind:
        run: Any = chunkflow_compile.compile(model, **{**SLOW, "lowering": "eager"})
    else:
        run = compiled(model)
    for _ in range(4):
        steps(run, twin)
    assert bool(cycles(model)) == by_kind
    view = model.get_parameter(NAME)[1:]
    for m in (model, twin):
        m.get_parameter(NAME).mul_(2)
    assert torch.equal(view, twin.get_parameter(NAME)[1:])
    assert not found[NAME].source.file, "it is in host memory from then on"
    steps(run, twin, seed=3)
    model.state_dict()[OTHER].mul_(2)
    twin.get_parameter(OTHER).mul_(2)
    steps(run, twin, seed=5)
    values = {k: v + 0.01 for k, v in twin.state_dict().items()}
    for m in (model, twin):
        m.load_state_dict(values)
    steps(run, twin, seed=7)
    restore(model)
    assert same(model, twin)
    steps(model, twin)


@pytest.mark.parametrize("device", ["threads", "cuda"])
def test_two_sizes_and_a_write_where_the_host_runs_ahead(placed: tuple[nn.Module, nn.Module], device: str) -> None:
    model, twin = placed
    options = {**OPTIONS, "debug": ["poison", "threads"] if device == "threads" else "poison"}
    if device == "cuda":
        options["arena"] = FakeCuda(copy_s=1e-4).arena()
    run: Any = torch.compile(model, backend="chunkflow", options=options)
    for number in range(12):
        if number == 8:
            for m in placed:
                m.get_parameter(NAME).mul_(2)
        x = torch.randn(4 + 2 * (number % 2), 8)
        for _ in range(1 + number % 3):
            assert torch.equal(run(x)[0], twin(x)[0])
    assert {op.weight for op in reads(programs(model)[-1].program.ops)} > {NAME}, "its reads are still in the program"


def test_a_write_that_fails_between_two_sizes(placed: tuple[nn.Module, nn.Module]) -> None:
    """The weight has left the drive with its old values.  The program that was not bound again still reads it there."""
    model, twin = placed
    run: Any = torch.compile(model, backend="chunkflow", options=OPTIONS)
    inputs = [torch.randn(rows, 8) for rows in (4, 4, 6, 6)]
    for x in inputs:
        assert torch.equal(run(x)[0], twin(x)[0])
    with pytest.warns(UserWarning, match=f"{NAME} is written"), pytest.raises(RuntimeError):
        model.get_parameter(NAME).add_(torch.ones(3, 7))
    assert not buffers(model)[NAME].source.file
    for x in inputs:
        assert torch.equal(run(x)[0], twin(x)[0])


def test_a_drive_that_fails_and_a_checkpoint_that_changes(
    placed: tuple[nn.Module, nn.Module], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, twin = placed
    run = compiled(model)
    steps(run, twin)
    monkeypatch.setattr(os, "preadv", fail_at(os.preadv, 1, OSError(5, "Input/output error")))
    with pytest.raises(ChunkflowError, match=r"cannot be read at byte \d+: Input/output error. Check the drive"):
        run(**stack_inputs(9))
    steps(run, twin)
    os.utime(saved, ns=(1, 1))
    with pytest.raises(ChunkflowError, match=f"{CHANGED}: load the model again"):
        run(**stack_inputs(1))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_read_ahead_that_fails_fails_no_other_model(
    saved: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = FakeCuda().arena() if device == "cuda" else Arena("cpu")
    models, twin = [load_stack(str(saved)) for _ in range(2)], in_memory(load_stack(str(saved)))
    first, second = [
        torch.compile(
            offload(model, min_bytes=LEAST, host_memory=0),
            backend="chunkflow",
            fullgraph=True,
            options={**OPTIONS, "arena": arena},
        )
        for model in models
    ]
    for run in (first, second, first):
        steps(run, twin)
    last = [*reads(programs(models[0])[0].program.ops)][-1]  # for the next step
    source = buffers(models[0])[last.weight].backing.bytes
    assert source is not None
    file, begin, plain, failed = source.file, source.offset + 4096 * last.first, WeightFile.read, Event()

    def read(self: WeightFile, target: torch.Tensor, offset: int) -> None:
        if self is file and offset == begin and not failed.is_set():
            failed.set()
            raise ChunkflowError("the file cannot be read")
        plain(self, target, offset)

    arena.streams.stream("read").synchronize()  # what the step before has read ahead
    monkeypatch.setattr(WeightFile, "read", read)
    inputs = stack_inputs(0)
    assert torch.equal(first(**inputs)[0], twin(**inputs)[0]) and failed.wait(WITHIN)
    for run in (second, first):
        steps(run, twin)


def test_a_copy_that_fails_fails_no_other_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy for the next call, in which its own model raises if it comes next."""
    arena, models = Arena("cpu"), [load_stack(str(saved)) for _ in range(2)]
    twin, options = in_memory(load_stack(str(saved))), {**OPTIONS, "arena": arena}
    first, second = [
        torch.compile(
            offload(model, min_bytes=LEAST, host_memory=0), backend="chunkflow", fullgraph=True, options=options
        )
        for model in models
    ]
    for run in (first, second, first):
        steps(run, twin)
    last = [op for op in programs(models[0])[0].program.ops if isinstance(op, Copy)][-1]
    source = buffers(models[0])[last.weight].backing.bytes
    assert last.next_step and source is not None
    begin, plain, failed = source.offset + 4096 * last.first, InRing.values, Event()

    def values(self: InRing) -> torch.Tensor:
        if self.source.file is source.file and self.source.offset == begin and not failed.is_set():
            failed.set()
            raise ChunkflowError("the file cannot be read")
        return plain(self)

    for then in (second, first):
        arena.streams.copy.synchronize()  # what the step before has copied ahead
        failed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(InRing, "values", values)
            inputs = stack_inputs(0)
            assert torch.equal(first(**inputs)[0], twin(**inputs)[0]) and failed.wait(WITHIN)
        if then is first:
            with pytest.raises(ChunkflowError, match="the file cannot be read"):
                first(**inputs)
        for run in (second, first):
            steps(run, twin)


def test_a_drive_that_is_ten_times_slower_than_planned(
    placed: tuple[nn.Module, nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = placed
    rate = large(model) / 0.4
    profile = tmp_path / "hardware.json"
    emulated = on_emulated_link(load_profile(CPU), LinkEmulation(bandwidth=1e9, drive=rate), 1)
    profile.write_text(replace(emulated, drive_bandwidth=10 * rate).to_json())
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, "hardware": str(profile)})
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        steps(run, twin)
        steps(run, twin)
    said = [r.getMessage() for r in caplog.records if "but the plan expects" in r.getMessage()]
    assert len(said) == 1 and "Measure the drive with chunkflow calibrate --drive PATH" in said[0], said


TOUCHES: dict[str, Callable[[nn.Module], Any]] = {
    "mul_": lambda m: m.get_parameter(NAME).mul_(2),
    "load": lambda m: m.load_state_dict({NAME: torch.zeros_like(m.get_parameter(NAME))}, strict=False),
    "copy_": lambda m: m.get_parameter(OTHER).copy_(m.get_parameter(NAME)),
    "state": lambda m: m.state_dict()[NAME].sum(),
    "deepcopy": lambda m: copy.deepcopy(m.get_parameter(NAME)),
    "pickle": lambda m: pickle.dumps(m.get_parameter(NAME)),
    "tolist": lambda m: m.get_parameter(NAME).tolist(),
    "restore": lambda m: restore(m).get_parameter(NAME).sum(),
    "eager": lambda m: m(**stack_inputs(0)),
}


@pytest.mark.parametrize("what", TOUCHES)
def test_nothing_touches_a_weight_whose_file_was_cut(
    placed: tuple[nn.Module, nn.Module], saved: Path, what: str
) -> None:
    """That would kill the process, so another one tries.  A weight that was written before is in memory, all of it."""
    model, written = placed[0], "blocks.1.down.weight"
    child = os.fork()
    if not child:
        code = 1
        try:
            model.get_parameter(written)[:1].mul_(1)
            expected = model.get_parameter(written).tolist()
            os.truncate(saved, 4096)
            assert model.get_parameter(written).tolist() == expected
            with pytest.raises((ChunkflowError, RuntimeError), match=CHANGED):
                TOUCHES[what](model)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("what", TOUCHES)
def test_the_file_changes_after_an_unseen_write(placed: tuple[nn.Module, nn.Module], saved: Path, what: str) -> None:
    """The pages that were not written are still the file's."""
    model, _ = placed
    model.state_dict()[NAME].view(-1)[:2].fill_(3)
    with open(saved, "r+b") as changed:
        changed.seek(-4096, os.SEEK_END)
        changed.write(b"\1" * 4096)
    with pytest.raises((ChunkflowError, RuntimeError), match=CHANGED):
        TOUCHES[what](model)


@pytest.mark.parametrize("by", ["an op", "a step"])
def test_what_notices_the_write_takes_the_weight_from_the_file(
    placed: tuple[nn.Module, nn.Module], saved: Path, by: str
) -> None:
    model, twin = placed
    run = compiled(model)
    steps(run, twin)
    weight, buffer = model.get_parameter(NAME), buffers(model)[NAME]
    for m in placed:
        m.state_dict()[NAME].view(-1)[:2].fill_(3)
    with pytest.warns(
        UserWarning, match=rf"{NAME} is written, .* the weights take {size(weight.nbytes)} of host memory now"
    ):
        if by == "an op":
            for m in placed:
                m.get_parameter(NAME).add_(1)
        steps(run, twin, seed=1)
    expected = twin.get_parameter(NAME).clone()
    assert not buffer.source.file and not of_a_file(buffer.host.data_ptr() + buffer.nbytes // 2)
    with open(saved, "r+b") as changed:
        changed.write(b"\1" * saved.stat().st_size)
    assert torch.equal(weight.detach().clone(), expected)


def of_a_file(address: int) -> bool:
    """Whether this process maps a file there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        begin, end = (int(x, 16) for x in fields[0].split("-"))
        if begin <= address < end:
            return fields[4] != "0"
    raise AssertionError("nothing is mapped there")


@pytest.mark.parametrize("how", ["assign", pytest.param("parameter", marks=pytest.mark.long)])
def test_new_weights_beyond_host_memory_are_told_once(placed: tuple[nn.Module, nn.Module], how: str) -> None:
    model, twin = placed
    run = compiled(model)
    steps(run, twin)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for factor in (2, 3):
            made = factor * twin.get_parameter(NAME)
            for m in placed:
                if how == "assign":
                    m.load_state_dict({NAME: made.clone()}, assign=True, strict=False)
                else:
                    m.get_submodule(NAME.removesuffix(".weight")).weight = nn.Parameter(made.clone())
            steps(run, twin, seed=factor)
    said = [str(w.message) for w in told if "host_memory" in str(w.message)]
    expected = (
        "got other memory, as by .* is no longer"
        if how == "assign"
        else "came after .* the weights take 32.0 KiB of host"
    )
    assert len(said) == 1 and re.search(f"{NAME} {expected}", said[0]), said


WHERE_NONE_IS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a write": (TOUCHES["mul_"], rf"{NAME} is written, .* [\d.]+ KiB find no room there: 5 B are free"),
    "a copy": (copy.deepcopy, "on the drive, and a copy .* finds no room .*: 5 B are free"),
    "a cast": (lambda m: m.to(torch.float32), "on the drive, and a copy .* finds no room .*: 5 B are free"),
    "restore": (restore, r"no room in host memory for .* 5 B are free.*call restore again"),
}


def test_where_there_is_no_host_memory(saved: Path) -> None:
    """What needs some says so, and all weights stay as they are."""
    model, twin = load_stack(str(saved)), load_stack(str(saved), torch.bfloat16)
    offload(model, min_bytes=LEAST, host_memory=0, dtype=torch.bfloat16)
    for act, says in WHERE_NONE_IS.values():
        with full(), pytest.raises(ChunkflowError, match=says):
            act(model)
        assert same(model, twin) and all(buffer.source.file for buffer in buffers(model).values())
    restore(model)
    assert not buffers(model) and same(model, twin)


@pytest.mark.parametrize("how", ["load", "cast"])
def test_weights_that_leave_the_drive_are_said_once(placed: tuple[nn.Module, nn.Module], how: str) -> None:
    model, twin = placed
    says = "is written, .* more than host_memory, which is 0" if how == "load" else "is no longer on the drive: the wei"
    with pytest.warns(UserWarning, match=says) as warned:
        if how == "load":
            model.load_state_dict({k: 2 * v for k, v in twin.state_dict().items()})
        else:
            model.to(torch.bfloat16)
    assert len([w for w in warned if re.search(says, str(w.message))]) == 1
    expected = 2 * twin.get_parameter(NAME) if how == "load" else twin.get_parameter(NAME).to(torch.bfloat16)
    assert torch.equal(model.get_parameter(NAME), expected)


def test_a_child_writes_no_weight_of_its_parent() -> None:
    """Both have the scratch file."""
    model = Tabled().requires_grad_(False)
    twin = copy.deepcopy(model)
    offload(model, min_bytes=LEAST, host_memory=0)
    child = os.fork()
    if not child:
        code = 1
        try:
            model.state_dict()[OTHER].zero_()
            model.get_parameter(NAME).mul_(2)
            assert torch.equal(model.get_parameter(NAME), 2 * twin.get_parameter(NAME))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert same(model, twin)


def test_a_mount_over_another_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    table = (
        "21 1 0:1 / / rw - ext4 /dev/a rw\n30 21 0:2 / /tmp rw - ext4 /dev/b rw\n31 30 0:3 / /tmp rw - tmpfs tmpfs rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda _: table)
    assert drive._file_system(Path("/tmp")) == "tmpfs" and drive._file_system(Path("/usr")) == "ext4"


@given(st.lists(st.integers(0, 50), max_size=40), st.floats(0, 1.2))
def test_weights_for_the_drive(sizes: list[int], share: float) -> None:
    weights = [(str(i), n) for i, n in enumerate(sizes)]
    budget = int(share * sum(sizes))
    chosen = for_the_drive(weights, budget)
    kept = sum(n for name, n in weights if name not in chosen)
    assert kept <= budget or not sizes
    assert all(sizes[int(name)] for name in chosen)
    assert kept + 2 * max(sizes, default=0) >= min(budget, sum(sizes)), "no more than must"
    if budget >= sum(sizes):
        assert not chosen
