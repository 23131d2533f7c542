"""Options of the backend: ``torch.compile(model, backend="chunkflow", options={...})``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_args

import torch

from chunkflow_compile.hardware.profiles import CPU, default_profile, load_profile
from chunkflow_compile.lowering.lower import Lowering
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import (
    DEFAULT_CHUNK_BYTES,
    DEFAULT_MIN_BYTES,
    ONLY_PREDICTED,
    POLICIES,
    ExchangeGroups,
    Hoist,
    Pack,
    Policy,
    Split,
    Yield,
)
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings, check_disabled
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.cuda_graphs import CudaGraphsWanted
from chunkflow_compile.runtime.device import DeviceKind
from chunkflow_compile.runtime.measurement import Measured
from chunkflow_compile.units import Size, parse_bytes, whole_number

DEBUG = ("poison", "threads")
# A mapping from fields of Options to names of options, for the options whose names are Python keywords.
ALIASES = {"yields": "yield"}

_Parsed = TypeVar("_Parsed")

_Keyword = TypedDict("_Keyword", {"yield": Yield}, total=False)


class PipelineOptions(_Keyword, total=False):
    """The options of ``compile`` for a pipeline, for type checkers and editors.  :class:`Options` documents each of them."""

    hardware: str | Path | None
    min_bytes: Size
    timings: str | Path | None
    replan_after: int
    chunk_bytes: Size
    group_bytes: Size | None
    lowering: Lowering
    inductor: Mapping[str, Any]
    cudagraphs: CudaGraphsWanted
    pack: Pack
    hoist: Hoist | Sequence[str]
    split: Split
    exchange_groups: ExchangeGroups
    disable: Sequence[str]
    pin_memory: Size | None
    debug: str | Sequence[str]
    dump: str | Path | None


class BackendOptions(PipelineOptions, total=False):
    """All options of the backend, including the options that a pipeline's budget sets for each component."""

    memory: Size | None
    weight_memory: Size | None
    slowdown: float | None
    policy: Policy
    arena: Arena | None
    plan: str | Path | None


