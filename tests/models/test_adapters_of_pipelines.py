"""Adapters in slots of whole pipelines: ``apply(adapters=)``, the formats of files, text encoders, and ``remove``."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from helpers import graphs
from pipelines import EAGER, FLUX, held, is_plain
from small_pipelines import small_pipeline
from test_adapters import Library, State

from chunkflow_compile import ChunkflowError, apply, compile, enable_adapters, remove, use_adapters
from chunkflow_compile.frontend.slots import Slotted
from chunkflow_compile.models.small import Size, small_inputs, small_model
from chunkflow_compile.pipeline.budget import budget_of

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("no_grad", "quiet")
STEPS = {"num_inference_steps": 2}


def generate(pipe: Any, seed: int, **given: Any) -> torch.Tensor:
    return FLUX.generate(pipe, seed, **STEPS, **given)


def load(pipe: Any, state: State, name: str) -> None:
    pipe.load_lora_weights({k: v.clone() for k, v in state.items()}, adapter_name=name)


def test_an_applied_pipeline() -> None:
    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    library = Library(twin.transformer)
    apply(pipe, memory="2MiB", adapters={"rank": 16, "slots": 2}, **EAGER)
    budget = budget_of(pipe)
    assert torch.equal(generate(pipe, 0), generate(twin, 0))
    compiled = graphs()
    for number, rank in enumerate((4, 16)):
        for p in (pipe, twin):
            load(p, library.adapter(number, rank), f"a{number}")
    for change in (
        lambda p: p.set_adapters("a0", 0.5),
        lambda p: p.set_adapters(["a1", "a0"], [0.5, 0.25]),
        lambda p: p.fuse_lora(),
        lambda p: p.unfuse_lora(),
        lambda p: p.disable_lora(),
        lambda p: p.enable_lora(),
        lambda p: p.delete_adapters("a1"),
        lambda p: p.unload_lora_weights(),
    ):
        for p in (pipe, twin):
            change(p)
        assert torch.allclose(generate(pipe, 1), generate(twin, 1), rtol=0, atol=1e-5)
        assert held(budget) <= budget.usable
    for p in (pipe, twin):
        load(p, library.adapter(3, 8), "again")
    assert torch.allclose(generate(pipe, 2), generate(twin, 2), rtol=0, atol=1e-5)
    assert graphs() == compiled
    remove(pipe)
    layer = pipe.transformer.transformer_blocks[0].attn.to_q
    assert type(layer) is peft.tuners.lora.Linear and not [*layer.buffers()], "its adapter is loaded"
    assert type(pipe.transformer.transformer_blocks[0].ff.net[2]) is torch.nn.Linear
    assert torch.equal(generate(pipe, 2), generate(twin, 2))
    pipe.unload_lora_weights()
    assert is_plain(pipe) and not any(isinstance(m, Slotted) for m in pipe.transformer.modules())


def test_threads_with_adapters_of_their_own() -> None:
    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    library = Library(twin.transformer)
    apply(pipe, memory="2MiB", adapters={"rank": 16, "slots": 2}, **EAGER)
    for number in range(2):
        for p in (pipe, twin):
            load(p, library.adapter(number, 8), f"a{number}")
    for p in (pipe, twin):
        p.set_adapters("a1", 0.25)
    expected = generate(twin, 3)
    assert torch.allclose(generate(pipe, 3), expected, rtol=0, atol=1e-5)
    compiled = graphs()
    wanted: list[tuple[Any, Any]] = [
        ("a0", None),
        ("a1", 0.5),
        (["a0", "a1"], [0.5, 2.0]),
        (None, None),
        ([], None),
    ] * 2
    found: dict[int, torch.Tensor] = {}

    def request(number: int) -> None:
        with torch.no_grad(), use_adapters(pipe, *wanted[number]):
            found[number] = generate(pipe, number)

    threads = [Thread(target=request, args=(number,)) for number in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(ValueError, match="nobody"), use_adapters(pipe, ["a0", "nobody"]):
        pass
    assert torch.allclose(generate(pipe, 3), expected, rtol=0, atol=1e-5), "those from before"
    assert graphs() == compiled
    for number, (names, weights) in enumerate(wanted):
        if names:
            twin.enable_lora()
            twin.set_adapters(names, weights)
        else:
            twin.disable_lora()
        assert torch.allclose(found[number], generate(twin, number), rtol=0, atol=1e-5)
    with pytest.raises(ChunkflowError, match="a pipeline that loads adapters"), use_adapters(pipe.transformer, "a0"):
        pass


def test_what_apply_refuses_leaves_the_pipeline_as_it_was() -> None:
    pipe = small_pipeline("flux")
    for adapters, said in (
        ({"ranks": 3}, "adapters has 'ranks'"),
        (0, "rank=0 must"),
        ({"targets": ["no"]}, "no layers for"),
    ):
        with pytest.raises(ChunkflowError, match=said):
            apply(pipe, memory="2MiB", adapters=adapters, **EAGER)
        assert is_plain(pipe)
    with pytest.raises(ChunkflowError, match="is too little for"):
        apply(pipe, memory=1024, adapters=16, **EAGER)
    assert is_plain(pipe) and not any(isinstance(m, Slotted) for m in pipe.transformer.modules())


@pytest.mark.long
def test_slots_that_were_there_before_stay_after_remove() -> None:
    pipe = small_pipeline("flux")
    enable_adapters(pipe, rank=8)
    apply(pipe, memory="2MiB", **EAGER)
    generate(pipe, 0)
    remove(pipe)
    assert any(isinstance(m, Slotted) for m in pipe.transformer.modules())


def musubi(state: State, alpha: float) -> State:
    """An adapter of Wan as musubi-tuner of kohya writes it."""
    names = {"attn1": "self_attn", "attn2": "cross_attn", "ffn_net_0_proj": "ffn_0", "ffn_net_2": "ffn_2"}
    names |= {"to_q": "q", "to_k": "k", "to_v": "v", "to_out_0": "o"}
    found = State()
    for key, value in state.items():
        layer, _, kind = key.removeprefix("transformer.").rpartition(".lora_")
        flat = layer.replace(".", "_")
        for theirs, mine in names.items():
            flat = flat.replace(theirs, mine)
        found[f"lora_unet_{flat}.lora_{'down' if kind == 'A.weight' else 'up'}.weight"] = value
        found[f"lora_unet_{flat}.alpha"] = torch.tensor(alpha)
    return found


def lightx2v(state: State) -> State:
    """As a distillation of Wan's own code has it."""
    names = {"attn1": "self_attn", "attn2": "cross_attn", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
    names |= {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "lora_A": "lora_down", "lora_B": "lora_up"}
    found = State()
    for key, value in state.items():
        for theirs, mine in names.items():
            key = key.replace(theirs, mine)
        found[key.replace("transformer.", "diffusion_model.")] = value
    return found


def test_formats_of_others() -> None:
    from diffusers import WanPipeline

    size = Size(layers=2, heads=4, head_dim=16)
    model, twin = small_model("wan", size), small_model("wan", size)
    library = Library(twin)
    pipes = [WanPipeline(None, None, None, None, transformer=m) for m in (model, twin)]
    enable_adapters(pipes[0], rank=16)
    compile(model, device="cpu", **{k: v for k, v in EAGER.items() if k != "device"})
    inputs = small_inputs("wan", size, 0)
    for _ in range(2):
        assert torch.equal(model(**inputs)[0], twin(**inputs)[0])
    compiled = graphs()
    every = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")
    blocks = {k: v for k, v in library.adapter(0, 8, every).items() if ".blocks." in k}
    for number, state in enumerate((musubi(blocks, 2.0), lightx2v(blocks))):
        for pipe in pipes:
            load(pipe, state, f"a{number}")
            pipe.set_adapters(f"a{number}")
        want = twin(**inputs)[0]
        assert torch.allclose(model(**inputs)[0], want, rtol=0, atol=1e-5)
    assert graphs() == compiled and not torch.allclose(want, inputs["hidden_states"])


@pytest.mark.long
def test_a_text_encoder() -> None:
    """It has slots of its own, also after the pipeline has unloaded its adapters."""
    pipe, twin = small_pipeline("flux"), small_pipeline("flux")
    library = Library(twin.text_encoder, "text_encoder")
    enable_adapters(pipe.text_encoder, rank=8, targets=["q_proj", "k_proj", "v_proj"])
    apply(pipe, memory="2MiB", **EAGER)
    assert torch.equal(generate(pipe, 0), generate(twin, 0))
    compiled = graphs()
    for number, rank in enumerate((4, 8)):
        for p in (pipe, twin):
            load(p, library.adapter(number, rank, ("q_proj", "v_proj")), f"a{number}")
            p.set_adapters(f"a{number}")
        assert torch.allclose(generate(pipe, 1), generate(twin, 1), rtol=0, atol=1e-5)
    assert not torch.allclose(generate(pipe, 1), generate(small_pipeline("flux"), 1))
    for p in (pipe, twin):
        p.unload_lora_weights()
    assert torch.allclose(generate(pipe, 1), generate(twin, 1), rtol=0, atol=1e-5)
    for p in (pipe, twin):
        load(p, library.adapter(2, 8, ("q_proj", "v_proj")), "again")
    assert torch.allclose(generate(pipe, 1), generate(twin, 1), rtol=0, atol=1e-5)
    assert graphs() == compiled
