"""``apply``: a whole diffusers pipeline within one budget of device memory; ``remove`` undoes it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chunkflow_compile.compiling import compile_by_kind, uncompile
from chunkflow_compile.components import check_component, check_floor, components_of
from chunkflow_compile.kinds import blocks_of
from chunkflow_compile.options import Options, parse_options
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.phases import BUDGET, Budget, Phase, budget_of
from chunkflow_compile.placing import offload, placement_of, restore
from chunkflow_compile.runtime.device import check_device
from chunkflow_compile.units import parse_bytes
from chunkflow_compile.weights.leaves import leaves_of
from chunkflow_compile.weights.limits import host_memory as machine_memory

Dtypes = torch.dtype | Mapping[str, torch.dtype]


def apply(
    pipe: Any,
    device: torch.device | str | None = None,
    *,
    memory: int | str | None = None,
    dtype: Dtypes | None = None,
    share: Any = None,
    host_memory: int | str | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    **options: Any,
) -> Any:
    """Place and compile the components of a diffusers pipeline, within one budget; print a table; return the pipeline.

    The weights of all components stream from host memory.  Transformers, encoders and ControlNets are compiled by kind,
    as :func:`compile` does, and a VAE's decoder; they run one after another, and give way to each other on the device.
    ``pipe(...)`` may be called by several threads: one generation runs at a time.

    ``device``: by default the GPU that torch uses, or else the CPU.
    ``memory``: most bytes that the process may take on the device, activations included, as bytes or "12GiB"; by default
    what is free now.  On a CPU activations are not counted.  What the activations need is measured in the first call of
    each component, and the weights get the rest: the plan of a component is made again after that.
    ``dtype``: to cast to; or, as ``torch_dtype`` of ``from_pretrained``, by component, {"default": ...} for the others.
    ``share``, ``host_memory``: see :func:`offload`; ``host_memory`` is for all components together.
    ``mode``, ``dynamic``, ``options``: see :func:`compile`.
    Components that another pipeline was given already are shared with it, with its budget.
    Raises ChunkflowError before any weight moves, and names the component, if one is under the hooks of accelerate or of
    group offload, on another device, without values or compiled already, or if ``memory`` cannot hold one weight of it.
    """
    models, known = components_of(pipe), budget_of(pipe)
    shared = {id(b): b for m in models.values() if (b := budget_of(m)) is not None}
    if len(shared) > 1:
        raise ChunkflowError(
            "Components of this pipeline belong to several budgets: call remove(pipe) for the others first."
        )
    budget = next(iter(shared.values()), known)
    fresh = {n: m for n, m in models.items() if budget is None or budget.phase_of(m) is None}
    if known is not None and not fresh:
        raise ChunkflowError("This pipeline is applied already: call chunkflow_compile.remove(pipe) first.")
    if mine := sorted({"arena", "slowdown", "plan", "policy"} & options.keys()):
        raise ChunkflowError(f"apply plans each component for its part of the budget: leave out {mine[0]}.")
    target = _device(device) if budget is None else budget.device
    if budget is not None and (memory is not None or (device is not None and _device(device) != target)):
        raise ChunkflowError("Components of this pipeline have a budget already: leave out memory and device.")
    given = {"dtype": dtype, "share": share, "host_memory": host_memory, "mode": mode, "dynamic": dynamic, **options}
    given = {name: value for name, value in given.items() if value is not None}
    for name, model in fresh.items():
        check_component(name, model, target)
    made = budget or Budget(target, _total(memory, target))
    made.arguments = given = {**made.arguments, **given}
    with made.turn(), made.lock():
        _add(fresh, made, **given)
        pipe.__dict__[BUDGET] = made
        if known is None:
            pipe.__class__ = _in_turns(type(pipe))
        made.pipelines.add(pipe)
        _undo_unused(made)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(made.figures())
    return pipe


def _add(
    models: Mapping[str, nn.Module],
    budget: Budget,
    *,
    dtype: Dtypes | None = None,
    share: Any = None,
    host_memory: int | str | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    **options: Any,
) -> None:
    """Place and compile components.  If that fails, they are ordinary again."""
    chosen = parse_options(options, mode)
    cast = {n: dtype.get(n, dtype.get("default")) if isinstance(dtype, Mapping) else dtype for n in models}
    check_floor(models, cast, budget, chosen.min_bytes)
    given = {**options, "inductor": chosen.inductor} if chosen.inductor else dict(options)
    room = None if host_memory is None else parse_bytes(host_memory, "host_memory")
    total = max(1, sum(map(_bytes, models.values())))
    placed: list[nn.Module] = []
    try:
        for name, model in models.items():
            placed.append(model)
            part = None if room is None else room * _bytes(model) // total
            offload(model, budget.device, min_bytes=chosen.min_bytes, dtype=cast[name], share=share, host_memory=part)
            _compile(Phase(name, model, budget.device), budget, given, chosen, dynamic)
    except BaseException:
        for model in placed:
            _undo(model, budget)
        raise


def remove(pipe: Any) -> Any:
    """Undo :func:`apply`: ordinary components again, bit for bit, where they were before; return the pipeline.

    Waits for a generation under way.  Components that another pipeline shares stay as they are until that is removed too.
    Raises ChunkflowError if a component finds no room where it was; the pipeline stays applied then.
    """
    budget = budget_of(pipe)
    if budget is None:
        return pipe
    with budget.turn(), budget.lock():
        budget.pipelines.discard(pipe)
        try:
            _undo_unused(budget)
        except BaseException:
            budget.pipelines.add(pipe)
            raise
        pipe.__dict__.pop(BUDGET, None)
        pipe.__class__ = type(pipe).__mro__[1]
    return pipe


def _undo_unused(budget: Budget) -> None:
    """Make ordinary again what no applied pipeline has as a component."""
    used = {id(model) for pipe in budget.pipelines for model in components_of(pipe).values()}
    for phase in [*budget.phases]:
        if id(phase.root) not in used:
            _undo(phase.root, budget)


def _compile(phase: Phase, budget: Budget, options: Mapping[str, Any], chosen: Options, dynamic: bool | None) -> None:
    """Compile a placed component and make its calls a phase."""
    model, placement = phase.root, placement_of(phase.root)
    assert placement is not None
    given = {**options, "arena": phase.arena}
    model.__dict__[BUDGET] = budget
    if isinstance(decoder := getattr(model, "decoder", None), nn.Module) and hasattr(model, "decode"):
        placement.store.warned = True  # what is not compiled is meant to run eagerly
        # Eager regions gain nothing, and AutoencoderKL's group norms fail as ATen ops on a CPU, under aot_eager too.
        if blocks_of(decoder) and not _keeps_frames(decoder) and chosen.lowering != "eager":
            compile_by_kind(decoder, placement, given, chosen.min_bytes, dynamic)
        budget.add(phase, tuple(name for name in ("encode", "decode") if hasattr(model, name)))
        return
    if not blocks_of(model):  # compiled whole, and its first plan may keep as much as it is given
        given["memory"] = max(0, budget.usable - sum(p.kept for p in budget.phases))
    compile_by_kind(model, placement, given, chosen.min_bytes, dynamic)
    budget.add(phase, ())


def _keeps_frames(decoder: nn.Module) -> bool:
    """Whether a decoder takes a list of frames that each call changes (Wan, Qwen-Image): Dynamo would compile each of its
    blocks for every state of the list.  It runs eagerly, and its weights are fetched op by op."""
    return "feat_cache" in inspect.signature(decoder.forward).parameters


def _undo(model: nn.Module, budget: Budget) -> None:
    """Make a component an ordinary one again.  Raises ChunkflowError if it finds no room; it is as before then."""
    restore(model)
    if (phase := budget.phase_of(model)) is not None:
        budget.remove(phase)
    model.__dict__.pop(BUDGET, None)
    uncompile(model)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return check_device(torch.device(device))
    return check_device(
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )


def _total(memory: int | str | None, device: torch.device) -> int:
    """The budget, bytes: what was asked for, or what the device has free, with what torch keeps of it."""
    if memory is not None:
        return parse_bytes(memory, "memory")
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return machine_memory().free


def _bytes(model: nn.Module) -> int:
    return sum(leaf.nbytes for leaf in leaves_of(model))


def _in_turns(cls: type) -> type:
    """The class of a pipeline, whose calls wait for each other and check the components."""
    call: Callable[..., Any] = cls.__call__  # type: ignore[operator]

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(self)
        if budget is None:
            return call(self, *args, **kwargs)
        for name, model in components_of(self).items():
            if budget.phase_of(model) is None:
                raise ChunkflowError(
                    f"pipe.{name} was replaced after apply: call chunkflow_compile.apply(pipe) again, which places it too."
                )
        with budget.turn():
            return call(self, *args, **kwargs)

    body = {
        "__call__": __call__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls,), body)
