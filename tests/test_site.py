"""The documentation as a site and for a package index: nothing is missing from it, and nothing is shown raw."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from helpers import run_python

import chunkflow_compile

pytest.importorskip("mkdocs", reason="the extra docs is not installed")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def publish() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "publish.py"))


@pytest.mark.long
def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """As ``make site`` does.  A link or an anchor that leads nowhere would be an error."""
    site = tmp_path / "site"
    build = ("-m", "mkdocs", "build", "--strict", "--site-dir", str(site))  # --quiet would count no warnings
    done = run_python(*build, folder=ROOT, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0 and {line.split()[0] for line in done.stderr.splitlines()} == {"INFO"}, done.stderr
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.as_posix() for path in sources} | {"index.html", "contributing.html", "security.html"} <= pages.keys()
    assert (site / "examples" / "serve_ray.py").read_text() == (ROOT / "examples" / "serve_ray.py").read_text()

    shown = pages["reference.html"]
    for name, home in chunkflow_compile._HOMES.items():
        assert f'id="{home}.{name}"' in shown, name
    assert "<code>memory</code>: " in shown and not re.search(r":(func|class|meth|data):", shown)
    for name, page in pages.items():
        loaded = re.findall(
            r'<(?:script|img)[^>]*src="([^"]+)|<link[^>]*rel="(?:stylesheet|preconnect)" href="([^"]+)', page
        )
        assert not [link for pair in loaded for link in pair if link.startswith(("http", "//"))], name
        article = re.sub(r"<(code|pre)\b.*?</\1>", "", page.partition("<article")[2], flags=re.DOTALL)
        assert not re.findall(r"^\s*(?:```|[*+-] |\d+\. |\|).*", article, re.MULTILINE), f"{name}: raw Markdown"


def test_links_of_the_readme_lead_into_the_repository_on_a_host(publish: dict[str, Any]) -> None:
    text = publish["for_package_index"](
        "[a](docs/a.md#b) [c](#d) [e](https://e.org) ![f](docs/f.png)\n"
        '<img src="docs/g.png"> `[h](h.md)`\n```\n[i](i.md)\n```\n[`j`](j.md)\n',
        "https://host/owner/name/",
        "v1",
    )
    at = "https://host/owner/name"
    assert text == (
        f"[a]({at}/blob/v1/docs/a.md#b) [c](#d) [e](https://e.org) ![f]({at}/raw/v1/docs/f.png)\n"
        f'<img src="{at}/raw/v1/docs/g.png"> `[h](h.md)`\n```\n[i](i.md)\n```\n[`j`]({at}/blob/v1/j.md)\n'
    )
    done = run_python(str(ROOT / "docs" / "publish.py"), at)
    assert not re.findall(r'(?:\]\(|src=")(?!https?:|#)', re.sub(r"```.*?```", "", done.stdout, flags=re.DOTALL))
    assert f"]({at}/blob/v{chunkflow_compile.__version__}/docs/guide.md)" in done.stdout


def test_lists_are_as_python_markdown_reads_them(publish: dict[str, Any]) -> None:
    github = "Rules:\n* a\n  b\n  * c\n    d\n\n1. e\n\n   ```sh\n   f\n     g\n   * h\n   ```\n\n2. i\n\nj\n"
    python = (
        "Rules:\n\n* a\n    b\n    * c\n        d\n\n1. e\n\n    ```sh\n    f\n      g\n    * h\n    ```\n\n2. i\n\nj\n"
    )
    assert publish["nested"](github) == python


def test_docstrings_are_markdown(publish: dict[str, Any]) -> None:
    docstring = "Do it, see :func:`offload` and\n:meth:`reach`.\n\n``a``: one.  ``b``, ``c``: two\nthree.\nRaises E."
    assert publish["as_markdown"](docstring) == (
        "Do it, see [`offload`][chunkflow_compile.placed.offload.offload] and\n`reach`.\n\n"
        "* ``a``: one.\n\n* ``b``, ``c``: two\nthree.\n\nRaises E."
    )


def test_the_navigation_has_a_page_once(publish: dict[str, Any]) -> None:
    """A pattern takes what no entry before it has; an entry without pages is left out."""
    entries = ["index.md", {"A": ["missing.md", "b/*.md"]}, {"None": ["none-*.md"]}, {"Others": ["*.md"]}]
    expanded = publish["_expanded"](entries, ["a.md", "b/c.md", "b/d.md", "index.md"])
    assert expanded == ["index.md", {"A": ["b/c.md", "b/d.md"]}, {"Others": ["a.md"]}]
