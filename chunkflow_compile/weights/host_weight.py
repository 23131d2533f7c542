"""An offloaded weight as a tensor: its bytes are in host memory, and its device is the compute device.

An op that reads an offloaded weight outside a program gets a temporary copy on the device.  An op that writes to the weight
changes the host memory, and programs use the new values from their next call on.  A view of the weight is a view of the
host memory.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

from chunkflow_compile.private_torch import core

from .bytes import is_same_view, ordinary, share_storage
from .declared_writes import on_fetched, written_by
from .exchange import STATE
from .host_buffer import HostBuffer
from .tracing import FETCH, OURS, traces_for_us, tracing_backend
from .undeclared import cannot_be_seen, declares, on_copies
from .unsupported import CompiledViewError, refusal, refuse

_aten = torch.ops.aten
# Ops that return views although their schemas do not declare views.
_VIEWS = {_aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default}
# Ops whose results need the conjugate or negative bit, which a HostWeight does not have.
_LAZY_VIEWS = {_aten._conj.default, _aten._neg_view.default}
# The attributes that a HostWeight itself defines.  The attributes in STATE are exchanged together with the values of the
# tensor, whereas "token" stays with the tensor.
_OWN = {*STATE, "token"}


class HostWeight(torch.Tensor):
    """A weight on ``device`` whose values are in ``host``, an ordinary tensor on the CPU.

    ``host``: the values; for a packed weight, only their address range.  ``buffer``: the memory, shared by all views of
    the weight.  ``kind``: the class of the tensor that the HostWeight replaces.
    """

    host: torch.Tensor
    buffer: HostBuffer
    kind: type[torch.Tensor]

    __torch_function__ = core.disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        host: torch.Tensor,
        device: torch.device | None = None,
        buffer: HostBuffer | None = None,
        name: str = "a weight",
        **parameter: Any,
    ) -> Any:
        if device is None:  # accelerate creates parameters by type(weight)(values, requires_grad=...)
            return nn.Parameter(host, **parameter)
        weight: HostWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device,
        )
        core.forbid_data_pointer(weight)
        weight.host = host
        weight.buffer = HostBuffer(host, name=name) if buffer is None else buffer
        weight.kind = torch.Tensor
        return weight

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        backend = tracing_backend()
        if backend != OURS:
            if backend is not None:
                self.buffer.warn_of_compiler(backend)
            return ["raw_host"], self.device
        if self._is_view():
            raise CompiledViewError(
                f"A view of {self.buffer.name} of shape {list(self.shape)} is an input of compiled code, but the weight is "
                "offloaded: pass a copy, view.clone(), or take the view from the weight inside forward."
            )
        return ["host"], self.device

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], device: torch.device, size: Sequence[int], stride: Sequence[int]
    ) -> Any:
        (host,) = inner.values()
        if isinstance(host, FakeTensor) and traces_for_us():
            offset = host.storage_offset()  # a DTensor that contains the weight has the same offset
            with host.fake_mode, core.view_tracking(False):
                room = torch.empty(offset + host.numel(), dtype=host.dtype, device=device)
                return room.as_strided(size, stride, offset)  # without view tracking, because the weight is not a view
        return HostWeight(host, device)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # after a graph break, Dynamo would trace this function as a separate frame
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], HostWeight) else None
        # inplace views, such as set_ and resize_, replace the memory of a tensor
        refused = torch.Tag.inplace_view in func.tags or func in _LAZY_VIEWS
        if first is not None and not refused:
            if func.is_view or func in _VIEWS:
                with _tracked():
                    seen = func(first.host, *args[1:], **kwargs)
                    return pytree.tree_map_only(torch.Tensor, first._alias, seen)
            if func is _aten._to_copy.default and type(first.host) is torch.Tensor:
                return first._converted(kwargs)
        if refused or cannot_be_seen(func):
            refuse(next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, HostWeight)), func.__name__)
        if not declares(func) and not _traced(args, kwargs):
            return on_copies(cls, func, args, kwargs)
        written = [x for x in written_by(func, args, kwargs) if isinstance(x, HostWeight)]
        with contextlib.ExitStack() as held:
            # lock the weights in a fixed order, so that two threads never deadlock
            for weight in sorted(written, key=lambda w: w.buffer.order):
                held.enter_context(weight.buffer.write())
            if written and func is _aten.copy_.default:
                source = args[1].values_on_host if isinstance(args[1], HostWeight) else args[1]
                written[0].host.copy_(source)
                written[0].buffer.count_write()
                return written[0]
            return on_fetched(cls, func, args, kwargs, written)

    @property
    def writes(self) -> int:
        """A number that changes with every write to the values, including writes by compiled code to this weight."""
        return self.buffer.written + self.host._version + self._version

    def fetch(self) -> torch.Tensor:
        """Return a copy of the values on the device, or the host memory itself if the device is the CPU."""

        if type(self.host) is not torch.Tensor:  # during tracing
            traced: torch.Tensor = FETCH(self.host, self.device)
            return traced
        self.buffer.read(self.host.nbytes)
        values = self.values_on_host
        return values if self.device.type == "cpu" else values.to(self.device)

    @property
    def is_only_user(self) -> bool:
        """Whether no view and no other weight shares the memory.  False if the weight is packed, or is only a part of
        its storage."""
        return not self.buffer.compressed and self.buffer.is_only_used_by(self.host)

    @property
    def values_on_host(self) -> torch.Tensor:
        """The values as an ordinary host tensor for reading; see :meth:`HostBuffer.values`."""
        return self.buffer.values(self.host)

    @property
    def raw_host(self) -> torch.Tensor:
        """The host memory, for code compiled by other backends.  This code may write to the memory without calling an op,
        so a packed weight is first unpacked permanently.  Only during tracing does a packed weight stay packed."""
        self.buffer.expose()
        if self.buffer.compressed and detect_fake_mode() is None:
            self.buffer.unpack()
        return self.host

    def _alias(self, host: torch.Tensor) -> Any:
        """Wrap ``host``, the result of a view op, as a weight.  If ``host`` is a view of the memory of ``self``, the new
        weight has the buffer of ``self``.  If the op has copied the values, the new weight has a new buffer."""
        same = share_storage(host, self.host)
        return HostWeight(host, self.device, self.buffer if same else None, self.buffer.name)

    def _converted(self, kwargs: Mapping[str, Any]) -> Any:
        """Convert the dtype, the memory format or the device of the weight, like the op ``_to_copy``.  The result is a
        HostWeight if the device stays the same, and otherwise an ordinary tensor."""
        device = kwargs.get("device")
        target = self.device if device is None else with_index(torch.device(device))
        if target == self.device or target.type == "cpu":
            self.buffer.check_room_for_copy(self.host.numel() * (kwargs.get("dtype") or self.dtype).itemsize)
        if target != self.device:
            return _aten._to_copy.default(self.values_on_host, **{**kwargs, "device": target})
        with torch.inference_mode(False):
            host = _aten._to_copy.default(self.values_on_host, **{**kwargs, "device": "cpu"})
            return HostWeight(host, self.device, name=self.buffer.name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if type(self.host) is not torch.Tensor:
            return f"HostWeight({self.host!r}, {self.device})"
        kind = "Parameter containing:\n" if isinstance(self, nn.Parameter) else ""
        return f"{kind}{self.values_on_host!r} in host memory, for {self.device}"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            self.buffer.check_room_for_copy(self.host.nbytes)
            with torch.inference_mode(False):
                copied = HostWeight(self.buffer.copy(self.host), self.device, name=self.buffer.name)
                twin = memo[id(self)] = like(self, copied)
                twin.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self._state().items()})
        result: torch.Tensor = memo[id(self)]
        return result

    def __copy__(self) -> torch.Tensor:
        weight: torch.Tensor = like(self, self._alias(self.host))
        weight.__dict__.update(self._state())
        return weight

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the weight as an ordinary tensor on the CPU."""

        # for a packed weight, an exported view is usually in a scratch file and takes no host memory
        read = self.buffer.export_view if self.buffer.compressed else self.buffer.values
        return self.plain(read(self.host)).__reduce_ex__(protocol)

    def plain(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` as an ordinary tensor.  The result has the class of the tensor that this weight has replaced,
        and the attributes that :meth:`_state` returns."""
        kind = nn.Parameter if self.kind is torch.Tensor and isinstance(self, nn.Parameter) else self.kind
        if kind is torch.Tensor:
            return values
        plain: torch.Tensor = torch.Tensor._make_subclass(kind, values, self.requires_grad)
        plain.__dict__.update(self._state())
        return plain

    def separate(self) -> None:
        """Move the values to new memory that no other weight shares."""
        self.host = self.buffer.copy(self.host)
        self.buffer = HostBuffer(self.host, name=self.buffer.name)

    def _state(self) -> dict[str, Any]:
        """Return the attributes to set on a copy of this weight: all attributes that HostWeight itself does not define.

        If this weight replaces an ordinary parameter, the result is empty, because a copy of an ordinary parameter does
        not keep the parameter's attributes, either.
        """
        if self.kind in (torch.Tensor, nn.Parameter, nn.Buffer):
            return {}
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    # The methods below replace methods of torch.Tensor that do not call ops.  The replaced methods would access the memory
    # of a tensor on its device, and a HostWeight has no such memory.

    @property
    def data(self) -> Any:
        return self._alias(self.host.detach())

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Give the weight other memory.

        The table shows the memory and the buffer that the weight has after the assignment.

        ===================================  ==================================  =======================
        ``value``                            the weight's host memory            the weight's buffer
        ===================================  ==================================  =======================
        the same view (``p.data += x``)      unchanged                           unchanged
        a tensor of the weight's state_dict  unchanged                           unchanged
        another view of the weight's memory  ``value``, moved to private memory  unchanged
        a HostWeight on the same device      the memory of ``value``             the buffer of ``value``
        a tensor on the CPU                  the memory of ``value``             a new buffer
        a tensor on another device           a copy of ``value``                 a new buffer
        a tensor that is not dense           a copy of ``value``                 a new buffer
        an inference tensor                  a copy of ``value``                 a new buffer
        another class or layout              raises ChunkflowError               unchanged
        ===================================  ==================================  =======================
        """
        if value.layout != torch.strided or type(value) not in (torch.Tensor, nn.Parameter, HostWeight):
            refuse(self, f"data of type {type(value).__name__} and layout {value.layout}")
        if isinstance(value, HostWeight) and value.device == self.device:
            host, buffer = value.host, value.buffer
        else:
            host, buffer = value.detach().to("cpu"), None
        if buffer is self.buffer and is_same_view(host, self.host):
            return  # p.data += x has already written to the memory
        if buffer is None and is_same_view(host, self.host) and self.buffer.backs(self):
            # a tensor of the weight's own state_dict
            return
        # whether ``value`` is another view of the same memory, perhaps of only a part of it
        part = buffer is self.buffer
        if part:
            self.buffer.unpack()
        with self.buffer.write(replacing=not part), torch.inference_mode(False), torch.no_grad():
            if part:
                self.buffer.unpin()
            plain = ordinary(host, None if buffer is None else buffer.values)
            host, buffer = plain, buffer if plain is host else None
            self.buffer.count_write()
            weight = HostWeight(host, self.device, buffer, self.buffer.name)
            torch.Tensor.data.__set__(self, weight)  # type: ignore[attr-defined]
            if weight.buffer is not self.buffer:
                self.__dict__.pop("token", None)  # the token belongs to the old buffer
            self.host, self.buffer = weight.host, weight.buffer
            if part and self.buffer.backs(self):
                self.buffer.host = self.host

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a read-only array, because a write to the array would go unnoticed."""
        if self.device.type != "cpu" and not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy: call .cpu() first.")
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        values = self.values_on_host.detach().numpy()
        values.flags.writeable = False
        return values

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Return an ordinary tensor on the CPU.  If the device of the weight is the CPU, the tensor shares the memory
        of the weight, like the tensors of a state_dict.

        While a gradient is recorded, while a model is converted or traced, or if the memory format changes, calls
        ``torch.Tensor.cpu`` instead.
        """
        ordinary = self.device.type == "cpu" and memory_format == torch.preserve_format
        if (
            torch.compiler.is_compiling()
            or not ordinary
            or (self.requires_grad and torch.is_grad_enabled())
            or type(self.host) is not torch.Tensor
            or core.dispatch_modes()
        ):
            return super().cpu(memory_format=memory_format)
        return self.plain(self.buffer.export_view(self.host))

    def tolist(self) -> Any:
        return self.values_on_host.tolist()

    def __format__(self, spec: str) -> str:
        return format(self.values_on_host.detach(), spec)

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def data_ptr(self) -> NoReturn:
        refuse(self, "data_ptr()")

    def storage(self) -> NoReturn:
        refuse(self, "storage()")

    def share_memory_(self) -> NoReturn:
        refuse(self, "share_memory_()")

    def __dlpack__(self, **_: Any) -> NoReturn:
        refuse(self, "DLPack")

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        raise AttributeError(refusal(self, "__cuda_array_interface__"))  # so that hasattr returns False


# Two getters for code that checks, in every call, whether any of many weights has changed.  ``mark_of`` returns the
# state object of a weight (see ``weight_token.py``), which is replaced when the weight changes.  Two types of changes
# do not replace it: changes that ``host._version`` records, and, if the buffer is ``exposed``, changes that the
# weight's own ``_version`` records.  ``mark_of`` raises AttributeError for a tensor that is in no store.
mark_of = attrgetter("token.state")
# ``state_of`` returns the buffer of a weight, the form of its bytes, and the three counters whose sum is ``writes``.
# It raises AttributeError for a tensor that is not a HostWeight.
state_of = attrgetter("buffer", "buffer.form", "buffer.written", "host._version", "_version")


def with_index(device: torch.device) -> torch.device:
    """Return the device as tensors name it: ``cuda`` with the index of the current device of this thread, ``cpu:0`` as
    ``cpu``."""
    if device.type == "cpu":
        return torch.device("cpu")
    unnamed = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if unnamed else device


def like(tensor: torch.Tensor, weight: HostWeight) -> Any:
    """Return ``weight`` as a replacement of ``tensor``: as a parameter if ``tensor`` is a parameter, and with the class of
    ``tensor`` in its attribute ``kind``."""
    replacement: Any = weight
    if isinstance(tensor, nn.Parameter):
        replacement = nn.Parameter(weight, tensor.requires_grad)
    replacement.kind = tensor.kind if isinstance(tensor, HostWeight) else type(tensor)
    return replacement


def _traced(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    given = pytree.tree_leaves((args, kwargs))
    return any(isinstance(x, HostWeight) and type(x.host) is not torch.Tensor for x in given)


@contextlib.contextmanager
def _tracked() -> Iterator[None]:
    """A context in which new views share the version counter of their base.  Inside ``__torch_dispatch__``, torch would
    otherwise give each view a separate counter."""
    with torch.inference_mode(False), core.view_tracking(True):
        yield
