"""An offloaded weight as a tensor: its bytes lie in host memory, its device is the compute device.

An op outside a program that reads such a weight gets a copy on the device, for that op alone.  An op that writes it writes
the host memory, and every program sees that at its next call.  A view of it is a view of the host memory.
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

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.private_torch import core
from chunkflow_compile.private_torch.dynamo import InstructionTranslator, ShortenTraceback

from .bytes import in_one_memory, ordinary, same_place
from .exchange import STATE
from .host_buffer import HostBuffer
from .undeclared import cannot_be_seen, declares, on_copies, wait_for_collective

_LIBRARY = torch.library.Library("chunkflow", "FRAGMENT")
_LIBRARY.define("fetch(Tensor host, Device device) -> Tensor")
_LIBRARY.impl("fetch", lambda host, device: host.to(device, copy=True), "CompositeExplicitAutograd")
torch.library.register_fake(
    "chunkflow::fetch", lambda host, device: torch.empty_like(host, device=device), lib=_LIBRARY
)
# In graphs of other backends: copies the host memory to the device.
FETCH = torch.ops.chunkflow.fetch.default

_aten = torch.ops.aten
# Views that are not in their schemas.
_VIEWS = {_aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default}
# Their results have a bit that a HostWeight does not have.
_LAZY_VIEWS = {_aten._conj.default, _aten._neg_view.default}
# They write without reading, so nothing is fetched.
_FILLS = {_aten.zero_.default, _aten.fill_.Scalar}


# The name of ChunkFlow's backend.
_OURS = "chunkflow"
# Attributes of a HostWeight, of which one stays with the tensor when its values are exchanged.
_OWN = {*STATE, "life"}


class CompiledViewError(ChunkflowError, ShortenTraceback):
    """A ChunkflowError while Dynamo traces, which passes it on as it is."""

    def __init__(self, said: str) -> None:
        super().__init__(said, first_useful_frame=None)


class HostWeight(torch.Tensor):
    """A weight on ``device`` whose values are those of ``host``, a plain tensor on the CPU; of a packed one it is only the
    place of the values.

    ``buffer``: the memory, shared by all views of it.  ``kind``: the class of the tensor that it stands for.
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
        if device is None:  # type(weight)(values, requires_grad=...), as accelerate makes a parameter
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
        backend = _traced_by()
        if backend != _OURS:
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
        if isinstance(host, FakeTensor) and _is_for_us():
            offset = host.storage_offset()  # which is that of a DTensor around it
            with host.fake_mode, core.view_tracking(False):
                room = torch.empty(offset + host.numel(), dtype=host.dtype, device=device)
                return room.as_strided(size, stride, offset)  # not as a view, which the weight is not
        return HostWeight(host, device)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # Dynamo would trace this as a frame of its own where a model runs in parts
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], HostWeight) else None
        refused = (
            torch.Tag.inplace_view in func.tags or func in _LAZY_VIEWS
        )  # as set_ and resize_, which change the memory
        if first is not None and not refused:
            if func.is_view or func in _VIEWS:
                with _tracked():
                    seen = func(first.host, *args[1:], **kwargs)
                    return pytree.tree_map_only(torch.Tensor, first._alias, seen)
            if func is _aten._to_copy.default and type(first.host) is torch.Tensor:
                return first._converted(kwargs)
        if refused or cannot_be_seen(func):
            _refuse(next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, HostWeight)), func.__name__)
        if not declares(func) and not _traced(args, kwargs):
            return on_copies(cls, func, args, kwargs)
        written = [x for x in _written(func, args, kwargs) if isinstance(x, HostWeight)]
        with contextlib.ExitStack() as held:
            for weight in sorted(written, key=lambda w: w.buffer.order):  # two threads never hold each other up
                held.enter_context(weight.buffer.write())
            if written and func is _aten.copy_.default:
                source = args[1].values_on_host if isinstance(args[1], HostWeight) else args[1]
                written[0].host.copy_(source)
                written[0].buffer.count_write()
                return written[0]
            return _fetched(func, args, kwargs, written)

    @property
    def writes(self) -> int:
        """Changes with every write to the values: through this or another weight, to the host memory, by compiled code."""
        return self.buffer.written + self.host._version + self._version

    def fetch(self) -> torch.Tensor:
        """A copy of the values on the device; on the CPU the host memory itself."""
        if type(self.host) is not torch.Tensor:  # traced
            traced: torch.Tensor = FETCH(self.host, self.device)
            return traced
        self.buffer.read(self.host.nbytes)
        values = self.values_on_host
        return values if self.device.type == "cpu" else values.to(self.device)

    @property
    def is_only_user(self) -> bool:
        """Whether no view and no other weight has its memory, which is raw and all of its storage."""
        return not self.buffer.compressed and self.buffer.is_only_used_by(self.host)

    @property
    def values_on_host(self) -> torch.Tensor:
        """The values as an ordinary host tensor, to be read, see :meth:`HostBuffer.values`."""
        return self.buffer.values(self.host)

    @property
    def raw_host(self) -> torch.Tensor:
        """The host memory, for the code of other compilers, which may write it past every op: a packed weight is raw from
        then on.  A trace does not touch it."""
        self.buffer.expose()
        if self.buffer.compressed and detect_fake_mode() is None:
            self.buffer.unpack()
        return self.host

    def _alias(self, host: torch.Tensor) -> Any:
        """A weight around a view of the same memory; or around new memory, which some ops return in its place."""
        same = in_one_memory(host, self.host)
        return HostWeight(host, self.device, self.buffer if same else None, self.buffer.name)

    def _converted(self, kwargs: Mapping[str, Any]) -> Any:
        """On its device a weight stays on the host; on another, it becomes an ordinary tensor."""
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
        """Pickled as an ordinary tensor on the CPU."""
        read = self.buffer.export_view if self.buffer.compressed else self.buffer.values  # a copy may be on the drive
        return self.plain(read(self.host)).__reduce_ex__(protocol)

    def plain(self, values: torch.Tensor) -> torch.Tensor:
        """An ordinary tensor of the class that this one stands for, with its attributes."""
        kind = nn.Parameter if self.kind is torch.Tensor and isinstance(self, nn.Parameter) else self.kind
        if kind is torch.Tensor:
            return values
        plain: torch.Tensor = torch.Tensor._make_subclass(kind, values, self.requires_grad)
        plain.__dict__.update(self._state())
        return plain

    def separate(self) -> None:
        """Move to memory of its own, which no other weight has."""
        self.host = self.buffer.copy(self.host)
        self.buffer = HostBuffer(self.host, name=self.buffer.name)

    def _state(self) -> dict[str, Any]:
        """The attributes that belong to the class that it stands for; a copy of an ordinary parameter has none."""
        if self.kind in (torch.Tensor, nn.Parameter, nn.Buffer):
            return {}
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    # What has no op of its own, and would reach the memory that this tensor does not have.

    @property
    def data(self) -> Any:
        return self._alias(self.host.detach())

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Give the weight other memory.

        =================================  ==========================  =====================
        ``value``                          its host memory             its buffer
        =================================  ==========================  =====================
        the same view (``p.data += x``)    as before                   as before
        that of its own state_dict         as before                   as before
        another view of its own memory     that view, made private     as before
        a weight on the same device        that of the other weight    the other weight's
        a tensor on the CPU                that of the tensor          a new one
        a tensor on another device         a copy                      a new one
        one that is not :func:`ordinary`   a copy                      a new one
        of another class or layout         refused
        =================================  ==========================  =====================
        """
        if value.layout != torch.strided or type(value) not in (torch.Tensor, nn.Parameter, HostWeight):
            _refuse(self, f"data of type {type(value).__name__} and layout {value.layout}")
        if isinstance(value, HostWeight) and value.device == self.device:
            host, buffer = value.host, value.buffer
        else:
            host, buffer = value.detach().to("cpu"), None
        if buffer is self.buffer and same_place(host, self.host):
            return  # p.data += x has written the memory already
        if buffer is None and same_place(host, self.host) and self.buffer.is_of(self):
            return  # the weight's own tensor of a state_dict
        part = buffer is self.buffer  # another view of its own memory, which no longer has all bytes of its backing
        if part:
            self.buffer.unpack()
        with self.buffer.write(leaves=not part), torch.inference_mode(False), torch.no_grad():
            if part:
                self.buffer.unpin()
            plain = ordinary(host, None if buffer is None else buffer.values)
            host, buffer = plain, buffer if plain is host else None
            self.buffer.count_write()
            weight = HostWeight(host, self.device, buffer, self.buffer.name)
            torch.Tensor.data.__set__(self, weight)  # type: ignore[attr-defined]
            if weight.buffer is not self.buffer:
                self.__dict__.pop("life", None)  # of a weight with the old buffer
            self.host, self.buffer = weight.host, weight.buffer
            if part and self.buffer.is_of(self):
                self.buffer.host = self.host

    def numpy(self, *, force: bool = False) -> Any:
        """A view of the values that cannot be written, because a write through it would go unnoticed."""
        if self.device.type != "cpu" and not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy: call .cpu() first.")
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        values = self.values_on_host.detach().numpy()
        values.flags.writeable = False
        return values

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """An ordinary tensor on the CPU.  On a weight for the CPU it has the memory of the weight, as those of a state_dict.

        Where that would lose what follows the op (a gradient, a conversion of the model, a trace), the weight itself.
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
        _refuse(self, "data_ptr()")

    def storage(self) -> NoReturn:
        _refuse(self, "storage()")

    def share_memory_(self) -> NoReturn:
        _refuse(self, "share_memory_()")

    def __dlpack__(self, **_: Any) -> NoReturn:
        _refuse(self, "DLPack")

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        raise AttributeError(_refusal(self, "__cuda_array_interface__"))  # hasattr is False


