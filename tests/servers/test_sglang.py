"""The plug-in of SGLang-diffusion, loaded by SGLang's own loader, on its own transformers, arguments, stage and pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: make test-sglang makes an environment with it", allow_module_level=True)

import sglang_parts
from helpers import graphs
from sglang_parts import MEMORY, MODELS, OPTIONS

from chunkflow_compile import cycles, programs
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.servers import sglang as plugin_module
from chunkflow_compile.servers.settings import PluginSettings
from chunkflow_compile.units import parse_bytes, size
from chunkflow_compile.weights.host_weight import HostWeight


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as a worker of the server: with the plug-in, as the one rank."""
    torch.set_num_threads(1)
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    sglang_parts.load_sglang()
    sglang_parts.join_ranks()
    yield
    dist.destroy_process_group()


class Served:
    """A transformer that a pipeline of SGLang serves, and its twin, which runs eagerly on the same weights.

    ``settings``: others than those of this process, with which the hooks are called on it.
    """

    def __init__(self, folder: Path, name: str, settings: PluginSettings | None = None, **given: Any) -> None:
        self.args = sglang_parts.arguments(folder, name, **given)
        self.twin, self.inputs = sglang_parts.transformer(self.args, name)
        self.model, _ = sglang_parts.transformer(self.args, name)
        self.worst = 0.0
        if settings is None:
            self.pipe = sglang_parts.pipeline(self.model, self.args)
            return
        from sglang.multimodal_gen.runtime.utils.torch_compile import CompiledModuleRegistry

        hooks = plugin_module.Hooks(settings)
        hooks.place(None, self.model)
        assert hooks.compile(lambda *given, **more: None, CompiledModuleRegistry(), self.model, compile_kwargs={})

    def request(self, size: int = 8, steps: int = 4) -> None:
        """A request: steps whose inputs differ, but for the prompt.  Notes the largest difference from the twin."""
        prompt = self.inputs(size)["encoder_hidden_states"]
        with sglang_parts.request(dist.get_world_size()):
            for _ in range(steps):
                inputs = {**self.inputs(size), "encoder_hidden_states": prompt}
                expected = self.twin(**inputs)
                self.worst = max(self.worst, float((self.model(**inputs) - expected).abs().max()))

    def answer(self) -> torch.Tensor:
        """What the transformer answers to inputs that are always the same."""
        torch.manual_seed(1)
        with sglang_parts.request(dist.get_world_size()):
            found: torch.Tensor = self.model(**self.inputs(8))
        return found

    def moved(self) -> int:
        """The bytes that the newest step copied: those of its plan, within the budget."""
        route = cycles(self.model)[0]
        plan = route.cycle.plan
        assert 0 < plan.device_bytes <= parse_bytes(MEMORY, "memory")
        assert route.measurements[-1].moved_bytes == plan.moved_bytes > 0
        return plan.moved_bytes


@pytest.mark.parametrize("name", MODELS)
def test_a_transformer_streams_within_memory(name: str, tmp_path: Path) -> None:
    served = Served(tmp_path, name)
    assert any(isinstance(p.data, HostWeight) for p in served.model.parameters())
    served.request()
    moved = served.moved()
    first = graphs()
    served.request(size=12)
    later = graphs()
    served.request(size=20)
    assert served.moved() == moved
    assert served.worst == 0
    assert not counters["graph_break"]
    assert later <= 2 * first and graphs() == later, "new sizes compile once more, then nothing does"


def serve_all(rank: int, folder: str) -> None:
    sglang_parts.load_sglang()
    sglang_parts.join_ranks()
    for name in MODELS:
        torch._dynamo.reset()
        served = Served(Path(folder) / f"{name}{rank}", name, num_gpus=2, ulysses_degree=2)
        served.request()
        served.moved()
        served.request(size=12)
        served.moved()
        assert served.worst == 0
        assert any("all_to_all_single" in str(program.program) for program in programs(served.model)), name


def test_two_ranks_stream_with_ulysses(on_ranks: Callable[..., None], tmp_path: Path) -> None:
    on_ranks(serve_all, str(tmp_path), fresh=True)


