"""Every transformer class of diffusers, with the tiny configurations of its own tests, against eager.

    git clone --depth 1 --branch v0.42.1 https://github.com/huggingface/diffusers
    python tests/diffusers_classes.py diffusers [--only Wan] [--way parts|whole|kind|repeated|group] [--out classes.md]

Ways: ``parts``, without fullgraph; ``whole``, with it; ``kind``, chunkflow_compile.compile; ``repeated``, offload and
diffusers' compile_repeated_blocks; ``group``, as parts, under diffusers' group offload, which then moves the weights.

A class counts if it runs that way with the backend aot_eager.  Then three calls with ChunkFlow, eager lowering, must be
bit-equal to eager, and weights must have moved (with the policy layerwise, if the fastest plan keeps a tiny model
resident).  The exit code is 1 if one of them is not.  The tests of diffusers need torchvision and parameterized.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from tqdm import tqdm

import chunkflow_compile

FOLDER = "tests/models/transformers"
# On a machine that computes so slowly that everything streams.
OPTIONS = {
    "min_bytes": 256,
    "chunk_bytes": 4096,
    "hardware": str(Path(__file__).with_name("slow_compute.json")),
    "lowering": "eager",
}
GOALS: tuple[dict[str, Any], ...] = ({"slowdown": 1.0}, {"policy": "layerwise"})
TIME_LIMIT_S = 900
GOOD = ("equal", "not with aot_eager", "not with eager", "needs ")


def configs(module: str) -> Iterator[Any]:
    """The configurations of one test module: objects with the class, its arguments and its inputs."""
    for name, cls in vars(importlib.import_module(module)).items():
        if isinstance(cls, type) and hasattr(cls, "get_init_dict") and cls.__module__ == module and "Config" in name:
            yield cls()


def outputs(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if hasattr(result, "values") else result
    return [t for v in values if v is not None for t in outputs(v)] if not isinstance(values, (int, float)) else []


def called(model: Any, config: Any, seed: int) -> list[torch.Tensor]:
    """One call.  Floating-point inputs depend on the seed."""
    inputs = config.get_dummy_inputs()
    generator = torch.Generator().manual_seed(seed)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2:
            inputs[name] = value + 0.1 * torch.randn(value.shape, generator=generator).to(value.dtype)
    torch.manual_seed(seed)
    return outputs(model(**inputs))


def compiled(model: Any, way: str, backend: str, **options: Any) -> Any:
    if way == "kind" and backend == "chunkflow":
        return chunkflow_compile.compile(model, **OPTIONS, **options)
    more: dict[str, Any] = {"options": {**OPTIONS, **options}} if backend == "chunkflow" else {}
    if way == "repeated":
        if backend == "chunkflow":
            chunkflow_compile.offload(model, min_bytes=OPTIONS["min_bytes"])
        model.compile_repeated_blocks(backend=backend, fullgraph=True, **more)
        return model
    if way == "group":
        cpu = torch.device("cpu")
        model.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
    return torch.compile(model, backend=backend, fullgraph=way == "whole", **more)


def check(config: Any, way: str) -> str:
    """What one class does; ``equal`` if all is well."""
    torch.manual_seed(0)
    try:
        model = config.model_class(**config.get_init_dict()).eval()
        twin = copy.deepcopy(model)
        expected = [called(twin, config, seed) for seed in range(3)]
    except Exception as error:  # noqa: BLE001  such as a class that this release has not
        return f"not with eager ({type(error).__name__})"
    try:
        called(compiled(copy.deepcopy(model), way, "aot_eager"), config, 0)
    except Exception as error:  # noqa: BLE001  whatever the class does there
        return f"not with aot_eager ({type(error).__name__})"
    for goal in GOALS:
        torch._dynamo.reset()
        model = copy.deepcopy(twin)
        ours = compiled(model, way, "chunkflow", **goal)
        found = [called(ours, config, seed) for seed in range(3)]
        if not all(torch.equal(a, b) for f, e in zip(found, expected, strict=True) for a, b in zip(f, e, strict=True)):
            return "differs"
        if way == "group":
            return "equal (group offload moves the weights)"
        moved = sum(m.moved_bytes + m.primed_bytes for p in chunkflow_compile.programs(model) for m in p.measurements)
        if moved:
            return f"equal ({moved} bytes moved{', layerwise' if 'policy' in goal else ''})"
    return "nothing moved"


def run_one(checkout: Path, file: str, way: str) -> list[tuple[str, str]]:
    """The classes of one test file, in a process of its own."""
    command = [sys.executable, __file__, str(checkout), "--way", way, "--file", file]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        return [(file, "takes too long")]
    rows = [line.split("\t")[1:] for line in done.stdout.splitlines() if line.startswith("class\t")]
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    missing = last.startswith(("ImportError", "ModuleNotFoundError", "NameError"))
    failed = [] if done.returncode == 0 else [(file, f"{'needs another package' if missing else 'failed'} ({last})")]
    return [(name, said) for name, said in rows] + failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of diffusers")
    parser.add_argument("--way", choices=("parts", "whole", "kind", "repeated", "group"), default="parts")
    parser.add_argument("--only", default="", help="of the test files")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.file:
        sys.path.insert(0, str(arguments.checkout))
        with torch.no_grad():
            for config in configs(f"{FOLDER}/{arguments.file}".replace("/", ".")):
                print("class", config.model_class.__name__, check(config, arguments.way), sep="\t", flush=True)
        return
    files = sorted(p.stem for p in (arguments.checkout / FOLDER).glob("test_*.py") if arguments.only.lower() in p.stem)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = pool.map(lambda file: run_one(arguments.checkout, file, arguments.way), files)
        rows = [row for found in tqdm(runs, total=len(files)) for row in found]
    bad = [row for row in rows if not row[1].startswith(GOOD)]
    equal = sum(said.startswith("equal") for _, said in rows)
    text = f"{tabulate(rows, headers=('class', arguments.way), tablefmt='github')}\n\n"
    text += f"{len(rows)} classes, {equal} equal, {len(bad)} not as they should be.\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
