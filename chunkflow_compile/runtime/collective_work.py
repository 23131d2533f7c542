"""The functions that issue collectives to the collective stream, and the events that order this stream and the compute
stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch.fx import Node

from chunkflow_compile.passes.graph.discover import collective_kind
from chunkflow_compile.passes.program.lifetimes import over
from chunkflow_compile.passes.program.rewrite import SOURCE

from .compute_work import reader
from .device_base import Stream
from .target import Issue, RunningStep, Target
from .wrapped_calls import explained


def collective_issue(target: Target, node: Node, window: int, stream: Stream | None = None) -> Issue:
    """Return a function that issues a node to a stream.

    ``node``: a collective, the completion of a collective, or an element of the results of a collective.  ``window``: the
    index of the window to which the duration of the node's work is added.  ``stream``: the stream; None means the stream of
    collectives.
    """
    stream, traffic = stream or target.device.collective, target.traffic
    number, read = target.number[node], reader(target.number, node.args, node.kwargs)
    name, function = str(node.meta.get(SOURCE, node.name)), _explained(target, node)

    def issue(step: RunningStep) -> None:
        env, at = step.env, step.number

        def work() -> None:
            args, kwargs = read(env)
            env[number] = function(at, *args, **kwargs)

        windows = step.cost.windows
        stream.run(work, None if windows is None else traffic.collective(windows, window), name)

    return issue


def start_issue(target: Target, collective: Issue) -> Issue:
    """Return a function that issues a collective.  On the device, the collective starts only after all compute work that was
    enqueued before the collective."""
    compute, stream, started = target.device.compute, target.device.collective, target.started

    def issue(step: RunningStep) -> None:
        if stream is not compute:
            compute.record(started)
            stream.wait(started)
        collective(step)
        step.cost.add_collective()

    return issue


def completion_issue(target: Target, completions: Stream, completion: Issue, ended: Any) -> Issue:
    """Return a function that issues the completion of the most recently issued collective to a separate stream.

    ``completions``: the device's stream for completions.  ``completion``: a function that issues the completion to this
    stream.  ``ended``: the event that this stream records after the completion.
    """
    stream, in_flight = target.device.collective, target.in_flight

    def issue(step: RunningStep) -> None:
        stream.record(in_flight)
        completions.wait(in_flight)
        completion(step)
        completions.record(ended)

    return issue


def finish_issue(target: Target, completion: Issue | None, ended: Any) -> Issue:
    """Return a function that makes compute wait for the end of a collective.

    ``completion``: a function that issues the completion of the collective; None if there is no completion to issue.
    ``ended``: the event that marks the end of the collective.
    """
    compute, stream = target.device.compute, target.device.collective

    def issue(step: RunningStep) -> None:
        if completion is not None:
            completion(step)
        if stream is not compute:
            stream.record(ended)
            compute.wait(ended)

    return issue


def _explained(target: Target, node: Node) -> Callable[..., Any]:
    """Return the op of a collective node, wrapped by :func:`explained`.

    If the node is the last completion of its collective, the wrapper also tells the device how many bytes the collective has
    received.
    """
    collective, function = node, node.target
    while collective_kind(collective) is None:
        collective = collective.all_input_nodes[0]
    name = str(collective.meta.get(SOURCE, collective.name))
    crossing = {c.name: c.nbytes for c in target.program.problem.collectives}
    nbytes = crossing.get(name, 0) if over(collective, target.number) is node else 0
    return explained(
        cast(Callable[..., Any], function), name, partial(target.device.received, nbytes) if nbytes else None
    )
