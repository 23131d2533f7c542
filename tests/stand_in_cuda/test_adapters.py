"""Adapters in slots of a pipeline on a card: they stay in host memory, and what merges them runs on the card."""

from __future__ import annotations

import pytest
import torch
from adapters import Library
from helpers import graphs
from small_pipelines import SMALL_PIPELINES, small_pipeline

from chunkflow_compile import apply, remove

pytest.importorskip("transformers")
pytest.importorskip("peft")
FLUX = SMALL_PIPELINES["flux"]


def test_a_pipeline() -> None:
    twin = small_pipeline("flux")
    library = Library(twin.transformer)
    states = [library.adapter(seed, rank, ("to_q", "to_v")) for seed, rank in enumerate((4, 8))]
    twin.to("cuda")
    pipe = apply(small_pipeline("flux"), device="cuda", memory="40MiB", adapters=8, min_bytes=2048, lowering="eager")
    with torch.no_grad():
        assert torch.equal(FLUX.generate(pipe), FLUX.generate(twin))
        compiled = graphs()
        for number, state in enumerate(states):
            for p in (pipe, twin):
                p.load_lora_weights({k: v.clone() for k, v in state.items()}, adapter_name=f"a{number}")
                p.set_adapters(f"a{number}", 0.7)
            assert torch.allclose(FLUX.generate(pipe), FLUX.generate(twin), rtol=0, atol=1e-5)
        loaded = [p for n, p in pipe.transformer.named_parameters() if "lora_" in n]
        assert loaded and all(p.device.type == "cpu" for p in loaded)
        for change in ("fuse_lora", "unfuse_lora", "disable_lora", "enable_lora", "unload_lora_weights"):
            for p in (pipe, twin):
                getattr(p, change)()
            assert torch.allclose(FLUX.generate(pipe), FLUX.generate(twin), rtol=0, atol=1e-5), change
        assert graphs() == compiled
        for p in (pipe, twin):
            p.load_lora_weights({k: v.clone() for k, v in states[0].items()}, adapter_name="again")
        remove(pipe)
        pipe.to("cuda")
        assert torch.allclose(FLUX.generate(pipe), FLUX.generate(twin), rtol=0, atol=1e-5)
