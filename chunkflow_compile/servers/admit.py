"""``admit``: before a request runs, how long it takes and whether it fits; no weight moves, and nothing is compiled.

The transformer is traced without weights at three sizes, once.  At any other size the times of its regions follow from
these: products grow with the tokens, attention with their square.  The placement of the weights is that of a plan for the
same budget, played with these times.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from chunkflow_compile.hardware.headroom import budget_for
from chunkflow_compile.model.placement import placement_of
from chunkflow_compile.models.eager_cost import eager_cost
from chunkflow_compile.models.families import FAMILIES, Family
from chunkflow_compile.models.presets import PRESETS
from chunkflow_compile.models.sizes import Shape
from chunkflow_compile.models.weightless import trace_without_weights
from chunkflow_compile.options import parse_options
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.pipeline import Settings, make_cut
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.placement.schedule import schedule, transfers_of
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.pipeline.budget import Budget, budget_of
from chunkflow_compile.report.record import seconds, size
from chunkflow_compile.weights.leaves import leaves, tensors_of

# Attribute of an applied pipeline: what is known of its transformers, by what they are traced for.
_FORECASTS = "_chunkflow_forecasts"
# Multiples of the edges of the first request at which its transformer is traced.
_EDGES = (1, 2, 3)
# Parts of the budget: the rest that activations leave is rounded down to one of them, so that few plans are made.
_PARTS = 32
# Arguments of pipelines that sizes depend on, other than the edges: of the batch, and of a second branch of guidance.
_BATCH = ("num_images_per_prompt", "num_videos_per_prompt")
_SECOND_BRANCH = ("true_cfg_scale", "guidance_scale")


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Whether a request fits, and how long it takes.

    ``step_s``: predicted seconds of a denoising step, both branches of guidance; ``total_s``: of all steps, and of the newest
    call of every other component as far as it was measured.  ``device_bytes``: most bytes on the device, of which
    ``activation_bytes`` are the transformer's activations (an estimate of eager ops; 0 on a CPU, which counts none).
    ``host_bytes``: of the pipeline's weights in host memory.  ``budget``: bytes that were given to ``apply``.  ``reason``:
    why it does not fit, empty if it does.
    """

    fits: bool
    step_s: float
    total_s: float
    device_bytes: int
    activation_bytes: int
    host_bytes: int
    budget: int
    reason: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def __str__(self) -> str:
        rows = [
            ("fits", "yes" if self.fits else f"no: {self.reason}"),
            ("a step", seconds(self.step_s)),
            ("all steps", f"{self.total_s:.1f} s"),
            ("most on the device", f"{size(self.device_bytes)} of {size(self.budget)}"),
            ("of these activations", size(self.activation_bytes)),
            ("in host memory", size(self.host_bytes)),
        ]
        return tabulate(rows, tablefmt="plain", disable_numparse=True)


def admit(pipe: Any, **sizes: Any) -> Admission:
    """How long a request takes on an applied pipeline, and whether it fits the budget, before it runs.

    ``sizes``: arguments of the pipeline's call that sizes depend on, such as ``height``, ``width``, ``num_frames``,
    ``num_inference_steps``, ``guidance_scale``; those left out have the defaults of the call.  The first call traces the
    transformer without weights, which takes seconds to a minute; later ones take milliseconds.  It may be called while a
    request runs, and waits for none.

    Raises ChunkflowError for a pipeline that is not applied or whose transformer it does not know, for an unknown argument,
    and for a size that the model cannot take.
    """
    budget = budget_of(pipe)
    if budget is None or isinstance(pipe, nn.Module):
        raise ChunkflowError(f"This {type(pipe).__name__} is not applied: call chunkflow_compile.apply(pipe) first.")
    model = _transformer(pipe)
    family = _family(model)
    given = _arguments(pipe, sizes)
    shape = _shape(pipe, model, family, given)
    forecast = _forecast(pipe, model, family, shape, budget)
    steps = int(given.get("num_inference_steps") or 1)
    return forecast.admission(shape, steps, _branches(given), budget, _others(budget, model))


def _transformer(pipe: Any) -> nn.Module:
    found = getattr(pipe, "transformer", None)
    if not isinstance(found, nn.Module):
        raise ChunkflowError(f"{type(pipe).__name__} has no transformer: admit plans for pipelines that have one.")
    return found


def _family(model: nn.Module) -> Family:
    config: Any = model.config
    for family in [*FAMILIES.values()][::-1]:  # wan-i2v before wan
        if family.class_name == type(model).__name__ and (family.name != "wan-i2v" or config.get("image_dim")):
            return family
    known = ", ".join(sorted({f.class_name for f in FAMILIES.values()}))
    raise ChunkflowError(f"admit does not know the inputs of {type(model).__name__}; it knows those of {known}.")


