"""Bad input: a sentence that names the thing and the fix, and the model left as it was."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import EAGER, OPTIONS
from helpers import Stack, check_steps, stack, twins
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass

from chunkflow_compile import (
    Arena,
    ChunkflowError,
    admit,
    apply,
    compile,
    cycles,
    enable_adapters,
    explain,
    offload,
    programs,
    remove,
    replan,
    restore,
)
from chunkflow_compile.passes.graph.discover import collective_kind, group_name
from chunkflow_compile.releases import warn_if_untested
from chunkflow_compile.units import enough, parse_bytes, size


def run(model: nn.Module, x: torch.Tensor | None = None, fullgraph: bool = True, **options: Any) -> torch.Tensor:
    goal = {
        k: v for k, v in OPTIONS.items() if k != "slowdown" or options.keys().isdisjoint(("memory", "weight_memory"))
    }
    compiled = torch.compile(model, backend="chunkflow", fullgraph=fullgraph, options={**goal, **options})
    return compiled(torch.randn(4, 8) if x is None else x)


def frozen(model: nn.Module) -> None:
    with torch._inductor.config.patch(freezing=True):
        run(model)


def undone(way: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A way after which the model is restored, so that the test finds it as it was."""

    def call(model: Any) -> Any:
        try:
            way(model)
        finally:
            restore(model)

    return call


