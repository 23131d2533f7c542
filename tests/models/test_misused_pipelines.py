"""What people do to a pipeline before and after ``apply`` that ChunkFlow cannot follow, or must undo."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import memory_named
from pipelines import EAGER, WAN, Applied, compiled, expected, is_plain, models, placed, plain, same_weights
from quantisers import Int8Params
from small_pipelines import small_pipeline
from torch import nn

from chunkflow_compile import Arena, ChunkflowError, apply, compile, offload, programs, remove
from chunkflow_compile.pipeline.budget import budget_of
from chunkflow_compile.units import size
from chunkflow_compile.weights.host_weight import HostWeight

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quiet", "kept_dynamo")
Change = Callable[[Any], Any]


def under_accelerate(pipe: Any) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(pipe.transformer, ModelHook())


def under_bitsandbytes(pipe: Any) -> None:
    """Which has accelerate put hooks on a model, without device_map."""
    pipe.transformer.quantization_method, pipe.transformer.is_quantized = "bitsandbytes", True
    under_accelerate(pipe)


def under_group_offloading(pipe: Any) -> None:
    cpu = torch.device("cpu")
    pipe.vae.enable_group_offload(onload_device=cpu, offload_device=cpu, offload_type="leaf_level")


class Elsewhere(nn.Parameter):
    """No second device is here: a weight that says it is on one stands for it."""

    device = torch.device("cuda:1")


def recompiled(owner: Callable[[Any], Any], name: str) -> Change:
    """Puts what an attribute is in its place, compiled."""
    return lambda pipe: setattr(owner(pipe), name, torch.compile(getattr(owner(pipe), name), backend="eager"))


def compiled_in_place(pipe: Any) -> None:
    pipe.transformer.compile(backend="eager")


def on_another_device(pipe: Any) -> None:
    pipe.transformer.proj_out.weight = Elsewhere(pipe.transformer.proj_out.weight.data, requires_grad=False)


CALL_RESTORE = r".*: call chunkflow_compile\.restore\(pipe\) first"
IS_COMPILED = r"pipe\.transformer .* is compiled already: pass a pipeline whose components are not"
BEFORE: list[tuple[Change, str]] = [
    (recompiled(lambda pipe: pipe, "transformer"), IS_COMPILED),
    (recompiled(lambda pipe: pipe.transformer.blocks, "0"), IS_COMPILED),
    (recompiled(lambda pipe: pipe.transformer, "forward"), IS_COMPILED),
    (compiled_in_place, IS_COMPILED),
    (under_accelerate, r"pipe\.transformer .* is under a hook of accelerate.*remove_all_hooks"),
    (under_bitsandbytes, r"accelerate may put it on models of bitsandbytes\. Call pipe\.remove_all_hooks\(\) first"),
    (under_group_offloading, r"pipe\.vae .* is under diffusers' group offloading"),
    (on_another_device, r"pipe\.transformer .* is on cuda:1: pass device='cuda:1', or move it to the CPU"),
    (
        lambda pipe: pipe.text_encoder.to("meta"),
        r"pipe\.text_encoder \(UMT5EncoderModel\) has parameters on the meta device",
    ),
    (
        lambda pipe: compile(pipe.transformer, **EAGER),
        r"pipe\.transformer .* is compiled already: call chunkflow_compile\.restore\(pipe\.transformer\) first",
    ),
    (
        lambda pipe: offload(pipe.transformer, "cpu", min_bytes=EAGER["min_bytes"]),
        r"pipe\.transformer .* offloaded already: call chunkflow_compile\.restore",
    ),
]
OPTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"memory": "1KiB"},
        r"memory=1.0 KiB is too little for pipe\.\w+: its largest streamed weight has [\d.]+ KiB.* Give at least "
        r"memory='[\d.]+[KM]iB'\. Activations come on top, .* first call",
    ),
    (
        {"memory": "1KiB", "min_bytes": 1 << 30},
        r"memory=1.0 KiB is too little for this pipeline: no weight of at least min_bytes, 1.00 GiB, can be streamed, small "
        r"weights of all components take [\d.]+ \wiB. Give at least memory='[\d.]+\wiB', or a smaller min_bytes",
    ),
    ({"memmory": 1}, "Unknown option 'memmory'; did you mean 'memory'"),
    (
        {"adaptrs": 64},
        r"Unknown option 'adaptrs'; did you mean 'adapters'.* Options are device, memory, dtype, share, "
        r"(?!.*\b(arena|slowdown|plan|policy)\b)",
    ),
    ({"host_memry": 1}, "Unknown option 'host_memry'; did you mean 'host_memory'"),
    ({"memory": "12 gigs"}, "memory='12 gigs' is not a size"),
    ({"host_memory": "12 gigs"}, "host_memory='12 gigs' is not a size"),
    ({"adapters": "x"}, "adapters='x' must be a positive number, or a dict of rank, targets and slots"),
    ({"adapters": True}, "adapters=True must be a positive number"),
    ({"adapters": {"rank": "x"}}, "rank='x' must be a positive number"),
    ({"adapters": {"targets": 5}}, "targets=5 must be names of linear layers"),
    ({"device": "gpu"}, "device='gpu' is no device of torch"),
    ({"timings": "/nowhere.json"}, "The timings /nowhere.json cannot be read: No such file"),
    ({"dump": "/proc/nowhere"}, "The folder /proc/nowhere cannot be written: No such file"),
    ({"arena": Arena("cpu")}, "arena applies to models; this is a pipeline, .*: leave out arena"),
    ({"slowdown": 1.1}, "leave out slowdown"),
    ({"dtype": {"transfomer": torch.bfloat16}}, "dtype has 'transfomer', which is no component .* use default, vae"),
    ({"dtype": "bf16"}, "dtype='bf16' is no dtype"),
    ({"dtype": {"transformer": torch.int8}}, "casts to float32, float16 or bfloat16"),  # the last one to be placed
    ({"dynamic": "yes"}, "dynamic='yes' must be True, False or None"),
    ({"lowering": "tensorrt"}, "lowering='tensorrt' cannot be used on cpu"),
]


@pytest.mark.parametrize(("change", "sentence"), BEFORE)
def test_what_apply_refuses(change: Change, sentence: str) -> None:
    """Before it moves a weight."""
    pipe = small_pipeline("wan")
    change(pipe)
    kinds = [type(p) for m in models(pipe).values() for p in m.parameters()]
    with pytest.raises(ChunkflowError, match=sentence):
        apply(pipe, **EAGER)
    assert kinds == [type(p) for m in models(pipe).values() for p in m.parameters()] and budget_of(pipe) is None


def test_options_that_apply_refuses() -> None:
    """The pipeline stays as it was."""
    pipe = small_pipeline("wan")
    for options, sentence in OPTIONS:
        with pytest.raises(ChunkflowError, match=sentence):
            apply(pipe, **{**EAGER, **options})
        assert is_plain(pipe) and same_weights(pipe, plain("wan")), sentence
    sentence = r"takes a diffusers pipeline, not UMT5EncoderModel: for a model, call chunkflow_compile\.compile"
    with pytest.raises(ChunkflowError, match=sentence):
        apply(pipe.text_encoder, **EAGER)


AFTER: list[tuple[Change, str]] = [
    (lambda pipe: pipe.transformer.blocks[1].norm2.to("meta"), r"was moved from cpu to meta" + CALL_RESTORE),
    (under_accelerate, r"pipe\.transformer .* came under a hook of accelerate after compile\(pipe\)" + CALL_RESTORE),
    (
        under_group_offloading,
        r"pipe\.vae .* came under diffusers' group offloading after compile\(pipe\)" + CALL_RESTORE,
    ),
    (compiled_in_place, r"pipe\.transformer .* was compiled after compile\(pipe\)"),
]


@pytest.mark.parametrize(("change", "match"), AFTER)
def test_what_something_else_does_to_a_component_after(change: Change, match: str) -> None:
    pipe = apply(small_pipeline("wan"), memory="1MiB", **EAGER)
    change(pipe)
    with pytest.raises(ChunkflowError, match=match):
        WAN.generate(pipe)
    assert remove(pipe) is pipe and is_plain(pipe)


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_step_cache(again: bool) -> None:
    """Enabled before, and disabled after; ``again``: another one is enabled after, and stays.

    A call that runs out of memory does not run twice: the cache has changed its state.
    """
    from diffusers import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig

    one = {"guidance_scale": 1.0}  # one branch, and one state of the cache
    pipe, twin, fails = small_pipeline("wan"), small_pipeline("wan"), list[bool]()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e-6))  # no step is that near to the one before
    apply(pipe, memory="1MiB", **EAGER)

    def fail(*_: Any) -> None:
        if fails:
            fails.pop()
            raise torch.OutOfMemoryError("no room")

    hook = pipe.transformer.norm_out.register_forward_pre_hook(fail)
    assert torch.equal(WAN.generate(pipe, **one), expected("wan", **one))
    fails.append(True)
    with pytest.raises(ChunkflowError, match=r"transformer \(WanTransformer3DModel\) does not fit"):
        WAN.generate(pipe, **one)
    hook.remove()
    pipe.transformer._reset_stateful_cache()
    assert torch.equal(WAN.generate(pipe, **one), expected("wan", **one))
    pipe.transformer.disable_cache()
    assert torch.equal(WAN.generate(pipe), expected("wan")) and compiled(pipe.transformer)
    config = PyramidAttentionBroadcastConfig(cross_attention_block_skip_range=2, current_timestep_callback=lambda: 500)
    if again:
        pipe.transformer.enable_cache(config)
        twin.transformer.enable_cache(config)
        assert torch.equal(WAN.generate(pipe), WAN.generate(twin))
    remove(pipe)
    if again:
        assert torch.equal(WAN.generate(pipe), WAN.generate(twin)), "the hooks stay"
        pipe.transformer.disable_cache()
    assert is_plain(pipe) and torch.equal(WAN.generate(pipe), expected("wan")) and not programs(pipe.transformer)


def test_a_copy_of_a_pipeline(tmp_path: Path, applied: Applied) -> None:
    """It is an ordinary one, which can be applied; saved files are those of the plain pipeline; a pickle is refused."""
    (pipe, budget), twin = applied(), plain("wan")
    assert torch.equal(WAN.generate(pipe), expected("wan"))
    other = copy.deepcopy(pipe)
    calls = [phase.calls for phase in budget.phases]
    assert torch.equal(WAN.generate(other), expected("wan")) and budget_of(other) is None
    assert [phase.calls for phase in budget.phases] == calls
    with pytest.raises(ChunkflowError, match=r"vae belongs to a compiled pipeline, .* restore\(pipe\) first"):
        pickle.dumps(pipe.vae)
    for name, p in (("ours", pipe), ("plain", twin)):
        p.transformer.save_pretrained(tmp_path / name / "transformer")
        p.vae.save_pretrained(tmp_path / name / "vae")
    for path in (tmp_path / "plain").rglob("*.*"):
        assert (tmp_path / "ours" / path.relative_to(tmp_path / "plain")).read_bytes() == path.read_bytes()
    apply(other, memory="1MiB", **EAGER)
    assert type(other).__mro__[1] is type(twin) and budget_of(other) is not budget
    assert torch.equal(WAN.generate(other), expected("wan"))
    assert is_plain(remove(other)) and same_weights(other, twin)
    another = remove(copy.deepcopy(pipe))
    assert is_plain(another) and same_weights(another, twin) and placed(pipe) == {*models(pipe)}
    with pytest.raises(ChunkflowError, match=r"remove takes a diffusers pipeline, not Aut.*: .*restore\(model\)"):
        remove(pipe.vae)
    assert budget_of(pipe.vae) is budget


@pytest.mark.long
def test_components_that_change_after() -> None:
    """They are named until apply is called again, with the arguments of the first time or none."""
    pipe, twin = small_pipeline("wan"), small_pipeline("wan")
    apply(pipe, memory="1MiB", **EAGER)
    with pytest.raises(ChunkflowError, match="compiled already"):
        apply(pipe, **EAGER)
    pipe.register_modules(transformer_2=small_pipeline("wan", seed=1).transformer)
    with pytest.raises(
        ChunkflowError, match=r"pipe\.transformer_2 was added after compile\(pipe\): call .*\(pipe\) again"
    ):
        WAN.generate(pipe)
    before, pipe.transformer = pipe.transformer, small_pipeline("wan", seed=1).transformer
    with pytest.raises(
        ChunkflowError, match=r"pipe\.transformer was replaced after compile\(pipe\): call .*\(pipe\) again"
    ):
        WAN.generate(pipe)
    with pytest.raises(ChunkflowError, match="have a budget already"):
        apply(pipe, memory="2MiB", **EAGER)
    apply(pipe, memory="1MiB", **EAGER)
    twin.transformer = small_pipeline("wan", seed=1).transformer
    twin.register_modules(transformer_2=small_pipeline("wan", seed=1).transformer)
    assert torch.equal(WAN.generate(pipe), WAN.generate(twin))
    assert placed(pipe) == {*models(pipe)} and "transformer_2" in placed(pipe)
    assert not any(isinstance(p, HostWeight) for p in before.parameters()), "nothing runs on it any more"
    drop_the_text_encoder(pipe, twin)
    ours, pipe.transformer = pipe.transformer, torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(ChunkflowError, match=r"pipe\.transformer .* is compiled already"):
        apply(pipe)
    pipe.transformer = ours
    ours, pipe.vae = pipe.vae, None
    assert apply(pipe) is pipe and "vae" not in {phase.name for phase in budget_of(pipe).phases}
    assert not any(isinstance(p, HostWeight) for p in ours.parameters()) and compiled(ours) == []
    pipe.vae = small_pipeline("wan", seed=1).vae
    apply(pipe)
    pipe.vae.decode = torch.compile(pipe.vae.decode, backend="eager")
    with pytest.raises(
        ChunkflowError, match=r"pipe\.vae .* was compiled after compile\(pipe\), which .*restore\(pipe\)"
    ):
        WAN.generate(pipe)
    assert remove(remove(pipe)) is pipe and is_plain(pipe)


def drop_the_text_encoder(pipe: Any, twin: Any) -> None:
    """``pipe.text_encoder = None`` frees it, at the next call of the pipeline."""
    with torch.no_grad():
        given = {"prompt_embeds": pipe.encode_prompt("a cat", do_classifier_free_guidance=False)[0]}
    given |= {"negative_prompt_embeds": given["prompt_embeds"], "prompt": None, "negative_prompt": None}
    gone = weakref.ref(pipe.text_encoder.encoder.block[0].layer[0].SelfAttention.q.weight)
    gc.collect()  # Dynamo's own cycles, of the compilation
    pipe.text_encoder = None
    gc.disable()
    try:
        assert torch.equal(WAN.generate(pipe, **given), WAN.generate(twin, **given))
        assert gone() is None, "11 GB do not wait for the garbage collector"
    finally:
        gc.enable()
    assert {phase.name for phase in budget_of(pipe).phases} == {"transformer", "transformer_2", "vae"}
    with pytest.raises(ChunkflowError, match="compiled already"):
        apply(pipe)


@pytest.mark.parametrize("memory", ["1MiB", "1KiB"])
def test_apply_in_two_threads(memory: str) -> None:
    """One of them applies the pipeline, and the other is told so; if one fails, the other does not."""
    pipe, start = small_pipeline("wan"), threading.Barrier(2)

    def work(memory: str) -> str:
        start.wait()
        try:
            apply(pipe, memory=memory, **EAGER)
        except ChunkflowError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor() as pool:
        (refused,) = filter(None, pool.map(work, (memory, "1MiB")))
    assert "compiled already" in refused or (memory == "1KiB" and "too little" in refused)
    assert len(budget_of(pipe).phases) == 3 and budget_of(pipe).total == 1 << 20
    assert type(pipe).__mro__[1] is type(plain("wan")) and placed(pipe) == {*models(pipe)}
    assert is_plain(remove(pipe)) and same_weights(pipe, plain("wan"))


def rounding(nbytes: int) -> int:
    """How much more than enough is named: a budget has one decimal, in KiB or MiB.  And that of what plans may count on."""
    return (1 << 20 if nbytes >= 1 << 20 else 1 << 10) // 10 + 16


def least_of(pipe: Any, **options: Any) -> tuple[str, int]:
    """The component and the least memory that apply names in its refusal of too little."""
    with pytest.raises(ChunkflowError, match="is too little for") as error:
        apply(pipe, **{**EAGER, "memory": "1KiB", **options})
    found = re.search(r"too little for pipe\.(\w+): .* Give at least memory='", str(error.value))
    assert found is not None and budget_of(pipe) is None
    return found[1], memory_named(error.value)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_least_memory(dtype: torch.dtype | None) -> None:
    """The component of the largest weight is named, and what is suggested is accepted, and little less is not."""
    pipe = small_pipeline("flux")
    name, least = least_of(pipe, dtype=dtype)
    with pytest.raises(ChunkflowError, match="Give at least memory="):
        apply(pipe, memory=least - rounding(least), dtype=dtype, **EAGER)
    apply(pipe, memory=least, dtype=dtype, **EAGER)
    budget = budget_of(pipe)
    largest = {p.name: max(t.nbytes for t in p.weights if isinstance(t, HostWeight)) for p in budget.phases}
    assert name == max(largest, key=largest.__getitem__)
    assert 0 <= budget.usable - sum(p.kept for p in budget.phases) - largest[name] < rounding(least)
    remove(pipe)


def test_large_weights_that_cannot_be_streamed() -> None:
    pipe = small_pipeline("wan")
    _, before = least_of(pipe)
    for block in pipe.transformer.blocks:
        block.ffn.net[2].weight = Int8Params(block.ffn.net[2].weight.data, requires_grad=False)
    nbytes = sum(block.ffn.net[2].weight.nbytes for block in pipe.transformer.blocks)
    largest = r"pipe\.transformer\.blocks\.0\.ffn\.net\.2\.weight, a tensor subclass \(Int8Params\): its layer keeps"
    said = rf"3 that cannot be streamed take {size(nbytes)} \(the largest is {largest}"
    with pytest.raises(ChunkflowError, match=said):
        apply(pipe, memory=before, **EAGER)
    _, least = least_of(pipe)
    assert nbytes - rounding(before) <= least - before <= 1.1 * nbytes + rounding(least)
    apply(pipe, memory=least, **EAGER)
    assert sum(p.kept for p in budget_of(pipe).phases) >= nbytes
    remove(pipe)
    assert torch.equal(WAN.generate(pipe), expected("wan"))
