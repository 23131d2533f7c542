"""``chunkflow calibrate``: measures this machine into a hardware profile."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import replace
from pathlib import Path

import torch
from tabulate import tabulate

from chunkflow_compile.hardware.calibrate import calibrate
from chunkflow_compile.hardware.drive_rate import drive_rate
from chunkflow_compile.hardware.profiles import measured_path
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.report.record import check_writable
from chunkflow_compile.runtime.device import check_device
from chunkflow_compile.runtime.link import MOST_RANKS
from chunkflow_compile.units import parse_rate, size


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
        with contextlib.suppress(OSError):  # check_writable reports a folder that cannot be created
            out.parent.mkdir(parents=True, exist_ok=True)
    check_writable(out)
    rate = None if arguments.drive is None else drive_rate(arguments.drive)
    profile = calibrate(device, arguments.name or out.stem, emulated, arguments.loopback, arguments.ranks)
    if rate is not None:
        sources = {**profile.sources, "drive_bandwidth": f"measured on {arguments.drive}"}
        profile = replace(profile, drive_bandwidth=rate, sources=sources)
    out.write_text(profile.to_json())
    print(profile_table(profile))
    if why := _why_no_pulls(profile):
        print(f"\nno pulls from other ranks: {why}")
    print(f"\nprofile: {out}")
    return 0


def _why_no_pulls(profile: Hardware) -> str:
    """Why ranks do not pull from each other, empty if they do or if none were measured."""
    how = profile.sources["peer_bandwidth"]
    return "" if profile.peer_bandwidth or how.startswith("not measured") else how.removeprefix("0: ")


def profile_table(profile: Hardware) -> str:
    """The figures of a profile as a table."""
    rows = [(f"GEMM in {d}", f"{rate / 1e12:.3g} TFLOP/s") for d, rate in profile.gemm_flops.items()]
    rows += [(f"attention by {k}", f"{rate / 1e12:.3g} TFLOP/s") for k, rate in profile.attention_flops.items()]
    latency_us = profile.collective_latency_s * 1e6
    assumed = "" if "drive_bandwidth" in profile.sources else ", assumed"
    rows += [
        ("attention takes", profile.attention),
        ("memory", f"{profile.memory_rate / 1e9:.4g} GB/s"),
        ("cache", f"{size(profile.cache_bytes)}, {profile.cache_bandwidth / 1e9:.4g} GB/s"),
        ("a kernel", f"{profile.kernel_s * 1e6:.3g} us"),
        ("copy to the device", f"{profile.copy_rate / 1e9:.4g} GB/s, {profile.chunk_s * 1e6:.3g} us a chunk"),
        (
            "copies of all ranks",
            f"{profile.host_bandwidth / 1e9:.4g} GB/s" if profile.host_bandwidth else "not measured",
        ),
        ("collective", f"{profile.collective_bandwidth / 1e9:.4g} GB/s, {latency_us:.3g} us each"),
        ("drive", f"{profile.drive_bandwidth / 1e9:.4g} GB/s{assumed}"),
        ("a region", f"{profile.launch_s * 1e6:.3g} us"),
        ("copy beside a collective", f"{profile.copy_slowdown:.2f} times as long"),
        ("collective beside a copy", f"{profile.collective_slowdown:.2f} times as long"),
        ("compute beside a copy", f"{profile.compute_slowdown:.2f} times as long"),
    ]
    if profile.peer_bandwidth:
        rows += [
            ("pulls from all other ranks", f"{profile.peer_bandwidth / 1e9:.4g} GB/s"),
            ("pull beside a collective", f"{profile.pull_slowdown:.2f} times as long"),
            ("collective beside pulls", f"{profile.collective_pull_slowdown:.2f} times as long"),
            ("compute beside pulls", f"{profile.compute_pull_slowdown:.2f} times as long"),
        ]
    return tabulate(rows)
