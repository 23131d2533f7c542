"""``compile`` and ``restore`` for a diffusers pipeline, whose components share one budget of device memory."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from typing_extensions import Never, Unpack

from chunkflow_compile.frontend.adapters import ADAPTED, disable_adapters, enable_adapters, is_enabled
from chunkflow_compile.frontend.compile import (
    check_dynamic,
    check_options,
    refuse_no_peers,
)
from chunkflow_compile.hardware.read_time import ReadTime
from chunkflow_compile.lowering.tensorrt import check_tensorrt
from chunkflow_compile.option_parsing import for_backend, refuse_positional
from chunkflow_compile.options import Options, PipelineOptions
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import OnPeers, Pack
from chunkflow_compile.pipeline.budget import Budget, budget_of, claim, unclaim
from chunkflow_compile.pipeline.components import (
    check_cast,
    check_component,
    check_dtypes,
    check_floor,
    check_pipeline,
    components_of,
)
from chunkflow_compile.pipeline.intercept import free, in_turns, undo, unused, without_turns
from chunkflow_compile.pipeline.phase import Phase, kept_by
from chunkflow_compile.pipeline.phase_compilation import STEPPED, compile_phase
from chunkflow_compile.placed.offload import bring_back, has_packable, offload, why_nothing_streams
from chunkflow_compile.placed.placement import placement_of, placements_of
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.runtime.device import check_device
from chunkflow_compile.units import Size, parse_bytes
from chunkflow_compile.weights.bytes import alias
from chunkflow_compile.weights.checkpoint import Mappings
from chunkflow_compile.weights.leaves import leaves_of
from chunkflow_compile.weights.limits import host_memory as machine_memory
from chunkflow_compile.weights.progress import moving
from chunkflow_compile.weights.source import DriveBytes

_log = logging.getLogger(__name__)

# Components with which ControlNets alternate in every step.
_DENOISERS = ("transformer", "unet")
# Options that pipelines do not accept, because the budget of a pipeline determines the plan of each component.
_PLANNED = {"arena", "slowdown", "plan", "policy", "weight_memory"}

Dtypes = torch.dtype | Mapping[str, torch.dtype]


class _Pipeline(Protocol):
    """A diffusers pipeline, for type checkers."""

    @property
    def components(self) -> Mapping[str, Any]: ...


PipelineT = TypeVar("PipelineT", bound=_Pipeline)


def apply(
    pipe: PipelineT,
    *unnamed: Never,
    device: torch.device | str | None = None,
    memory: Size | None = None,
    dtype: Dtypes | None = None,
    share: Any = None,
    host_memory: Size | None = None,
    peers: OnPeers = False,
    mode: str | None = None,
    dynamic: bool | None = None,
    adapters: int | Mapping[str, Any] | None = None,
    **options: Unpack[PipelineOptions],
) -> PipelineT:
    """Alias of :func:`compile` for pipelines.  ``compile(pipe, ...)`` calls this function with the same arguments."""
    refuse_positional(apply, unnamed)
    check_pipeline(pipe, "apply", "compile")
    if mine := sorted(_PLANNED & options.keys()):
        raise ChunkflowError(
            f"{mine[0]} applies to models; this is a pipeline, whose budget plans each component: leave out {mine[0]}, and "
            "set memory."
        )
    given = {"dtype": dtype, "share": share, "host_memory": host_memory, "mode": mode, "dynamic": dynamic}
    given["peers"] = peers or None
    given |= {"adapters": None if adapters is None else _sizes(adapters), **options}
    given = {name: value for name, value in given.items() if value is not None}
    total = None if memory is None else parse_bytes(memory, "memory")
    while (budget := _apply(pipe, device, total, given)) is None:
        pass  # another thread has meanwhile compiled a pipeline with the same components: try again with their new budget
    budget.log()
    return pipe


def _apply(pipe: Any, device: torch.device | str | None, total: int | None, given: Mapping[str, Any]) -> Budget | None:
    """Add the components of a pipeline to a budget; return the budget.

    Returns None if another thread has meanwhile changed the budget of a component; the caller then tries again.
    ``total``: the size of the budget in bytes, or None to use the memory that is free on the device.
    Raises ChunkflowError if the components already belong to several budgets.
    """
    models = components_of(pipe)
    budgets, own = _budgets((pipe, *models.values())), None
    if len(budgets) > 1:
        raise ChunkflowError(
            "Components of this pipeline belong to several budgets: call restore(pipe) for the others first."
        )
    if budgets:
        budget = budgets[0]
    else:
        target = _default_device(device)
        own = Budget(target, _free_bytes(target) if total is None else total)
        budget = claim(pipe, own)
    with budget.turn(), budget.lock():
        try:
            # whether another thread created this budget in a call of ``compile`` that has failed since
            failed = budget is not own and not budget.phases and not budget.pipelines
            if failed or any(claim(owner, budget) is not budget for owner in (pipe, *models.values())):
                return None
            _extend(pipe, models, budget, device, total, given)
        finally:
            if pipe not in budget.pipelines:
                unclaim(pipe, budget)
            for model in models.values():
                if budget.phase_of(model) is None:
                    unclaim(model, budget)
    return budget


def _budgets(owners: Iterable[Any]) -> list[Budget]:
    """Return the budgets of these pipelines and components, without duplicates."""
    return [*dict.fromkeys(budget for owner in owners if (budget := budget_of(owner)) is not None)]


def _extend(
    pipe: Any,
    models: Mapping[str, nn.Module],
    budget: Budget,
    device: torch.device | str | None,
    total: int | None,
    given: Mapping[str, Any],
) -> None:
    """Place and compile the components that do not belong to the budget yet.

    ``total``: the size in bytes that the user has requested for the budget, or None if the user has not requested a size.
    Raises ChunkflowError if the pipeline is already compiled, or if its components already have a budget with another size or
    device.
    """
    fresh = {n: m for n, m in models.items() if budget.phase_of(m) is None}
    # A component of this pipeline is not dropped, even if the pipeline for which it was compiled no longer exists.
    mine = {id(model) for model in models.values()}
    dropped = [phase for phase in unused(budget) if id(phase.root) not in mine]
    if pipe in budget.pipelines and not fresh and not dropped:
        raise ChunkflowError("This pipeline is compiled already: call chunkflow_compile.restore(pipe) first.")
    other_total = total is not None and total != budget.total
    if budget.phases and (other_total or (device is not None and _default_device(device) != budget.device)):
        raise ChunkflowError("Components of this pipeline have a budget already: leave out memory and device.")
    check_dtypes(given.get("dtype"), pipe)
    for name, model in fresh.items():
        check_component(name, model, budget.device)
    free(dropped, budget)
    given = {**budget.arguments, **given}
    _add(fresh, budget, _arenas(models, budget), **given)
    for name, model in fresh.items():
        if name in STEPPED and (placement := placement_of(model)) is not None:
            placement.follow(functools.partial(_timesteps, weakref.ref(pipe)))
    pipe.__class__ = in_turns(type(pipe))
    budget.add_pipeline(pipe, models, given)


def _add(
    models: Mapping[str, nn.Module],
    budget: Budget,
    arenas: Mapping[str, Arena],
    *,
    dtype: Dtypes | None = None,
    share: Any = None,
    host_memory: Size | None = None,
    peers: OnPeers = False,
    mode: str | None = None,
    dynamic: bool | None = None,
    adapters: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Place and compile components, with the arguments of ``compile``.

    If a component cannot be placed or compiled, restore all of these components and raise the error.
    """
    enabled = [] if adapters is None else [m for name, m in models.items() if name in ADAPTED]
    check_dynamic(dynamic)
    chosen = check_options(options, mode, apply, _PLANNED)
    if chosen.lowering == "tensorrt":
        check_tensorrt(budget.device)
    cast = {n: dtype.get(n, dtype.get("default")) if isinstance(dtype, Mapping) else dtype for n in models}
    for name, model in models.items():
        check_cast(name, model, cast[name])
    refuse_no_peers(peers, share, budget.device, chosen)
    packs = _packs(models, cast, chosen)
    given = for_backend(options, chosen)
    room = None if host_memory is None else parse_bytes(host_memory, "host_memory")
    if room is not None:
        room = max(0, room - budget.host_bytes)
    placed, phases = list[nn.Module](), list[Phase]()
    try:
        for model in enabled:
            enable_adapters(model, **(adapters or {}))
        check_floor(models, cast, budget, chosen.min_bytes)
        total = max(1, sum(map(_weight_bytes, models.values())))
        with moving(f"placing {', '.join(models)}", total, _expected(models, budget.device, share, room)) as moved:
            for name, model in models.items():
                part = None if room is None else room * _weight_bytes(model) // total
                placing = {
                    "dtype": cast[name],
                    "share": share,
                    "host_memory": None if part is None else f"{part}B",
                    "pack": packs[name],
                    "peers": peers,
                }
                offload(model, budget.device, min_bytes=chosen.min_bytes, **placing)
                placed.append(model)
                counts = name in STEPPED or _takes_turns(name, model)
                phases.append(Phase(name, model, arenas[name], budget.forget, model in enabled, counts))
                moved(_weight_bytes(model))
        small = kept_by((*budget.phases, *phases))
        for phase in phases:
            compile_phase(phase, budget, budget.usable - small, given, chosen, dynamic)
        _warn_if_nothing_streams(models, chosen.min_bytes)
    except BaseException:
        for model in placed:
            undo(model, budget)
        for model in filter(is_enabled, enabled):
            disable_adapters(model)
        raise


