"""Declared collectives: custom ops that communicate, which no namespace gives away.

A server's all-to-all may be one opaque op, such as ``vllm_omni_a2a::ulysses_qkv_fwd``.  Undeclared it is taken for
compute: copies run beside it, and the proof does not know that ranks meet there.
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
# What moves the bytes: kernels, as NCCL's do, or copy engines, which also copy weights.
Engine = Literal["sm", "copy"]
_ENGINES: tuple[str, ...] = get_args(Engine)
# Names of arguments that hold a process group or its name.
_GROUPS = ("group_name", "group", "process_group", "pg")


@dataclass(frozen=True)
class DeclaredCollective:
    """What is known of an op that communicates.  It has finished, for compute, when it returns.

    ``nbytes``: from the op's arguments to the bytes that cross the link into this rank; None for the formula of its kind.
    ``group``: name of the argument that holds the process group, or, with ``fixed``, the name of the group.
    """

    kind: Kind
    nbytes: Callable[..., int] | None
    group: str
    fixed: bool
    engine: Engine


# By the name of the op.  For the whole process, as torch's own registries of ops are: an op is one.
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

    ``op``: what ``torch.library.custom_op`` returned, an op of ``torch.ops``, or its name, ``"namespace::name"``.  It must
    return new tensors and write to none, and the stream that called it must be able to read them when it returns.
    ``kind``: "all-to-all", "all-gather", "reduce-scatter" or "all-reduce".  ``bytes``: a function of the op's arguments,
    tensors without data among them, that returns how many bytes cross the link into this rank; by default those of the
    kind for all tensors that the op takes.  ``group``: the name of the argument that holds the process group or its name,
    or a process group; by default the argument named group_name, group, process_group or pg.  ``engine``: "sm" if kernels
    move the bytes, "copy" if copy engines do, which then copy no weights.  To declare an op again replaces what was declared.

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
    """What was declared of the op that a node calls, None if nothing was."""
    return _DECLARED.get(target._schema.name) if isinstance(target, torch._ops.OpOverload) else None


def argument(target: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """The value that a call of an op has for one of its arguments."""
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
    target = getattr(target, "_opoverload", target)  # of torch.library.custom_op
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, torch._ops.OpOverload):
        raise ChunkflowError(
            f"register_collective: {op!r} is no op of torch. Pass what torch.library.custom_op returned, or "
            "torch.ops.namespace.name: a plain function is traced through, and its collectives are found without this."
        )
    return target


def _group(op: torch._ops.OpOverload, group: object) -> tuple[str, bool]:
    """The argument that holds the process group, or the name of the group and True."""
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
