"""The rows of all tables in paper.json, with the figures of the paper's evaluation, and checks of the paper's claims."""

from __future__ import annotations

from typing import Any

from paper_cases import CHUNK, DEGREE, GIB, MACHINE, MIB, ROOMY, Result, blocks_of, breakdown
from paper_formulas import (
    BlockKind,
    chunk_seconds,
    critical_flops,
    critical_point,
    dit_block_flops,
    double_block_flops,
    mean_block,
    single_block_flops,
)

from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.placement.place import PlanBuilder, place
from chunkflow_compile.passes.placement.search import Planner
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.plan import Plan

# Published seconds per step of the paper's reference code, without offload and with its layerwise policy, by
# configuration and arm.
MEASURED = {("wan2.2-ti2v-5b", 81): {"resident": 1.302, "layerwise-barrier": 1.886}}

# The bytes of all-to-alls in the reference code, relative to diffusers.  Of its 8 all-to-alls per block, 6 exchange the
# latent and 2 the short text; diffusers exchanges the latent 4 times.
REFERENCE_BYTES = 1.5


# A row of a table: figures by heading.
Row = dict[str, Any]


def arms_rows(results: list[Result]) -> list[Row]:
    rows = []
    for r in results:
        for arm, plan in r.plans.items():
            p = r.predicted(arm)
            compute, collectives, stall, slowed = (round(100 * share) for share in breakdown(r, arm))
            rows.append(
                {
                    "configuration": r.case.name,
                    "arm": arm,
                    "step, s": round(r.step(arm), 3),
                    "to layerwise": round(r.step(arm) / r.step("layerwise"), 3),
                    "to resident": round(r.step(arm) / r.step("resident"), 3),
                    "exposed H2D, ms": round(p.exposed_s * r.case.forwards * 1e3),
                    "collectives slowed, ms": round(p.inflation_s * r.case.forwards * 1e3),
                    "weights, GiB": round(plan.device_bytes / GIB, 2),
                    "compute, %": compute,
                    "collectives, %": collectives,
                    "H2D stall, %": stall,
                    "contention, %": slowed,
                }
            )
    return rows


def measured_rows(results: list[Result]) -> list[Row]:
    """Return rows that compare measured steps with two predictions: with the traced collectives, and with as many bytes
    per collective as in the reference code."""
    return [
        {
            "configuration": r.case.name,
            "arm": arm,
            "measured, s": seconds,
            "simulated, s": round(r.step(arm), 3),
            "off, %": round(100 * (r.step(arm) / seconds - 1), 1),
            "at 1.5 times the bytes, s": round(more := r.with_more_bytes(arm, REFERENCE_BYTES), 3),
            "then off, %": round(100 * (more / seconds - 1), 1),
        }
        for r in results
        for arm, seconds in MEASURED.get((r.case.model, r.case.size), {}).items()
    ]


def claims(results: list[Result]) -> list[str]:
    """Return a sentence for each claim that does not hold."""
    broken = []
    for r, small in zip(results, at_layerwise_step(results), strict=True):
        if r.fits and r.step("chunkflow") > 1.0201 * r.step("resident"):
            broken.append(f"{r.case.name}: the copies fit, but chunkflow is more than 2 % slower than resident")
        if r.step(ROOMY) > r.step("layerwise") * (1 + 1e-9):
            broken.append(f"{r.case.name}: the plan with the memory of layerwise is slower than layerwise")
        if small.device_bytes > r.plans["layerwise"].device_bytes:
            broken.append(f"{r.case.name}: the plan with the step time of layerwise is larger than layerwise")
        for arm, seconds in MEASURED.get((r.case.model, r.case.size), {}).items():
            if abs(off := r.step(arm) / seconds - 1) > 0.15:
                broken.append(f"{r.case.name} {arm}: {100 * off:+.1f} % off the measured step")
    return broken


def at_layerwise_step(results: list[Result]) -> list[Plan]:
    """Return, for each configuration, the smallest plan that is no slower than layerwise."""
    return [
        place(
            r.problem,
            load_profile(MACHINE),
            Goal(slowdown=max(1.0, r.step("layerwise") / r.step("resident"))),
            chunk_bytes=CHUNK,
        )
        for r in results
    ]


def equal_step_rows(results: list[Result]) -> list[Row]:
    rows = []
    for r, small in zip(results, at_layerwise_step(results), strict=True):
        base = r.plans["layerwise"].device_bytes
        rows.append(
            {
                "configuration": r.case.name,
                "step of layerwise, s": round(r.step("layerwise"), 3),
                "its weights, GiB": round(base / GIB, 2),
                "chunkflow's at that step, GiB": round(small.device_bytes / GIB, 2),
                "less, %": round(100 * (1 - small.device_bytes / base)),
            }
        )
    return rows


