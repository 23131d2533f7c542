"""Packed weights: tensors like any other, whose bytes are three quarters; beside each model stands a plain twin."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_limits
import torch
from conftest import EAGER, in_a_child
from helpers import Stack, stack, twins
from safetensors.torch import load_file, save_file
from test_drive import LEAST, buffers, full, same
from test_host_weight import ON_MODELS, READS, WRITES
from test_host_weight import same as alike
from test_killed_ranks import without_name
from torch import nn

from chunkflow_compile import ChunkflowError, offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_model
from chunkflow_compile.passes.packing import Layout
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.runtime.single_call import SingleCall
from chunkflow_compile.weights import drive
from chunkflow_compile.weights import packed as packed_weights
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of
from chunkflow_compile.weights.host_weight import HostWeight, state_of
from chunkflow_compile.weights.mapping import PAGE, whole_pages
from chunkflow_compile.weights.packed import Packed
from chunkflow_compile.weights.staging import GpuStagings
from chunkflow_compile.weights.weight_memory import Form

BF16 = torch.bfloat16
NAME, OTHER = "blocks.0.up.weight", "blocks.1.down.weight"
# Ops that take no bfloat16, or whose other operand is of another dtype.
OF_FLOAT32 = ("numpy", "addmm_", "eager", "average")

pytestmark = pytest.mark.usefixtures("no_grad")


def plain() -> nn.Module:
    return stack(layers=2).to(BF16).requires_grad_(False)


def pair(pack: Any = True) -> tuple[nn.Module, nn.Module]:
    return offload(plain(), min_bytes=LEAST, pack=pack), plain()


def heavy(weight: torch.Tensor) -> torch.Tensor:
    """Values of which far too many escape."""
    return torch.exp(20 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))).to(weight.dtype)


def held(memory: torch.Tensor) -> int:
    """Bytes of the pages of a tensor that have memory."""
    first, count = memory.data_ptr() // PAGE, whole_pages(memory.nbytes) // PAGE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = torch.frombuffer(bytearray(os.pread(pagemap.fileno(), 8 * count, 8 * first)), dtype=torch.int64)
    return PAGE * int((entries < 0).sum())  # the highest bit: present


def packed(model: nn.Module) -> set[str]:
    return {name for name, buffer in buffers(model).items() if buffer.compressed}


def test_it_is_placed_read_and_restored_as_any_other() -> None:
    model, twin = pair()
    found = buffers(model)
    assert packed(model) == {n for n, p in twin.named_parameters() if p.nbytes >= LEAST} == {*found} != set()
    for name, buffer in found.items():
        weight, plain = model.get_parameter(name), twin.get_parameter(name)
        assert (weight.shape, weight.dtype, weight.stride()) == (plain.shape, plain.dtype, plain.stride())
        assert buffer.nbytes == buffer.stored.nbytes == Layout.of(plain.numel()).nbytes < 0.8 * plain.nbytes
        assert buffer.bytes.numel() == buffer.nbytes and held(buffer.host) == 0 < held(buffer.stored)
    for what, read in READS.items():
        if what not in OF_FLOAT32:
            for name in found:
                assert alike(read(model.get_parameter(name)), read(twin.get_parameter(name))), what
    view = model.get_parameter(NAME).t()[3:]
    assert packed(model) == {*found}
    restore(model)
    assert same(model, twin) and not any(isinstance(p, HostWeight) for p in model.parameters())
    assert torch.equal(view, twin.get_parameter(NAME).t()[3:])


def test_it_is_written_as_any_other() -> None:
    """Each time three times in a row, and what a view from before sees."""
    still, raw = 0, 0
    for what, write in {**WRITES, "much that escapes": lambda w: w.copy_(heavy(w))}.items():
        if what in OF_FLOAT32:
            continue
        model, twin = pair()
        before = buffers(model)[NAME]
        views = [m.get_parameter(NAME)[1:] for m in (model, twin)]
        for step in range(3):
            for m in (model, twin):
                torch.manual_seed(step)
                write(m.get_parameter(NAME))
            assert same(model, twin), what
            assert torch.equal(*views), what
        if before.compressed:
            assert held(before.host) == 0, what
        still, raw = still + before.compressed, raw + (not before.compressed and before.token is not None)
        restore(model)
        assert same(model, twin), what
    assert still > 20 and raw > 0
    for what, work in ON_MODELS.items():
        if what not in (*OF_FLOAT32, "write through the state"):
            model, twin = pair()
            for m in (model, twin):
                torch.manual_seed(1)
                work(m)
            assert same(model, twin), what


def test_it_is_read_and_written_in_any_mode() -> None:
    model, twin = pair()
    for mode in (torch.inference_mode(), torch.device("meta"), torch.enable_grad()):
        with mode:
            for m in (model, twin):
                m.get_parameter(NAME).mul_(2)
                m.get_parameter(NAME)[1:].add_(1)
            assert same(model, twin)
            assert all(torch.equal(v, twin.state_dict()[n]) for n, v in model.state_dict().items())
    assert packed(model) == {*buffers(model)}
    restore(model)
    assert same(model, twin)


def test_it_is_trained() -> None:
    """Gradients by eager ops, and steps of an optimizer that writes all weights in one op."""
    model, twin = pair()
    with torch.enable_grad():
        runs = [
            (m, torch.optim.AdamW(m.requires_grad_(True).parameters(), lr=1e-2, foreach=True)) for m in (model, twin)
        ]
        for _ in range(3):
            x = torch.randn(4, 8).to(BF16)
            for m, optimizer in runs:
                optimizer.zero_grad()
                m(x).square().sum().backward()
                optimizer.step()
            assert same(model, twin)
    assert packed(model)


def test_a_part_takes_the_place_of_the_whole() -> None:
    """As memory that is shared, or exchanged: the bytes stay, and the weight is raw."""
    model, twin = pair()
    for m in (model, twin):
        weight, other = m.get_parameter(NAME), m.get_parameter(OTHER)
        weight.data = weight.data[:32]
        torch.utils.swap_tensors(other, nn.Parameter(other.cpu().clone() * 2, requires_grad=False))
    assert same(model, twin) and buffers(model)[NAME].form is Form.RAW
    for m in (model, twin):
        m.get_parameter(NAME).mul_(2)
    assert same(model, twin) and packed(model) == {"blocks.0.down.weight", "blocks.1.up.weight"}
    restore(model)
    assert same(model, twin)


def test_what_does_not_fit_is_raw_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    model, twin = pair()
    placement: Any = placement_of(model)
    ended: list[int] = []
    placement.store.end_programs = lambda: ended.append(1)
    buffer, weight = buffers(model)[NAME], model.get_parameter(NAME)
    view, address, state = weight[1:], buffer.host.data_ptr(), state_of(weight)
    for m in (model, twin):
        m.get_parameter(NAME)[:4].copy_(heavy(m.get_parameter(NAME)[:4]))
    assert buffer.form is Form.RAW and buffer.stored is buffer.host and ended == [1]
    assert state_of(weight)[:2] != state[:2] and buffer.host.data_ptr() == address and buffer.backing.where is Where.OWN
    assert buffer.bytes.numel() == buffer.nbytes == weight.nbytes and not buffer.pack()
    for name in (NAME, OTHER):
        for m in (model, twin):
            m.get_parameter(name).copy_(heavy(m.get_parameter(name)))
    assert torch.equal(view, twin.get_parameter(NAME)[1:]) and same(model, twin) and ended == [1, 1]
    (said,) = [text for text in caplog.messages if "packed" in text]
    assert said.startswith(
        f"{NAME} was written, and its values no longer fit into its packed form: it is raw from now on"
    )
    restore(model)
    assert same(model, twin)


def test_an_op_that_fails_leaves_it_readable() -> None:
    model, twin = pair()
    buffer, weight = buffers(model)[NAME], model.get_parameter(NAME)
    with pytest.raises(RuntimeError):
        weight.add_(torch.ones(3, 3, 3))
    with pytest.raises(RuntimeError):
        torch._foreach_add_(
            [weight, weight[0], torch.zeros(2)], [torch.zeros_like(weight), torch.zeros(9), torch.zeros(2)]
        )
    assert same(model, twin) and buffer.compressed
    with pytest.raises(KeyError), buffer.write():
        buffer.host[0] = 1
        assert torch.equal(weight[0], torch.ones_like(weight[0])), "as it is written"
        raise KeyError
    twin.get_parameter(NAME)[0] = 1
    assert same(model, twin) and buffer.compressed and held(buffer.host) == 0


def test_without_memory_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = pair()
    weight = model.get_parameter(NAME)
    needs: dict[str, Callable[[], Any]] = {
        "read": lambda: weight.sum(),
        "write": lambda: weight.zero_(),
        "copy": lambda: copy.deepcopy(weight),
        "state": lambda: model.state_dict(),
        "restore": lambda: restore(model),
    }
    with full():
        for what, work in needs.items():
            with pytest.raises(
                ChunkflowError, match=r"weight is packed, and its values \(4.0 KiB\) find no room in host"
            ):
                work()
            assert weight[1:].shape == (63, 32), what
    assert same(model, twin) and packed(model)
    restore(model)
    assert same(model, twin)


def test_it_is_packed_and_unpacked_in_its_place() -> None:
    model, twin = pair("auto")
    found = buffers(model)
    assert not packed(model) and {buffer.form for buffer in found.values()} == {Form.COMPRESSIBLE}
    buffer, weight = found[NAME], model.get_parameter(NAME)
    state, address = state_of(weight), buffer.host.data_ptr()
    assert buffer.pack() and buffer.pack() and held(buffer.host) == 0 < held(buffer.stored)
    assert state_of(weight) != state and buffer.version == sum(state[2:]), "another form of the same values"
    assert same(model, twin)
    view = weight[2:]
    buffer.unpack()
    assert buffer.form is Form.RAW and not buffer.pack() and state_of(weight)[2:] == state[2:]
    assert buffer.host.data_ptr() == address and torch.equal(view, twin.get_parameter(NAME)[2:]) and same(model, twin)
    # memory that somebody else has cannot lose its pages
    kept = [model.get_parameter(OTHER)[1:], model.state_dict(), model.get_parameter("blocks.1.up.weight").tolist()]
    assert not found[OTHER].pack() and not found["blocks.0.down.weight"].pack() and kept
    assert same(model, twin)
    for m in (model, twin):
        m.get_parameter(OTHER).mul_(2)
    assert torch.equal(kept[0], twin.get_parameter(OTHER)[1:])


def test_programs_end_when_what_they_copy_is_packed() -> None:
    model, twin = pair("auto")
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**EAGER, "min_bytes": LEAST})

    def steps() -> SingleCall:
        for _ in range(2):
            x = torch.randn(4, 8).to(BF16)
            assert torch.equal(run(x), twin(x))
        (program,) = programs(model)
        assert [m.moved_bytes for m in program.measurements[-2:]] == [program.plan.moved_bytes] * 2 != [0, 0]
        return program

    before = steps()
    assert all(buffer.pack() for buffer in buffers(model).values()) and before.closed and programs(model) == ()
    assert packed(model) and same(model, twin)
    for buffer in buffers(model).values():
        buffer.unpack()
    assert steps() is not before


class Reader(test_limits.Reader):
    """It also notes what is pinned no longer."""

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        super().pin(host)
        return lambda: self.pinned.remove(host.data_ptr())


def test_programs_copy_what_is_stored() -> None:
    """It is pinned, and a resident copy has the same form."""
    model, twin = pair()
    buffer, device, arena = buffers(model)[NAME], Reader(), Reader()
    buffer.pin(device)
    assert device.pinned == [buffer.stored.data_ptr()] != [buffer.host.data_ptr()]
    resident = buffer.resident(GpuStagings(), arena)
    assert torch.equal(resident, buffer.stored) and resident.dtype == torch.int32
    for m in (model, twin):
        m.get_parameter(NAME).mul_(2)
    assert buffer.on_device is None and buffer.resident(GpuStagings(), arena) is resident, "renewed in place"
    assert torch.equal(resident, buffer.stored) and buffer.pinned and len(device.pinned) == 1
    buffer.unpack()
    assert not device.pinned and buffer.on_device is None
    assert torch.equal(buffer.resident(GpuStagings(), arena), twin.get_parameter(NAME))
    buffer.pin(device)
    assert device.pinned == [buffer.host.data_ptr()] and same(model, twin)


def test_a_state_dict_is_not_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, twin), before = pair(), without_name()
    state = model.state_dict()
    assert without_name() - before == len(packed(model)) > 0
    assert all(type(v) is torch.Tensor and torch.equal(v, twin.state_dict()[n]) for n, v in state.items())
    again = model.state_dict()
    assert without_name() - before == len(packed(model)), "as long as it is in use"
    for m in (model, twin):
        m.get_parameter(NAME).add_(1)
    again[OTHER].zero_()
    twin.get_parameter(OTHER).zero_()
    for kept in (state, again, model.state_dict()):
        assert all(torch.equal(kept[n], v) for n, v in twin.state_dict().items()) and same(model, twin)
    torch.save(model.state_dict(), tmp_path / "state")
    save_file(model.state_dict(), tmp_path / "file")
    for saved in (torch.load(tmp_path / "state"), load_file(tmp_path / "file")):
        assert all(torch.equal(v, twin.state_dict()[n]) for n, v in saved.items())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    model.load_state_dict(model.state_dict())
    assert packed(model) == {*buffers(model)}
    for other in (model, *copies):
        assert same(other, twin)
    del state, again, kept, file, copies, other
    gc.collect()
    placement: Any = placement_of(model)
    placement.store.sync_external_writes()  # as the next call does
    assert without_name() == before and all(held(b.host) == 0 for b in buffers(model).values())
    for change in (
        (drive, "_file_system", lambda folder: "tmpfs"),
        (drive.shutil, "disk_usage", lambda folder: os.statvfs(tmp_path / "gone")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            state = model.state_dict()
            assert all(torch.equal(v, twin.state_dict()[n]) for n, v in state.items())
            assert Path("/proc/self/maps").read_text().count("memfd:chunkflow-state") == len(packed(model))
            del state
            placement.store.sync_external_writes()
            assert without_name() == before


def test_code_of_another_compiler_writes_it() -> None:
    """Past every op: it is raw from then on.  A trace with fake tensors does not change it."""
    model, twin = pair()
    before = packed(model)
    write = torch.compile(lambda w: w[1:3].mul_(2), backend="aot_eager")
    for m in (model, twin):
        write(m.get_parameter(NAME).detach())
        assert m.get_parameter(NAME).sum() != 0
    assert same(model, twin) and packed(model) == before - {NAME}
    read = torch.compile(lambda w: w.sum() * 2, backend="aot_eager")
    assert torch.equal(*(read(m.get_parameter(OTHER)) for m in (model, twin)))


def test_threads_read_while_it_is_written() -> None:
    model, twin = pair()
    weight, values = model.get_parameter(NAME), twin.get_parameter(NAME)
    sums = {float((values * factor).sum()) for factor in (1, 2)}
    seen: list[float] = []
    stop = threading.Event()

    def read() -> None:
        with torch.no_grad():
            while not stop.is_set():
                seen.append(float(weight.sum()))

    thread = threading.Thread(target=read)
    thread.start()
    while len(seen) < 20:
        weight.copy_(values * 2)
        weight.copy_(values)
    stop.set()
    thread.join()
    assert len(seen) >= 20 and {*seen} & sums
    assert same(model, twin)


@pytest.mark.parametrize("how", ["interrupted", "too many escape", "a fork"])
def test_bytes_that_are_half_written_are_not_read(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread that has waited for the lock meanwhile, and by a child that is forked then: the pages have the values."""
    model, twin = pair()
    weight, values, backing = model.get_parameter(NAME), twin.get_parameter(NAME), buffers(model)[NAME].backing
    packing, over = threading.Event(), threading.Event()
    pack, readers = packed_weights.pack_into, list[threading.Thread]()
    found = list[torch.Tensor]()
    assert isinstance(backing, Packed)

    def packs(memory: torch.Tensor, *args: Any) -> bool:
        memory[: len(memory) // 2].bitwise_not_()
        readers.append(threading.Thread(target=lambda: found.append(backing.read(NAME))))
        readers[-1].start()
        if how == "interrupted":
            raise KeyboardInterrupt
        packing.set()
        if how == "a fork":
            over.wait()
        return how == "a fork" and pack(memory, *args)

    monkeypatch.setattr(packed_weights, "pack_into", packs)
    values.mul_(2)
    if how == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            weight.mul_(2)
    elif how == "a fork":
        thread = threading.Thread(target=torch.no_grad()(lambda: weight.mul_(2)))
        thread.start()
        packing.wait()
        try:
            assert in_a_child(lambda: torch.equal(weight.clone(), values) and same(model, twin))
        finally:
            over.set()
            thread.join()
    else:
        weight.mul_(2)
    for reader in readers:
        reader.join()
    assert len(found) == 1 and torch.equal(found[0], values) and same(model, twin)
    assert buffers(model)[NAME].compressed == (how == "a fork")


@pytest.mark.parametrize("pack", [False, True])
def test_a_process_forks_while_a_thread_holds_a_weight(pack: bool) -> None:
    """The child reads, writes and saves it: a lock that another thread has held is no lock of the child's."""
    model, twin = pair(pack)
    buffer = buffers(model)[NAME]
    locks = [buffer._lock, buffer._writing, *([buffer.backing._lock] if isinstance(buffer.backing, Packed) else ())]
    held, over = threading.Event(), threading.Event()

    def holds() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock())
            held.set()
            over.wait()

    def works() -> bool:
        for m in (model, twin):
            m.get_parameter(NAME).mul_(2)
            m.state_dict()[NAME][1].zero_()
        return same(model, twin) and torch.equal(copy.deepcopy(model).state_dict()[NAME], twin.state_dict()[NAME])

    thread = threading.Thread(target=holds)
    thread.start()
    held.wait()
    try:
        assert in_a_child(works)
    finally:
        over.set()
        thread.join()
    assert len(locks) == 2 + pack and same(model, twin)


