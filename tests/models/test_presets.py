"""Presets: traced at full width and length, without weights; the formulas count what the graph counts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from denoisers import DENOISERS, hunyuan15_transformer
from helpers import stack
from paper_formulas import dit_block_flops, double_block_flops, single_block_flops
from small_pipelines import SMALL_PIPELINES, SmallPipeline
from torch import nn

from chunkflow_compile.catalog.families import FAMILIES
from chunkflow_compile.catalog.presets import PRESETS, Preset
from chunkflow_compile.catalog.published import PUBLISHED
from chunkflow_compile.catalog.quantised import quantised
from chunkflow_compile.catalog.sizes import Shape
from chunkflow_compile.cli.main import main
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import choose_cut, make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.planning import Settings, make_plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.program.verify import verify


def two_of_each(name: str) -> Preset:
    """The preset with two blocks of each kind: enough for the figures of one block."""
    found = PRESETS[name]
    layers = {key: 2 for key in ("num_layers", "num_single_layers") if key in found.config}
    return replace(found, config={**found.config, **layers})


@cache
def traced(name: str, degree: int = 1) -> Cut:
    """Two blocks of each kind of a preset, cut into regions."""
    return make_cut(two_of_each(name).trace(degree))


# Billions of parameters, as the models' pages say or as their files hold.
PUBLISHED_SIZES = {
    "wan2.2-ti2v-5b": 5.0,
    "wan2.2-t2v-a14b": 14.29,
    "wan2.1-t2v-14b": 14.29,
    "wan2.1-t2v-1.3b": 1.42,
    "wan2.1-i2v-14b": 16.4,
    "flux.1-dev": 11.9,
    "flux.2-dev": 32.2,
    "flux.2-klein-4b": 3.88,
    "hunyuanvideo": 12.8,
    "qwen-image": 20.4,
    "z-image-turbo": 6.15,
    "sd3.5-large": 8.06,
    "ltx-video": 1.92,
    "hunyuanvideo-1.5": 8.3,
    "longcat-image": 6.27,  # 12.54 GB
    "minimax-h3": 33.1,
    "ltx-2": 18.9,
}
# Of the encoders of its pipeline, and of its VAE.
PUBLISHED_PARTS = {
    "wan2.2-ti2v-5b": (5.68, 0.705),
    "wan2.1-t2v-1.3b": (5.68, 0.127),
    "flux.2-dev": (22.9, 0.084),
    "flux.2-klein-4b": (4.02, 0.084),
    "z-image-turbo": (4.02, 0.084),
    "sd3.5-large": (0.124, 0.695, 4.76, 0.084),
    "ltx-video": (4.76, 0.419),
}


def billions(model: nn.Module) -> float:
    return sum(p.numel() for p in model.parameters()) / 1e9


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    model, _ = PRESETS[name].build(None, torch.device("meta"))
    assert billions(model) == pytest.approx(PUBLISHED_SIZES[name], rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED_PARTS)
def test_a_pipeline_has_the_published_encoders_and_vae(name: str) -> None:
    pytest.importorskip("transformers")
    found = PUBLISHED[name]
    with torch.device("meta"):
        vae, latents = found.vae_and_latents(found.transformer.sizes)
        parts = [*(encoder.model_and_inputs()[0] for encoder in found.encoders), vae]
    assert [billions(part) for part in parts] == pytest.approx(PUBLISHED_PARTS[name], rel=0.005)
    shape, sizes = latents["z"].shape, found.transformer.sizes
    assert shape[0] == 1 and shape[-2:] == (sizes.height // found.scale, sizes.width // found.scale)
    assert shape[1] == vae.config.get("z_dim", vae.config.get("latent_channels"))


# Bytes of a block's weights that its image or video tokens are multiplied with, if text, audio or the timestep reads many
# of the others.
READ_BY_TOKENS = {
    "sd3.5-large": 2 * 12 * 2432**2,
    "hunyuanvideo-1.5": 2 * 12 * 2048**2,
    "minimax-h3": 2 * 5376 * (4 * 7168 + 3 * 14336),
    "ltx-2": 2 * 16 * 4096**2,
}


ONE_BLOCK = {
    "sd3.5-large": "transformer_blocks.0",
    "ltx-video": "transformer_blocks.0",
    "longcat-image": "single_transformer_blocks.0",
    "flux.2-klein-4b": "single_transformer_blocks.0",
    "z-image-turbo": "layers.0",
    "hunyuanvideo-1.5": "transformer_blocks.0",
    "minimax-h3": "transformer_blocks.0",
    "ltx-2": "transformer_blocks.0",
}


@pytest.mark.parametrize(
    ("name", "block"),
    [pytest.param(*row, marks=[pytest.mark.long] * (i > 0)) for i, row in enumerate(ONE_BLOCK.items())],
)
def test_one_block_of_each_kind_of_a_preset(name: str, block: str) -> None:
    """Its call traces, and takes two FLOPs per parameter and token, and attention."""
    found, kinds = PRESETS[name], ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")
    model = replace(found, config={**found.config, **{key: 1 for key in kinds if key in found.config}})
    problem = make_cut(model.trace(1)).problem
    shape = found.shape(found.sizes)
    tokens = shape.batch * shape.frames * shape.height * shape.width
    costs = [r.cost for r in problem.regions if r.block == block]
    nbytes = READ_BY_TOKENS.get(name, block_bytes(problem, block))
    assert sum(c.attention for c in costs) > 0
    assert sum(c.flops - c.attention for c in costs) == pytest.approx(tokens * nbytes, rel=0.2)


def block_flops(problem: Problem, block: str) -> int:
    return sum(r.cost.flops for r in problem.regions if r.block == block)


def block_bytes(problem: Problem, block: str) -> int:
    return sum(w.nbytes for w in problem.weights if w.name.startswith(block + "."))


# Preset, block, formula, tokens, tokens of the text, width, width of the MLP.  The last block of Qwen-Image is another:
# nothing reads its text stream, and half of it is dead code.
BLOCKS: list[tuple[str, str, Callable[..., float], int, int, int, int]] = [
    ("wan2.2-ti2v-5b", "blocks.1", dit_block_flops, 880 * 31, 512, 3072, 14336),
    ("wan2.2-t2v-a14b", "blocks.1", dit_block_flops, 3600 * 21, 512, 5120, 13824),
    ("flux.1-dev", "transformer_blocks.1", double_block_flops, 4096, 512, 3072, 12288),
    ("flux.1-dev", "single_transformer_blocks.1", single_block_flops, 4096, 512, 3072, 12288),
    ("hunyuanvideo", "transformer_blocks.1", double_block_flops, 3600 * 33, 256, 3072, 12288),
    ("hunyuanvideo", "single_transformer_blocks.1", single_block_flops, 3600 * 33, 256, 3072, 12288),
    ("qwen-image", "transformer_blocks.0", double_block_flops, 4096, 64, 3072, 12288),
]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row is BLOCKS[0] else pytest.mark.long) for row in BLOCKS],
    ids=lambda row: f"{row[0]}-{row[1]}",
)
def test_a_block_s_flops_are_the_formula_s_within_2_percent(row: Any) -> None:
    name, block, formula, tokens, text, width, mlp = row
    expected = formula(batch=1, tokens=tokens, text=text, width=width, mlp=mlp)
    assert block_flops(traced(name).problem, block) == pytest.approx(expected, rel=0.02)


@pytest.mark.long
def test_ulysses_divides_the_flops_and_adds_four_collectives_a_block() -> None:
    whole, cut = traced("wan2.2-ti2v-5b").problem, traced("wan2.2-ti2v-5b", 4)
    split = cut.problem
    verify(rewrite(cut, place(split, load_profile("h100-pcie-x2"))))
    # Text keys and values of cross-attention are computed on every rank.
    assert block_flops(split, "blocks.1") == pytest.approx(block_flops(whole, "blocks.1") / 4, rel=0.03)
    kinds = [c.kind for c in split.collectives]
    assert kinds == ["all-to-all"] * 8 + ["all-gather"]
    tokens, width, bf16 = 880 * 31, 3072, 2
    # Three of four ranks' shares cross the link.
    assert split.collectives[0].nbytes == tokens * width * bf16 / 4 * 3 / 4
    assert block_bytes(split, "blocks.1") == block_bytes(whole, "blocks.1")


def test_a_preset_is_planned_and_verified_without_weights() -> None:
    cut = traced("wan2.2-ti2v-5b")
    assert block_bytes(cut.problem, "blocks.1") == pytest.approx(327e6, rel=0.005), "as in the paper"
    plan = place(cut.problem, load_profile("h100-pcie-x2"))
    verify(rewrite(cut, plan))
    # There is little compute before the embeddings to hide them.
    assert plan.moved_bytes > 0.85 * cut.problem.total_bytes
    assert {w.name for w in plan.streamed} >= {"blocks.0.ffn.net.2.weight", "blocks.1.attn2.to_out.0.weight"}


# --quantize: quantised bytes cross the link, and the FLOPs of the plain model run.
# Bytes of an element, scales of 128 or 64 elements included.
BYTES = {"int8": 1 + 4 / 128, "fp8": 1 + 4 / 128, "nf4": 0.5 + 4 / 64}


@cache
def quantised_problem(kind: str | None) -> Problem:
    torch._dynamo.reset()
    model = stack(1)
    if kind is not None:
        quantised(model, kind)  # type: ignore[arg-type]
    return make_cut(trace(model, {"x": torch.randn(4, 8)}, min_bytes=0), 0, frozenset()).problem


def linear_bytes(problem: Problem) -> int:
    names = (".weight", ".scale", ".absmax")
    return sum(w.nbytes for w in problem.weights if w.name.startswith("blocks.") and w.name.endswith(names))


@pytest.mark.parametrize("kind", ["nf4", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("int8", "fp8"))])
def test_quantised_bytes_and_plain_flops(kind: str) -> None:
    plain, narrow = quantised_problem(None), quantised_problem(kind)
    assert sum(r.cost.flops for r in narrow.regions) == sum(r.cost.flops for r in plain.regions)
    assert linear_bytes(narrow) == pytest.approx(linear_bytes(plain) / 4 * BYTES[kind], rel=0.1)


def test_bad_quantisations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ChunkflowError, match="use one of int8, fp8, nf4"):
        quantised(nn.Module(), "int3")  # type: ignore[arg-type]
    with pytest.raises(ChunkflowError, match="0: 9 elements are no multiple of 64"):
        quantised(nn.Sequential(nn.ModuleList([nn.Linear(3, 3)])), "nf4")
    assert main(["plan", "model.py:build", "--quantize", "int8"]) != 0
    assert "--quantize is for presets" in capsys.readouterr().err


@pytest.mark.long
def test_flux_has_as_few_regions_as_its_plans_need() -> None:
    """One a block where the copies hide or nothing streams; more where the link is the bound and memory is short."""
    source, machine = PRESETS["flux.1-dev"].trace(1), load_profile("h100-pcie-x2")
    finest = make_cut(source)
    for share, most in ((1.0, 60), (0.82, 60), (0.06, 140)):
        settings = Settings(hardware=machine, goal=Goal(memory=int(share * finest.problem.total_bytes)))
        cut = choose_cut(source, settings)
        steps = [make_plan(problem, settings).predicted.step_s for problem in (finest.problem, cut.problem)]
        assert len(cut.regions) <= most and steps[1] <= 1.005 * steps[0], (share, len(cut.regions), steps)
        assert len({region.info.key for region in cut.regions}) < 20, "equal blocks are lowered once"


SMALL = {**SMALL_PIPELINES, **DENOISERS}
# The guidance of LTX-2.0: that of both branches alone, for video and audio.
LTX2 = {
    f"{kind}{name}": scale
    for kind in ("", "audio_")
    for name, scale in (("guidance_scale", 4.0), ("stg_scale", 0.0), ("modality_scale", 1.0))
}
# Preset -> the small pipeline of its class, and its guidance as in the example of the model's card.
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "wan2.2-ti2v-5b": ("wan", {"guidance_scale": 5.0}),
    "wan2.2-t2v-a14b": ("wan2.2", {"guidance_scale": 4.0}),
    "wan2.1-i2v-14b": ("wan-i2v", {"guidance_scale": 5.0}),
    "wan2.1-t2v-14b": ("wan", {"guidance_scale": 5.0}),
    "wan2.1-t2v-1.3b": ("wan", {"guidance_scale": 6.0}),
    "flux.1-dev": ("flux", {"guidance_scale": 3.5}),
    "flux.2-dev": ("flux2", {"guidance_scale": 4.0}),
    "flux.2-klein-4b": ("flux2", {"guidance_scale": 1.0}),
    "hunyuanvideo": ("hunyuanvideo", {}),
    "qwen-image": ("qwen-image", {"true_cfg_scale": 4.0}),
    "z-image-turbo": ("z-image", {"guidance_scale": 0.0}),
    "sd3.5-large": ("sd3.5", {"guidance_scale": 3.5, "skip_guidance_layers": None}),
    "ltx-video": ("ltx", {}),
    "hunyuanvideo-1.5": ("hunyuanvideo-1.5", {}),
    "longcat-image": ("longcat-image", {"guidance_scale": 4.5}),
    "minimax-h3": ("minimax-h3", {}),
    "ltx-2": ("ltx-2", LTX2),
}


def pipeline_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A small pipeline of the class and configuration of a preset's, and what changes in its small call."""
    import diffusers

    small, changed = PIPELINES[name]
    pipe = SMALL[small].build()
    if name == "wan2.2-ti2v-5b":
        pipe.register_to_config(expand_timesteps=True)  # as in the model_index.json of its repository
    if name == "flux.2-dev":  # another class than klein's: one whose transformer embeds guidance
        transformer = type(pipe.transformer).from_config({**pipe.transformer.config, "guidance_embeds": True}).eval()
        parts = {"scheduler": pipe.scheduler, "vae": pipe.vae, "text_encoder": None, "tokenizer": None}
        pipe = diffusers.Flux2Pipeline(transformer=transformer, **parts)
        pipe.set_progress_bar_config(disable=True)
        text = torch.randn(1, 32, transformer.config["joint_attention_dim"])
        changed = {**changed, "prompt": None, "prompt_embeds": text}
    return pipe, changed