@pytest.mark.parametrize("hooked", [True, False])
def test_the_cache_of_norms_would_break_each_block(
    hooked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without fused kernels, as on GPUs where a shape has none: SGLang's norms are functions of torch."""
    from sglang.multimodal_gen.runtime.layers.custom_op import CustomOp
    from sglang.multimodal_gen.runtime.layers.layernorm import FP32LayerNorm

    monkeypatch.setattr(CustomOp, "dispatch_forward", lambda self: self.forward_native)
    if not hooked:
        monkeypatch.setattr(FP32LayerNorm, "_cached_fp32_param", FP32LayerNorm._cached_fp32_param.__wrapped__)
    served = Served(tmp_path, "wan")
    served.request(steps=1)
    served.request(size=12, steps=1)  # compiles again, when there is something in the cache
    breaks = {reason.partition("\n")[0] for reason in counters["graph_break"]}
    assert breaks == (set() if hooked else {"Data pointer comparison"})


@pytest.mark.parametrize("hooked", [True, False])
def test_both_branches_of_guidance_run_the_same_programs(
    hooked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.multimodal_gen.runtime.models.dits import qwen_image

    if not hooked:
        found = qwen_image._qwen_modulation_cache_key.__wrapped__
        monkeypatch.setattr(qwen_image, "_qwen_modulation_cache_key", found)
    served = Served(tmp_path, "qwen-image")
    timestep = torch.tensor([500.0])
    with sglang_parts.request():
        served.twin(**served.inputs(8))  # without FlashInfer, SGLang makes modules of its own in the first call
        for _ in range(2):
            served.model(**{**served.inputs(8), "timestep": timestep})
    blocks = [p for p in programs(served.model) if any(name.startswith("transformer_blocks.") for name in p.buffers)]
    assert (len(blocks) == len(served.model.transformer_blocks)) is hooked


def test_nothing_of_sglang_moves_a_placed_transformer(tmp_path: Path) -> None:
    from sglang.multimodal_gen.runtime.managers.memory_managers.layerwise_offload import is_layerwise_offloaded_module

    served = Served(tmp_path, "wan")
    served.request()
    assert not is_layerwise_offloaded_module(served.model)
    (stage,) = served.pipe._stage_name_mapping.values()
    assert stage._offloaded_dit_modules_for_compile == []
    manager = sglang_parts.residency(served.pipe, served.args)
    strategy = manager.strategy_for("transformer", served.model)
    assert type(strategy).__name__ == "ComponentResidencyStrategy"
    assert type(manager.strategy_for("transformer", served.twin)).__name__ == "ResidentStrategy"


def test_the_log_says_once_that_it_streams(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = Served(tmp_path, "wan")
    manager = sglang_parts.residency(served.pipe, served.args)
    logging.getLogger().addHandler(caplog.handler)  # SGLang has put its own in its place
    with caplog.at_level(logging.INFO, logger="chunkflow_compile.servers"):
        for _ in range(2):
            served.request()
            manager.finish_request()
    moved = served.moved()
    (said,) = [r.getMessage() for r in caplog.records if "streams:" in r.getMessage()]
    assert said.startswith(f"WanTransformer3DModel streams: a step copies {size(moved)}, and ")


def test_eager_lowering_keeps_sglang_s_fused_kernels(tmp_path: Path) -> None:
    served = Served(tmp_path, "wan")
    served.request(steps=1)
    assert OPTIONS["lowering"] == "eager"
    regions = [
        part.code for p in programs(served.model) for part in p.program.module.modules() if hasattr(part, "code")
    ]
    assert any("sgl_kernel.fused_scale_residual_norm_scale_shift_cpu" in code for code in regions)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dit_layerwise_offload": True}, "keep them otherwise (layerwise-offload): leave out --dit-layerwise-offload"),
        ({"component_residency": "transformer=snapshot-offload"}, "keep them otherwise (snapshot-offload)"),
        ({"layerwise_offload_components": ["dit"]}, "keep them otherwise (layerwise-offload)"),
        ({"enable_breakable_cuda_graph": True}, "CUDA graphs exclude each other"),
        ({"enable_torch_compile": False}, "streams weights through compiled code: add --enable-torch-compile."),
    ],
)
def test_arguments_that_contradict_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ChunkflowError) as refused:
        sglang_parts.arguments(tmp_path, **given)
    assert str(refused.value).startswith("CHUNKFLOW_MEMORY") and said in str(refused.value)


