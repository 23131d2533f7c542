"""The cases of card_calls.py: each measures one of the public functions on a GPU."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_map_only

import chunkflow_compile
from chunkflow_compile import Arena, cycles, programs, replan
from chunkflow_compile.bench.alternatives import pipeline_of
from chunkflow_compile.bench.host import executors_of, host_time
from chunkflow_compile.bench.subject import first
from chunkflow_compile.catalog.presets import OutputSizes, preset
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.hardware.stopwatch import Stopwatch
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import DEFAULT_GROUP_BYTES
from chunkflow_compile.passes.packing import UNPACK, Layout, pack
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.report.first_step import first_step_phases

FLUX, WAN = "flux.1-dev", "wan2.2-ti2v-5b"
SIZES = {FLUX: OutputSizes(height=1024, width=1024), WAN: OutputSizes(height=704, width=1280, frames=33)}
SMALL = Size(layers=4, singles=4, heads=4, head_dim=64, frames=2, height=8, width=8, text=8)
# Budgets, as shares of the bytes of all weights.  The smallest one is a little more than the policy layerwise needs for
# FLUX.  For small models it would be too small to hold the next block.
SHARES, SMALL_SHARES = (0.82, 0.065), (0.82, 0.6)
PACKED_SHARES = (0.065, 0.46)
CYCLE_SHARES, SMALL_CYCLE_SHARES = (0.8, 0.2), (0.8, 0.6)
# The bytes that are added to half of the weights for the budget of a pipeline.
ACTIVATIONS, SMALL_ACTIVATIONS = 2 << 30, 4 << 20
# STEPS: steps per timing, each with different inputs.  ROWS: timings.  SAMPLES: samples of the host time.  LEARNING: calls
# after a new plan until the blocks run as a cycle.
STEPS, ROWS, SAMPLES, LEARNING = 4, 3, 5, 5
RANK, TARGETS = 16, ("to_q", "to_k", "to_v")
Figures = dict[str, Any]
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Subject:
    """A model on the GPU, and the inputs of each step.  ``options``: options for ChunkFlow."""

    name: str
    model: nn.Module
    inputs: list[dict[str, Any]]
    options: dict[str, Any]
    small: bool

    @property
    def weights(self) -> int:
        return sum(p.nbytes for p in self.model.parameters())

    def step(self, number: int) -> torch.Tensor:
        return first(self.model(**self.inputs[number % STEPS]))


def make(name: str, small: bool) -> Subject:
    """Build a model.  Its weights and inputs are the same in every process."""
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    if small:
        family = "flux" if name == FLUX else "wan"
        model, made = small_model(family, SMALL).to(device), [small_inputs(family, SMALL, i) for i in range(STEPS)]
        inputs = tree_map_only(torch.Tensor, lambda t: t.to(device), made)
        return Subject(name, model, inputs, {"min_bytes": 4096, "chunk_bytes": 1 << 16, "lowering": "eager"}, small)
    model, given = preset(name).build(SIZES[name], device)
    floats = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    inputs = [{**given, **{k: v / (1 + 0.01 * i) for k, v in floats.items()}} for i in range(STEPS)]
    return Subject(name, model.eval(), inputs, {}, small)


def measured(subjects: Sequence[Subject]) -> Figures:
    """Return the figures of a step, which calls each subject once: milliseconds on the GPU and on the host, bytes copied,
    and peak memory."""

    def step(number: int) -> None:
        for subject in subjects:
            subject.step(number)

    _mark(subjects, sys.maxsize)  # measure these calls, because ChunkFlow may plan again from their times
    for number in range(LEARNING):
        step(number)
    _mark(subjects, 0)  # measure nothing from here on, because timed events slow a step down
    for number in range(2):  # the first call without measurement may record a CUDA graph
        step(number)
    torch.cuda.reset_peak_memory_stats()
    rows = []
    for _ in range(ROWS):
        watch = Stopwatch(torch.device("cuda", 0))
        for number in range(STEPS):
            step(number)
        rows.append(1e3 * watch.stop() / STEPS)
    executors = [e for subject in subjects for e in executors_of(subject.model)]
    host = [host_time(partial(step, 0), executors, torch.cuda.synchronize) for _ in range(SAMPLES)]
    host_ms = [1e3 * h.seconds for h in host]
    before = _moved(subjects)
    step(0)
    return {
        "step_ms": median(rows),
        "range_ms": [min(rows), max(rows)],
        "host_ms": median(host_ms),
        "host_range_ms": [min(host_ms), max(host_ms)],
        "host_waits": min(h.waits for h in host),
        "moved_bytes": _moved(subjects) - before,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def _mark(subjects: Sequence[Subject], passes: int) -> None:
    for program in (p for subject in subjects for p in programs(subject.model)):
        program.arena.streams.measure(passes)


def _moved(subjects: Sequence[Subject]) -> int:
    placements = [placement_of(subject.model) for subject in subjects]
    return sum(p.store.counts.moved_bytes for p in placements if p is not None)


def outputs(subjects: Sequence[Subject]) -> list[torch.Tensor]:
    """Return the outputs of each step, in host memory."""
    return [subject.step(number).cpu() for number in range(STEPS) for subject in subjects]


def digest(found: Sequence[torch.Tensor]) -> str:
    """Return a digest of all bits.  Raises AssertionError if a value is infinite or not a number."""
    if not all(bool(output.isfinite().all()) for output in found):
        raise AssertionError("outputs are not finite")
    return hashlib.sha256(b"".join(o.contiguous().view(torch.uint8).numpy().tobytes() for o in found)).hexdigest()


def equal(found: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of outputs are equal, bit for bit."""
    return digest(found) == digest(right)


