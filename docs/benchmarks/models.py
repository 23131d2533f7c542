"""The page of models, from the trials in models.jsonl: what each transformer class of diffusers does with ChunkFlow.

    python docs/benchmarks/models.py [--trials docs/models.jsonl] [--page docs/models.md]

tests/diffusers_classes.py writes the trials; the columns of servers are what tests of their plug-ins run, see SERVERS.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent
Row = Mapping[str, Any]

# Column -> the ways of trying in it, and what marks each if it is equal.
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "whole": {"whole": "="},
    "by kind": {"kind": "="},
    "Ulysses": {"ulysses": "="},
    "slots": {"slots": "="},
    "packed": {"packed": "="},
    "quantised": {"torchao": "t", "quanto": "q", "nf4": "n"},
}
# Plug-in -> class -> mark -> the test that runs it, in tests/servers.  The classes are the server's own.
SERVERS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "sglang": {
        name: {"=": "test_a_transformer_streams_within_memory", "U": "test_two_ranks_stream_with_ulysses"}
        | ({"L": "test_an_adapter_that_the_server_loads"} if name.startswith("Wan") else {})
        for name in (
            "WanTransformer3DModel",
            "FluxTransformer2DModel",
            "QwenImageTransformer2DModel",
            "HunyuanVideoTransformer3DModel",
        )
    },
    "vllm_omni": {
        name: {"=": "test_transformers_of_the_server_stream"}
        | ({} if name.startswith("Flux") else {"U": "test_transformers_stream_on_two_ranks_of_ulysses"})
        | ({"L": "test_a_lora_of_the_server_is_applied_and_streams"} if name.startswith("Qwen") else {})
        for name in (
            "WanTransformer3DModel",
            "FluxTransformer2DModel",
            "QwenImageTransformer2DModel",
            "HunyuanVideo15Transformer3DModel",
        )
    },
}
NOT_TRIED = ("not tried", "not with eager")

PAGE = """\
# Models

Each transformer class of {release}, with the tiny random models of diffusers' own tests, on a CPU: three calls must equal
eager ones bit for bit, and weights must have streamed. Regions are not compiled (`lowering="eager"`), because compiled ones
round differently; `tests/models/test_models.py` runs four families through Inductor, within 2e-5 of eager. No full-size
model and no GPU is in this table. `make models` tries again and writes this page.

* *whole*: one graph. *by kind*: `chunkflow_compile.compile`, with two blocks or more. *Ulysses*: one graph on two ranks. Also
  by kind: *slots*, two LoRA adapters in turn without another compilation, within 1e-5; *packed*, in bfloat16; *quantised*,
  blocks by torchao (t) and quanto (q), both int8, and bitsandbytes nf4 (n).
* *SGLang*, *vLLM-Omni*: the server's own class of this name, in the tests of the plug-in; U: also on two ranks of Ulysses; L:
  also with an adapter of the server.
* `=` is equal, a number is why not, and an empty cell is not tried.

{table}

{reasons}

{others}
An earlier run, without a table, tried 70 configurations of these classes: 64 ran eagerly, and all of these with ChunkFlow
without `fullgraph`, bit-equal.

## Whole pipelines

Tried with tiny random models and equal to the plain pipeline: Wan 2.1, Wan 2.2 with two experts, Wan image-to-video, FLUX.1,
FLUX.2, Qwen-Image and its edit form, HunyuanVideo, LTX, Z-Image, SD3 and SD3.5, each with every component streamed, with
classifier-free guidance, callbacks, several sizes and prompts; bit-equal with eager lowering, and within 5e-6 with
Inductor, at one size. Also: LoRA loaded before and after compilation, scaled, fused, unloaded; ControlNet, IP-adapter,
attention backends, step caches; float16, autocast, inference mode; saving and loading.
"""


def reason(row: Row) -> str:
    """Why a class does not run, without its name."""
    if row["result"] == "not with eager":
        return "diffusers' own model fails so, without ChunkFlow"
    said = " ".join(str(row.get("why", row["result"])).replace(class_of(row), "model").split())
    if row["result"] == "not with aot_eager":
        return f"`torch.compile` fails so with its backend `aot_eager`, too ({said.partition(':')[0]})"
    return said.partition(". ")[0].rstrip(".")


def class_of(row: Row) -> str:
    """A further configuration of a class has a name after that of the class."""
    name: str = row["class"].split()[0]
    return name


class Cells:
    """The cells of the table, and the reasons that they refer to, in the order in which they come up."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.reasons: list[str] = []

    def of_trials(self, name: str, ways: Mapping[str, str]) -> str:
        """Of one class, all of its configurations: the marks of the ways that are equal, else why not."""
        marks, why = "", ""
        for way, mark in ways.items():
            found = [r for r in self._rows if class_of(r) == name and r["way"] == way and r["result"] != "not tried"]
            found = [r for r in found if r["result"] != "not with eager"] or found
            bad = next((r for r in found if r["result"] != "equal"), None)
            marks += mark if found and bad is None else ""
            why += "" if bad is None or (said := self._number(reason(bad))) in why else said
        return marks + why

    def _number(self, said: str) -> str:
        if said not in self.reasons:
            self.reasons.append(said)
        return str(self.reasons.index(said) + 1)


def table(names: Sequence[str], cells: Cells) -> str:
    """Without spaces, so that a row is short."""
    heads = ["class", *COLUMNS, "SGLang", "vLLM-Omni"]
    lines = [heads, ["-"] * len(heads)]
    for name in names:
        served = ["".join(classes.get(name, {})) for classes in SERVERS.values()]
        lines.append([name, *(cells.of_trials(name, ways) for ways in COLUMNS.values()), *served])
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def page(rows: Sequence[Row]) -> str:
    """The page of these trials."""
    release = next((row["result"] for row in rows if row["way"] == "release"), "diffusers")
    tried = [row for row in rows if row["way"] not in ("all", "release") and row["result"] not in NOT_TRIED]
    some = {class_of(row) for row in tried}
    others = sorted({class_of(row) for row in rows if row["way"] != "release"} - some)
    cells = Cells(rows)
    drawn = table(sorted(some), cells)
    reasons = "\n".join(f"{number}. {said}" for number, said in enumerate(cells.reasons, 1))
    said = (
        f"In no way tried, for want of a configuration that runs eagerly here: {', '.join(others)}.\n" if others else ""
    )
    return PAGE.format(release=release, table=drawn, reasons=reasons, others=said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=Path, default=DOCS / "models.jsonl")
    parser.add_argument("--page", type=Path, default=DOCS / "models.md")
    arguments = parser.parse_args()
    try:
        lines = arguments.trials.read_text().splitlines()
    except OSError as error:
        sys.exit(f"{arguments.trials} cannot be read ({error.strerror}): make models writes it.")
    arguments.page.write_text(page([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()
