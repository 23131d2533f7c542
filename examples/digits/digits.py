"""A diffusers pipeline that draws handwritten digits: a transformer of 1.3 million parameters, trained by train.py.

pipe = DigitsPipeline.from_pretrained("examples/digits/model")
pipe([0, 1, 2]).images
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput

EDGE = 8  # pixels per edge of an image, as in scikit-learn's digits
PATCH = 2  # pixels per edge of the patch that is one token
GRID = EDGE // PATCH
NO_DIGIT = 10  # the class for the prediction without a condition, which guidance compares with
CLASSES = 16  # length of the class embedding; classes above NO_DIGIT are unused


def new_transformer() -> FluxTransformer2DModel:
    """The transformer with random weights, in float32."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=PATCH * PATCH,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=CLASSES,
        pooled_projection_dim=CLASSES,
        guidance_embeds=False,
        axes_dims_rope=(8, 12, 12),
    )


def pack(images: torch.Tensor) -> torch.Tensor:
    """Split images (count, EDGE, EDGE) into tokens (count, GRID * GRID, PATCH * PATCH)."""
    patches = images.reshape(-1, GRID, PATCH, GRID, PATCH).transpose(2, 3)
    return patches.reshape(-1, GRID * GRID, PATCH * PATCH)


def unpack(tokens: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`pack`."""
    patches = tokens.reshape(-1, GRID, GRID, PATCH, PATCH).transpose(2, 3)
    return patches.reshape(-1, EDGE, EDGE)


def predict_velocity(
    transformer: FluxTransformer2DModel, tokens: torch.Tensor, time: torch.Tensor, classes: torch.Tensor
) -> torch.Tensor:
    """Predict noise minus image for each token.

    ``tokens``: (count, GRID * GRID, PATCH * PATCH).  ``time``: (count,), 0 for an image and 1 for noise.  ``classes``:
    (count,) integers, a digit or NO_DIGIT.
    """
    embedding = 4 * torch.nn.functional.one_hot(classes, CLASSES).to(tokens.dtype)
    positions = torch.cartesian_prod(torch.arange(1), torch.arange(GRID), torch.arange(GRID)).float()
    return transformer(
        hidden_states=tokens,
        timestep=time.to(tokens.dtype),
        encoder_hidden_states=embedding[:, None],
        pooled_projections=embedding,
        img_ids=positions.to(tokens.device),
        txt_ids=torch.zeros(1, 3, device=tokens.device),
        return_dict=False,
    )[0]


class DigitsPipeline(DiffusionPipeline):
    """Class-conditional flow matching on images of 8 by 8 pixels, without a VAE or a text encoder."""

    model_cpu_offload_seq = "transformer"

    def __init__(self, transformer: FluxTransformer2DModel, scheduler: FlowMatchEulerDiscreteScheduler) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)

    @torch.no_grad()
    def __call__(
        self,
        digits: Sequence[int],
        num_inference_steps: int = 20,
        guidance_scale: float = 3.0,
        generator: torch.Generator | None = None,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        """Draw one image per digit.

        ``guidance_scale``: 1 for none.  ``generator``: draws the initial noise.  ``output_type``: "pil" for grayscale
        images, or "pt" for one tensor (count, EDGE, EDGE) in float32 with values from 0 to 1.
        """
        if not digits or not all(digit in range(10) for digit in digits):
            raise ValueError(f"digits must be one or more integers from 0 to 9, not {digits!r}.")
        if output_type not in ("pil", "pt"):
            raise ValueError(f'output_type must be "pil" or "pt", not {output_type!r}.')
        device, dtype = self._execution_device, self.transformer.dtype
        noise = torch.randn(
            len(digits), EDGE, EDGE, generator=generator, device=generator.device if generator else None
        )
        tokens = pack(noise).to(device)
        classes = torch.tensor([*digits, *[NO_DIGIT] * len(digits)], device=device)
        sigmas = [1 - i / num_inference_steps for i in range(num_inference_steps)]  # the scheduler adds the end, 0
        self.scheduler.set_timesteps(sigmas=sigmas, device=device)
        for time in self.progress_bar(self.scheduler.timesteps):
            both = torch.cat([tokens, tokens]).to(dtype)
            times = (time / self.scheduler.config.num_train_timesteps).expand(len(both))
            velocity = predict_velocity(self.transformer, both, times, classes).float()
            with_digit, without = velocity.chunk(2)
            velocity = without + guidance_scale * (with_digit - without)
            tokens = self.scheduler.step(velocity, time, tokens, return_dict=False)[0]
        images = (unpack(tokens).clamp(-1, 1) + 1).cpu() / 2
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(
            images=images if output_type == "pt" else self.numpy_to_pil(images.numpy()[..., None])
        )