def graphs() -> int:
    """Return the number of graphs that this process has compiled."""
    return int(counters["stats"]["unique_graphs"])


def first_step(subject: Subject, **options: Any) -> Figures:
    """Compile a model by block type and call it once; return the durations of placement, of the first call, and of its
    phases."""
    begin = time.perf_counter()
    chunkflow_compile.compile(subject.model, device="cuda", **{**subject.options, **options})
    placed = time.perf_counter()
    subject.model(**subject.inputs[0])
    torch.cuda.synchronize()
    timer = {key: [sum(values)] for key, values in torch._dynamo.utils.compilation_time_metrics.items()}
    return {
        "place_s": placed - begin,
        "compile_s": time.perf_counter() - placed,
        "phases_s": dict(first_step_phases(timer)),
        "graphs": graphs(),
    }


def by_kind(name: str, small: bool) -> Iterator[Figures]:
    """Measure ``compile`` with all weights on the GPU, and then with smaller budgets for the same compiled blocks."""
    subject = make(name, small)
    yield {"arm": "first step", **first_step(subject, policy="resident")}
    yield {"arm": "resident", **measured([subject]), "digest": digest(outputs([subject]))}
    for share in SMALL_SHARES if small else SHARES:
        try:
            replan(subject.model, weight_memory=int(share * subject.weights))
        except ChunkflowError as error:
            yield {"arm": f"{100 * share:.1f} %", "failed": str(error)}
            continue
        figures = {**measured([subject]), "digest": digest(outputs([subject])), "graphs": graphs()}
        yield {"arm": f"{100 * share:.1f} %", **figures}


def graph(name: str, small: bool) -> Iterator[Figures]:
    """Measure ``compile(cudagraphs=True)``.  Outputs are compared with the same program without a CUDA graph, before and
    after a weight was changed."""
    subject = make(name, small)
    yield {"arm": "first step", **first_step(subject, policy="resident", cudagraphs=True)}
    for share in (None, *(SMALL_SHARES if small else SHARES)):
        if share is not None:
            replan(subject.model, weight_memory=int(share * subject.weights))
        same = []
        for _ in range(2):
            _mark([subject], sys.maxsize)  # while calls are measured, they do not run as a CUDA graph
            right = outputs([subject])
            _mark([subject], 0)
            subject.step(0)
            same.append(equal(outputs([subject]), right))
            with torch.no_grad():
                max(subject.model.parameters(), key=lambda p: p.nbytes).mul_(1.01)
        log, figures = programs(subject.model)[-1].call.captures, measured([subject])
        yield {
            "arm": "resident" if share is None else f"{100 * share:.1f} %",
            **figures,
            "equal": all(same),
            "launches": log.launches,
            "capture_s": log.capture_s,
            "graph_bytes": log.nbytes,
            "why_not": log.why_not,
        }


