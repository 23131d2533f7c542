"""Ulysses sequence parallelism for diffusers models, with or without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.torch_version import TorchVersion

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.groups import group_of
from chunkflow_compile.weights.modules import hooks_of

# The argument of a transformer for the timestep.  It is split only if it has one value per token.
_TIMESTEP = "timestep"


def enable_ulysses(model: nn.Module, degree: int | None = None, *, group: Any = None) -> nn.Module:
    """Split the sequence of a diffusers transformer over ``degree`` ranks; return ``model``.

    torch.distributed must be initialised.  Without ``group``, every rank calls this, and the ranks are split into
    consecutive groups: 0 to degree - 1, and so on.  A degree of 1 leaves the model unchanged.  ``group``: the ranks that
    share a sequence, including this rank, as a process group or as one dimension of a DeviceMesh (``mesh["ulysses"]``).
    With ``group``, ``degree`` may be omitted, and ranks of other groups may use other models.  With two dimensions, as in
    ``mesh["ring", "ulysses"]``, attention uses both ring and Ulysses parallelism.

    Calls ``model.enable_parallelism`` with a plan that can be traced into one graph.  Unlike in diffusers, no call of the
    model is needed before, because a model that does not fit on the device could not be called.  Raises ChunkflowError,
    before it waits for another rank, in these cases: there is no process group, the degree does not divide the number of
    ranks or differs from the size of the group, this rank is not in the group, the degree does not divide the number of
    attention heads, or the model cannot be split or is split already.  If the degree does not divide the number of tokens
    of a call, the call raises the AssertionError of diffusers; with ``fullgraph=True`` it is inside an error of Dynamo.
    """
    degree = _checked_degree(degree, group)
    if degree == 1:
        return model
    plan = parallel_plan(model)
    _check_heads(model, group.shape[1] if _has_ring(group) else degree)
    if TorchVersion(torch.__version__) < "2.13":
        # the last gather of a model calls this function, into which Dynamo cannot trace before torch 2.13
        torch.compiler.allow_in_graph(torch._utils._maybe_view_chunk_cat)
    config = _ring_and_ulysses(model, group) if _has_ring(group) else _ulysses(degree, group)
    # Without an accelerator, diffusers (0.42) would divide by the number of devices, which is 0.  Therefore, the method that
    # resolves the mesh is replaced during this call by a function that needs no device.
    if not torch.accelerator.is_available():
        model.__dict__["_resolve_parallel_config"] = lambda config: _resolve_on_cpu(model, config)
    try:
        model.enable_parallelism(config=config, cp_plan=plan)  # type: ignore[operator]
    finally:
        model.__dict__.pop("_resolve_parallel_config", None)
    _split_timesteps(model)
    for module in model.modules():
        for hook in hooks_of(module).values():
            _look_up_arguments(getattr(hook, "module_forward_metadata", None))
    return model


def _split_timesteps(model: Any) -> None:
    """Split the timestep like the tokens if there is one timestep per token (Wan2.2 5B).  A timestep per sample is not
    split.

    The hook in diffusers for this split is not used, because it logs a warning if there is one timestep per sample, and a
    warning breaks the graph.
    """
    from diffusers.hooks.context_parallel import ContextParallelSplitHook
    from diffusers.hooks.hooks import HookRegistry
    from diffusers.models._modeling_parallel import ContextParallelInput

    class TimestepSplitHook(ContextParallelSplitHook):
        def _prepare_cp_input(self, x: torch.Tensor, cp_input: ContextParallelInput) -> torch.Tensor:
            if x.dim() != cp_input.expected_dims:
                return x
            split: torch.Tensor = super()._prepare_cp_input(x, cp_input)
            return split

    for name, entry in (getattr(model, "_cp_plan", None) or {}).items():
        if isinstance(entry, dict) and _TIMESTEP in entry:
            registry = HookRegistry.check_if_exists_or_initialize(model.get_submodule(name))
            hook = TimestepSplitHook({_TIMESTEP: entry[_TIMESTEP]}, model._parallel_config.context_parallel_config)
            registry.register_hook(hook, "chunkflow_timestep")


def _ulysses(degree: int, group: Any) -> Any:
    from diffusers import ContextParallelConfig

    ranks = _group_of(degree) if group is None else _process_group(group)
    mesh: Any = _SingleGroupMesh(DeviceMesh.from_group(ranks, _device_type(), mesh_dim_names=("ulysses",)))
    return ContextParallelConfig(ulysses_degree=degree, mesh=mesh)


def _has_ring(group: Any) -> bool:
    return isinstance(group, DeviceMesh) and group.mesh_dim_names == ("ring", "ulysses")


def _ring_and_ulysses(model: nn.Module, mesh: DeviceMesh) -> Any:
    """Return a configuration for ring and Ulysses parallelism.  Raises ChunkflowError if the model's attention backend
    does not support ring attention."""
    from diffusers import ContextParallelConfig
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    ring, ulysses = mesh.shape
    processors = [getattr(module, "processor", None) for module in model.modules()]
    active, _ = _AttentionBackendRegistry.get_active_backend()
    used = {AttentionBackendName(getattr(p, "_attention_backend", None) or active) for p in processors if p is not None}
    if ring > 1 and AttentionBackendName.NATIVE in used:
        raise ChunkflowError(
            "Ring attention joins parts of an attention by their log-sum-exp, which the native attention of diffusers does "
            "not return: choose one that does, on a GPU, such as model.set_attention_backend('_native_cudnn'), or use "
            'Ulysses alone: group=mesh["ulysses"].'
        )
    return ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh)


def _group_of(degree: int) -> dist.ProcessGroup:
    """Split all ranks into consecutive groups of ``degree`` ranks; return the process group with this rank.

    Every rank must call this function.  The groups are created once, and later models use the same groups.
    """
    wanted = f"chunkflow ulysses {degree}"
    groups: dict[dist.ProcessGroup, Any] = dist.distributed_c10d._world.pg_map  # the process groups with this rank
    for group in groups:
        if group.group_desc == wanted:
            return group
    # init_device_mesh also sets the current device if none is set
    world = init_device_mesh(_device_type(), (dist.get_world_size(),)).get_group()
    if degree == world.size():
        return world
    # use the timeout that the user has chosen for all ranks
    timeout = None if (all_ranks := group_of()) is None else all_ranks.timeout
    mine: dist.ProcessGroup = dist.new_subgroups(degree, timeout=timeout, group_desc=wanted)[0]
    return mine


def _checked_degree(degree: int | None, group: Any) -> int:
    """Return the degree.  Raises ChunkflowError if a sequence cannot be split over this number of ranks.  Does not
    communicate with other ranks."""
    if degree is None and group is None:
        raise ChunkflowError(
            "enable_ulysses needs a degree, the number of ranks that share a sequence, or their group."
        )
    if degree is not None and (not isinstance(degree, int) or degree < 1):
        raise ChunkflowError(f"enable_ulysses: a degree is a number of ranks, 1 or more, and not {degree!r}.")
    if degree == 1 and group is None:
        return 1
    if not dist.is_initialized():
        raise ChunkflowError(
            "enable_ulysses splits a model over the ranks of a process group, and there is none: call "
            'torch.distributed.init_process_group("nccl"), or "gloo" on CPUs, before it, and start the program with torchrun.'
        )
    if group is not None:
        size = group.size() if _has_ring(group) else _process_group(group).size()
        if degree is not None and degree != size:
            raise ChunkflowError(
                f"enable_ulysses: the degree is {degree}, and the group has {size} ranks. A group is one sequence: leave "
                "degree out, or pass a group of as many ranks."
            )
        return size
    assert degree is not None
    if (world := dist.get_world_size()) % degree:
        raise ChunkflowError(
            f"enable_ulysses splits all ranks into groups of {degree}, and {degree} does not divide {world}, the number "
            "of ranks. Start a multiple of the degree, or pass the group of each rank: group=."
        )
    return degree


def _process_group(group: Any) -> dist.ProcessGroup:
    """Return the process group for the user's argument ``group``.  Raises ChunkflowError if it is not a group that
    contains this rank."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            named = [f"mesh[{name!r}]" for name in group.mesh_dim_names or ()] or ["a mesh with mesh_dim_names"]
            raise ChunkflowError(
                f"enable_ulysses takes one dimension of a DeviceMesh, and this one has {group.ndim}: pass "
                f"{' or '.join(named)}."
            )
        if group.get_coordinate() is None:
            raise _not_in(group.mesh.tolist())
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        raise ChunkflowError(
            f"enable_ulysses: group={group!r} is no process group that rank {dist.get_rank()} is in: pass the group of "
            'this rank, or a dimension of a DeviceMesh, such as mesh["ulysses"].'
        )
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError) as error:  # the process group was destroyed
        raise ChunkflowError(
            "enable_ulysses: the group has ended: destroy_process_group was called after it was created. Create it again."
        ) from error
    if dist.get_rank() not in ranks:
        raise _not_in(ranks)
    return group


