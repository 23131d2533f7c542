"""What people quantise a model with: each changes the weights of a model in place, or skips the test without its library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn


def torchao(config: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model, getattr(quantization, config)())

    return quantise


def quanto(model: nn.Module) -> None:
    library = pytest.importorskip("optimum.quanto")
    library.quantize(model, weights=library.qint8)
    library.freeze(model)


def nf4(double: bool) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        library = pytest.importorskip("bitsandbytes").nn
        for name, linear in list(model.blocks.named_children()):  # type: ignore[union-attr, operator]
            made = library.Linear4bit(
                linear.in_features, linear.out_features, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            made.weight = library.Params4bit(
                linear.weight.data, quant_type="nf4", compress_statistics=double, module=made
            )
            made.bias = linear.bias
            setattr(model.blocks, name, made.to("cpu"))

    return quantise


def layerwise_casting(model: nn.Module) -> None:
    from diffusers.hooks import apply_layerwise_casting

    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern=())
