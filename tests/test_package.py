"""The sdist and the wheel, which is tried in an environment of its own: the backend needs no import, passes are importable.
A source tree in one."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

import chunkflow_compile
from chunkflow_compile.hardware.machine import EXTRAS, install_line
from chunkflow_compile.releases import NEWEST, OLDEST

ROOT = Path(__file__).parent.parent

STREAMS = """
import chunkflow_compile
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).eval()
x = torch.randn(2, 64)
options = {'min_bytes': 4096, 'group_bytes': 1, 'slowdown': 1000.0, 'lowering': 'eager'}
with torch.no_grad():
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, backend="chunkflow", options=options)(x), expected)
(runner,) = chunkflow_compile.programs(model)
assert runner.measurements[0].moved_bytes == 3 * 64 * 64 * 4
"""

OF_THE_WHEEL = f"""
import sys, torch
assert "chunkflow" in torch._dynamo.list_backends(), torch._dynamo.list_backends()
assert "chunkflow_compile" not in sys.modules, "the backend is found by its entry point, not by an import"
import chunkflow_compile.passes.program.verify, importlib.metadata, importlib.util
assert "torch" in sys.modules and "diffusers" not in sys.modules
assert importlib.util.find_spec("passes") is None, "the top-level name belongs to the user"
assert importlib.metadata.version("chunkflow-compile") == chunkflow_compile.__version__
{STREAMS}
print(chunkflow_compile.passes.program.verify.__file__)
"""

OF_A_SOURCE_TREE = f"import FIRST\nimport torch\n{STREAMS}\nprint(chunkflow_compile.__file__)"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The Python of an environment that holds all that this one does, except the package and diffusers."""
    environment = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    site = next((environment / "lib").glob("python*")) / "site-packages"
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not re.search("chunkflow|diffusers", path.name) and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return environment / "bin" / "python"


def run(python: Path, code: str, folder: Path, **environment: str) -> Path:
    """Runs code in a folder; returns the path that it prints."""
    done = outcome([python, "-c", code], folder, **environment)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def outcome(command: list[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a command does in a folder without ``PYTHONPATH``, by which the package would be found installed."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False)


def files_of(folder: Path) -> set[str]:
    """Files of the package, below the folder that has it.  Links are followed."""
    found = (
        Path(top) / name for top, _, names in os.walk(folder / "chunkflow_compile", followlinks=True) for name in names
    )
    return {str(path.relative_to(folder)) for path in found if path.parent.name != "__pycache__"}


@pytest.mark.long
def test_the_wheel_brings_the_backend_and_the_passes(bare: Path, tmp_path: Path) -> None:
    """As ``make dist`` builds it, from the sdist."""
    dist = tmp_path / "dist"
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,), (sdist,) = dist.glob("chunkflow_compile-*.whl"), dist.glob("chunkflow_compile-*.tar.gz")
    checked = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)]
    subprocess.run(checked, check=True, capture_output=True)
    with zipfile.ZipFile(wheel) as archive, tarfile.open(sdist) as source:
        in_sdist = {member.name.partition("/")[2] for member in source if member.isfile()}
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == files_of(ROOT)
    assert files_of(ROOT) | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= in_sdist
    assert not any(name.startswith("tests/") for name in in_sdist), "a part of them cannot run"

    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        bare,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    installed = outcome([*pip, wheel], tmp_path)
    assert installed.returncode == 0, installed.stderr
    assert run(bare, OF_THE_WHEEL, tmp_path).is_relative_to(bare.parent.parent)
    command = bare.parent / "chunkflow"
    assert "usage: chunkflow" in outcome([command, "--help"], tmp_path).stdout
    doctor = outcome([command, "doctor"], tmp_path)
    assert doctor.returncode == 0, doctor.stderr
    line = "pip install 'diffusers>=0.38' transformers accelerate ftfy sentencepiece protobuf imageio imageio-ffmpeg"
    assert f"{line}\n" in doctor.stdout, "by the metadata of the wheel"
    # In the root of a checkout, the folder chunkflow_compile comes before the installed package.
    found = run(bare, "import chunkflow_compile.passes.plan as p; print(p.__file__)", ROOT)
    assert found.resolve() == ROOT / "passes" / "plan.py"


