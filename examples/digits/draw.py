"""Draw ten digits twice, with all weights on the device and with most of them streamed, and compare the two byte for byte.

python examples/digits/draw.py    # writes digits.png; on a GPU it also compares time and memory with group offload
"""

from __future__ import annotations

import argparse
import gc
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parents[1]))
from needs import need

if TYPE_CHECKING:
    import torch
    from digits import DigitsPipeline

FOLDER = Path(__file__).parent
STEPS = 20
SEED = 3  # of the initial noise
# Bytes of weights that the device may hold: 30 % of them, and 10 % more than the largest block.
BUDGET = "768KiB"
# Below the default of 1 MiB, because the largest weight of this model has 90 KiB.
SMALL = {"min_bytes": 1024, "chunk_bytes": "16KiB"}
COLUMNS = 80
_ZOOM = 8  # pixels of the picture per pixel of a digit


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Ten digits and what they took.

    ``images``: (10, 8, 8) in float32.  ``weights``, ``moved``: bytes of weights on the device, and bytes copied to it per
    step; None if they are unknown.  ``step_s``, ``peak``: seconds per step, and most bytes allocated on the GPU; None on a
    CPU, where they would describe the emulation.
    """

    name: str
    images: torch.Tensor
    weights: int | None = None
    moved: int | None = 0
    step_s: float | None = None
    peak: int | None = None

    def is_same(self, other: Drawing) -> bool:
        """Whether the two consist of the same bytes."""
        return self.images.numpy().tobytes() == other.images.numpy().tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("digits.png"), help="the picture, a PNG (default: digits.png)")
    parser.add_argument("--model", type=Path, default=FOLDER / "model", help="a folder that train.py has written")
    arguments = parser.parse_args()
    need("diffusers")
    import torch

    from chunkflow_compile import ChunkflowError
    from chunkflow_compile.report.record import check_writable

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ways = [plain, group_offload, streamed] if device == "cuda" else [plain, streamed]
    try:
        check_writable(arguments.out)
        drawings = [way(load(arguments.model), device) for way in ways]
    except ChunkflowError as error:
        raise SystemExit(f"draw.py: {error}") from error
    picture([drawings[0], drawings[-1]]).save(arguments.out, "PNG")
    print(report(drawings, arguments.out))
    if not drawings[-1].moved:
        raise SystemExit("draw.py: no weight was streamed, so the comparison proves nothing.")
    if not all(drawing.is_same(drawings[0]) for drawing in drawings):
        raise SystemExit(
            "draw.py: the images differ, which is a bug: please report it with the output of chunkflow doctor."
        )


def load(folder: Path) -> DigitsPipeline:
    """The pipeline in a folder; ends the program if the folder holds none, without a look at the network."""
    import torch
    from diffusers.utils.logging import disable_progress_bar
    from safetensors import SafetensorError

    from chunkflow_compile.catalog.quiet import quiet_diffusers, quiet_imports

    with quiet_imports():
        from digits import DigitsPipeline
    quiet_diffusers()
    disable_progress_bar()
    try:
        if not (folder / "model_index.json").is_file():
            raise FileNotFoundError("it has no model_index.json")
        pipe = DigitsPipeline.from_pretrained(folder, local_files_only=True).to(torch.bfloat16)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        cause = str(error).strip().split("\n")[0].rstrip(".")
        raise SystemExit(
            f"draw.py cannot load the model in {folder}: {cause}. Restore it with git checkout examples/digits/model, or "
            "train it with python examples/digits/train.py."
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def plain(pipe: DigitsPipeline, device: str) -> Drawing:
    """With all weights on the device."""
    return _draw("baseline", pipe.to(device), device, lambda: {"weights": _weight_bytes(pipe)})


def group_offload(pipe: DigitsPipeline, device: str) -> Drawing:
    """With diffusers' group offload, one block ahead on a stream of its own."""
    import torch

    pipe.transformer.enable_group_offload(
        onload_device=torch.device(device), offload_type="block_level", num_blocks_per_group=1, use_stream=True
    )
    return _draw("group offload", pipe, device, lambda: {"moved": None})


def streamed(pipe: DigitsPipeline, device: str) -> Drawing:
    """With most weights streamed by ChunkFlow, and with the kernels of eager mode, so that the images can be identical."""
    import chunkflow_compile

    # memory= would include the activations, which are larger than the weights of this small model
    chunkflow_compile.compile(pipe.transformer, device=device, weight_memory=BUDGET, lowering="eager", **SMALL)

    def figures() -> dict[str, int | None]:
        explained = chunkflow_compile.explain(pipe.transformer)
        never_streamed = _weight_bytes(pipe) - explained.weight_bytes
        return {"weights": explained.device_bytes + never_streamed, "moved": explained.moved_bytes}

    return _draw("ChunkFlow", pipe, device, figures)


