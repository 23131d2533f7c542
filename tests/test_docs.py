"""The documents: links resolve, the README stays short, every option and command is described."""

from __future__ import annotations

import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

from chunkflow_compile.cli.parsers import COMMANDS
from chunkflow_compile.options import ALIASES, Options

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Of the README: what a newcomer reads in a few minutes.
MOST_LINES, MOST_WORDS = 200, 1600
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose(page)))
    return {word.strip().replace(" ", "-") for word in words}


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of it."""
    found = []
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else page.parent / path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    assert not broken(page)


def test_the_tests_that_pages_name_exist() -> None:
    files = {str(path.relative_to(ROOT)): path for path in (ROOT / "tests").rglob("*.py")}
    known = {path.stem for path in files.values()}
    known.update(name for path in files.values() for name in re.findall(r"def (test_\w+)", path.read_text()))
    for page in PAGES:
        assert set(re.findall(r"`(test_\w+)`", prose(page))) <= known, page
        assert set(re.findall(r"`(tests/[\w/]+\.py)`", prose(page))) <= files.keys(), page


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert len(text.split()) <= MOST_WORDS


def test_every_option_and_command_is_described() -> None:
    api = (ROOT / "docs" / "api.md").read_text()
    names = [*(ALIASES.get(f.name, f.name) for f in fields(Options)), *(f"chunkflow {name}" for name in COMMANDS)]
    assert [name for name in names if f"\n| `{name}` |" not in api] == []


def test_a_change_is_in_few_files() -> None:
    """Each row of the table says where, in at most three files of the product, which exist."""
    table = (ROOT / "docs" / "architecture.md").read_text().split("## Where to change what")[1]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for change, where in rows:
        files = set(re.findall(r"`([\w/]+\.py)`", where))
        assert len(files) <= 3, change
        assert all((ROOT / f).exists() or (ROOT / "chunkflow_compile" / f).exists() for f in files), (change, files)


@pytest.mark.parametrize("script", sorted((ROOT / "docs" / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_can_be_loaded(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports is there; to run it takes minutes."""
    monkeypatch.syspath_prepend(str(script.parent))
    assert runpy.run_path(str(script))