def test_a_mode_with_cuda_graphs_tunes_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model by kind has no graph, and a request's context would break that of a whole one."""
    given = dict[str, Any]()
    monkeypatch.setattr("chunkflow_compile.frontend.compile.compile", lambda module, **options: given.update(options))
    monkeypatch.setattr(plugin_module, "_streams", lambda module: True)
    registry = SimpleNamespace(module_ids=set())
    hooks = plugin_module.Hooks(PluginSettings("12GiB", {}))
    assert hooks.compile(None, registry, torch.nn.Linear(2, 2), compile_kwargs={"mode": "max-autotune"})
    assert given == {"mode": "max-autotune", "cudagraphs": False, "memory": "12GiB"} and registry.module_ids


def test_other_components_keep_their_residency(tmp_path: Path) -> None:
    args = sglang_parts.arguments(tmp_path, component_residency="text_encoder=layerwise-offload")
    assert args.component_residency == {"text_encoder": "layerwise-offload", "dit": "component-offload"}
    assert args.canonical_residency_mode("transformer_2") == "component-offload"
    assert args.canonical_residency_mode("vae") is None


def test_a_budget_that_is_too_small_is_refused(tmp_path: Path) -> None:
    served = Served(tmp_path, "wan", PluginSettings("64KiB", OPTIONS))
    with pytest.raises(BackendCompilerFailed, match=r"memory=64.0 KiB is too little: .* Give memory="):
        served.request(steps=1)


def test_inductor_lowers_the_regions_too(tmp_path: Path) -> None:
    served = Served(tmp_path, "wan", PluginSettings(MEMORY, {**OPTIONS, "lowering": "inductor"}))
    served.request()
    served.moved()
    assert served.worst < 1e-5


def test_bad_settings_end_the_server_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHUNKFLOW_MEMORY", "much")
    with pytest.raises(SystemExit, match="CHUNKFLOW_MEMORY='much' is not a size"):
        plugin_module.plugin()


def test_an_unsupported_release_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry

    before = {target: len(hooks) for target, hooks in HookRegistry._hooks.items()}
    monkeypatch.setenv("CHUNKFLOW_MEMORY", "8GiB")
    monkeypatch.setattr("chunkflow_compile.servers.settings.version", lambda name: "0.6.1")
    with pytest.raises(SystemExit, match=r"^This is sglang 0\.6\.1, and"):
        plugin_module.plugin()
    assert {target: len(hooks) for target, hooks in HookRegistry._hooks.items()} == before


def save_adapter(folder: Path, model: Any, seed: int) -> str:
    """A LoRA of rank 4 for the attention and the feed-forward of a Wan, as its author would publish it."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, layer in model.named_modules():
        if name.startswith("blocks.") and (".attn1.to_" in name or ".attn2.to_q" in name or ".ffn.fc_" in name):
            layer = getattr(layer, "base_layer", layer)
            if hasattr(layer, "weight") and not name.endswith("base_layer"):
                out, width = layer.weight.shape
                adapter[f"{name}.lora_A.weight"] = torch.randn(4, width, generator=generator) * 0.1
                adapter[f"{name}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.1
    assert adapter
    folder.mkdir()
    save_file(adapter, folder / "adapter.safetensors")
    return str(folder / "adapter.safetensors")


@pytest.mark.parametrize(("mode", "cached"), [("merge", False), ("dynamic", False), ("merge", True)])
def test_an_adapter_that_the_server_loads(
    mode: str, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cached``: as at the start of a server, which then keeps merged weights of a model in host memory in files."""
    monkeypatch.setenv("SGLANG_DIFFUSION_CACHE_ROOT", str(tmp_path))
    served = Served(tmp_path, "wan")
    twin_pipe = sglang_parts.pipeline(served.twin, served.args, staged=False)
    served.request()
    bare = served.answer()
    first, second = (save_adapter(tmp_path / str(i), served.model, i) for i in range(2))
    for path, strength in ((first, 1.0), (second, 0.5)):
        for pipe in (served.pipe, twin_pipe):
            at_start = cached and path == first and pipe is served.pipe
            pipe.set_lora(path, path, strength=strength, merge_mode=mode, cache_merged=at_start)
        served.request(steps=6)
        assert served.moved() > 0 and served.worst == 0
        assert not torch.equal(served.answer(), bare)
    for pipe in (served.pipe, twin_pipe):
        pipe.deactivate_lora_weights()
    served.request(steps=6)
    assert served.moved() > 0 and served.worst == 0
    assert torch.equal(served.answer(), bare)
