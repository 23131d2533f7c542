"""Costs are counted on the graph, and the roofline takes the longer of compute and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Stack, cut_of
from paper_formulas import dit_block_flops

from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.problem import RegionCost

HARDWARE = Hardware(
    name="round figures",
    gemm_flops={"bfloat16": 1e12, "float32": 1e11},
    eta_gemm=0.5,
    memory_bandwidth=1e11,
    h2d_bandwidth=1e10,
    eta_pref=0.9,
    launch_s=1e-5,
    chunk_s=1e-5,
    collective_latency_s=2e-5,
    collective_bandwidth=1e10,
    shared_link=True,
    copy_slowdown=2.0,
    collective_slowdown=1.5,
)


def test_a_region_counts_its_gemms_and_what_crosses_memory() -> None:
    problem = cut_of(Stack(4, width=32), torch.randn(4, 8)).problem
    block = problem.regions[1].cost
    assert {r.cost for r in problem.regions if r.block} == {block}, "equal regions cost the same"
    assert block.flops == 2 * (2 * 4 * 32 * 64)
    weights, x, hidden = 2 * 32 * 64 * 4, 4 * 32 * 4, 4 * 64 * 4
    assert block.operands == weights + 2 * x + 2 * hidden
    # The GELU reads and writes the hidden ones; the addition reads two and writes one of the outer ones.
    assert block.traffic == ((x, 3 * x), (hidden, 2 * hidden))
    assert block.kernels == 4
    assert block.dtype == "float32"


def test_the_roofline_takes_the_longer_of_compute_and_memory() -> None:
    assert RegionCost(flops=10**9, dtype="bfloat16").seconds(HARDWARE) == pytest.approx(2e-3 + 1e-5)
    assert RegionCost(flops=10**9, dtype="float32").seconds(HARDWARE) == pytest.approx(2e-2 + 1e-5)
    assert RegionCost(flops=1, traffic=((10**9, 10**9),), dtype="bfloat16").seconds(HARDWARE) == pytest.approx(
        1e-2 + 1e-5
    )
    assert RegionCost(flops=10**9, dtype="int8").seconds(HARDWARE) == pytest.approx(2e-2 + 1e-5)


def test_flops_of_a_small_wan_block_are_the_formula_s() -> None:
    size = Size(layers=1, heads=4, head_dim=32, frames=4, height=16, width=16, text=16)
    problem = make_cut(trace(small_model("wan", size), small_inputs("wan", size, 0), min_bytes=0)).problem
    counted = sum(r.cost.flops for r in problem.regions if r.block == "blocks.0")
    assert counted == dit_block_flops(batch=1, tokens=4 * 8 * 8, text=16, width=128, mlp=512)


def test_a_profile_survives_json() -> None:
    assert Hardware.from_json(HARDWARE.to_json()) == HARDWARE


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"h2d_bandwidth": -1.0}, r"h2d_bandwidth=-1.0 is outside"),
        ({"h2d_bandwidth": 31.5}, r"h2d_bandwidth=31.5 is outside .* units are bytes"),
        ({"host_bandwidth": 441}, r"host_bandwidth=441 is outside .* units are bytes"),
        ({"host_bandwidth": -1e9}, r"host_bandwidth=-1000000000.0 is outside"),
        ({"host_bandwidth": "all"}, r"host_bandwidth must be a number"),
        ({"eta_gemm": 1.2}, r"eta_gemm=1.2 is outside"),
        ({"eta_pref": "fast"}, r"eta_pref must be a number"),
        ({"gemm_flops": {}}, r"gemm_flops must map dtypes to FLOP/s"),
        ({"gemm_flops": {"bfloat16": 756}}, r"gemm_flops\['bfloat16'\]=756 is outside"),
        ({"shared_link": "yes"}, r"shared_link must be true or false"),
        ({"shared_link": False}, r"must be 1 where shared_link is false"),
        ({"collective_slowdown": 0.5}, r"collective_slowdown=0.5 is outside"),
    ],
)
def test_an_absurd_figure_is_named(change: dict, sentence: str) -> None:
    with pytest.raises(ChunkflowError, match=sentence):
        replace(HARDWARE, **change)


def test_ranks_of_a_machine_share_its_host_memory() -> None:
    """9 GB/s alone."""
    host = replace(HARDWARE, host_bandwidth=2e10)
    assert Hardware.from_json(host.to_json()) == host and HARDWARE.shared_by(64) is HARDWARE
    assert [host.shared_by(ranks).copy_rate for ranks in (1, 2, 4, 8)] == pytest.approx([9e9, 9e9, 5e9, 2.5e9])
    assert host.shared_by(8).shared_by(8) == host.shared_by(8)
    nodes = replace(host, node_ranks=4)
    assert [nodes.shared_by(ranks).copy_rate for ranks in (2, 4, 8)] == pytest.approx([9e9, 5e9, 5e9])
    assert replace(host, host_bandwidth=4e9).shared_by(1).copy_rate == 4e9, "also of a rank alone"
    without = HARDWARE.to_json().replace(' "host_bandwidth": 0.0,\n', "")
    assert "host_bandwidth" not in without and Hardware.from_json(without) == HARDWARE, "a profile of before"


def test_a_profile_with_a_missing_or_unknown_field_is_refused() -> None:
    with pytest.raises(ChunkflowError, match="lacks eta_pref"):
        Hardware.from_json(HARDWARE.to_json().replace('"eta_pref": 0.9,', ""))
    with pytest.raises(ChunkflowError, match="Unknown hardware field 'eta_perf'; did you mean 'eta_pref'"):
        Hardware.from_json(HARDWARE.to_json().replace('"eta_pref"', '"eta_perf"'))
    with pytest.raises(ChunkflowError, match="not a hardware profile"):
        Hardware.from_json("nothing")
    with pytest.raises(ChunkflowError, match="schema 9"):
        Hardware.from_json(HARDWARE.to_json().replace('"schema": 2', '"schema": 9'))
