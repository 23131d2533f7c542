"""The first half hour on a card, in parts of at most nine minutes: make card.

python docs/benchmarks/gpu_parts.py --out card

Each part leaves its figures in the folder as it goes, and the page is written anew after each.  Called again with the same
folder, it runs the parts that have not passed.
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
# Seconds of a part.
MOST = 540.0
# Seconds between the request to end and the end.
_GRACE = 10.0
# The public calls that are measured before the checks of graphs; the others come after the profile.
FIRST_CALLS = ("compile flux.1-dev", "second process flux.1-dev", "apply flux.1-dev", "adapters flux.1-dev")
# Ranks are processes of this machine, whose name may have no address.
_NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# The stand-in for CUDA's runtime computes only where numbers are compared: one card, and no matrix of a calibration.
_NO_COMPUTE = {"STAND_IN_DEVICES": "1", "STAND_IN_COMPUTE": "0"}
_COMPUTE = {**_NO_COMPUTE, "STAND_IN_COMPUTE": "1"}


@dataclass(frozen=True)
class Part:
    """``command``: arguments of Python.  ``least``: with fewer seconds left, it is not started.  ``dry``: the environment of
    a rehearsal."""

    command: tuple[str, ...]
    least: float
    dry: Mapping[str, str]


def parts_of(page: Path, dry: bool, limit: float = MOST) -> dict[str, Part]:
    """The parts by name, in their order: the most decisive first.  ``limit``: seconds for the next one."""
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
    """Tests at once, if pytest-xdist is there: eight processes leave a card of 80 GB its memory."""
    count = min(8, max(2, len(os.sched_getaffinity(0)) // 2))
    return ("-n", str(count)) if importlib.util.find_spec("xdist") else ()


def run(part: Part, log: Path, limit: float, dry: bool) -> dict[str, Any]:
    """Run a part, on the screen and to the log; whether it passed, its seconds, and what is to be said of it."""
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
    """End a child, if it has not ended, and the processes that it has started, which are of its process group."""
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that children end
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
    """Say how the parts ended; 0 if each has passed or was not asked for, 1 if one failed, 3 if time was up before one."""
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
