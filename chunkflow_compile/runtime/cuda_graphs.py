"""CUDA graphs: a call that was recorded once, and costs the host one launch from then on, whatever the number of its ops.

A launch stands for all instructions of the call: regions, copies and what orders them.  Weights are read where they lie, on
the device and in host memory, so bytes that are written there are seen by the next launch.  Other inputs are copied to where
the graph reads them, and outputs out of its pool of memory, which the next launch overwrites.

At the end of a call, compute waits for all its copies, so no copy of a graph is in flight after it.  Copies outside of
graphs, for a cold start, a jump or a written weight, are issued before a launch, which waits for them.
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

# Values of the option cudagraphs.
CudaGraphsWanted = Literal[False, True, "auto", "collectives"]

_log = logging.getLogger(__name__)

# Passes before a call is recorded.  In the first ones kernels are loaded and tuned, and libraries choose algorithms and
# allocate, which a recording does not allow.
PASSES = 3
# Graphs of an arena at a time, as of several sizes or calls.  Each holds memory on the device.
MOST_GRAPHS = 4
# A graph that was launched less often has not paid for its recording, which takes a tenth of a second or more.
_LEAST_LAUNCHES = 8
# After so many of those, one after the other, the call is issued op by op for good.
_MOST_IN_VAIN = 3
# Share of a step for which the host is busy from which "auto" records it.  Below it the device is the bound, with room for
# steps that vary.
_WORTH_A_GRAPH = 0.6
# Measured steps from which it decides, half of the first that are.
_MEASURED = FIRST_STEPS // 2
# Times that are kept of launches, and of passes before them: those of an image or two.
_KEPT_SECONDS = 64


@dataclass(eq=False)
class CaptureLog:
    """What is known of a call as a CUDA graph, while its graphs come and go.

    ``counts``: of its model.  ``wanted``: the option.  ``why_not``: why it is issued op by op, empty if it is recorded or
    about to be.  ``passes``: those that were issued op by op before the next recording.  ``captures``: recordings.
    ``launches``: of all its graphs.  ``capture_s``: seconds of the newest recording.  ``nbytes``: what its graph took from
    the device.  ``step_s``: seconds of the newest launches that were timed.  ``shares``: of the measured steps issued op by
    op, the part for which the host was busy or waited for room in its queue.
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
    _in_vain: int = 0

    @property
    def note(self) -> str:
        """What there is to say, as a sentence without a full stop."""
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
        """A pass is issued op by op."""
        self.passes += 1

    def captured(self, nbytes: int, seconds: float) -> None:
        """A graph was recorded."""
        self.captures, self.nbytes, self.capture_s = self.captures + 1, nbytes, seconds
        self.counts.add_capture(seconds)

    def launched(self) -> None:
        self.launches += 1
        self.counts.add_launch()

    @property
    def due(self) -> bool:
        """Whether the call is to be recorded now."""
        if self.wanted != "auto" or self.passes < PASSES:
            return self.passes >= PASSES
        if len(self.shares) < _MEASURED:
            return False
        if (share := median(self.shares)) < _WORTH_A_GRAPH:
            self.why_not = f"the host is busy for {share:.0%} of a step only"
        return not self.why_not

    def refuse(self, why: str) -> None:
        """The call is not recorded any more: say so once."""
        self.why_not = why
        _log.warning("A call is no CUDA graph, and is issued op by op: %s", why)

    def dropped(self, launches: int, why: str) -> None:
        """A graph is dropped after so many launches."""
        self.passes, self.nbytes = PASSES - 1, 0
        self._in_vain = self._in_vain + 1 if launches < _LEAST_LAUNCHES else 0
        if self._in_vain >= _MOST_IN_VAIN:
            self.refuse(f"{_MOST_IN_VAIN} graphs were dropped after fewer than {_LEAST_LAUNCHES} calls: {why}")


