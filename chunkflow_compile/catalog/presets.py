"""Well-known diffusion transformers at their published sizes, traced without weights, for any Ulysses degree.

``configs`` contains the configurations and their sources.  torch is imported only when a model is built, because
``--help`` lists the names of presets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import DEFAULT_MIN_BYTES
from chunkflow_compile.units import whole_number

from .configs import CONFIGS
from .sizes import Config, Quantisation, Shape, Timestep

if TYPE_CHECKING:
    import torch
    from torch import nn

    from chunkflow_compile.passes.graph.traced import Traced


@dataclass(frozen=True, kw_only=True)
class OutputSizes:
    """The sizes of an output.  ``height``, ``width``: in pixels.  ``frames``: the number of frames, 1 for an image.
    ``batch``: the number of samples.  ``text``: the number of tokens in the prompt."""

    height: int
    width: int
    frames: int = 1
    batch: int = 1
    text: int = 512

    def __str__(self) -> str:
        """Return the size of a sample as text, such as "81 frames of 720x1280"."""
        return f"{f'{self.frames} frames of ' if self.frames > 1 else ''}{self.height}x{self.width}"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How a preset's transformer is called in a benchmark or for a plan.

    ``model``: the name of the preset.  ``sizes``: the sizes of the output.  ``timestep``, ``forwards``, ``branches``: see
    :class:`Preset`.
    """

    model: str
    sizes: OutputSizes
    timestep: Timestep
    forwards: int
    branches: int = 1

    def __str__(self) -> str:
        """Return the sizes and the form of the timestep as text, such as "81 frames of 704x1280, one timestep per
        token"."""
        return f"{self.sizes}, one timestep per {self.timestep}{self._branches_text}"

    @property
    def label(self) -> str:
        """The text that str() returns, but without the form of the timestep if there is one timestep per sample, as in
        most models."""
        return str(self) if self.timestep == "token" else f"{self.sizes}{self._branches_text}"

    @property
    def _branches_text(self) -> str:
        return ", both branches of guidance in each forward" if self.branches > 1 else ""

    @staticmethod
    def from_json(body: Mapping[str, Any]) -> Workload:
        """Return the workload from the result of ``dataclasses.asdict``."""
        return Workload(**{**body, "sizes": OutputSizes(**body["sizes"])})


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model at its published sizes, and how its diffusers pipeline calls it.

    ``sizes``: the sizes of the usual output.  ``forwards``: the number of calls of the transformer per denoising step.
    ``branches``: the number of branches of classifier-free guidance per call.  The batch size of a call is ``branches``
    times ``sizes.batch``.  If a pipeline calls the transformer once per branch, there are 2 forwards with 1 branch.  If
    it concatenates both branches into one batch, there is 1 forward with 2 branches.  If the model is guidance-distilled,
    there is 1 forward with 1 branch.  ``timestep``: whether a call passes one timestep per sample or one per token.
    ``spatial``: the number of pixels per latent element in each direction; for packed latents (FLUX), this includes the
    patches.  ``temporal``, ``latents``, ``last``: a video with ``temporal`` k + ``last[0]`` frames has ``latents`` k +
    ``last[1]`` latent frames.
    """

    name: str
    family: str
    config: Config
    sizes: OutputSizes
    forwards: int
    timestep: Timestep = "sample"
    spatial: int
    temporal: int = 1
    latents: int = 1
    last: tuple[int, int] = (1, 1)
    branches: int = 1

    @property
    def heads(self) -> int:
        """The number of attention heads in a block."""
        return int(self.config.get("num_attention_heads") or self.config["n_heads"])

    def workload(self, sizes: OutputSizes | None = None) -> Workload:
        """Return the workload of this model.  ``sizes``: the sizes of the output, by default the usual sizes."""
        return Workload(
            model=self.name,
            sizes=sizes or self.sizes,
            timestep=self.timestep,
            forwards=self.forwards,
            branches=self.branches,
        )

    def under(self, cfg_parallel: int) -> Preset:
        """Return the preset as it is called on one of ``cfg_parallel`` groups of ranks.  With one group per branch of
        guidance, each call computes one branch."""
        return self if cfg_parallel == 1 else replace(self, forwards=self.forwards * self.branches, branches=1)

    def shape(self, sizes: OutputSizes) -> Shape:
        """Return the shape of one call for an output of ``sizes``.

        Raises ChunkflowError if the VAE cannot decode to this number of pixels or frames.
        """
        for name, value, step in (("height", sizes.height, self.spatial), ("width", sizes.width, self.spatial)):
            if value < step or value % step:
                raise ChunkflowError(f"{self.name}: {name} {value} is not a multiple of {step}.")
        for name, value in (("batch", sizes.batch), ("text", sizes.text)):
            whole_number(value, f"{self.name}: {name}", 1)
        if self.temporal == 1 and sizes.frames != 1:
            raise ChunkflowError(f"{self.name} generates images: leave out frames.")
        last_frames, last_latents = self.last
        clips, rest = divmod(sizes.frames - last_frames, self.temporal)
        if clips < 0 or rest:
            raise ChunkflowError(f"{self.name}: frames {sizes.frames} is not {self.temporal} k + {last_frames}.")
        return Shape(
            batch=sizes.batch * self.branches,
            frames=clips * self.latents + last_latents,
            height=sizes.height // self.spatial,
            width=sizes.width // self.spatial,
            text=sizes.text,
            timestep=self.timestep,
        )

    def build(self, sizes: OutputSizes | None, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
        """Build the model in bfloat16 with random weights on ``device``, and the inputs of one call."""
        import torch

        from .weightless import default_dtype

        with default_dtype(torch.bfloat16), device:
            return self._model_and_inputs(sizes)

    def trace(
        self,
        degree: int = 1,
        sizes: OutputSizes | None = None,
        min_bytes: int = DEFAULT_MIN_BYTES,
        quantize: Quantisation | None = None,
        cfg_parallel: int = 1,
    ) -> Traced:
        """Trace the forward of one of ``degree`` ranks in bfloat16, in one process and without weights.

        ``quantize``: how the linear layers of the blocks are quantised, or None.  ``cfg_parallel``: 2 if other ranks
        compute the other branch of classifier-free guidance and the two exchange their predictions, otherwise 1.
        Raises ChunkflowError if there is a process group already, or if the degree does not divide the number of heads.
        """
        import torch

        from .weightless import trace_without_weights

        heads = self.heads
        if degree < 1 or heads % degree:
            raise ChunkflowError(
                f"{self.name} has {heads} attention heads: the Ulysses degree {degree} must divide them."
            )
        build = partial(self.under(cfg_parallel)._model_and_inputs, sizes, quantize)
        return trace_without_weights(build, degree, min_bytes, torch.bfloat16, cfg_parallel)

    def _model_and_inputs(
        self, sizes: OutputSizes | None, quantize: Quantisation | None = None
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Build the model in the default dtype on the default device, and the inputs in bfloat16."""
        import torch

        from .families import FAMILIES
        from .quantised import quantised

        shape = self.shape(sizes or self.sizes)
        model, inputs = FAMILIES[self.family].model_and_inputs(self.config, shape, torch.bfloat16)
        if quantize is not None:
            quantised(model, quantize)
        return model, inputs


