"""``enable_adapters``: let a model switch LoRA adapters without recompilation; ``disable_adapters`` undoes it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from chunkflow_compile.frontend.adapter_slots import Sizes, Slotted, attributes_like, original_class, slotted
from chunkflow_compile.frontend.block_kinds import repeated_blocks
from chunkflow_compile.hardware.machine import install_line
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.placed.placement import placements_of
from chunkflow_compile.private_torch.dynamo import OptimizedModule

# The name of a temporary adapter.  PEFT replaces the target layers by LoRA layers when it injects this adapter.
_PROBE = "chunkflow_probe"
# The attribute in which ``enable_adapters`` stores the sizes of a model's slots.
_SIZES = "_chunkflow_sizes"
# The methods with which models of diffusers and transformers load an adapter.
_LOADS = ("load_lora_adapter", "load_adapter", "add_adapter")
# The components of a pipeline to which ``enable_adapters`` adds slots: the denoisers.
ADAPTED = ("transformer", "transformer_2", "unet")


def enable_adapters(model: Any, rank: int = 64, targets: str | Sequence[str] | None = None, slots: int = 1) -> Any:
    """Prepare a model, or the denoisers of a pipeline, so that LoRA adapters can be switched without recompiling or
    re-planning; return ``model``.

    Call this function before the model is compiled or placed.  Each target layer gets slots, which stream like weights and
    count towards ``memory``.  The methods of diffusers and PEFT, such as ``load_lora_weights``, ``set_adapters`` and
    ``fuse_lora``, work as before.  If the active adapters have changed, the next call of the model first copies them into the
    slots.

    ``rank``: the maximum rank of an adapter.  ``targets``: names of layers, in the format of PEFT's ``target_modules``; by
    default all linear layers in the repeated blocks.  ``slots``: the maximum number of adapters that are active at the same
    time.  If an adapter has a higher rank than ``rank`` or changes layers outside ``targets``, or if more than ``slots``
    adapters are active, the model is recompiled once.
    Raises ChunkflowError if the model is already placed or compiled, if PEFT is missing, or if no layer matches ``targets``.
    """
    parts = [model] if isinstance(model, nn.Module) else [getattr(model, name, None) for name in ADAPTED]
    models = [part for part in parts if isinstance(part, nn.Module)]
    if not models:
        raise ChunkflowError(
            f"enable_adapters takes a model or a pipeline with a transformer, not {type(model).__name__}."
        )
    if not isinstance(targets, (str, type(None))) and not (
        isinstance(targets, Sequence) and all(isinstance(name, str) for name in targets)
    ):
        raise ChunkflowError(f"targets={targets!r} must be names of linear layers, such as ['to_q', 'to_k'].")
    for part in models:
        _check(part, rank, slots)
    for part in models:
        _enable(part, Sizes(rank, slots), targets)
    return model


def is_enabled(model: nn.Module) -> bool:
    """Whether :func:`enable_adapters` was called for the model."""
    return _SIZES in model.__dict__


def disable_adapters(model: nn.Module) -> None:
    """Undo :func:`enable_adapters` for a model that is not placed.

    Layers with adapters become PEFT's own layers.  Layers without adapters become the ordinary layers that PEFT had replaced.
    """
    layers = [m for m in model.modules() if isinstance(m, Slotted)]
    for layer in layers:
        _unslot(layer)
    _make_ordinary(model, [layer for layer in layers if not _adapters(layer)])
    model.__class__ = original_class(type(model))
    model.__dict__.pop(_SIZES, None)


def _check(model: nn.Module, rank: int, slots: int) -> None:
    """Raise ChunkflowError if ``rank`` or ``slots`` is invalid, if adapters are already enabled for the model, if the model
    is already compiled or placed, or if PEFT is missing."""
    for name, value in (("rank", rank), ("slots", slots)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ChunkflowError(f"{name}={value!r} must be a positive number.")
    kind = type(model).__name__
    if is_enabled(model):
        raise ChunkflowError(f"The adapters of {kind} are enabled already.")
    if isinstance(model, OptimizedModule) or any(m._compiled_call_impl is not None for m in model.modules()):
        raise ChunkflowError(
            f"{kind} is compiled already: call enable_adapters before it is compiled, and "
            "chunkflow_compile.restore(model) first if ChunkFlow compiled it."
        )
    if placements_of(model):
        raise ChunkflowError(
            f"{kind} is placed already: call chunkflow_compile.restore(model) first, or enable_adapters before offload "
            "and compile."
        )
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ChunkflowError(f"enable_adapters needs PEFT: {install_line('adapters')}.") from error


def _enable(model: nn.Module, sizes: Sizes, targets: str | Sequence[str] | None) -> None:
    before = {id(layer): layer.active_adapters for layer in tuned_layers(model)}
    wanted: Any = _linear_layers(model) if targets is None else targets
    dtypes = _inject(model, wanted) if wanted else {}
    for layer in _lora_layers(model):
        if id(layer) in before:
            layer.set_adapter(before[id(layer)])
        _slot(layer, sizes, dtypes.get(id(layer)))
    model.__dict__[_SIZES] = sizes
    kind: Any = type(model)
    model.__class__ = _enabled(kind)


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers in the repeated blocks, without the layers that PEFT has already replaced."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise ChunkflowError(
            f"{type(model).__name__} has no repeated blocks: name its linear layers, such as targets=['to_q', 'to_k']."
        )
    inside = {id(m) for layer in tuned_layers(model) for m in layer.modules()}
    return [
        f"{name}.{path}"
        for name, block in blocks.items()
        for path, module in block.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in inside
    ]


def _inject(model: Any, targets: Any) -> dict[int, torch.dtype]:
    """Make PEFT replace the target layers by its own layers, but leave no adapter in them.

    Returns a mapping from the id of each new layer to the dtype that PEFT would choose for an adapter in this layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=1, lora_alpha=1, target_modules=targets, inference_mode=True)
    dtypes = {}
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False):
        try:
            inject_adapter_in_model(config, model, adapter_name=_PROBE)
        except ValueError as error:
            raise ChunkflowError(f"PEFT makes no layers for targets={targets!r}: {error}") from error
        finally:
            for layer in tuned_layers(model):
                if _PROBE in getattr(layer, "lora_A", ()):
                    dtypes[id(layer)] = layer.lora_A[_PROBE].weight.dtype
                    _delete(layer, _PROBE)
            _forget(model, [_PROBE])
    return dtypes


