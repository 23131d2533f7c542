"""diffusers' group offload: its steps by hand, and beside those that two cards measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conftest import HERE
from problems import CHUNK, MACHINE, blocks_problem, problem, weight

from chunkflow_compile.catalog.presets import Workload, preset
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.simulate.group_offload import play_group_offload, round_trip_s
from chunkflow_compile.simulate.played_steps import PlayedStep

US = 1e-6
# What is outside blocks takes 4 us a chunk to the device, and 16 us back.
HOST = replace(MACHINE, pageable_bandwidth=CHUNK / (4 * US), new_pages_bandwidth=CHUNK / (16 * US))
OUTSIDE = 20 * US


def blocks_of(compute: float, chunks: int = 8, parameters: int = 1) -> Problem:
    """Three blocks of so much compute and so many chunks, and a chunk that two of them read."""
    weights = [
        weight(b * parameters + i, chunks * CHUNK // parameters, (b,)) for b in range(3) for i in range(parameters)
    ]
    return problem([compute] * 3, [*weights, weight(len(weights), CHUNK, (0, 1))], blocks=3)


def step_s(found: Problem, hardware: Hardware = HOST) -> float:
    return play_group_offload(found, hardware).timeline.step_s


def test_three_blocks_by_hand() -> None:
    """Copies of 8 in a row and the last block's compute of 4, or the first block's copy and compute of 20 in a row."""
    copied, computed = play_group_offload(blocks_of(4), HOST), play_group_offload(blocks_of(20), HOST)
    assert copied.timeline.step_s == pytest.approx(OUTSIDE + (3 * 8 + 4) * US)
    assert copied.timeline.exposed_s == pytest.approx(OUTSIDE + (8 + 4 + 4) * US)
    assert computed.timeline.step_s == pytest.approx(OUTSIDE + (8 + 3 * 20) * US)
    assert computed.timeline.exposed_s == pytest.approx(OUTSIDE + 8 * US)
    for played in (copied, computed):
        assert played.device_bytes == (2 * 8 + 1) * CHUNK and played.moved_bytes == (3 * 8 + 1) * CHUNK


def test_each_parameter_is_a_copy_of_its_own() -> None:
    slow = replace(HOST, chunk_s=2 * US)
    whole, parts = step_s(blocks_of(4), slow), step_s(blocks_of(4, parameters=4), slow)
    assert parts - whole == pytest.approx(3 * 3 * 2 * US)


def test_a_block_inside_of_a_module_goes_there_and_back_with_all_that_is_outside() -> None:
    """As the blocks of a text encoder do, which are in its encoder."""
    found = blocks_of(4)
    deeper = replace(found, regions=tuple(replace(r, block=f"encoder.{r.block}") for r in found.regions))
    played = play_group_offload(deeper, HOST)
    assert played.timeline.step_s == pytest.approx(round_trip_s(found.total_bytes, HOST) + 3 * 4 * US)
    assert played.device_bytes == found.total_bytes


@pytest.mark.parametrize("compute", [2.0, 40.0, 400.0])
def test_it_is_never_faster_than_layerwise(compute: float) -> None:
    """Which has the weights outside blocks on the device, and fetches the first block beside the last one."""
    found = blocks_problem(4, compute)
    layerwise = place(found, HOST, Goal(policy="layerwise"), chunk_bytes=CHUNK).predicted
    assert layerwise is not None and step_s(found) >= layerwise.step_s


# File of what a GPU measured -> its profile.
MEASURED = {"h100": "h100-nvlink", "h200": "h200"}


@pytest.mark.long
@pytest.mark.parametrize("card", MEASURED)
def test_steps_are_within_a_tenth_of_those_measured(card: str) -> None:
    (case,) = json.loads((HERE.parent / "docs" / "benchmarks" / f"{card}.json").read_text())["cases"].values()
    measured = {arm: found["step_s"] for arm, found in case["record"]["arms"].items()}
    called, machine = Workload.from_json(case["workload"]), load_profile(MEASURED[card])
    model = replace(preset(called.model), timestep=called.timestep)
    found = make_cut(replace(model.trace(1, called.sizes), fused=True)).problem
    plain = place(found, machine, Goal(policy="resident")).predicted
    assert plain is not None
    played: PlayedStep = play_group_offload(found, machine)
    assert played.timeline.step_s == pytest.approx(measured["diffusers-group-offload-compiled"], rel=0.1)
    assert plain.step_s == pytest.approx(measured["inductor"], rel=0.1)