def test_a_process_forks_in_the_middle_of_a_write() -> None:
    """The child has the values from before, and its writes are its own."""
    model, twin = pair()
    buffer = buffers(model)[NAME]
    opened, over = threading.Event(), threading.Event()

    def writes() -> None:
        with buffer.write():
            buffer.host[3] = 5
            opened.set()
            over.wait()

    def works() -> bool:
        right = same(model, twin)
        for m in (model, twin):
            m.get_parameter(NAME)[0].mul_(2)
            m.state_dict()[NAME][1].mul_(2)
        return right and same(model, twin) and buffer.compressed

    thread = threading.Thread(target=writes)
    thread.start()
    opened.wait()
    try:
        assert in_a_child(works)
    finally:
        over.set()
        thread.join()
    twin.get_parameter(NAME)[3] = 5
    assert same(model, twin) and buffer.compressed


# What threads do to weights that have outlived their model, each with a row of its own.
ALONE: dict[str, Callable[[list[Any], int, int], Any]] = {
    "rows": lambda weights, row, value: [w[row].fill_(value) for w in weights],
    "in one op": lambda weights, row, value: torch._foreach_mul_([w[row] for w in weights[:: 1 - 2 * (row % 2)]], 1.5),
    "reads": lambda weights, row, value: (weights[0][row].fill_(value), weights[1].sum(), copy.deepcopy(weights[0])),
    "saves": lambda weights, row, value: (pickle.dumps(weights[row % 2]), weights[row % 2][row].mul_(-1)),
}