def second(name: str, small: bool) -> Iterator[Figures]:
    """Measure the first step with the caches that the case ``compile`` left.  In a rehearsal, this is the only case that
    uses Triton."""
    yield {"arm": "first step", **first_step(make(name, small), policy="resident", lowering="inductor")}


def repeated(name: str, small: bool) -> Iterator[Figures]:
    """Measure diffusers' ``compile_repeated_blocks``, with all weights on the GPU."""
    subject, begin = make(name, small), time.perf_counter()
    subject.model.compile_repeated_blocks(fullgraph=True, dynamic=False)  # type: ignore[operator]
    subject.model(**subject.inputs[0])
    torch.cuda.synchronize()
    yield {"arm": "first step", "compile_s": time.perf_counter() - begin}
    yield {"arm": "resident", **measured([subject])}


def applied(name: str, small: bool) -> Iterator[Figures]:
    """Measure ``apply`` on a pipeline, with a budget for half of the weights and for activations."""
    subject = make(name, small)
    largest, begin = _largest(subject), time.perf_counter()
    memory = subject.weights // 2 + (SMALL_ACTIVATIONS if small else ACTIVATIONS)
    pipe = chunkflow_compile.apply(pipeline_of(subject.model), device="cuda", memory=memory, **subject.options)
    placed = time.perf_counter()
    pipe(subject.inputs)
    torch.cuda.synchronize()
    figures = {"place_s": placed - begin, "compile_s": time.perf_counter() - placed, "graphs": graphs()}
    pipe(subject.inputs)  # planned again, with the activations that the first call measured
    figures |= measured([subject])
    figures["digest"] = digest([first(output).cpu() for output in pipe(subject.inputs)])
    begin = time.perf_counter()
    chunkflow_compile.remove(pipe)
    figures["remove_s"] = time.perf_counter() - begin
    yield {"arm": "half of the weights", **figures, "restored": torch.equal(_largest(subject), largest)}


def _largest(subject: Subject) -> torch.Tensor:
    """Return a copy of the largest weight, in host memory."""
    return max(subject.model.parameters(), key=lambda p: p.nbytes).detach().cpu()


def adapters(name: str, small: bool) -> Iterator[Figures]:
    """Measure ``enable_adapters``: load two LoRA adapters and swap them, with and without streaming.  Swaps should
    compile nothing."""
    subject = make(name, small)
    model: Any = subject.model
    states = [_adapter(model, seed) for seed in range(2)]
    chunkflow_compile.enable_adapters(model, rank=RANK, targets=TARGETS)
    yield {"arm": "first step", **first_step(subject, policy="resident")}
    compiled, right = graphs(), list[torch.Tensor]()
    for number, state in enumerate(states):
        model.load_lora_adapter(state, adapter_name=f"a{number}")
    for share in (None, 0.6):
        if share is not None:
            replan(model, weight_memory=int(share * subject.weights))
        found, seconds = list[list[torch.Tensor]](), list[float]()
        for adapter in ("a0", "a1", "a0"):
            model.set_adapters(adapter)
            begin = time.perf_counter()
            subject.step(0)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
            found.append(outputs([subject]))
        if equal(found[0], found[1]) or not equal(found[0], found[2]):
            raise AssertionError("another adapter changes nothing, or leaves something when it goes")
        together = [output for each in found for output in each]
        figures = {**measured([subject]), "swap_s": max(seconds), "compiled": graphs() - compiled}
        right = right or together
        yield {
            "arm": "resident" if share is None else f"{100 * share:.0f} %",
            **figures,
            "equal": equal(together, right),
        }