PRESETS: Mapping[str, Preset] = {
    p.name: p
    for p in (
        Preset(
            name="wan2.2-ti2v-5b",
            family="wan",
            config=CONFIGS["wan2.2-ti2v-5b"],
            sizes=OutputSizes(height=704, width=1280, frames=121),
            forwards=2,
            timestep="token",  # expand_timesteps in model_index.json
            spatial=16,
            temporal=4,
        ),
        Preset(
            name="wan2.2-t2v-a14b",
            family="wan",
            config=CONFIGS["wan2.2-t2v-a14b"],
            sizes=OutputSizes(height=720, width=1280, frames=81),
            forwards=2,
            spatial=8,
            temporal=4,
        ),
        Preset(
            name="wan2.1-i2v-14b",
            family="wan-i2v",
            config=CONFIGS["wan2.1-i2v-14b"],
            sizes=OutputSizes(height=480, width=832, frames=81),
            forwards=2,
            spatial=8,
            temporal=4,
        ),
        Preset(
            name="wan2.1-t2v-14b",
            family="wan",
            config=CONFIGS["wan2.1-t2v-14b"],
            sizes=OutputSizes(height=720, width=1280, frames=81),
            forwards=2,
            spatial=8,
            temporal=4,
        ),
        Preset(
            name="wan2.1-t2v-1.3b",
            family="wan",
            config=CONFIGS["wan2.1-t2v-1.3b"],
            sizes=OutputSizes(height=480, width=832, frames=81),
            forwards=2,
            spatial=8,
            temporal=4,
        ),
        Preset(
            name="flux.1-dev",
            family="flux",
            config=CONFIGS["flux.1-dev"],
            sizes=OutputSizes(height=1024, width=1024),
            forwards=1,
            spatial=16,
        ),
        Preset(
            name="hunyuanvideo",
            family="hunyuanvideo",
            config=CONFIGS["hunyuanvideo"],
            sizes=OutputSizes(height=720, width=1280, frames=129, text=256),
            forwards=1,
            spatial=8,
            temporal=4,
        ),
        Preset(
            name="qwen-image",
            family="qwen-image",
            config=CONFIGS["qwen-image"],
            # prompts are not padded; 64 tokens are a prompt of about forty words
            sizes=OutputSizes(height=1024, width=1024, text=64),
            forwards=2,
            spatial=16,
        ),
        Preset(
            name="flux.2-dev",
            family="flux2",
            config=CONFIGS["flux.2-dev"],
            sizes=OutputSizes(height=1024, width=1024),
            forwards=1,
            spatial=16,
        ),
        Preset(
            name="flux.2-klein-4b",
            family="flux2",
            config=CONFIGS["flux.2-klein-4b"],
            sizes=OutputSizes(height=1024, width=1024),
            forwards=1,
            spatial=16,
        ),
        Preset(
            name="z-image-turbo",
            family="z-image",
            config=CONFIGS["z-image-turbo"],
            sizes=OutputSizes(height=1024, width=1024, text=64),  # as for Qwen-Image
            forwards=1,
            spatial=16,
        ),
        Preset(
            name="sd3.5-large",
            family="sd3",
            config=CONFIGS["sd3.5-large"],
            sizes=OutputSizes(height=1024, width=1024, text=333),  # 77 tokens from CLIP and 256 from T5
            forwards=1,
            spatial=16,
            branches=2,
        ),
        Preset(
            name="ltx-video",
            family="ltx",
            config=CONFIGS["ltx-video"],
            sizes=OutputSizes(height=512, width=704, frames=161, text=128),
            forwards=1,
            spatial=32,
            temporal=8,
            branches=2,
        ),
        Preset(
            name="hunyuanvideo-1.5",
            family="hunyuanvideo-1.5",
            config=CONFIGS["hunyuanvideo-1.5"],
            sizes=OutputSizes(height=480, width=848, frames=121, text=1000),  # prompts are padded to 1000 tokens
            forwards=2,
            spatial=16,
            temporal=4,
        ),
        Preset(
            name="longcat-image",
            family="longcat-image",
            config=CONFIGS["longcat-image"],
            sizes=OutputSizes(height=1024, width=1024),
            forwards=2,
            spatial=16,
        ),
        Preset(
            name="minimax-h3",
            family="minimax-h3",
            config=CONFIGS["minimax-h3"],
            sizes=OutputSizes(height=768, width=1344, frames=124, text=64),  # prompts are not padded, as for Qwen-Image
            forwards=1,
            spatial=32,
            temporal=17,
            latents=5,
            last=(5, 2),
        ),
        Preset(
            name="ltx-2",
            family="ltx-2",
            config=CONFIGS["ltx-2"],
            sizes=OutputSizes(height=512, width=768, frames=121, text=1024),
            forwards=1,
            spatial=32,
            temporal=8,
            branches=2,
        ),
    )
}


def preset(name: str) -> Preset:
    """Return the preset called ``name``.  Raises ChunkflowError if there is none."""
    if name not in PRESETS:
        raise ChunkflowError(f"There is no preset {name!r}: use one of {', '.join(PRESETS)}.")
    return PRESETS[name]


def weight_bytes(name: str, min_bytes: int = DEFAULT_MIN_BYTES) -> int:
    """Return the bytes of the weights in a preset that have at least ``min_bytes``, in bfloat16.  Raises ChunkflowError
    if there is no such preset."""
    import torch

    model, _ = preset(name).build(None, torch.device("meta"))
    return sum(p.nbytes for p in model.parameters() if p.nbytes >= min_bytes)