def _not_in(ranks: Collection[int]) -> ChunkflowError:
    return ChunkflowError(
        f"enable_ulysses: rank {dist.get_rank()} is not in the group of ranks {', '.join(map(str, ranks))}: pass the group "
        "that it is in."
    )


class _SingleGroupMesh:
    """The part of a DeviceMesh that diffusers uses, for a mesh with a ring dimension of 1 and a Ulysses dimension of
    ``degree`` ranks.

    It uses one existing process group.  A real mesh would create groups for the ring and for both dimensions combined,
    and all ranks of the job would have to take part.
    """

    def __init__(self, ulysses: DeviceMesh) -> None:
        self._ulysses = ulysses

    def __getitem__(self, names: str | tuple[str, ...]) -> Any:
        return self._ulysses if names == "ulysses" else self

    def _flatten(self) -> DeviceMesh:
        return self._ulysses

    def get_local_rank(self) -> int:
        """Return the rank in the ring dimension."""
        return 0


def _check_heads(model: nn.Module, degree: int) -> None:
    """Raise ChunkflowError if the number of heads in an attention layer cannot be divided by ``degree``."""
    for name, module in model.named_modules():
        splits = hasattr(getattr(module, "processor", None), "_parallel_config")  # only attention that diffusers splits
        for kind in ("heads", "kv_heads") if splits else ():
            heads = getattr(module, kind, None)
            if isinstance(heads, int) and heads % degree:
                fits = ", ".join(map(str, sympy.divisors(heads)))
                raise ChunkflowError(
                    f"Ulysses over {degree} ranks splits the attention heads into {degree} equal parts, and the {heads} "
                    f"{kind} of {name} ({type(model).__name__}) cannot be split so: choose a degree of {fits}."
                )


