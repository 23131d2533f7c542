"""Weights that lie in a checkpoint: read from it into pages of their own, and cast on the way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from helpers import anonymous_bytes
from test_killed_ranks import run_all
from torch import nn

from chunkflow_compile import ChunkflowError, offload, restore
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.placed.offload import cast_to
from chunkflow_compile.weights import checkpoint
from chunkflow_compile.weights.checkpoint import CheckpointReader, Mappings
from chunkflow_compile.weights.host_memory import give_free_memory_back
from chunkflow_compile.weights.loader import WeightLoader, keep_dtype

SIZE = Size(layers=1)
CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    small_model("wan", SIZE).save_pretrained(tmp_path / "wan")  # type: ignore[operator]
    return tmp_path / "wan"


def loaded(folder: Path, **options: object) -> nn.Module:
    model: nn.Module = diffusers.WanTransformer3DModel.from_pretrained(folder, **options)
    return model


def the_file(folder: Path) -> Path:
    (found,) = folder.glob("*.safetensors")
    return found


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_read_from_its_file(
    saved: Path, direct: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "BLOCK", 4096 * 3)  # several blocks a weight, ends in the middle of a page
    model = loaded(saved)
    mappings, reader = Mappings(), CheckpointReader(direct)
    for values in model.parameters():
        part = mappings.part(values.detach())
        assert part is not None and part.file.name.endswith(f" {the_file(saved)}") and part.nbytes == values.nbytes
        made = torch.full_like(values, 7, dtype=dtype)
        reader.read(part, made, values.dtype)
        assert torch.equal(made, values.detach().to(dtype))
    reader.close()


def test_a_weight_that_was_written_is_no_part_of_its_file(saved: Path) -> None:
    model = loaded(saved)
    weight = model.blocks[0].ffn.net[0].proj.weight  # type: ignore[index,union-attr]
    assert Mappings().part(weight.detach()) is not None
    with torch.no_grad():
        weight[0, 0] = 3  # type: ignore[index]
    assert Mappings().part(weight.detach()) is None
    assert Mappings().part(torch.randn(2048)) is None
    loader = WeightLoader(CPU, [("weight", weight)], keep_dtype, pages=True)
    assert torch.equal(loader.place("weight", weight).host, weight.detach())
    loader.close()


def test_a_file_system_whose_mappings_have_other_numbers(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on btrfs, and on overlayfs under old kernels: a mapping has another device number than its file has by stat."""
    found = checkpoint._mapped

    def elsewhere() -> Iterator[Any]:
        return (replace(m, inode=(m.inode[0] + 7, m.inode[1])) for m in found())

    monkeypatch.setattr(checkpoint, "_mapped", elsewhere)
    model = loaded(saved)
    part = Mappings().part(next(model.parameters()).detach())
    told = the_file(saved).stat()
    assert part is not None and part.file.stamp == ((told.st_dev, told.st_ino), told.st_mtime_ns)
    assert part.file.name == f"the checkpoint {the_file(saved)}"
    other = tmp_path / "other"
    other.write_bytes(the_file(saved).read_bytes())
    other.replace(the_file(saved))
    assert Mappings().part(next(model.parameters()).detach()) is None, "another file stands there now"


