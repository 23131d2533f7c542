"""``chunkflow dump``: the program at every stage of compilation, as text, files and diffs."""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from pathlib import Path

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.names import STAGES, StageName
from chunkflow_compile.passes.pass_pipeline import Stage, stages
from chunkflow_compile.passes.planning import Settings
from chunkflow_compile.report.lines import op_counts, stage_lines
from chunkflow_compile.report.listings import render
from chunkflow_compile.report.logs import logged
from chunkflow_compile.report.record import fitted
from chunkflow_compile.report.stages import StageWriter, annotator
from chunkflow_compile.weights.progress import Progress

from .output import say, write_json
from .planned_model import PlannedModel
from .planning_arguments import load_target, options_of


def run(arguments: argparse.Namespace) -> int:
    last = _last(arguments)
    writer = None
    if arguments.out:  # before tracing, so that the error about an unwritable folder comes early
        hardware = options_of(arguments).profile()
        writer = StageWriter(Path(arguments.out), hardware, annotate=arguments.annotate)
    progress = Progress(1 + STAGES.index(last) + 1)  # one phase for tracing, and one per stage
    target = load_target(arguments, progress, graph=True)
    traced, settings, pieces = _shown(arguments, target)
    run_to_last = stages(traced, settings, pieces=pieces, verify_each=arguments.verify_each, last=last)
    finished: list[Stage] = []
    times: list[tuple[str, str, str]] = []
    run_logged = logged(run_to_last, target.hardware)
    try:
        for name in (*STAGES[: STAGES.index(last) + 1], "checking"):
            with progress.phase(name):
                start = time.perf_counter()
                stage = next(run_logged, None)
                if stage is None:
                    break
                proof = "" if stage.proof is None else str(stage.proof)
                times.append((stage.name, f"{time.perf_counter() - start:.2f} s", proof))
                finished.append(stage)
                if writer is not None:
                    writer.add(stage)
        if arguments.verify_each:
            print(f"contracts hold: {', '.join(s.name for s in finished)}", file=sys.stderr)
        if arguments.verbose:
            print(fitted(times, tablefmt="plain"), file=sys.stderr)
    finally:
        if finished:
            _show(arguments, target, finished, writer)
    return 0


def _shown(arguments: argparse.Namespace, target: PlannedModel) -> tuple[Traced, Settings, Cut | None]:
    """Return the graph to show (the preamble, or the graph that runs in every step), its settings, and its cut if there
    is one already."""
    hoisting = target.hoisting
    if arguments.preamble:
        if hoisting is None:
            raise ChunkflowError("--preamble: nothing is hoisted. Give --hoist too, or leave it out.")
        return hoisting.halves.preamble, hoisting.preamble, hoisting.preamble_cut
    pieces = (
        target.cut if target.settings.goal.pack else None
    )  # PlannedModel.cut raises an error if no weight can be packed
    if hoisting is None:
        return target.traced, target.settings_of_cut, pieces
    return hoisting.halves.main, hoisting.main, pieces


def _show(
    arguments: argparse.Namespace, target: PlannedModel, finished: list[Stage], writer: StageWriter | None
) -> None:
    """Print or write the stages.  If a stage failed, they show the state before the failure."""
    heading = target.heading_of(arguments.preamble)
    if writer is None:
        stage = finished[-1]
        note = annotator(stage, target.hardware) if arguments.annotate else None
        say(arguments, render(stage_lines(stage), note, full=arguments.full).rstrip("\n"))
    else:
        report = writer.finish(heading, target.forwards)
        rows = [(w.name, w.path.name, w.lines, w.added, w.removed) for w in writer.written]
        say(arguments, f"{heading}\n")
        say(arguments, fitted(rows, ("stage", "file", "lines", "added", "removed")))
        say(arguments, f"\nread first: {report}")
    if arguments.json:
        counts = {s.name: dict(sorted(op_counts(stage_lines(s)).items())) for s in finished}
        write_json(arguments, {"model": heading, "ops": counts})


def _last(arguments: argparse.Namespace) -> StageName:
    """Return the name of the last stage to run.  Raises ChunkflowError if there is no stage of this name, or if its pass
    is disabled."""
    name = arguments.stage or STAGES[-1]
    for stage in STAGES:
        if stage == name:
            if arguments.stage and stage == "verified" and "verify" in arguments.disable_pass:
                raise ChunkflowError("--stage verified: --disable-pass verify leaves it out. Use one of the two.")
            return stage
    close = difflib.get_close_matches(name, STAGES, n=1, cutoff=0.0)[0]
    raise ChunkflowError(f"There is no stage {name!r}; did you mean {close!r}? The stages are {', '.join(STAGES)}.")