class CudaGraph:
    """A recorded call.

    ``graph``: CUDA's, None once it is dropped.  ``moved_bytes``: of weights that a launch copies.  ``nbytes``: that it took
    from the device.  ``launches``: so far.
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
        """``copied``: positions of the inputs that are copied, and where to.  ``in_place``: positions of the other tensors,
        which are read at their addresses.  ``fixed``: positions of inputs that are no tensors, and their values.
        ``outputs``: of the recording, each with the position of the input that it is, None if it is none.  ``suspects``: ops
        whose schemas need not say what they write."""
        self.graph = graph
        self.moved_bytes, self.nbytes = moved_bytes, nbytes
        self.launches = 0
        self._device = device
        self._log = log
        self._copied = tuple_getter([position for position, _ in copied])
        self._inputs = [tensor for _, tensor in copied]
        self._targets = [_once(tensor) for tensor in self._inputs]
        self._in_place = tuple_getter([position for position, _ in in_place])
        self._addresses = [tensor.data_ptr() for _, tensor in in_place]
        self._fixed, self._values = tuple_getter([p for p, _ in fixed]), tuple(value for _, value in fixed)
        self._outputs = list(outputs)
        self._shared = _shared(output for output, position in outputs if position is None)
        self._suspects = suspects

    def misfit(self, env: Sequence[Any]) -> str:
        """Why it cannot be launched on these inputs, empty if it can."""
        if self.graph is None:
            return "it was dropped"
        with core.DisableTorchFunctionSubclass():
            if list(map(torch.Tensor.data_ptr, self._in_place(env))) != self._addresses:
                return "a weight that it reads in place has other memory"
            if not all(map(eq, map(_layout, self._copied(env)), map(_layout, self._inputs))):
                return "an input has another layout"
        return "" if self._fixed(env) == self._values else "a number among the inputs has changed"

    def launch(self, env: Sequence[Any]) -> tuple[Any, ...]:
        """Enqueue the call; return its outputs, which own their memory."""
        given = list(map(_once, self._copied(env)))
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
        """After the first launch: give inputs what was written to their copies, and record the call no more if any was."""
        for target, tensor in zip(self._targets, given, strict=True):
            if not same_bits(target, tensor):
                tensor.copy_(target)
                self._log.refuse(
                    f"one of {', '.join(self._suspects)} writes an input, of which a graph has a copy: declare it "
                    "(torch.library.custom_op(..., mutates_args=...))"
                )

    @property
    def timed(self) -> bool:
        """Whether the next launch is timed: a few are."""
        return self.launches % EVERY == 0

    def ended(self, begin: float, end: float, _: bool) -> None:
        """Note the time of a launch, seconds of the device's clock."""
        self._log.step_s.append(end - begin)

    def drop(self, why: str) -> None:
        """Free what it holds, once no launch is in flight."""
        if self.graph is not None:
            self._device.compute.synchronize()
            graph, self.graph = self.graph, None  # first: after a Ctrl-C it must not be launched without the rest
            self._outputs, self._inputs, self._targets, self._shared = [], [], [], {}
            self._device.reset(graph)
            self._log.dropped(self.launches, why)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with each of its bytes once: without the repetitions of an expanded one."""
    strides = tensor.stride()
    return tensor if 0 not in strides else tensor[tuple(slice(None if stride else 1) for stride in strides)]


def _shared(outputs: Iterable[Any]) -> dict[int, torch.Tensor]:
    """The memory that several outputs lie in, as bytes, by the address of the storage: copies of them share memory, too."""
    tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    counts = Counter(storage._cdata for storage in storages)
    several = {storage._cdata: storage for storage in storages if counts[storage._cdata] > 1}
    return {key: torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for key, s in several.items()}


def _copy(output: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    """A copy of an output, with its strides and lazy bits: they are guarded in compiled code that it is passed to.

    ``copies``: of the memory that several lie in.
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
    """The memory from the first element of a tensor to its last, what lies between its elements included."""
    if not tensor.numel():
        return tensor.reshape(0)
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((steps + 1,), (1,))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class CudaGraphs:
    """The CUDA graphs of an arena, the one launched longest ago first.  They share a pool of memory: none reads what another
    leaves there.  Each belongs to its executor, and ends with it."""

    def __init__(self) -> None:
        self._kept: list[weakref.ref[CudaGraph]] = []
        self._grown = 0  # bytes that the pool has got since there was none; it gives none back while it has a graph

    @property
    def _live(self) -> list[CudaGraph]:
        return [kept for ref in self._kept if (kept := ref()) is not None and kept.graph is not None]

    @property
    def nbytes(self) -> int:
        """Bytes that they hold on the device, between calls too."""
        if not self._live:
            self._grown = 0
        return self._grown

    @property
    def pool(self) -> Any:
        """A graph whose pool others can share, None if there is none."""
        return next((kept.graph for kept in self._live), None)

    def add(self, made: CudaGraph) -> None:
        """Keep a graph, and drop the one that was launched longest ago if there are too many."""
        self._grown = self.nbytes + made.nbytes
        live = self._live
        for oldest in live[: max(0, len(live) + 1 - MOST_GRAPHS)]:
            oldest.drop(f"an arena has at most {MOST_GRAPHS} graphs")
        self._kept = [weakref.ref(kept) for kept in (*self._live, made)]

    def launched(self, graph: CudaGraph) -> None:
        """Note that a graph is used now."""
        if self._kept[-1]() is not graph:
            self._kept = [*(ref for ref in self._kept if ref() is not graph), weakref.ref(graph)]
