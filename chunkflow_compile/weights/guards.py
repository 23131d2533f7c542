"""Hooks that adapt a module with offloaded weights to ``state_dict``, ``load_state_dict``, ``.to()`` and layerwise
casting.

* ``state_dict`` returns ordinary tensors that share the host memory of the weights, so a write to such a tensor changes
  the model, even if the weight is on the SSD.  For weights that ranks share in host memory, ``state_dict`` returns
  copies, and writes to the copies do not reach the model.
* ``load_state_dict(assign=True)`` makes the given tensors the host memory of the weights.
* ``.to()``, ``.half()`` and all other functions that use ``_apply`` leave the values in host memory.  A change of the
  device is only recorded, and converted values are stored in host memory again.
* In a layer with diffusers' layerwise casting, a hook of diffusers calls ``.to()`` before and after forward.  Forward
  then uses a cast copy of each weight, and the weight itself is unchanged.  Dynamo can trace the cast, so a program runs
  the cast on the device.

:class:`Guards` attaches these hooks to the modules of the model and removes them again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from chunkflow_compile.passes.errors import ChunkflowError

from .bytes import ordinary
from .exchange import become
from .host_buffer import buffer_of
from .host_store import HostStore
from .host_weight import HostWeight, like, with_index
from .leaves import leaves, quant_state_tensors, with_leaves
from .modules import hooks_of

_aten = torch.ops.aten
# The ops by which ``.to(device)`` and ``to_empty`` create a tensor on a device.
_COPIES = {_aten._to_copy.default, _aten.empty_like.default}


class Guards:
    """The hooks of one placed model.  ``moved``: a function that is called before the weights change their device."""

    def __init__(self, root: nn.Module, store: HostStore, moved: Callable[[], None]) -> None:
        self._root = root
        self._store = store
        self._moved = moved
        self._handles: list[RemovableHandle] = []
        self._guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # weak, because adapter modules may be removed

    def add(self) -> None:
        """Add the hooks to the modules of the model that do not have them yet."""
        for module in self._root.modules():
            if module not in self._guarded:
                self._guarded.add(module)
                module.__dict__["_apply"] = _Apply(module, self._store.device, self._moved, self._store.reads_meant)
                self._handles.append(module.register_state_dict_post_hook(_read_host_copies))
                self._handles.append(module.register_load_state_dict_pre_hook(_assign_host_copies))

    def watch_calls(self) -> None:
        """Add a hook that checks, while Dynamo traces, that the inputs are on the device of the model.  Dynamo's own error
        would be less clear."""
        check = partial(_check_inputs, self._store.device)
        self._handles.append(self._root.register_forward_pre_hook(check, with_kwargs=True))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        for module in self._guarded:
            module.__dict__.pop("_apply", None)
        self._guarded.clear()


class _Apply:
    """Replacement of ``module._apply``: conversions of a weight run in host memory, and a change of its device is only
    recorded."""

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        moved: Callable[[], None],
        reads_meant: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._module = module
        self._device = device
        self._moved = moved
        self._reads_meant = reads_meant
        # the weights that are replaced by cast copies while forward runs
        self._stored: dict[str, torch.Tensor] = {}
        # the version of each cast copy when the copy was created
        self._cast_versions: dict[str, int] = {}

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if (hook := hooks_of(self._module).get("layerwise_casting")) is not None and self._cast(fn, hook):
            return self._module
        modules = [*self._module.modules()] if recurse else [self._module]
        weights = {id(t): t for m in modules for _, t in _own(m) if isinstance(t, HostWeight)}
        for weight in weights.values():
            with torch.no_grad(), self._reads_meant(), _Conversions(self._device) as conversions:
                applied = fn(weight)
            conversions.finish(applied)
            _refuse_move(weight, applied.device, self._device)
            if applied is not weight:
                device = applied.device
                if isinstance(applied, HostWeight):
                    applied = HostWeight(applied.host, weight.device, applied.buffer)
                weight.data = applied
                if weight.device != device:
                    self._moved()
                    become(weight, like(weight, HostWeight(weight.host, device, weight.buffer)))
        for module in modules:
            if any(isinstance(t, HostWeight) for _, t in _own(module)):
                _apply_to_others(module, fn)
            else:
                type(module)._apply(module, fn, False)
        return self._module

    def _cast(self, fn: Callable[[torch.Tensor], torch.Tensor], hook: Any) -> bool:
        """Before forward, replace the weights of a layer by cast copies; after forward, put the weights back.  Return
        False if ``fn`` is neither the cast before forward nor the cast after it."""
        held = self._module._parameters
        dtype = fn(torch.empty(0, dtype=hook.storage_dtype)).dtype
        if dtype not in (hook.compute_dtype, hook.storage_dtype):
            return False
        if self._stored:  # forward has ended or failed, and its cast copies are still in place
            if not torch.compiler.is_compiling():
                self._keep_writes(hook)
            held.update(self._stored)  # type: ignore[arg-type]
            self._stored.clear()
        elif dtype == hook.storage_dtype:
            return False
        if dtype == hook.compute_dtype:
            for name, weight in list(held.items()):
                if weight is not None:
                    self._stored[name] = weight
                    held[name] = fn(weight)  # type: ignore[assignment]
            if not torch.compiler.is_compiling():
                self._cast_versions = {name: _version(held[name]) for name in self._stored}
        return True

    def _keep_writes(self, hook: Any) -> None:
        """For each cast copy that the user has changed, store the values of the copy in the weight.  Convert the other
        weights to the storage dtype of the hook."""
        for name, weight in self._stored.items():
            copied: Any = self._module._parameters[name]
            if self._cast_versions.get(name) != _version(copied):
                weight.data = copied.detach().to(hook.storage_dtype)
            elif weight.dtype != hook.storage_dtype and weight.is_floating_point():
                weight.data = weight.data.to(hook.storage_dtype)

    def __reduce__(self) -> Any:
        return _Apply, (self._module, self._device, _nothing)


def _nothing() -> None:
    """Do nothing.  A copy of a model uses this function as ``moved``, because the copy has no programs before its first
    call."""


def _own(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the names and tensors that a module holds directly."""
    held = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in held if tensor is not None]


