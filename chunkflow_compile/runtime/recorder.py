"""Recorder: a device whose streams record a call as a CUDA graph.

The ops that :func:`forms.captured` returns for the call are issued to the recorder in the same way as to any other device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from chunkflow_compile.passes.errors import ChunkflowError, first_line
from chunkflow_compile.passes.names import Lane
from chunkflow_compile.weights.source import Bytes, DriveBytes

from .device_base import Device, Waited, Watch
from .read_ahead import InRing
from .torch_cuda import TorchCuda


class _RecordedStream:
    """A stream whose work is recorded in a CUDA graph."""

    def __init__(self, cuda: TorchCuda, stream: torch.cuda.Stream) -> None:
        self._cuda = cuda
        self._stream = stream

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        with self._cuda.on(self._stream):
            work()

    def record(self, event: torch.cuda.Event) -> None:
        event.record(self._stream)

    def wait(self, event: torch.cuda.Event, waited: Waited | None = None) -> None:
        self._stream.wait_event(event)

    def synchronize(self) -> None:
        raise NotImplementedError("nothing runs while it is recorded")


class _RecordedCompute(_RecordedStream):
    """The stream of compute and collectives.  During a recording, this stream is the current stream of the caller."""

    def run(self, work: Callable[[], None], watch: Watch | None = None, name: str = "") -> None:
        try:
            work()
        except Exception as error:
            raise ChunkflowError(f"{name or 'an op between regions'}: {first_line(error)}") from error


class Recorder(Device):
    """A device that records the instructions of one call.  ``lanes``: lane -> the stream that records the copies of this
    lane."""

    name = "cuda"
    records = True

    def __init__(self, cuda: TorchCuda, lanes: Mapping[Lane, torch.cuda.Stream]) -> None:
        self._cuda = cuda
        self._streams = lanes
        self.copy = _RecordedStream(cuda, lanes["copy"])
        self.compute = self.collective = _RecordedCompute(cuda, cuda.current())

    def _make_pull(self) -> _RecordedStream:
        return _RecordedStream(self._cuda, self._streams["pull"])

    def event(self) -> torch.cuda.Event:
        return self._cuda.event(False)

    def copy_bytes(self, target: torch.Tensor, source: Bytes | InRing, lane: Lane = "copy") -> None:
        assert not isinstance(source, DriveBytes | InRing), "weights on the drive are not recorded"
        self._cuda.copy(target, source)
