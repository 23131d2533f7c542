"""Wording: patterns that pages do not use, each with better wording, and sentences of former pages that must not return.

``python tests/wording.py docs/guide.md`` checks single pages, or the docstrings and comments of modules and of packages.  The
patterns are those that a regular expression can decide.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent
FORMER = [line for line in (_HERE / "former_sentences.txt").read_text().splitlines() if line]
# In place of a code span; patterns find it as CODE.
_CODE = "\x02"
_UNITS = r"(?:ms|s|µs|us|[KMGT]i?B|kB|bits?|bytes|(?:milli|micro)?seconds|minutes|FLOPs?|once|twice)"
_COUNTED = r"(?:lines?|calls?|launch(?:es)?|kernels?|files?|rows?|events?|values?|parts?|pieces?)"
_PER = r"(?:step|block|call|image|region|value|generation|forward|chunk|rank|GPU|machine|process|frame|sample|token|weight)"


class Pattern(NamedTuple):
    """Words that pages do not use.  ``regex``: a space stands for any white space, CODE for a code span.  ``instead``: the
    better wording.  ``example``: a sentence in which this pattern is found, and no other."""

    regex: str
    instead: str
    example: str


class Finding(NamedTuple):
    """A use of a pattern: the line and the sentence, the words that match, and what to write instead."""

    line: int
    sentence: str
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.line}: “{self.words}” in “{self.sentence}” - {self.instead}"


PATTERNS = [
    Pattern(
        r"\b(?:guide|matrix|table|page|README|chart|picture|column|row|listing|CODE of \w+) ha(?:s|ve)\b|CODE has the\b",
        "write covers, lists, shows or contains",
        "The guide has adapters.",
    ),
    Pattern(
        r"\bha(?:s|ve) (?:never )?run (?:it|them|these|this|what)\b|\bhas never (?:been )?run\b|\bno (?:GPU|machine) has\b",
        "write that it has (not) been tested on a GPU",
        "No GPU has run these.",
    ),
    Pattern(
        r"\bbeside\b", "write during, while, next to, in addition to, or compared with", "Predicted beside measured."
    ),
    Pattern(
        rf"(?<![\w'\u2019]){_UNITS} an? {_PER}\b|\b(?:an?|one|two|\d+) {_COUNTED} an? {_PER}\b"
        r"|\ban? (?:part|piece|line|copy) each\b",
        "write per: ms per step, 12 bits per value, once per machine",
        "The copies take 3 ms a step.",
    ),
    Pattern(
        r"\bplain(?='s|[.;:)]| (?:takes?|is|has|speed|step|and)\b)",
        "write baseline, or torch.compile alone",
        "This takes 1.02 times as long as plain.",
    ),
    Pattern(r"\bthe link\b(?! (?:to|target))", "name it: PCIe, NVLink, the emulated link", "It waits for the link."),
    Pattern(r"(?<!graphics\s)(?<!model\s)\bcards?\b", "write GPU", "It takes 1.1 GiB of the card."),
    Pattern(
        r"\b(?:no|enough|has|have|make|makes|finds?|leaves?|much|any) room\b|\broom for\b",
        "write does (not) fit, or enough memory",
        "The weights that have no room are copied.",
    ),
    Pattern(
        r"\bby kind\b|\bkinds? of (?:its own|blocks?)\b|\bblocks? of (?:each|an?|one|every) kind\b|\ban? kind(?=[,.;:])"
        r"|\b(?:each|every) kind\b(?! of)|\bblock kinds?\b",
        "write block type",
        "It compiles one block of each kind.",
    ),
    Pattern(r"\b(?:the|a|on|its|each|any) drives?\b", "write SSD or disk", "The other weights are on the drive."),
    Pattern(r"\bg(?:ives?|ave|iving|iven) way\b", "write evict", "Components give way to each other."),
    Pattern(r"\bdeal(?:s|t|ing)? out\b", "write shard or distribute", "It deals out the weights."),
    Pattern(r"\bbr(?:ings?|inging|ought)\b(?! up)", "write copy, move or read", "It brings a weight into host memory."),
    Pattern(
        r"\b(?:ranks?|hosts?|processes) (?:(?:that|would|must|still) )*(?:meets?|met)\b",
        "write synchronize or exchange",
        "The ranks meet once.",
    ),
    Pattern(
        r"(?:\b(?:page|table|log|error|warning|message|command)|CODE) tells?\b",
        "write shows, reports or explains",
        "The log tells the reason.",
    ),
    Pattern(
        r"(?<!connection\s)\brefus(?:es?|ed|al)\b",
        "write raises an error, is not supported, or is rejected",
        "Gradients are refused.",
    ),
    Pattern(r"\bin (?:its |their )?place of\b", "write instead of", "It uses 12 bits in place of 16."),
    Pattern(
        r"\bthe least (?:that|which|memory|bytes)\b|\bthe most (?:that|of all)\b|\bmost bytes (?:on|of|in)\b",
        "write minimum or maximum",
        "The error names the least that would do.",
    ),
    Pattern(
        r"\botherwise than\b|\b(?:rounds?|compiled|computed|placed) otherwise\b",
        "write differently",
        "It is computed otherwise than before.",
    ),
    Pattern(
        r"(?<!depends\s)\b(?:of|than|from|by|for|at) what\b(?! (?:order|extent|reason|size|rate)\b)",
        "write a noun instead of a clause with what",
        "A line for what it copies.",
    ),
    Pattern(
        r"(?:^|[.:] )\W*(?-i:What) \w+(?=[^?]*\.)",
        "begin the sentence with a noun",
        "What is between the blocks runs eagerly.",
    ),
    Pattern(r"\b(?:that|those) of\b", "repeat the noun", "The time is that of group offload."),
    Pattern(r"\bthose which\b", "repeat the noun: the weights that", "It packs those which stream."),
    Pattern(
        r"^#+ (?:What|Which|Whether|Beside|Where(?! to\b)|When(?! to\b))\b[^?]*$",
        "write a heading that is a noun, or a question with its mark",
        "## What each way takes",
    ),
    Pattern(r"CODE of (?:the )?(?:module |class |package )?CODE", "write from or in", "Call `a` of `b`."),
    Pattern(
        r"\bof (?:\w+ ){1,3}of (?:\w+ ){1,3}of\b",
        "replace of by from, in, by or for",
        "The size of the plan of the model of the user.",
    ),
    Pattern(r"CODE: of\b", "begin a description with a noun", "`counts`: of the blocks."),
    Pattern(r"\bNone for (?:none|any)\b", "write or None", "The group, None for none."),
    Pattern(r"\bof (?:its|their|your|my|our) own\b", "write its own, your own", "A function of your own."),
    Pattern(
        r"\b(?:planned|plans an? \w+|quanti[sz]ed|measured|written|called|sa(?:y|ys|id)) so\b(?! that)",
        "say what is meant instead of so",
        "A preset is planned so.",
    ),
    Pattern(
        r"\bfor so long\b|\b(?:within|of|in|with|at|for) so (?:many|much)\b|\bby a bit\b",
        "name the number or the time",
        "It copies for so long.",
    ),
    Pattern(r"\blies?\b", "write is, is stored or resides", "The file lies there."),
    Pattern(
        r"(?<!there\s)\bis no (?!longer|more|less|better|different|\w+er\b)",
        "write is not a",
        "This name is no device.",
    ),
    Pattern(r"\bfor want of\b", "write because there is not enough", "It waits for want of memory."),
    Pattern(r"\bin turns\b", "write alternate, or one after the other", "The models run in turns."),
    Pattern(r"\bit pays\b", "write that it is worth it, or when to use it", "For video it pays."),
    Pattern(r"\bis the bound\b|\bis a wall\b", "write is the bottleneck", "The host is the bound."),
]
# The entries of docs/glossary.md, and how a page uses each as a noun or an adjective.
TERMS = {
    "Arena": r"\b[Aa]renas?\b",
    "Baseline": r"(?<!paper's\s)\b[Bb]aselines?\b",
    "Block type": r"\b[Bb]lock types?\b",
    "Budget": r"\b[Bb]udgets?\b",
    "Chunk": r"\b[Cc]hunks?\b",
    "Cycle": r"\b[Cc]ycles?\b",
    "Peers": r"\b[Pp]eers\b",
    "Plan": r"\b(?:[Aa]n?|[Tt]he|[Ii]ts|[Ee]ach|[Tt]his|[Aa]nother|same|new|[Ee]very|smallest|fastest) plans?\b",
    "Region": r"\b[Rr]egions?\b",
    "Resident": r"\b[Rr]esidents?\b",
    "Slot": r"\b[Ss]lots?\b",
    "Stall": r"\b[Ss]tall(?:s|ed)?\b",
    "Window": r"\b(?:Window|windows?)\b",
}
# Pages that need no links to the glossary: itself, and pages for people who know the code.
_WITHOUT_LINKS = {"glossary.md", "CONTRIBUTING.md", "CHANGELOG.md"}
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")
_COMPILED = [
    (re.compile(p.regex.replace(" ", r"\s+").replace("CODE", f"`{_CODE}+`"), re.IGNORECASE), p.instead)
    for p in PATTERNS
]
_BLANKED = re.compile(r"^```.*?^```|<!--.*?-->", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`[^`]+`(?!`)")
_TARGET = re.compile(r"\]\([^()]*(?:\([^()]*\)[^()]*)*\)")
_BEGINS = re.compile(r"\s*(?:[*-]|\d+\.)\s|#|\s*\||!\[")
_SENTENCE_ENDS = re.compile(r"(?<=[.!?:])[*_)]*\s+(?=[A-Z`\"*\[(])|\s*\|\s*")


class Block(NamedTuple):
    """A paragraph, an item of a list, a heading or a row of a table.  ``line``: its first.  ``masked``: of equal length, with
    blanks for the targets of links, and a placeholder for each code span."""

    line: int
    text: str
    masked: str

    def at(self, position: int) -> int:
        """The line of a position."""
        return self.line + self.text.count("\n", 0, position)

    def sentence(self, at: int) -> str:
        """The sentence around a position, on one line."""
        ends = [0, *(m.end() for m in _SENTENCE_ENDS.finditer(self.masked)), len(self.text)]
        first = max(end for end in ends if end <= at)
        return " ".join(self.text[first : min(end for end in ends if end > at)].strip(" |\n").split())


def without_blocks(page: str) -> str:
    """A page with blanks for its code blocks and comments; no line moves."""
    return _BLANKED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), page)


def blocks(page: str) -> Iterator[Block]:
    """The blocks of prose of a page, in order."""
    numbered: list[tuple[int, str]] = []  # of the block that is being read
    for line in enumerate([*without_blocks(page).splitlines(), ""], 1):
        if numbered and (not line[1].strip() or _BEGINS.match(line[1]) or numbered[-1][1].startswith("#")):
            yield _block(numbered)
            numbered = []
        if line[1].strip():
            numbered.append(line)


def _block(numbered: list[tuple[int, str]]) -> Block:
    text = "\n".join(line for _, line in numbered)
    masked = _SPAN.sub(lambda m: f"`{_CODE * (len(m[0]) - 2)}`", text)
    return Block(numbered[0][0], text, _TARGET.sub(lambda m: " " * len(m[0]), masked).replace("[", " "))


def prose_of(source: str) -> str:
    """A module as a page: its docstrings and comments, each on its line, and blank lines for the code."""
    lines, code = [""] * source.count("\n"), source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            text = node.body[0]
            lines[text.lineno - 1 : text.end_lineno] = [
                line.replace('"""', " ") for line in code[text.lineno - 1 : text.end_lineno]
            ]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#!|# (?:type|noqa|ruff|pragma)\b", token.string):
            lines[token.start[0] - 1] = token.string.lstrip("#")
    return "\n".join(lines).replace("``", "`")


