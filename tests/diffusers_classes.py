"""Every transformer class of diffusers, with the tiny configurations of its own tests, against eager.

    git clone --depth 1 --branch v0.42.1 https://github.com/huggingface/diffusers
    python tests/diffusers_classes.py diffusers [--only Wan] [--ways whole,kind] [--out docs/models.jsonl]

Ways: ``whole``, one graph; ``kind``, chunkflow_compile.compile, and by kind also: ``ulysses``, on two gloo ranks (one
graph); ``slots``, with LoRA adapters loaded one after the other; ``torchao`` (int8), ``quanto`` (int8) and ``nf4``
(bitsandbytes), with quantised blocks; ``packed``, in bfloat16.  Not of the page: ``parts``, without fullgraph; ``repeated``,
offload and diffusers' compile_repeated_blocks; ``group``, as parts, under diffusers' group offload, which then moves the
weights; ``hoisted``, as whole, with hoist=True and another timestep in each call.

Three calls with ChunkFlow, eager lowering, must be bit-equal to eager (slots: within 1e-5), and weights must have moved (with
the policy layerwise, if the fastest plan keeps a tiny model resident).  Each trial has a process of its own, and a line of
``--out`` as soon as it ends; what that file has already is not tried again.  The exit code is 1 if one is bad: what ChunkFlow
does not refuse with a sentence must run if eager code and the backend aot_eager do.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import warm  # noqa: F401  what a trial imports, before it forks
from quantisers import nf4, quanto, torchao
from tqdm import tqdm

import chunkflow_compile
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.frontend.adapter_slots import Slotted
from chunkflow_compile.frontend.block_kinds import repeated_blocks
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights.host_weight import HostWeight
from chunkflow_compile.weights.leaves import leaves_of

FOLDER = "tests/models/transformers"
# On a machine that computes so slowly that everything streams.
OPTIONS = {
    "min_bytes": 256,
    "chunk_bytes": 4096,
    "hardware": str(Path(__file__).with_name("slow_compute.json")),
    "lowering": "eager",
}
# What configurations call the number of blocks.
LAYERS = ("num_layers", "num_single_layers", "depth", "n_layers", "num_mmdit_layers", "num_single_dit_layers")
GOALS: tuple[dict[str, Any], ...] = ({"slowdown": 1.0}, {"policy": "layerwise"})
QUANTISERS = {"torchao": torchao("Int8WeightOnlyConfig"), "quanto": quanto, "nf4": nf4(False)}
OF_THE_PAGE = ("kind", "whole", "ulysses", "slots", "packed", *QUANTISERS)
WAYS = (*OF_THE_PAGE, "parts", "repeated", "group", "hoisted")
TIME_LIMIT_S = 400
BAD = ("differs", "failed", "nothing moved", "too long")
# As in the tests of adapters: the model with slots adds in another order.
TOLERANCE = 1e-5


class NotTried(Exception):
    """There is nothing to try, and why."""


def configs(module: str) -> Iterator[Any]:
    """The configurations of one test module: objects with the class, its arguments and its inputs."""
    for name, cls in vars(importlib.import_module(module)).items():
        if isinstance(cls, type) and hasattr(cls, "get_init_dict") and cls.__module__ == module and "Config" in name:
            yield cls()


def built(config: Any) -> Any:
    """A model, with two blocks where the tests have one, if its code allows it: one alone is no kind."""
    given = config.get_init_dict()
    deeper = {name: 2 for name, value in given.items() if name in LAYERS and value == 1}
    for more in (deeper, {}):
        torch.manual_seed(0)
        model = config.model_class(**{**given, **more}).eval().requires_grad_(False)
        try:
            called(model, config, 0)
            break
        except Exception:
            if not more:
                raise
    return model


def outputs(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if hasattr(result, "values") else result
    return [t for v in values if v is not None for t in outputs(v)] if not isinstance(values, (int, float)) else []


def called(model: Any, config: Any, seed: int, dtype: torch.dtype | None = None, **more: Any) -> list[torch.Tensor]:
    """One call.  Floating-point inputs depend on the seed."""
    inputs = {**config.get_dummy_inputs(), **more}
    generator = torch.Generator().manual_seed(seed)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            noise = 0.1 * torch.randn(value.shape, generator=generator) if value.dim() > 2 else 0
            inputs[name] = (value + noise).to(dtype or value.dtype)
    torch.manual_seed(seed)
    return outputs(model(**inputs))


def options_for(model: Any) -> dict[str, Any]:
    """The options, in which a large weight has at most 64 chunks: planning takes time for each chunk."""
    largest = max(p.nbytes for p in model.parameters())
    return {**OPTIONS, "chunk_bytes": max(OPTIONS["chunk_bytes"], largest // 64 // 256 * 256)}


def compiled(model: Any, way: str, backend: str, **options: Any) -> Any:
    ours = backend == "chunkflow"
    options = {**options_for(model), **options}
    if ours and way in ("kind", "slots", "packed", *QUANTISERS):
        return chunkflow_compile.compile(model, **options, pack=way == "packed")
    more: dict[str, Any] = {"options": options} if ours else {}
    if way == "repeated":
        if ours:
            chunkflow_compile.offload(model, min_bytes=OPTIONS["min_bytes"])
        model.compile_repeated_blocks(backend=backend, fullgraph=True, **more)
        return model
    if way == "group":
        cpu = torch.device("cpu")
        model.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)
    if ours and way == "hoisted":
        more["options"] |= {"hoist": True}
    return torch.compile(model, backend=backend, fullgraph=way in ("whole", "ulysses", "hoisted"), **more)


def prepare(model: Any, way: str) -> None:
    """Change a model, and its twin, before anything is compiled."""
    if way == "packed":
        model.to(torch.bfloat16)
    if way == "ulysses":
        enable_ulysses(model, 2)
    for block in repeated_blocks(model).values() if way in QUANTISERS else ():
        QUANTISERS[way](block)


class Trial:
    """One configuration, one way."""

    def __init__(self, config: Any, way: str) -> None:
        self.config, self.way = config, way
        self.dtype = torch.bfloat16 if way == "packed" else None
        if way == "slots" and not hasattr(config.model_class, "load_lora_adapter"):
            raise NotTried("diffusers loads no adapters into it")
        self.plain = built(config)
        if way in QUANTISERS and not repeated_blocks(self.plain):
            raise NotTried("no repeated blocks to quantise")
        self.twin = self.made()
        self.wanted = [self.call(self.twin, seed) for seed in range(3)]

    def made(self) -> Any:
        """The model, prepared.  One that is prepared is not copied: hooks of diffusers would call the original."""
        model = copy.deepcopy(self.plain)
        prepare(model, self.way)
        return model

    def call(self, model: Any, seed: int) -> list[torch.Tensor]:
        more: dict[str, Any] = {}
        if self.way == "ulysses":
            more = {"return_dict": False}  # the hooks of diffusers gather tensors
        given = self.config.get_dummy_inputs()
        if self.way == "hoisted" and isinstance(given.get("timestep"), torch.Tensor):
            more = {"timestep": given["timestep"] + seed}
        return called(model, self.config, seed, self.dtype, **more)

    def same(self, model: Any, seed: int, wanted: list[torch.Tensor]) -> bool:
        pairs = zip(self.call(model, seed), wanted, strict=True)
        if self.way == "slots":
            return all(torch.allclose(a, b, rtol=0, atol=TOLERANCE, equal_nan=True) for a, b in pairs)
        return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)

    def with_ours(self) -> dict[str, Any]:
        for goal in GOALS:
            torch._dynamo.reset()
            model = self.made()
            if self.way == "slots":
                chunkflow_compile.enable_adapters(model, rank=8)
            ours = compiled(model, self.way, "chunkflow", **goal)
            calls = [*enumerate(self.wanted)]
            if self.way == "hoisted":  # those that compute their rows, and those that find them
                calls += reversed(calls)
            if not all(self.same(ours, seed, wanted) for seed, wanted in calls):
                return {"result": "differs"}
            if self.way == "slots" and (said := self.adapters(model)):
                return {"result": "differs", "why": said}
            moved = sum(
                m.moved_bytes + m.primed_bytes for p in chunkflow_compile.programs(model) for m in p.measurements
            )
            if self.way == "group" or (moved and self.streams(model)):
                return {"result": "equal", "moved": moved}
        return {"result": "nothing moved"}

    def streams(self, model: Any) -> bool:
        """Whether what this way is about is among the offloaded weights."""
        if self.way == "packed":
            return any(buffer.compressed for buffer in placement_of(model).store.buffers)  # type: ignore[union-attr]
        if self.way == "hoisted":
            return placement_of(model).store.counts.row_hits > 0  # type: ignore[union-attr]
        if self.way in QUANTISERS:
            return any(isinstance(t, HostWeight) and t.dtype in (torch.int8, torch.uint8) for t in leaves_of(model))
        return True

    def adapters(self, model: Any) -> str:
        """What is wrong with a call of two adapters, one after the other."""
        from adapters import Library
        from helpers import graphs

        twin, programs = self.made(), graphs()
        names = [name for name, module in model.named_modules() if isinstance(module, Slotted)]
        for number, rank in enumerate((4, 8)):
            state = Library(self.twin).adapter(number, rank, names)
            for m in (model, twin):
                m.load_lora_adapter({k: v.clone() for k, v in state.items()}, adapter_name=f"a{number}")
                m.set_adapters(f"a{number}")
            wanted = self.call(twin, 0)
            if all(map(torch.equal, wanted, self.wanted[0])):
                return "the adapter changes nothing"
            if not self.same(model, 0, wanted):
                return f"adapter {number}"
        return "" if graphs() == programs else "an adapter compiled the model again"


def said(error: BaseException) -> str:
    """The first sentences of the innermost error of ChunkFlow, or else of the error."""
    chain = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) is not None:
        chain.append(inner)
    chosen = next((e for e in reversed(chain) if isinstance(e, ChunkflowError)), error)
    lines = str(chosen).strip().splitlines() or [type(chosen).__name__]
    return lines[0] if isinstance(chosen, ChunkflowError) else f"{type(chosen).__name__}: {lines[0][:300]}"


def ours(error: BaseException | None) -> bool:
    """Whether ChunkFlow has refused."""
    while error is not None:
        if isinstance(error, ChunkflowError):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False


def tried(config: Any, way: str) -> dict[str, Any]:
    """What a class does."""
    try:
        trial = Trial(config, way)
    except NotTried as error:
        return {"result": "not tried", "why": str(error)}
    except ChunkflowError as error:
        return {"result": "refused", "why": str(error)}
    except Exception as error:  # noqa: BLE001  such as a class that this release has not
        return {"result": "not with eager", "why": said(error)}
    try:
        return trial.with_ours()
    except Exception as error:  # noqa: BLE001  it is what the page says
        found = {"result": "refused" if ours(error) else "failed", "why": said(error)}
        if found["result"] == "failed":
            traceback.print_exc()
    if way == "slots":
        return found
    try:
        torch._dynamo.reset()
        trial.call(compiled(trial.made(), way, "aot_eager"), 0)
    except Exception as error:  # noqa: BLE001
        return {"result": "not with aot_eager", "why": said(error)}
    return found


def in_process(pipe: Connection, config: Any, way: str, rank: int, meeting: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if way == "ulysses":
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    with torch.no_grad():
        pipe.send(tried(config, way))
    pipe.close()
    os._exit(0)


def in_processes(config: Any, way: str) -> dict[str, Any]:
    """The trial in a process of its own, or in two ranks: what the first one says that is not as it should be."""
    context = multiprocessing.get_context("fork")
    begin, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(1 + (way == "ulysses")):
            pipe, theirs = context.Pipe()
            process = context.Process(target=in_process, args=(theirs, config, way, rank, f"{folder}/meet"))
            process.start()
            theirs.close()
            running.append((pipe, process))
        for pipe, process in running:
            try:
                heard = pipe.poll(max(0, TIME_LIMIT_S - time.monotonic() + begin))
                found.append(pipe.recv() if heard else {"result": "too long"})
            except EOFError:
                process.join()
                found.append({"result": "failed", "why": f"it ended with exit code {process.exitcode}"})
        for _, process in running:
            process.kill()
            process.join()
    chosen = next((f for f in found if f["result"] != "equal"), found[0])
    return {**chosen, "seconds": round(time.monotonic() - begin, 1)}


def all_configs(checkout: Path, only: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The configurations by name, the first of each class under the name of the class; and what cannot be imported."""
    sys.path.insert(0, str(checkout))
    found, others, missing = dict[str, Any](), dict[str, Any](), []
    for path in sorted((checkout / FOLDER).glob("test_*.py")):
        if only.lower() not in path.stem:
            continue
        try:
            for config in configs(f"{FOLDER}/{path.stem}".replace("/", ".")):
                name = config.model_class.__name__
                into, key = (found, name) if name not in found else (others, f"{name} {type(config).__name__}")
                into[key] = config
        except Exception as error:  # noqa: BLE001  it needs another package, or another release
            missing.append({"class": path.stem, "way": "all", "result": "not tried", "why": said(error)})
    return {**found, **others}, missing


