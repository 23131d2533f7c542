"""What people do to an applied pipeline that ChunkFlow cannot follow, or must undo."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from small_pipelines import small_pipeline
from test_pipelines import EAGER, WAN, models, same_weights
from torch import nn

from chunkflow_compile import Arena, ChunkflowError, apply, offload, programs, remove
from chunkflow_compile.frontend.compile import Compiled
from chunkflow_compile.pipeline.budget import budget_of
from chunkflow_compile.weights.host_weight import HostWeight

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet")


def compiled(model: nn.Module) -> list[str]:
    """The names of the modules that run a program, or would without a hook."""
    found = []
    for name, module in model.named_modules():
        registry = module.__dict__.get("_diffusers_hook")
        refs = () if registry is None else registry._fn_refs
        calls = [module._compiled_call_impl, module.forward]
        calls += [call for ref in refs for call in (ref.forward, ref.original_forward)]
        if module._compiled_call_impl is not None or any(isinstance(c, Compiled) for c in calls):
            found.append(name)
    return found


def under_accelerate(pipe: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(pipe.transformer, ModelHook())


def under_group_offloading(pipe: Any) -> None:
    cpu = torch.device("cpu")
    pipe.vae.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")


class Elsewhere(nn.Parameter):
    """No second device is here: a weight that says it is on one stands for it."""

    device = torch.device("cuda:1")


def compiled_whole(pipe: Any) -> None:
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")


def compiled_in_a_block(pipe: Any) -> None:
    pipe.transformer.blocks[0] = torch.compile(pipe.transformer.blocks[0], backend="eager")


def compiled_forward(pipe: Any) -> None:
    pipe.transformer.forward = torch.compile(pipe.transformer.forward, backend="eager")


def on_another_device(pipe: Any) -> None:
    pipe.transformer.proj_out.weight = Elsewhere(pipe.transformer.proj_out.weight.data, requires_grad=False)


CALL_REMOVE = r".*: call chunkflow_compile\.remove\(pipe\) first"
IS_COMPILED = r"pipe\.transformer .* is compiled already: pass a pipeline that is not"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (compiled_whole, IS_COMPILED),
        (compiled_in_a_block, IS_COMPILED),
        (compiled_forward, IS_COMPILED),
        (lambda pipe: pipe.transformer.compile(backend="eager"), IS_COMPILED),
        (under_accelerate, r"pipe\.transformer .* is under a hook of accelerate.*remove_all_hooks"),
        (under_group_offloading, r"pipe\.vae .* is under diffusers' group offloading"),
        (on_another_device, r"pipe\.transformer .* is on cuda:1: pass device='cuda:1', or move it to the CPU"),
        (
            lambda pipe: pipe.text_encoder.to("meta"),
            r"pipe\.text_encoder \(UMT5EncoderModel\) has parameters on the meta device",
        ),
        (
            lambda pipe: offload(pipe.transformer, "cpu", min_bytes=EAGER["min_bytes"]),
            r"pipe\.transformer .* offloaded already: call chunkflow_compile\.restore",
        ),
    ],
)
def test_what_apply_refuses(change: Any, sentence: str) -> None:
    """Before it moves a weight."""
    pipe = small_pipeline("wan")
    change(pipe)
    kinds = {name: [type(p) for p in m.parameters()] for name, m in models(pipe).items()}
    with pytest.raises(ChunkflowError, match=sentence):
        apply(pipe, **EAGER)
    assert budget_of(pipe) is None
    assert kinds == {name: [type(p) for p in m.parameters()] for name, m in models(pipe).items()}


@pytest.fixture(scope="module")
def plain() -> Any:
    """A pipeline that no test applies."""
    return small_pipeline("wan")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"memory": 1024},
            r"memory=1024 bytes is too little for pipe\.\w+: its largest streamed weight has \d+ bytes.* Give at least "
            r"memory=\d+\. Activations come on top, .* first call",
        ),
        ({"memmory": 1}, "Unknown option 'memmory'"),
        ({"arena": Arena("cpu")}, "leave out arena"),
        ({"slowdown": 1.1}, "leave out slowdown"),
        (
            {"dtype": {"transfomer": torch.bfloat16}},
            "dtype has 'transfomer', which is no component .* use default, vae",
        ),
        ({"dtype": "bf16"}, "dtype='bf16' is no dtype"),
        ({"dtype": {"transformer": torch.int8}}, "casts to float32, float16 or bfloat16"),  # the last one to be placed
        ({"dynamic": "yes"}, "dynamic='yes' must be True, False or None"),
        ({"lowering": "tensorrt"}, "lowering='tensorrt' cannot be used on cpu"),
    ],
)
def test_options_that_apply_refuses(plain: Any, options: dict[str, Any], sentence: str) -> None:
    kind = type(plain)
    with pytest.raises(ChunkflowError, match=sentence):
        apply(plain, **{**EAGER, **options})
    assert same_weights(plain, small_pipeline("wan")) and type(plain) is kind and budget_of(plain) is None
    assert not any(map(compiled, models(plain).values()))


def test_a_model_is_no_pipeline(plain: Any) -> None:
    with pytest.raises(
        ChunkflowError,
        match=r"takes a diffusers pipeline, not UMT5EncoderModel: one model is for chunkflow_compile\.compile",
    ):
        apply(plain.text_encoder, **EAGER)


@pytest.mark.parametrize("again", [False, True])
def test_a_step_cache_that_is_disabled_after(again: bool) -> None:
    from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig

    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    want = WAN.generate(twin)
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e-6))
    apply(pipe, memory="1MiB", **EAGER)
    WAN.generate(pipe)
    pipe.transformer.disable_cache()
    config = PyramidAttentionBroadcastConfig(cross_attention_block_skip_range=2, current_timestep_callback=lambda: 500)
    if again:
        pipe.transformer.enable_cache(config)
    assert again or torch.equal(WAN.generate(pipe), want)
    assert compiled(pipe.transformer)
    remove(pipe)
    if again:
        twin.transformer.enable_cache(config)
        assert torch.equal(WAN.generate(pipe), WAN.generate(twin)), "the hooks stay"
        pipe.transformer.disable_cache()
    assert compiled(pipe.transformer) == []
    assert torch.equal(WAN.generate(pipe), want) and not programs(pipe.transformer)


def test_a_component_that_is_dropped() -> None:
    """``pipe.text_encoder = None`` frees it, at the next call of the pipeline or at apply."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    want = WAN.generate(twin)
    apply(pipe, memory="1MiB", **EAGER)
    assert torch.equal(WAN.generate(pipe), want)
    with torch.no_grad():
        given = {"prompt_embeds": pipe.encode_prompt("a cat", do_classifier_free_guidance=False)[0]}
    given |= {"negative_prompt_embeds": given["prompt_embeds"], "prompt": None, "negative_prompt": None}
    want = WAN.generate(twin, **given)
    gone = weakref.ref(pipe.text_encoder.encoder.block[0].layer[0].SelfAttention.q.weight)
    gc.collect()  # Dynamo's own cycles, of the compilation
    pipe.text_encoder = None
    gc.disable()
    try:
        assert torch.equal(WAN.generate(pipe, **given), want)
        assert gone() is None, "11 GB do not wait for the garbage collector"
    finally:
        gc.enable()
    assert {phase.name for phase in budget_of(pipe).phases} == {"transformer", "vae"}
    kept, pipe.vae = pipe.vae, None
    assert apply(pipe) is pipe and [phase.name for phase in budget_of(pipe).phases] == ["transformer"]
    assert not any(isinstance(p, HostWeight) for p in kept.parameters()) and compiled(kept) == []
    with pytest.raises(ChunkflowError, match="applied already"):
        apply(pipe)
    remove(pipe)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda pipe: pipe.transformer.blocks[1].norm2.to("meta"),
            r"pipe\.transformer .* was moved from cpu to meta" + CALL_REMOVE,
        ),
        (under_accelerate, r"pipe\.transformer .* is under a hook of accelerate since apply" + CALL_REMOVE),
        (under_group_offloading, r"pipe\.vae .* is under diffusers' group offloading since apply" + CALL_REMOVE),
        (lambda pipe: pipe.transformer.compile(backend="eager"), r"pipe\.transformer .* was compiled after apply"),
    ],
)
def test_what_something_else_does_to_a_component_after(change: Any, match: str) -> None:
    pipe = small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    change(pipe)
    with pytest.raises(ChunkflowError, match=match):
        WAN.generate(pipe)
    assert remove(pipe) is pipe and not any(compiled(m) for m in models(pipe).values())
    assert not any(isinstance(t, HostWeight) for m in models(pipe).values() for t in m.parameters())


