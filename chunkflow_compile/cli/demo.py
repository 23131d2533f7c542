"""``chunkflow demo``: streams weights on two ranks, first over an emulated link that is nearly full, and then over one
with time to spare."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from chunkflow_compile.bench.bench_record import BenchRecord, summarise, why_busy
from chunkflow_compile.bench.job import RESIDENT, Job, job_of
from chunkflow_compile.bench.ranks import run_job
from chunkflow_compile.bench.regimes import DEMO
from chunkflow_compile.hardware.stopwatch import why_shared
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.report.pictures import draw_regimes
from chunkflow_compile.report.record import ArmRecord, check_folder, seconds
from chunkflow_compile.units import size

from .output import called, say, write_json

COLUMNS = 80  # the number of characters per line; every terminal is at least as wide
_PICTURE = "chunkflow-demo.png"
_SUBJECT = (
    "Two processes, the ranks, compute each step of a small video transformer together, and exchange data in all-to-alls. "
    "Copies of weights and all-to-alls share an emulated PCIe link. Compute is held to a fixed duration, as if a GPU did it."
)
_ARMS: Mapping[str, str] = {
    RESIDENT: "keeps all weights on the device.",
    "layerwise": "copies the whole next block of weights while a block computes.",
    "chunkflow": "copies chunks of weights at the times that its plan has chosen.",
}
# The title of each regime.
_TITLES: Mapping[str, str] = {
    "contention": "A PCIe link that is nearly full",
    "compute-rich": "A PCIe link with time to spare",
}
_MEANS: Mapping[str, str] = {
    "contention": "All weights and all-to-alls would keep the link busy for {load:.0f} % of a resident step, and a copy at "
    "the wrong time delays an all-to-all. Compare the step times.",
    "compute-rich": "All weights and all-to-alls would keep the link busy for {load:.0f} % of a resident step, so compute "
    "hides the copies. Compare the weights on the device; the step times hardly differ.",
}


def run(arguments: argparse.Namespace) -> int:
    given = {n: v for n in ("layers", "frames") if (v := getattr(arguments, n)) is not None}
    if min([arguments.steps, *given.values()]) < 1:
        raise ChunkflowError("--layers, --frames and --steps must be at least 1.")
    dump = None if arguments.dump is None else check_folder(arguments.dump)
    results: dict[str, BenchRecord] = {}
    busy: dict[str, str] = {}
    for name, regime in DEMO.items():
        sized = replace(regime, size=replace(regime.size, **given))
        folder = None if dump is None else str(dump / name)
        job = job_of(sized, arguments.steps, lowering=arguments.lowering, dump=folder, lines=True)
        shared = why_shared(job.ranks)
        ranks = run_job(job)
        results[name] = result = summarise(job, ranks)
        busy[name] = why_busy(result) or shared
        figures = _figures(result, bool(busy[name]))
        say(arguments, f"{_TITLES[name]} ({name})\n\n{figures}\n\n{_filled(_conditions(job, result))}\n")
    say(arguments, _meaning(results, busy))
    if dump is None:
        say(arguments, f"\nNo file is kept. To keep the programs and a picture:\n  {called('demo', '--dump', 'demo')}")
    else:
        program = ranks[0].arms["chunkflow"].program  # the program of the regime that was measured last
        _say_kept(arguments, dump, results, None if program is None else program.folder)
    bodies = {name: result.record.body for name, result in results.items()}
    write_json(arguments, {**bodies["compute-rich"], "regimes": bodies})
    return 0 if all(arm.equal_to_resident for r in results.values() for arm in r.record.arms.values()) else 1


def _say_kept(
    arguments: argparse.Namespace, dump: Path, results: Mapping[str, BenchRecord], program: Path | None
) -> None:
    """Draw the picture, and print the paths of the picture and of the program.  ``dump``: the folder for the picture.
    ``program``: the folder of the program, or None."""
    try:
        draw_regimes({name: result.record for name, result in results.items()}, dump / _PICTURE)
        say(arguments, f"\npicture: {dump / _PICTURE}")
    except ChunkflowError as error:  # matplotlib is not installed, or the file cannot be written
        say(arguments, f"\n{_filled(f'no picture: {error}')}")
    say(arguments, f"program: {program}/04_verified.py\nto explain it: {called('explain', str(program))}")


def _figures(result: BenchRecord, busy: bool) -> str:
    """Return a table with the figures of a regime and one column per arm.  ``busy``: whether the machine was busy.  In
    this case, ratios are left out."""
    arms = result.record.arms
    rows = [["step", *(seconds(arm.step_s) for arm in arms.values())]]
    if not busy:
        rows.append(["  relative to resident", *(f"{result.ratio(name, RESIDENT):.2f}" for name in arms)])
        middles = ("{:.2f} to {:.2f}".format(*result.middle(name, RESIDENT)) for name in arms if name != RESIDENT)
        rows.append(["  its middle half", "", *middles])
    rows += [
        ["waiting for weights", *(seconds(arm.exposed_h2d_s) for arm in arms.values())],
        ["in all-to-alls", *(seconds(arm.collective_s) for arm in arms.values())],
        ["weights on the device", *(size(arm.weights_device_bytes) for arm in arms.values())],
        ["  share of all weights", *(f"{100 * _share(arm):.0f} %" for arm in arms.values())],
        ["copied per step", *(size(arm.moved_bytes_per_step) for arm in arms.values())],
        [
            "outputs",
            "",
            *("identical" if a.equal_to_resident else "DIFFERENT" for n, a in arms.items() if n != RESIDENT),
        ],
    ]
    align = ("left", *("right" for _ in arms))
    return tabulate(rows, headers=["", *arms], disable_numparse=True, colalign=align, preserve_whitespace=True)


def _share(arm: ArmRecord) -> float:
    """Return the share of all weights that is on the device."""
    return (arm.weights_device_bytes or 0) / (arm.weights_total_bytes or 1)


def _conditions(job: Job, result: BenchRecord) -> str:
    link = "" if result.link is None else f" of {result.link.requested / 1e6:.1f} MB/s"
    return (
        f"{result.record.model}{link}; {job.ranks} ranks on the CPU, medians of {result.steps} "
        f"step{'s' * (result.steps > 1)}, slowest rank."
    )


def _meaning(results: Mapping[str, BenchRecord], busy: Mapping[str, str]) -> str:
    """Return the text below the figures of all regimes, which explains them and states each result in a sentence.

    ``busy``: for each regime, the evidence that the machine was busy; empty if it was idle.
    """
    width = max(map(len, _ARMS)) + 3
    arms = [f"{f'  {name}':{width}} {meaning}" for name, meaning in _ARMS.items()]
    said = [_filled(_SUBJECT), *arms]
    said += [
        "",
        _filled(
            "Waiting for weights: compute stood still until a weight had arrived. In all-to-alls: with the wait while copies "
            "hold the link. Outputs: compared with those of resident, bit for bit."
        ),
    ]
    for name, result in results.items():
        load = DEMO[name].load
        said += [
            "",
            _filled(f"{_TITLES[name]}. {_MEANS[name].format(load=100 * load)} {_finding(result, bool(busy[name]))}"),
        ]
    if told := "; ".join(f"{name}: {why}" for name, why in busy.items() if why):
        again = "Run the demo again when nothing else uses the processors."
        said += ["", _filled(f"The machine was busy with other work, so ratios are not shown ({told}). {again}")]
    return "\n".join(said)


def _finding(result: BenchRecord, busy: bool) -> str:
    """Return the result of a regime in a sentence.  ``busy``: whether the machine was busy.  In this case, the sentence
    contains no ratios."""
    held = f"{100 * _share(result.record.arms['chunkflow']):.0f} % of the weights on the device"
    if busy:
        return f"ChunkFlow kept {held}."
    return (
        f"A step of chunkflow took {result.ratio('chunkflow', RESIDENT):.2f} times as long as a resident one, with {held}; a "
        f"step of layerwise took {result.ratio('layerwise', RESIDENT):.2f} times as long."
    )


def _filled(text: str) -> str:
    """Wrap a text into lines of at most COLUMNS characters.  A longer word, such as a path, is put on a separate line."""
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)
