"""The wheel, in an environment of its own: the backend needs no import, passes are importable.  A source tree in one."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from chunkflow_compile.frontend.source_tree import ENTRY_POINTS

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
import chunkflow_compile.passes.program.verify, importlib.util
assert "torch" in sys.modules and "diffusers" not in sys.modules
assert importlib.util.find_spec("passes") is None, "the top-level name belongs to the user"
{STREAMS}
print(chunkflow_compile.passes.program.verify.__file__)
"""

OF_A_SOURCE_TREE = f"import FIRST\nimport torch\n{STREAMS}\nprint(chunkflow_compile.__file__)"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The Python of an environment that holds all that this one does, except the package."""
    environment = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    site = next((environment / "lib").glob("python*")) / "site-packages"
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "chunkflow" not in path.name and not (site / path.name).exists():
            (site / path.name).symlink_to(path)
    return environment / "bin" / "python"


def run(python: Path, code: str, folder: Path, **environment: str) -> Path:
    """Runs code in a folder; returns the path that it prints."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    done = subprocess.run([python, "-c", code], cwd=folder, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_the_wheel_brings_the_backend_and_the_passes(bare: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("chunkflow_compile-*.whl")
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # by which pip would find it installed
    pip = [sys.executable, "-m", "pip", "--python", str(bare)]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], env=clean, check=True)
    assert run(bare, OF_THE_WHEEL, tmp_path).is_relative_to(bare.parent.parent)
    # In the root of a checkout, the folder chunkflow_compile comes before the installed package.
    found = run(bare, "import chunkflow_compile.passes.plan as p; print(p.__file__)", ROOT)
    assert found.resolve() == ROOT / "passes" / "plan.py"


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


def test_the_entry_point_of_a_source_tree_is_that_of_the_wheel() -> None:
    here = configparser.ConfigParser()
    here.read_string(ENTRY_POINTS)
    (line,) = (line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "backend:" in line)
    assert line == 'chunkflow = "' + here["torch_dynamo_backends"]["chunkflow"] + '"'