def test_a_copy_of_a_pipeline(tmp_path: Path) -> None:
    """It is an ordinary one, which can be applied; saved files are those of the plain pipeline; a pickle is refused."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    want = WAN.generate(twin)
    apply(pipe, memory="1MiB", **EAGER)
    assert torch.equal(WAN.generate(pipe), want)
    other = copy.deepcopy(pipe)
    calls = [phase.calls for phase in budget_of(pipe).phases]
    assert torch.equal(WAN.generate(other), want) and budget_of(other) is None
    assert [phase.calls for phase in budget_of(pipe).phases] == calls
    with pytest.raises(ChunkflowError, match=r"vae belongs to a pipeline that was applied, .* remove\(pipe\) first"):
        pickle.dumps(pipe.vae)
    for name, p in (("ours", pipe), ("plain", twin)):
        p.transformer.save_pretrained(tmp_path / name / "transformer")
        p.vae.save_pretrained(tmp_path / name / "vae")
    for path in (tmp_path / "plain").rglob("*.*"):
        assert (tmp_path / "ours" / path.relative_to(tmp_path / "plain")).read_bytes() == path.read_bytes()
    apply(other, memory="1MiB", **EAGER)
    assert type(other).__mro__[1] is type(twin) and budget_of(other) is not budget_of(pipe)
    assert torch.equal(WAN.generate(other), want)
    another = copy.deepcopy(pipe)
    for p in (other, pipe, another):
        assert type(remove(p)) is type(twin)
        assert same_weights(p, twin) and not any(compiled(m) for m in models(p).values())
    assert torch.equal(WAN.generate(pipe), want)


def test_components_that_change_after() -> None:
    """They are named until apply is called again, with the arguments of the first time or none."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    with pytest.raises(ChunkflowError, match="applied already"):
        apply(pipe, **EAGER)
    pipe.register_modules(transformer_2=small_pipeline("wan", seed=1).transformer)
    with pytest.raises(ChunkflowError, match=r"pipe\.transformer_2 was added after apply: call .*apply\(pipe\) again"):
        WAN.generate(pipe)
    before, pipe.transformer = pipe.transformer, small_pipeline("wan", seed=1).transformer
    with pytest.raises(ChunkflowError, match=r"pipe\.transformer was replaced after apply: call .*apply\(pipe\) again"):
        WAN.generate(pipe)
    with pytest.raises(ChunkflowError, match="have a budget already"):
        apply(pipe, memory="2MiB", **EAGER)
    apply(pipe, memory="1MiB", **EAGER)
    twin.transformer = small_pipeline("wan", seed=1).transformer
    twin.register_modules(transformer_2=small_pipeline("wan", seed=1).transformer)
    assert torch.equal(WAN.generate(pipe), WAN.generate(twin))
    placed = {n for n, m in models(pipe).items() if any(isinstance(p, HostWeight) for p in m.parameters())}
    assert placed == {*models(pipe)} and "transformer_2" in placed
    assert not any(isinstance(p, HostWeight) for p in before.parameters()), "nothing runs on it any more"
    plain, pipe.transformer = pipe.transformer, torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(ChunkflowError, match=r"pipe\.transformer .* is compiled already"):
        apply(pipe)
    pipe.transformer = plain
    plain, pipe.vae = pipe.vae, small_pipeline("wan", seed=1).vae
    apply(pipe)
    assert not any(isinstance(p, HostWeight) for p in plain.parameters())
    pipe.vae.decode = torch.compile(pipe.vae.decode, backend="eager")
    with pytest.raises(ChunkflowError, match=r"pipe\.vae .* was compiled after apply, which compiles it: .*remove"):
        WAN.generate(pipe)
    assert remove(remove(pipe)) is pipe and not any(map(compiled, models(pipe).values()))
    assert not any(isinstance(p, HostWeight) for m in models(pipe).values() for p in m.parameters())


