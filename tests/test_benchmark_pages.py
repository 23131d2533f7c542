"""The benchmark pages that a script writes from saved figures: none is stale, and missing figures are one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import contention
import paper
import published
import pytest
import several_gpus
from runs import errors_in_a_sentence

FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"


def of_contention() -> str:
    records = {name: json.loads((FOLDER / f"contention_{name}.json").read_text()) for name in contention.SHOWN}
    return contention.page(records)


PAGES: dict[str, Callable[[], str]] = {
    "contention": of_contention,
    "paper": lambda: paper.document(json.loads((FOLDER / "paper.json").read_text())),
    "published": lambda: published.page(published.read(published.ROWS)),
    "several_gpus": lambda: several_gpus.page(json.loads((FOLDER / "several_gpus.json").read_text())),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_figures_say(name: str) -> None:
    """If it is stale: docs/benchmarks/NAME.py --page-only --out docs/benchmarks/NAME.md."""
    assert PAGES[name]() == (FOLDER / f"{name}.md").read_text()


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """The sentence with which a script ends."""
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments])
    with pytest.raises(SystemExit) as ended, errors_in_a_sentence():
        script.main()
    return str(ended.value)


@pytest.mark.parametrize(
    ("script", "target"), [(contention, "contention"), (paper, "paper"), (several_gpus, "several-gpus")]
)
def test_missing_or_corrupt_figures_are_one_sentence(
    script: ModuleType, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    call = (script, monkeypatch, "--page-only", "--out", str(page))
    file = tmp_path / ("page_compute-rich.json" if script is contention else "page.json")
    assert run(*call) == f"{file} cannot be read (No such file or directory): make {target} writes it."
    file.write_text("{")
    assert run(*call).startswith(f"{file} is not valid JSON (") and not page.exists()


def test_rows_that_are_missing_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = run(published, monkeypatch, "--page-only", "--out", str(tmp_path / "page.md"), "--rows", "none.csv")
    assert said.startswith("none.csv cannot be read (No such file or directory): give --rows a file like")


@pytest.mark.parametrize("script", [contention, paper, published, several_gpus])
def test_a_script_without_matplotlib_ends_with_one_sentence(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in FOLDER.glob(f"{script.__name__}*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = tmp_path / f"{script.__name__}.md"
    assert run(script, monkeypatch, "--page-only", "--out", str(page)).startswith("A picture needs matplotlib")
    assert not page.exists()