def _warn_if_nothing_streams(models: Mapping[str, nn.Module], min_bytes: int) -> None:
    """If no component has weights that can be streamed, log a warning with the reason for each component."""
    reasons = {name: why_nothing_streams(model, min_bytes) for name, model in models.items()}
    if reasons and all(reasons.values()):
        for name, reason in reasons.items():
            _log.warning("pipe.%s: %s", name, reason)


def _packs(models: Mapping[str, nn.Module], cast: Mapping[str, Any], chosen: Options) -> dict[str, Pack]:
    """Return a mapping from the name of each component to the value of ``pack`` with which the component is placed.

    Raises ChunkflowError if the user passes pack=True, but no weight can be packed.
    """
    packs: dict[str, Pack] = dict.fromkeys(models, chosen.pack)
    if chosen.pack is True:
        packs = {name: has_packable(model, cast[name], chosen.min_bytes) for name, model in models.items()}
        if models and not any(packs.values()):
            raise ChunkflowError(
                f"pack=True packs contiguous weights of bfloat16, and {', '.join(models)} have none: pass "
                "dtype=torch.bfloat16, or leave out pack."
            )
    return packs


def _sizes(adapters: Any) -> Mapping[str, Any]:
    """Convert ``adapters`` to the arguments of ``enable_adapters``.  Raises ChunkflowError if ``adapters`` is invalid."""
    if not isinstance(adapters, Mapping) and (type(adapters) is not int or adapters < 1):
        raise ChunkflowError(f"adapters={adapters!r} must be a positive number, or a dict of rank, targets and slots.")
    given = adapters if isinstance(adapters, Mapping) else {"rank": adapters}
    if unknown := sorted(map(str, given.keys() - {"rank", "targets", "slots"})):
        raise ChunkflowError(f"adapters has {unknown[0]!r}: give a rank, or a dict of rank, targets and slots.")
    return given