def _arguments(pipe: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the pipeline's call.  Raises ChunkflowError for one that it does not have."""
    known = {n: p.default for n, p in inspect.signature(type(pipe).__call__).parameters.items() if n != "self"}
    for name in sizes:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ChunkflowError(f"{type(pipe).__name__} has no argument {name!r}; did you mean {close!r}?")
    return {**known, **sizes}


def _shape(pipe: Any, model: nn.Module, family: Family, given: Mapping[str, Any]) -> Shape:
    """The latent of a request."""
    packed = family.name in ("flux", "qwen-image")
    spatial = getattr(pipe, "vae_scale_factor_spatial", None) or pipe.vae_scale_factor
    unit = 2 * spatial if packed else spatial * _patch(model, family)
    edges = {}
    for name in ("height", "width"):
        value = given.get(name) or getattr(pipe, "default_sample_size", 0) * spatial
        if not isinstance(value, int) or value < unit or value % unit:
            raise ChunkflowError(f"{name}={value!r} is not a multiple of {unit}, as {type(pipe).__name__} needs.")
        edges[name] = value // (unit if packed else spatial)
    frames, temporal = given.get("num_frames") or 1, getattr(pipe, "vae_scale_factor_temporal", 1)
    if not isinstance(frames, int) or frames < 1 or (frames - 1) % temporal:
        raise ChunkflowError(f"num_frames={frames!r} is not {temporal} k + 1, as {type(pipe).__name__} needs.")
    batch = next((int(given[name]) for name in _BATCH if given.get(name)), 1)
    padded = family.name != "qwen-image"  # whose prompts are as long as they are
    text = given.get("max_sequence_length") if padded else PRESETS["qwen-image"].sizes.text
    return Shape(batch=batch, frames=(frames - 1) // temporal + 1, text=int(text or 512), **edges)


def _patch(model: nn.Module, family: Family) -> int:
    found: Any = getattr(model.config, "patch_size", 1)
    return 1 if family.name in ("flux", "qwen-image") else int(found[1] if isinstance(found, (tuple, list)) else found)


def _branches(given: Mapping[str, Any]) -> int:
    """Calls of the transformer in a step: two with classifier-free guidance."""
    name = next((name for name in _SECOND_BRANCH if name in given), None)
    return 2 if name is not None and (given[name] or 0) > 1 else 1


def _others(budget: Budget, model: nn.Module) -> float:
    """Seconds of the other components' calls, as far as they were measured."""
    figures = zip(budget.phases, budget.figures().phases, strict=True)
    return sum(f.measured_s or 0.0 for phase, f in figures if type(phase.root) is not type(model))


def _forecast(pipe: Any, model: nn.Module, family: Family, shape: Shape, budget: Budget) -> _Forecast:
    """What is known of a transformer for this text and batch, traced now if nothing is."""
    known: _Forecasts = pipe.__dict__.setdefault(_FORECASTS, _Forecasts())
    key = id(model), shape.text, shape.batch
    with known.lock:
        if key not in known.found:
            known.found[key] = _Forecast.made(model, family, shape, budget)
        return known.found[key]


@dataclass(eq=False)
class _Forecasts:
    """Those of a pipeline, by transformer, text and batch.  ``lock``: held while one is made."""

    found: dict[tuple[int, int, int], _Forecast] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def __reduce_ex__(self, _: object) -> tuple[type[_Forecasts], tuple[()]]:
        return _Forecasts, ()  # the copy of a pipeline begins anew


@dataclass(eq=False)
class _Forecast:
    """A transformer at three numbers of tokens.  ``activations``: bytes at each of them.  ``plans``: by goal."""

    settings: Settings
    tokens: tuple[int, ...]
    problems: tuple[Problem, ...]
    activations: tuple[int, ...]
    plans: dict[int, Plan] = field(default_factory=dict)

    @staticmethod
    def made(model: nn.Module, family: Family, shape: Shape, budget: Budget) -> _Forecast:
        given = {
            k: v for k, v in budget.arguments.items() if k not in ("dtype", "share", "host_memory", "mode", "dynamic")
        }
        chosen = parse_options(given, None).on(budget.device)
        config, dtype = dict(model.config), _dtype(model)  # type: ignore[arg-type]
        config = {name: value for name, value in config.items() if not name.startswith("_")}
        problems, activations, tokens = list[Problem](), list[int](), list[int]()
        for edge in _EDGES:
            at = replace(shape, height=shape.height * edge, width=shape.width * edge)
            build = partial(_built, family, config, at, dtype)
            traced = trace_without_weights(build, 1, chosen.min_bytes, dtype)
            traced = replace(traced, fused=chosen.lowering != "eager")
            problems.append(_as_placed(make_cut(traced, chosen.group_bytes).problem, model))
            tokens.append(_tokens(at))
            counted = budget.device.type != "cpu"
            activations.append(eager_cost(partial(_called, build), dtype).activations if counted else 0)
        return _Forecast(chosen.settings(), tuple(tokens), tuple(problems), tuple(activations))

    def admission(self, shape: Shape, steps: int, branches: int, budget: Budget, others_s: float) -> Admission:
        """Of a request with so many steps, and calls of the transformer in each."""
        count = _tokens(shape)
        activations = max(0, round(_through(self.tokens, self.activations, count)))
        room, part = budget.usable - activations, max(1, budget.usable // _PARTS)
        goal = room // part * part
        hosts = [p for phase in budget.phases if (p := placement_of(phase.root)) is not None]
        host_bytes = sum(p.store.held_bytes for p in hosts)
        reason, least = "", self._least
        if goal < least <= room:
            goal = least
        elif room < least:
            reason = (
                f"the activations of its transformer take {activations} bytes, which leaves {max(0, room)} of the budget for "
                f"weights, and they need {least}: give apply at least memory={budget_for(least + activations)}, or ask for "
                "smaller sizes."
            )
            goal = least
        plan = self._plan(goal)
        step_s = self._seconds(plan, count) * branches
        return Admission(
            fits=not reason,
            step_s=step_s,
            total_s=steps * step_s + others_s,
            device_bytes=plan.device_bytes + activations,
            activation_bytes=activations,
            host_bytes=host_bytes,
            budget=budget.total,
            reason=reason,
        )

    @cached_property
    def _least(self) -> int:
        """The least bytes of weights on the device."""
        return least_memory(self.problems[0], self.settings.hardware, self.settings.chunk_bytes)

    def _plan(self, goal: int) -> Plan:
        if goal not in self.plans:
            chosen = self.settings
            self.plans[goal] = place(
                self.problems[0], chosen.hardware, chunk_bytes=chosen.chunk_bytes, memory=goal, yields=chosen.yields
            )
        return self.plans[goal]

    @cached_property
    def _simulators(self) -> list[Simulator]:
        return [Simulator(p, self.settings.hardware, self.settings.chunk_bytes) for p in self.problems]

    def _seconds(self, plan: Plan, count: int) -> float:
        """Of a call with so many tokens, under a plan for another number of them."""
        simulator = copy.copy(self._simulators[0])
        columns = zip(*(s.compute_s for s in self._simulators), strict=True)
        simulator.compute_s = [max(0.0, _through(self.tokens, column, count)) for column in columns]
        items = schedule(self.problems[0], transfers_of(self.problems[0], plan))
        return simulator.play(items, spans=False).step_s


def _tokens(shape: Shape) -> int:
    """Elements of the latent of a sample, which its tokens are proportional to."""
    return shape.frames * shape.height * shape.width


def _through(at: tuple[int, ...], values: Any, x: int) -> float:
    """The value at ``x`` of the parabola through three points."""
    total = 0.0
    for i, value in enumerate(values):
        weight = 1.0
        for j, other in enumerate(at):
            weight *= (x - other) / (at[i] - other) if j != i else 1.0
        total += value * weight
    return total


def _dtype(model: nn.Module) -> torch.dtype:
    found = getattr(model, "dtype", torch.float32)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else torch.float32


def _built(
    family: Family, config: Mapping[str, Any], shape: Shape, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Any]]:
    inputs = family.inputs(config, shape, None)
    cast = {k: v.to(dtype) for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return family.build(config), {**inputs, **cast}


def _called(build: Any) -> tuple[nn.Module, Any]:
    model, inputs = build()
    return model, lambda m: m(**inputs)


def _as_placed(problem: Problem, model: nn.Module) -> Problem:
    """The problem with the bytes that the weights of the real model have, which may be quantised."""
    real = {name.replace(".base_layer.", "."): _nbytes(tensor) for name, tensor in tensors_of(model)}
    weights = (replace(w, nbytes=min(w.nbytes, real.get(w.name, w.nbytes))) for w in problem.weights)
    return replace(problem, weights=tuple(weights))


def _nbytes(tensor: torch.Tensor) -> int:
    return sum(leaf.nbytes for _, leaf in leaves(tensor))
