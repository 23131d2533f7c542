"""The parts of examples/serve_ray.py that need no Ray: requests, the files of their results, and the settings."""

from __future__ import annotations

import argparse
import base64
import inspect
import io
import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chunkflow_compile import use_adapters
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.servers.settings import MEMORY, OPTIONS, settings_from

# The content types of answers that are files.
MEDIA = {"png": "image/png", "mp4": "video/mp4"}
# Options for pipelines whose weights are a few KiB.
TINY = {"min_bytes": 2048, "lowering": "eager"}
# Steps of each generation of the warm-up.
_WARM_STEPS = 2
# Fields of a request that are no arguments of the pipeline, or that it calls otherwise.
_OWN = {"steps", "seed", "adapter", "format", "fps"}


class Request(BaseModel):
    """One generation.  A field that is left out has the pipeline's default.

    ``guidance_scale``: the pipeline's argument of this name; ``true_cfg_scale``: classifier-free guidance in pipelines where
    ``guidance_scale`` is an input of the model, such as FLUX.1 and Qwen-Image.  ``num_frames``: frames of a video.
    ``adapter``: the name of a LoRA that the server was started with.  ``format``: "json" answers with all frames as PNGs in
    base64, "png" and "mp4" with a file.  ``fps``: frames per second of an mp4 file.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    prompt: str = Field(min_length=1)
    negative_prompt: str | None = None
    guidance_scale: float | None = Field(None, ge=0, le=100)
    true_cfg_scale: float | None = Field(None, ge=0, le=100)
    height: int = Field(512, ge=16, le=4096, multiple_of=16)
    width: int = Field(512, ge=16, le=4096, multiple_of=16)
    num_frames: int | None = Field(None, ge=1, le=1024)
    steps: int = Field(28, ge=1, le=1000)
    seed: int = Field(0, ge=0, lt=2**63)
    adapter: str | None = None
    format: Literal["json", "png", "mp4"] = "json"
    fps: int = Field(16, ge=1, le=120)

    def call(self) -> dict[str, Any]:
        """The arguments of the pipeline's call that have the same names."""
        return self.model_dump(exclude=_OWN, exclude_none=True)

    def sizes(self) -> dict[str, Any]:
        """The arguments of ``chunkflow_compile.admit``."""
        return {**self.model_dump(exclude={*_OWN, "prompt"}, exclude_none=True), "num_inference_steps": self.steps}


def build(arguments: argparse.Namespace) -> Any:
    """The pipeline with its adapters, its weights in host memory."""
    if arguments.tiny:
        from small_pipelines import small_pipeline

        pipe = small_pipeline(arguments.model)
    else:
        from diffusers import DiffusionPipeline

        pipe = DiffusionPipeline.from_pretrained(arguments.model, torch_dtype=torch.bfloat16)
    for name, path in arguments.adapter.items():
        pipe.load_lora_weights(path, adapter_name=name)
    return pipe


def generate(pipe: Any, request: Request) -> list[bytes]:
    """The files of a generation: a PNG per image or frame, or one mp4.

    Raises ValueError, before it generates, for an argument or a format that the pipeline does not support.
    """
    call, known = request.call(), inspect.signature(pipe.__call__).parameters
    if unknown := call.keys() - known:
        raise ValueError(f"{type(pipe).__name__} has no argument {', '.join(sorted(unknown))}: leave it out.")
    _check_format(type(pipe).__name__, request, video="num_frames" in known)
    noise = torch.Generator().manual_seed(request.seed)
    with use_adapters(pipe, request.adapter) if hasattr(pipe, "set_adapters") else nullcontext():
        found = pipe(**call, num_inference_steps=request.steps, generator=noise, output_type="pil")[0]
    frames = found[0] if isinstance(found[0], list) else found
    return [_mp4(frames, request.fps)] if request.format == "mp4" else [_png(frame) for frame in frames]


def _check_format(pipeline: str, request: Request, video: bool) -> None:
    if request.format == "mp4" and not video:
        raise ValueError(f"{pipeline} generates images, and mp4 is for videos: use format 'png' or 'json'.")
    if request.format == "mp4" and not (find_spec("imageio") and find_spec("imageio_ffmpeg")):
        raise ValueError(
            "This server cannot write mp4 files: install imageio and imageio-ffmpeg there, or use format 'json'."
        )
    if request.format == "png" and video and request.num_frames != 1:
        raise ValueError(f"{pipeline} generates videos, and png is for one image: use format 'mp4' or 'json'.")