def _draw(name: str, pipe: DigitsPipeline, device: str, figures: Callable[[], dict[str, int | None]]) -> Drawing:
    """Draw the digits, on a GPU twice, of which the second is measured.  ``figures``: known once they are drawn."""
    import torch

    gc.collect()  # the pipeline before this one
    images = _images(pipe)
    if device == "cpu":
        return Drawing(name=name, images=images, **figures())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    images = _images(pipe)  # which arrive on the CPU
    step_s = (time.perf_counter() - begun) / STEPS
    return Drawing(name=name, images=images, step_s=step_s, peak=torch.cuda.max_memory_allocated(), **figures())


def _images(pipe: DigitsPipeline) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(SEED)
    return pipe(range(10), num_inference_steps=STEPS, generator=generator, output_type="pt").images


def _weight_bytes(pipe: DigitsPipeline) -> int:
    return sum(parameter.nbytes for parameter in pipe.transformer.parameters())


def report(drawings: Sequence[Drawing], out: Path) -> str:
    """The figures, and below them their meaning, in lines of at most COLUMNS characters."""
    from tabulate import tabulate

    from chunkflow_compile.units import size

    first, mine, on_gpu = drawings[0], drawings[-1], drawings[0].peak is not None
    columns = {"": [drawing.name for drawing in drawings]}
    if on_gpu:
        columns["step"] = [f"{1e3 * (drawing.step_s or 0):.1f} ms" for drawing in drawings]
        columns["peak memory"] = [size(drawing.peak) for drawing in drawings]
    else:
        columns["weights on the device"] = [size(drawing.weights) for drawing in drawings]
    columns["copied per step"] = [size(drawing.moved) for drawing in drawings]
    columns["images"] = ["", *("identical" if each.is_same(first) else "DIFFERENT" for each in drawings[1:])]
    share = (mine.weights or 0) / (first.weights or 1)
    meaning = (
        "The same pipeline drew the same digits from the same noise each time. The baseline holds all weights on the device. "
        f"ChunkFlow was given {BUDGET} for weights: it kept {100 * share:.0f} % of the weights on the device, and copied the "
        "others from host memory in each step. "
    )
    if on_gpu:
        meaning += (
            "The peak includes activations and the workspaces of libraries, which are larger than the weights of this small "
            "model. The README gives the time and the memory of large ones."
        )
    else:
        meaning += (
            "There is no GPU here, so a part of host memory stands for the device, and times are not shown: they would say "
            "nothing about a GPU."
        )
    rows = f"The picture is {out}: the baseline above, ChunkFlow below."
    table = tabulate(columns, headers="keys", disable_numparse=True)
    meant = "\n".join(
        textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False) for text in (rows, meaning)
    )
    return f"Ten digits in {STEPS} steps on the {'GPU' if on_gpu else 'CPU'}\n\n{table}\n\n{meant}"


def picture(drawings: Sequence[Drawing]) -> Any:
    """A picture with one row of digits per drawing, in black on white, each row below its name."""
    import torch
    from PIL import Image, ImageDraw, ImageFont

    from chunkflow_compile.units import size

    images = torch.stack([torch.nn.functional.pad(drawing.images, (1, 1, 1, 1)) for drawing in drawings])
    inks = (255 * (1 - images)).round().byte().numpy()
    cell, title = _ZOOM * inks.shape[-1], 3 * _ZOOM
    canvas = Image.new("L", (inks.shape[1] * cell, len(drawings) * (title + cell)), 255)
    for top, drawing, digits in zip(range(0, canvas.height, title + cell), drawings, inks, strict=True):
        moved = f", {size(drawing.moved)} copied in each step" if drawing.moved else ""
        text = f"{drawing.name}: {size(drawing.weights)} of weights on the device{moved}"
        ImageDraw.Draw(canvas).text((_ZOOM, top + _ZOOM // 4), text, fill=0, font=ImageFont.load_default(2 * _ZOOM))
        for place, ink in enumerate(digits):
            large = Image.fromarray(ink).resize((cell, cell), Image.Resampling.BICUBIC)
            canvas.paste(large, (place * cell, top + title))
    return canvas


if __name__ == "__main__":
    main()
