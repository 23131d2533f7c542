"""``admit``: predicts how long a request takes and whether it fits, before it runs.  No weight is copied, and nothing is
compiled.

The transformer is traced without weights at three sizes around the size of a request.  For sizes in between, the time of each
region is interpolated, because matrix products grow linearly with the number of tokens, and attention quadratically.  A plan
is made for the budget of the pipeline, and a step of this plan is simulated with the interpolated times.  If activations
leave too little memory for weights, the tokens of the blocks are split into the smallest sufficient number of slices.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from chunkflow_compile.catalog.families import FAMILIES, Family
from chunkflow_compile.catalog.presets import PRESETS
from chunkflow_compile.catalog.sizes import Shape, Timestep
from chunkflow_compile.catalog.weightless import trace_without_weights
from chunkflow_compile.hardware.headroom import budget_for
from chunkflow_compile.option_parsing import parse_options
from chunkflow_compile.options import Options
from chunkflow_compile.passes.cutting import make_cut, whole_blocks
from chunkflow_compile.passes.errors import ChunkflowError, first_line
from chunkflow_compile.passes.placement.splitting import REPEATS, split_into
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.pipeline.budget import Budget, budget_of
from chunkflow_compile.report.record import seconds
from chunkflow_compile.servers.forecast import Forecast, tokens_of
from chunkflow_compile.units import enough, size
from chunkflow_compile.weights.leaves import leaves, tensors_of
from chunkflow_compile.weights.locks import ProcessLock

# The attribute of a compiled pipeline that holds its Admitter.
_ADMITTER = "_chunkflow_admitter"
# Families that pack their latents: four elements become one.
_PACKED = ("flux", "qwen-image")
# The factors by which height and width of a request are multiplied for the three traces; the second tuple is used if half of
# the height or width is not a valid size.  The numbers of tokens are then 1/4 to 4 times, or 1 to 9 times, the number of the
# request.  At sizes farther away, a region may have another bottleneck.
_EDGES, _FROM_HERE = (0.5, 1, 2), (1, 2, 3)
# The memory for weights is rounded down to a multiple of 1 / _PARTS of the budget, so that few plans are made.
_PARTS = 16
# The families of models whose inputs can be derived from the arguments of a pipeline.  Of two families with the same class,
# the more specific family comes first.
_KNOWN = ("wan-i2v", "wan", "flux", "hunyuanvideo", "qwen-image")
# The arguments of pipelines that set the number of samples.
_BATCH = ("num_images_per_prompt", "num_videos_per_prompt")
# true_cfg_scale has an effect only if a pipeline is given one of these arguments.
_NEGATIVE = ("negative_prompt", "negative_prompt_embeds")
# The key of a trace: the number of text tokens, the number of samples, and the numbers of slices.
_Key = tuple[int, int, tuple[int, ...]]
# The result of a trace: the three numbers of tokens, and one forecast per number of slices.
_Found = tuple[tuple[int, ...], tuple["Forecast", ...]]


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Whether a request fits, and how long it takes.

    ``step_s``: predicted seconds per denoising step, including both guidance branches.  ``total_s``: predicted seconds of
    all steps plus the latest measured call of every other component.  ``device_bytes``: peak bytes on the device;
    ``activation_bytes`` of them are the transformer's activations (values that are live in its compiled regions).
    ``host_bytes``: bytes of the pipeline's weights in host memory.  ``budget``: budget given to ``compile``, in bytes.
    ``reason``: why the request does not fit; empty if it fits.
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
    """Predict how long a request takes on a compiled pipeline, and whether it fits in the budget, before it runs.

    ``sizes``: arguments of the pipeline's call that determine the sizes and the number of forwards, such as ``height``,
    ``width``, ``num_frames``, ``num_inference_steps``, ``guidance_scale``, and ``negative_prompt`` if the pipeline has
    ``true_cfg_scale``.  All other arguments have the defaults of the pipeline's call.  The first call of this function traces
    the transformer without weights in a separate process, which takes from a few seconds to a minute; later calls take
    milliseconds.  The function may be called while requests run, and does not wait for them.

    Raises ChunkflowError for a pipeline that is not compiled or whose transformer is unknown, for an unknown argument, and
    for a size that the model does not support.
    """
    budget = budget_of(pipe)
    if budget is None or isinstance(pipe, nn.Module):
        raise ChunkflowError(
            f"This {type(pipe).__name__} is not a compiled pipeline: call chunkflow_compile.compile(pipe) first."
        )
    admitter: Admitter | None = pipe.__dict__.get(_ADMITTER)
    if admitter is None or admitter.budget != budget.total:
        admitter = pipe.__dict__[_ADMITTER] = Admitter.of(pipe)
    admitter.others_s, admitter.host_bytes = _others(pipe, budget), budget.host_bytes
    return admitter.admit(**sizes)


@dataclass(eq=False, kw_only=True)
class Admitter:
    """The properties of a pipeline that :func:`admit` needs.  An Admitter does not refer to the pipeline, so it can be
    pickled and used in another process.

    ``defaults``: default values of the call's arguments.  ``family``, ``config``, ``dtype``, ``ulysses``: properties of the
    transformer.  ``nbytes``: name of a weight of the transformer -> its stored size in bytes, which is smaller if the weight
    is quantized.  ``timestep``: whether the pipeline passes one timestep per sample or one per token.  ``spatial``,
    ``temporal``: pixels and frames per element of the latent.  ``unit``: the number of pixels of which height and width must
    be multiples.  ``edge``: the default height and width in pixels.  ``chosen``: options given to compile.  ``budget``: the
    budget in bytes.  ``usable``: the bytes of the budget that plans may use.  ``forecasts``: the results of all traces, for
    each key newest first.
    """

    pipeline: str
    defaults: Mapping[str, Any]
    family: str
    config: Mapping[str, Any]
    dtype: torch.dtype
    ulysses: int
    timestep: Timestep
    nbytes: Mapping[str, int]
    spatial: int
    temporal: int
    unit: int
    edge: int
    chosen: Options
    budget: int
    usable: int
    others_s: float = 0.0
    host_bytes: int = 0
    forecasts: dict[_Key, tuple[_Found, ...]] = field(default_factory=dict)
    lock: Any = field(default_factory=ProcessLock)

    @staticmethod
    def of(pipe: Any) -> Admitter:
        """Create the Admitter of a compiled pipeline.  Raises ChunkflowError like :func:`admit`."""
        budget, model = budget_of(pipe), getattr(pipe, "transformer", None)
        assert budget is not None, "it is compiled"
        if not isinstance(model, nn.Module):
            raise ChunkflowError(f"{type(pipe).__name__} has no transformer: admit plans for pipelines that have one.")
        family, config = _family(model), dict(model.config)  # type: ignore[arg-type]
        packed = family.name in _PACKED
        spatial = int(getattr(pipe, "vae_scale_factor_spatial", None) or pipe.vae_scale_factor)
        patch = config.get("patch_size", 1)
        options = {f.name for f in fields(Options)} & budget.arguments.keys()
        parallel = getattr(getattr(model, "_parallel_config", None), "context_parallel_config", None)
        return Admitter(
            pipeline=type(pipe).__name__,
            defaults={
                n: p.default for n, p in inspect.signature(type(pipe).__call__).parameters.items() if n != "self"
            },
            family=family.name,
            config={name: value for name, value in config.items() if not name.startswith("_")},
            dtype=_dtype(model),
            ulysses=int(getattr(parallel, "ulysses_degree", None) or 1),
            timestep="token" if pipe.config.get("expand_timesteps") else "sample",
            nbytes={
                name.replace(".base_layer.", "."): sum(leaf.nbytes for _, leaf in leaves(tensor))
                for name, tensor in tensors_of(model)
            },
            spatial=2 * spatial if packed else spatial,
            temporal=int(getattr(pipe, "vae_scale_factor_temporal", 1)),
            unit=2 * spatial if packed else spatial * int(patch[1] if isinstance(patch, (tuple, list)) else patch),
            edge=int(getattr(pipe, "default_sample_size", 0)) * spatial,
            chosen=parse_options({k: budget.arguments[k] for k in options}).on(budget.device),
            budget=budget.total,
            usable=budget.usable,
            others_s=_others(pipe, budget),
            host_bytes=budget.host_bytes,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "lock": ProcessLock()})

    def admit(self, **sizes: Any) -> Admission:
        """See :func:`admit`."""
        for name in sizes:
            if name not in self.defaults:
                close = difflib.get_close_matches(name, self.defaults, n=1, cutoff=0.0)[0]
                raise ChunkflowError(f"{self.pipeline} has no argument {name!r}; did you mean {close!r}?")
        given = {**self.defaults, **sizes}
        shape = self._shape(given)
        for forecast in self._forms(shape):
            activations = forecast.activations_at(tokens_of(shape))
            least, room = forecast.least, self.usable - activations
            if room >= least:
                break
        part = max(1, self.usable // _PARTS)
        nbytes, reason = room // part * part, ""
        if room < least:
            reason = (
                f"the activations of its transformer take {size(activations)}, which leaves {size(max(0, room))} of the "
                f"budget for weights, and they need {size(least)}: give compile at least "
                f"memory={enough(budget_for(least + activations))!r}, or ask for smaller sizes."
            )
        plan = forecast.plan(max(nbytes, least))
        step_s = _branches(given) * forecast.seconds(plan, tokens_of(shape))
        return Admission(
            fits=not reason,
            step_s=step_s,
            total_s=int(given.get("num_inference_steps") or 1) * step_s + self.others_s,
            device_bytes=plan.device_bytes + activations,
            activation_bytes=activations,
            host_bytes=self.host_bytes,
            budget=self.budget,
            reason=reason,
        )

    def _forms(self, shape: Shape) -> Iterator[Forecast]:
        """Yield forecasts for a request: first for whole blocks, then for more and more slices, as far as the option
        ``split`` allows."""
        split = self.chosen.split
        found: tuple[Forecast, ...] = ()
        for repeats in (REPEATS[:1], REPEATS[1:]) if split == "auto" else ((split,), REPEATS[:1]):
            if split == "auto" or not found:  # tokens that cannot be split into this number are not split
                found = self._known(shape, repeats)
                yield from found

    def _known(self, shape: Shape, repeats: tuple[int, ...]) -> tuple[Forecast, ...]:
        """Return the forecasts for a request with these numbers of slices.  The transformer is traced if no earlier trace
        covers the request."""
        found = self._cached(shape, repeats)
        if found is None:
            with self.lock():  # so that two threads do not run the same trace
                found = self._cached(shape, repeats)
                if found is None:
                    found = self._traced(shape, repeats)
                    key = shape.text, shape.batch, repeats
                    around = found[0].tokens if found else (tokens_of(shape),)
                    self.forecasts[key] = ((around, found), *self.forecasts.get(key, ()))
        return found

    def _cached(self, shape: Shape, repeats: tuple[int, ...]) -> tuple[Forecast, ...] | None:
        """Return the forecasts of an earlier trace that covers a request; None if there is none."""
        forecasts = self.forecasts.get((shape.text, shape.batch, repeats), ())
        within = (found for around, found in forecasts if around[0] <= tokens_of(shape) <= around[-1])
        return next(within, None)

    def _shape(self, given: Mapping[str, Any]) -> Shape:
        """Return the shape of the latent of a request."""
        edges = {}
        for name in ("height", "width"):
            value = given.get(name) or self.edge
            if not isinstance(value, int) or value < self.unit or value % self.unit:
                raise ChunkflowError(f"{name}={value!r} is not a multiple of {self.unit}, as {self.pipeline} needs.")
            edges[name] = value // self.spatial
        frames = given.get("num_frames") or 1
        if not isinstance(frames, int) or frames < 1 or (frames - 1) % self.temporal:
            raise ChunkflowError(f"num_frames={frames!r} is not {self.temporal} k + 1, as {self.pipeline} needs.")
        batch = next((int(given[name]) for name in _BATCH if given.get(name)), 1)
        padded = self.family != "qwen-image"  # qwen-image does not pad prompts
        text = given.get("max_sequence_length") if padded else PRESETS["qwen-image"].sizes.text
        return Shape(
            batch=batch,
            frames=(frames - 1) // self.temporal + 1,
            text=int(text or 512),
            timestep=self.timestep,
            **edges,
        )

    def _traced(self, shape: Shape, repeats: tuple[int, ...]) -> tuple[Forecast, ...]:
        """Run :meth:`trace` in a separate process, and return its result.

        In this process, a trace would change the default dtype while a request runs, and would use the process group of the
        server.
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-c", f"from {__name__} import _answer; _answer()"]
        done = subprocess.run(
            command,
            input=pickle.dumps((replace(self, forecasts={}), shape, repeats)),
            capture_output=True,
            env=environment,
        )
        if done.returncode:
            cause = self._why_not_split(shape) or done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            at = f"a latent of {shape.frames}x{shape.height}x{shape.width} and {shape.text} text tokens"
            raise ChunkflowError(f"The transformer of {self.pipeline} could not be traced for {at}: {cause}")
        forecasts: tuple[Forecast, ...] = pickle.loads(done.stdout)
        return forecasts

    def _why_not_split(self, shape: Shape) -> str:
        """Return why the tokens of a latent cannot be split over the ranks; empty if they can.  diffusers has an assertion
        for this, but Dynamo does not pass on its message."""
        patch = self.unit // self.spatial
        tokens = shape.frames * (shape.height // patch) * (shape.width // patch)
        if tokens % self.ulysses == 0:
            return ""
        return (
            f"its {tokens} tokens must be divisible by the Ulysses degree, which is {self.ulysses}. Choose another height, "
            "width or number of frames."
        )

    def trace(self, shape: Shape, repeats: tuple[int, ...]) -> tuple[Forecast, ...]:
        """Trace the transformer at three numbers of tokens; return one forecast per number of slices.  ``repeats``: the
        numbers of slices; 1 stands for whole blocks.  Numbers that do not divide all three numbers of tokens are left out."""
        found, tokens = list[list[Problem]](), list[int]()
        halves = not any(edge % (2 * self.unit // self.spatial) for edge in (shape.height, shape.width))
        for times in _EDGES if halves else _FROM_HERE:
            at = replace(shape, height=int(shape.height * times), width=int(shape.width * times))
            build = partial(FAMILIES[self.family].model_and_inputs, self.config, at, self.dtype)
            traced = trace_without_weights(build, self.ulysses, self.chosen.min_bytes, self.dtype)
            cut = make_cut(replace(traced, fused=self.chosen.lowering != "eager"), self.chosen.group_bytes)
            whole = cut if repeats == (1,) else whole_blocks(cut, self.chosen.settings())
            forms = (cut if repeat == 1 else split_into(whole, repeat) for repeat in repeats)
            found.append([self._as_stored(form.problem) for form in forms])
            tokens.append(tokens_of(at))
        alike = [
            problems
            for problems in zip(*found, strict=True)
            if len({tuple(region.repeat for region in problem.regions) for problem in problems}) == 1
        ]
        return tuple(Forecast(self.chosen.settings(), tuple(tokens), problems) for problems in alike)

    def _as_stored(self, problem: Problem) -> Problem:
        """Return the problem with the stored sizes of the weights, which are smaller for quantized weights."""
        weights = (replace(w, nbytes=min(w.nbytes, self.nbytes.get(w.name, w.nbytes))) for w in problem.weights)
        return replace(problem, weights=tuple(weights))


def _answer() -> None:
    """Unpickle a trace request from stdin, and write the result to stdout.  Nothing else may write to stdout."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    admitter, shape, repeats = pickle.load(sys.stdin.buffer)
    try:
        forecasts = admitter.trace(shape, repeats)
    except Exception as error:  # noqa: BLE001  (the parent process reports it, whatever it is)
        traceback.print_exc()
        sys.exit(first_line(error))  # Dynamo appends lines to the message of an error in traced code
    with out:
        pickle.dump(forecasts, out)


def _family(model: nn.Module) -> Family:
    config: Any = model.config
    known = [FAMILIES[name] for name in _KNOWN]
    for family in known:
        if family.class_name == type(model).__name__ and (family.name != "wan-i2v" or config.get("image_dim")):
            return family
    classes = ", ".join(sorted({f.class_name for f in known}))
    raise ChunkflowError(f"admit does not know the inputs of {type(model).__name__}; it knows those of {classes}.")


def _branches(given: Mapping[str, Any]) -> int:
    """Return the number of calls of the transformer per step: two with classifier-free guidance, otherwise one."""
    if "true_cfg_scale" in given:  # In such a pipeline, guidance_scale is an input of the transformer.
        guided = (given["true_cfg_scale"] or 0) > 1 and any(given.get(name) is not None for name in _NEGATIVE)
    else:
        guided = (given.get("guidance_scale") or 0) > 1
    return 2 if guided else 1


def _others(pipe: Any, budget: Budget) -> float:
    """Return the measured seconds of one call of every component except the transformers."""
    kind = type(pipe.transformer)
    return sum(phase.seconds() or 0.0 for phase in budget.phases if type(phase.root) is not kind)


def _dtype(model: nn.Module) -> torch.dtype:
    dtype = getattr(model, "dtype", torch.float32)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32