def test_setuptools_finds_every_package() -> None:
    """Of what ``make dist`` puts into the wheel; the folder ``passes`` is a link."""
    names = {str(Path(name).parent).replace("/", ".") for name in files_of(ROOT) if name.endswith(".py")}
    assert {*find_packages(str(ROOT), include=["chunkflow_compile*"])} == names
    assert 'include = ["chunkflow_compile*"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "first",
    [
        "torch._dynamo; torch._dynamo.list_backends()",
        pytest.param("chunkflow_compile", marks=pytest.mark.long),  # as the tests of the stand-in run
    ],
)
def test_a_source_tree_brings_the_backend(bare: Path, tmp_path: Path, first: str) -> None:
    """Imported before torch has looked for backends, and after that."""
    found = run(bare, OF_A_SOURCE_TREE.replace("FIRST", first), tmp_path, PYTHONPATH=str(ROOT))
    assert found == ROOT / "chunkflow_compile" / "__init__.py"


NAMES_AT_FIRST = """
import sys, chunkflow_compile
assert dir(chunkflow_compile) == chunkflow_compile.__all__
assert "torch" not in sys.modules, "a name is imported at its first use"
"""

PUBLIC_NAMES = f"""
{NAMES_AT_FIRST}
from chunkflow_compile import *
assert all(globals()[name] is getattr(chunkflow_compile, name) for name in chunkflow_compile.__all__)
assert {{"compile", "restore", "enable_ulysses", "exchange_branches"}} < globals().keys()
assert "diffusers" not in sys.modules
"""


@pytest.mark.parametrize("code", [NAMES_AT_FIRST, pytest.param(PUBLIC_NAMES, marks=pytest.mark.long)], ids=len)
def test_the_package_lists_its_public_names_and_imports_each_at_its_first_use(code: str, tmp_path: Path) -> None:
    """enable_ulysses is one of them, and needs diffusers only when it is called."""
    assert all(hasattr(chunkflow_compile, name) for name in chunkflow_compile.__all__)
    found = run(Path(sys.executable), f"{code}\nprint(chunkflow_compile.__file__)", tmp_path, PYTHONPATH=str(ROOT))
    assert found == ROOT / "chunkflow_compile" / "__init__.py"


def test_a_type_checker_sees_the_names_that_are_imported_at_their_first_use() -> None:
    """Those of the block TYPE_CHECKING, each from the module that it is imported from when the program runs."""
    tree = ast.parse((ROOT / "chunkflow_compile" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.asname: node.module for node in imports for alias in node.names} == chunkflow_compile._HOMES


def test_the_version_is_the_same_everywhere() -> None:
    for file, line in {"pyproject.toml": 'version = "{}"', "CITATION.cff": "version: {}"}.items():
        assert line.format(chunkflow_compile.__version__) in (ROOT / file).read_text().splitlines(), file


def test_the_releases_of_torch_that_are_installed_are_those_that_are_tested() -> None:
    (major, oldest), (_, newest) = OLDEST, NEWEST
    assert f'"torch>={major}.{oldest},<{major}.{newest + 1}"' in (ROOT / "pyproject.toml").read_text()


def test_the_line_that_installs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed, it names the packages; a source tree names itself."""
    assert install_line("metrics") == "pip install 'prometheus-client>=0.20' 'opentelemetry-api>=1.24'"
    calls = "".join(path.read_text() for path in (ROOT / "chunkflow_compile").rglob("*.py"))
    for extra in {*EXTRAS.values(), *re.findall(r"install_line\(['\"]([\w-]+)['\"]\)", calls)}:
        assert "[" not in install_line(extra), "pyproject.toml has it"
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: None)
    assert install_line("metrics") == f"pip install '{ROOT}[metrics]'"