@pytest.mark.parametrize("what", ALONE)
def test_threads_write_weights_that_have_outlived_their_model(what: str) -> None:
    model, twin = twins(lambda: Stack(width=256).to(BF16).requires_grad_(False))
    offload(model, min_bytes=LEAST, pack=True)
    kept, plain = ([m.get_parameter(n) for n in (NAME, "blocks.1.up.weight")] for m in (model, twin))
    errors = list[Exception]()
    assert packed(model)
    del model
    gc.collect()

    def work(weights: list[Any], row: int) -> None:
        try:
            with torch.no_grad():
                for value in range(1, 40):
                    ALONE[what](weights, row, value / 8)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=work, args=(kept, row)) for row in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row in range(4):
        work(plain, row)
    assert not errors and all(torch.equal(w, p) for w, p in zip(kept, plain, strict=True))


def test_a_write_waits_for_that_of_another_thread() -> None:
    """Else the first one closes the pages under the second one."""
    model, twin = pair()
    buffer, (weight, values) = buffers(model)[NAME], (m.get_parameter(NAME) for m in (model, twin))
    del model
    gc.collect()
    begun, entered = threading.Event(), threading.Event()

    def second() -> None:
        begun.set()
        with buffer.write():
            entered.set()
            buffer.host[1] = 2

    thread = threading.Thread(target=second)
    with buffer.write():
        thread.start()
        begun.wait()
        assert not entered.wait(0.1)
        buffer.host[0] = 2
    thread.join()
    values[:2] = 2
    assert entered.is_set() and torch.equal(weight, values) and buffer.compressed and held(buffer.host) == 0


def test_a_small_model_is_saved_as_it_was(tmp_path: Path) -> None:
    model, twin = (small_model("wan", Size()).to(BF16) for _ in range(2))
    offload(model, min_bytes=LEAST, pack=True)
    assert packed(model)
    model.save_pretrained(tmp_path)
    found = load_file(tmp_path / "diffusion_pytorch_model.safetensors")
    assert found.keys() == twin.state_dict().keys() and all(
        torch.equal(found[n], v) for n, v in twin.state_dict().items()
    )
    assert isinstance(buffer_of(next(p for p in model.parameters() if isinstance(p, HostWeight))), HostBuffer)
