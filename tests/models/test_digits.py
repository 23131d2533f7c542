"""The digits of ``make demo``: readable, drawn twice with the same bytes, and one sentence for each cause of failure."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from conftest import HERE

import chunkflow_compile

pytest.importorskip("diffusers")
FOLDER = HERE.parent / "examples" / "digits"
MODEL = FOLDER / "model"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script draw.py, beside which train.py can be imported too."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = {*sys.modules}
    import draw

    yield draw
    for name in {"draw", "train", "digits"} - before:
        sys.modules.pop(name, None)


def ends(draw: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The sentence with which draw.py ends; its exit status is 1."""
    monkeypatch.setattr(sys, "argv", ["draw.py", *arguments])
    with pytest.raises(SystemExit) as end:
        draw.main()
    said = str(end.value)
    assert said.startswith("draw.py") and "\n" not in said
    return said


def test_streamed_weights_draw_the_same_bytes_and_each_digit_is_readable(draw: ModuleType) -> None:
    drawings = [way(draw.load(MODEL), "cpu") for way in (draw.plain, draw.streamed)]
    baseline, mine = drawings
    assert baseline.weights > 3 * mine.weights and not baseline.moved
    assert mine.moved > 0.9 * baseline.weights, "most weights are copied in each step"
    assert mine.is_same(baseline) and baseline.images.unique(dim=0).shape == (10, 8, 8)
    rows = [*draw.picture(drawings).convert("L").getdata()]
    assert min(rows) < 32 and max(rows) == 255
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    known = load_digits()
    distances = torch.cdist(16 * baseline.images.flatten(1), torch.tensor(known.data, dtype=torch.float32))
    nearest = torch.tensor(known.target)[distances.topk(5, largest=False).indices].mode(dim=1).values
    assert nearest.tolist() == [*range(10)], "the digits of people that are most like each one"


