"""The documents: links resolve, what they name exists, they are worded as the field writes, and options are described."""

from __future__ import annotations

import ast
import builtins
import json
import pkgutil
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import run_python
from wording import PATTERNS, TERMS, anchor, faults, findings, former, module_faults, prose_of, unlinked

from chunkflow_compile.cli.parsers import COMMANDS
from chunkflow_compile.options import ALIASES, Options
from chunkflow_compile.passes.names import STAGES

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The packages whose docstrings and comments are worded like the pages.
WORDED = (
    "chunkflow_compile/bench",
    "chunkflow_compile/catalog",
    "chunkflow_compile/cli",
    "chunkflow_compile/frontend",
    "chunkflow_compile/hardware",
    "chunkflow_compile/lowering",
    "chunkflow_compile/pipeline",
    "chunkflow_compile/placed",
    "chunkflow_compile/private_torch",
    "chunkflow_compile/report",
    "chunkflow_compile/runtime",
    "chunkflow_compile/servers",
    "chunkflow_compile/simulate",
    "chunkflow_compile/weights",
    "passes",
)
# Of the README: what a newcomer reads in a few minutes.
MOST_LINES = 220
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
# Sections that may name what is gone.
_GONE = re.compile(r"^### (?:Removed|Renamed).*?(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_PATH = re.compile(r"[\w*.-][\w*./-]*\.(?:py|h|c|cpp)")
# "`name` in `file.py`", "`name` and `other` of `file.py`", "`file.py`: `name`"
_IN_FILE = re.compile(
    r"((?:`[\w.]+`(?:,?\s+and\s+|,\s+))*`[\w.]+`)\s+(?:in|of)\s+`([\w/]+\.py)`|`([\w/]+\.py)`:\s+(`[\w.]+`)"
)
_COMMAND = re.compile(r"^`?(make|chunkflow) ([a-z][a-z-]*)", re.MULTILINE)
# What pages name that no source here defines, by where it is.
_DUMPED = [f"{number:02}_{stage}" for number, stage in enumerate(STAGES)]
OUTSIDE = {
    "a dump": {*(f"{name}.py" for name in _DUMPED), *(f"chunkflow_{name}" for name in _DUMPED)},
    "a place for the reader's own": {"file.py", "OtherPipeline", "NN_stage.diff", "ray_"},
    "torch": {
        *("state_dict", "load_state_dict", "register_module_forward_hook", "Work", "ProcessGroupNCCL", "DeviceMesh"),
        *("DistributedDataParallel", "FullyShardedDataParallel", "BackendCompilerFailed", "dynamo_timed"),
        *("TORCHINDUCTOR_DETERMINISTIC", "FakeTensorMode", "ModuleList"),
    },
    "diffusers": {
        *("from_pretrained", "apply_group_offloading", "enable_group_offload", "TensorParallelConfig"),
        *("enable_lora_hotswap", "load_lora_adapter", "load_lora_weights"),
    },
    "servers": {
        *("SGLANG_PLUGINS", "VLLM_PLUGINS", "DiffusersPipelineLoader.load_model", "WorkerId"),
        "DiffusionModelRunner._compile_transformer",
    },
    "Prometheus": {"PROMETHEUS_MULTIPROC_DIR"},
    "fields of pyproject.toml and mkdocs.yml": {"Repository", "Documentation", "Issues", "site_url", "repo_url"},
    "a name of OpenTelemetry": {"chunkflow step"},
}


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return _FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub links to them."""
    return {anchor(heading) for heading in _HEADING.findall(prose(page))}


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


def defined(tree: ast.AST) -> set[str]:
    """Classes, functions, arguments, and what is assigned, at any level."""
    kinds = {ast.FunctionDef: "name", ast.ClassDef: "name", ast.arg: "arg", ast.Name: "id", ast.Attribute: "attr"}
    nodes = (n for n in ast.walk(tree) if isinstance(getattr(n, "ctx", None), ast.Store | None))
    return {getattr(node, kinds[type(node)]) for node in nodes if type(node) in kinds}


@dataclass(frozen=True)
class Module:
    """What a file in Python defines: any names, classes and functions, and ``Class.name`` of its classes."""

    names: set[str]
    callables: set[str]
    members: set[str]


class Sources:
    """The files of the repository, and what those in Python define.  Few pages name what most files define, so a file is
    parsed when a page names a word that is in it."""

    def __init__(self) -> None:
        top = [ROOT / name for name in ("chunkflow_compile", "passes", "tests", "examples", "docs")]
        self._paths = [path for folder in top for path in (folder, *folder.rglob("*")) if path.name != "__pycache__"]
        self._folders = {path.name for path in [*top, *(ROOT / "chunkflow_compile").iterdir()] if path.is_dir()}
        self._texts = {path: path.read_text() for path in self._paths if path.suffix == ".py"}
        self._words = {path: {*re.findall(r"\w+", text)} for path, text in self._texts.items()}
        self._modules = dict[Path, Module]()
        self.targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        # all but those of this file, which names what is gone
        self.words = set[str]().union(*(words for path, words in self._words.items() if path != Path(__file__)))

    def module(self, path: Path) -> Module:
        if path not in self._modules:
            tree = ast.parse(self._texts[path])
            nodes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
            members = {f"{n.name}.{name}" for n in nodes if isinstance(n, ast.ClassDef) for name in defined(n)}
            self._modules[path] = Module(defined(tree), {n.name for n in nodes}, members)
        return self._modules[path]

    def modules(self, word: str) -> Iterator[tuple[Path, Module]]:
        """The files that contain a word, those first that seem to define it."""
        shown = re.compile(rf"(?:class|def) {word}\b")
        found = [path for path, words in self._words.items() if word in words]
        for path in sorted(found, key=lambda path: shown.search(self._texts[path]) is None):
            yield path, self.module(path)

    def is_defined(self, name: str) -> bool:
        """Whether a file has a class, a function, an argument or a variable of this name."""
        return name in dir(builtins) or any(name in module.names for _, module in self.modules(name))

    def is_callable(self, name: str) -> bool:
        """Whether a file has a class or a function of this name; a helper of a test is nothing that a page calls."""
        modules = (m for path, m in self.modules(name) if not path.is_relative_to(ROOT / "tests"))
        return name in dir(builtins) or any(name in module.callables for module in modules)

    def have(self, name: str) -> bool:
        """Whether what stands in backticks exists, as far as it is a path or a name that says of itself what it is."""
        path, _, inside = name.partition(":")
        if _PATH.fullmatch(path) or (
            re.fullmatch(r"[\w./-]+", path) and path.partition("/")[0] in self._folders and "/" in path
        ):
            return any(each.match(path) for each in self._paths) and (
                not inside or self.have_in(inside.strip(": "), path)
            )
        bare = name.partition("(")[0]
        if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*\.\w+", bare):
            return any(bare in module.members for _, module in self.modules(bare.partition(".")[0]))
        if not bare.isidentifier():
            return True
        if name.endswith(")"):
            return self.is_callable(bare)
        if re.match(r"test_|_?[A-Z]+[a-z]", bare):
            return self.is_defined(bare)
        return "_" not in bare or bare in self.words

    def have_in(self, name: str, path: str) -> bool:
        """Whether a file defines a name; True for a file that is not there, which is missing itself."""
        files = [file for file in self._texts if file.match(path)]
        return not files or any(name.rpartition(".")[2] in self.module(file).names for file in files)


def gone(page: str, sources: Sources) -> set[str]:
    """What a page names that is neither here nor in OUTSIDE.

    In backticks: a path of a source, with or without its folders; a class, with or without a member; a function with its
    parentheses; a test; any other name that has an underscore; a name that the page says is in a file.  Anywhere: a
    command, and what follows ``chunkflow_compile.``.
    """
    page, outside = _GONE.sub("", page), set[str]().union(*OUTSIDE.values())
    prose, blocks = _FENCE.sub("", page), _FENCE.findall(page)
    spans = {re.sub(r"\s+", " ", span) for span in _SPAN.findall(prose)}
    named = spans | {word for span in spans for word in span.split() if "/" in word and _PATH.fullmatch(word)}
    missing = {name for name in named if re.split(r"[(:]", name)[0] not in outside and not sources.have(name)}
    for names, path, other_path, name in _IN_FILE.findall(prose):
        where = path or other_path
        missing |= {f"{name} in {where}" for name in _SPAN.findall(names or name) if not sources.have_in(name, where)}
    for name in re.findall(r"\bchunkflow_compile(?:\.[A-Za-z]\w*)+", page):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.add(name)
    targets = {"make": sources.targets, "chunkflow": {*COMMANDS}}
    commands = [pair for text in (*blocks, *spans) for pair in _COMMAND.findall(text)]
    return missing | {f"{of} {name}" for of, name in commands if name not in targets[of]} - outside


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path, sources: Sources) -> None:
    assert gone(page.read_text(), sources) == set()


@pytest.mark.parametrize(
    ("page", "missing"),
    [
        ("`roll_call.py`", "roll_call.py"),
        ("`runtime/place.py`", "runtime/place.py"),
        ("`runtime/*cudo*.py`", "runtime/*cudo*.py"),
        ("`tests/roll_call`", "tests/roll_call"),
        ("`passes/placement/place.py: placed_in_turns`", "passes/placement/place.py: placed_in_turns"),
        ("`python tests/sock.py --minutes 1`", "tests/sock.py"),
        ("a protocol (`Cuda`)", "Cuda"),
        ("`Device.settle`", "Device.settle"),
        ("`writing(model)`", "writing(model)"),
        ("`restored()`", "restored()"),
        ("`_policy_window`", "_policy_window"),
        ("`test_a_copy_that_failed`", "test_a_copy_that_failed"),
        ("`check_device` and `Device` in\n`runtime/device_base.py`", "check_device in runtime/device_base.py"),
        ("`runtime/arena.py`: `evicted` frees", "evicted in runtime/arena.py"),
        ("`chunkflow_compile.courses(model)`", "chunkflow_compile.courses"),
        ("```python\nchunkflow_compile.passes.roll.call()\n```", "chunkflow_compile.passes.roll.call"),
        ("```sh\nmake test\nmake course\n```", "make course"),
        ("`chunkflow unpack MODEL`", "chunkflow unpack"),
        ("### Removed\n`writing(model)`\n### Fixed\n`roll_call.py`", "roll_call.py"),
    ],
)
def test_what_is_gone_is_missed(page: str, missing: str, sources: Sources) -> None:
    assert gone(page, sources) == {missing}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_worded_as_the_field_writes(page: Path) -> None:
    """No pattern, no former sentence, and a link to the glossary at the first use of a term: ``tests/wording.py PAGE``."""
    found = [fault.removeprefix(f"{ROOT}/") for fault in faults(page)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", WORDED)
def test_docstrings_and_comments_are_worded_as_the_field_writes(package: str) -> None:
    found = [fault for path in sorted((ROOT / package).rglob("*.py")) for fault in module_faults(path)]
    assert not found, "\n".join(fault.removeprefix(f"{ROOT}/") for fault in found)


def test_a_module_is_read_as_a_page() -> None:
    source = '''"""A function of
    its own."""\n\nx = 1  # a line a block\n\n\ndef f() -> None:\n    """``x``: of it."""\n    return "card"\n'''
    found = [(f.line, f.words) for f in findings(prose_of(source))]
    assert found == [(1, "of its own"), (4, "a line a block"), (8, "`x`: of")]


def test_a_page_with_one_of_each_pattern_has_one_finding_of_each() -> None:
    page = "# A page\n\n" + "\n\n".join(pattern.example for pattern in PATTERNS) + "\n\n```sh\nmake card\n```\n"
    found = findings(page)
    assert [(f.line, f.sentence.lstrip("# "), f.instead) for f in found] == [
        (3 + 2 * number, pattern.example.lstrip("# "), pattern.instead) for number, pattern in enumerate(PATTERNS)
    ]


def test_a_former_sentence_is_found_in_other_marks_and_lines() -> None:
    page = "# Budgets\n\nGive one. A budget that is too\n  small is **refused** with the least that would do."
    sentence = "A budget that is too small is refused with the least that would do."
    assert former(page) == [f"3: “{sentence}” - a sentence of a former page"]


def test_a_term_is_linked_where_it_is_first_used() -> None:
    headings = _HEADING.findall((ROOT / "docs" / "glossary.md").read_text())
    assert [*TERMS] == headings[1:-1], "each entry of the glossary is a term"
    page = (
        "## Regions\n\n| slot |\n\n`slot`, a [region](glossary.md#region), a window.\n\nA [window](glossary.md#window)."
    )
    assert unlinked(page) == [
        "5: “`slot`, a [region](glossary.md#region), a window.” - link [window](glossary.md#window)"
    ]


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert any(unit in line for line in text.splitlines()[:10] for unit in (" ms", " s ")), "a figure comes first"


def test_every_option_and_command_is_described() -> None:
    api = (ROOT / "docs" / "api.md").read_text()
    names = [*(ALIASES.get(f.name, f.name) for f in fields(Options)), *(f"chunkflow {name}" for name in COMMANDS)]
    assert [name for name in names if f"\n| `{name}` |" not in api] == []


def test_a_change_is_in_few_files() -> None:
    """Each row of the table says where, in at most three files of the product (four for a transfer op), which exist."""
    table = (ROOT / "docs" / "architecture.md").read_text().split("## Where to change what")[1]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for change, where in rows:
        files = set(re.findall(r"`([\w/]+\.py)`", where))
        assert len(files) <= (4 if change.strip() == "a new transfer operation" else 3), change
        assert all((ROOT / f).exists() or (ROOT / "chunkflow_compile" / f).exists() for f in files), (change, files)


SCRIPTS = sorted((ROOT / "docs" / "benchmarks").glob("*.py"))


def imports(script: Path) -> Iterator[tuple[str, str]]:
    """The modules that a script imports names from, and the names."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


NEEDS_TRITON = ("chunkflow_compile.hardware.kernel_copy",)


def test_what_a_benchmark_imports_exists(sources: Sources) -> None:
    """Names of the package, and of scripts in the same folder."""
    for script in SCRIPTS:
        for module, name in imports(script):
            other = script.parent / f"{module}.py"
            if module.partition(".")[0] == "chunkflow_compile" and module not in NEEDS_TRITON:
                assert hasattr(import_module(module), name) or find_spec(f"{module}.{name}"), (script, name)
            elif other in SCRIPTS:
                assert name in sources.module(other).names, (script, name)


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_can_be_loaded(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it imports is there; to run it takes minutes."""
    monkeypatch.syspath_prepend(str(script.parent))
    assert runpy.run_path(str(script))


def test_the_call_that_the_page_of_the_architecture_shows_is_a_real_one() -> None:
    """What is written there by ``python docs/one_call.py --write``."""
    shown = runpy.run_path(str(ROOT / "docs" / "one_call.py"))["shown"]()
    assert f"\n{shown}\n" in (ROOT / "docs" / "architecture.md").read_text()


MODELS = ROOT / "docs" / "benchmarks" / "models.py"


def test_the_page_of_models_is_what_its_trials_say(tmp_path: Path) -> None:
    """And no server's column claims more than a test of its plug-in runs."""
    run = runpy.run_path(str(MODELS))
    rows = [json.loads(line) for line in (ROOT / "docs" / "models.jsonl").read_text().splitlines()]
    page = run["page"](rows)
    assert page == (ROOT / "docs" / "models.md").read_text()
    equal = next(row for row in rows if row["result"] == "equal")
    assert run["page"]([{**row, "result": "differs"} if row is equal else row for row in rows]) != page
    for server, classes in run["SERVERS"].items():
        text = "".join(path.read_text() for path in sorted((ROOT / "tests" / "servers").glob(f"*{server}*.py")))
        for name, tests in classes.items():
            assert f".{name}" in text and all(f"def {test}(" in text for test in tests.values()), name


def test_trials_that_are_missing_are_one_sentence(tmp_path: Path) -> None:
    done = run_python(str(MODELS), "--trials", str(tmp_path / "none.jsonl"), "--page", str(tmp_path / "page.md"))
    assert done.returncode == 1 and not (tmp_path / "page.md").exists()
    assert done.stderr == f"{tmp_path}/none.jsonl cannot be read (No such file or directory): make models writes it.\n"
