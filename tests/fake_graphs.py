"""CUDA graphs of the fake GPU: ops of the CPU are recorded as they are dispatched, and run again at each launch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chunkflow_compile.runtime.streams import CallingStream, HostEvent, ThreadStream

Lane = CallingStream | ThreadStream


class RecordedStream:
    """A stream of a recording: what it is given becomes a node.  ``lane``: where its nodes run."""

    def __init__(self, graph: FakeGraph, lane: Lane) -> None:
        self._graph = graph
        self._lane = lane

    def run(self, work: Callable[[], None]) -> None:
        self._graph.nodes.append((self._lane, partial(self._lane.run, work)))

    def record(self, event: HostEvent) -> None:
        self._graph.nodes.append(lambda events: self._lane.record(events[event]))

    def wait(self, event: HostEvent) -> None:
        self._graph.nodes.append(lambda events: self._lane.wait(events[event]))


class FakeGraph(TorchDispatchMode):
    """Nodes in the order of recording, each a function of the events of a launch."""
