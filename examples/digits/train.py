"""Train the transformer that draws digits: writes model/, loss.csv and loss.png beside this file.

python examples/digits/train.py    # needs scikit-learn, which ships 1,797 images of digits, and matplotlib

The committed model is the result of the defaults below, seed 0 included, with torch 2.13.0 on one core of an Intel Xeon that
shared its caches with other work: 11 minutes.  Other machines and releases of torch round differently, so the same script
gives slightly different weights there.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parents[1]))
from needs import need

if TYPE_CHECKING:
    from digits import DigitsPipeline

BATCH = 64
PEAK_RATE = 2e-3  # of a one-cycle schedule
EMA = 0.995  # the saved weights are a moving average of the trained ones
WITHOUT_DIGIT = 0.1  # share of the images that are trained without their digit, which guidance needs
EVERY = 100  # steps per mean loss that is reported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps (default: 4000)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the batches and the noise (default: 0)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the result")
    arguments = parser.parse_args()
    need("diffusers", "sklearn", "matplotlib")
    if arguments.steps < EVERY:
        raise SystemExit(f"train.py needs at least --steps {EVERY}, which is one point of the loss curve.")
    try:
        (arguments.out / "model").mkdir(parents=True, exist_ok=True)
        (arguments.out / "loss.csv").open("a").close()
    except OSError as error:
        raise SystemExit(f"train.py cannot write to {arguments.out}: {error.strerror}. Give another --out.") from error
    save(*train(arguments.steps, arguments.seed), arguments.out)


def train(steps: int, seed: int) -> tuple[DigitsPipeline, list[float]]:
    """Train by flow matching on one thread; return the pipeline, in bfloat16, and the mean loss of each EVERY steps."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler
    from digits import NO_DIGIT, DigitsPipeline, new_transformer, pack, predict_velocity
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32) / 8 - 1, torch.tensor(data.target)
    transformer = new_transformer()
    optimizer = torch.optim.AdamW(transformer.parameters(), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, steps)
    average = {name: value.clone() for name, value in transformer.state_dict().items()}
    losses, means = list[float](), list[float]()
    for step in range(steps):
        chosen = torch.randint(len(images), (BATCH,))
        image = pack(images[chosen])
        digit = torch.where(torch.rand(BATCH) < WITHOUT_DIGIT, NO_DIGIT, labels[chosen])
        time = torch.sigmoid(torch.randn(BATCH))
        noise = torch.randn_like(image)
        mixed = torch.lerp(image, noise, time[:, None, None])
        loss = (predict_velocity(transformer, mixed, time, digit) - (noise - image)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        torch._foreach_lerp_([*average.values()], [*transformer.state_dict().values()], 1 - EMA)
        losses.append(loss.item())
        if len(losses) == EVERY:
            means.append(sum(losses) / EVERY)
            losses.clear()
            print(f"step {step + 1} of {steps}: loss {means[-1]:.3f}", flush=True)
    transformer.load_state_dict(average)
    return DigitsPipeline(transformer.to(torch.bfloat16).eval(), FlowMatchEulerDiscreteScheduler()), means


def save(pipe: DigitsPipeline, means: list[float], out: Path) -> None:
    """Write the pipeline, and its loss curve as numbers and as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pipe.save_pretrained(out / "model")
    points = [(EVERY * (place + 1), mean) for place, mean in enumerate(means)]
    with (out / "loss.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [("step", f"mean loss of {EVERY} steps"), *((step, f"{mean:.4f}") for step, mean in points)]
        )
    figure = Figure(figsize=(6, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    axes.plot(*zip(*points, strict=True))
    axes.set(xlabel="step", ylabel=f"mean loss of {EVERY} steps", ylim=(0, None))
    axes.grid(alpha=0.3)
    figure.savefig(out / "loss.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
