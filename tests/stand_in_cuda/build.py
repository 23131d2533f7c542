"""Builds the stand-in: two libraries, and an entry point by which every process that imports torch gets aten's kernels.

python tests/stand_in_cuda/build.py --out FOLDER       with the Python of an environment with a CUDA build of torch
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME = ("device.cpp", "memory.cpp", "streams.cpp", "graphs.cpp", "copies.cpp", "kernels.cpp")
FLAGS = ("-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter")


class CannotBuildError(Exception):
    """Why the stand-in cannot be built here, and what to do."""


def runtime_name(torch_folder: Path) -> str:
    """The file name of the CUDA runtime that torch links, such as ``libcudart.so.13``.

    Raises CannotBuildError if this torch has none, or links it in another way.
    """
    library = torch_folder / "lib" / "libc10_cuda.so"
    if not library.exists():
        raise CannotBuildError(
            f"The torch in {torch_folder.parent} is built for the CPU only: install a CUDA build, pip install "
            "torch==2.11.0, or run make test-stand-in, which makes an environment of its own."
        )
    text = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    names = [line.split("[")[1].rstrip("]") for line in text.splitlines() if "libcudart.so" in line]
    if not names:
        raise CannotBuildError(f"{library} links no shared CUDA runtime, so none can take its place.")
    return names[0]


def headers(site: Path) -> list[str]:
    """The folders with CUDA's headers, which come with torch and Triton."""
    folders = [p.parent for p in sorted(site.glob("nvidia/*/include/cuda_runtime_api.h"))]
    crt = [p.parent.parent for p in sorted(site.glob("**/crt/host_defines.h"))]
    if not folders or not crt:
        raise CannotBuildError(
            f"There are no headers of CUDA in {site}: the wheels of torch 2.11 and later bring them."
        )
    return [f"-I{folder}" for folder in dict.fromkeys([*folders, *crt])]


def build(out: Path) -> Path:
    """Build into ``out``, unless what is there is newer than its sources; return ``out``."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise CannotBuildError("There is no torch here: run make test-stand-in.")
    torch_folder = Path(spec.origin).parent
    name = runtime_name(torch_folder)
    sources = [p for p in HERE.iterdir() if p.suffix in (".cpp", ".c", ".h", ".py")]
    done = out / name
    if done.exists() and done.stat().st_mtime > max(p.stat().st_mtime for p in sources):
        return out
    if shutil.which("g++") is None or shutil.which("gcc") is None:
        raise CannotBuildError("There is no compiler: install gcc and g++ (Debian: apt install build-essential).")
    out.mkdir(parents=True, exist_ok=True)
    versions = out / "versions"
    versions.write_text(f"{name} {{ global: *; }};\n")
    absent = out / "absent.o"
    _compile("gcc", *FLAGS, "-c", str(HERE / "absent.c"), "-o", str(absent))
    _compile(
        *("g++", "-std=c++17", "-shared", *FLAGS, *headers(torch_folder.parent)),
        *(str(HERE / s) for s in RUNTIME),
        *(str(absent), "-o", str(done), f"-Wl,-soname,{name}", f"-Wl,--version-script={versions}", "-lpthread", "-ldl"),
    )
    driver = out / "libcuda.so.1"
    _compile(
        "g++", "-std=c++17", "-shared", *FLAGS, str(HERE / "driver.cpp"), "-o", str(driver), "-Wl,-soname,libcuda.so.1"
    )
    link = out / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to(driver.name)
    _entry_point(out)
    return out


def _compile(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuildError(f"{' '.join(command)} failed:\n{done.stderr}")


def _entry_point(out: Path) -> None:
    """torch calls the entry points of the group torch.backends when it is imported, also in spawned processes."""
    folder = out / "stand_in_cuda-0.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in-cuda\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\nstand_in_cuda = stand_in_cuda.aten_on_host:install\n")


def environment(out: Path) -> dict[str, str]:
    """The environment variables with which a process runs on the stand-in."""
    name = next(p.name for p in out.iterdir() if p.name.startswith("libcudart.so"))
    paths = [str(out), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "LD_PRELOAD": str(out / name),
        "LD_LIBRARY_PATH": str(out),
        "TRITON_LIBCUDA_PATH": str(out),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # its workers would start streams of their own
        "PYTHONPATH": os.pathsep.join(paths),
        "STAND_IN": str(out),
        "STAND_IN_DEVICES": os.environ.get("STAND_IN_DEVICES", "2"),
        "CHUNKFLOW_GPU_LOWERING": "eager",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="run this on the stand-in, once it is built")
    given = parser.parse_args()
    try:
        out = build(given.out.absolute())
    except CannotBuildError as error:
        print(error, file=sys.stderr)
        return 2
    if given.command:
        os.execvpe(given.command[0], given.command, environment(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
