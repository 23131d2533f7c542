"""Calls as CUDA graphs: equal numbers, few calls of the runtime, and each kind of event is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Library
from diffusers import FluxTransformer2DModel
from helpers import Stack, without_joins
from test_gpu import MIB, streamed
from torch import nn

from chunkflow_compile import Arena, compile, enable_adapters, offload, programs, replan, restore
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.runtime import capture, instructions
from chunkflow_compile.runtime.cuda import CudaDevice
from chunkflow_compile.runtime.cuda_graphs import PASSES, CaptureLog
from chunkflow_compile.runtime.recorder import _RecordedStream

from . import control
from .test_findings import placed


def log_of(model: nn.Module) -> CaptureLog:
    return programs(model)[0].call.captures


def test_fifty_steps_with_written_weights_two_sizes_and_other_plans() -> None:
    model, run, twin = placed(6, cudagraphs=True, policy="chunkflow", weight_memory=2 * MIB)
    control.settings(lag=400)
    got = []
    for step in range(50):
        x = torch.randn(16 if step % 5 else 24, 8, device="cuda")
        got.append((run(x), twin(x)))
        if step in (20, 35):
            with torch.no_grad():
                for m in (model, twin):
                    m.blocks[step % 6].up.weight.mul_(1.5)
        if step == 30:
            replan(model, weight_memory=3 * MIB)
    torch.cuda.synchronize()
    assert all(torch.equal(ours, theirs) for ours, theirs in got)
    logs = [program.call.captures for program in programs(model)]
    assert len(logs) >= 2 and not any(log.why_not for log in logs)
    assert sum(log.launches for log in logs) >= 10 and programs(model)[0].plan.moved_bytes > 0
    restore(model)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def steps(mutate: Callable[[], None]) -> list[bool]:
    model, run, twin = placed(6, cudagraphs=True)
    return _equal([(model, run, twin)], mutate)


def steps_in_turns(mutate: Callable[[], None]) -> list[bool]:
    """Of two models that have an arena in turns, so each begins with a cold start."""
    arena = Arena("cuda")
    return _equal([placed(6, width, arena=arena, cudagraphs=True, disable=["cycle"]) for width in (256, 192)], mutate)


def _equal(models: Any, mutate: Callable[[], None]) -> list[bool]:
    xs = [torch.randn(16, 8, device="cuda") for _ in range(PASSES + 4)]
    for x in xs[:PASSES]:
        for _, run, _ in models:
            run(x)
    mutate()
    got = [(run(x), twin, x) for x in xs[PASSES:] for _, run, twin in models]
    torch.cuda.synchronize()
    logs = [log_of(model) for model, _, _ in models]
    assert all(log.launches >= 3 for log in logs), logs
    return [torch.equal(y, twin(x)) for y, twin, x in got]


def without_openings(patch: pytest.MonkeyPatch) -> None:
    wait, begun = _RecordedStream.wait, set[_RecordedStream]()

    def first(self: Any, event: Any, waited: Any = None) -> None:
        if type(self) is not _RecordedStream or self not in begun:  # the stream of a capture begins with one
            begun.add(self)
            wait(self, event)

    patch.setattr(_RecordedStream, "wait", first)


def without_arrivals(patch: pytest.MonkeyPatch) -> None:
    wait = instructions._wait

    def no_arrivals(target: Any, event: Any, window: int | None) -> Any:
        return wait(target, event, window) if window is None else lambda step: None

    patch.setattr(instructions, "_wait", no_arrivals)


def without_tails(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaDevice, "launch", lambda self, graph: graph.replay())


@pytest.mark.parametrize(
    ("remove", "work", "slow"),
    [
        (without_openings, steps, {"kernel_us": 2000}),
        (without_arrivals, steps, {"rate": 20 * MIB}),
        (without_tails, steps_in_turns, {"rate": 20 * MIB}),
    ],
)
def test_without_one_kind_of_event_numbers_are_wrong(
    remove: Any, work: Any, slow: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    control.settings(**slow)
    assert all(work(lambda: None))
    assert not all(work(lambda: remove(monkeypatch)))


def test_without_a_join_there_is_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    without_joins(monkeypatch, capture)
    model, run, twin = placed(6, cudagraphs=True)
    for _ in range(PASSES + 2):
        x = torch.randn(16, 8, device="cuda")
        assert torch.equal(run(x), twin(x))
    assert "unjoined" in log_of(model).why_not


@pytest.mark.parametrize("share", [0.82, 0.06])
def test_a_launch_is_few_calls_of_the_runtime(share: float) -> None:
    size = Size(layers=12, heads=4, head_dim=32, frames=2, height=16, width=16, text=16)
    model = small_model("flux", size)
    memory = int(share * sum(p.nbytes for p in model.parameters()))
    model, run, right = streamed(
        lambda: small_model("flux", size),
        policy="chunkflow",
        weight_memory=memory,
        chunk_bytes=1 << 12,
        group_bytes=1 << 14,
        cudagraphs=True,
    )
    for step in range(PASSES + 3):
        inputs = on_cuda(small_inputs("flux", size, step))
        with control.counted() as calls:
            y = run(**inputs)
        torch.cuda.synchronize()
        assert torch.equal(y[0], right(**inputs)[0])
    log, plan = log_of(model), programs(model)[0].plan
    issued = {name: n for name, n in calls.items() if name.startswith("cuda") and name not in READS}
    assert log.launches == 3 and plan.moved_bytes > 0 and sum(issued.values()) <= 20 and issued["cudaGraphLaunch"] == 1


def on_cuda(inputs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def test_slices_are_recorded_in_their_order() -> None:
    """Blocks in slices of their tokens, which are written to memory that a graph allocates, or over an input."""
    size = Size(layers=1, singles=1, heads=4, head_dim=32, frames=1, height=16, width=16, text=64)
    model, run, right = streamed(
        lambda: small_model("flux", size), policy="chunkflow", weight_memory=MIB, split=2, cudagraphs=True
    )
    control.settings(lag=400)
    for step in range(PASSES + 4):
        inputs = on_cuda(small_inputs("flux", size, step))
        if step == PASSES + 2:
            for each in (model, right):
                each.transformer_blocks[0].ff.net[2].weight.mul_(1.5)
        assert torch.equal(run(**inputs)[0], right(**inputs)[0]), step
    log, (program,) = log_of(model), programs(model)
    slicings = [region.slicing for region in program.program.regions.values() if region.slicing is not None]
    assert {over is None for slicing in slicings for _, over in slicing.writes} == {True, False}
    assert max(slicing.repeat for slicing in slicings) == 2
    assert not log.why_not and log.launches == 4 and program.plan.moved_bytes > 0


# Calls that ask the calling thread for its state, and enqueue nothing.
READS = ("cudaGetDevice", "cudaSetDevice", "cudaGetLastError", "cudaStreamIsCapturing", "cudaPeekAtLastError")


class Odd(Stack):
    """``op``: what it does besides."""

    def __init__(self, op: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__(4, width=128)
        self.op = op

    def forward(self, x: torch.Tensor, other: Any = None) -> torch.Tensor:
        return super().forward(self.op(x, other))


@torch.library.custom_op("chunkflow_tests::synchronised", mutates_args=())
def synchronised(x: torch.Tensor) -> torch.Tensor:
    torch.cuda.current_stream().synchronize()
    return x.clone()


@synchronised.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("chunkflow_tests::writing", mutates_args=())
def writing(x: torch.Tensor) -> torch.Tensor:
    """Writes its input, and does not say so."""
    x.add_(1)
    return x.clone()


@writing.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("op", "other", "why"),
    [
        (lambda x, other: writing(x), None, "writing.default writes an input, of which a graph has a copy"),
        (lambda x, other: x * other, torch.tensor(2.0), "is on the cpu, and a graph would keep its value"),
        (lambda x, other: synchronised(x), None, "capturing"),
    ],
)
def test_what_cannot_be_recorded_is_said_and_right(op: Any, other: Any, why: str) -> None:
    model, run, right = streamed(lambda: Odd(op), cudagraphs=True)
    for _ in range(PASSES + 3):
        x = torch.randn(16, 8, device="cuda")
        mine, theirs = x.clone(), x.clone()
        assert torch.equal(run(mine, other), right(theirs, other)) and torch.equal(mine, theirs)
    log = log_of(model)
    assert why in log.why_not and log.launches == ("writes an input" in why)
    restore(model)


def test_adapters_are_swapped_between_launches() -> None:
    size = Size(layers=2, singles=2, heads=4, head_dim=32, frames=2, height=8, width=8, text=8)
    model, twin = small_model("flux", size).cuda(), small_model("flux", size).cuda()
    states = [Library(twin).adapter(seed, 4, ("to_q", "to_v")) for seed in range(2)]
    enable_adapters(model, rank=4, targets=("to_q", "to_v"))
    compile(model, device="cuda", min_bytes=2048, lowering="eager", cudagraphs=True)
    with torch.no_grad():
        for number, state in enumerate(states):
            for m in (model, twin):
                m.load_lora_adapter({k: v.clone() for k, v in state.items()}, adapter_name=f"a{number}")
        for step in range(3 * (PASSES + 3)):
            for m in (model, twin):
                m.set_adapters(f"a{step // 4 % 2}")
            inputs = on_cuda(small_inputs("flux", size, step))
            assert torch.allclose(model(**inputs)[0], twin(**inputs)[0], rtol=0, atol=1e-5)
    log = log_of(model)
    assert log.launches > 8 and not log.why_not


def test_weights_on_the_drive(tmp_path: Path) -> None:
    size = Size(layers=4, singles=4, heads=4, head_dim=32, frames=2, height=8, width=8, text=8)
    small_model("flux", size).save_pretrained(tmp_path)
    model, twin = (FluxTransformer2DModel.from_pretrained(tmp_path).eval() for _ in range(2))
    offload(model, "cuda", min_bytes=4096, host_memory=sum(p.nbytes for p in model.parameters()) // 2)
    compile(model, weight_memory="3MiB", chunk_bytes=1 << 12, lowering="eager", cudagraphs=True)
    twin.cuda()
    with torch.no_grad():
        for step in range(PASSES + 3):
            inputs = on_cuda(small_inputs("flux", size, step))
            assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
    assert "is on the drive, and a graph copies from host memory only" in log_of(model).why_not


def test_a_write_waits_for_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a launch are on no stream that the program knows."""

    def written() -> bool:
        control.settings(rate=0)
        model, run, twin = placed(6, cudagraphs=True)
        for _ in range(PASSES + 1):
            run(torch.randn(16, 8, device="cuda"))
        torch.cuda.synchronize()
        control.settings(rate=20 * MIB)
        x = torch.randn(16, 8, device="cuda")
        want, got = twin(x), run(x)
        with torch.no_grad():
            for block in model.blocks:
                block.up.weight.zero_()
        torch.cuda.synchronize()
        assert log_of(model).launches == 2
        return torch.equal(got, want)

    assert written()
    monkeypatch.setattr(CudaDevice, "sync_copies", lambda self: self.copy.synchronize())
    assert not written()
