"""Adapters in slots of a pipeline on a card: they stay in host memory, and what merges them runs on the card."""

from __future__ import annotations

import pytest
import torch
from helpers import graphs
from small_pipelines import SMALL_PIPELINES, small_pipeline

from chunkflow_compile import apply, remove

pytest.importorskip("transformers")
pytest.importorskip("peft")
FLUX = SMALL_PIPELINES["flux"]


def adapter(model: torch.nn.Module, seed: int, rank: int) -> dict[str, torch.Tensor]:
    rng, state = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, m in model.named_modules():
        if name.endswith(("to_q", "to_v")):
            state[f"transformer.{name}.lora_A.weight"] = 0.2 * torch.randn(rank, m.in_features, generator=rng)
            state[f"transformer.{name}.lora_B.weight"] = 0.2 * torch.randn(m.out_features, rank, generator=rng)
    return state


def test_a_pipeline() -> None:
    twin = small_pipeline("flux")
    states = [adapter(twin.transformer, seed, rank) for seed, rank in enumerate((4, 8))]
    twin.to("cuda")
    pipe = apply(small_pipeline("flux"), "cuda", memory="40MiB", adapters=8, min_bytes=2048, lowering="eager")
    with torch.no_grad():
        assert torch.equal(FLUX.generate(pipe), FLUX.generate(twin))
        compiled = graphs()
        for number, state in enumerate(states):
            for p in (pipe, twin):
                p.load_lora_weights({k: v.clone() for k, v in state.items()}, adapter_name=f"a{number}")
                p.set_adapters(f"a{number}", 0.7)
            assert torch.allclose(FLUX.generate(pipe), FLUX.generate(twin), rtol=0, atol=1e-5)
        library = [p for n, p in pipe.transformer.named_parameters() if "lora_" in n]
        assert library and all(p.device.type == "cpu" for p in library)
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
