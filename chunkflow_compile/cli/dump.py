"""``chunkflow dump``: the program at every stage of compilation, as text, files and differences."""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from pathlib import Path

from tabulate import tabulate

from chunkflow_compile.cli import target
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import STAGES, StageName
from chunkflow_compile.passes.pipeline import Stage, stages
from chunkflow_compile.report.lines import op_counts, stage_lines
from chunkflow_compile.report.listings import render
from chunkflow_compile.report.logs import logged
from chunkflow_compile.report.stages import StageWriter, annotator

from .output import Progress, say, write_json


def run(arguments: argparse.Namespace) -> int:
    last = _last(arguments)
    writer = None
    if arguments.out:  # before tracing, so that an unwritable folder fails early
        hardware = target.options_of(arguments).profile()
        writer = StageWriter(Path(arguments.out), hardware, annotate=arguments.annotate)
    progress = Progress(1 + STAGES.index(last) + 1)  # the tracing and each stage
    found = target.load_target(arguments, progress)
    run_to_last = stages(found.traced, found.settings, verify_each=arguments.verify_each, last=last)
    made: list[Stage] = []
    took: list[tuple[str, str, str]] = []
    coming = logged(run_to_last, found.hardware)
    try:
        for name in (*STAGES[: STAGES.index(last) + 1], "checking"):
            with progress.phase(name):
                start = time.perf_counter()
                stage = next(coming, None)
                if stage is None:
                    break
                proof = "" if stage.proof is None else str(stage.proof)
                took.append((stage.name, f"{time.perf_counter() - start:.2f} s", proof))
                made.append(stage)
                if writer is not None:
                    writer.add(stage)
        if arguments.verify_each:
            print(f"contracts hold: {', '.join(s.name for s in made)}", file=sys.stderr)
        if arguments.verbose:
            print(tabulate(took, tablefmt="plain"), file=sys.stderr)
    finally:
        if made:
            _show(arguments, found, made, writer)
    return 0


def _show(arguments: argparse.Namespace, found: target.Target, made: list[Stage], writer: StageWriter | None) -> None:
    """Print or write the stages, also of a run that failed: they show what led to the failure."""
    if writer is None:
        stage = made[-1]
        note = annotator(stage, found.hardware) if arguments.annotate else None
        say(arguments, render(stage_lines(stage), note, full=arguments.full).rstrip("\n"))
    else:
        report = writer.finish(found.heading, found.forwards)
        rows = [
            (w.name, w.path.name, w.lines, *(("", "") if w.change is None else (f"+{w.change[0]}", f"-{w.change[1]}")))
            for w in writer.written
        ]
        say(arguments, f"{found.heading}\n")
        say(arguments, tabulate(rows, headers=("stage", "file", "lines", "added", "removed")))
        say(arguments, f"\nread first: {report}")
    if arguments.json:
        counts = {s.name: dict(sorted(op_counts(stage_lines(s)).items())) for s in made}
        write_json(arguments, {"model": found.heading, "ops": counts})


def _last(arguments: argparse.Namespace) -> StageName:
    """The stage to stop after.  Raises ChunkflowError if there is none of that name, or if its pass is disabled."""
    name = arguments.stage or STAGES[-1]
    for stage in STAGES:
        if stage == name:
            if arguments.stage and stage == "verified" and "verify" in arguments.disable_pass:
                raise ChunkflowError("--stage verified: --disable-pass verify leaves it out. Use one of the two.")
            return stage
    close = difflib.get_close_matches(name, STAGES, n=1, cutoff=0.0)[0]
    raise ChunkflowError(f"There is no stage {name!r}; did you mean {close!r}? The stages are {', '.join(STAGES)}.")