@pytest.mark.long
def test_a_small_budget_is_kept_on_a_cpu_too(draw: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    pipe = draw.load(MODEL)
    chunkflow_compile.compile(pipe, device="cpu", memory="600KiB", lowering="eager", **draw.SMALL)
    for _ in range(4):
        pipe(range(2), num_inference_steps=2, output_type="pt")
    assert "took more than the budget" not in caplog.text


def _drawings(draw: ModuleType, gpu: bool) -> list[Any]:
    """What the ways might have drawn on a CPU or a GPU."""
    images = torch.rand(10, 8, 8)
    peak: dict[str, Any] = {"step_s": 0.123, "peak": 1023 << 20} if gpu else {}
    baseline = draw.Drawing(name="baseline", images=images, weights=1023 << 10, **peak)
    offload = draw.Drawing(name="group offload", images=images.clone(), moved=None, **peak)
    mine = draw.Drawing(name="ChunkFlow", images=images.clone(), weights=1023 << 9, moved=1023 << 8, **peak)
    return [baseline, offload, mine] if gpu else [baseline, mine]


@pytest.mark.parametrize("gpu", [False, True])
def test_the_report_fits_80_columns_and_explains_after_the_figures(draw: ModuleType, gpu: bool) -> None:
    shown = draw.report(_drawings(draw, gpu), Path("digits.png"))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    table, meaning = shown.split("\n\n")[1:]
    assert len(table.splitlines()) == (5 if gpu else 4) and meaning.startswith("The picture is digits.png")
    assert "511.5 KiB" in table or gpu
    assert ("123.0 ms" in table and "1023.0 MiB" in table) == gpu
    assert table.count("identical") == (2 if gpu else 1) and "kept 50 % of the weights" in " ".join(meaning.split())


def test_it_fails_if_an_image_differs_or_no_weight_moves(
    draw: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, (baseline, mine) = str(tmp_path / "digits.png"), _drawings(draw, gpu=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(draw, "load", lambda folder: folder)
    monkeypatch.setattr(draw, "plain", lambda pipe, device: baseline)
    monkeypatch.setattr(draw, "streamed", lambda pipe, device: mine)
    monkeypatch.setattr(sys, "argv", ["draw.py", "--out", out])
    draw.main()
    assert "identical" in capsys.readouterr().out and Path(out).read_bytes().startswith(b"\x89PNG")
    mine.images[3, 4, 5] = torch.nextafter(mine.images[3, 4, 5], torch.tensor(2.0))
    assert "the images differ" in ends(draw, monkeypatch, "--out", out)
    assert "DIFFERENT" in capsys.readouterr().out
    mine = draw.Drawing(name="ChunkFlow", images=baseline.images, weights=1, moved=0)
    assert "no weight was streamed" in ends(draw, monkeypatch, "--out", out)


def test_bad_files_end_it_with_one_sentence_without_the_network(
    draw: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it asks the network"))
    good = (MODEL / WEIGHTS).read_bytes()

    def damaged(name: str, content: bytes | None) -> str:
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(MODEL, folder)
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        return ends(draw, monkeypatch, "--model", str(folder), "--out", str(tmp_path / "digits.png"))

    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 2600752\n"
    bad = {WEIGHTS: [None, b"", good[:-7], pointer], "model_index.json": [None, b"{"]}
    bad |= {"transformer/config.json": [None, b"[]"], "scheduler/scheduler_config.json": [b"}"]}
    for name, contents in bad.items():
        for content in contents:
            said = damaged(name, content)
            assert f"cannot load the model in {tmp_path}/model: " in said and "examples/digits/train.py" in said, said
            assert len(said.replace(str(tmp_path), "")) < 500
    assert "/nowhere: it has no model_index.json" in ends(draw, monkeypatch, "--model", "/nowhere", "--out", "d.png")
    assert "cannot be written to /nowhere/d.png" in ends(draw, monkeypatch, "--out", "/nowhere/d.png")


def test_the_training_writes_a_model_that_loads_and_its_loss(
    draw: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in ("sklearn", "matplotlib"):
        pytest.importorskip(package)
    import train

    monkeypatch.setattr(train, "EVERY", 2)
    monkeypatch.setattr(train, "BATCH", 4)
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "4", "--out", str(tmp_path / "new")])
    train.main()
    torch.set_num_threads(threads)
    assert [line.split(",")[0] for line in (tmp_path / "new" / "loss.csv").read_text().splitlines()] == [
        "step",
        "2",
        "4",
    ]
    assert (tmp_path / "new" / "loss.png").stat().st_size > 1000
    trained, committed = (draw.load(folder).transformer for folder in (tmp_path / "new" / "model", MODEL))
    assert {n: (v.shape, v.dtype) for n, v in trained.state_dict().items()} == {
        n: (v.shape, torch.bfloat16) for n, v in committed.state_dict().items()
    }
    with pytest.raises(SystemExit, match=r"train\.py cannot write to /proc/nowhere"):
        monkeypatch.setattr(sys, "argv", ["train.py", "--out", "/proc/nowhere"])
        train.main()


def test_what_is_committed_is_small_and_whole() -> None:
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) <= 3_000_000
    steps = [int(line.split(",")[0]) for line in (FOLDER / "loss.csv").read_text().splitlines()[1:]]
    assert steps[-1] == 4000 and (FOLDER / "loss.png").exists() and (HERE.parent / "docs" / "digits.png").exists()


def test_the_pipeline_returns_pictures_in_grayscale(draw: ModuleType) -> None:
    (seven,) = draw.load(MODEL)([7], num_inference_steps=1).images
    assert (seven.mode, seven.size) == ("L", (8, 8))


@pytest.mark.parametrize("digits", [[], [10], [-1], ["1"]])
def test_the_pipeline_refuses_what_is_no_digit(draw: ModuleType, digits: list[Any]) -> None:
    from digits import DigitsPipeline

    with pytest.raises(ValueError, match="digits must be one or more integers from 0 to 9"):
        DigitsPipeline.__call__(None, digits)