def _traced_by() -> str | None:
    """The backend for which Dynamo traces a call in this thread, or None.  torch.export counts as None: it calls nothing."""
    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # Dynamo is not at work in this thread
        return None
    backend = output.compiler_fn
    return None if output.export else getattr(backend, "compiler_name", getattr(backend, "__name__", "a function"))


def _is_for_us() -> bool:
    """Whether Dynamo traces for ChunkFlow in this thread.

    A program gets each weight on the device, so its trace has an ordinary tensor there, which all of torch's ops take: loops
    (``while_loop``) and ``flex_attention`` take no tensor subclass.
    """
    return _traced_by() == _OURS


# For code that compares many weights in every call.  Both raise AttributeError for a tensor that is in no store.
# Another object after each change of a weight that the version of its host tensor does not count.  Of a buffer that is
# ``exposed``, the version of the weight is to be compared, too: for any other, ``written`` counts the same writes.
mark_of = attrgetter("life.state")
# What may have changed: the buffer, its form, and the counts of which ``writes`` is the sum.
state_of = attrgetter("buffer", "buffer.form", "buffer.written", "host._version", "_version")


def with_index(device: torch.device) -> torch.device:
    """The device that ``cuda`` stands for on this thread; any other as it is."""
    unnamed = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if unnamed else device


