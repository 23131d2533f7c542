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
# Field of Options -> name of the option, for an option whose name is a Python keyword.
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
    """The options of the backend.  All sizes are in bytes."""

    memory: Size | None = None
    """Budget for weights and activations on the device together, as a number of bytes or as "8GiB".  The planner picks the
    fastest plan within it.  Activations are predicted for the sizes of the inputs."""

    weight_memory: Size | None = None
    """Budget for the weights on the device alone (arena and resident weights).  Set either this or memory, not both."""

    slowdown: float | None = None
    """The longest predicted step that is allowed, as a multiple of the step with all weights resident.  Of the plans with
    such a step, the planner picks the plan with the least device memory.  The default is 1.02 if no budget is set either."""

    hardware: str | Path | None = None
    """The machine to plan for: the name of a built-in profile, a JSON file, or "measured" after chunkflow calibrate.  The
    default is "cpu" on the CPU.  On a GPU it is the profile that calibrate measured, or else the built-in profile of this
    GPU."""

    yields: Yield = "auto"
    """The option "yield": how copies avoid collectives that use the same link.  "soft": windows open after a collective, and
    the cost model decides how many copies each window gets.  "hard": compute also waits for the copies in flight before each
    collective.  "auto": whichever is predicted to be faster."""

    policy: Policy = "chunkflow"
    """The way in which copies are scheduled.  "chunkflow" uses the cost model.  The other policies are for comparison; they
    use the same regions and the same executor.  "layerwise" prefetches the whole next block.  "layerwise-barrier" also waits
    for this copy before the collectives.  "layerwise-prefix" keeps as many of the first blocks resident as fit in memory.
    "resident" streams nothing."""

    arena: Arena | None = None
    """An arena to share with other models, when the models run one after the other: chunkflow_compile.Arena(device).  The
    programs of one model always share an arena."""

    min_bytes: int = DEFAULT_MIN_BYTES
    """Parameters with fewer bytes than this stay on the device.  A model that offload() has placed keeps the value that was
    passed to offload()."""

    timings: str | Path | None = None
    """Measured times to plan with instead of the profile's rates: measured.json from the dump of an earlier run.  A run of
    another model, with other sizes or with another Ulysses degree raises an error."""

    replan_after: int = 0
    """The number of warm steps after which the model is planned again, from the measured times of these steps.  The new plan
    is used from the next step on.  It helps if the profile does not describe the machine well.  Nothing is recompiled and no
    output changes.  0: never."""

    plan: str | Path | None = None
    """A plan to use instead of planning: a file that chunkflow plan --json wrote for the same model, sizes and Ulysses
    degree."""

    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Bytes per chunk, the unit in which weights are planned and copied; a multiple of 256."""

    group_bytes: int | None = None
    """The maximum bytes of streamed weights that one region reads; a region that would read more is cut.  By default, each
    block is cut into as few regions as possible, as long as the predicted step is at most 0.5 % longer than with regions of
    64 MiB."""

    lowering: Lowering = "inductor"
    """How regions are compiled.  "inductor" compiles them; "eager" runs their ATen ops one by one.  "tensorrt" builds a
    TensorRT engine for each region, with its weights as inputs.  Inductor compiles what TensorRT does not support.
    "tensorrt" is experimental and not yet tested on a GPU; it needs a GPU and torch-tensorrt."""

    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Inductor settings for all regions, with the names of torch._inductor.config."""

    cudagraphs: CudaGraphsWanted = False
    """Whether a call, with its copies, is captured as one CUDA graph and launched as one graph from its fourth pass on.  This
    reduces the CPU launch overhead, but the memory of the activations stays allocated between calls.  "auto": only if the CPU
    is busy for most of a step, and if waiting for all copies at the end of a call is predicted to cost less than 1 %.
    "collectives": also calls with collectives of several ranks (experimental).  A call that cannot be captured is issued op
    by op, and a warning says why.  mode="reduce-overhead" and "max-autotune" set this to True."""

    pack: Pack = False
    """Whether bfloat16 weights are packed, that is, compressed without loss to three quarters of their bytes.  The region
    that reads them unpacks them on the device.  True: all weights that can be packed.  "auto": the weights whose packing is
    predicted to shorten the step within the budget.  None are packed if copies are hidden anyway.  A model that
    offload(pack=True) has placed stays packed in any case."""

    hoist: Hoist | Sequence[str] = False
    """Whether matrix products that do not depend on the latent, such as modulations, are computed once for many steps, so
    that their weights are not copied in every step.  True: all such products.  "auto": if this is predicted to shorten the
    step within the budget.  A tuple of names of inputs of forward: the products that depend on no other inputs.  The results
    are kept on the device, in at most a sixteenth of the budget."""

    split: Split = "auto"
    """The number of slices into which the tokens of a block are split.  The slices are computed one after the other, so that
    fewer bytes of activations are on the device at a time.  1: no split.  Other numbers are rounded down to a power of two,
    at most 16.  "auto": as few slices as the budget needs, from 1 to 16."""

    exchange_groups: ExchangeGroups = False
    """The number of groups of heads into which the all-to-alls around attention are divided under Ulysses, so that one group
    is exchanged while another computes attention.  A number must divide the attention heads of each rank.  "auto": the number
    with the shortest predicted step.  If the step gets less than 3 % shorter, as is usual with NVLink, the all-to-alls are
    not divided.  All ranks need the same value."""

    disable: Sequence[str] = ()
    """Names of passes to skip, to find the pass that causes a problem: "rotary", "recompute", "views", "sharing", "verify",
    "cycle"."""

    pin_memory: Size | None = None
    """The maximum host memory to pin for the model, as a number of bytes or as "64GB".  Weights beyond it are copied from
    pageable memory, which is slower.  It applies to GPUs only.  The default is the memory that the weights already use, plus
    this rank's share (1 / LOCAL_WORLD_SIZE) of the free host memory.  Free is what the machine and the control groups of the
    process allow, minus a reserve of 5 %."""

    debug: str | Sequence[str] = ()
    """One of these names, or a list of both.  "poison" overwrites evicted weights with NaN, which exposes ops that still read
    them.  "threads" runs every stream, including the compute stream, as a thread, so that the host runs ahead as on a GPU."""

    dump: str | Path | None = None
    """The folder to which every compiled graph is written, with all of its stages, its plan, a report and its
    measurements."""

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
        """The maximum bytes of host memory to pin; None if only the free memory of the machine limits it."""
        return None if self.pin_memory is None else parse_bytes(self.pin_memory, "pin_memory")

    def on(self, device: torch.device) -> Options:
        """Return the options with the default hardware profile for ``device``, unless ``hardware`` is set."""
        return self if self.hardware is not None else replace(self, hardware=default_profile(device))

    def given_plan(self) -> Plan | None:
        """Read the plan that the option ``plan`` names; None if it is not set.  Raises ChunkflowError if it cannot be
        read."""
        return None if self.plan is None else read_plan(self.plan)

    def profile(self) -> Hardware:
        """The hardware profile to plan for."""
        return load_profile(self.hardware or CPU)

    def settings(self) -> Settings:
        """Return the settings of the passes.  Raises ChunkflowError if the plan or the timings cannot be read."""
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
    if value not in allowed or not isinstance(value, str | bool):  # Since 1 == True, the type is checked, too.
        raise ChunkflowError(f"Option {name}={value!r} is unknown; use one of {', '.join(map(str, allowed))}.")


def read_plan(path: str | Path) -> Plan:
    """Read a plan.  Raises ChunkflowError if the file cannot be read or is not a plan."""
    return _read_file(path, "plan", Plan.from_json)


def read_measured(path: str | Path, what: str = "measurement") -> Measured:
    """Read the measurement of a run.  Raises ChunkflowError if the file cannot be read or is not a measurement."""
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