def _adapter(model: nn.Module, seed: int) -> State:
    """Return random weights of a LoRA adapter, with the names of an adapter file."""
    rng, state = torch.Generator().manual_seed(seed), State()
    for name, layer in model.named_modules():
        if name.endswith(TARGETS) and isinstance(layer, nn.Linear):
            for part, shape in (("A", (RANK, layer.in_features)), ("B", (layer.out_features, RANK))):
                weight = 0.1 * torch.randn(shape, generator=rng)
                state[f"transformer.{name}.lora_{part}.weight"] = weight.to(layer.weight.dtype)
    return state


def cycle(name: str, small: bool) -> Iterator[Figures]:
    """Measure two models in one arena, called alternately.  Both are compiled by block type, and their blocks form one
    cycle."""
    both, arena = [make(each, small) for each in (name, WAN if name == FLUX else FLUX)], Arena("cuda")
    for each in both:
        yield {"arm": f"first step of {each.name}", **first_step(each, policy="resident", arena=arena)}
    yield {"arm": "resident", **measured(both)}
    right = outputs(both)
    for share in SMALL_CYCLE_SHARES if small else CYCLE_SHARES:
        for again in (False, True):
            # both models share one cycle, so a plan from its measured times is made once
            for each in both[:1] if again else both:
                replan(each.model, **({"as_measured": True} if again else {"weight_memory": int(share * each.weights)}))
            arm, figures = f"{100 * share:.0f} %{', as measured' if again else ''}", measured(both)
            found = cycles(both[0].model)
            calls = {"calls": len(found[0].keys), "jumps": found[0].jumps} if found else {"calls": 0}
            yield {"arm": arm, **figures, **calls, "equal": equal(outputs(both), right)}


def packed(name: str, small: bool) -> Iterator[Figures]:
    """Measure ``compile(pack=True)`` and the same model without packing, with equal budgets and cuts.  Measure unpacking
    alone, too."""
    arms, right = dict[str, Subject](), dict[float, list[torch.Tensor]]()
    for arm in ("raw", "packed"):
        subject = arms[arm] = make(name, small)
        subject.model.to(torch.bfloat16)
        subject.inputs[:] = tree_map_only(torch.Tensor, _in_bfloat16, subject.inputs)
        cut = {"group_bytes": 1 << 14 if small else DEFAULT_GROUP_BYTES, "weight_memory": subject.weights}
        yield {"arm": f"{arm}, first step", **first_step(subject, pack=arm == "packed", **cut)}
    for share in SMALL_SHARES if small else PACKED_SHARES:
        for arm, subject in arms.items():
            replan(subject.model, weight_memory=int(share * subject.weights))
            figures, found = measured([subject]), outputs([subject])
            same = {"equal": equal(found, right.setdefault(share, found))} if arm == "packed" else {}
            right.setdefault(share, found)
            yield {"arm": f"{arm}, {100 * share:.1f} %", **figures, **same}
    yield {"arm": "unpacking alone", **_unpacking((1 << 20) if small else 1 << 26)}


def _in_bfloat16(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16) if value.is_floating_point() else value


def _unpacking(numel: int) -> Figures:
    """Measure Inductor's code for unpacking: its time, and the bytes that it reads and writes per second.  ``numel``:
    number of values; at full size, they do not fit in the caches of the GPU."""
    stored = torch.zeros(Layout.of(numel).words, dtype=torch.int32)
    pack((0.02 * torch.randn(numel)).to(torch.bfloat16), stored)
    on_card = stored.cuda()
    unpack = torch.compile(lambda values: UNPACK(values, [numel]))
    unpack(on_card)
    rows = []
    for _ in range(ROWS):
        watch = Stopwatch(torch.device("cuda", 0))
        for _ in range(10 * STEPS):
            unpack(on_card)
        rows.append(watch.stop() / (10 * STEPS))
    seconds = median(rows)
    return {"unpack_ms": 1e3 * seconds, "moved_per_s": (on_card.nbytes + 2 * numel) / seconds}


# The functions that run the cases.
CASES: dict[str, Callable[[str, bool], Iterator[Figures]]] = {
    "compile": by_kind,
    "graph": graph,
    "packed": packed,
    "second process": second,
    "apply": applied,
    "adapters": adapters,
    "cycle": cycle,
    "repeated blocks": repeated,
    "repeated blocks, second process": repeated,
}
