"""Hoisting by kind, for the classes whose rows depend on the timestep alone, whatever else changes between two calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapters import Library
from conftest import EAGER
from denoisers import DENOISERS, hunyuan15_transformer
from helpers import twins
from torch import nn

from chunkflow_compile import compile, enable_adapters, replan
from chunkflow_compile.catalog.families import FAMILIES
from chunkflow_compile.catalog.sizes import Config, Shape, Size, build_model
from chunkflow_compile.catalog.small import small_model
from chunkflow_compile.placed.placement import Placement, placement_of

STEPS = 3
SIZE = Size(layers=2, height=4, width=4)
# The hoisted weight of a block.
HOISTED = {
    "hunyuanvideo-1.5": "transformer_blocks.1.norm1.linear",
    "minimax-h3": "transformer_blocks.1.adaln_proj.linear",
    "prx": "blocks.1.modulation.lin",
}

pytestmark = pytest.mark.usefixtures("no_grad")


def _hunyuan15() -> nn.Module:
    """Without the wide layers for text to be drawn, which would be most of a small model."""
    model = hunyuan15_transformer()
    model.context_embedder_2 = type(model.context_embedder_2)(32, 64, 64)
    return model  # type: ignore[no-any-return]


def _prx() -> nn.Module:
    return build_model(
        "PRXTransformer2DModel",
        in_channels=4,
        context_in_dim=32,
        hidden_size=32,
        mlp_ratio=2.0,
        num_heads=2,
        depth=SIZE.layers,
        axes_dim=[8, 8],
    )


def _prx_inputs(config: Config, shape: Shape, generator: torch.Generator | None) -> dict[str, Any]:
    """With more text than image: a block would take a shorter text for a small input."""
    return {
        "hidden_states": torch.randn(shape.batch, 4, 2 * shape.height, 2 * shape.width, generator=generator),
        "encoder_hidden_states": torch.randn(shape.batch, 40, config["context_in_dim"], generator=generator),
        "timestep": torch.full((shape.batch,), 0.5),
        "return_dict": False,
    }


INPUTS = {"prx": _prx_inputs, **{name: family.inputs for name, family in FAMILIES.items()}}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "hunyuanvideo-1.5": _hunyuan15,
    "minimax-h3": lambda: DENOISERS["minimax-h3"].components()["transformer"],  # type: ignore[no-any-return]
    "prx": _prx,
    "qwen-image": lambda: small_model("qwen-image", SIZE),
}


class Arms:
    """A small model of a class, compiled by kind, hoisted and not.  All its large weights are copied in each step."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype = torch.float32,
        prepare: Callable[[Any], object] = lambda model: None,
        tolerance: float = 0.0,
        **options: Any,
    ) -> None:
        self.name, self.dtype, self.tolerance = name, dtype, tolerance
        self.model, self.other = twins(lambda: MODELS[name]().to(dtype))
        for model, hoist in ((self.model, True), (self.other, False)):
            prepare(model)
            compile(model, **{**EAGER, "min_bytes": 2048, **options, "hoist": hoist})

    def both(self, change: Callable[[Any], object]) -> None:
        for model in (self.model, self.other):
            change(model)

    def _inputs(self, step: int, seed: int, size: Size) -> dict[str, Any]:
        found = INPUTS[self.name](self.model.config, size, torch.Generator().manual_seed(seed))
        found["timestep"] = found["timestep"] * (1 - step / 10)
        if self.name == "hunyuanvideo-1.5":
            of_zeros = ("encoder_hidden_states_2", "encoder_attention_mask_2", "image_embeds")
            found |= {name: found[name][:, :8] for name in of_zeros}
        return {n: v.to(self.dtype) if torch.is_tensor(v) and v.dtype == torch.float32 else v for n, v in found.items()}

    @property
    def placement(self) -> Placement:
        placement = placement_of(self.model)
        assert placement is not None
        return placement

    def call(self, step: int, seed: int, size: Size = SIZE) -> tuple[int, int]:
        """Both give the same outputs, bit for bit; return the number of misses, and the bytes that the hoisted one saves."""
        inputs, outputs, counted = self._inputs(step, seed, size), [], []
        for model in (self.model, self.other):
            before = _counts(model)
            outputs.append(model(**inputs))
            counted.append([new - old for new, old in zip(_counts(model), before, strict=True)])
        for mine, theirs in zip(*outputs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=self.tolerance)
        (hits, misses, moved), (_, _, of_other) = counted
        assert hits + misses == SIZE.layers
        return misses, of_other - moved

    def generation(self, seed: int, size: Size = SIZE) -> tuple[int, list[int]]:
        """The number of misses of all steps, and the bytes saved in each."""
        found = [self.call(step, seed, size) for step in range(STEPS)]
        return sum(misses for misses, _ in found), [saved for _, saved in found]

    @property
    def hoisted(self) -> int:
        """Bytes of the hoisted weights, as they are copied."""
        of_preambles = [p for p in self.placement.programs if p.preamble and not p.closed]
        return sum(buffer.nbytes for program in of_preambles for buffer in program.buffers.values())


