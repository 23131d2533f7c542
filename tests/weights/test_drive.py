"""Weights on the drive: read from the checkpoint or a scratch file in every step."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import pickle
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from conftest import OPTIONS as SLOW
from helpers import Stack, in_memory, load_stack, save_stack, stack_inputs
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import chunkflow_compile
from chunkflow_compile import ChunkflowError, cycles, offload, programs, restore
from chunkflow_compile.hardware.emulated import on_emulated_link
from chunkflow_compile.hardware.profiles import CPU, load_profile
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.passes.hardware import LinkEmulation
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.runtime.read_ahead import Reading
from chunkflow_compile.weights import drive, limits
from chunkflow_compile.weights.drive import Scratch, for_the_drive
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of
from chunkflow_compile.weights.limits import HostMemory

SIZE = Size(layers=2)
LEAST = 1024
OPTIONS = {"lowering": "eager", "min_bytes": LEAST, "chunk_bytes": 4096, "policy": "layerwise"}

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(save_stack(tmp_path))


def buffers(model: nn.Module) -> dict[str, HostBuffer]:
    return {name: buffer for name, p in model.named_parameters() if (buffer := buffer_of(p)) is not None}


def read_so_far(model: nn.Module) -> int:
    return sum(file.read_bytes for file in {h.drive.file for h in buffers(model).values() if h.drive is not None})


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
    plain, taken = Reading.acquire, list[int]()

    def acquire(self: Reading) -> tuple[torch.Tensor, float]:
        values, at = plain(self)
        taken[-1] += values.numel()
        return values, at

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reading, "acquire", acquire)
        yield taken


def steps(run: Any, twin: Any, seed: int = 0) -> None:
    for step in range(3):
        if isinstance(twin, Stack):
            found: dict[str, Any] = stack_inputs(seed + step)
        else:
            found = small_inputs("wan", SIZE, seed + step)
        inputs = {k: v.to(twin.dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in found.items()}
        assert torch.equal(run(**inputs)[0], twin(**inputs)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_of_the_weights_on_the_drive(tmp_path: Path, dtype: torch.dtype) -> None:
    small_model("wan", SIZE).save_pretrained(tmp_path / "wan")  # type: ignore[operator]
    kind = diffusers.WanTransformer3DModel
    model = kind.from_pretrained(tmp_path / "wan")
    twin = in_memory(kind.from_pretrained(tmp_path / "wan", torch_dtype=dtype))
    budget = large(twin) // 2
    offload(model, min_bytes=LEAST, host_memory=budget, dtype=None if dtype == torch.float32 else dtype)
    placed = buffers(model).values()
    drive = [h for h in placed if h.drive is not None]
    assert sum(h.nbytes for h in placed if h.drive is None) <= budget
    assert 0.4 < sum(h.nbytes for h in drive) / sum(h.nbytes for h in placed) < 0.7
    assert any(not h.scratch for h in drive) or dtype != torch.float32, "a part of the checkpoint stays there"
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
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
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    del run, program, drive, placed, copies
    torch._dynamo.reset()
    gc.collect()
    assert not any("chunkflow-" in os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink())


@pytest.mark.parametrize(
    ("scratch", "by_kind"),
    [
        (False, True),
        (True, False),
        pytest.param(False, False, marks=pytest.mark.long),
        pytest.param(True, True, marks=pytest.mark.long),
    ],
)
def test_a_weight_on_the_drive_is_written(saved: Path, scratch: bool, by_kind: bool) -> None:
    model, twin = load_stack(str(saved)), in_memory(load_stack(str(saved)))
    for m in (model, twin):
        if scratch:
            m.requires_grad_(False)
            for p in m.parameters():
                p.add_(0)  # written: no longer a part of the file
    offload(model, min_bytes=LEAST, host_memory=0)
    found = buffers(model)
    assert {h.scratch for h in found.values()} == {scratch} and all(h.drive is not None for h in found.values())
    if by_kind:
        run: Any = chunkflow_compile.compile(model, **{**SLOW, "lowering": "eager"})
    else:
        run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
    for _ in range(4):
        steps(run, twin)
        programs(model)[0].arena.cycles.wait_planned()
    assert bool(cycles(model)) == by_kind
    name = "blocks.1.up.weight"
    view = model.get_parameter(name)[1:]
    for m in (model, twin):
        m.get_parameter(name).mul_(2)
    assert torch.equal(view, twin.get_parameter(name)[1:])
    assert found[name].drive is None, "it is in host memory from then on"
    steps(run, twin, seed=3)
    other = "blocks.2.up.weight"
    model.state_dict()[other].mul_(2)
    twin.get_parameter(other).mul_(2)
    steps(run, twin, seed=5)
    model.load_state_dict({k: v + 0.01 for k, v in twin.state_dict().items()})
    twin.load_state_dict({k: v + 0.01 for k, v in twin.state_dict().items()})
    steps(run, twin, seed=7)
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    steps(model, twin)


@pytest.fixture
def fails_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The drive fails at the next read, once the list is emptied."""
    plain, due = os.preadv, [1]

    def preadv(number: int, *arguments: Any) -> int:
        if not due:
            due.append(1)
            raise OSError(5, "Input/output error")
        return plain(number, *arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    yield due


def test_a_drive_that_fails_in_a_step(saved: Path, fails_once: list[int]) -> None:
    model, twin = load_stack(str(saved)), in_memory(load_stack(str(saved)))
    offload(model, min_bytes=LEAST, host_memory=0)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
    steps(run, twin)
    fails_once.clear()
    with pytest.raises(ChunkflowError, match=r"cannot be read at byte \d+: Input/output error. Check the drive"):
        run(**stack_inputs(9))
    steps(run, twin)
    restore(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_drive_that_is_ten_times_slower_than_planned(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = load_stack(str(saved)), in_memory(load_stack(str(saved)))
    rate = large(model) / 0.4
    profile = tmp_path / "hardware.json"
    emulated = on_emulated_link(load_profile(CPU), LinkEmulation(bandwidth=1e9, drive=rate), 1)
    profile.write_text(replace(emulated, drive_bandwidth=10 * rate).to_json())
    offload(model, min_bytes=LEAST, host_memory=0)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, "hardware": str(profile)})
    with caplog.at_level(logging.WARNING, "chunkflow_compile"):
        steps(run, twin)
        steps(run, twin)
    said = [r.getMessage() for r in caplog.records if "but the plan expects" in r.getMessage()]
    assert len(said) == 1 and "Measure the drive with chunkflow calibrate --drive PATH" in said[0], said


def test_a_checkpoint_that_changes_under_a_placed_model(saved: Path) -> None:
    model = load_stack(str(saved))
    offload(model, min_bytes=LEAST, host_memory=0)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
    run(**stack_inputs(0))
    os.utime(saved, ns=(1, 1))
    with pytest.raises(ChunkflowError, match="was changed while its weights were read: load the model again"):
        run(**stack_inputs(1))


def test_a_checkpoint_that_is_cut_under_a_placed_model(saved: Path) -> None:
    """An op that touched the mapping would kill the process."""
    model = load_stack(str(saved))
    offload(model, min_bytes=LEAST, host_memory=0)
    os.truncate(saved, 4096)
    with pytest.raises(ChunkflowError, match="was changed while its weights were read: load the model again"):
        model(**stack_inputs(0))


def touch(what: str, model: nn.Module, name: str) -> None:
    weight = model.get_parameter(name)
    if what == "mul_":
        weight.mul_(2)
    elif what == "load":
        model.load_state_dict({name: torch.zeros(weight.shape)}, strict=False)
    elif what == "copy_":
        model.get_parameter(name.replace("blocks.1", "blocks.0")).copy_(weight)
    elif what == "state":
        model.state_dict()[name].sum()
    elif what == "deepcopy":
        copy.deepcopy(weight)
    elif what == "restore":
        restore(model)
        model.get_parameter(name).sum()
    else:
        pickle.dumps(weight) if what == "pickle" else weight.tolist()


@pytest.mark.parametrize("what", ["mul_", "load", "copy_", "state", "deepcopy", "restore", "pickle", "tolist"])
def test_nothing_touches_a_weight_whose_file_was_cut(saved: Path, what: str) -> None:
    """That would kill the process, so another one tries.  A weight that was written before is in memory, all of it."""
    name, written = "blocks.1.up.weight", "blocks.1.down.weight"
    model = load_stack(str(saved))
    child = os.fork()
    if not child:
        code = 1
        try:
            offload(model, min_bytes=LEAST, host_memory=0)
            model.get_parameter(written)[:1].mul_(1)
            expected = model.get_parameter(written).tolist()
            os.truncate(saved, 4096)
            assert model.get_parameter(written).tolist() == expected
            with pytest.raises((ChunkflowError, RuntimeError), match="was changed while its weights were read"):
                touch(what, model, name)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_writes_beyond_host_memory_are_told_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = load_stack(str(saved)), in_memory(load_stack(str(saved)))
    offload(model, min_bytes=LEAST, host_memory=0)
    name = "blocks.1.up.weight"
    with monkeypatch.context() as patch:
        patch.setattr(limits, "host_memory", lambda: HostMemory(1 << 30, 5))
        with pytest.raises(ChunkflowError, match=rf"{name} is written, .* \d+ bytes find no room there: 5 are free"):
            model.get_parameter(name).mul_(2)
    assert buffers(model)[name].drive is not None
    with pytest.warns(UserWarning, match=r"is written, .* more than host_memory, which is 0") as told:
        model.load_state_dict({k: 2 * v for k, v in twin.state_dict().items()})
    assert len(told) == 1
    assert torch.equal(model.get_parameter(name), 2 * twin.get_parameter(name))


def test_copies_of_weights_on_the_drive(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go into host memory: a sentence where there is no room, and one warning for weights that leave the drive."""
    model = load_stack(str(saved))
    offload(model, min_bytes=LEAST, host_memory=0)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "host_memory", lambda: HostMemory(1 << 30, 5))
        for made in (copy.deepcopy, lambda m: m.to(torch.bfloat16)):
            with pytest.raises(
                ChunkflowError, match=r"is on the drive, and a copy of it .* finds no room .*: 5 are free"
            ):
                made(model)
    assert all(buffer.drive is not None for buffer in buffers(model).values())
    with pytest.warns(UserWarning, match="is no longer on the drive: the weights take") as told:
        model.to(torch.bfloat16)
    assert len([w for w in told if "no longer on the drive" in str(w.message)]) == 1


def test_a_scratch_file_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    with (
        monkeypatch.context() as patch,
        pytest.raises(
            ChunkflowError, match=r"no room for a scratch file in /dev/shm: it is in memory itself \(tmpfs\)"
        ),
    ):
        patch.setattr(tempfile, "tempdir", "/dev/shm")
        Scratch.made(8)
    monkeypatch.setattr("chunkflow_compile.weights.drive.shutil.disk_usage", lambda _: type("", (), {"free": 3}))
    with pytest.raises(
        ChunkflowError, match=r"3 bytes are free\. Set TMPDIR to a folder on a drive, or raise host_memory"
    ):
        offload(model, min_bytes=LEAST, host_memory=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_no_room_for_weights_that_come_back_from_the_drive(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = load_stack(str(saved)), load_stack(str(saved), torch.bfloat16)
    offload(model, min_bytes=LEAST, host_memory=0, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(limits, "host_memory", lambda: HostMemory(1 << 30, 5))
        with pytest.raises(
            ChunkflowError, match=r"no room in host memory for .* bytes\): 5 are free.*call restore again"
        ):
            restore(model)
    assert buffers(model) and all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    restore(model)
    assert not buffers(model)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_drive_is_asked_for_room_for_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("wan", SIZE)
    free, written = large(model) // 2, list[int]()
    monkeypatch.setattr("chunkflow_compile.weights.drive.shutil.disk_usage", lambda _: type("", (), {"free": free}))
    monkeypatch.setattr(os, "pwritev", lambda *_: written.append(1))
    with pytest.raises(ChunkflowError, match=rf"{free} bytes are free"):
        offload(model, min_bytes=LEAST, host_memory=0)
    assert not written


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
