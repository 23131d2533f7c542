"""A FLUX pipeline with an image adapter, and one with a ControlNet that takes turns with the transformer in every step: their
weights share an arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pipelines import EAGER, FLUX, Applied, bytes_moved, expected, flux_with_controlnet, held
from small_pipelines import small_pipeline

from chunkflow_compile import ChunkflowError, apply, cycles, explain, programs, remove
from chunkflow_compile.catalog.sizes import build_model
from chunkflow_compile.pipeline.budget import Budget, budget_of

pytestmark = pytest.mark.usefixtures("no_grad")


def image_adapter(transformer: Any) -> dict[str, Any]:
    """Random weights of an image adapter, as its file has them."""
    config, width, rng = transformer.config, 64, torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return 0.5 * torch.randn(shape, generator=rng)

    text = config.joint_attention_dim
    attention: dict[str, torch.Tensor] = {}
    for i in range(config.num_layers):
        attention |= {f"{i}.to_k_ip.weight": random(width, text), f"{i}.to_v_ip.weight": random(width, text)}
        attention |= {f"{i}.to_k_ip.bias": random(width), f"{i}.to_v_ip.bias": random(width)}
    projection = {"proj.weight": random(4 * text, text), "proj.bias": random(4 * text)}
    projection |= {"norm.weight": torch.ones(text), "norm.bias": torch.zeros(text)}
    return {"image_proj": projection, "ip_adapter": attention}


@pytest.mark.long
def test_an_image_adapter(applied: Applied) -> None:
    """Its encoder comes with it, after ``apply``: it is placed by calling that again."""
    from PIL import Image
    from transformers import CLIPImageProcessor

    (pipe, budget), twin = applied("flux", "2MiB"), small_pipeline("flux")
    both = pipe, twin
    processor = CLIPImageProcessor(crop_size=32, size=32)
    vision = {"num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 16}
    for p in both:
        torch.manual_seed(0)
        encoder = build_model("CLIPVisionModelWithProjection", hidden_size=64, projection_dim=64, **vision)
        p.register_modules(image_encoder=encoder, feature_extractor=processor)
        p.transformer._load_ip_adapter_weights([image_adapter(p.transformer)])
    embeds = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(4))
    embedded = {"ip_adapter_image_embeds": [embeds], "negative_ip_adapter_image_embeds": [torch.zeros_like(embeds)]}
    image = {"ip_adapter_image": Image.new("RGB", (32, 32), (1, 200, 30))}
    with pytest.raises(ChunkflowError, match=r"pipe\.image_encoder was added after compile\(pipe\)"):
        FLUX.generate(pipe, **image)
    apply(pipe)
    for scale, given in ((1.0, embedded), (1.0, image), (0.3, image)):
        for p in both:
            p.set_ip_adapter_scale(scale)
        want = FLUX.generate(twin, **given)
        assert torch.equal(FLUX.generate(pipe, **given), want) and not torch.equal(want, expected("flux"))
    phase = budget.phase_of(pipe.image_encoder)
    assert phase.calls and bytes_moved(phase)
    for p in both:
        p.unload_ip_adapter()
    assert torch.equal(FLUX.generate(pipe), expected("flux"))


CALL = {"control_image": torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)), "num_inference_steps": 5}


class Controlled:
    """A pipeline with a ControlNet, applied; its plain twin; its budget; the phases of ControlNet and transformer."""

    def __init__(self, memory: str) -> None:
        self.pipe, self.twin = (flux_with_controlnet(small_pipeline("flux").components) for _ in range(2))
        apply(self.pipe, memory=memory, **EAGER)
        self.budget: Budget = budget_of(self.pipe)  # type: ignore[assignment]
        phases = {phase.name: phase for phase in self.budget.phases}
        self.control, self.transformer = phases["controlnet"], phases["transformer"]
        assert self.control.arena is self.transformer.arena

    def check(self, seed: int, **given: Any) -> None:
        given = {**CALL, **given}
        assert torch.equal(FLUX.generate(self.pipe, seed, **given), FLUX.generate(self.twin, seed, **given))

    def primed(self) -> Iterator[int]:
        """Bytes that were fetched before a call began, of each phase."""
        for phase in (self.control, self.transformer):
            yield sum(m.primed_bytes for program in programs(phase.root) for m in program.measurements)


@pytest.mark.long  # in make test, test_budgets.py has phases that share an arena
@pytest.mark.parametrize(("memory", "size"), [("2MiB", 32), ("1MiB", 48)])
def test_a_controlnet_and_its_transformer(memory: str, size: int, quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Controlled(memory)
    check_both_stay(found, monkeypatch)
    if memory == "2MiB":  # there is less to give way in 1 MiB
        check_out_of_memory(found)
    check_steps_without_the_controlnet(found, size)


def check_both_stay(found: Controlled, monkeypatch: pytest.MonkeyPatch) -> None:
    """With less room than their weights: neither gives way, no step fetches again what it had, the budget is kept.

    In 1 MiB even the least that their own plans take has no room side by side.
    """
    budget, control, transformer = found.budget, found.control, found.transformer
    assert control.streamed + transformer.streamed > budget.usable
    most, steps, count = list[int](), list[tuple[int, ...]](), Counter[str]()
    for model in (found.pipe.controlnet, found.pipe.transformer):
        model.register_forward_hook(lambda *_: most.append(held(budget)), always_call=True)
    found.pipe.controlnet.register_forward_pre_hook(lambda *_: steps.append((*found.primed(),)))
    for seed in range(3):
        found.check(seed)
    before = control.budget, transformer.budget
    steps.clear()
    free = budget._vacate

    def vacate(phases: Any) -> None:
        chosen = [*phases]
        count.update(p.name for p in chosen if p.arena.held)
        free(chosen)

    monkeypatch.setattr(budget, "_vacate", vacate)
    found.check(3)
    assert len(steps) == 5 and {*steps[2:]} == {steps[2]}, "only the first step is cold"
    assert len(most) == 40 and max(most) <= budget.usable
    assert count["controlnet"] + count["transformer"] <= 2, "for the encoders and the decoder"
    assert before == (control.budget, transformer.budget)
    (cycle,) = cycles(found.pipe.transformer)
    figures = {p.name: p for p in budget.figures().phases}
    predicted = [figures[name].predicted_s for name in ("controlnet", "transformer")]
    assert min(predicted) > 0 and sum(predicted) == pytest.approx(cycle.cycle.plan.predicted.step_s)


def check_out_of_memory(found: Controlled) -> None:
    """The call runs again on a smaller plan of both, and the next generation has the whole budget."""
    control, transformer = found.control, found.transformer
    on_device, fails, before = list[int](), [True], min(control.budget, transformer.budget)

    def check(*_: Any) -> None:
        on_device.append(transformer.arena.held)
        if fails:
            fails.pop()
            raise torch.OutOfMemoryError("no room")

    hook = found.pipe.transformer.norm_out.register_forward_pre_hook(check)
    found.check(4)
    hook.remove()
    assert max(on_device[1:]) <= 3 * on_device[0] // 4, "the larger of two shares, in which a cycle of both fits"
    assert (transformer.retries, control.retries) == (1, 0)
    assert control.budget == transformer.budget < before
    found.check(5)
    assert min(control.budget, transformer.budget) > on_device[0]
    assert "controlnet: shares memory on the device with" in str(explain(found.pipe, details=True))


def check_steps_without_the_controlnet(found: Controlled, size: int) -> None:
    """It is left out in the last steps of a generation, of other sizes too, and in all steps of another pipeline."""
    from diffusers import FluxPipeline

    budget, transformer = found.budget, found.transformer
    for seed, until in enumerate((0.5, 0.5, 1.0)):
        found.check(seed, control_guidance_end=until, **({"height": size, "width": size} if seed % 2 else {}))
        assert held(budget) <= budget.usable
    parts = {name: part for name, part in found.pipe.components.items() if name != "controlnet"}
    other = FluxPipeline(**parts)
    other.set_progress_bar_config(disable=True)
    apply(other)
    assert budget.phase_of(other.transformer) is transformer
    for seed in range(2):
        assert torch.equal(FLUX.generate(other, seed), expected("flux", seed))
    assert transformer.budget == budget.usable - transformer.activations + transformer.kept
    remove(found.pipe)
    assert found.control not in budget.phases and budget.most_bytes(transformer.arena) is None, "it has the arena alone"
    assert torch.equal(FLUX.generate(other, 2), expected("flux", 2))
