"""CUDA graphs: a call is recorded once as a graph.  From then on, the host issues the whole call with a single launch of
this graph.

A launch replaces all instructions of the call: regions, copies, and the events that order them.  The graph reads weights at
fixed addresses, on the device and in host memory, so each launch reads the current values at these addresses.  Before a
launch, the host enqueues copies of all other inputs to the addresses from which the graph reads these inputs.  After a
launch, it enqueues copies of the outputs to memory outside the graph's memory pool, because the next launch overwrites this
pool.

At the end of a recorded call, compute waits for all copies of the call, so no copy is in flight after the call.  The copies
of a prologue (for a cold start, a jump or a written weight) are not part of any graph.  The host issues them before the
launch, and the launch waits for them.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq
from statistics import median
from typing import Any, Literal

import torch

from chunkflow_compile.private_torch import core
from chunkflow_compile.units import size
from chunkflow_compile.weights.bytes import same_bits
from chunkflow_compile.weights.counts import Counts

from .device_base import EVERY, FIRST_STEPS, Device
from .wrapped_calls import tuple_getter

# The values of the option cudagraphs.
CudaGraphsWanted = Literal[False, True, "auto", "collectives"]

_log = logging.getLogger(__name__)

# The number of passes that are issued op by op before a call is recorded.  During these passes, kernels are loaded and
# tuned, and libraries choose algorithms and allocate memory.  These operations are not allowed while a graph is recorded.
PASSES = 3
# The maximum number of graphs in an arena.  The number is limited because each graph holds device memory.  Each pair of a
# call and an input size needs its own graph.
MOST_GRAPHS = 4
# The number of launches after which a graph has saved about as much time as its recording took (0.1 s or more).
_LEAST_LAUNCHES = 8
# If this many graphs in a row are dropped after fewer than _LEAST_LAUNCHES launches, no more graphs of the call are
# recorded.
_MAX_DROPPED_EARLY = 3
# With "auto", a call is recorded if the host is busy for at least this share of the step time.  If the share is lower, the
# device is the bottleneck, not the host.  The threshold is well below 1 because step times vary.
_WORTH_A_GRAPH = 0.6
# With "auto", the measurements of this many steps decide whether a call is recorded: half of the steps that are measured at
# the start.
_MEASURED = FIRST_STEPS // 2
# The maximum number of values in ``CaptureLog.step_s`` and in ``CaptureLog.shares``: about as many as the steps of one or two
# images.
_KEPT_SECONDS = 64


@dataclass(eq=False)
class CaptureLog:
    """The log of all recordings of one call as a CUDA graph.  The log outlives the graphs of the call.

    ``counts``: the counters of the model.  ``wanted``: the value of the option cudagraphs.  ``why_not``: the reason why the
    call is not recorded from now on; empty as long as it may be recorded.  ``passes``: the number of passes that were issued
    op by op; once it is ``PASSES``, the call may be recorded.  When a graph is dropped, the number is set to ``PASSES`` - 1,
    so that the call can be recorded again after one more pass.  ``captures``: the number of recordings.  ``launches``: the
    total number of launches of all recorded graphs.  ``capture_s``: the duration of the latest recording in seconds.
    ``nbytes``: bytes of device memory that the latest graph holds.  ``step_s``: the durations in seconds of the latest
    launches that were timed.  ``shares``: for each of the latest measured steps that were issued op by op, the fraction of
    the step time that the host spent issuing ops.  The fraction includes the time for which the host waited because the
    launch queue was full.
    """

    counts: Counts
    wanted: CudaGraphsWanted = False
    why_not: str = ""
    passes: int = 0
    captures: int = 0
    launches: int = 0
    capture_s: float = 0.0
    nbytes: int = 0
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_SECONDS))
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_SECONDS))
    _dropped_early: int = 0

    @property
    def note(self) -> str:
        """A summary of the log for the user, as a sentence without a full stop."""
        if self.why_not:
            return f"no CUDA graph: {self.why_not}"
        if not self.captures and self.wanted == "auto":
            return f"{_MEASURED} measured calls decide whether a call is one CUDA graph"
        if not self.captures:
            return f"a call is one CUDA graph from call {PASSES + 1} on"
        times = f", each {median(self.step_s) * 1e3:.1f} ms" if self.step_s else ""
        return (
            f"a call is one CUDA graph: recorded in {self.capture_s:.2f} s ({self.captures} so far), {size(self.nbytes)} on "
            f"the device between calls, {self.launches} launches{times}"
        )

    def count_pass(self) -> None:
        """Count a pass that is issued op by op."""
        self.passes += 1

    def captured(self, nbytes: int, seconds: float) -> None:
        """Count a recording that took ``seconds``.  Its graph holds ``nbytes`` of device memory."""
        self.captures, self.nbytes, self.capture_s = self.captures + 1, nbytes, seconds
        self.counts.add_capture(seconds)

    def launched(self) -> None:
        self.launches += 1
        self.counts.add_launch()

    @property
    def due(self) -> bool:
        """Whether the call should be recorded now."""
        if self.wanted != "auto" or self.passes < PASSES:
            return self.passes >= PASSES
        if len(self.shares) < _MEASURED:
            return False
        if (share := median(self.shares)) < _WORTH_A_GRAPH:
            self.why_not = f"the host is busy for {share:.0%} of a step only"
        return not self.why_not

    def give_up(self, why: str) -> None:
        """Stop recording the call, and log the reason once."""
        self.why_not = why
        _log.warning("A call is no CUDA graph, and is issued op by op: %s", why)

    def dropped(self, launches: int, why: str) -> None:
        """Count a graph that was dropped after ``launches`` launches.  If several graphs in a row were dropped after few
        launches, stop recording the call."""
        self.passes, self.nbytes = PASSES - 1, 0
        self._dropped_early = self._dropped_early + 1 if launches < _LEAST_LAUNCHES else 0
        if self._dropped_early >= _MAX_DROPPED_EARLY:
            self.give_up(f"{_MAX_DROPPED_EARLY} graphs were dropped after fewer than {_LEAST_LAUNCHES} calls: {why}")


class CudaGraph:
    """A call that was recorded as a CUDA graph.

    ``graph``: the torch.cuda.CUDAGraph; None once it is dropped.  ``moved_bytes``: bytes of weights that each launch copies.
    ``nbytes``: bytes of device memory that the graph holds.  ``launches``: the number of launches so far.
    """

    def __init__(
        self,
        graph: Any,
        device: Device,
        log: CaptureLog,
        *,
        copied: Sequence[tuple[int, torch.Tensor]],
        in_place: Sequence[tuple[int, torch.Tensor]],
        fixed: Sequence[tuple[int, Any]],
        outputs: Sequence[tuple[Any, int | None]],
        suspects: Sequence[str],
        moved_bytes: int,
        nbytes: int,
    ) -> None:
        """``copied``: for each input that is copied before a launch, its position, and the tensor to which it is copied.
        ``in_place``: positions and tensors of the inputs that the graph reads directly.  ``fixed``: positions and values of
        the inputs that are not tensors.  ``outputs``: for each output, its recorded value, and the position of the input
        that is returned as this output, or None if the output is not an input.  ``suspects``: names of ops that may write to
        inputs without declaring these writes in their schemas."""
        self.graph = graph
        self.moved_bytes, self.nbytes = moved_bytes, nbytes
        self.launches = 0
        self._device = device
        self._log = log
        self._copied = tuple_getter([position for position, _ in copied])
        self._inputs = [tensor for _, tensor in copied]
        self._targets = [_without_repeats(tensor) for tensor in self._inputs]
        self._in_place = tuple_getter([position for position, _ in in_place])
        self._addresses = [tensor.data_ptr() for _, tensor in in_place]
        self._fixed, self._values = tuple_getter([p for p, _ in fixed]), tuple(value for _, value in fixed)
        self._outputs = list(outputs)
        self._shared = _shared_storages(output for output, position in outputs if position is None)
        self._suspects = suspects

    def misfit(self, env: Sequence[Any]) -> str:
        """Return the reason why the graph cannot be launched with the inputs in ``env``; empty if the graph can be
        launched."""
        if self.graph is None:
            return "it was dropped"
        with core.DisableTorchFunctionSubclass():
            if list(map(torch.Tensor.data_ptr, self._in_place(env))) != self._addresses:
                return "a weight that it reads in place has other memory"
            if not all(map(eq, map(_layout, self._copied(env)), map(_layout, self._inputs))):
                return "an input has another layout"
        return "" if self._fixed(env) == self._values else "a number among the inputs has changed"

    def launch(self, env: Sequence[Any]) -> tuple[Any, ...]:
        """Enqueue the call with the inputs in ``env``; return the outputs, copied out of the memory of the graph."""
        given = list(map(_without_repeats, self._copied(env)))
        if given:
            torch._foreach_copy_(self._targets, given)
        self._device.launch(self.graph)
        if self._suspects and not self.launches:
            self._check_written(given)
        self.launches += 1
        self._log.launched()
        copies = {key: memory.clone() for key, memory in self._shared.items()}
        return tuple(_copy(output, copies) if position is None else env[position] for output, position in self._outputs)

    def _check_written(self, given: Sequence[torch.Tensor]) -> None:
        """Check whether the first launch has written to the tensors to which the inputs were copied.

        If the launch has written to such a tensor, copy the new values to the caller's input as well, and never record the
        call again.  ``given``: the caller's inputs that were copied.
        """
        for target, tensor in zip(self._targets, given, strict=True):
            if not same_bits(target, tensor):
                tensor.copy_(target)
                self._log.give_up(
                    f"one of {', '.join(self._suspects)} writes an input, of which a graph has a copy: declare it "
                    "(torch.library.custom_op(..., mutates_args=...))"
                )

    @property
    def timed(self) -> bool:
        """Whether the next launch is timed.  One launch in ``EVERY`` is timed."""
        return self.launches % EVERY == 0

    def ended(self, begin: float, end: float, _: bool) -> None:
        """Keep the duration of a launch.  ``begin``, ``end``: the times when the launch began and ended, in seconds of the
        device's clock."""
        self._log.step_s.append(end - begin)

    def drop(self, why: str) -> None:
        """Wait for launches in flight, then free the memory of the graph.  ``why``: the reason that is logged."""
        if self.graph is not None:
            self._device.compute.synchronize()
            # the attribute is cleared first, so that a Ctrl-C cannot leave a graph in it whose tensors are gone
            graph, self.graph = self.graph, None
            self._outputs, self._inputs, self._targets, self._shared = [], [], [], {}
            self._device.reset(graph)
            self._log.dropped(self.launches, why)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor in which each dimension that repeats its elements (stride 0) has size 1."""
    strides = tensor.stride()
    return tensor if 0 not in strides else tensor[tuple(slice(None if stride else 1) for stride in strides)]


def _shared_storages(outputs: Iterable[Any]) -> dict[int, torch.Tensor]:
    """Return a mapping: the id of each storage that several outputs share -> the bytes of this storage.  :func:`_copy` uses
    the mapping, so that the copies of these outputs share memory, too."""
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    counts = Counter(storage._cdata for storage in storages)
    several = {storage._cdata: storage for storage in storages if counts[storage._cdata] > 1}
    return {key: torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for key, s in several.items()}


def _copy(output: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    """Return a copy of an output.  The copy keeps the strides, the conjugate bit and the negative bit.

    Guards of the compiled code that reads the output may check these three properties.  ``copies``: id of a storage that
    several outputs share -> a copy of the bytes of this storage.
    """
    if not isinstance(output, torch.Tensor):
        return output
    if output.is_conj():
        return _copy(output.conj(), copies).conj()
    if output.is_neg():
        return torch._neg_view(_copy(torch._neg_view(output), copies))
    if (memory := copies.get(output.untyped_storage()._cdata)) is None:
        return _span(output).clone().as_strided(output.shape, output.stride())
    copy = torch.empty(0, dtype=output.dtype, device=output.device)
    return copy.set_(memory.untyped_storage(), output.storage_offset(), output.shape, output.stride())


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the memory from the first to the last element of a tensor, including gaps between elements."""
    if not tensor.numel():
        return tensor.reshape(0)
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((steps + 1,), (1,))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class CudaGraphs:
    """The CUDA graphs of an arena, least recently launched first.

    The graphs of an arena can share a memory pool, because no graph reads values that another graph has left in the pool.
    Each graph belongs to an executor, and does not outlive this executor.
    """

    def __init__(self) -> None:
        self._kept: list[weakref.ref[CudaGraph]] = []
        self._grown = 0  # bytes of the memory pool, which shrinks only when its last graph is dropped

    @property
    def _live(self) -> list[CudaGraph]:
        return [kept for ref in self._kept if (kept := ref()) is not None and kept.graph is not None]

    @property
    def nbytes(self) -> int:
        """The bytes of device memory that the graphs hold, even between calls."""
        if not self._live:
            self._grown = 0
        return self._grown

    @property
    def pool(self) -> Any:
        """A graph whose memory pool a new graph can share; None if there are no graphs."""
        return next((kept.graph for kept in self._live), None)

    def add(self, made: CudaGraph) -> None:
        """Keep a new graph.  If the arena then has more than MOST_GRAPHS graphs, drop the graph whose latest launch is the
        oldest."""
        self._grown = self.nbytes + made.nbytes
        live = self._live
        for oldest in live[: max(0, len(live) + 1 - MOST_GRAPHS)]:
            oldest.drop(f"an arena has at most {MOST_GRAPHS} graphs")
        self._kept = [weakref.ref(kept) for kept in (*self._live, made)]

    def launched(self, graph: CudaGraph) -> None:
        """Record that ``graph`` is about to be launched."""
        if self._kept[-1]() is not graph:
            self._kept = [*(ref for ref in self._kept if ref() is not graph), weakref.ref(graph)]
