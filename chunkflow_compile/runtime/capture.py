"""Capture: the functions that record a call as a CUDA graph, or find the reason why the call cannot be recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from chunkflow_compile.passes.errors import ChunkflowError, first_line
from chunkflow_compile.passes.forms import captured
from chunkflow_compile.passes.graph.discover import group_names
from chunkflow_compile.passes.program.rewrite import Program, issued
from chunkflow_compile.weights.groups import group_named, numbers
from chunkflow_compile.weights.source import DriveBytes

from .cuda_graphs import MOST_GRAPHS, CaptureLog, CudaGraph
from .instructions import instructions
from .target import Cost, RunningStep, Target
from .wrapped_calls import undeclared

# An input that is a tensor, as a pair: its position among all inputs, and the tensor.
_InputTensor = tuple[int, torch.Tensor]


def _reasons(target: Target, collectives: bool) -> Iterator[str]:
    """Yield the reasons why a call can never be recorded, whatever its inputs are.  ``collectives``: whether a call with
    collectives may be recorded."""
    for name, host in target.binding.hosts.items():
        if isinstance(host, DriveBytes):
            yield f"{name} is on the drive, and a graph copies from host memory only"
    if reason := target.device.why_not_recorded():
        yield reason
    if target.program.problem.collectives and not collectives:
        yield 'it has collectives, which cudagraphs="collectives" records too (experimental)'
    if (calls := len(target.cycle.calls)) > MOST_GRAPHS:
        yield f"it is one of {calls} calls, and an arena has at most {MOST_GRAPHS} graphs: compile the model whole"
    if not target.cycle.plan.joins:
        yield (
            "waiting for all copies at the end of each call is predicted to cost 1 % of the step or more, or its plan was "
            "given and has no joins"
        )


def record(target: Target, call: int, env: Sequence[Any], log: CaptureLog) -> CudaGraph | None:
    """Record a call with :func:`capture`.  If the call cannot be recorded, return None and write the reason to ``log``.

    Among ranks that share collectives, either all ranks record the call, or all ranks issue it op by op.
    """
    graph, why = None, next(_reasons(target, log.wanted == "collectives"), "")
    try:
        graph = None if why else capture(target, call, env, log)
    except Exception as error:  # noqa: BLE001  (an op that cannot be recorded may raise anything)
        why = str(error) if isinstance(error, ChunkflowError) else first_line(error)
    if log.wanted == "collectives":
        why = _reason_of_any_rank(target.program, why)
    if why and graph is not None:
        graph.drop(why)
        graph = None
    if why:
        log.give_up(why)
    return graph


def _reason_of_any_rank(program: Program, why: str) -> str:
    """Return the reason why this rank or another rank cannot record a call; empty if all ranks can record the call.  A
    reason from another rank contains the number of that rank.

    ``why``: the reason why this rank cannot record the call; empty if this rank can record it.
    """
    groups = (group_named(name) for name in group_names(program.module.graph))
    for group in {group.ranks: group for group in groups if group is not None}.values():
        posted = group.posted(group.post("CUDA graph", why), group.timeout.total_seconds())
        if late := group.missing(posted):
            return why or f"{numbers(late)} did not record it within {group.timeout.total_seconds():g} s"
        why = why or next((f"on rank {rank}: {other}" for rank, other in posted.items() if other), "")
    return why


def capture(target: Target, call: int, env: Sequence[Any], log: CaptureLog) -> CudaGraph:
    """Record a call as a CUDA graph for the input sizes in ``env``, without running the call; return the graph.

    ``target``: the target to which the executor issues the call op by op while there is no graph.  ``call``: the number of
    the call in the cycle.  ``env``: the values of the step, indexed by node number; only the inputs are set.

    Raises ChunkflowError for inputs that cannot be recorded, and RuntimeError if there is not enough memory.  An op that
    cannot be recorded may raise other errors.
    """
    begun, program, device, arena = time.monotonic(), target.program, target.device, target.binding.arena
    inputs = [node for node in program.module.graph.nodes if node.op == "placeholder"]
    weights = set(program.weight_inputs.values())
    values, copied, in_place, fixed = list(env), list[_InputTensor](), list[_InputTensor](), list[tuple[int, Any]]()
    for position, node in enumerate(inputs):
        value = env[position]
        if not isinstance(value, torch.Tensor):
            fixed.append((position, value))
        elif value.device.type != arena.device.type:
            raise ChunkflowError(
                f"its input {node.name} ({list(value.shape)}) is on the {value.device.type}, and a graph would keep its "
                f"value: pass it on {arena.device}"
            )
        elif node.name in weights:
            in_place.append((position, value))
        else:
            with torch.inference_mode(False):  # an inference tensor cannot be written outside inference mode
                values[position] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=value.device
                )
            copied.append((position, values[position]))
    given = {id(values[position]): position for position in range(len(inputs))}
    before = device.free()
    with device.recording(arena.graphs.pool) as (graph, recorder):
        cycle, events = target.cycle, [recorder.event() for _ in range(target.cycle.events.count)]
        recorded = Target(program, cycle, target.regions, target.binding, recorder, events, target.poison)
        step = RunningStep(values, Cost(), 0)
        for issue in instructions(recorded, captured(cycle.ops[call], cycle.events), issued(program)):
            issue(step)
    made = CudaGraph(
        graph,
        device,
        log,
        copied=copied,
        in_place=in_place,
        fixed=fixed,
        outputs=[(output, given.get(id(output))) for output in step.env[-1]],
        suspects=[op for name in program.regions for op in undeclared(getattr(program.module, name))],
        moved_bytes=step.cost.moved,
        nbytes=max(0, before - device.free()),
    )
    arena.graphs.add(made)
    log.captured(made.nbytes, time.monotonic() - begun)
    return made