def _arenas(models: Mapping[str, nn.Module], budget: Budget) -> dict[str, Arena]:
    """Return the arena of each component.  A ControlNet shares the arena of the denoiser with which it alternates."""
    turns = [name for name, model in models.items() if _takes_turns(name, model)]
    phases = (budget.phase_of(models[name]) for name in turns)
    shared = next((phase.arena for phase in phases if phase is not None), None) or Arena(budget.device, shared=budget)
    return {name: shared if name in turns else Arena(budget.device, shared=budget) for name in models}


def _takes_turns(name: str, model: nn.Module) -> bool:
    """Whether a component is a denoiser or a ControlNet.  Denoisers and ControlNets alternate in every step."""
    return name in _DENOISERS or "ControlNet" in type(model).__name__


def _expected(models: Mapping[str, nn.Module], device: torch.device, share: Any, room: int | None) -> str:
    """Return a text with the expected time to read all components from the SSD.

    The text is empty if the time is too short to matter, or if some weights will not be read into host memory.
    """
    if room is not None or (device.type != "cuda" and share in (None, False)):
        return ""
    return ReadTime.here(unread(leaf for model in models.values() for leaf in leaves_of(model))).text


def remove(pipe: PipelineT) -> PipelineT:
    """Alias of :func:`restore` for pipelines.  ``restore(pipe)`` calls this function."""
    check_pipeline(pipe, "remove", "restore")
    # If the compiled pipeline no longer exists, find its budget through the components.
    for budget in _budgets([pipe]) or _budgets(pipe.components.values()):
        with budget.turn(), budget.lock():
            names = budget.pipelines.pop(pipe, None)
            try:
                for phase in unused(budget):
                    undo(phase.root, budget)
            except BaseException:
                if names is not None:
                    budget.pipelines[pipe] = names
                raise
            unclaim(pipe, budget)
    if (plain := without_turns(type(pipe))) is not type(pipe):  # a copy of a compiled pipeline also has this class
        for model in components_of(pipe).values():
            if budget_of(model) is None and not placements_of(model):
                bring_back(model)  # a deep copy has its own offloaded weights, without a placement
        pipe.__class__ = plain
    return pipe


def _timesteps(ref: weakref.ref[Any]) -> torch.Tensor | None:
    """Return the timesteps that the scheduler of a pipeline has set, or None if the scheduler has not set timesteps yet.

    ``ref``: a weak reference to the pipeline.
    """
    timesteps = getattr(getattr(ref(), "scheduler", None), "timesteps", None)
    return timesteps if isinstance(timesteps, torch.Tensor) else None


def _default_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    return check_device(device)


def _free_bytes(device: torch.device) -> int:
    """Return the number of free bytes on a device, including the memory that torch has reserved there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return machine_memory().free


def _weight_bytes(model: nn.Module) -> int:
    return sum(leaf.nbytes for leaf in leaves_of(model))


def unread(tensors: Iterable[torch.Tensor]) -> int:
    """Return the total bytes of those tensors whose memory is mapped from a file, such as a checkpoint."""
    mappings, parts = Mappings(), dict[int, DriveBytes]()
    for tensor in tensors:
        with contextlib.suppress(ChunkflowError):  # a truncated file also raises this error when it is read
            if (part := mappings.part(alias(tensor))) is not None:
                parts[id(tensor)] = part
    return sum(part.nbytes for part in parts.values())