def calls_of(pipe: Any, small: SmallPipeline, changed: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of each call of the pipeline's transformers in one generation, by their names."""
    calls = list[dict[str, Any]]()

    def note(model: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        calls.append(inspect.signature(type(model).forward).bind(model, *args, **given).arguments)

    for model in (pipe.transformer, getattr(pipe, "transformer_2", None)):
        if model is not None:
            model.register_forward_pre_hook(note, with_kwargs=True)
    small.generate(pipe, **changed)
    return calls


def tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the arguments of a call.  A list of tensors, one per sample (Z-Image), counts as one tensor."""
    joined = {n: torch.stack(v) if n in ("x", "cap_feats") else v for n, v in inputs.items()}
    return {n: v for n, v in joined.items() if isinstance(v, torch.Tensor) and n != "encoder_hidden_states_mask"}


def shape_of(call: dict[str, Any], known: Preset) -> Shape:
    """The shape of a call of a small pipeline, with as many samples and timesteps as the preset has."""
    given = tensors(call)
    latent = given["x" if "x" in given else "hidden_states"].shape
    edge = round(latent[1] ** 0.5)  # of packed latents of an image; the small outputs are square
    frames, height, width = {3: (1, edge, edge), 4: (1, *latent[2:]), 5: latent[2:]}[len(latent)]
    if known.family == "minimax-h3":  # 124 frames of 64x64
        frames, height, width = 37, 2, 2
    if known.family in ("ltx", "ltx-2"):
        frames, height, width = (call[name] for name in ("num_frames", "height", "width"))
    if known.family in ("sd3", "z-image"):  # a shape is in patches
        height, width = height // 2, width // 2
    return Shape(
        batch=known.shape(known.sizes).batch,
        frames=frames,
        height=height,
        width=width,
        text=given["cap_feats" if "cap_feats" in given else "encoder_hidden_states"].shape[1],
        timestep=known.timestep,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_the_call_that_its_pipeline_makes(name: str) -> None:
    """As many forwards per step, of as many samples, with timesteps and latents of the same form."""
    known, small = PRESETS[name], SMALL[PIPELINES[name][0]]
    pipe, changed = pipeline_of(name)
    calls = calls_of(pipe, small, changed)
    assert len(calls) == known.forwards * small.call["num_inference_steps"], "calls per step"
    if name == "minimax-h3":
        del calls[0]  # in the first step, video and audio have the same timestep
    config = {"image_dim": 32, **pipe.transformer.config}
    mine = tensors(FAMILIES[known.family].inputs(config, shape_of(calls[0], known), None))
    for call in map(tensors, calls):
        assert {n: t.ndim for n, t in call.items()} == {n: t.ndim for n, t in mine.items()}
        shaped = ("x", "t") if "x" in mine else ("hidden_states", "timestep")
        if "audio_hidden_states" in mine:
            shaped += ("audio_hidden_states",)
        assert all(call[n].shape == mine[n].shape for n in shaped)


@pytest.mark.parametrize("image", [False, True])
def test_the_traced_forward_of_hunyuanvideo_1_5_is_its_own(image: bool) -> None:
    """Bit for bit, with tokens of both texts masked, as many in each sample as the mask says."""
    torch.manual_seed(0)
    model = hunyuan15_transformer()
    family, size = FAMILIES["hunyuanvideo-1.5"], Shape(batch=2, frames=2, height=4, width=4, text=8)
    inputs = family.inputs(model.config, size, None)
    for name, valid in (("encoder_attention_mask", (8, 3)), ("encoder_attention_mask_2", (0, 5))):
        inputs[name] = (torch.arange(inputs[name].shape[1]) < torch.tensor(valid)[:, None]).float()
    for name in ("encoder_hidden_states_2", "image_embeds") if image else ("encoder_hidden_states_2",):
        inputs[name] = torch.randn_like(inputs[name])
    with torch.no_grad():
        (wanted,) = model(**inputs)
        assert family.prepare is not None
        family.prepare(model)
        assert torch.equal(model(**inputs)[0], wanted)


def test_the_frames_of_a_video_in_clips() -> None:
    """MiniMax-H3's VAE makes 5 latent frames of 17, and 2 of the last 5."""
    known = PRESETS["minimax-h3"]
    assert [known.shape(replace(known.sizes, frames=n)).frames for n in (5, 22, 124)] == [2, 7, 37]
    for frames in (1, 121):
        with pytest.raises(ChunkflowError, match=f"frames {frames} is not 17 k \\+ 5"):
            known.shape(replace(known.sizes, frames=frames))


def test_a_call_has_the_samples_of_all_its_branches() -> None:
    """Both branches of SD3.5 are one call; with CFG parallelism they are two, as those of Wan always are."""
    sd, wan = PRESETS["sd3.5-large"], PRESETS["wan2.2-ti2v-5b"]
    sizes = [replace(model.sizes, batch=3) for model in (sd, wan)]
    assert [model.shape(size).batch for model, size in zip((sd, wan), sizes, strict=True)] == [6, 3]
    assert [model.under(2).shape(size).batch for model, size in zip((sd, wan), sizes, strict=True)] == [3, 3]
    assert [(m.forwards, m.under(2).forwards) for m in (sd, wan)] == [(1, 2), (2, 2)]
    _, inputs = two_of_each("sd3.5-large").build(sizes[0], torch.device("meta"))
    assert inputs["hidden_states"].shape[0] == inputs["timestep"].shape[0] == 6
