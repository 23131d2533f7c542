"""CUDA graphs of the fake GPU: what is enqueued is recorded, ops as they are dispatched, and runs again at each launch."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chunkflow_compile.runtime.streams import Bell, CallingStream, HostEvent, ThreadStream

# What a launch does: gets the events of this launch by those of the recording.
Node = Callable[[Mapping[HostEvent, HostEvent]], None]


class RecordedStream:
    """A stream while it is recorded.  ``runs_on``: where its nodes run at a launch.  ``recorded``: its newest event, if
    nothing came after it; ``awaited``: the events that it has waited for."""

    def __init__(self, nodes: list[Node], runs_on: CallingStream | ThreadStream) -> None:
        self._nodes = nodes
        self._runs_on = runs_on
        self.empty = True
        self.recorded: HostEvent | None = None
        self.awaited = set[HostEvent]()

    def run(self, work: Callable[[], None]) -> None:
        self.empty, self.recorded = False, None
        self._nodes.append(lambda events: self._runs_on.run(work))

    def record(self, event: HostEvent) -> None:
        self.recorded = event
        self._nodes.append(lambda events: self._runs_on.record(events[event]))

    def wait(self, event: HostEvent) -> None:
        self.awaited.add(event)
        self._nodes.append(lambda events: self._runs_on.wait(events[event]))


class _Ops(TorchDispatchMode):
    """Records the ops of the CPU that the calling thread calls.  Those that make a tensor run, for its memory; a view stays
    what it is; those that write memory run at a launch only."""

    def __init__(self, stream: RecordedStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._stream.run(partial(func, *args, **kwargs))
            return args[0]
        results = func(*args, **kwargs)
        if not func.is_view:
            self._stream.run(partial(_again, func, args, kwargs, results))
        return results


def _again(func: Any, args: Any, kwargs: Any, results: Any) -> None:
    for old, new in zip(tree_leaves(results), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor):
            # the bytes of a collective are there once it is awaited
            old.copy_(torch.ops._c10d_functional.wait_tensor(new) if func.namespace == "_c10d_functional" else new)


class FakeGraph:
    """``nodes``: None once it is reset.  ``launches``: so far."""

    def __init__(self, bell: Bell, caller: CallingStream) -> None:
        self.nodes: list[Node] | None = []
        self.launches = 0
        self._bell = bell
        self._caller = caller

    def stream(self, runs_on: ThreadStream | None = None) -> RecordedStream:
        """A stream of a recording, by default that of compute."""
        assert self.nodes is not None
        return RecordedStream(self.nodes, runs_on or self._caller)

    @contextlib.contextmanager
    def recorded(self, compute: RecordedStream, lanes: Iterable[RecordedStream]) -> Iterator[None]:
        with _Ops(compute):
            yield
        if any(not lane.empty and lane.recorded not in compute.awaited for lane in lanes):
            raise RuntimeError("CUDA error: capturing stream has unjoined work")

    def pool(self) -> object:
        assert self.nodes is not None, "the graph has its pool"
        return self

    def replay(self) -> None:
        assert self.nodes is not None, "a graph that was reset is launched"
        events: Mapping[HostEvent, HostEvent] = defaultdict(partial(HostEvent, self._bell))
        for node in self.nodes:
            node(events)
        self.launches += 1

    def reset(self) -> None:
        self.nodes = None