def like(tensor: torch.Tensor, weight: HostWeight) -> Any:
    """``weight`` as what ``tensor`` is: a parameter or not, of the class that it stands for."""
    replacement: Any = weight
    if isinstance(tensor, nn.Parameter):
        replacement = nn.Parameter(weight, tensor.requires_grad)
    replacement.kind = tensor.kind if isinstance(tensor, HostWeight) else type(tensor)
    return replacement


def _fetched(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[HostWeight]) -> Any:
    """Run an op on the fetched values, and write back those that it changed."""
    values: dict[int, torch.Tensor] = {}

    outs = {id(x) for name, value in kwargs.items() if name.startswith("out") for x in pytree.tree_leaves(value)}
    others = (args, [value for name, value in kwargs.items() if not name.startswith("out")])
    read = {id(x) for x in pytree.tree_leaves(others)} if outs else set()

    def fetch(weight: HostWeight) -> torch.Tensor:
        if (
            id(weight) in outs and id(weight) not in values and type(weight.host) is torch.Tensor
        ):  # the op may resize it
            value = torch.empty_like(weight.host, device=weight.device)
            values[id(weight)] = value.copy_(weight.fetch()) if id(weight) in read else value
        if id(weight) not in values:
            fills = func in _FILLS and type(weight.host) is torch.Tensor
            values[id(weight)] = weight.host if fills else weight.fetch()
        return values[id(weight)]

    positional, named = pytree.tree_map_only(HostWeight, fetch, (tuple(args), dict(kwargs)))
    result = func(*positional, **named)
    wait_for_collective(func, [values[id(weight)] for weight in written])
    for weight in written:
        if values[id(weight)].shape != weight.shape:
            _refuse(weight, f"out= of shape {list(values[id(weight)].shape)}")
    for weight in written:
        if not in_one_memory(values[id(weight)], weight.host):
            weight.host.copy_(values[id(weight)])
        weight.buffer.count_write()
    given = {id(values[id(weight)]): weight for weight in written}
    return pytree.tree_map_only(torch.Tensor, lambda t: given.get(id(t), t), result)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The tensors that an op writes."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)


def _traced(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    given = pytree.tree_leaves((args, kwargs))
    return any(isinstance(x, HostWeight) and type(x.host) is not torch.Tensor for x in given)


def _refusal(weight: HostWeight, what: str) -> str:
    return (
        f"{what} needs the memory of {weight.buffer.name} on {weight.device}, but ChunkFlow keeps this weight in host "
        "memory: use weight.cpu() or model.state_dict(), which return ordinary tensors, or call "
        "chunkflow_compile.restore(model) first."
    )


def _refuse(weight: HostWeight, what: str) -> NoReturn:
    raise ChunkflowError(_refusal(weight, what))


@contextlib.contextmanager
def _tracked() -> Iterator[None]:
    """Make views that have the version counter of their base, which views made inside a dispatch do not have."""
    with torch.inference_mode(False), core.view_tracking(True):
        yield