@pytest.mark.parametrize("memory", ["1MiB", 1024])
def test_apply_in_two_threads(memory: int | str) -> None:
    """One of them applies the pipeline, and the other is told so; if one fails, the other does not."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    start, refused = threading.Barrier(2), []

    def work(memory: int | str) -> None:
        start.wait()
        try:
            apply(pipe, memory=memory, **EAGER)
        except ChunkflowError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=work, args=(given,)) for given in (memory, "1MiB")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 1 and ("applied already" in refused[0] or (memory == 1024 and "too little" in refused[0]))
    assert len(budget_of(pipe).phases) == 3 and budget_of(pipe).total == 1 << 20
    assert type(pipe).__mro__[1] is type(twin)
    assert torch.equal(WAN.generate(pipe), WAN.generate(twin))
    assert all(any(isinstance(p, HostWeight) for p in m.parameters()) for m in models(pipe).values())
    remove(pipe)
    assert same_weights(pipe, twin) and type(pipe) is type(twin)


def least_of(pipe: Any, **options: Any) -> tuple[str, int]:
    """The component and the least memory that apply names in its refusal of too little."""
    with pytest.raises(ChunkflowError, match="is too little for") as error:
        apply(pipe, **{**EAGER, "memory": 1024, **options})
    found = re.search(r"too little for pipe\.(\w+): .* Give at least memory=(\d+)\.", str(error.value))
    assert found is not None and budget_of(pipe) is None
    return found[1], int(found[2])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_least_memory(dtype: torch.dtype | None) -> None:
    """The component of the largest weight is named, and what is suggested is accepted, and little less is not."""
    pipe = small_pipeline("flux")
    name, least = least_of(pipe, dtype=dtype)
    with pytest.raises(ChunkflowError, match=f"Give at least memory={least}"):
        apply(pipe, memory=least - 16, dtype=dtype, **EAGER)
    apply(pipe, memory=least, dtype=dtype, **EAGER)
    budget = budget_of(pipe)
    largest = {p.name: max(t.nbytes for t in p.weights if isinstance(t, HostWeight)) for p in budget.phases}
    assert name == max(largest, key=largest.__getitem__)
    assert 0 <= budget.usable - sum(p.kept for p in budget.phases) - largest[name] < 16
    remove(pipe)


class Int8Params(nn.Parameter):
    """Stands for a parameter of bitsandbytes, which cannot be streamed."""


Int8Params.__module__ = "bitsandbytes.nn.modules"


def test_large_weights_that_cannot_be_streamed() -> None:
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    _, before = least_of(pipe)
    for block in pipe.transformer.blocks:
        block.ffn.net[2].weight = Int8Params(block.ffn.net[2].weight.data, requires_grad=False)
    size = sum(block.ffn.net[2].weight.nbytes for block in pipe.transformer.blocks)
    with pytest.raises(
        ChunkflowError,
        match=rf"3 that cannot be streamed take {size} \(the largest is pipe\.transformer\.blocks\.0\.ffn\.net\.2\.weight, "
        r"a tensor subclass \(Int8Params\): its layer keeps",
    ):
        apply(pipe, memory=before, **EAGER)
    _, least = least_of(pipe)
    assert size <= least - before <= 1.1 * size
    apply(pipe, memory=least, **EAGER)
    budget = budget_of(pipe)
    assert sum(p.kept for p in budget.phases) >= size
    remove(pipe)
    assert torch.equal(WAN.generate(pipe), WAN.generate(twin))
