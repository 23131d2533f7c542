"""aten's CUDA kernels, computed by the CPU's on the same bytes, in the order of their stream.

A call allocates its results at once, with the shapes and strides that torch's meta kernels give, and queues the
computation on the caller's stream, as a launch does.  So the host runs ahead of its streams here too, and a copy that
comes too early or too late shows as wrong numbers.  A kernel that has no meta kernel, or whose result is not a tensor,
waits for its stream.

In a capture of a graph the computation becomes a node: each launch reads and writes the same addresses again.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from . import control

# These run as they are: they allocate, make views, or copy through the runtime.
# fmt: off
_REAL = frozenset([
    "empty", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold", "set_", "resize_", "record_stream",
    "is_pinned", "_pin_memory", "_efficientzerotensor", "is_set_to", "_fused_sdp_choice", "_to_copy",
    "_local_scalar_dense", "view_as_real", "view_as_complex", "alias", "_cudnn_init_dropout_state", "_copy_from",
    "_copy_from_and_resize",
])
# fmt: on
_JOB = ctypes.CFUNCTYPE(None, ctypes.c_long)


class EmptyStorageError(RuntimeError):
    """A kernel reads a tensor whose storage is empty: a weight that is in host memory."""


class _Queue:
    """Kernels under way, by number."""

    def __init__(self) -> None:
        # calibration multiplies matrices for a card; without them, time is the stand-in's own
        self._computes = os.environ.get("STAND_IN_COMPUTE", "1") != "0"
        self._jobs: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count(1)
        self._function = _JOB(self._run)
        runtime = control.runtime()
        runtime.stand_in_enqueue.argtypes = (ctypes.c_void_p, _JOB, ctypes.c_long)
        runtime.stand_in_enqueue.restype = None
        self._enqueue = runtime.stand_in_enqueue
        atexit.register(runtime.cudaDeviceSynchronize)  # a kernel that runs while Python ends would end the process
        self._captured: dict[int, Callable[[], object]] = {}  # for good: graphs do not say when they are destroyed

    def captures(self, device: torch.device) -> bool:
        """Whether what is put becomes nodes of a graph."""
        stream = torch.cuda.current_stream(device).cuda_stream
        return bool(control.runtime().stand_in_capturing(ctypes.c_void_p(stream)))

    def put(self, device: torch.device, job: Callable[[], object], operands: list[Any]) -> None:
        """Queue ``job``, which reads and writes ``operands``: views of the memory, which they do not hold."""
        number = next(self._numbers)
        if self.captures(device):
            self._captured[number] = partial(_again, job, [a for a in map(_address, operands) if _on_device(a)])
        else:
            self._jobs[number] = job
        with torch.cuda.device(device):
            self._enqueue(torch.cuda.current_stream(device).cuda_stream, self._function, number)
            if error := control.runtime().cudaGetLastError():  # as torch does after each launch
                raise RuntimeError(f"CUDA error: {error}, found by the launch of a kernel")

    def _run(self, number: int) -> None:
        job = self._captured.get(number) or self._jobs.pop(number)
        if not self._computes:
            return
        try:
            with torch.no_grad():
                job()
        except BaseException:  # noqa: BLE001  (a kernel that fails breaks the device, as on a card)
            control.runtime().stand_in_failed(traceback.format_exc().encode())


class FreedError(RuntimeError):
    """A launch of a graph uses device memory that was freed after the capture."""


def _again(job: Callable[[], object], addresses: list[int]) -> None:
    """A captured job in a launch."""
    if not all(map(_on_device, addresses)):
        raise FreedError("A kernel of a graph uses device memory that was freed.")
    job()


def _address(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0


def _on_device(address: int) -> bool:
    return bool(control.runtime().stand_in_on_device(ctypes.c_void_p(address)))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a device tensor as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if storage.nbytes() == 0:
        raise EmptyStorageError(f"A kernel reads the empty storage of a tensor of shape {tuple(tensor.shape)}.")
    buffer = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    with torch.inference_mode(False):
        raw = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype).set_(raw, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        made = made.conj()
    return torch._neg_view(made) if tensor.is_neg() else made


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def _device(flat: list[Any]) -> torch.device:
    for value in flat:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.device
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cuda", torch.cuda.current_device() if value.index is None else value.index)
    return torch.device("cuda", torch.cuda.current_device())


class _Kernel:
    """The stand-in of one aten kernel."""

    def __init__(self, queue: _Queue, op: Any) -> None:
        self._queue = queue
        self._op = op
        arguments = op._schema.arguments
        self._writes = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        self._names = [a.name for a in arguments]
        self._tensors = [str(a.type) == "Tensor" for a in arguments]
        self._attends = "scaled_dot_product" in op._schema.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # a number that torch has wrapped for the kernel comes bare
        args = tuple(
            torch.tensor(a) if tensor and isinstance(a, (bool, int, float)) else a
            for a, tensor in zip(args, self._tensors, strict=False)
        )
        flat = tree_flatten((args, kwargs))[0]
        device = _device(flat)
        try:
            shapes = self._shapes(args, kwargs)
        except (NotImplementedError, RuntimeError):
            return self._at_once(device, args, kwargs)
        hosts = tree_map(self._lower, (args, kwargs))
        if self._writes:
            return self._in_place(device, shapes, hosts, args, kwargs)
        outputs = tree_map(lambda m: _like(m, device) if isinstance(m, torch.Tensor) else m, shapes)
        targets = [_on_host(o) for o in tree_flatten(outputs)[0] if isinstance(o, torch.Tensor)]

        def job() -> None:
            found = [r for r in tree_flatten(self._compute(*hosts))[0] if isinstance(r, torch.Tensor)]
            for target, result in zip(targets, found, strict=not self._attends):
                if target.numel() and result.shape == target.shape:
                    target.copy_(result)

        self._queue.put(device, job, [*tree_flatten(hosts)[0], *targets])
        return outputs

    def _shapes(self, args: Any, kwargs: Any) -> Any:
        """The outputs on the meta device.  Raises if they depend on values, or are not tensors."""
        found = self._op(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        if not self._attends and not all(isinstance(o, torch.Tensor) or o is None for o in tree_flatten(found)[0]):
            raise NotImplementedError
        return found

    def _in_place(self, device: torch.device, shapes: Any, hosts: Any, args: Any, kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        written = [t for name in self._names if name in self._writes for t in tree_flatten(given[name])[0]]
        metas = [m for m in tree_flatten(shapes)[0] if isinstance(m, torch.Tensor)]
        if len(metas) == len(written) and any(t.shape != m.shape for t, m in zip(written, metas, strict=True)):
            for tensor, meta in zip(written, metas, strict=True):  # an out= of no size yet
                tensor.resize_(meta.shape)
            hosts = tree_map(self._lower, (args, kwargs))
        self._queue.put(device, partial(self._compute, *hosts), tree_flatten(hosts)[0])
        return None if not metas else written[0] if len(written) == 1 else tuple(written)

    def _at_once(self, device: torch.device, args: Any, kwargs: Any) -> Any:
        """Compute on the calling thread, once the stream has come to it."""
        torch.cuda.current_stream(device).synchronize()
        lowered: list[tuple[torch.Tensor, torch.Tensor]] = []

        def lower(value: Any) -> Any:
            made = self._lower(value)
            if isinstance(value, torch.Tensor):
                lowered.append((made, value))
            return made

        found = self._compute(*tree_map(lower, (args, kwargs)))
        given = {id(made): value for made, value in lowered}
        for made, value in lowered:
            if made.shape != value.shape:
                value.resize_(made.shape)
                _on_host(value).copy_(made)

        def lift(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.is_cuda:
                return value
            if id(value) in given:
                return given[id(value)]
            output = _like(value, device)
            if output.numel():
                _on_host(output).copy_(value)
            return output

        return tree_map(lift, found)

    def _lower(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _on_host(value) if value.is_cuda else value.clone() if value.dim() == 0 else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return None if isinstance(value, torch.Generator) else value

    def _compute(self, args: Any, kwargs: Any) -> Any:
        if self._attends:
            return self._attention(args, kwargs)
        if self._op._schema.name == "aten::cudnn_convolution":
            x, weight, padding, stride, dilation, groups = args[:6]
            return torch.ops.aten.convolution(
                x, weight, None, stride, padding, dilation, False, [0] * len(padding), groups
            )
        try:
            return self._op(*args, **kwargs)
        except NotImplementedError:
            return torch._decomp.decomposition_table[self._op](*args, **kwargs)

    def _attention(self, args: Any, kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        mask = given.get("attn_bias")
        return torch.ops.aten._scaled_dot_product_attention_math(
            *args[:3], mask, 0.0, given.get("is_causal", False), scale=given.get("scale")
        )[0]  # the other outputs are for a backward pass


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class _Copy:
    """copy_: through the runtime between dense tensors of one type; otherwise computed like a kernel."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    def __call__(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        dense = target.is_contiguous() and source.is_contiguous()
        if dense and target.dtype == source.dtype and target.shape == source.shape:
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # the same function for both devices
            torch.ops.aten.copy_.default.redispatch(keys, target, source, non_blocking)
            return target
        device = target.device if target.is_cuda else source.device
        stream = torch.cuda.current_stream(device)
        if not target.is_cuda:
            stream.synchronize()
            return target.copy_(_on_host(source))
        from_host = not source.is_cuda
        pageable, captured = from_host and not source.is_pinned(), self._queue.captures(device)
        if pageable and captured:
            stream.synchronize()  # which is not permitted
        # a launch of a graph reads the host's bytes of then
        into, values = _on_host(target), source.clone() if from_host and not captured else _on_host(source)
        self._queue.put(device, partial(into.copy_, values), [into, values])
        if pageable:
            stream.synchronize()
        return target


_KEPT: list[Any] = []  # torch drops the kernels of a library that is collected


def install() -> None:
    """Register the kernels in this process.  Called by torch's import, see build.py."""
    if not control.active() or _KEPT:
        return
    torch.set_num_threads(1)  # equal numbers, whichever thread computes
    queue, library = _Queue(), torch.library.Library("aten", "IMPL")
    _KEPT.extend((queue, library))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            space, _, name = full.partition("::")
            base, _, overload = name.partition(".")
            if space != "aten" or base in _REAL or base.startswith(("_nested", "_cudnn_init")) or "storage" in base:
                continue
            op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
            if op is not None and not op.is_view and name != "copy_":
                library.impl(name, _Kernel(queue, op), "CUDA")
        library.impl("copy_", _Copy(queue), "CUDA")