def findings(page: str) -> list[Finding]:
    """The patterns that the prose of a page uses, in the order of its lines."""
    found = []
    for block in blocks(page):
        for regex, instead in _COMPILED:
            for match in regex.finditer(block.masked):
                first = match.start() + len(match[0]) - len(match[0].lstrip(" \n.:#>*-"))
                words = " ".join(block.text[first : match.end()].split())
                found.append(Finding(block.at(first), block.sentence(first), words, instead))
    return sorted(found)


def unlinked(page: str) -> list[str]:
    """The terms of the glossary that a page uses, outside headings, tables and code, before it links to their entries."""
    linked, missing = set[str](), list[str]()
    for block in blocks(page):
        links = [(m.start(), m.end(), m[1]) for m in _LINK.finditer(block.text)]
        for term in TERMS.keys() - linked:
            entry = f"glossary.md#{anchor(term)}"
            link = min((begin for begin, _, target in links if target.endswith(entry)), default=len(block.text))
            used = (m.start() for m in re.finditer(TERMS[term].replace(" ", r"\s+"), block.masked))
            use = min((at for at in used if not any(begin < at < end for begin, end, _ in links)), default=link)
            if use < link and not re.match(r"\s*[#|]", block.text):
                missing.append(f"{block.at(use)}: “{block.sentence(use)}” - link [{term.lower()}]({entry})")
                linked.add(term)
            elif link < len(block.text):
                linked.add(term)
    return sorted(missing, key=lambda line: (int(line.partition(":")[0]), line))