def twice(function: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    return undone(lambda model: function(function(model, min_bytes=64, **options), **options))


def placed(*inputs: torch.Tensor) -> Callable[[Any], Any]:
    return undone(lambda model: run(offload(model, min_bytes=4096), *inputs))


def under(config: Any, name: str, way: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A way of compiling under a setting of torch."""

    def call(model: Any) -> Any:
        with config.patch({name: True}):
            return way(model)

    return call


SETTINGS: list[tuple[Any, str, str]] = [
    (torch._dynamo.config, "install_free_tensors", "makes weights attributes of the graph"),
    (torch._dynamo.config, "use_graph_deduplication", "calls of one function.*compiles equal regions once in any case"),
    (torch._dynamo.config, "verify_correctness", "runs the graph on copies of the weights"),
    (torch._functorch.config, "selective_decompose", "which input of the graph is which weight"),
]


def compiled_before(part: Callable[[Any], nn.Module]) -> Callable[[Any], Any]:
    def call(model: Any) -> Any:
        part(model).compile(backend="eager")
        return compile(model)

    return call


def given(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: run(model, **options)


def by_kind(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: compile(model, **options)


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (given(memmory="8GiB"), r"Unknown option 'memmory'; did you mean 'memory'"),
    (
        given(policy="resident", slowdown=None, pack=True),
        "pack=True with policy='resident', which copies nothing: leave out one",
    ),
    (given(pack=1), r"Option pack=1 is unknown; use one of False, True, auto"),
    (
        given(exchange_groups=True),
        r"Option exchange_groups, unless it is False or 'auto', must be a whole number of at",
    ),
    (given(policy="fsdp"), r"policy='fsdp' is only predicted, by chunkflow simulate; it does not run"),
    (given(policy="host-yield"), r"policy='host-yield' is only predicted, by chunkflow simulate; it does not run"),
    (
        given(policy="group-offload"),
        r"policy='group-offload' is only predicted, by chunkflow simulate; it does not run",
    ),
    (given(policy="fast"), r"policy='fast' is unknown; use one of resident, layerwise, layerwise-barrier, "),
    (given(memory="8 pounds"), r"memory='8 pounds' is not a size: give bytes, or a text such as '8GiB'"),
    (given(slowdown=0.9), r"slowdown=0.9 is below 1"),
    (given(slowdown="fast"), r"slowdown must be a number of at least 1, not 'fast'"),
    (given(memory=1 << 20, slowdown=1.1), r"Give memory or slowdown, not both"),
    (given(hardware="h300"), r"no hardware profile 'h300'; the nearest are h200, gh200, mi300x. Use one of them"),
    (given(chunk_bytes=0), r"chunk_bytes must be a whole number of at least 256, not 0"),
    (given(chunk_bytes=1000), r"chunk_bytes=1000 must be a multiple of 256.*use 768"),
    (given(min_bytes="1 pound"), r"min_bytes='1 pound' is not a size"),
    (given(min_bytes=-1), r"min_bytes must be a whole number of at least 0, not -1"),
    (given(disable=["verfy"]), r"no pass 'verfy' that can be disabled; did you mean 'verify'"),
    (given(disable="verify"), r"disable='verify' must be a list of names"),
    (given(inductor={"freezing": True}), r"freezing turns weights into constants"),
    (given(inductor={"max_autotun": True}), r"Unknown Inductor option 'max_autotun'.*did you mean 'max_autotune'"),
    (given(inductor={"triton.cudagraphs": True}), r"would double the streamed weights"),
    (
        given(weight_memory=4096),
        r"weight_memory=4.0 KiB is too little: the program needs (\S+) KiB.*Give weight_memory='\S+KiB' or more",
    ),
    (frozen, r"freezing turns weights"),
    (torch.enable_grad()(run), r"inference only.*torch.no_grad\(\)"),
    (placed(torch.randn(4, 8, device="meta")), r"placed for cpu, but argument 0 is on meta: move it to cpu"),
    (lambda model: torch.compile(model, backend="chunkflow", mode="fastest")(torch.randn(4, 8)), r"(?i)mode"),
    (twice(offload), r"offloaded already"),
    (lambda _: offload(Stack().to("meta")), r"meta device, without values"),
    (by_kind(memry=3), r"Unknown option 'memry'; did you mean 'memory'"),
    (by_kind(devise="cpu"), r"Unknown option 'devise'; did you mean 'device'\? Options are device, dtype, share, "),
    (by_kind(host_memry=3), r"Unknown option 'host_memry'; did you mean 'host_memory'"),
    (by_kind(memory="12 gigs"), r"memory='12 gigs' is not a size"),
    (by_kind(plan="/nowhere"), r"The plan /nowhere cannot be read: No such file"),
    (by_kind(timings="/nowhere"), r"The timings /nowhere cannot be read: No such file"),
    (by_kind(dump="/proc/nowhere"), r"The folder /proc/nowhere cannot be written"),
    (by_kind(dump=5), r"dump=5 must be a path"),
    (by_kind(hardware="nope.json"), r"The hardware profile nope.json cannot be read: No such file"),
    (by_kind(inductor="x"), r"inductor='x' must be a dict"),
    (by_kind(debug=5), r"debug=5 is unknown; use poison or threads"),
    (by_kind(device="gpu"), r"device='gpu' is no device of torch: give 'cpu', 'cuda' or 'cuda:0'"),
    (by_kind(dtype="bf16"), r"casts to float32, float16 or bfloat16 of torch, not to 'bf16'"),
    (lambda model: offload(model, min_bytes="1 pound"), r"min_bytes='1 pound' is not a size"),
    (lambda model: offload(model, min_bytes=64, host_memory="24 gigs"), r"host_memory='24 gigs' is not a size"),
    (lambda model: restore(model, 5.5), r"device=5.5 is no device of torch"),
    (lambda _: Arena("gpu"), r"device='gpu' is no device of torch"),
    (lambda _: Arena(None), r"device=None is no device of torch"),
    (lambda _: remove("x"), r"'x' is a name, not a model or a pipeline: load it first"),
    (lambda _: enable_adapters("x"), r"enable_adapters takes a model or a pipeline with a transformer, not str"),
    (lambda _: explain("x"), r"This str is neither a model nor a compiled pipeline: call .*compile\(pipe\) first"),
    (lambda _: admit("x"), r"This str is not a compiled pipeline"),
    (by_kind(cudagraphs="always"), r"Option cudagraphs='always' is unknown; use one of False, True, auto"),
    (by_kind(mode="fast"), r"Unknown mode 'fast'"),
    (by_kind(dynamic="yes"), r"dynamic='yes' must be True"),
    (by_kind(options={"memory": "1GiB"}), r"options is an argument of torch.compile"),
    (lambda _: compile(lambda x: x), r"This function is neither a model nor a diffusers pipeline: pass a torch.nn"),  # type: ignore[arg-type]
    (compiled_before(lambda model: model), r"This model is compiled already"),
    (compiled_before(lambda model: model.blocks[0]), r"A part of this model is compiled already"),
    (
        twice(compile, lowering="eager"),
        r"This model is compiled already: call chunkflow_compile.restore\(model\) first",
    ),
    (lambda model: twice(compile, dtype=torch.bfloat16)(offload(model, min_bytes=64)), r"placed already, so dtype"),
    *(
        (under(config, name, way), rf"torch\.\w+\.config\.{name} .*{why}.*set it to False")
        for config, name, why in SETTINGS
        for way in (run, placed(), compile)
        if hasattr(config, name)
    ),
]

OF_A_MODEL = (offload, programs, cycles, replan)
REFUSED += [(lambda _, f=f: f(5), r"This int is not a model: pass a torch.nn.Module") for f in OF_A_MODEL]  # type: ignore[misc]
OF_BOTH = (compile, apply, restore, remove)
REFUSED += [(lambda _, f=f: f(5), r"This int is neither a model nor a diffusers pipeline: pass a ") for f in OF_BOTH]


@pytest.mark.parametrize(("call", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_what_is_refused_leaves_the_model_as_it_was(call: Callable[[Any], Any], sentence: str, no_grad: None) -> None:
    model, twin, x = stack(), stack(), torch.randn(4, 8)
    with pytest.raises(Exception, match=sentence):
        call(model)
    assert all(
        type(p) is type(q) and torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert not programs(model) and torch.equal(model(x), twin(x))


def test_weights_that_are_attributes_of_the_graph(no_grad: None) -> None:
    """Whatever made them that; the error is the one that Dynamo raises for all backends, and ours too."""
    model, x = stack(), torch.randn(4, 8)

    def traced(_: Any, inputs: Any) -> Any:
        return lookup_backend("chunkflow")(torch.fx.symbolic_trace(model), inputs, options=EAGER)

    with pytest.raises(BackendCompilerFailed, match=r"32.0 KiB of parameters are attributes of the graph") as raised:
        torch.compile(model.forward, backend=traced, fullgraph=True)(x)
    assert isinstance(raised.value, ChunkflowError) and not programs(model)


@pytest.mark.parametrize("option", ["memory", "weight_memory"])
def test_the_floor_that_the_error_names_is_enough(option: str, no_grad: None) -> None:
    model, twin, x = stack(), stack(), torch.randn(4, 8)
    with pytest.raises(Exception, match=f"(?<!_){option}=1 B is too little") as raised:
        run(model, x, **{option: "1B"}, lowering="eager")
    named = re.search(rf"Give {option}='(\S+)' or more", str(raised.value))[1]
    torch.testing.assert_close(run(model, x, **{option: named}, lowering="eager"), twin(x))
    program = programs(model)[-1].program
    assert program.problem.live_bytes > 0
    floor = program.plan.device_bytes + (program.problem.live_bytes if option == "memory" else 0)
    assert floor <= parse_bytes(named, option) < floor + 1024 / 10
    with pytest.raises(Exception, match=f"is too little: .*Give {option}='{named}'"):
        run(model, x, **{option: floor - 1}, lowering="eager")


def test_a_plan_is_run_on_the_model_that_it_was_made_for_alone(tmp_path: Path, no_grad: None) -> None:
    model, twin, x = stack(), stack(), torch.randn(4, 8)
    run(model, x, weight_memory=40000, lowering="eager")
    made = programs(model)[-1].plan
    file = tmp_path / "plan.json"
    file.write_text(made.to_json())
    torch._dynamo.reset()
    restore(model)
    offload(model, min_bytes=4096)
    given = {"plan": str(file), "memory": None, "slowdown": None, "lowering": "eager"}
    torch.testing.assert_close(run(model, x, **given), twin(x))
    assert programs(model)[-1].plan == made
    other = Stack(3).eval()
    edited = tmp_path / "edited.json"
    edited.write_text(made.to_json().replace('"arena_bytes": ', '"arena_bytes": 1'))
    for changed, said in (
        ({}, r"plan was made for problem .* only one of them has the weight blocks.2.down.weight"),
        ({"plan": str(edited)}, "edited after it was written"),
        ({"plan": "/nowhere"}, r"plan /nowhere cannot be read"),
        ({"slowdown": 1.5}, "a plan or a goal for one"),
    ):
        with pytest.raises(Exception, match=said):
            run(other, x, **{**given, **changed})


@pytest.mark.long
def test_inductor_options_of_the_user_reach_the_regions(no_grad: None) -> None:
    model, twin, x = stack(), stack(), torch.randn(4, 8)
    seen: list[int] = []

    class CountsNodes(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(len(graph.nodes))

        def uuid(self) -> None:
            return None

    options = {"post_grad_custom_post_pass": CountsNodes(), "cpp.simdlen": 1}
    torch.testing.assert_close(run(model, x, inductor=options), twin(x))
    assert len(seen) == 3, "embedding, block and head are lowered once each"


def test_a_weight_that_forward_changes_stays(no_grad: None) -> None:
    class Changes(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.blocks[0].up.weight.mul_(0.5)
            return super().forward(x)

    model, twin = twins(Changes)
    compiled = torch.compile(model, backend="chunkflow", fullgraph=True, options=EAGER)
    check_steps(compiled, twin, 3)
    why = {w.name: w.why for w in programs(model)[-1].plan.weights}
    assert why["blocks.0.up.weight"] == "forward writes it"
    restore(model)
    assert torch.equal(model.blocks[0].up.weight, twin.blocks[0].up.weight)


def test_an_unknown_collective_and_a_process_group_that_is_an_input_are_errors() -> None:
    """Such a collective is no compute."""
    graph = torch.fx.Graph()
    x, group = graph.placeholder("x"), graph.placeholder("group")
    for op, arguments in (
        (torch.ops._c10d_functional.broadcast.default, (0, "0")),
        (torch.ops.c10d_functional.all_reduce.default, ("sum", "", [0, 1], 2)),
    ):
        node = graph.call_function(op, (x, *arguments))
        with pytest.raises(ChunkflowError, match=rf"collective {op._schema.name} \(node {node.name}\).*does not know"):
            collective_kind(node)
    node = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", group))
    with pytest.raises(ChunkflowError, match=r"The process group of all_reduce\w* is an input of the graph"):
        group_name(node)


def test_an_untested_torch_is_a_warning(monkeypatch: pytest.MonkeyPatch, no_grad: None) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.warns(UserWarning, match="This is torch 2.10.0; ChunkFlow is tested on torch 2.11 to 2.15") as seen:
        for _ in range(2):
            torch._dynamo.reset()
            run(stack(), lowering="eager")
    assert len([w for w in seen if "is tested on" in str(w.message)]) == 1, "once"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tested in ("2.11.0+cu130", "2.15.0"):
            warn_if_untested(tested)
        with pytest.raises(UserWarning, match="is tested on"):
            warn_if_untested("2.16.0a0")


def test_a_size_is_shown_in_the_unit_that_fits_and_is_enough_when_it_is_pasted_back() -> None:
    shown = {
        0: "0 B",
        1023: "1023 B",
        4096: "4.0 KiB",
        (1 << 20) - 1: "1.0 MiB",
        1611137024: "1.50 GiB",
        5 << 40: "5120.00 GiB",
    }
    assert {nbytes: size(nbytes) for nbytes in shown} == shown and size(None) == "-"
    named = {5: "5B", 17408: "17KiB", 17409: "17.1KiB", 1 << 30: "1GiB", (1 << 30) + 1: "1.01GiB"}
    assert {nbytes: enough(nbytes) for nbytes in named} == named
    for nbytes in (*named, *(3**n for n in range(28)), *((1 << n) - 1 for n in range(44))):
        assert nbytes <= parse_bytes(enough(nbytes), "memory") <= 1.1 * nbytes + 1
