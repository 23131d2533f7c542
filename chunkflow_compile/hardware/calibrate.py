"""Calibration: measure the CPU or the GPUs of a machine, and create a hardware profile from the results.

Every measured figure is based on medians of several repetitions.  ``STAGES`` lists the stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from chunkflow_compile.passes.hardware import Hardware, LinkEmulation

from .device_figures import Figure, call_figures, compute_figures, copy_figures, memory_figures, warm_up
from .machine import device_name
from .rank_figures import LINK_RANKS, assumed_link_figures, joint_copy_figures, joint_pull_figures, link_figures

# The stages of the measurement, in order.
STAGES = (
    "GEMMs and attention",
    "memory",
    "calls",
    "copies",
    "collectives and compute, alone and while copies run",
    "copies of all ranks at once",
    "pulls from the GPUs of other ranks",
)
_AS_IT_IS = ("not measured", "assumption", "0:", "1:", "as the driver says")


def calibrate(
    device: torch.device,
    name: str,
    emulated: LinkEmulation | None = None,
    loopback: bool = False,
    together: int | None = None,
    phase: Callable[[str], AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> Hardware:
    """Measure ``device``, and return a profile called ``name``.

    ``emulated``: an emulated PCIe link for copies and collectives, or None to measure the real links.  The profile
    contains the emulated link, so programs that are compiled for the profile use it, too.
    ``loopback``: whether to measure collectives within one process, through host memory.  This measurement needs only
    one GPU.
    ``together``: the number of ranks that copy at the same time and pull from each other.  The default is one rank per
    GPU, or one rank on a CPU.
    ``phase``: a function that takes the name of a stage, and returns a context in which this stage is measured.
    Raises ChunkflowError if a rank fails, or if the machine is too busy to be measured.
    """
    together = together or (1 if device.type == "cpu" else torch.cuda.device_count())
    ranks = device.type == "cpu" or loopback or torch.cuda.device_count() >= LINK_RANKS
    figures: dict[str, Any] = {"eta_pref": 1.0}
    sources = {"eta_pref": "1: the bandwidth is measured, not nominal"}
    link = (
        partial(link_figures, device, emulated, loopback) if ranks else partial(assumed_link_figures, device, figures)
    )
    measures: tuple[Callable[[], Iterable[Figure]], ...] = (
        partial(compute_figures, device),
        partial(memory_figures, device),
        partial(call_figures, device),
        partial(copy_figures, device, emulated),
        link,
        partial(joint_copy_figures, device, emulated, together),
        partial(joint_pull_figures, device, emulated, together, not loopback, figures),
    )
    by = f"measured on {device_name(device)}, torch {torch.__version__}"
    warm_up(device)
    for stage, measure in zip(STAGES, measures, strict=True):
        with phase(f"measuring {stage}"):
            for figure, value, how in measure():
                figures[figure], sources[figure] = value, how if how.startswith(_AS_IT_IS) else f"{by}: {how}"
    return Hardware(name=name, **figures, sources=sources, link_emulation=emulated)
