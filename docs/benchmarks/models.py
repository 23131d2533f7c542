"""Write the page of tested models: how each transformer class in diffusers runs, according to the trials in models.jsonl.

    python docs/benchmarks/models.py [--trials docs/models.jsonl] [--page docs/models.md]

The script tests/diffusers_classes.py writes the trials.  The columns of the inference servers are from SERVERS, which
names the tests of their plug-ins.
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

# For each column, the ways to compile that it covers, each with the mark that means equal outputs.
COLUMNS: Mapping[str, Mapping[str, str]] = {
    "whole": {"whole": "="},
    "block types": {"kind": "="},
    "Ulysses": {"ulysses": "="},
    "slots": {"slots": "="},
    "packed": {"packed": "="},
    "quantized": {"torchao": "t", "quanto": "q", "nf4": "n"},
}
# For each inference server and each of its model classes, the marks of tested features, with the names of the tests in
# tests/servers.
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

This table shows which transformer classes from {release} have been tested with ChunkFlow. Each trial runs the tiny random
model from diffusers' own tests on a CPU. Three calls must equal eager mode bit for bit, and weights must have been
streamed. [Regions](glossary.md#region) are not compiled (`lowering="eager"`), because compiled code rounds differently.
`tests/models/test_models.py` compiles four model families with Inductor and compares them with eager mode, within 2e-5. The
table includes no full-size model and no GPU. `make models` repeats the trials and writes this page.

* *whole*: compiled as one graph.
* [*block types*](glossary.md#block-type): each compiled once (`chunkflow_compile.compile`), with at least two blocks. The
  three columns after Ulysses are tested in this way, too.
* *Ulysses*: one graph on two ranks.
* [*slots*](glossary.md#slot): two LoRA adapters one after the other without recompilation, within 1e-5.
* *packed*: bfloat16 weights compressed without loss.
* *quantized*: blocks quantized by torchao (t) and quanto (q), both to int8, and by bitsandbytes to nf4 (n).
* *SGLang*, *vLLM-Omni*: the server's own class with this name, in the tests of the plug-in. U: also on two Ulysses ranks.
  L: also with an adapter that the server loads.

`=` means equal. A number refers to the reason for a failure below the table. An empty cell has not been tested.

{table}

{reasons}

{others}
An earlier run, whose table was not kept, tested 70 configurations of these classes. 64 of them ran in eager mode, and all 64
gave equal outputs, bit for bit, with ChunkFlow without `fullgraph`.

## Whole pipelines

These pipelines have been tested with tiny random models, and their outputs equal those without ChunkFlow: Wan 2.1, Wan 2.2
with two experts, Wan image-to-video, FLUX.1, FLUX.2, Qwen-Image and Qwen-Image-Edit, HunyuanVideo, LTX, Z-Image, SD3 and
SD3.5. Every component was streamed, with classifier-free guidance, callbacks, several sizes and several prompts. Outputs
are bit-equal with eager lowering, and equal within 5e-6 with Inductor, which was tested at one size.

The tests also cover LoRA adapters that are loaded before and after compilation, scaled, fused and unloaded; ControlNet,
IP-Adapter, attention backends and step caches; float16, autocast and inference mode; saving and loading.
"""


def reason(row: Row) -> str:
    """Return a clause on why a class does not run.  It does not contain the name of the class."""
    if row["result"] == "not with eager":
        return "diffusers' own model fails in the same way without ChunkFlow"
    said = " ".join(str(row.get("why", row["result"])).replace(class_of(row), "model").split())
    if row["result"] == "not with aot_eager":
        return f"`torch.compile` fails in the same way with its backend `aot_eager` ({said.partition(':')[0]})"
    return said.partition(". ")[0].rstrip(".")


def class_of(row: Row) -> str:
    """Return the name of the class in a row.  In a row, the name of a configuration may follow it."""
    name: str = row["class"].split()[0]
    return name


class Cells:
    """Makes the cells of the table, and collects the reasons that they refer to by number."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.reasons: list[str] = []

    def of_trials(self, name: str, ways: Mapping[str, str]) -> str:
        """Return the cell of a class, which covers all of its configurations: the marks of the ways with equal outputs,
        and the numbers of the reasons for all other ways."""
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
    """Return the table as Markdown.  It contains no padding, so that the rows are short."""
    heads = ["class", *COLUMNS, "SGLang", "vLLM-Omni"]
    lines = [heads, ["-"] * len(heads)]
    for name in names:
        served = ["".join(classes.get(name, {})) for classes in SERVERS.values()]
        lines.append([name, *(cells.of_trials(name, ways) for ways in COLUMNS.values()), *served])
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


def page(rows: Sequence[Row]) -> str:
    """Return the page for the given trials."""
    release = next((row["result"] for row in rows if row["way"] == "release"), "diffusers")
    tried = [row for row in rows if row["way"] not in ("all", "release") and row["result"] not in NOT_TRIED]
    some = {class_of(row) for row in tried}
    others = sorted({class_of(row) for row in rows if row["way"] != "release"} - some)
    cells = Cells(rows)
    drawn = table(sorted(some), cells)
    reasons = "\n".join(f"{number}. {said}" for number, said in enumerate(cells.reasons, 1))
    said = f"Not tested, because no configuration runs in eager mode here: {', '.join(others)}.\n" if others else ""
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
