"""Small pipelines of diffusers for tests: as they are, applied, and what is asked of both."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from small_pipelines import SMALL_PIPELINES, small_pipeline
from torch import nn

from chunkflow_compile import cycles, programs
from chunkflow_compile.frontend.compiled_calls import CompiledForward
from chunkflow_compile.pipeline.budget import Budget, Phase, budget_of
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves_of

MIN_BYTES = 2048
EAGER: dict[str, Any] = {"min_bytes": MIN_BYTES, "lowering": "eager", "device": "cpu"}
WAN, FLUX = SMALL_PIPELINES["wan"], SMALL_PIPELINES["flux"]
# The fixture of this name: a name, a budget and options -> a pipeline, and its budget.
Applied = Callable[..., tuple[Any, Budget]]


@cache
def plain(name: str) -> Any:
    """The pipeline as diffusers runs it.  No test changes it."""
    return small_pipeline(name)


def expected(name: str, seed: int = 0, **changed: Any) -> torch.Tensor:
    """What the plain pipeline generates."""
    return _generated(name, seed, **changed)


@cache  # which would take a seed that is given and one that is not for different arguments
def _generated(name: str, seed: int, **changed: Any) -> torch.Tensor:
    return SMALL_PIPELINES[name].generate(plain(name), seed, **changed)


def models(pipe: Any) -> dict[str, nn.Module]:
    return {name: m for name, m in pipe.components.items() if isinstance(m, nn.Module)}


def placed(pipe: Any) -> set[str]:
    """The components that have offloaded weights."""
    return {name for name, m in models(pipe).items() if any(isinstance(t, HostWeight) for t in leaves_of(m))}


def compiled(model: nn.Module) -> list[str]:
    """The names of the modules that run a program, or would without a hook."""
    found = []
    for name, module in model.named_modules():
        registry = module.__dict__.get("_diffusers_hook")
        refs = () if registry is None else registry._fn_refs
        calls = [module._compiled_call_impl, module.forward]
        calls += [call for ref in refs for call in (ref.forward, ref.original_forward)]
        if module._compiled_call_impl is not None or any(isinstance(c, CompiledForward) for c in calls):
            found.append(name)
    return found


def same_weights(pipe: Any, twin: Any) -> bool:
    """Bit for bit, of the same types."""
    return all(
        type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b)
        for name, model in models(twin).items()
        for a, b in zip(leaves_of(models(pipe)[name]), leaves_of(model), strict=True)
    )


def is_plain(pipe: Any) -> bool:
    """Whether nothing is left of ``apply``."""
    import diffusers

    of_diffusers = type(pipe) is getattr(diffusers, type(pipe).__name__) and budget_of(pipe) is None
    return of_diffusers and not placed(pipe) and not any(map(compiled, models(pipe).values()))


def held(budget: Budget) -> int:
    """Bytes of weights on the device."""
    return sum(arena.held for arena in {p.arena for p in budget.phases}) + sum(p.kept for p in budget.phases)


def bytes_read(phase: Phase) -> int:
    """Bytes of the offloaded weights that the programs of a phase read."""
    return sum({id(b): b.host.nbytes for program in programs(phase.root) for b in program.buffers.values()}.values())


def bytes_moved(phase: Phase) -> int:
    """Bytes that the steps of a phase have fetched."""
    return sum(m.moved_bytes + m.primed_bytes for program in programs(phase.root) for m in program.measurements)


def check_transfers(phase: Phase, generations: int) -> None:
    """Count the bytes of a phase against its plan, and against the weights that it reads."""
    if phase.name == "vae":  # runs eagerly, and each op fetches its weights
        fetched = placement_of(phase.root).store.counts.fetched_bytes
        decoder = sum(t.nbytes for t in phase.root.decoder.parameters() if isinstance(t, HostWeight))
        assert phase.calls == generations and fetched >= generations * decoder > 0
        return
    assert bytes_moved(phase) >= bytes_read(phase) > 0, phase.name
    (route,) = cycles(phase.root)
    last = route.measurements[-1]
    assert (last.moved_bytes, last.primed_bytes) == (route.cycle.plan.moved_bytes, 0), phase.name
    assert last.moved_bytes > 0 and route.jumps == 0, phase.name


class Allocator:
    """Stands for that of a card, and says what a test sets.

    ``activations``: bytes that a call takes; ``sizes``: those of some components, by name.
    """

    def __init__(self, budget: Budget, activations: int = 1000, **sizes: int) -> None:
        self.budget = budget
        self.activations = activations
        self.sizes = sizes
        budget._allocator = self

    def begin(self) -> None:
        pass

    def peak(self) -> int:
        taken = self.sizes.get(self.budget._last[-1].name, self.activations)
        return taken + held(self.budget)

    def reserved(self) -> int | None:
        return None

    def trim(self) -> None:
        pass


def flux_with_controlnet(components: dict[str, Any]) -> Any:
    """A FLUX pipeline of these components and a small ControlNet."""
    from diffusers import FluxControlNetModel, FluxControlNetPipeline

    torch.manual_seed(6)
    control = FluxControlNetModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    ).eval()
    for parameter in control.parameters():  # its last layers begin as zeros
        parameter.data = 0.05 * torch.randn(parameter.shape)
    pipe = FluxControlNetPipeline(**components, controlnet=control)
    pipe.set_progress_bar_config(disable=True)
    return pipe