def anchor(heading: str) -> str:
    """A heading as GitHub links to it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _flat(text: str) -> str:
    """Text without marks and case, on one line."""
    return (
        " ".join(re.sub(r"[`*\[\]#|]", " ", _TARGET.sub(" ", text)).lower().split())
        .replace(" ,", ",")
        .replace(" .", ".")
    )


def former(page: str) -> list[str]:
    """The sentences of former pages that a page still contains, in its code blocks too, each after its line."""
    lines = page.splitlines()

    def line(sentence: str) -> int:
        return max(at for at in range(len(lines)) if sentence in _flat("\n".join(lines[at:]))) + 1

    flat = _flat(page)
    return [f"{line(_flat(each))}: “{each}” - a sentence of a former page" for each in FORMER if _flat(each) in flat]


def faults(path: Path) -> list[str]:
    """The findings on a page, the former sentences that remain, and the terms that are not linked to the glossary."""
    page = path.read_text()
    links = [] if path.name in _WITHOUT_LINKS else unlinked(page)
    return [f"{path}:{each}" for each in (*findings(page), *former(page), *links)]


def module_faults(path: Path) -> list[str]:
    """The findings in the docstrings and comments of a module."""
    return [f"{path}:{each}" for each in findings(prose_of(path.read_text()))]


if __name__ == "__main__":
    for name in map(Path, sys.argv[1:]):
        for path in sorted(name.rglob("*.py")) if name.is_dir() else [name]:
            for line in faults(path) if path.suffix != ".py" else module_faults(path):
                print(line)
