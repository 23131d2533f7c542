"""``chunkflow hardware``: lists the hardware profiles for which plans can be made."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from chunkflow_compile.hardware import profiles
from chunkflow_compile.hardware.profiles import MEASURED, load_profile, measured_profile, profile_names
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.report.record import fitted, prose

from .arguments import DEFAULT_MACHINE
from .output import say, write_json

# The figures that determine a plan for one GPU, each with the profile field whose source is shown.
_FIGURES = {"GEMMs": "gemm_flops", "attention": "attention_flops", "PCIe": "eta_pref"}
_NOTES = (
    "PCIe: bandwidth of long copies from host memory to one GPU; gh200 uses NVLink-C2C. GEMMs: large ones in bfloat16, or in "
    "float32 on a CPU. measured: which of PCIe, GEMMs and attention were measured on such a GPU; the others are assumed from "
    "similar ones or from data sheets. Each figure and its source: {folder}."
)


def run(arguments: argparse.Namespace) -> int:
    listed = list(_profiles())
    headers = ("--hardware", "GPU memory", "PCIe, GB/s", "GEMMs, TFLOP/s", "link between GPUs", "measured")
    say(arguments, fitted([_row(name, profile) for name, profile in listed], headers))
    folder = Path(profiles.__file__).parent
    say(arguments, "\n" + prose(_NOTES.format(folder=folder)))
    say(
        arguments,
        "\n"
        + prose(
            f"Without --hardware, commands plan for this machine's GPU, or for {DEFAULT_MACHINE} where there is none. For "
            "any other machine, run chunkflow calibrate there, or copy one of these files and give its path."
        ),
    )
    write_json(arguments, [profile for _, profile in listed])
    return 0


def _profiles() -> Iterator[tuple[str, Hardware]]:
    """Yield the profile that was measured on this machine, if it can be read, and then the built-in profiles, sorted by
    memory."""
    if measured_profile()[0] is not None:
        try:
            yield MEASURED, load_profile(MEASURED)
        except ChunkflowError as error:
            print(f"note: the profile of this machine is left out. {error}", file=sys.stderr)
    found = [(name, load_profile(name)) for name in profile_names()]
    yield from sorted(found, key=lambda one: (one[1].memory_bytes, one[0]))


def _row(name: str, profile: Hardware) -> tuple[str, ...]:
    rate = profile.gemm_flops.get("bfloat16", max(profile.gemm_flops.values())) / 1e12
    return (
        name,
        f"{profile.memory_bytes / 2**30:.4g} GiB" if profile.memory_bytes else "-",
        f"{profile.copy_rate / 1e9:.1f}",
        f"{rate:.0f}" if rate >= 1 else f"{rate:.2f}",
        "PCIe" if profile.shared_link else "NVLink or XGMI",
        ", ".join(what for what, field in _FIGURES.items() if _is_measured(profile, field)) or "-",
    )


def _is_measured(profile: Hardware, field: str) -> bool:
    """Whether a figure of a profile was measured on such a GPU, according to the source of the figure."""
    source = profile.sources.get(field, "")
    if "assumed for others" in source:  # it was measured only on the GPU that the source names
        return any(re.search(rf"\b{re.escape(card.rpartition(' ')[2])}\b", source) for card in profile.cards)
    return "measured" in source and not source.startswith(("assumption", "as "))