class _Conversions(TorchDispatchMode):
    """A dispatch mode that is active while ``_apply`` converts a weight.  If an op copies the weight to another device,
    the copy shares the host memory of the weight until the next op runs.

    ``device``: the device that the model is placed for.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._copies = list[HostWeight]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES and isinstance(args[0], HostWeight) and kwargs.get("device") is not None:
            return self._copied(args[0], with_index(torch.device(kwargs["device"])), **kwargs)
        self.finish()  # because the op may write to the weight or to a copy
        return func(*args, **kwargs)

    def finish(self, applied: torch.Tensor | None = None) -> None:
        """Give each copy separate memory, except the copy ``applied``, which replaces the weight."""
        while self._copies:
            copied = self._copies.pop()
            if copied is not applied:
                copied.separate()

    def _copied(self, weight: HostWeight, target: torch.device, **kwargs: Any) -> HostWeight:
        _refuse_move(weight, target, self._device)
        dtype, memory_format = kwargs.get("dtype") or weight.dtype, kwargs.get("memory_format") or torch.preserve_format
        if dtype != weight.dtype:
            weight.buffer.check_room_for_copy(weight.numel() * dtype.itemsize)
        as_it_is = memory_format == torch.preserve_format or weight.host.is_contiguous(memory_format=memory_format)
        if dtype == weight.dtype and as_it_is:
            copied: HostWeight = HostWeight(weight.host, target, weight.buffer)
        else:
            host = weight.values_on_host.to(dtype, memory_format=memory_format, copy=True)
            copied = HostWeight(host, target, name=weight.buffer.name)
        self._copies.append(copied)
        return copied


def _refuse_move(weight: HostWeight, target: torch.device, placed: torch.device) -> None:
    """Raise ChunkflowError if ``target`` is neither the CPU nor the device that the model is placed for."""
    if target.type == "meta":
        raise ChunkflowError(
            f"The weight {weight.buffer.name} is offloaded, and on the meta device it would lose its values: call "
            "chunkflow_compile.restore(model) first, and model.to('meta') after it."
        )
    if target.type != "cpu" and target != placed:
        raise ChunkflowError(
            f"The weight {weight.buffer.name} is offloaded for {placed}, so the model cannot be moved to "
            f"{target}: call chunkflow_compile.restore(model), and offload(model, {str(target)!r}) after it."
        )


def _version(tensor: Any) -> int:
    """Return a number that changes with every write to a tensor."""
    version: int = tensor.writes if isinstance(tensor, HostWeight) else tensor._version
    return version


def _apply_to_others(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Do what ``nn.Module._apply`` does, for the tensors of one module that are not offloaded."""
    with torch.no_grad():
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, HostWeight):
                parameter.data = fn(parameter.data)
                if parameter.grad is not None:
                    parameter.grad = fn(parameter.grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, HostWeight):
                module._buffers[name] = fn(buffer)


def detach_guards(module: nn.Module) -> None:
    """Remove the guards from a copy of a guarded module."""
    if isinstance(module.__dict__.get("_apply"), _Apply):
        del module.__dict__["_apply"]
    ours = (_read_host_copies, _assign_host_copies, _check_inputs)
    for name in ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_forward_pre_hooks"):
        hooks = module.__dict__[name]
        for key, hook in list(hooks.items()):
            function = getattr(hook, "hook", hook)
            if getattr(function, "func", function) in ours:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _read_host_copies(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, tensor in _own(module):
        value = state.get(prefix + name)
        offloaded = value is not None and any(isinstance(leaf, HostWeight) for _, leaf in leaves(value))
        if offloaded and value is not tensor:
            state[prefix + name] = with_leaves(value, _host_copy)
        # quanto adds the inner tensors of a weight to the state_dict, at every depth
        for path, leaf in leaves(tensor, prefix + name):
            if f"{path}.raw_host" in state:
                state.pop(f"{path}.raw_host")
                state[path] = _host_copy(leaf)
        # bitsandbytes adds the tensors of a weight's quantization state to the state_dict
        for path, part in quant_state_tensors(tensor, prefix + name):
            key = path.replace(".quant_state.", ".").replace(".state2.", ".nested_")
            if key in state:
                state[key] = _host_copy(part)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, HostWeight):
        return tensor
    return tensor.buffer.export_view(tensor.host)


def _assign_host_copies(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], strict: bool, *messages: Any
) -> None:
    """With ``assign=True``, turn the given tensors into offloaded weights.  With ``assign=False`` there is nothing to
    do, because torch then copies the values into the weights."""
    if not metadata.get("assign_to_params_buffers", False):
        return
    for name, tensor in _own(module):
        value: Any = state.get(prefix + name)
        if isinstance(tensor, HostWeight) and type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta:
            if (buffer := buffer_of(tensor)) is not None:
                buffer.on_storage_replaced()
            host = ordinary(value.detach().to("cpu"))
            state[prefix + name] = HostWeight(host, tensor.device, name=tensor.buffer.name)


def _check_inputs(device: torch.device, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        return
    for name, value in {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.device.type != device.type:
            raise ChunkflowError(
                f"The weights of {type(module).__name__} are placed for {device}, but {name} is on {value.device}: move "
                f"it to {device}, or place the model for {value.device} with offload(model, device)."
            )