def _counts(model: Any) -> tuple[int, int, int]:
    if (placement := placement_of(model)) is None or not placement.programs:
        return 0, 0, 0
    counts = placement.store.counts
    return counts.row_hits, counts.row_misses, counts.moved_bytes


@pytest.mark.long  # in make test: test_hoisting_by_kind.py, with Qwen-Image
@pytest.mark.parametrize(
    ("name", "sizes"), [("minimax-h3", False), *((n, True) for n in ("minimax-h3", "hunyuanvideo-1.5", "prx"))]
)
def test_what_changes_between_calls(name: str, sizes: bool) -> None:
    """A prompt, a weight, the plan; ``sizes``: also the size of the output, and the number of samples, two of which guidance
    makes."""
    arms = Arms(name)
    assert arms.generation(0)[0] == SIZE.layers + STEPS - 1
    hoisted = arms.hoisted
    found = [arms.generation(1), arms.generation(2, replace(SIZE, height=8) if sizes else SIZE)]
    assert found == [(0, [hoisted] * STEPS)] * 2 and hoisted > 0
    arms.both(lambda model: model.get_parameter(f"{HOISTED[name]}.weight").mul_(1.5))
    assert arms.generation(3)[0] == 1
    assert arms.generation(4) == (0, [hoisted] * STEPS)
    arms.both(lambda model: replan(model, slowdown=1000.0))
    misses, saved = arms.generation(5)
    assert misses == 0 and saved[-1] == hoisted
    if not sizes:
        return
    guided = replace(SIZE, batch=2)
    arms.generation(6, guided)
    misses, saved = arms.generation(7, guided)
    assert misses == 0 and saved[-1] == hoisted


@pytest.mark.long  # in make test: test_hoisting.py
def test_packed_weights_are_hoisted() -> None:
    arms = Arms("minimax-h3", torch.bfloat16, pack=True)
    assert arms.generation(0)[0] > 0
    assert arms.generation(1) == (0, [arms.hoisted] * STEPS)
    packed = [b for p in arms.placement.programs if p.preamble for b in p.buffers.values() if b.compressed]
    assert len(packed) >= 2, "no weight of the preambles is packed"


@pytest.mark.long
def test_compiled_kernels_compute_what_they_do_without_hoisting() -> None:
    arms = Arms("qwen-image", lowering="inductor")
    assert arms.generation(0)[0] > 0
    assert arms.generation(1) == (0, [arms.hoisted] * STEPS)


@pytest.mark.long  # in make test: test_hoisting.py
def test_adapters_in_the_slots_of_hoisted_layers() -> None:
    """Loading one writes slots, which drops the rows; its scale is applied in main."""
    pytest.importorskip("peft")
    layers = ["adaln_proj.linear"]
    arms = Arms("minimax-h3", prepare=lambda model: enable_adapters(model, rank=16, targets=layers))
    library = Library(MODELS["minimax-h3"]())
    arms.generation(0)
    for seed in (0, 1):
        state = library.adapter(seed, 16, layers)
        arms.both(lambda m: m.load_lora_adapter({k: v.clone() for k, v in state.items()}, adapter_name=f"a{seed}"))  # noqa: B023
        assert arms.generation(1)[0] > 0
        assert arms.generation(2) == (0, [arms.hoisted] * STEPS)
    arms.both(lambda model: model.set_adapters("a1", 0.5))
    assert arms.generation(3) == (0, [arms.hoisted] * STEPS)
