"""Place a model: ``offload`` moves its large parameters to host memory, and ``bring_back`` moves them back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from chunkflow_compile.options import Options
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import DEFAULT_MIN_BYTES, Hoist, OnPeers, Pack
from chunkflow_compile.placed.index import ModelIndex, filled_by, is_distributed
from chunkflow_compile.placed.model_arguments import unwrap
from chunkflow_compile.placed.placement import (
    PLACEMENT,
    Placement,
    bytes_of,
    packable,
    placement_of,
    placements_of,
)
from chunkflow_compile.placed.streamable import refuse_fully_sharded, refuse_unknown_parts, why_not
from chunkflow_compile.private_torch.dynamo import compile_lock
from chunkflow_compile.runtime.device import check_device
from chunkflow_compile.units import Size, parse_bytes, size
from chunkflow_compile.weights.drive import for_the_drive
from chunkflow_compile.weights.groups import Group, group_of, group_to_share_in
from chunkflow_compile.weights.guards import detach_guards
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import align, leaves, leaves_of, named_leaves, tensors_of
from chunkflow_compile.weights.loader import DtypeOf, keep_dtype
from chunkflow_compile.weights.modules import hooks_of
from chunkflow_compile.weights.node import node_of, report_absence
from chunkflow_compile.weights.packed import packed_like
from chunkflow_compile.weights.peers import Peers
from chunkflow_compile.weights.restoring import restore_weight
from chunkflow_compile.weights.staging import GpuStagings

if TYPE_CHECKING:
    from chunkflow_compile.runtime.bound_cycle import BoundCycle
    from chunkflow_compile.runtime.single_call import SingleCall


@unset_fake_temporarily()
def offload(
    model: nn.Module,
    device: torch.device | str | None = None,
    *,
    min_bytes: Size = DEFAULT_MIN_BYTES,
    dtype: torch.dtype | None = None,
    share: Any = None,
    host_memory: Size | None = None,
    pack: Pack = False,
    peers: OnPeers = False,
    hoist: Hoist | Sequence[str] = False,
) -> nn.Module:
    """Move the parameters and buffers of at least ``min_bytes`` to host memory; return ``model``.

    Each moved parameter becomes a :class:`HostWeight`, which has the same shape and dtype and reports the compute device as
    its device.  Smaller parameters and buffers are moved to the compute device.  The compute device is ``device``, or by
    default the device of the parameters.  For a tensor subclass, such as a quantized weight, the inner tensors are moved.
    Weights that ``from_pretrained`` has mapped from a safetensors file, but has not read, are read from this file.  On a
    terminal, a progress bar shows the expected duration of the move.

    ``dtype``: the dtype to which floating-point weights are cast, or None for no cast.  The weights are cast one by one.  The
    result is the same as with ``from_pretrained(torch_dtype=dtype)``: modules that the class of the model keeps in float32
    stay in float32.

    ``share``: whether the ranks on a machine share one copy of the weights: True, False, or the process group whose ranks
    share the copy.  If ranks share weights, all ranks of the group must call ``offload``.  If the values of a weight differ
    between ranks, each rank keeps its own copy of this weight.  A rank that writes to a weight gets its own copy of this
    weight.  By default, the ranks of the default process group share the weights if ``device`` is a GPU.

    ``host_memory``: the maximum bytes of host memory for the weights, as a number or a string such as "24GiB".  Weights that
    exceed this limit stay on the SSD, in the checkpoint or in a scratch file in the folder for temporary files.  Weights on
    the SSD are read in every step.

    ``pack``: True compresses bfloat16 weights losslessly to three quarters of their size.  The weights are compressed in host
    memory, on the SSD, and in copies to the device.  A weight is not compressed if the exponents of too many of its values
    are outside a range of sixteen consecutive exponents.  With "auto", plans choose the weights to compress.

    ``peers``: True shards the weights over the devices of a group of ranks on one machine.  As long as the model is placed,
    each device stores one piece of each weight, and all pieces have equal size.  Each rank pulls the other pieces from the
    devices of the other ranks.  The weights also stay in host memory, for ops outside programs and for ranks that write to a
    weight.  All ranks of the group must call ``offload`` and run the same model.  The group is the process group passed as
    ``share``, or else the default group.  With "auto", plans choose the weights to shard.

    ``hoist``: the default value of the option ``hoist`` when the model is compiled.

    Raises ChunkflowError, and leaves the model as it was, if the model is already placed, if it has parameters on the meta
    device, if a hook of accelerate or diffusers moves its weights, or if its checkpoint cannot be read.  Weights that were
    cast before the error may stay cast.
    """
    root = unwrap(model)
    parameters = [*leaves_of(root)]
    try:
        refuse_fully_sharded(root)
        refuse_unknown_parts(root)
        min_bytes = parse_bytes(min_bytes, "min_bytes")
        hoist = Options(hoist=hoist).hoist
        target = _target_device(root, device, parameters)
        index = ModelIndex.of(root)
        dtype_of = keep_dtype if dtype is None else cast_to(_checked_dtype(dtype), root)
        _refuse_to_cast_shards(root, dtype_of)
        large = large_weights([root], index, min_bytes)
        weights = [(index.names[id(weight)], weight) for weight in large if id(weight) not in index.filled]
        packs = _packed_names(root, weights, dtype_of, pack)
        group = group_of_peers(peers, share, target)
        filled = [(index.names[id(weight)], weight) for weight in large if id(weight) in index.filled]
        bound, on_drive = None, frozenset[str]()
        if host_memory is not None:
            whole = [(names[0], p, dtype_of(names[0], p)) for names, p in weights]
            sizes = [(n, packed_like(p).nbytes if n in packs else p.numel() * d.itemsize) for n, p, d in whole]
            bound = parse_bytes(host_memory, "host_memory")
            filled_bytes = sum(p.numel() * dtype_of(names[0], p).itemsize for names, p in filled)
            on_drive = for_the_drive(sizes, max(0, bound - filled_bytes))
    except BaseException as error:  # report the error to the other ranks, so that they do not wait for this rank
        with contextlib.suppress(ChunkflowError, RuntimeError):
            here = _one_device(device, parameters)
            waiting = group_to_share_in(share, here) or group_of_peers(peers, share, here)
            if waiting is not None:
                report_absence(waiting, error)
        raise
    asks, name = {"peers": peers, "share": group_to_share_in(share, target) is not None}, type(root).__name__
    if group is None and not asks["share"] and (world := group_of()) is not None:
        world.record_unshared(name, asks)
    node = node_of(share, target, asks, name)
    with contextlib.nullcontext() if node is None else node:
        together = None
        if group is not None:
            kinds = {names[0]: f"{dtype_of(names[0], weight)} {[*weight.shape]}" for names, weight in weights}
            together = Peers.connect(group, target, kinds, {**asks, "pack": pack, "device": target.type}, name)
        with compile_lock:
            options = {"pack": pack, "peers": peers, "ranks": together, "bound": bound, "hoist": hoist}
            placement = Placement.on(root, target, min_bytes, **options)
            placement.guards.watch_calls()
            placement.move(weights, dtype_of, node, on_drive)
            if filled:  # filled buffers are not shared, because each rank writes its own values
                placement.move(filled, dtype_of)
    try:
        placement.move_small(named_leaves(root), dtype_of)
        align(root)
    except BaseException as error:
        placement.undo(error=error)
        raise
    return model


def _packed_names(
    root: nn.Module, weights: list[tuple[tuple[str, ...], torch.Tensor]], dtype_of: DtypeOf, pack: Pack
) -> frozenset[str]:
    """Return the names of the weights that ``offload`` compresses when it moves them.  Raises ChunkflowError if ``pack`` is
    True and no weight can be compressed."""
    if not isinstance(pack, bool) and pack != "auto":
        raise ChunkflowError(f'pack is True, False or "auto", not {pack!r}.')
    names = packable(root, weights, dtype_of) if pack is True else frozenset[str]()
    if pack is True and not names:
        kinds = sorted({str(dtype_of(names[0], p)).removeprefix("torch.") for names, p in weights})
        are = f"its large weights are {', '.join(kinds)}" if kinds else "it has no large weights"
        fix = (
            "Leave out pack"
            if "bfloat16" in kinds
            else "Load it in bfloat16 or pass dtype=torch.bfloat16, or leave out pack"
        )
        raise ChunkflowError(
            f"pack=True packs contiguous weights of bfloat16, each with one name and outside of tensor subclasses, and "
            f"{type(root).__name__} has none: {are}. {fix}."
        )
    return names


def group_of_peers(peers: OnPeers, share: Any, device: torch.device) -> Group | None:
    """Return the process group over whose ranks the weights are sharded; None if ``peers`` is False.

    Raises ChunkflowError if ``peers`` is not False and there is no suitable process group.
    """
    if not isinstance(peers, bool) and peers != "auto":
        raise ChunkflowError(f'peers is True, False or "auto", not {peers!r}.')
    if peers is False:
        return None
    group = group_to_share_in(share, device) if share else group_of()
    if group is None:
        raise ChunkflowError(
            "peers needs a process group of several ranks, of gloo or NCCL: call torch.distributed.init_process_group first, "
            "or leave peers out."
        )
    return group


def has_packable(model: nn.Module, dtype: torch.dtype | None, min_bytes: int) -> bool:
    """Return whether ``offload(model, dtype=dtype, min_bytes=min_bytes, pack=True)`` would find a weight to compress."""
    index, dtype_of = ModelIndex.of(model), keep_dtype if dtype is None else cast_to(dtype, model)
    return bool(packable(model, [(index.names[id(w)], w) for w in large_weights([model], index, min_bytes)], dtype_of))


def _target_device(root: nn.Module, device: torch.device | str | None, parameters: list[torch.Tensor]) -> torch.device:
    """Return the compute device of a model that is about to be placed.  Raises ChunkflowError if the model cannot be
    placed."""
    refuse_applied(root)
    if placements_of(root):
        placed = next((buffer.name for p in parameters if (buffer := buffer_of(p)) is not None), "none of them large")
        raise ChunkflowError(
            f"Weights of this model are offloaded already ({placed}): call chunkflow_compile.restore(model) first."
        )
    refuse_accelerate(root)
    if any(isinstance(module, torch.jit.ScriptModule) for module in root.modules()):
        raise ChunkflowError(
            f"{type(root).__name__} has a module of TorchScript, which torch.compile does not trace: load the model itself."
        )
    if any("group_offloading" in hooks_of(module) for module in root.modules()):
        raise ChunkflowError(
            f"{type(root).__name__} is under diffusers' group offloading, which moves its weights too: load the model again, "
            "and leave out enable_group_offload (apply_group_offloading)."
        )
    if any(p.is_meta or isinstance(p, FakeTensor) for p in parameters):
        where = "on the meta device" if any(p.is_meta for p in parameters) else "of a FakeTensorMode"
        raise ChunkflowError(f"This model has parameters {where}, without values: load its weights first.")
    return check_device(_one_device(device, parameters))


def refuse_accelerate(root: nn.Module) -> None:
    """Raise ChunkflowError if accelerate has offloaded weights of a model, and its hooks load these weights for each call."""
    for module in root.modules():
        hook = module.__dict__.get("_hf_hook")
        for inner in getattr(hook, "hooks", (hook,)):
            if not getattr(inner, "offload", False):
                continue
            devices = map(torch.device, getattr(inner, "original_devices", {}).values())
            if any(device.type == "meta" for device in devices):  # the hook has no copy of the weights to put back
                undo = "load it again without device_map, offload_folder and load_checkpoint_and_dispatch"
            else:
                undo = (
                    "call accelerate.hooks.remove_hook_from_module(model, recurse=True), which loads them again, or "
                    "pipe.remove_all_hooks() for a pipeline, and leave out cpu_offload, disk_offload or "
                    "enable_sequential_cpu_offload"
                )
            raise ChunkflowError(
                f"accelerate keeps the weights of {type(root).__name__}, and its hooks bring each in for its call: {undo}."
            )


def large_weights(modules: Iterable[nn.Module], index: ModelIndex, min_bytes: int) -> list[torch.Tensor]:
    """Return the weights of ``modules`` that can be streamed and have at least ``min_bytes`` bytes.  Smaller buffers are
    included only if a module fills them before programs read them (see :func:`filled_by`)."""
    held = [(inside, leaf) for m in modules for _, tensor in tensors_of(m) for inside, leaf in leaves(tensor)]
    held = [(inside, p) for inside, p in held if bytes_of(p) >= min_bytes or id(p) in index.filled]
    large = {id(p): p for inside, p in held if why_not(p, index, inside) is None}
    return list(large.values())


def why_nothing_streams(model: nn.Module, min_bytes: int | None = None) -> str:
    """Return a sentence that says why no weight of a model can be streamed; empty if at least one weight is streamed.

    ``min_bytes``: the size in bytes below which weights are not streamed; by default, the value from the model's placement.
    """
    root = unwrap(model)
    weights = {id(leaf): (name, leaf) for name, leaf in named_leaves(root)}
    if not weights or any(isinstance(leaf, HostWeight) for _, leaf in weights.values()):
        return ""
    if min_bytes is None:
        placement = placement_of(root)
        min_bytes = DEFAULT_MIN_BYTES if placement is None else placement.min_bytes
    name, largest = max(weights.values(), key=lambda weight: bytes_of(weight[1]))
    if bytes_of(largest) < min_bytes:
        return (
            f"nothing streams: all weights are smaller than min_bytes={size(min_bytes)} (the largest, {name}, has "
            f"{size(bytes_of(largest))})"
        )
    reason = why_not(largest, ModelIndex.of(root))
    return f"nothing streams. Of the largest weight, {name}: {reason}" if reason else ""


def refuse_applied(model: nn.Module) -> None:
    """Raise ChunkflowError for a model that belongs to a compiled pipeline."""
    for owner in filter(None, (placement.owner() for placement in placements_of(model))):
        raise ChunkflowError(
            f"This model is {owner}, which has compiled it and placed it within its budget: call "
            "chunkflow_compile.restore(pipe) first."
        )


def bring_back(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Move the parameters of a placed model back to their original devices, bit for bit; return ``model``.

    ``device``: the device to move the parameters to, or None to move them to their original devices.
    Raises ChunkflowError if the device does not have enough memory.  The weights that were not moved before the error stay
    offloaded.
    """
    target = None if device is None else check_device(device)
    with compile_lock:  # so that no call in another thread places the model again during this function
        for placement in placements_of(model):
            placement.undo(target)
        for module in unwrap(model).modules() if placement_of(unwrap(model)) is None else ():
            detach_guards(module)  # a copy of a placed model also has guards
            module.__dict__.pop(PLACEMENT, None)
        # Also restore weights that no placement contains: the weights of a copy, and weights assigned after the last call.
        for leaf in [*leaves_of(unwrap(model))]:
            if isinstance(leaf, HostWeight):
                restore_weight(leaf, target or leaf.device, GpuStagings())
    return model


