"""Detection of writes that the schema of an op does not declare.

The schemas of ops in torch's own namespaces declare all writes.  The schemas of collectives (``c10d``) and of
extensions may leave out some writes.  An op with such a schema runs on copies of the weights, and the caller waits
until the op has finished.  If a copy then differs from its weight, the op has written to the copy, and the values of
the copy are written to the weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from chunkflow_compile.passes.errors import ChunkflowError

from .bytes import same_bits, share_storage

_aten = torch.ops.aten
# Namespaces of ops whose schemas declare every write.
_DECLARED = frozenset(
    ("aten", "prims", "inductor_prims", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "chunkflow")
)
# Ops that write running statistics in training although their schemas do not declare these writes.
_STATISTICS = frozenset(
    (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
)
# Ops that write to a tensor when another rank sends data, or that resize the memory of a tensor.  Waiting for the other
# rank might deadlock.
_UNSEEN = frozenset(
    (
        "c10d::recv_",
        "c10d::recv_any_source_",
        "_c10d_functional::irecv",
        "_c10d_functional::batch_p2p_ops",
        "inductor::resize_storage_bytes_",
    )
)
# Ops that only read a tensor, and finish when another rank has received it.
_SENDS = frozenset(("c10d::send",))


def declares(func: Any) -> bool:
    """Whether the schema of an op declares which of its arguments it writes."""
    return func.namespace in _DECLARED and func not in _STATISTICS


def cannot_be_seen(func: Any) -> bool:
    """Whether an op may write to a tensor after it has returned, at a time that cannot be observed."""
    return func.namespace == "symm_mem" or func.name().partition(".")[0] in _UNSEEN


def wait_for_collective(func: Any, values: Sequence[torch.Tensor]) -> None:
    """If the op ``func`` is a functional collective, wait until it has written ``values``.  Such an op may return before
    it has written them."""
    if func.namespace == "_c10d_functional":
        for value in values:
            torch.ops._c10d_functional.wait_tensor(value)


def on_copies(kind: type[Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on copies of its weight arguments, and write values that the op has changed back to the weights.

    ``kind``: the class of the weights.  Raises ChunkflowError if the op returns a view of a copy, because a later write
    to the view would go unnoticed.  Raises ChunkflowError also if the op is part of a batch of collectives, because it
    then finishes only together with the whole batch.
    """
    weights: dict[int, Any] = {id(x): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, kind)}
    sends = func.name().partition(".")[0] in _SENDS
    if not sends and any(map(_coalesces, args)):
        raise ChunkflowError(
            f"{func} writes {next(iter(weights.values())).buffer.name} with a batch of collectives, at a time that nothing "
            "tells: call it outside the batch, or call chunkflow_compile.restore(model) first."
        )
    copies = {key: _copy(weight) for key, weight in weights.items()}
    positional, named = pytree.tree_map_only(kind, lambda w: copies[id(w)], (tuple(args), dict(kwargs)))
    result = func(*positional, **named)
    if not sends:
        for work in [dist.Work.unbox(x) for x in pytree.tree_leaves(result) if _is_a("Work", x)]:
            work.wait()
    given = {id(copies[key]): weight for key, weight in weights.items()}
    memory = {copies[key].untyped_storage()._cdata: weight for key, weight in weights.items()}

    def returned(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) in given:
            return given.get(id(value), value)
        if value.layout == torch.strided and (weight := memory.get(value.untyped_storage()._cdata)) is not None:
            raise ChunkflowError(
                f"{func} returns memory of {weight.buffer.name}, which its schema does not declare, so a write to it would "
                "go unnoticed: let the op declare that, or return a copy; or call chunkflow_compile.restore(model) first."
            )
        return value

    result = pytree.tree_map(returned, result)
    for key, weight in weights.items():
        _take(weight, copies[key])
    return result


def _take(weight: Any, copy: torch.Tensor) -> None:
    """Write the values of a copy back to its weight, if they differ."""
    values = copy.to(weight.host.device)
    if not same_bits(weight.values_on_host, values):
        with weight.buffer.write(), torch.no_grad():
            weight.host.copy_(values)
            weight.buffer.count_write()


def _copy(weight: Any) -> torch.Tensor:
    """Return the values of a weight on the device, in separate memory."""
    values: torch.Tensor = weight.fetch()
    return values.clone() if share_storage(values, weight.host) else values


def _is_a(name: str, value: Any) -> bool:
    """Whether an argument or a result of a ``c10d`` op is an object of the C++ class ``name``."""
    if not isinstance(value, torch.ScriptObject):
        return False
    kind: Any = value._type()
    return bool(kind.name() == name)


def _coalesces(value: Any) -> bool:
    """Whether an argument is a process group that is batching collectives.  Nothing can wait for a single collective of a
    batch."""
    if not _is_a("ProcessGroup", value):
        return False
    return dist.ProcessGroup.unbox(value) in dist.distributed_c10d._world.pg_coalesce_state