def without_configs(known: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The transformer classes of the installed release that the tests have no configuration of."""
    import diffusers

    for name in dir(diffusers.models.transformers):
        kind = getattr(diffusers.models.transformers, name)
        if isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin) and name not in known:
            yield {"class": name, "way": "all", "result": "not tried", "why": "no configuration in diffusers' tests"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of diffusers")
    parser.add_argument("--ways", default=",".join(OF_THE_PAGE), help=", ".join(WAYS))
    parser.add_argument("--only", default="", help="of the test files")
    parser.add_argument("--all", action="store_true", help="every configuration of a class, not only the first")
    parser.add_argument("--minutes", type=float, default=60, help="after which no trial begins")
    parser.add_argument("--out", type=Path, help="a file of one JSON object a line, which is continued")
    arguments = parser.parse_args()
    if unknown := {*arguments.ways.split(",")} - {*WAYS}:
        parser.error(f"{', '.join(sorted(unknown))}: the ways are {', '.join(WAYS)}.")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    out = arguments.out
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    done = {(row["class"], row["way"]) for row in rows}

    def add(row: dict[str, Any]) -> None:
        if (row["class"], row["way"]) not in done:
            rows.append(row)
            if out:
                with out.open("a") as file:
                    print(json.dumps(row), file=file)

    release = f"diffusers {version('diffusers')} on torch {torch.__version__}"
    add({"class": "diffusers", "way": "release", "result": release})
    found, missing = all_configs(arguments.checkout, arguments.only)
    for row in (*missing, *(without_configs(found) if not arguments.only else ())):
        add(row)
    names = [name for name in found if arguments.all or " " not in name]
    wanted = [(name, way) for way in arguments.ways.split(",") for name in names if (name, way) not in done]
    # As in the tests: of the objects of imports there are half a million, and compilation makes as many.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    end = time.monotonic() + 60 * arguments.minutes
    for name, way in tqdm(wanted):
        if time.monotonic() < end:
            row = {"class": name, "way": way, **in_processes(found[name], way)}
            add(row)
            if row["result"] in BAD:
                tqdm.write(str(row))
    for (way, result), count in sorted(Counter((row["way"], row["result"]) for row in rows).items()):
        print(f"{way:10} {result:20} {count}")
    sys.exit(any(row["result"] in BAD for row in rows))


if __name__ == "__main__":
    main()
