"""Wrappers for the code of regions and collectives.  The wrappers clone outputs that are stored in a slot, detect that a
region writes to a weight, run a region once per slice, and explain errors of a collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch.fx import GraphModule

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.regions import Slicing
from chunkflow_compile.passes.graph.slice_graphs import Slice
from chunkflow_compile.weights.bytes import same_bits
from chunkflow_compile.weights.undeclared import declares

# The lowered code of a region.  It follows torch's boxed calling convention: the code gets its inputs in a list, empties
# this list, and drops each input after the last use of the input.
LoweredRegion = Callable[[list[Any]], Sequence[Any]]


def owning(
    region: LoweredRegion, values: Iterable[torch.Tensor], settled: Callable[[LoweredRegion], None]
) -> LoweredRegion:
    """Wrap a region so that its outputs own their memory.

    If an op does not change its input (w * 1), Inductor may return the input itself as an output.  So an output may be stored
    in the memory of one of ``values``, the copies of weights on the device.  Such an output is cloned, because the next
    weight in the slot, or new values of a resident weight, would overwrite it.

    The first call finds out which outputs must be cloned, and then passes a function to ``settled``.  This function replaces
    the wrapper in all further calls.  If no output must be cloned, this function is ``region`` itself.
    """
    memory = frozenset(value.untyped_storage()._cdata for value in values)

    def call(inputs: list[Any]) -> Sequence[Any]:
        outputs = region(inputs)
        inside = frozenset(i for i, output in enumerate(outputs) if _lies_in(output, memory))
        settled(_cloning(region, inside) if inside else region)
        return _cloned(outputs, inside)

    return call if memory else region


def _cloning(region: LoweredRegion, inside: Collection[int]) -> LoweredRegion:
    return lambda inputs: _cloned(region(inputs), inside)


def _cloned(outputs: Sequence[Any], inside: Collection[int]) -> Sequence[Any]:
    return [output.clone() if i in inside else output for i, output in enumerate(outputs)]


def repeated(region: LoweredRegion, slicing: Slicing, values: Sequence[torch.Tensor]) -> LoweredRegion:
    """Wrap the lowered code of a region that is split into slices: the wrapper runs the code for one slice after the other.

    ``values``: tensors with the shapes, strides and dtypes of the whole outputs.  Each call allocates the outputs, except
    the outputs that the region writes into one of its inputs.
    """
    fresh = [value for value, (_, over) in zip(values, slicing.writes, strict=False) if over is None]
    parts = [*slicing.inputs, *(part for part, over in slicing.writes if over is None)]

    def call(inputs: list[Any]) -> Sequence[Any]:
        made = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in fresh]
        own = iter(made)
        outputs = [next(own) if over is None else inputs[over] for _, over in slicing.writes]
        taken = [*zip((*inputs, *made), parts, strict=True)]
        inputs.clear()
        returned: Sequence[Any] = ()
        for i in range(slicing.repeat):
            returned = region([value if part is None else _part(value, part, i) for value, part in taken])
        return outputs or returned

    return call


def _part(value: torch.Tensor, part: Slice, call: int) -> torch.Tensor:
    """Return one slice of a value.  ``call``: the number of the slice, counted from 0."""
    return value.narrow(part.dim, part.offset + call * part.size, part.size)


def separated(rows: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Return the outputs of several rows, such that the outputs of different rows share no memory.

    If an output shares memory with an output of another row, it is cloned.  For example, both outputs may be views of a
    constant, or of an input that is the same tensor in both rows.
    """
    memory = [{o.untyped_storage()._cdata for o in outputs if isinstance(o, torch.Tensor)} for outputs in rows]
    counts = Counter(chain.from_iterable(memory))
    shared = frozenset(storage for storage, count in counts.items() if count > 1)
    return [tuple(o.clone() if _lies_in(o, shared) else o for o in outputs) for outputs in rows]


def _lies_in(value: object, memory: Collection[int]) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in memory


def undeclared(region: GraphModule) -> list[str]:
    """Return the ops of a region that may write to arguments without declaring these writes in their schemas."""
    called = (node.target for node in region.graph.nodes if node.op == "call_function")
    return sorted({str(op) for op in called if isinstance(op, torch._ops.OpOverload) and not declares(op)})


def checked(region: LoweredRegion, weights: Mapping[str, torch.Tensor], ops: Sequence[str]) -> LoweredRegion:
    """Wrap a region that calls ``ops``.  These ops may write to ``weights``, the device copies of offloaded weights.

    After the first call, the wrapper compares the copies with their values before the call.  If a copy has changed, the
    wrapper restores the old values of all copies and raises ChunkflowError.
    """
    unseen = dict(weights)

    def call(inputs: list[Any]) -> Sequence[Any]:
        before = {name: value.to("cpu", copy=True) for name, value in unseen.items()}
        outputs = region(inputs)
        for name, values in before.items():
            if not same_bits(values, weights[name].cpu()):
                for other, old in before.items():
                    weights[other].copy_(old)
                raise ChunkflowError(
                    f"The forward writes the weight {name} by an op whose schema does not declare it: one of "
                    f"{', '.join(ops)}. The copy on the device is dropped, so the write would be lost. Declare it "
                    "(torch.library.custom_op(..., mutates_args=...)), or let the op return the new values."
                )
        unseen.clear()
        return outputs

    return call


def explained(function: Callable[..., Any], name: str, received: Callable[[], None] | None) -> Callable[..., Any]:
    """Wrap an op of the collective ``name``.  The first argument of the wrapper is the number of the step, for error
    messages.

    ``received``: a function to call after the op has received data; None if the op receives none.  The wrapper raises
    ChunkflowError if the op fails.
    """

    def call(step: int, *args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            if received is not None:
                received()
            return result
        except RuntimeError as error:
            raise ChunkflowError(
                f"The collective {name} failed in step {step}: a rank died or did not arrive in time ({error}). The "
                "model is intact: restore(model) brings its weights back."
            ) from error

    return call


def tuple_getter(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that gets a sequence and returns the elements at ``positions`` as a tuple.  If there are several
    positions, this function is implemented in C."""
    if len(positions) > 1:
        return itemgetter(*positions)
    if not positions:
        return lambda _: ()
    (position,) = positions
    return lambda values: (values[position],)
