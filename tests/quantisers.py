"""What people quantise a model with: each changes the weights of a model in place, or skips the test without its library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn


class GGUFParameter(nn.Parameter):
    """Stands for a GGUF weight: it counts as one by its name, and its values are not quantised."""


class Int8Params(nn.Parameter):
    """Stands for an int8 weight of bitsandbytes, which cannot be streamed, by its name."""


GGUFParameter.__module__ = "diffusers.quantizers.gguf.utils"
Int8Params.__module__ = "bitsandbytes.nn.modules"


def torchao(config: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model, getattr(quantization, config)())

    return quantise


def quanto(model: nn.Module) -> None:
    library = pytest.importorskip("optimum.quanto")
    library.quantize(model, weights=library.qint8)
    library.freeze(model)


def replace_linear(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put another layer in the place of each linear one, with its bias."""
    for name, linear in [*model.named_modules()]:
        if type(linear) is nn.Linear:
            parent, _, leaf = name.rpartition(".")
            layer = make(linear)
            layer.bias = linear.bias
            setattr(model.get_submodule(parent), leaf, layer)


def nf4(double: bool) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        library = pytest.importorskip("bitsandbytes").nn

        def make(linear: nn.Linear) -> nn.Module:
            sizes = linear.in_features, linear.out_features
            layer = library.Linear4bit(*sizes, compute_dtype=linear.weight.dtype, quant_type="nf4")
            given = {"quant_type": "nf4", "compress_statistics": double, "requires_grad": False}
            layer.weight = library.Params4bit(linear.weight.data, module=layer, **given)
            return layer.to("cpu")

        replace_linear(model, make)

    return quantise


def layerwise_casting(model: nn.Module) -> None:
    """Float8 in host memory and across the link; each layer casts for its call."""
    from diffusers.hooks import apply_layerwise_casting

    dtype = next(model.parameters()).dtype
    apply_layerwise_casting(model, torch.float8_e4m3fn, dtype, skip_modules_pattern=())
