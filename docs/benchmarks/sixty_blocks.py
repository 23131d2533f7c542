"""A long program for benchmarks: a Wan model with 60 blocks, traced without weights."""

from __future__ import annotations

from dataclasses import replace

from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.hardware import Hardware

BLOCKS, DEGREE = 60, 2


def sixty_blocks() -> tuple[str, Cut, Hardware]:
    """Return a title, the cut of the model, and the hardware to plan for."""
    preset = PRESETS["wan2.2-t2v-a14b"]
    preset = replace(preset, config={**preset.config, "num_layers": BLOCKS})
    title = f"`{preset.name}` with {BLOCKS} blocks, Ulysses degree {DEGREE}"
    return title, make_cut(preset.trace(DEGREE)), load_profile("h100-pcie-x2")
