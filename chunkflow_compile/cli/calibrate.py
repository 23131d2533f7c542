"""``chunkflow calibrate``: measures this machine and writes a hardware profile."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import torch

from chunkflow_compile.hardware.calibrate import STAGES, calibrate
from chunkflow_compile.hardware.device_figures import repeated_seconds
from chunkflow_compile.hardware.drive_rate import drive_rate
from chunkflow_compile.hardware.profiles import measured_path
from chunkflow_compile.hardware.stopwatch import why_uneven
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.report.record import check_writable, fitted, prose
from chunkflow_compile.runtime.device import check_device
from chunkflow_compile.runtime.link import MOST_RANKS
from chunkflow_compile.units import parse_rate, size
from chunkflow_compile.weights.progress import Progress


def run(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out) if arguments.out else measured_path()
    name = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = check_device(torch.device(name))
    emulated = None
    if arguments.emulate:
        if name != "cpu":
            raise ChunkflowError(f"--emulate: --device {name} has a link of its own; use --device cpu.")
        emulated = LinkEmulation(bandwidth=parse_rate(arguments.emulate, "emulate"), shared=arguments.one_port or "")
    elif arguments.one_port:
        raise ChunkflowError("--one-port is of an emulated link: give --emulate too.")
    if arguments.ranks is not None:
        most = torch.cuda.device_count() if name == "cuda" else MOST_RANKS
        if not 1 <= arguments.ranks <= most:
            raise ChunkflowError(f"--ranks must be from 1 to {most}, one for each device, not {arguments.ranks}.")
    if not arguments.out:
        with contextlib.suppress(OSError):  # if this fails, check_writable raises the error
            out.parent.mkdir(parents=True, exist_ok=True)
    check_writable(out)
    rate = None if arguments.drive is None else drive_rate(arguments.drive)
    progress = Progress(len(STAGES) + 2)
    with progress.phase("checking that the machine is idle"):
        same_work_s = repeated_seconds(device)
    profile = calibrate(
        device, arguments.name or out.stem, emulated, arguments.loopback, arguments.ranks, progress.phase
    )
    with progress.phase("checking that the machine has been idle"):
        same_work_s += repeated_seconds(device)
    if rate is not None:
        sources = {**profile.sources, "drive_bandwidth": f"measured on {arguments.drive}"}
        profile = replace(profile, drive_bandwidth=rate, sources=sources)
    out.write_text(profile.to_json())
    print(profile_table(profile))
    if why := _why_no_pulls(profile):
        print("\n" + prose(f"no pulls from other ranks: {why}"))
    print(f"\nprofile: {out}")
    if busy := why_uneven("equal GEMMs", same_work_s):
        warning = (
            f"note: the machine was busy with other work, so the profile cannot be trusted: {busy}. Run chunkflow calibrate "
            f"again when nothing else uses the {'processors' if name == 'cpu' else 'GPU'}."
        )
        print(prose(warning), file=sys.stderr)
    return 0


def _why_no_pulls(profile: Hardware) -> str:
    """Return the reason why ranks do not pull weights from each other; empty if they do, or if this was not measured."""
    how = profile.sources["peer_bandwidth"]
    return "" if profile.peer_bandwidth or how.startswith("not measured") else how.removeprefix("0: ")


def profile_table(profile: Hardware) -> str:
    """Return the figures of a profile as a table."""
    rows = [(f"GEMM in {d}", f"{rate / 1e12:.3g} TFLOP/s") for d, rate in profile.gemm_flops.items()]
    rows += [(f"attention by {k}", f"{rate / 1e12:.3g} TFLOP/s") for k, rate in profile.attention_flops.items()]
    latency_us = profile.collective_latency_s * 1e6
    assumed = "" if "drive_bandwidth" in profile.sources else ", assumed"
    rows += [
        ("attention takes", profile.attention),
        ("memory", f"{profile.memory_rate / 1e9:.4g} GB/s"),
        ("cache", f"{size(profile.cache_bytes)}, {profile.cache_bandwidth / 1e9:.4g} GB/s"),
        ("small kernel", f"{profile.kernel_s * 1e6:.3g} us"),
        ("copy to the device", f"{profile.copy_rate / 1e9:.4g} GB/s, {profile.chunk_s * 1e6:.3g} us per chunk"),
        (
            "copies of all ranks",
            f"{profile.host_bandwidth / 1e9:.4g} GB/s" if profile.host_bandwidth else "not measured",
        ),
        ("collective", f"{profile.collective_bandwidth / 1e9:.4g} GB/s, {latency_us:.3g} us each"),
        ("SSD", f"{profile.drive_bandwidth / 1e9:.4g} GB/s{assumed}"),
        ("region", f"{profile.launch_s * 1e6:.3g} us"),
        ("copy during a collective", f"{profile.copy_slowdown:.2f} times as long"),
        ("collective during a copy", f"{profile.collective_slowdown:.2f} times as long"),
        ("compute during a copy", f"{profile.compute_slowdown:.2f} times as long"),
        ("attention during a collective", f"{profile.attention_slowdown:.2f} times as long"),
    ]
    if profile.peer_bandwidth:
        rows += [
            ("pulls from all other ranks", f"{profile.peer_bandwidth / 1e9:.4g} GB/s"),
            ("pull during a collective", f"{profile.pull_slowdown:.2f} times as long"),
            ("collective during pulls", f"{profile.collective_pull_slowdown:.2f} times as long"),
            ("compute during pulls", f"{profile.compute_pull_slowdown:.2f} times as long"),
        ]
    return fitted(rows)