@dataclass(kw_only=True, frozen=True, slots=True)
class Options:
    """The options of the backend.  Sizes are in bytes unless they are given with a unit."""

    memory: Size | None = None
    """The budget for weights and activations on the device together, as a number of bytes or as "8GiB".  The planner picks
    the fastest plan within this budget.  The memory of activations is predicted for the sizes of the inputs."""

    weight_memory: Size | None = None
    """The budget for the weights on the device alone (arena and resident weights).  Set either weight_memory or memory, not
    both."""

    slowdown: float | None = None
    """The maximum predicted step time, as a multiple of the step time with all weights resident.  Among the plans that are
    predicted to stay below this maximum, the planner picks the plan with the least device memory.  If neither slowdown nor a
    budget is set, the maximum is 1.02."""

    hardware: str | Path | None = None
    """The hardware profile to plan for: the name of a built-in profile, a JSON file, or "measured" for the profile that
    chunkflow calibrate has measured.  On a GPU, the default is the measured profile, or the built-in profile of this GPU if
    nothing was measured.  On the CPU, the default is "cpu"."""

    yields: Yield = "auto"
    """The option "yield": how copies avoid overlap with collectives.  "soft": a window contains only the copies that are
    predicted to arrive before the next collective.  "hard": in addition, before each collective, compute waits for all copies
    issued so far.  "auto": "soft" or "hard", whichever is predicted to be faster."""

    policy: Policy = "chunkflow"
    """The way in which copies are scheduled.  "chunkflow" uses the cost model.  The other policies are for comparison with
    it; they use the same regions and the same executor.  "layerwise" prefetches all weights of the next block while a block
    computes.  With "layerwise-barrier", compute also waits for these weights before the first collective of the block.
    "layerwise-prefix" keeps as many of the first blocks resident as fit in the budget, and schedules the other blocks like
    "layerwise".  "resident" streams nothing."""

    arena: Arena | None = None
    """An arena, chunkflow_compile.Arena(device), to share with other models that run before or after this model.  The
    programs of one model share an arena in any case."""

    min_bytes: int = DEFAULT_MIN_BYTES
    """The size in bytes below which parameters stay on the device.  A model that offload() has placed keeps the value that
    was passed to offload()."""

    timings: str | Path | None = None
    """The file measured.json from the dump of an earlier run.  Plans are made from its measured times instead of the rates of
    the hardware profile.  An error is raised if the run was of another model, or had other input sizes or another Ulysses
    degree."""

    replan_after: int = 0
    """The number of warm steps after which the model is planned again, from the measured times of these steps; 0 for never.
    The new plan is used from the next step on.  It is better than the first plan if the hardware profile does not describe
    the machine well.  Nothing is recompiled and no output changes."""

    plan: str | Path | None = None
    """A file with the plan to use, so that no plan is made.  chunkflow plan --json must have written this file for the same
    model, input sizes and Ulysses degree."""

    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """The bytes per chunk, which is the unit in which weights are planned and copied; a multiple of 256."""

    group_bytes: int | None = None
    """The maximum bytes of streamed weights that one region reads; a region that would read more is cut.  By default, each
    block is cut into the fewest regions with which the predicted step is at most 0.5 % longer than with regions of 64 MiB."""

    lowering: Lowering = "inductor"
    """How regions are compiled.  "inductor": Inductor compiles them.  "eager": the ATen ops of a region run one by one.
    "tensorrt": each region becomes a TensorRT engine, and the region's weights are inputs of the engine.  Inductor compiles
    the ops that TensorRT does not support.  "tensorrt" is experimental and not yet tested on a GPU; it needs a GPU and
    torch-tensorrt."""

    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Inductor settings for all regions, with the names of torch._inductor.config."""

    cudagraphs: CudaGraphsWanted = False
    """Whether a call, including its copies, is captured as one CUDA graph, which is launched from the fourth pass on.  The
    CUDA graph reduces the CPU launch overhead, but keeps the memory of the activations allocated between calls.  "auto": only
    if the CPU is busy for most of a step, and if waiting for all copies at the end of a call is predicted to take less than
    1 % of the step.  "collectives": also if the call contains collectives of several ranks (experimental).  If a call cannot
    be captured, its ops are issued one by one, and a warning says why.  mode="reduce-overhead" and mode="max-autotune" set
    this option to True."""

    pack: Pack = False
    """Whether bfloat16 weights are packed, that is, compressed without loss to three quarters of their bytes.  The region
    that reads a packed weight unpacks it on the device.  True: all weights that can be packed.  "auto": the weights whose
    packing is predicted to shorten the step within the budget; no weight if compute hides all copies without packing.  A
    model that offload(pack=True) has placed stays packed in any case."""

    hoist: Hoist | Sequence[str] = False
    """Whether matrix products that do not depend on the latent, such as modulations, are computed once for many steps.  Their
    weights are then not copied in every step.  True: all such products.  "auto": all such products, if this is predicted to
    shorten the step within the budget.  A tuple of argument names of forward: the products that depend on these inputs alone.
    The results are kept on the device, and take at most a sixteenth of the budget."""

    split: Split = "auto"
    """The number of slices into which the tokens of a block are split.  The slices are computed one after the other, so that
    fewer bytes of activations are on the device at a time.  1: no split.  Other numbers are rounded down to a power of two,
    at most 16.  "auto": the smallest number, from 1 to 16, with which weights and activations fit in the budget."""

    exchange_groups: ExchangeGroups = False
    """The number of groups of heads into which Ulysses' all-to-alls around attention are divided, so that one group is
    exchanged while another group computes attention.  The number of attention heads per rank must be a multiple of this
    number.  "auto": the number with the shortest predicted step.  If the step would be less than 3 % shorter, as is usual
    with NVLink, the all-to-alls are not divided.  All ranks must pass the same value."""

    disable: Sequence[str] = ()
    """The names of passes to skip, in order to find out which pass causes a problem: "rotary", "recompute", "views",
    "sharing", "verify", "cycle"."""

    pin_memory: Size | None = None
    """The maximum host memory to pin for the model, as a number of bytes or as "64GB".  Weights beyond this maximum are
    copied from pageable memory, which is slower.  The option applies to GPUs only.  The default is the memory that the
    weights already use, plus this rank's share (1 / LOCAL_WORLD_SIZE) of the free host memory.  Free host memory is the
    memory that the machine and the control groups of the process still allow, minus a reserve of 5 %."""

    debug: str | Sequence[str] = ()
    """One of the names "poison" and "threads", or a list of both.  "poison" overwrites evicted weights with NaN, in order to
    expose ops that still read evicted weights.  "threads" runs every stream, including the compute stream, as a thread, so
    that the host runs ahead as on a GPU."""

    dump: str | Path | None = None
    """The folder for dumps.  For every compiled graph, the stages of its compilation, its plan, a report and its measurements
    are written to this folder."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("policy", POLICIES),
            ("lowering", get_args(Lowering)),
            ("yields", get_args(Yield)),
            ("cudagraphs", get_args(CudaGraphsWanted)),
            ("pack", get_args(Pack)),
        ):
            value = getattr(self, name)
            if name == "policy" and value in ONLY_PREDICTED:
                raise ChunkflowError(
                    f"Option policy={value!r} is only predicted, by chunkflow simulate; it does not run."
                )
            check_choice(ALIASES.get(name, name), value, allowed)
        if self.split != "auto" or not isinstance(self.split, str):
            whole_number(self.split, "Option split", 1)
        if self.exchange_groups is not False and self.exchange_groups != "auto":
            whole_number(self.exchange_groups, "Option exchange_groups, unless it is False or 'auto',", 1)
        for name, least in (("min_bytes", 0), ("chunk_bytes", 256), ("group_bytes", 1), ("replan_after", 0)):
            if getattr(self, name) is not None or name != "group_bytes":
                whole_number(getattr(self, name), f"Option {name}", least)
        for name in ("timings", "plan", "dump"):
            if not isinstance(value := getattr(self, name), (str, Path, type(None))):
                raise ChunkflowError(f"Option {name}={value!r} must be a path.")
        if self.chunk_bytes % 256:
            raise ChunkflowError(
                f"Option chunk_bytes={self.chunk_bytes} must be a multiple of 256, the alignment of slots; "
                f"use {max(256, self.chunk_bytes // 256 * 256)}."
            )
        if not isinstance(self.disable, (list, tuple, set, frozenset)) or not all(
            isinstance(name, str) for name in self.disable
        ):
            raise ChunkflowError(f'Option disable={self.disable!r} must be a list of names, such as ["verify"].')
        check_disabled(self.disable)
        if not isinstance(self.arena, (Arena, type(None))):
            raise ChunkflowError(f"Option arena={self.arena!r} must be a chunkflow_compile.Arena(device).")
        several = isinstance(self.debug, Iterable) and not isinstance(self.debug, str)
        if any(name not in DEBUG for name in (self.debug if several else [self.debug])):
            raise ChunkflowError(
                f"Option debug={self.debug!r} is unknown; use {' or '.join(DEBUG)}, or a list of both."
            )
        if isinstance(self.slowdown, bool) or not isinstance(self.slowdown, (int, float, type(None))):
            raise ChunkflowError(f"Option slowdown must be a number of at least 1, not {self.slowdown!r}.")
        if isinstance(self.hoist, bool | str):
            check_choice("hoist", self.hoist, get_args(Hoist))
        elif not isinstance(self.hoist, (list, tuple)) or not all(isinstance(name, str) for name in self.hoist):
            raise ChunkflowError(
                f"Option hoist={self.hoist!r} must be True, False, 'auto', or a tuple of names of inputs."
            )
        elif not self.hoist:
            raise ChunkflowError(
                "Option hoist=() names no input: pass False, or the names of inputs such as 'timestep'."
            )
        _ = self.goal
        if self.pack is True and self.policy == "resident":
            raise ChunkflowError("pack=True with policy='resident', which copies nothing: leave out one of the two.")
        if self.plan is not None and (self.goal.memory is not None or self.slowdown is not None):
            raise ChunkflowError("Give a plan or a goal for one (memory, weight_memory, slowdown), not both.")
        if self.plan is not None and self.replan_after:
            raise ChunkflowError("Give a plan or replan_after, not both: replan_after would replace the plan.")
        self.pin_bytes()
        self.profile()

    @property
    def goal(self) -> Goal:
        """The goal for which plans are made."""
        hoist = self.hoist if self.hoist is False or self.hoist == "auto" else True
        return Goal.given(
            self.memory,
            self.weight_memory,
            self.slowdown,
            self.policy,
            self.yields,
            self.pack,
            hoist,
            self.split,
            self.exchange_groups,
        )

    def debugging(self) -> frozenset[str]:
        """The names in ``debug``."""
        return frozenset([self.debug] if isinstance(self.debug, str) else self.debug)

    def device_kind(self) -> DeviceKind:
        """The kind of device that programs run on."""
        return DeviceKind("threads" in self.debugging(), self.profile().link_emulation)

    def pin_bytes(self) -> int | None:
        """The maximum bytes of host memory to pin, or None for the default of ``pin_memory``."""
        return None if self.pin_memory is None else parse_bytes(self.pin_memory, "pin_memory")

    def on(self, device: torch.device) -> Options:
        """Return these options.  If ``hardware`` is not set, set it to the default profile for ``device``."""
        return self if self.hardware is not None else replace(self, hardware=default_profile(device))

    def given_plan(self) -> Plan | None:
        """Return the plan in the file that the option ``plan`` names, or None if ``plan`` is not set.  Raises ChunkflowError
        if the file cannot be read."""
        return None if self.plan is None else read_plan(self.plan)

    def profile(self) -> Hardware:
        """The hardware profile to plan for."""
        return load_profile(self.hardware or CPU)

    def settings(self) -> Settings:
        """Return the settings for the passes.  Raises ChunkflowError if the file with the plan or the timings cannot be
        read."""
        return Settings(
            hardware=self.profile(),
            goal=self.goal,
            chunk_bytes=self.chunk_bytes,
            group_bytes=self.group_bytes,
            plan=self.given_plan(),
            timings=None if self.timings is None else read_measured(self.timings, "timings").timings(),
            disabled=frozenset(self.disable),
            joined="auto" if self.cudagraphs == "auto" else bool(self.cudagraphs),
        )


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ChunkflowError unless the value of an option is among the ``allowed`` values, which are strings and bools."""
    if value not in allowed or not isinstance(value, str | bool):  # also check the type, because 1 == True
        raise ChunkflowError(f"Option {name}={value!r} is unknown; use one of {', '.join(map(str, allowed))}.")


def read_plan(path: str | Path) -> Plan:
    """Read a plan.  Raises ChunkflowError if the file cannot be read or contains no plan."""
    return _read_file(path, "plan", Plan.from_json)


def read_measured(path: str | Path, what: str = "measurement") -> Measured:
    """Read the measurement of a run.  Raises ChunkflowError if the file cannot be read or contains no measurement.

    ``what``: what error messages call the file.
    """
    return _read_file(path, what, Measured.from_json)


def _read_file(path: str | Path, what: str, parse: Callable[[str], _Parsed]) -> _Parsed:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError, TypeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise ChunkflowError(f"The {what} {path} cannot be read: {cause}.") from error
    try:
        return parse(text)
    except ChunkflowError as error:
        raise ChunkflowError(f"{path}: {error}") from error
