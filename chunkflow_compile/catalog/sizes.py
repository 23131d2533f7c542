"""The sizes of models and calls, and a function that builds a model.

torch is imported only when a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from chunkflow_compile.hardware.machine import check_installed

if TYPE_CHECKING:
    from torch import nn

Quantisation = Literal["int8", "fp8", "nf4"]
# The timestep argument of a transformer: one value per sample, or one per token (``expand_timesteps`` of Wan).
Timestep = Literal["sample", "token"]
Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of one call of a transformer.  The sizes of the latent are counted before it is divided into patches; the
    text is counted in tokens.

    ``timestep``: whether the call passes one timestep per sample or one per token.
    """

    batch: int = 1
    frames: int = 1
    height: int
    width: int
    text: int
    timestep: Timestep = "sample"


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """The sizes of a small model and of a call.

    ``layers``: the number of blocks of the first type.  ``singles``: the number of blocks of the second type, if the
    class has two types.  The width is ``heads * head_dim``.
    """

    layers: int = 2
    singles: int = 2
    heads: int = 4
    head_dim: int = 16
    frames: int = 2
    height: int = 8
    width: int = 8
    text: int = 8

    @property
    def rope(self) -> tuple[int, int, int]:
        """The numbers of dimensions of a head that encode time (a half), height and width (a quarter each).  All numbers
        are even."""
        quarter = self.head_dim // 4 // 2 * 2
        return self.head_dim - 2 * quarter, quarter, quarter


def build_model(class_name: str, **config: Any) -> nn.Module:
    """Build a model with random weights, in evaluation mode.  ``class_name``: the name of a class in diffusers or
    transformers.

    Raises ChunkflowError if the library is not installed.
    """
    check_installed(class_name, "diffusers")
    import diffusers

    if (cls := getattr(diffusers, class_name, None)) is not None:
        model: nn.Module = cls(**config)
    else:
        check_installed(class_name, "transformers")
        import transformers

        cls = getattr(transformers, class_name)
        model = cls(cls.config_class(**config))
    return model.eval()