def test_a_checkpoint_that_was_replaced_is_copied_from_the_mapping(saved: Path, tmp_path: Path) -> None:
    model = loaded(saved)
    expected = {name: p.detach().clone() for name, p in loaded(saved).named_parameters()}
    other = tmp_path / "other"
    other.write_bytes(os.urandom(the_file(saved).stat().st_size))
    other.replace(the_file(saved))
    offload(model, min_bytes=256, dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        assert torch.equal(p.to(torch.float32), expected[name].to(p.dtype).to(torch.float32))


def test_a_checkpoint_that_was_cut(saved: Path) -> None:
    model = loaded(saved)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    size = the_file(saved).stat().st_size
    os.truncate(the_file(saved), size // 2)
    with pytest.raises(
        ChunkflowError, match=rf"was cut to {size // 2} bytes after it was loaded.*load the model again"
    ):
        offload(model, min_bytes=256, dtype=torch.bfloat16)
    assert len(values) == len(list(model.parameters())), "the model is there; its values are lost with the file"


def test_a_drive_that_fails(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(5, "Input/output error")

    model = loaded(saved)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(
        ChunkflowError, match=r"cannot be read at byte \d+: Input/output error. Check the drive"
    ) as failed:
        offload(model, min_bytes=256, dtype=torch.bfloat16)
    assert failed.tb and not [t for t in threading.enumerate() if t.name.startswith("chunkflow-read")]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    monkeypatch.undo()
    offload(model, min_bytes=256, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}


def test_a_cast_is_that_of_diffusers(saved: Path) -> None:
    expected = loaded(saved, torch_dtype=torch.bfloat16)
    model = offload(loaded(saved), min_bytes=1024, dtype=torch.bfloat16)
    inputs = small_inputs("wan", SIZE, 0)
    half = {k: v.to(torch.bfloat16) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    with torch.no_grad():
        run = torch.compile(model, backend="chunkflow", options={"lowering": "eager", "min_bytes": 1024})
        assert torch.equal(run(**half)[0], expected(**half)[0])
    restore(model)
    found = dict(model.named_parameters())
    for name, p in expected.named_parameters():
        assert found[name].dtype == p.dtype and torch.equal(found[name], p), name
    assert {p.dtype for p in found.values()} == {torch.bfloat16, torch.float32}, "norms stay in float32"
    with pytest.raises(ChunkflowError, match=r"not to torch\.int8; for less, quantise the model"):
        offload(model, dtype=torch.int8)


def placed_one_by_one(rank: int, folder: Path, dtype: torch.dtype) -> None:
    """Notes the most memory that was taken meanwhile, and what is kept, as parts of the weights."""
    model = loaded(folder)
    weights = dict(model.named_parameters())
    torch.zeros(1 << 20).to(torch.bfloat16)  # first use of torch
    before, most, made = anonymous_bytes(), 0, list[torch.Tensor]()
    loader = WeightLoader(CPU, list(weights.items()), cast_to(dtype, model), pages=True)
    for name, weight in weights.items():
        made.append(loader.place(name, weight).host)
        most = max(most, anonymous_bytes() - before)
    loader.close()
    give_free_memory_back()
    total = sum(host.nbytes for host in made)
    (folder / "parts").write_text(f"{most / total} {(anonymous_bytes() - before) / total}")


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
def test_memory_while_placing(tmp_path: Path, dtype: torch.dtype) -> None:
    small_model("wan", Size(layers=6, heads=8, head_dim=128, text=64)).save_pretrained(tmp_path)  # type: ignore[operator]
    assert run_all(placed_one_by_one, tmp_path, dtype, ranks=1) == [0]
    most, kept = map(float, (tmp_path / "parts").read_text().split())
    assert 0.9 < kept <= most <= 1.05 + 40 / 300, (most, kept)  # the buffers of four threads are 32 MiB


@pytest.mark.parametrize("host_memory", [None, 0])
def test_a_file_that_is_deleted_or_replaced_before_it_is_opened(
    saved: Path, host_memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was found among the mappings of the process."""
    file, plain = the_file(saved), WeightLoader.place
    for change in ("delete", "replace"):
        model = loaded(saved)
        told = file.stat()
        copy = file.read_bytes()

        def place(self: WeightLoader, *args: Any, change: str = change, copy: bytes = copy, told: Any = told) -> Any:
            file.unlink(missing_ok=True)
            if change == "replace":
                file.write_bytes(copy)
                os.utime(file, ns=(told.st_mtime_ns, told.st_mtime_ns))
            return plain(self, *args)

        with (
            monkeypatch.context() as patch,
            pytest.raises(ChunkflowError, match=r"The checkpoint .* (cannot|was changed)"),
        ):
            patch.setattr(WeightLoader, "place", place)
            offload(model, min_bytes=1024, host_memory=host_memory, dtype=None if host_memory == 0 else torch.bfloat16)
        file.unlink(missing_ok=True)
        file.write_bytes(copy)