def _delete(layer: Any, name: str) -> None:
    """Delete an adapter from a layer, and prevent PEFT from activating another adapter instead."""
    layer._active_adapter = []  # if the deleted adapter were active, PEFT would activate another one and warn
    layer.delete_adapter(name)


def _forget(model: Any, names: Sequence[str]) -> None:
    """Remove adapters from PEFT's configuration of a model."""
    for name in names:
        getattr(model, "peft_config", {}).pop(name, None)
    if not getattr(model, "peft_config", True):
        del model.peft_config


def _slot(layer: Any, sizes: Sizes, dtype: torch.dtype | None, late: bool = False) -> None:
    """Add slots to a layer of PEFT.

    ``dtype``: the dtype that PEFT chooses for the weights of adapters in this layer.  If it is None, the slots get the dtype
    of an adapter that the layer already contains.
    ``late``: see :class:`Slotted`.
    """
    weights = [a.weight for a in layer.lora_A.values()]
    kind: Any = type(layer)
    layer.__class__ = slotted(kind)
    layer.sizes, layer.own, layer.late = sizes, False, late
    rank = max([sizes.rank, *(w.shape[0] for w in weights)])
    dtype = dtype or weights[0].dtype
    if dtype.itemsize < 2:  # the base weight is stored in float8, but the layer computes in another dtype
        dtype = torch.float32
    layer.grow(rank, max(sizes.count, len(layer.active_adapters)), dtype)
    for name in layer.lora_A:
        layer._move_adapter_to_device_of_base_layer(name)
    layer.choose_forward()


def _unslot(layer: Any) -> None:
    """Remove the slots from a layer of PEFT, and move its adapters to the device of its base weight."""
    layer.__class__ = original_class(type(layer))
    for name in ("slots", "scale"):
        del layer._buffers[name]
    for name in ("sizes", "own", "late", "slot_rank", "_held", "_alive"):
        layer.__dict__.pop(name, None)
    for name in _adapters(layer):
        layer._move_adapter_to_device_of_base_layer(name)


def _make_ordinary(model: nn.Module, layers: Iterable[Any]) -> None:
    """Remove PEFT's ``layers`` from a model, and put back the ordinary layers that PEFT had replaced by them."""
    replaced = {id(layer) for layer in layers}
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if id(layer) in replaced:
                setattr(parent, name, layer.base_layer)


