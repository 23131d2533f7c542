"""A ``state_dict()`` is the memory of the model: what writes it, by whatever way, writes the model, packed or not, and a
write to the model is seen in it.  Beside each model stands a plain twin that gets the same writes."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Stack, in_memory, load_stack, save_stack
from safetensors.torch import load, load_file, save, save_file
from test_drive import LEAST, OPTIONS, buffers, full, same
from test_killed_ranks import without_name
from test_packed import heavy, held, packed
from torch import nn

from chunkflow_compile import offload, programs, restore
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights import mapping
from chunkflow_compile.weights.backing import Where

NAME, OTHER = "blocks.0.up.weight", "blocks.1.down.weight"
BF16 = torch.bfloat16
# Where the values are: what ``offload`` is given.
PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "packed": {"pack": True},
    "drive": {"host_memory": 0},
    "packed on the drive": {"pack": True, "host_memory": 0},
}


def from_a_thread(tensor: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: array(tensor).__setitem__(slice(5, 9), 16000))
    thread.start()
    thread.join()


def array(tensor: torch.Tensor) -> Any:
    """The bits of a tensor as an array, whose writes nothing counts."""
    return tensor.view(torch.int16).numpy()


# Writes to a tensor of a state_dict.
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "data": lambda v: v.data.mul_(0.5),
    "counted": lambda v: v.mul_(2),
    "array": lambda v: array(v).__setitem__(3, 16256),
    "one value": lambda v: array(v).__setitem__((-1, -1), 16256),
    "from_numpy": lambda v: torch.from_numpy(array(v))[1:3].fill_(16128),
    "frombuffer": lambda v: torch.frombuffer(memoryview(array(v)), dtype=BF16)[:70].neg_(),
    "pointer": lambda v: ctypes.memset(v.data_ptr() + 64, 62, 99),
    "storage": lambda v: v.untyped_storage().__setitem__(7, 3),
    "DLPack": lambda v: torch.from_dlpack(v)[-1].neg_(),
    "another state": lambda v: v.detach().view(torch.uint8)[0, ::2].bitwise_xor_(1),
    "thread": from_a_thread,
    "set": lambda v: torch.empty(0, dtype=BF16).set_(v.untyped_storage(), 8, (9,), (3,)).fill_(0.25),
}

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore:Tensors of a state_dict"),
    pytest.mark.filterwarnings("ignore:.*in host memory now, more than host_memory"),
]


def make() -> nn.Module:
    torch.manual_seed(0)
    return Stack(width=64).eval().to(BF16).requires_grad_(False)


class Pair:
    """A model at a place, compiled, and its twin."""

    def __init__(self, place: str, policy: str = "layerwise") -> None:
        self.twin = make()
        self.model = offload(make(), min_bytes=LEAST, **PLACES[place])
        options = {**OPTIONS, "policy": policy}
        self.run = torch.compile(self.model, backend="chunkflow", fullgraph=True, options=options)
        self.both = (self.model, self.twin)

    def step(self, what: object = "") -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(BF16)
        assert torch.equal(self.run(x), self.twin(x)), what

    def equal(self, what: object = "") -> None:
        """Eager reads, a state_dict and a step."""
        expected = self.twin.state_dict()
        assert same(self.model, self.twin), what
        assert all(torch.equal(v, expected[n]) for n, v in self.model.state_dict().items()), what
        self.step(what)

    def streams(self) -> None:
        (program,) = programs(self.model)
        assert program.measurements[-1].moved_bytes == program.plan.moved_bytes > 0


@pytest.mark.parametrize("place", PLACES)
def test_a_write_to_it_is_a_write_to_the_model(place: str) -> None:
    """While it is kept, with and without a call between, and a write to the model is seen in it; then the same again."""
    pair = Pair(place)
    states = [m.state_dict() for m in pair.both]
    for what, write in WRITES.items():
        for called in (True, False):
            for state in states:
                write(state[NAME])
            if called:
                pair.step(what)
            for m in pair.both:
                m.get_parameter(NAME)[2:4].mul_(2 if called else 0.5)
            assert all(torch.equal(v, states[1][n]) for n, v in states[0].items()), what
            pair.equal(what)
    pair.streams()
    assert ("packed" in place) == (packed(pair.model) == {*buffers(pair.model)})
    if "packed" in place:
        del states, state
        gc.collect()
        pair.step()
        assert all(held(b.host) == 0 for b in buffers(pair.model).values()), "the pages are closed again"
        pair.equal()
    restore(pair.model)
    assert same(*pair.both)


# Each place with one policy; the other is long.
WITH_POLICIES = [
    pytest.param(place, policy, marks=[pytest.mark.long] * (("packed" in place) == (policy == "layerwise")))
    for place in PLACES
    for policy in ("layerwise", "resident")
]


@pytest.mark.parametrize(("place", "policy"), WITH_POLICIES)
def test_it_is_seen_by_the_first_step_and_the_next_ones(place: str, policy: str) -> None:
    """Also after a program has copied the weight for good, and of an array that has outlived its tensor."""
    pair = Pair(place, policy)
    for m in pair.both:
        array(m.state_dict()[NAME])[2] = 16256
    arrays = [array(m.state_dict()[OTHER]) for m in pair.both]
    for row in range(3):
        pair.step(row)
        for values in arrays:
            values[row] = 16256
        pair.step(row)
        gc.collect()
    pair.equal()
    del arrays, values
    pair.step()
    pair.equal()


# What is made of a model, and returns values that are compared.
SAVED: dict[str, Callable[[nn.Module, Path], dict[str, torch.Tensor]]] = {
    "safetensors": lambda m, path: (save_file(m.state_dict(), path), load_file(path))[1],
    "bytes": lambda m, path: load(save(m.state_dict())),
    "torch.save": lambda m, path: (torch.save(m.state_dict(), path), torch.load(path))[1],
    "the model": lambda m, path: (torch.save(m, path), torch.load(path, weights_only=False).state_dict())[1],
    "pickle": lambda m, path: pickle.loads(pickle.dumps(m)).state_dict(),
    "deepcopy": lambda m, path: copy.deepcopy(m).state_dict(),
    "parameters": lambda m, path: {n: p.detach().clone() for n, p in m.named_parameters()},
    "load": lambda m, path: (m.load_state_dict(m.state_dict()), m.state_dict())[1],
    "assign": lambda m, path: (m.load_state_dict(m.state_dict(), assign=True), m.state_dict())[1],
    "restored": lambda m, path: restore(m).state_dict(),
}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_saved_is_what_the_model_computes_with(place: str, tmp_path: Path) -> None:
    for what, saved in SAVED.items():
        pair = Pair(place)
        states = [m.state_dict() for m in pair.both]
        for write in (WRITES["array"], WRITES["data"]):
            if what == "restored" and write is WRITES["data"] and "drive" in place:
                continue  # a scratch file does not outlive the placement
            for state in states:
                write(state[NAME])
            found, expected = (saved(m, tmp_path / f"{what} {i}") for i, m in enumerate(pair.both))
            assert found.keys() == expected.keys(), what
            assert all(torch.equal(found[n], v) for n, v in expected.items()), what
        if what != "restored" or place != "drive":
            for state in states:
                write(state[OTHER])
            assert all(torch.equal(v, states[1][n]) for n, v in states[0].items()), what
            assert same(*pair.both), what


def test_a_copy_is_none_of_its_memory() -> None:
    pair = Pair("packed")
    states = [m.state_dict() for m in pair.both]
    copies = [copy.deepcopy(m) for m in pair.both]
    loaded = [pickle.loads(pickle.dumps(m)) for m in pair.both]
    read = [m.get_parameter(NAME).detach().cpu().clone() for m in pair.both]
    for state in states:
        array(state[NAME])[:] = 16256
    assert torch.equal(*read) and same(*copies) and same(*loaded)
    pair.equal()


def test_values_that_do_not_fit_are_raw_and_still_shared() -> None:
    pair = Pair("packed")
    states = [m.state_dict() for m in pair.both]
    files = without_name()
    for state in states:
        array(state[NAME])[:] = array(heavy(state[NAME]))
    pair.step()
    buffer = buffers(pair.model)[NAME]
    assert not buffer.compressed and buffer.backing.where is Where.OWN and without_name() < files
    for write in (WRITES["array"], WRITES["pointer"]):
        for state in states:
            write(state[NAME])
        pair.equal()
    assert packed(pair.model) == {*buffers(pair.model)} - {NAME}


def test_it_takes_no_memory_until_it_is_written() -> None:
    """One that only reads, as a save, is looked at in each call, and nothing is packed or copied again."""
    pair = Pair("packed", "resident")
    pair.step()
    buffer, state, twin = buffers(pair.model)[NAME], pair.model.state_dict(), pair.twin.state_dict()
    version = buffer.version
    assert all(torch.equal(v, twin[n]) for n, v in state.items())
    for _ in range(2):
        pair.step()
        assert buffer.version == version and mapping.written_pages(buffer.host.view(torch.uint8).flatten()) == []
    array(state[NAME])[0] = array(twin[NAME])[0] = 16256
    pair.step()
    assert buffer.version == (version := version + 1)
    assert mapping.written_pages(buffer.host.view(torch.uint8).flatten()) == [(0, mapping.PAGE)]
    pair.step()
    assert buffer.version == version, "a page that was written once has no other values now"


def test_where_the_kernel_does_not_tell_which_pages_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def pread(*_: Any) -> bytes:
        raise PermissionError

    monkeypatch.setattr(mapping.os, "pread", pread)
    for place in ("packed", "drive"):
        pair = Pair(place)
        states = [m.state_dict() for m in pair.both]
        for _ in range(2):
            pair.step()
            for state in states:
                array(state[NAME])[3] = 0
            pair.equal()
        pair.streams()


def test_weights_that_share_a_page_of_a_checkpoint(tmp_path: Path) -> None:
    """A write to one makes no other one leave the drive."""
    file = save_stack(tmp_path)
    model, twin = offload(load_stack(file), min_bytes=LEAST, host_memory=0), in_memory(load_stack(file))
    states, found = [m.state_dict() for m in (model, twin)], buffers(model)
    for state in states:
        state[NAME].numpy()[:] *= 0.5
    placement: Any = placement_of(model)
    placement.store.sync_external_writes()
    assert {n for n, b in found.items() if b.backing.where is not Where.FILE} == {NAME}
    assert same(model, twin)
    x = torch.randn(4, 8)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
    assert torch.equal(run(x)[0], twin(x)[0])
    assert {n for n, b in found.items() if b.backing.where is not Where.FILE} == {NAME} and found[
        NAME
    ].backing.where is Where.OWN


def test_without_memory_a_write_is_packed_all_the_same() -> None:
    pair = Pair("packed")
    states = [m.state_dict() for m in pair.both]
    pair.step()
    for state in states:
        array(state[NAME])[3] = 16256
    placement: Any = placement_of(pair.model)
    with full():
        placement.store.sync_external_writes()
        with pytest.raises(ChunkflowError, match="find no room in host memory"):
            pair.model.get_parameter(NAME).sum()
    pair.equal()


def test_a_child_that_is_forked_has_its_own() -> None:
    pair = Pair("packed")
    states = [m.state_dict() for m in pair.both]
    for state in states:
        array(state[NAME])[3] = 0
    if not (child := os.fork()):
        status = 1
        try:
            for state in states:
                array(state[NAME])[4] = 0
            placement: Any = placement_of(pair.model)
            placement.store.sync_external_writes()
            status = 2 * (not same(*pair.both))
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    pair.equal()


def test_threads_write_read_and_save_at_once() -> None:
    """Each thread writes a row of its own."""
    pair, threads, errors = Pair("packed"), list[threading.Thread](), list[Exception]()
    pair.step()

    def work(row: int) -> None:
        try:
            with torch.no_grad():
                for value in range(1, 9):
                    if row % 2:
                        array(pair.model.state_dict()[NAME])[row] = value
                        placement: Any = placement_of(pair.model)
                        placement.store.sync_external_writes()
                    else:
                        pair.model.get_parameter(NAME)[row].fill_(value)
                    io.BytesIO(save(pair.model.state_dict()))
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    for row in range(4):
        threads.append(threading.Thread(target=work, args=(row,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert not errors
    for row in range(4):
        if row % 2:
            array(pair.twin.state_dict()[NAME])[row] = 8
        else:
            pair.twin.get_parameter(NAME)[row].fill_(8)
    pair.equal()


@pytest.mark.parametrize("place", ["memory", "packed"])
def test_a_weight_for_the_cpu_is_an_ordinary_tensor_by_cpu(place: str, tmp_path: Path) -> None:
    """It has the weight's memory, as that of a twin has; a refusal names it, and it does what the refused call is for."""
    pair = Pair(place)
    weight, values = (m.get_parameter(NAME) for m in pair.both)
    for read in (
        lambda: save_file({NAME: weight}, tmp_path / "refused"),
        lambda: weight.data_ptr(),
        lambda: weight.storage(),
        lambda: torch.from_dlpack(weight),
        lambda: weight.share_memory_(),
    ):
        with pytest.raises(ChunkflowError, match=r"use weight.cpu\(\) or model.state_dict\(\), which return ordinary"):
            read()
    for what, change in {
        "detach": lambda p: p.detach().cpu(),
        "cpu": lambda p: p.cpu(),
        "row": lambda p: p[1].cpu(),
    }.items():
        save_file({n: change(p) for n, p in pair.model.named_parameters() if p.dim() > 1}, tmp_path / what)
        found = load_file(tmp_path / what)
        assert found and all(torch.equal(v, change(pair.twin.get_parameter(n))) for n, v in found.items()), what
    assert torch.equal(torch.from_dlpack(weight.cpu()), values)
    for p in (weight, values):
        array(p.cpu())[2] = 16256
        p.cpu()[3:5].mul_(2)
        p.data = p.cpu()  # the same memory
    pair.equal()
    pair.model.cpu()
    pair.model.to("cpu")
    assert ("packed" in place) == (packed(pair.model) == {*buffers(pair.model)}) and buffers(pair.model)
    with torch.enable_grad():
        for p in (weight, values):
            p.requires_grad_()
            (p.cpu() * 2).sum().backward()
    assert torch.equal(weight.grad, values.grad)  # type: ignore[arg-type]
    pair.equal()
