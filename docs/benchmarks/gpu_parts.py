"""Run all measurements on a GPU, in parts of at most nine minutes each; half an hour in total (``make card``).

python docs/benchmarks/gpu_parts.py --out card

Each part writes its figures to the folder as soon as they are measured, and the page is written again after each part.
If the script is called again with the same folder, it runs only the parts that have not passed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_card import ready
from gpu_page import beside, read, write

from chunkflow_compile.passes.errors import ChunkflowError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
# The maximum duration of a part in seconds.
MOST = 540.0
# The seconds that a process gets to end by itself before it is killed.
_GRACE = 10.0
# The cases of card_calls.py that run before graph_checks.py.  All other cases run after the profile is measured.
FIRST_CALLS = ("compile flux.1-dev", "second process flux.1-dev", "apply flux.1-dev", "adapters flux.1-dev")
# All ranks run on this machine.  The loopback interface is used, because the machine's name may not resolve to an
# address.
_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# Settings for a rehearsal on the stand-in for CUDA's runtime: one GPU, and kernels that compute only if their results are
# compared.
_NO_COMPUTE = {"STAND_IN_DEVICES": "1", "STAND_IN_COMPUTE": "0"}
_COMPUTE = {**_NO_COMPUTE, "STAND_IN_COMPUTE": "1"}


@dataclass(frozen=True)
class Part:
    """A part of the run.  ``command``: the arguments of Python.  ``least``: the minimum seconds that must be left to
    start the part.  ``dry``: environment variables for a rehearsal."""

    command: tuple[str, ...]
    least: float
    dry: Mapping[str, str]


def parts_of(page: Path, dry: bool, limit: float = MOST) -> dict[str, Part]:
    """Return the parts by name, the most important first.  ``limit``: the maximum seconds of the next part."""
    rehearsal = ("--dry-run",) if dry else ()
    profile = beside(page, "hardware.json")
    bench = (str(HERE / "gpu.py"), "--out", str(page), "--profile", str(profile), "--append", *rehearsal)
    bench += ("--seconds", str(limit - 20), *(("--steps", "6") if dry else ()))
    wan, loopback, flux = ("1", "2,3", "4") if dry else ("1", "7,4", "8,3")
    tests = ("-m", "pytest", "-m", "gpu", "-rs", "-p", "no:cacheprovider", *_workers(), "tests/test_gpu.py")
    calibrate = (
        "-m",
        "chunkflow_compile.cli.main",
        "calibrate",
        "--device",
        "cuda",
        "--loopback",
        "--out",
        str(profile),
    )
    facts = (str(HERE / "gpu_card.py"), "--out", str(beside(page, "card.json")), *rehearsal)
    small = ("--small",) if dry else ()
    calls = (str(HERE / "card_calls.py"), "--out", str(beside(page, "calls.jsonl")), *small)
    graphs = (str(HERE / "graph_checks.py"), "--out", str(beside(page, "graphs.jsonl")), *small)
    first = ("--cases", ",".join(FIRST_CALLS))
    return {
        "tests": Part(tests, 120, _COMPUTE),
        "calls": Part((*calls, *first, "--seconds", str(limit - 20)), 150, _COMPUTE),
        "graphs": Part((*graphs, "--seconds", str(limit - 20)), 120, _COMPUTE),
        "profile": Part(calibrate, 60, _NO_COMPUTE),
        "more-calls": Part((*calls, "--seconds", str(limit - 20)), 100, _COMPUTE),
        "facts": Part(facts, 60, _COMPUTE),
        "wan": Part((*bench, "--cases", wan), 280, _NO_COMPUTE),
        "loopback": Part((*bench, "--cases", loopback), 240, _NO_COMPUTE),
        "flux": Part((*bench, "--cases", flux), 330, _NO_COMPUTE),
    }


def _workers() -> tuple[str, ...]:
    """Return the pytest arguments for parallel tests; empty without pytest-xdist.  At most eight processes run, so that
    they fit in 80 GB of GPU memory."""
    count = min(8, max(2, len(os.sched_getaffinity(0)) // 2))
    return ("-n", str(count)) if importlib.util.find_spec("xdist") else ()


def run(part: Part, log: Path, limit: float, dry: bool) -> dict[str, Any]:
    """Run a part and copy its output to the terminal and to a log.  Return whether it passed, its seconds, and lines for
    the page."""
    env = {**_NETWORK, **os.environ, "PYTHONUNBUFFERED": "1", **(part.dry if dry else {})}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    start, lines, rang = time.monotonic(), [""], threading.Event()
    with (
        log.open("a") as file,
        subprocess.Popen(
            [sys.executable, *part.command],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as child,
    ):
        timer = threading.Timer(limit, lambda: (rang.set(), _end(child)))
        timer.start()
        try:
            for line in child.stdout or ():
                print(line, end="", flush=True)
                file.write(line)
                lines.append(line.strip() or lines[-1])
        finally:
            timer.cancel()
            _end(child)
    passed = child.returncode == 0 and not rang.is_set()
    says = lines[-1] if "pytest" in part.command or not passed else "passed"
    if rang.is_set():
        says = f"cut off after {limit:.0f} s; its measurements are kept"
    more = list(dict.fromkeys(line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))))
    return {"passed": passed, "seconds": round(time.monotonic() - start), "says": says, "more": more}


def _end(child: subprocess.Popen[str]) -> None:
    """Terminate a child process and all processes in its process group, unless it has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(child.pid, number)
                child.wait(_GRACE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the page and its files")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from the files of another folder")
    parser.add_argument("--parts", default="", metavar="NAME,NAME", help="the parts to run (default: all)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time for all parts (default: no limit)")
    parser.add_argument("--dry-run", action="store_true", help="rehearse on the stand-in for CUDA's runtime")
    given = parser.parse_args()
    page, start = given.out.absolute() / "gpu.md", time.monotonic()
    page.parent.mkdir(parents=True, exist_ok=True)
    if given.resume is not None:
        for path in given.resume.glob("gpu*"):
            shutil.copy(path, page.parent)
    parts = parts_of(page, given.dry_run)
    chosen = [name for name in given.parts.split(",") if name] or list(parts)
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"--parts: there is no part {', '.join(unknown)}; there are {', '.join(parts)}")
    try:
        ready()
    except ChunkflowError as error:
        parser.exit(2, f"{error}\n")
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # raises SystemExit, so that the child processes are terminated
    left = []
    for name in chosen:
        done = read(beside(page, "parts.json")).get("parts", {})
        limit = min(MOST, given.seconds - (time.monotonic() - start) - _GRACE)
        if done.get(name, {}).get("passed"):
            continue
        if limit < parts[name].least:
            left.append(name)
            continue
        print(f"--- {name}: at most {limit:.0f} s", flush=True)
        part = parts_of(page, given.dry_run, limit)[name]
        done[name] = run(part, beside(page, "log.txt"), limit, given.dry_run)
        ended = {"dry": given.dry_run, "parts": {n: done[n] for n in parts if n in done}}
        beside(page, "parts.json").write_text(json.dumps(ended, indent=1) + "\n")
        write(page)
    return _tell(page, parts, left)


def _tell(page: Path, parts: Sequence[str], left: Sequence[str]) -> int:
    """Print how the parts ended.  Return the exit status: 1 if a part failed, or else 3 if no time was left for a part,
    or else 0."""
    done = read(beside(page, "parts.json")).get("parts", {})
    failed = [name for name in done if not done[name]["passed"]]
    print(f"page: {page}")
    words = [f"{sum(d['passed'] for d in done.values())} of {len(parts)} parts ran and passed"]
    words += [f"failed: {', '.join(failed)}"] * bool(failed)
    words += [f"no time was left for {', '.join(left)}: call again with the same folder"] * bool(left)
    print("; ".join(words))
    return 1 if failed else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