def tuned_layers(model: nn.Module) -> Iterable[Any]:
    """Return the layers of PEFT in a model, whatever the type of their adapters."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:  # if PEFT is not installed, the model has no adapters
        return ()
    return (m for m in [*model.modules()] if isinstance(m, BaseTunerLayer))


def _lora_layers(model: nn.Module) -> list[Any]:
    """Return the LoRA layers of a model that wrap an ``nn.Linear`` and have no slots yet.  Other LoRA layers do not support
    slots."""
    from peft.tuners.lora import LoraLayer

    layers = [m for m in tuned_layers(model) if isinstance(m, LoraLayer) and not isinstance(m, Slotted)]
    return [m for m in layers if isinstance(m.base_layer, nn.Linear)]


def _adapters(layer: Any) -> list[str]:
    return sorted(layer._get_available_adapters())


def _update_slots(model: Any) -> None:
    """Update the slots of a model after an adapter was loaded.

    LoRA layers that have no slots yet get slots.  All slots of the model are filled again in its next call.
    """
    sizes = model.__dict__[_SIZES]
    if fresh := _lora_layers(model):
        sizes.warn_once(
            f"{len(fresh)} layers that enable_adapters had not named have adapters now, and the model is compiled again for "
            "these: name them in targets to have them from the first."
        )
    for layer in fresh:
        _slot(layer, sizes, None, late=True)
    for layer in model.modules():
        if isinstance(layer, Slotted):
            layer.mark_stale()
            layer.choose_forward()


@contextlib.contextmanager
def _discarding_exports(model: nn.Module) -> Iterator[None]:
    """Return a context in which an adapter is loaded.  When the context ends, the host stores forget the exports (tensors of
    a state_dict) that were made in it.

    While diffusers loads an adapter, it calls ``state_dict()`` on the model, and each offloaded weight makes an export.
    Host stores check later whether user code has written to exports.  diffusers reads only the names in this state_dict, so
    these checks are not needed.  The stores still check the exports that are in use when the context ends.
    """
    before = [(placement.store, {*placement.store.exported}) for placement in placements_of(model)]
    try:
        yield
    finally:
        for store, kept in before:
            for export in [*store.exported]:
                if export not in kept and export.user() is None:
                    store.exported.pop(export, None)


def _updating_slots(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loads(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with _discarding_exports(self):
                return load(self, *args, **kwargs)
        finally:
            _update_slots(self)

    return loads


def unload(model: Any) -> None:
    """Unload all adapters, as diffusers' ``unload_lora`` does, but keep the slots that :func:`enable_adapters` has added.

    All layers of PEFT without such slots become ordinary layers again.  (diffusers requires this for the layers that it has
    widened for an adapter, see :func:`let_widen`.)  Fused adapters stay in the base weights.
    """
    tuned = [*tuned_layers(model)]
    stay: list[Any] = [layer for layer in tuned if isinstance(layer, Slotted) and not layer.late]
    _make_ordinary(model, [layer for layer in tuned if layer not in stay])
    for layer in stay:
        for name in _adapters(layer):
            _delete(layer, name)
        layer.merged_adapters.clear()
        layer.enable_adapters(True)
    _forget(model, [*getattr(model, "peft_config", {})])
    model._hf_peft_config_loaded = None


def let_widen(model: nn.Module, adapter: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Turn layers with slots back into ordinary layers if diffusers will widen them for an adapter, that is, give them more
    inputs or outputs.  diffusers can widen only ordinary layers.

    Layers that already have adapters are left unchanged.  When diffusers has loaded the adapter, the widened layers get slots
    again.
    ``adapter``: the state dict of the adapter.  ``prefix``: the prefix of the keys in ``adapter``, without the dot.
    """
    widened = list[Any]()
    layers: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if isinstance(m, Slotted)]
    for name, layer in layers:
        if not _adapters(layer):
            a, b = (adapter.get(f"{prefix}.{name}.lora_{side}.weight") for side in "AB")
            sizes = ((a, 1, layer.in_features), (b, 0, layer.out_features))
            if any(weight is not None and weight.shape[dim] > size for weight, dim, size in sizes):
                widened.append(layer)
    _make_ordinary(model, widened)


@functools.cache
def _enabled(cls: Any) -> Any:
    """Return a class that is derived from ``cls``, the class of a model.  When its methods load or unload adapters, they also
    update the slots of the model."""
    loads = {name: _updating_slots(getattr(cls, name)) for name in _LOADS if hasattr(cls, name)}
    unloads = {"unload_lora": unload} if hasattr(cls, "unload_lora") else {}
    return type(cls.__name__, (cls,), {**attributes_like(cls, _enabled), **loads, **unloads})
