"""New values of a weight in its checkpoint that no op on it has written: through a tensor that ``state_dict`` has made, or
as another tensor."""

from __future__ import annotations

import copy
import os
import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers import Tabled, in_memory, load_stack
from test_drive import LEAST, OPTIONS, buffers, saved, steps, touch
from torch import nn

from chunkflow_compile import ChunkflowError, offload

__all__ = ["saved"]

NAME = "blocks.1.up.weight"

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("what", ["mul_", "load", "copy_", "state", "deepcopy", "restore", "pickle", "tolist"])
def test_the_file_changes_after_the_write(saved: Path, what: str) -> None:
    """The pages that were not written are still the file's."""
    model = load_stack(str(saved))
    offload(model, min_bytes=LEAST, host_memory=0)
    model.state_dict()[NAME].view(-1)[:2].fill_(3)
    with open(saved, "r+b") as changed:
        changed.seek(-4096, os.SEEK_END)
        changed.write(b"\1" * 4096)
    with pytest.raises((ChunkflowError, RuntimeError), match="was changed while its weights were read"):
        touch(what, model, NAME)


@pytest.mark.parametrize("by", ["an op", "a step"])
def test_what_notices_the_write_takes_the_weight_from_the_file(saved: Path, by: str) -> None:
    model, twin = load_stack(str(saved)), in_memory(load_stack(str(saved)))
    offload(model, min_bytes=LEAST, host_memory=0)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
    steps(run, twin)
    weight, buffer = model.get_parameter(NAME), buffers(model)[NAME]
    for m in (model, twin):
        m.state_dict()[NAME].view(-1)[:2].fill_(3)
    with pytest.warns(
        UserWarning, match=rf"{NAME} is written, .* the weights take {weight.nbytes} bytes of host memory now"
    ):
        if by == "an op":
            for m in (model, twin):
                m.get_parameter(NAME).add_(1)
        steps(run, twin, seed=1)
    expected = twin.get_parameter(NAME).clone()
    assert buffer.drive is None and not of_a_file(buffer.host.data_ptr() + buffer.nbytes // 2)
    with open(saved, "r+b") as changed:
        changed.write(b"\1" * saved.stat().st_size)
    assert torch.equal(weight.detach().clone(), expected)


@pytest.mark.parametrize("how", ["assign", pytest.param("parameter", marks=pytest.mark.long)])
def test_new_weights_beyond_host_memory_are_told_once(saved: Path, how: str) -> None:
    model, twin = load_stack(str(saved)), in_memory(load_stack(str(saved)))
    offload(model, min_bytes=LEAST, host_memory=0)
    run = torch.compile(model, backend="chunkflow", fullgraph=True, options=OPTIONS)
    steps(run, twin)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for factor in (2, 3):
            made = factor * twin.get_parameter(NAME)
            for m in (model, twin):
                if how == "assign":
                    m.load_state_dict({NAME: made.clone()}, assign=True, strict=False)
                else:
                    m.get_submodule(NAME.removesuffix(".weight")).weight = nn.Parameter(made.clone())
            steps(run, twin, seed=factor)
    said = [str(w.message) for w in told if "host_memory" in str(w.message)]
    expected = (
        "got other memory, as by .* is no longer"
        if how == "assign"
        else "came after .* the weights take 32768 bytes of host"
    )
    assert len(said) == 1 and re.search(f"{NAME} {expected}", said[0]), said


def test_a_child_writes_no_weight_of_its_parent() -> None:
    """Both have the scratch file."""
    model = Tabled().requires_grad_(False)
    twin = copy.deepcopy(model)
    offload(model, min_bytes=LEAST, host_memory=0)
    child = os.fork()
    if not child:
        code = 1
        try:
            model.state_dict()[NAME.replace("1", "2")].zero_()
            model.get_parameter(NAME).mul_(2)
            assert torch.equal(model.get_parameter(NAME), 2 * twin.get_parameter(NAME))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def of_a_file(address: int) -> bool:
    """Whether this process maps a file there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(None, 5)
        begin, end = (int(x, 16) for x in fields[0].split("-"))
        if begin <= address < end:
            return fields[4] != "0"
    raise AssertionError("nothing is mapped there")
