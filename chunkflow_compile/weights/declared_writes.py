"""Ops that run outside programs, and whose schemas declare all of their writes.  Instead of a weight, such an op gets
the values that ``HostWeight.fetch`` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from .bytes import share_storage
from .undeclared import wait_for_collective
from .unsupported import refuse

_aten = torch.ops.aten
# Ops that write a tensor without reading it, so that the old values need not be fetched.
_FILLS = {_aten.zero_.default, _aten.fill_.Scalar}


def on_fetched(
    kind: type[Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Any]
) -> Any:
    """Run an op on the fetched values of its weights, and copy the new values of the ``written`` weights to host memory.

    ``kind``: the class of the weights.  Raises ChunkflowError if the op would resize an output that is a weight.
    """
    values: dict[int, torch.Tensor] = {}
    outs = {id(x) for name, value in kwargs.items() if name.startswith("out") for x in pytree.tree_leaves(value)}
    others = (args, [value for name, value in kwargs.items() if not name.startswith("out")])
    read = {id(x) for x in pytree.tree_leaves(others)} if outs else set()

    def fetch(weight: Any) -> torch.Tensor:
        if id(weight) in outs and id(weight) not in values and type(weight.host) is torch.Tensor:
            # pass a separate tensor, because the op may resize it
            value = torch.empty_like(weight.host, device=weight.device)
            values[id(weight)] = value.copy_(weight.fetch()) if id(weight) in read else value
        if id(weight) not in values:
            fills = func in _FILLS and type(weight.host) is torch.Tensor
            values[id(weight)] = weight.host if fills else weight.fetch()
        return values[id(weight)]

    positional, named = pytree.tree_map_only(kind, fetch, (tuple(args), dict(kwargs)))
    result = func(*positional, **named)
    wait_for_collective(func, [values[id(weight)] for weight in written])
    for weight in written:
        if values[id(weight)].shape != weight.shape:
            refuse(weight, f"out= of shape {list(values[id(weight)].shape)}")
    for weight in written:
        if not share_storage(values[id(weight)], weight.host):
            weight.host.copy_(values[id(weight)])
        weight.buffer.count_write()
    given = {id(values[id(weight)]): weight for weight in written}
    return pytree.tree_map_only(torch.Tensor, lambda t: given.get(id(t), t), result)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tensors that an op writes, according to its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)
