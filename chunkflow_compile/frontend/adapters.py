"""``enable_adapters``: a model whose LoRA adapters change without another program; ``disable_adapters`` undoes it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from chunkflow_compile.frontend.block_kinds import repeated_blocks
from chunkflow_compile.frontend.slots import Sizes, Slotted, like, plain, slotted
from chunkflow_compile.hardware.machine import install_line
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.placed.placement import placements_of
from chunkflow_compile.private_torch.dynamo import OptimizedModule

# The adapter that PEFT is given to choose the class of each layer.
_PROBE = "chunkflow_probe"
# Attribute of an enabled model: the sizes of its slots.
_SIZES = "_chunkflow_sizes"
# Methods of diffusers and transformers that load an adapter.
_LOADS = ("load_lora_adapter", "load_adapter", "add_adapter")
# Components of a pipeline that adapters are for, besides text encoders.
ADAPTED = ("transformer", "transformer_2", "unet")


def enable_adapters(model: Any, rank: int = 64, targets: str | Sequence[str] | None = None, slots: int = 1) -> Any:
    """Let a model, or the denoisers of a pipeline, change LoRA adapters without being compiled or planned again; return it.

    Call it before the model is compiled or placed.  Its layers get slots, which stream as weights do and count in ``memory``:
    ``load_lora_weights``, ``set_adapters``, ``fuse_lora`` and the others of diffusers and PEFT work as before, and what is
    active is copied into the slots before a call.

    ``rank``: the largest of an adapter.  ``targets``: as PEFT's ``target_modules``; by default, all linear layers of the
    repeated blocks.  ``slots``: how many adapters may be active at once.  With a larger rank, more at once, or on other
    layers, the model is compiled again once.
    Raises ChunkflowError for a model that is placed or compiled already, if PEFT is missing, or if there are no such layers.
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
    """Whether its adapters change in slots."""
    return _SIZES in model.__dict__


def disable_adapters(model: nn.Module) -> None:
    """Undo :func:`enable_adapters` of a model that is not placed: ordinary layers, or those of PEFT that have adapters."""
    layers = [m for m in model.modules() if isinstance(m, Slotted)]
    for layer in layers:
        _unslot(layer)
    _make_ordinary(model, [layer for layer in layers if not _adapters(layer)])
    model.__class__ = plain(type(model))
    model.__dict__.pop(_SIZES, None)


def _check(model: nn.Module, rank: int, slots: int) -> None:
    """Raise ChunkflowError if a model cannot be enabled, whatever its layers are."""
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
    """The names of the linear layers of the repeated blocks that have no adapter yet."""
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
    """Let PEFT make the layers, without an adapter; return the dtype that PEFT would give one, by the id of its layer."""
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
    """Take an adapter out of a layer, and let it choose no other."""
    layer._active_adapter = []  # delete_adapter would choose one, and warn
    layer.delete_adapter(name)


def _forget(model: Any, names: Sequence[str]) -> None:
    """Take adapters out of what PEFT notes of a model."""
    for name in names:
        getattr(model, "peft_config", {}).pop(name, None)
    if not getattr(model, "peft_config", True):
        del model.peft_config


def _slot(layer: Any, sizes: Sizes, dtype: torch.dtype | None, late: bool = False) -> None:
    """Give a layer of PEFT its slots."""
    weights = [a.weight for a in layer.lora_A.values()]
    kind: Any = type(layer)
    layer.__class__ = slotted(kind)
    layer.sizes, layer.own, layer.late = sizes, False, late
    rank = max([sizes.rank, *(w.shape[0] for w in weights)])
    dtype = dtype or weights[0].dtype
    if dtype.itemsize < 2:  # the base weight is stored in float8, and computes in another
        dtype = torch.float32
    layer.grow(rank, max(sizes.count, len(layer.active_adapters)), dtype)
    for name in layer.lora_A:
        layer._move_adapter_to_device_of_base_layer(name)
    layer.settle()


def _unslot(layer: Any) -> None:
    """Make a layer PEFT's again, with its adapters where its base weight is."""
    layer.__class__ = plain(type(layer))
    for name in ("slots", "scale"):
        del layer._buffers[name]
    for name in ("sizes", "own", "late", "slot_rank", "_held", "_alive"):
        layer.__dict__.pop(name, None)
    for name in _adapters(layer):
        layer._move_adapter_to_device_of_base_layer(name)


def _make_ordinary(model: nn.Module, layers: Iterable[Any]) -> None:
    """Put the layers that PEFT has replaced in their places again."""
    replaced = {id(layer) for layer in layers}
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if id(layer) in replaced:
                setattr(parent, name, layer.base_layer)


def tuned_layers(model: nn.Module) -> Iterable[Any]:
    """The layers of PEFT in a model, of any kind of adapter."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:  # then nothing has adapters
        return ()
    return (m for m in [*model.modules()] if isinstance(m, BaseTunerLayer))


def _lora_layers(model: nn.Module) -> list[Any]:
    """Those that can have slots, and have none."""
    from peft.tuners.lora import LoraLayer

    layers = [m for m in tuned_layers(model) if isinstance(m, LoraLayer) and not isinstance(m, Slotted)]
    return [m for m in layers if isinstance(m.base_layer, nn.Linear)]


def _adapters(layer: Any) -> list[str]:
    return sorted(layer._get_available_adapters())


def _loaded(model: Any) -> None:
    """After adapters were loaded: layers that have one for the first time get slots too, and the others are filled again."""
    sizes = model.__dict__[_SIZES]
    if fresh := _lora_layers(model):
        sizes.say(
            f"{len(fresh)} layers that enable_adapters had not named have adapters now, and the model is compiled again for "
            "these: name them in targets to have them from the first."
        )
    for layer in fresh:
        _slot(layer, sizes, None, late=True)
    for layer in model.modules():
        if isinstance(layer, Slotted):
            layer.stale()
            layer.settle()


@contextlib.contextmanager
def _only_read(model: nn.Module) -> Iterator[None]:
    """Tensors of a ``state_dict`` that a load takes and drops were not written: diffusers looks at their names."""
    before = [(placement.store, {*placement.store.exported}) for placement in placements_of(model)]
    try:
        yield
    finally:
        for store, kept in before:
            for export in [*store.exported]:
                if export not in kept and export.user() is None:
                    store.exported.pop(export, None)


def _then_settled(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loads(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with _only_read(self):
                return load(self, *args, **kwargs)
        finally:
            _loaded(self)

    return loads


def unload(model: Any) -> None:
    """As diffusers' ``unload_lora``, but layers that had slots from the first stay.  What is fused stays in the base weights.

    The others are ordinary again, as diffusers expects of one that it has widened for an adapter.
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
    """Make layers without adapters ordinary that diffusers will widen for an adapter, as it does with ordinary ones only.

    ``adapter``: its state dict, in which ``prefix`` stands for the model.  The layers get slots again when it is loaded.
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
    """The class of an enabled model, whose ways to load and unload adapters know slots."""
    loads = {name: _then_settled(getattr(cls, name)) for name in _LOADS if hasattr(cls, name)}
    unloads = {"unload_lora": unload} if hasattr(cls, "unload_lora") else {}
    return type(cls.__name__, (cls,), {**like(cls, _enabled), **loads, **unloads})
