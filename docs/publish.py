"""Publishes the documentation: hooks of mkdocs for ``make site``, and the README of a package index for ``make dist``.

Pages are written for the repository: they link to each other, and to sources, by paths in it, and use GitHub's Markdown.
The site adds the pages outside of docs/ and the files that pages link to, and a reference made from the docstrings.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import chunkflow_compile

ROOT = Path(__file__).parent.parent
# Pages outside of docs/ -> their place on the site.
OUTER = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
REFERENCE = "reference.md"
_CODE = re.compile(r"(^ *```.*?^ *```|`(?:[^`\n]|\n(?!\n))+`)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"""(\]\(|\b(?:src|href|srcset)=")([^)\s"]+)(?=[)\s"])""")
_ITEM = re.compile(r"( *)([*+-]|\d+\.)( +)")
_ROLE = re.compile(r":[a-z]+:`~?([\w.]+)`")
# What begins a paragraph of its own in a docstring: the arguments that a line describes, and the errors.
_ENTRY = re.compile(r"(?:\n+|(?<=[.;])  )(?=``\w+``(?:, ``\w+``)*(?: and ``\w+``)?: )")
_RAISES = re.compile(r"\n(?=Raises \w+)")


def relinked(text: str, change: Callable[[str], str]) -> str:
    """A page whose relative links, outside of code, are what ``change`` makes of their paths.  Anchors are kept."""

    def one(link: re.Match[str]) -> str:
        path, hash_, anchor = link[2].partition("#")
        return link[0] if not path or re.match("[a-z]+:", path) else f"{link[1]}{change(path)}{hash_}{anchor}"

    parts = _CODE.split(text)
    parts[::2] = [_LINK.sub(one, part) for part in parts[::2]]
    return "".join(parts)


def for_package_index(readme: str, repository: str, release: str) -> str:
    """The README with links into a repository on a host, such as ``https://github.com/owner/name``, at a tag."""

    def address(path: str) -> str:
        kind = "raw" if path.endswith((".png", ".svg", ".gif")) else "blob"
        return f"{repository.rstrip('/')}/{kind}/{release}/{path}"

    return relinked(readme, address)


def _place(path: str) -> str:
    """Where the site has a file of the repository; both are relative to their roots."""
    return OUTER.get(path) or path.removeprefix("docs/")


def _target(page: str, link: str) -> str:
    """The file of the repository that a page links to; for a folder, its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def _outside(page: str) -> list[str]:
    """The files outside of docs/ that a page links to."""
    found: list[str] = []
    relinked((ROOT / page).read_text(), lambda link: found.append(_target(page, link)) or link)
    return [path for path in found if not path.startswith(("docs/", "..")) and (ROOT / path).is_file()]


def _published() -> dict[str, str]:
    """Place on the site -> path in the repository, of all pages and of the files outside of docs/ that they link to."""
    left = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")] + list(OUTER)
    found: dict[str, str] = {}
    while left:
        path = left.pop()
        if _place(path) not in found:
            found[_place(path)] = path
            left += _outside(path) if path.endswith(".md") else []
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the patterns of the navigation, each to the pages that no entry before it has."""
    pages = [place for place in _published() if place.endswith(".md")]
    config.nav = _expanded(config.nav, sorted([*pages, REFERENCE]))
    return config


def _expanded(entries: list[Any], left: list[str]) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            ((title, inside),) = entry.items()
            found += [{title: below}] if (below := _expanded(inside, left)) else []
        else:
            pages = fnmatch.filter(left, entry)
            left[:] = [page for page in left if page not in pages]
            found += pages
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/, the files that pages link to, and the reference."""
    for place, path in sorted(_published().items()):
        if not path.startswith("docs/"):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    homes = sorted(chunkflow_compile._HOMES.items(), key=lambda pair: pair[0].lower())
    entries = (f"::: {home}.{name}\n    options:\n      heading: {name}\n" for name, home in homes)
    about = "The public names of `chunkflow_compile`, from their docstrings. [The API](api.md) has the options."
    files.append(File.generated(config, REFERENCE, content="\n".join(["# Reference", "", about, "", *entries])))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links as the site has them, and lists as Python-Markdown reads them."""
    if page.file.abs_src_path is None:  # the reference
        return markdown
    source, folder = os.path.relpath(page.file.abs_src_path, ROOT), posixpath.dirname(page.file.src_uri) or "."
    return nested(relinked(markdown, lambda link: posixpath.relpath(_place(_target(source, link)), folder)))


def nested(text: str) -> str:
    """A page in which what belongs to an item of a list is indented by four spaces, and a blank line is before a list.

    GitHub takes the width of the item's mark, and needs no blank line.
    """
    lines: list[str] = []
    widths: list[int] = []  # of the items that are open: where their text begins
    fence = False
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        item = None if fence else _ITEM.match(line)
        if line.strip() and not fence:
            blank = not lines or not lines[-1].strip()
            while widths and indent < widths[-1] and (item or blank):
                widths.pop()
            if item and not widths and not blank and not _ITEM.match(lines[-1]) and not lines[-1].startswith(" "):
                lines.append("")
        depth = sum(width <= indent for width in widths)
        inside = indent - (widths[depth - 1] if depth else 0)
        lines.append(" " * (4 * depth + inside) + line.lstrip())
        fence ^= line.lstrip().startswith("```")
        if item:
            widths.append(len(item[0]))
    return "\n".join(lines) + "\n"


class Docstrings(griffe.Extension):
    """Docstrings as Markdown: a role is a link if it names something public, and each argument is an item of a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """A docstring of this package as Markdown."""

    def named(role: re.Match[str]) -> str:
        name = role[1].rpartition(".")[2]
        home = chunkflow_compile._HOMES.get(role[1])
        return f"[`{name}`][{home}.{name}]" if home else f"`{name}`"

    text = _RAISES.sub("\n\n", _ENTRY.sub("\n\n* ", "\n" + docstring))
    return _ROLE.sub(named, text).strip()


def main() -> None:
    """Print the README for a package index."""
    parser = argparse.ArgumentParser(description="Print the README with links into a repository on a host.")
    parser.add_argument("repository", help="such as https://github.com/owner/name")
    arguments = parser.parse_args()
    release = f"v{chunkflow_compile.__version__}"
    print(for_package_index((ROOT / "README.md").read_text(), arguments.repository, release), end="")


if __name__ == "__main__":
    main()
