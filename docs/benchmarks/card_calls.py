"""Measure the public functions on a GPU: ``compile`` with and without CUDA graphs, ``apply``, adapters, a cycle of two
models, and the first step with and without caches.

python docs/benchmarks/card_calls.py --out calls.jsonl

The models are FLUX.1-dev and Wan2.2-TI2V-5B at full size, with random weights.  Each case runs in a separate process,
which writes a line as soon as an arm ends.  The cases that run ChunkFlow share one cache folder, which is empty at first.
If the output file exists, cases that have ended there are skipped.  Outputs are compared, bit for bit, with the outputs
of the same compiled model with all weights on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from card_cases import CASES, FLUX, WAN
from gpu_card import ready
from gpu_page import lines

from chunkflow_compile.passes.errors import ChunkflowError

# The minimum time in seconds to start a process and build its model.  With less time left, no case is started.
LEAST = 40.0
# The cases to run, the most important first, each with its model.
ORDER = (
    *(
        (case, FLUX)
        for case in ("compile", "second process", "graph", "packed", "apply", "adapters", "repeated blocks", "cycle")
    ),
    *((case, WAN) for case in ("compile", "second process", "packed", "apply", "adapters", "repeated blocks")),
    ("repeated blocks, second process", FLUX),
)


def add(out: Path, case: str, model: str, **figures: Any) -> None:
    line = json.dumps({"case": case, "model": model, **figures})
    print(line, flush=True)
    with out.open("a") as file:
        file.write(line + "\n")


def one(case: str, model: str, out: Path, small: bool) -> None:
    """Run a case in this process."""
    torch.set_grad_enabled(False)
    right = next((line["digest"] for line in lines(out) if line["model"] == model and "digest" in line), None)
    for figures in CASES[case](model, small):
        if "digest" in figures:
            right = right or figures["digest"]  # the digest of the first plan that the case ``compile`` measured
            figures["equal"] = figures["digest"] == right
        add(out, case, model, **figures)
    add(out, case, model, ended=True)


def run_all(out: Path, seconds: float, small: bool, chosen: Sequence[str]) -> int:
    """Run each case that has not ended, in a separate process.  Return 1 if a case failed, 3 if time was up before a
    case, otherwise 0."""
    start, status = time.monotonic(), 0
    done = {(line["case"], line["model"]) for line in lines(out) if line.get("ended")}
    with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
        for case, model in (which for which in ORDER if which not in done and " ".join(which) in chosen):
            left = seconds - (time.monotonic() - start)
            if left < LEAST:
                print(f"no time is left for {case}, {model}")
                return status or 3
            cache = theirs if case.startswith("repeated") else ours
            folders = {
                "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
                "TRITON_CACHE_DIR": f"{cache}/triton",
                "TMPDIR": cache,
            }
            command = [sys.executable, __file__, "--out", str(out), "--case", case, "--model", model]
            command += ["--small"] * small
            try:
                subprocess.run(command, env={**os.environ, **folders}, check=True, timeout=left)
            except subprocess.SubprocessError as error:
                status, said = 1, "cut off" if isinstance(error, subprocess.TimeoutExpired) else "its process ended"
                if "failed" not in (lines(out) or [{}])[-1]:
                    add(out, case, model, failed=said)
    return status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON lines; cases that have ended there are not run again"
    )
    parser.add_argument("--seconds", type=float, default=400.0, help="time for all cases (default 400)")
    parser.add_argument("--small", action="store_true", help="small models: shows that each case runs")
    cases = [" ".join(which) for which in ORDER]
    parser.add_argument("--cases", default="", metavar="CASE,CASE", help=f"of {', '.join(cases)} (default: all)")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=(FLUX, WAN), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is None:
        try:
            ready()
        except ChunkflowError as error:
            parser.exit(2, f"{error}\n")
        chosen = [case for case in given.cases.split(",") if case]
        if unknown := [case for case in chosen if case not in cases]:
            parser.error(f"--cases: there is no {', '.join(unknown)}")
        return run_all(given.out, given.seconds, given.small, chosen or cases)
    try:
        one(given.case, given.model, given.out, given.small)
    except Exception as error:  # noqa: BLE001  (the line says it)
        traceback.print_exc()
        add(given.out, given.case, given.model, failed=str(error) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