def _png(frame: Any) -> bytes:
    file = io.BytesIO()
    frame.save(file, "PNG")
    return file.getvalue()


def _mp4(frames: list[Any], fps: int) -> bytes:
    from diffusers.utils import export_to_video

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "video.mp4")
        export_to_video(frames, str(path), fps=fps)
        return path.read_bytes()


def as_json(files: list[bytes]) -> list[str]:
    """The files in base64."""
    return [base64.b64encode(file).decode() for file in files]


def warm_up(arguments: argparse.Namespace) -> list[Request]:
    """The requests after which a replica is ready: each size twice, without and with each adapter.

    The first generation of a size measures its activations, and the next one runs with the plan made from them.
    """
    adapters = (None, *arguments.adapter)
    return [size.model_copy(update={"adapter": a}) for size in arguments.warm_up for a in adapters for _ in range(2)]


def _warm_size(text: str) -> Request:
    found = re.fullmatch(r"(\d+)x(\d+)(?:x(\d+))?", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: give HEIGHTxWIDTH, or HEIGHTxWIDTHxFRAMES for a video"
        )
    height, width, frames = (part and int(part) for part in found.groups())
    try:
        return Request(prompt="a warm-up", height=height, width=width, num_frames=frames, steps=_WARM_STEPS)
    except ValidationError as error:
        first = error.errors()[0]
        raise argparse.ArgumentTypeError(f"{text!r}: {first['loc'][0]}: {first['msg']}") from None


def _adapter(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


def parse(
    description: str, given: list[str] | None = None, environ: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """The settings of the server.  Flags override ``CHUNKFLOW_MEMORY`` and ``CHUNKFLOW_OPTIONS``.

    Ends the process with a sentence if one of them is invalid.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a pipeline on the hub or in a folder; with --tiny a name in small_pipelines.py")
    parser.add_argument("--tiny", action="store_true", help="a small random pipeline, without a GPU")
    memory = (
        "GPU memory for weights and activations, such as 24GiB (default: $CHUNKFLOW_MEMORY, or else the free memory)"
    )
    parser.add_argument("--memory", help=memory)
    options = 'other options in JSON, such as \'{"pack": "auto"}\' (default: $CHUNKFLOW_OPTIONS)'
    parser.add_argument("--options", metavar="JSON", help=options)
    parser.add_argument("--ulysses", type=int, default=1, metavar="P", help="ranks per replica")
    parser.add_argument("--replicas", type=int, default=1, metavar="N")
    lora = "a LoRA; may be repeated"
    parser.add_argument("--adapter", type=_adapter, action="append", default=[], metavar="NAME=PATH", help=lora)
    saved = "a file from torch.compiler.save_cache_artifacts(); may be repeated"
    parser.add_argument("--warm", action="append", default=[], metavar="FILE", help=saved)
    size = "HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES to generate before a replica is ready; may be repeated"
    parser.add_argument("--warm-up", type=_warm_size, action="append", default=[], metavar="SIZE", help=size)
    parser.add_argument("--seconds", type=float, metavar="S", help="longest request, by its predicted time")
    parser.add_argument("--queue", type=int, default=100, metavar="N", help="maximum number of waiting requests")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    found = parser.parse_args(given)
    found.adapter = dict(found.adapter)
    flags = {name: value for name, value in ((MEMORY, found.memory), (OPTIONS, found.options)) if value is not None}
    chosen = {**environ, **flags}
    found.memory = chosen.get(MEMORY, "").strip() or ("1MiB" if found.tiny else None)
    try:
        settings = settings_from({**chosen, MEMORY: found.memory or "1GiB"})  # options are checked without memory, too
    except ChunkflowError as error:
        parser.error(str(error))
    assert settings is not None
    found.options = {**(TINY if found.tiny else {}), **settings.options}
    if settings.peers:
        found.options["peers"] = settings.peers
    return found