def _look_up_arguments(metadata: Any) -> None:
    """Look up the positions of the arguments that a hook splits.  This is done before the first call, because Dynamo
    cannot trace the lookup."""
    if metadata is not None and metadata.cached_parameter_indices is None:
        names = list(inspect.signature(metadata._cls.forward).parameters)[1:]  # without self
        metadata.cached_parameter_indices = {name: i for i, name in enumerate(names)}


def parallel_plan(model: nn.Module) -> dict[str, Any]:
    """Return how a model's sequence is split and gathered, in the format of ``cp_plan`` in diffusers.

    This is diffusers' plan with two changes.  HunyuanVideo has no plan in diffusers, so this function defines one.  Wan's
    plan in diffusers splits the timestep, too; this is left to :func:`_split_timesteps`.  Raises ChunkflowError if the
    model cannot be split, or is split already.
    """
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    if getattr(model, "_parallel_config", None) is not None:
        raise ChunkflowError(
            f"This {type(model).__name__} is split over ranks already, and diffusers cannot split it again: call "
            "enable_ulysses once a model, and load the model again for other ranks."
        )
    if type(model).__name__ == "HunyuanVideoTransformer3DModel":
        split = ContextParallelInput(split_dim=1, expected_dims=3)
        rotary = ContextParallelInput(split_dim=0, expected_dims=2, split_output=True)
        return {
            "transformer_blocks.0": {"hidden_states": split, "encoder_hidden_states": split},
            "rope": {0: rotary, 1: rotary},
            "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
        }
    own: Any = getattr(model, "_cp_plan", None)
    if own is None or not hasattr(model, "enable_parallelism"):
        raise ChunkflowError(
            f"enable_ulysses: diffusers does not say how a {type(model).__name__} is split over ranks (it has no _cp_plan). "
            "A model of your own splits its sequence itself, see examples/ulysses_dit.py."
        )
    return {
        name: {k: v for k, v in entry.items() if k != _TIMESTEP} if isinstance(entry, dict) else entry
        for name, entry in own.items()
        if not (isinstance(entry, dict) and set(entry) == {_TIMESTEP})
    }


def _device_type() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


def _resolve_on_cpu(model: Any, config: Any) -> Any:
    from diffusers import ParallelConfig

    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=config.mesh)
    model._parallel_config = parallel
    return parallel
