"""``chunkflow demo``: weight streaming on two ranks, over a nearly full link and over one with time to spare."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from chunkflow_compile.bench.job import RESIDENT, Job, job_of
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import DEMO
from chunkflow_compile.bench.summary import BenchRecord, summarise, why_busy
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.report.pictures import draw_regimes
from chunkflow_compile.report.record import PROSE_WIDTH, bars, check_folder, prose, table

from .output import called, say, write_json

_PICTURE = "chunkflow-demo.png"
_SUBJECT = (
    "Two processes, the ranks, compute each step of a small video transformer together, and exchange data in all-to-alls. "
    "Three arms hold its weights in different ways and take turns. resident keeps all of them on the device. layerwise "
    "fetches the whole next block while a block computes. chunkflow copies chunks of weights at the times that its plan has "
    "chosen. Copies and all-to-alls share an emulated link, and compute is held to a fixed duration."
)
_COLUMNS: Mapping[str, str] = {
    "waited for weights": "compute stood still until a weight had arrived",
    "collectives": "time in all-to-alls, with the wait while copies hold the link; this is why layerwise can be slower "
    "than resident although it waited 0.0 ms for weights",
    "copied per step": "bytes copied from host memory",
    "to resident": "step time divided by that of resident, median of all rounds (and their middle half)",
    "equal to resident": "whether the outputs are equal bit for bit",
}
# By regime: what it means, with the load of its link, and what to compare.
_MEANS: Mapping[str, str] = {
    "contention": "The link is nearly full: all weights and all-to-alls would keep it busy for {load:.0%} of a resident "
    "step, and a copy at the wrong time delays an all-to-all. Compare step times.",
    "compute-rich": "The link has time to spare: all weights and all-to-alls would keep it busy for {load:.0%} of a "
    "resident step, so all copies are hidden. Compare the weights on device; step times hardly differ.",
}
# For terminals whose encoding has no block characters.
_ASCII = {ord("█"): "#", **dict.fromkeys(map(ord, "▏▎▍▌▋▊▉"), "")}


def run(arguments: argparse.Namespace) -> int:
    given = {n: v for n in ("layers", "frames") if (v := getattr(arguments, n)) is not None}
    if min([arguments.steps, *given.values()]) < 1:
        raise ChunkflowError("--layers, --frames and --steps must be at least 1.")
    dump = None if arguments.dump is None else check_folder(arguments.dump)
    results: dict[str, BenchRecord] = {}
    say(arguments, f"{prose(_SUBJECT)}\n\nColumns of the tables:\n{_columns()}")
    for name, regime in DEMO.items():
        say(arguments, "\n" + prose(f"{name}: {_MEANS[name].format(load=regime.load)}"))
        sized = replace(regime, size=replace(regime.size, **given))
        folder = None if dump is None else str(dump / name)
        job = job_of(sized, arguments.steps, lowering=arguments.lowering, dump=folder, lines=True)
        ranks = run_job(job)
        results[name] = result = summarise(job, ranks)
        ratios = {arm: _ratio(result, arm, RESIDENT) for arm in result.record.arms}
        shown = table(result.record, {"to resident": ratios})
        say(arguments, f"\n{prose(_conditions(job, result))}\n\n{shown}\n\n{_printable(bars(result.record))}")
    say(arguments, "")
    for name, result in results.items():
        say(arguments, prose(f"{name}: {_finding(result)}"))
    if dump is None:
        say(arguments, f"\nNo file is kept. To keep the programs and a picture: {called('demo', '--dump', 'demo')}")
    else:
        program = ranks[0].arms["chunkflow"].program  # of the regime that was measured last
        _say_kept(arguments, dump, results, None if program is None else program.folder)
    if busy := _busy(results):
        say(arguments, f"\n{busy}")
    bodies = {name: result.record.body for name, result in results.items()}
    write_json(arguments, {**bodies["compute-rich"], "regimes": bodies})
    return 0 if all(arm.equal_to_resident for r in results.values() for arm in r.record.arms.values()) else 1


def _say_kept(
    arguments: argparse.Namespace, dump: Path, results: Mapping[str, BenchRecord], program: Path | None
) -> None:
    """Draw the picture into ``dump``, and say what is there.  ``program``: the folder of a program."""
    try:
        draw_regimes({name: result.record for name, result in results.items()}, dump / _PICTURE)
        say(arguments, f"\npicture: {dump / _PICTURE}")
    except ChunkflowError as error:  # matplotlib is not installed, or the file cannot be written
        say(arguments, f"\nno picture: {error}")
    say(arguments, f"program: {program}/04_verified.py\nto explain it: {called('explain', str(program))}")


def _conditions(job: Job, result: BenchRecord) -> str:
    link = "" if result.link is None else f" of {result.link.requested / 1e6:.1f} MB/s"
    return (
        f"{result.record.model}{link}; {job.ranks} ranks on the CPU, medians of {result.steps} "
        f"step{'s' * (result.steps > 1)}, slowest rank"
    )


def _finding(result: BenchRecord) -> str:
    """The result of a regime, in one sentence."""
    mine = result.record.arms["chunkflow"]
    share = (mine.weights_device_bytes or 0) / (mine.weights_total_bytes or 1)
    return (
        f"a step of chunkflow takes {_ratio(result, 'chunkflow', RESIDENT)} times as long as the resident step, with "
        f"{100 * share:.0f} % of the weights on the device; it is {_ratio(result, 'layerwise', 'chunkflow')} times as "
        "fast as layerwise"
    )


def _ratio(result: BenchRecord, arm: str, base: str) -> str:
    """The median of all rounds, and their middle half."""
    if arm == base:
        return "1.00"
    low, high = result.middle(arm, base)
    return f"{result.ratio(arm, base):.2f} ({low:.2f} to {high:.2f})"


def _busy(results: Mapping[str, BenchRecord]) -> str:
    """That the ratios cannot be trusted, and why; "" if the machine was quiet."""
    signs = {name: why for name, result in results.items() if (why := why_busy(result))}
    if not signs:
        return ""
    told = "; ".join(f"in {name}, {why}" for name, why in signs.items())
    return prose(
        f"The machine was busy with other work, so the ratios cannot be trusted: {told}. Run the demo again when nothing "
        "else uses the processors."
    )


def _columns() -> str:
    width = max(map(len, _COLUMNS)) + 4
    return "\n".join(
        textwrap.fill(
            f"{'  ' + column:{width}}{meaning}", PROSE_WIDTH, subsequent_indent=" " * width, break_on_hyphens=False
        )
        for column, meaning in _COLUMNS.items()
    )


def _printable(text: str) -> str:
    """``text`` as stdout can show it."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
        return text
    except UnicodeEncodeError:
        return text.translate(_ASCII)
