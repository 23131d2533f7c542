"""What the planning commands are given alike: a model, its sizes, a machine, a goal."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from chunkflow_compile.hardware.profiles import load_profile, profile_names
from chunkflow_compile.models.presets import PRESETS, preset
from chunkflow_compile.models.weightless import load_build, trace_without_weights
from chunkflow_compile.options import DEFAULT_CHUNK_BYTES, DEFAULT_MIN_BYTES, Options
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.regions import DEFAULT_GROUP_BYTES, Cut
from chunkflow_compile.units import parse_bytes

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A traced model and the machine it is planned for.  ``forwards``: calls of the model a denoising step."""

    title: str
    cut: Cut
    degree: int
    forwards: int
    hardware: Hardware
    options: Options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(PRESETS)}, or file.py:function for your own")
    parser.add_argument("--ulysses", type=int, default=1, metavar="P", help="Ulysses degree (default 1)")
    parser.add_argument(
        "--hardware",
        default="h100-pcie-x2",
        metavar="HW",
        help=f"{', '.join(profile_names())}, a JSON file, or measured (default h100-pcie-x2)",
    )
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument(
        "--memory", metavar="SIZE", help="most weight bytes on the device, as 4GiB: the fastest plan in them"
    )
    goal.add_argument(
        "--slowdown",
        type=float,
        metavar="X",
        help="longest step over resident weights: the smallest plan (default 1.02)",
    )
    sizes = parser.add_argument_group("sizes of a preset (defaults: its published ones)")
    for name, text in (
        ("frames", "frames of video"),
        ("height", "pixels"),
        ("width", "pixels"),
        ("batch", "samples"),
        ("text", "tokens of the prompt"),
    ):
        sizes.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument(
        "--forwards", type=int, metavar="N", help="calls of the model a step (default: the preset's guidance)"
    )
    for name, default in (
        ("chunk-bytes", DEFAULT_CHUNK_BYTES),
        ("min-bytes", DEFAULT_MIN_BYTES),
        ("group-bytes", DEFAULT_GROUP_BYTES),
    ):
        parser.add_argument(
            f"--{name}", default=str(default), metavar="SIZE", help=f"as in options (default {default >> 20} MiB)"
        )


def load(arguments: argparse.Namespace) -> Target:
    """Checks everything, then traces, which takes up to a minute for a large model."""
    if arguments.ulysses < 1 or (arguments.forwards is not None and arguments.forwards < 1):
        raise ChunkflowError("--ulysses and --forwards must be at least 1.")
    options = Options(
        memory=arguments.memory,
        slowdown=arguments.slowdown,
        hardware=arguments.hardware,
        chunk_bytes=parse_bytes(_number(arguments.chunk_bytes), "--chunk-bytes"),
        min_bytes=parse_bytes(_number(arguments.min_bytes), "--min-bytes"),
        group_bytes=parse_bytes(_number(arguments.group_bytes), "--group-bytes"),
    )
    given = {n: getattr(arguments, n) for n in ("frames", "height", "width", "batch", "text")}
    given = {n: v for n, v in given.items() if v is not None}
    if ":" in arguments.model or ".py" in arguments.model:
        if given:
            raise ChunkflowError(
                f"--{next(iter(given))} is a size of a preset; your own function makes its own inputs."
            )
        build = load_build(arguments.model)
        cut = _patiently(arguments.model, lambda: trace_without_weights(build, arguments.ulysses, options))
        return _target(arguments.model, cut, arguments, options, 1)
    found = preset(arguments.model)
    sizes = replace(found.sizes, **given)
    found.shape(sizes)
    cut = _patiently(found.name, lambda: found.trace(arguments.ulysses, sizes, options))
    what = f"{sizes.frames} frames of " if sizes.frames > 1 else ""
    title = f"{found.name}, {what}{sizes.height}x{sizes.width}, batch {sizes.batch}"
    return _target(title, cut, arguments, options, found.forwards)


def _target(title: str, cut: Cut, arguments: argparse.Namespace, options: Options, forwards: int) -> Target:
    hardware = load_profile(arguments.hardware)
    dtypes = sorted({r.cost.dtype for r in cut.problem.regions if r.cost.flops} - set(hardware.peak_flops))
    if dtypes:
        known = ", ".join(hardware.peak_flops)
        print(
            f"note: {hardware.name} has no rate for {', '.join(dtypes)}; planned at its slowest of {known}",
            file=sys.stderr,
        )
    return Target(
        title=title,
        cut=cut,
        degree=arguments.ulysses,
        forwards=arguments.forwards or forwards,
        hardware=hardware,
        options=options,
    )


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _patiently(what: str, work: Callable[[], T]) -> T:
    """Says what takes so long; diffusers' remarks about missing GPUs do not belong into a table."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    if sys.stderr.isatty():
        print(f"tracing {what} without weights (half a minute for 10,000 nodes) ...", file=sys.stderr, flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return work()
        except ChunkflowError:
            raise
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            said = next((line for line in lines if line.startswith("got ")), lines[0] if lines else "")
            raise ChunkflowError(f"{what} cannot be traced: {type(error).__name__}: {said}") from error