def programs(model: nn.Module) -> tuple[SingleCall, ...]:
    """Return the programs of a placed model, oldest first.  The attributes of a program include its ``plan`` and its
    ``measurements``."""
    running = (p for placement in placements_of(model) for p in placement.programs if not p.closed and not p.preamble)
    return tuple(sorted(dict.fromkeys(running), key=lambda program: program.started))


def cycles(model: nn.Module) -> tuple[BoundCycle, ...]:
    """Return the cycles in which programs of a placed model run.  The currently running cycle comes first.

    The attributes of a cycle include its ``plan`` and its number of ``jumps``.  Programs that alternate run as a cycle
    after the order of their calls has repeated and the planner has made a plan for this order.
    """
    orders = dict.fromkeys(program.order for program in programs(model))
    by_order = (sorted(order.cycles, key=lambda cycle: cycle is not order.current) for order in orders)
    return tuple(itertools.chain(*by_order))


def _checked_dtype(dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ChunkflowError(
            f"offload casts to float32, float16 or bfloat16 of torch, not to {dtype!r}; for less, quantise the model."
        )
    return dtype


def cast_to(dtype: torch.dtype, root: nn.Module) -> DtypeOf:
    """Return a function that returns the dtype to which a weight is cast.

    As with ``from_pretrained(torch_dtype=dtype)`` in diffusers, all floating-point weights in the state_dict are cast to
    ``dtype``, except the weights that the class of the model keeps in float32.  Buffers that a module fills before programs
    read them are also cast.
    """
    kept = set(getattr(root, "_keep_in_fp32_modules", None) or ())
    filled = filled_by(root)
    state = {*root.state_dict(), *(name for name, tensor in tensors_of(root) if id(tensor) in filled)}

    def of(name: str, tensor: torch.Tensor) -> torch.dtype:
        if name not in state or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            return tensor.dtype
        return torch.float32 if kept & set(name.split(".")) else dtype

    return of


def _refuse_to_cast_shards(root: nn.Module, dtype_of: DtypeOf) -> None:
    """Raise ChunkflowError if a DTensor would be cast.  The cast would change only the dtype of the local shard, not the
    dtype of the DTensor."""
    for name, tensor in tensors_of(root):
        if is_distributed(tensor) and (wanted := dtype_of(name, tensor)) != tensor.dtype:
            raise ChunkflowError(
                f"{name} is a DTensor of {tensor.dtype}, which offload does not cast: call model.to({wanted}) before it, and "
                "leave out dtype."
            )


def target_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return ``device``, or by default the device of the model's parameters.  Raises ChunkflowError if ``device`` is None and
    the parameters are not all on one device."""
    return _one_device(device, [*leaves_of(unwrap(model))])


def _one_device(device: torch.device | str | None, parameters: list[torch.Tensor]) -> torch.device:
    if device is not None:
        return check_device(device)
    devices = {p.device for p in parameters}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "none"
        raise ChunkflowError(f"The model's parameters are on {names}: pass the compute device, offload(model, device).")
    return devices.pop()
