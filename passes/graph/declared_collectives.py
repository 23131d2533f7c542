"""Declared collectives: custom ops that communicate and that users have declared, because ChunkFlow cannot recognize such ops
by their names.

For example, the all-to-all of a server may be an opaque op such as ``vllm_omni_a2a::ulysses_qkv_fwd``.  If this op is not
declared, it is treated as compute: copies overlap with it, and the proof of a program (program/verify.py) does not cover the
exchange.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from chunkflow_compile.passes.errors import ChunkflowError

Kind = Literal["all-to-all", "all-gather", "reduce-scatter", "all-reduce"]
KINDS: tuple[str, ...] = get_args(Kind)
# The engine that moves the bytes: kernels ("sm"), as in NCCL, or copy engines ("copy"), which also copy weights.
Engine = Literal["sm", "copy"]
_ENGINES: tuple[str, ...] = get_args(Engine)
# Usual names of an op's argument that takes a process group, or the name of a process group.
_GROUPS = ("group_name", "group", "process_group", "pg")


@dataclass(frozen=True)
class DeclaredCollective:
    """The declaration of an op that communicates.  The op is synchronous: compute can read its results when it returns.

    ``nbytes``: function that takes the op's arguments and returns the bytes that this rank receives, or None to use the
    formula for ``kind`` (:func:`crossing_bytes`).  ``fixed``: whether the declaration names the process group.  ``group``: if
    ``fixed``, the name of the process group, otherwise the name of the op's argument that takes the process group.
    """

    kind: Kind
    nbytes: Callable[..., int] | None
    group: str
    fixed: bool
    engine: Engine


# Declared collectives, by the name of the op.  Declarations are valid for the whole process, like torch's own registries of
# ops.
_DECLARED: dict[str, DeclaredCollective] = {}


def register_collective(
    op: object,
    kind: Kind,
    *,
    bytes: Callable[..., int] | None = None,
    group: object = None,
    engine: Engine = "sm",
) -> None:
    """Declare that a custom op communicates, before a model that calls it is compiled.

    ``op``: the result of ``torch.library.custom_op``, an op of ``torch.ops``, or its name, ``"namespace::name"``.  The
    op must return new tensors and must not write to its arguments.  After it has returned, kernels that are launched on
    the current stream must be able to read the results.  ``kind``: "all-to-all", "all-gather", "reduce-scatter" or
    "all-reduce".  ``bytes``: a function that takes the op's arguments (with fake tensors) and returns how many bytes this
    rank receives.  The default is the formula for the kind, applied to all tensors that the op takes.  ``group``: a
    process group, or the name of the op's argument that takes the process group or the group's name.  The default is the
    argument named group_name, group, process_group or pg.  ``engine``: "sm" if kernels move the bytes, or "copy" if copy
    engines move them.  While copy engines move the bytes, they cannot copy weights.  Declaring an op again replaces its
    earlier declaration.

    Raises ChunkflowError for an unknown op, kind, engine or group, and for an op that writes to its arguments.
    """
    overload = _op(op)
    name = overload._schema.name
    for what, value, allowed in (("kind", kind, KINDS), ("engine", engine, _ENGINES)):
        if value not in allowed:
            close = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.0)[0]
            raise ChunkflowError(
                f"register_collective({name}): {value!r} is no {what} of a collective; did you mean {close!r}? "
                f"There are {', '.join(allowed)}."
            )
    if overload._schema.is_mutable:
        raise ChunkflowError(
            f"register_collective({name}): the op writes to its arguments, so that torch.compile wraps it. Declare an op "
            "that returns its result in a new tensor."
        )
    argument, fixed = _group(overload, group)
    _DECLARED[name] = DeclaredCollective(kind, bytes, argument, fixed, engine)


def declared(target: object) -> DeclaredCollective | None:
    """Return the declaration of the op that a node calls, or None."""
    return _DECLARED.get(target._schema.name) if isinstance(target, torch._ops.OpOverload) else None


def argument(target: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return the value of the argument ``name`` in a call of the op ``target`` with ``args`` and ``kwargs``."""
    schema: Any = target
    arguments = schema._schema.arguments
    given = {
        **{a.name: a.default_value for a in arguments},
        **dict(zip([a.name for a in arguments], args, strict=False)),
        **kwargs,
    }
    return given[name]


def _op(op: object) -> torch._ops.OpOverload:
    target: Any = op
    if isinstance(op, str):
        try:
            namespace, name = op.split("::")
            target = getattr(getattr(torch.ops, namespace), name)
        except (ValueError, AttributeError) as error:
            raise ChunkflowError(
                f"register_collective: there is no op {op!r}. Import the module that defines it first, and write its "
                "name as namespace::name."
            ) from error
    target = getattr(target, "_opoverload", target)  # the result of torch.library.custom_op holds its op there
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, torch._ops.OpOverload):
        raise ChunkflowError(
            f"register_collective: {op!r} is no op of torch. Pass what torch.library.custom_op returned, or "
            "torch.ops.namespace.name: a plain function is traced through, and its collectives are found without this."
        )
    return target


def _group(op: torch._ops.OpOverload, group: object) -> tuple[str, bool]:
    """Return the fields ``group`` and ``fixed`` of a :class:`DeclaredCollective` for this op."""
    names = [a.name for a in op._schema.arguments]
    if group is None:
        group = next((name for name in _GROUPS if name in names), None)
    elif (name := getattr(group, "group_name", None)) is not None:
        return str(name), True
    if group not in names:
        raise ChunkflowError(
            f"register_collective({op._schema.name}): which of its arguments holds the process group? It takes "
            f"{', '.join(names)}. Pass group='the name of one of them', or the process group itself."
        )
    return str(group), False