def chunk_rows(results: list[Result], machine: Hardware) -> list[Row]:
    rows = []
    for r in results:
        for size in (4, 16, 64, 256):
            nbytes = size * MIB
            tail = chunk_seconds(chunk_bytes=nbytes, h2d=machine.h2d_bandwidth, eta_pref=machine.eta_pref)
            plan = place(r.problem, machine, Goal(memory=r.plans["layerwise"].device_bytes), chunk_bytes=nbytes)
            assert plan.predicted is not None
            rows.append(
                {
                    "configuration": r.case.name,
                    "chunk, MiB": size,
                    "link efficiency, %": round(100 * tail / (tail + machine.chunk_s), 1),
                    "tail, ms": round(tail * 1e3, 2),
                    "step, s": round(plan.predicted.step_s * r.case.forwards, 3),
                    "to resident": round(plan.predicted.step_s / plan.predicted.resident_step_s, 3),
                    "weights, GiB": round(plan.device_bytes / GIB, 2),
                }
            )
    return rows


def residency_rows(results: list[Result], machine: Hardware) -> list[Row]:
    rows = []
    for r in (r for r in results if r.case.size in (41, 4, 9)):
        planner = Planner(r.problem, Simulator(r.problem, machine, CHUNK))
        builder = PlanBuilder(planner)
        for share in (0.0, 0.2, 0.4, 0.6):
            residents = round(share * len(planner.chunks))
            tried = [c for hard in (False, True) if (c := planner.candidate(residents, None, hard)) is not None]
            best = min(tried, key=lambda c: c.step_s)
            rows.append(
                {
                    "configuration": r.case.name,
                    "resident chunks, %": round(100 * share),
                    "step, s": round(best.step_s * r.case.forwards, 3),
                    "to resident": round(best.step_s / planner.resident.step_s, 3),
                    "exposed H2D, ms": round(best.timeline.exposed_s * r.case.forwards * 1e3),
                    "weights, GiB": round(builder.slots(best) / GIB, 2),
                }
            )
    return rows


def critical_rows() -> list[Row]:
    """Return the rows of the paper's critical points: with the bytes per block that the paper profiled, and with the
    bytes of bfloat16 weights."""
    paper = {"peak": 756e12, "eta_comp": 0.60, "h2d": 31.5e9, "eta_pref": 0.89}
    wide = {"width": 3072, "mlp": 12288}

    def wan(n: float) -> float:
        return dit_block_flops(batch=1, tokens=220 * (n + 3), text=512, width=3072, mlp=14336)

    def mixed(double: int, single: int, **size: Any) -> float:
        kinds = [
            BlockKind(count=double, flops=double_block_flops(**size, **wide), nbytes=0),
            BlockKind(count=single, flops=single_block_flops(**size, **wide), nbytes=0),
        ]
        return mean_block(kinds).flops

    models = {
        "wan, frames": (wan, 520e6, 327e6),
        "flux, samples": (lambda b: mixed(19, 38, batch=b, tokens=4096, text=512), 465e6, 415e6),
        "hunyuanvideo, frames": (lambda n: mixed(20, 40, batch=1, tokens=900 * (n + 3), text=161), 675e6, 415e6),
    }
    rows = []
    for name, (flops, profiled, true) in models.items():
        points = (
            critical_point(lambda x, f=flops: f(x) / DEGREE, critical_flops(nbytes=nbytes, **paper))
            for nbytes in (profiled, true)
        )
        profiled_at, true_at = (round(p, 1) for p in points)
        rows.append({"size": name, "with the paper's B_pref": profiled_at, "with the bytes of the weights": true_at})
    return rows


def roofline_rows(results: list[Result], machine: Hardware) -> list[Row]:
    critical = machine.flops("bfloat16") / machine.copy_rate
    rows = []
    for r in results:
        flops, nbytes = blocks_of(r.problem)
        rows.append(
            {
                "configuration": r.case.name,
                "TFLOP a block and rank": round(flops / 1e12, 2),
                "MB a block": round(nbytes / 1e6),
                "FLOP/byte": round(flops / nbytes),
                "of I*": round(flops / nbytes / critical, 2),
                "F >= F*": flops / nbytes >= critical,
                "fits the link beside collectives": r.fits,
            }
        )
    return rows
