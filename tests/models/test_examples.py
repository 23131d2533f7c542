"""The examples of the guide: short, and with ``--tiny`` they run anywhere; what they lack they say in one sentence."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import needs
import pytest
from conftest import HERE
from helpers import run_python

FOLDER = HERE.parent / "examples"
SAVED = {
    "flux": ["flux_0.png", "flux_1.png"],
    "wan": ["wan.gif"],
    "qwen_image_edit": ["edited.png"],
    "quantised_lora": ["lora.png", "plain.png"],
}
# The packages of each example that a user may not have, and numbers of processes that it does not run with.
LACKS: dict[str, tuple[list[str], list[int]]] = {
    "flux": (["diffusers", "transformers"], [2]),
    "wan": (["diffusers", "transformers"], [3]),
    "qwen_image_edit": (["diffusers", "transformers"], [2]),
    "quantised_lora": (["diffusers", "transformers", "torchao", "peft"], [2]),
    "diffusers_wan": (["diffusers"], [3, 16]),
    "ulysses_dit": ([], [1, 3]),
    "serve_ray": (["ray"], []),
    "digits/draw": (["diffusers"], [2]),
    "digits/train": (["diffusers", "sklearn", "matplotlib"], [2]),
}


def ended(name: str, monkeypatch: pytest.MonkeyPatch, ranks: int | None = None, tiny: bool = True) -> str:
    """The sentence with which an example ends at its start."""
    example = FOLDER / f"{name}.py"
    arguments = ["--tiny"] if tiny and name in SAVED else []
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(example), run_name="__main__")
    said = str(end.value)
    assert said.startswith(f"{example.name} ") and "\n" not in said
    return said


@pytest.mark.parametrize("name", LACKS)
def test_an_example_says_what_it_lacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it loads or compiles anything."""
    packages, wrong = LACKS[name]
    for package in packages:
        with monkeypatch.context() as patch:
            patch.setattr(needs, "find_spec", lambda asked, gone=package: None if asked == gone else find_spec(asked))
            patch.setitem(sys.modules, package, None)
            assert ended(name, patch).startswith(f"{Path(name).name}.py needs {package}: pip install ")
    with monkeypatch.context() as patch:
        patch.setattr(needs, "find_spec", lambda _: object())
        for ranks in wrong:
            said = ended(name, patch, ranks)
            assert "process" in said and (str(ranks) in said or "at least 2 processes: torchrun" in said), said
    if "ulysses_dit" in name:
        assert "torchrun --nproc-per-node 2 examples/ulysses_dit.py" in ended(name, monkeypatch)


def test_every_example_is_listed() -> None:
    """In the table of the examples, and here."""
    files = {path.relative_to(FOLDER).with_suffix(""): path.read_text() for path in FOLDER.rglob("*.py")}
    programs = {str(name) for name, text in files.items() if "__main__" in text}
    assert programs == set(LACKS)
    page = (FOLDER / "README.md").read_text()
    assert all(f"`{path.name}`" in page for path in FOLDER.glob("*.py"))


@pytest.mark.long
@pytest.mark.parametrize("name", SAVED)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    for module in ("diffusers", "transformers", *(("torchao", "peft") if name == "quantised_lora" else ())):
        pytest.importorskip(module)
    example = FOLDER / f"{name}.py"
    assert len(example.read_text().splitlines()) < 64, "it is short"
    done = run_python(str(example), "--tiny", folder=tmp_path, CHUNKFLOW_PROGRESS="0")  # where it saves its pictures
    assert done.returncode == 0, done.stderr[-2000:]
    assert "for a call of transformer" in done.stdout and "to go faster:" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == SAVED[name]
