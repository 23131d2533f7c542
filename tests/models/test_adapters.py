"""LoRA adapters in slots: another adapter is not another program, whatever way of diffusers brings it."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from adapters import ATTENTION, SIZE, Library, Pair, State
from conftest import EAGER, OPTIONS
from helpers import graphs
from torch import nn

from chunkflow_compile import ChunkflowError, enable_adapters, offload, programs, restore
from chunkflow_compile.catalog.small import small_inputs, small_model
from chunkflow_compile.catalog.ulysses import enable_ulysses
from chunkflow_compile.frontend.adapter_slots import Slotted
from chunkflow_compile.placed.placement import placement_of
from chunkflow_compile.weights.backing import Where
from chunkflow_compile.weights.host_buffer import buffer_of
from chunkflow_compile.weights.leaves import leaves_of

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("no_grad")
# One layer with slots in each attention: each more adds a tenth to the graph of a block.
QUERIES = ("to_q",)


@pytest.fixture(scope="module")
def made(kept_dynamo: None) -> Pair:
    with torch.no_grad():
        return Pair(rank=64, slots=2)


@pytest.fixture
def pair(made: Pair) -> Iterator[Pair]:
    """A pair without adapters.  What a test does with it compiles nothing."""
    made.check()  # compiles if a test without the pair has reset Dynamo
    made.compiled = graphs()
    yield made
    made.same_programs()
    made.both(lambda m: m.unload_lora())


def test_adapters_in_random_order(pair: Pair) -> None:
    in_random_order(pair, 4, 10)


def in_random_order(pair: Pair, adapters: int, calls: int) -> None:
    """Of ranks 4 to 64, each loaded once; the weights that are no slots stay where the plan has them."""
    rng, running = random.Random(0), {id(p) for p in programs(pair.model)}
    for number in range(adapters):
        pair.load(pair.library.adapter(number, (4, 8, 16, 32, 64)[number % 5]), f"a{number}")
    seen = list[torch.Tensor]()
    for step in range(calls):
        pair.choose(f"a{rng.randrange(adapters)}", rng.choice([0.5, 1.0]))
        seen.append(pair.check(step % 3))
    pair.same_programs()
    assert {id(p) for p in programs(pair.model)} == running, "no program started anew"
    assert len({float(s.sum()) for s in seen}) > 3, "adapters differ"
    last = programs(pair.model)[-1].measurements[-1]
    assert last.moved_bytes + last.primed_bytes > 0


def test_every_way_of_diffusers(pair: Pair) -> None:
    for number, (rank, extra) in enumerate(((4, 0), (8, 4))):  # the second has a rank pattern
        pair.load(pair.library.adapter(number, rank, extra=extra), f"a{number}")
    plain = pair.check()
    pair.load(pair.library.adapter(2, 16, ("to_k", "ffn.net.2")), "elsewhere")
    for change in (
        lambda m: m.set_adapters(["a0", "elsewhere"], [1.0, 0.5]),  # two at once
        lambda m: m.set_adapters(["a0", "elsewhere"], [0.25, 1.0]),
        lambda m: m.set_adapters(["elsewhere", "a0"], [1.0, 0.5]),
        lambda m: m.set_adapters("elsewhere"),
        lambda m: m.delete_adapters("elsewhere"),
        lambda m: m.set_adapters(["a0"], [0.25]),
        lambda m: m.disable_lora(),
        lambda m: m.enable_lora(),
        lambda m: m.fuse_lora(lora_scale=0.5),
        lambda m: m.unfuse_lora(),
        lambda m: m.fuse_lora(safe_fusing=True, adapter_names=["a1"]),
        lambda m: m.unfuse_lora(),
        lambda m: m.delete_adapters("a1"),
    ):
        pair.both(change)
        pair.check()
    pair.load(pair.library.adapter(5, 12), "a0", hotswap=True)
    hot = pair.check()
    pair.load(pair.library.adapter(6, 8), "a0", hotswap=True)
    assert not torch.equal(pair.check(), hot)
    config = peft.LoraConfig(r=4, lora_alpha=16, use_rslora=True, target_modules=["to_q"], init_lora_weights=False)

    def rs_lora(m: Any) -> None:
        torch.manual_seed(1)
        m.add_adapter(config, "rs")

    pair.both(rs_lora)
    pair.check()
    pair.both(lambda m: m.unload_lora())
    without = pair.check()
    assert not torch.equal(plain, without)
    pair.load(pair.library.adapter(7, 16), "again")
    assert not torch.equal(pair.check(), without)


def test_writes_to_an_adapter(pair: Pair) -> None:
    """In place; other values under the same name; and values that are no numbers, which are gone with the adapter."""
    pair.load(pair.library.adapter(0, 8), "a")
    pair.check()
    for change in (lambda p: p.mul_(1.5), lambda p: setattr(p, "data", p.data * 0.5)):
        for m in (pair.model, pair.twin):
            for name, parameter in m.named_parameters():
                if "lora_" in name:
                    change(parameter)
        pair.check()
    pair.load({k: v * float("nan") for k, v in pair.library.adapter(0, 8).items()}, "broken")
    pair.choose("broken")
    assert pair.model(**small_inputs("wan", SIZE, 0))[0].isnan().any()
    pair.both(lambda m: m.delete_adapters("broken"))
    pair.choose("a")
    pair.check()


WAN_NAMES = {"attn1": "self_attn", "attn2": "cross_attn", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
WAN_NAMES |= {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "transformer.": ""}


def of_others(state: State, kohya: bool) -> State:
    """An adapter of Wan as musubi-tuner of kohya writes it, or as the distillation of lightx2v has it."""
    written = State()
    for key, value in state.items():
        for ours, theirs in WAN_NAMES.items():
            key = key.replace(ours, theirs)
        layer, _, kind = key.rpartition(".lora_")
        layer = "lora_unet_" + layer.replace(".", "_") if kohya else f"diffusion_model.{layer}"
        written[f"{layer}.lora_{'down' if kind == 'A.weight' else 'up'}.weight"] = value
        if kohya:
            written[f"{layer}.alpha"] = torch.tensor(2.0)
    return written


def test_formats_of_others(pair: Pair) -> None:
    from diffusers import WanPipeline

    pipes = [WanPipeline(None, None, None, None, transformer=m) for m in (pair.model, pair.twin)]
    every = pair.library.adapter(0, 8, ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2"))
    blocks = {k: v for k, v in every.items() if ".blocks." in k}
    found = [pair.check()]
    for name, kohya in (("kohya", True), ("lightx2v", False)):
        for pipe in pipes:
            pipe.load_lora_weights(of_others(blocks, kohya), adapter_name=name)
        pair.choose(name)
        found.append(pair.check())
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))


@pytest.mark.parametrize("swaps", [12, pytest.param(200, marks=pytest.mark.long)])
def test_memory_does_not_grow(swaps: int, pair: Pair) -> None:
    """Adapters that come and go leave no tensor behind, in host memory or on the device."""
    store = placement_of(pair.model).store
    pair.load(pair.library.adapter(0, 8), "a0")
    for step in range(4):  # the cycle of the blocks is learnt, and has run
        pair.check(step)
    counts = list[tuple[int, int, int]]()
    for number in range(1, swaps + 1):
        pair.load(pair.library.adapter(number, 8), f"a{number}")
        pair.choose(f"a{number}")
        pair.both(lambda m, old=f"a{number - 1}": m.delete_adapters(old))
        if number % 4 == 0:
            pair.check()
            gc.collect()
            tensors = sum(type(o) in (torch.Tensor, nn.Parameter) for o in gc.get_objects())
            counts.append((tensors, store.held_bytes, programs(pair.model)[0].arena.held))
    assert counts[1] == counts[-1]


def test_what_does_not_fit_is_said_and_the_model_goes_on(pair: Pair) -> None:
    pair.load(pair.library.adapter(0, 8), "a")
    pair.check()
    wrong = {k: v[..., :7] if "lora_A" in k else v for k, v in pair.library.adapter(1, 8).items()}
    other = Library(small_model("flux", SIZE)).adapter(2, 8, ("to_add_out",))
    for name, state, said in (("wrong", wrong, "size mismatch"), ("other", other, "Target modules")):
        for m in (pair.model, pair.twin):
            with pytest.raises((RuntimeError, ValueError), match=said):
                m.load_lora_adapter(dict(state), adapter_name=name)
            m.set_adapters("a")
        pair.check()
    layer = pair.model.blocks[0].attn1.to_q
    layer.lora_A["a"].weight, kept = nn.Parameter(layer.lora_A["a"].weight.to("meta")), layer.lora_A["a"].weight
    with pytest.raises(ChunkflowError, match="'a' has no values: it is loaded in part"):
        pair.check()
    layer.lora_A["a"].weight = kept
    layer.lora_B["a"].weight = nn.Parameter(torch.zeros(3, 8))
    with pytest.raises(ChunkflowError, match="which do not fit a layer of 64 inputs"):
        pair.check()
    pair.both(lambda m: m.delete_adapters("a"))
    pair.check()


def test_adapters_change_while_another_thread_calls(pair: Pair) -> None:
    """Layers may be on the way from one to the other; no call fails."""
    for number in range(3):
        pair.load(pair.library.adapter(number, 8), f"a{number}")
    stop = threading.Event()

    def serve() -> None:
        with torch.no_grad():
            while not stop.is_set():
                assert pair.model(**small_inputs("wan", SIZE, 0))[0].isfinite().all()

    with ThreadPoolExecutor() as pool:
        serving = pool.submit(serve)
        for step in range(20):
            pair.choose(f"a{step % 3}")
            if step == 10:
                pair.both(lambda m: m.delete_adapters("a1"))
                pair.load(pair.library.adapter(9, 4), "a1")
        stop.set()
    serving.result()
    pair.check()


@pytest.mark.long
@pytest.mark.parametrize(("name", "whole"), [("wan", True), ("flux", False)])
def test_many_adapters_in_random_order(name: str, whole: bool) -> None:
    in_random_order(Pair(name, whole, rank=64), 20, 60)


def test_an_adapter_of_the_full_rank_is_what_peft_computes() -> None:
    """Bit for bit, without zeros at the end of a row; in bfloat16, where a scale is not a number of that dtype."""
    pair = Pair(prepare=lambda m: m.to(torch.bfloat16), targets=QUERIES)
    pair.load(pair.library.adapter(0, 16, QUERIES), "a")
    pair.choose("a", 0.3)
    pair.check(tolerance=0.0)
    restore(pair.model)
    pair.check(tolerance=0.0)  # outside compiled code
    pair.same_programs()


def test_an_int8_base() -> None:
    """The class that PEFT chooses for weights of torchao has slots too, in the dtype that it computes in."""
    torchao = pytest.importorskip("torchao.quantization")
    pair = Pair(
        prepare=lambda m: torchao.quantize_(m.blocks, torchao.Int8WeightOnlyConfig()),
        options={**EAGER, "min_bytes": 1024},
        targets=QUERIES,
    )
    pair.swap(4, 16, targets=QUERIES)
    assert pair.model.blocks[0].attn1.to_q.slots.dtype == torch.float32


def test_slots_are_within_the_budget() -> None:
    """They stream whatever their size, what is on the device keeps to the memory, and a swap copies slots alone."""
    options = {**EAGER, "slowdown": None, "weight_memory": 400_000}
    pair = Pair("wan", True, options=options, rank=2, targets=QUERIES)
    slots = [m.slots for m in pair.model.modules() if isinstance(m, Slotted)]
    assert all(t.nbytes < OPTIONS["min_bytes"] and buffer_of(t) is not None for t in slots)
    for number in range(3):
        pair.load(pair.library.adapter(number, 2, QUERIES), f"a{number}")
        pair.choose(f"a{number}")
        for _ in range(2):
            pair.check(number, tolerance=0.0)  # it has the full rank
        (program,) = programs(pair.model)
        swapped, after = program.measurements[-2:]
        assert swapped.primed_bytes <= sum(t.nbytes for t in slots) and not after.primed_bytes
        assert swapped.moved_bytes == after.moved_bytes == program.plan.moved_bytes > 0
        assert program.plan.device_bytes <= 400_000 and program.arena.held <= 400_000
    before = [t.buffer.version for t in slots]
    pair.choose("a2", 0.5)
    pair.check(2)
    assert [t.buffer.version for t in slots] == before, "another scale writes no slot"
    kept = [t for t in leaves_of(pair.model) if buffer_of(t) is None]
    assert not any(t.dim() == 2 and t.shape[0] == 2 for t in kept), "adapters themselves are no weights of the model"
    pair.same_programs()


@pytest.mark.long
def test_a_scale_of_a_call() -> None:
    """joint_attention_kwargs scales the layers around the blocks, and takes it back."""
    pair = Pair("flux")
    pair.load(pair.library.adapter(0, 8), "a")
    pair.check(joint_attention_kwargs={"scale": 1.0})  # the blocks get a dict for the first time
    pair.compiled = graphs()
    found = [pair.check(joint_attention_kwargs={"scale": s}) for s in (1.0, 0.3, 0.0, 1.0)]
    assert torch.equal(found[0], found[3]) and not torch.equal(found[0], found[1])
    pair.same_programs()


@pytest.mark.long
def test_what_needs_a_compilation_is_compiled_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(targets=["to_q", "to_k", "to_v"])
    pair.load(pair.library.adapter(0, 40), "large")
    pair.check()
    assert graphs() > pair.compiled and "enable_adapters(rank=40, slots=1)" in caplog.text
    pair.load(pair.library.adapter(1, 8, ("ffn.net.2",)), "elsewhere")
    pair.check()
    assert "2 layers that enable_adapters had not named" in caplog.text
    pair.choose(["large", "elsewhere"])  # on other layers
    pair.check()
    pair.load(pair.library.adapter(2, 8, ("to_q",)), "second")
    pair.choose(["large", "second"])
    pair.check()
    assert "rank=40, slots=2" in caplog.text
    pair.compiled = graphs()
    for number, (rank, targets) in enumerate(((33, ATTENTION), (16, ("ffn.net.2",)), (8, ("to_q",)))):
        pair.load(pair.library.adapter(number, rank, targets), f"more{number}")
        pair.choose(f"more{number}")
        pair.check()
    pair.same_programs()


@pytest.mark.long
def test_a_kind_that_slots_do_not_hold(caplog: pytest.LogCaptureFixture) -> None:
    """DoRA and a LoRA with a bias run PEFT's forward; a plain one has its programs again after them."""
    pair = Pair()
    for kind in ({"use_dora": True}, {"lora_bias": True}):
        config = peft.LoraConfig(r=4, target_modules=["to_q", "to_k"], init_lora_weights=False, **kind)

        def add(m: Any, config: Any = config, kind: Any = kind) -> None:
            torch.manual_seed(1)
            m.add_adapter(config, next(iter(kind)))

        pair.both(add)
        pair.check()
    assert "(Dora)" in caplog.text and "(lora_bias)" in caplog.text
    pair.load(pair.library.adapter(0, 8), "plain")
    pair.choose("plain")
    pair.check()
    pair.compiled = graphs()
    pair.both(lambda m: m.unload_lora())
    pair.check()
    pair.same_programs()


def on_a_rank(rank: int) -> None:
    """The weights are shared, and the slots are each rank's own."""
    torch.set_grad_enabled(False)
    pair = Pair(prepare=lambda m: enable_ulysses(m, 2), options={**EAGER, "share": True})
    slots = [m.slots for m in pair.model.modules() if isinstance(m, Slotted)]
    assert slots and not any(buffer_of(t).backing.where is Where.SHARED for t in slots)
    pair.swap(4, 16, 8)
    assert sum(m.collectives for p in programs(pair.model) for m in p.measurements)


@pytest.mark.long
def test_two_ranks(on_ranks: Callable[..., None]) -> None:
    on_ranks(on_a_rank)


@pytest.mark.long
def test_copies_and_pickles() -> None:
    model, inputs = enable_adapters(small_model("wan", SIZE), rank=16), small_inputs("wan", SIZE, 0)
    without = model(**inputs)[0]
    model.load_lora_adapter(Library(small_model("wan", SIZE)).adapter(0, 8), adapter_name="a")
    want = model(**inputs)[0]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**inputs)[0], want)
        other.delete_adapters("a")
        assert torch.equal(other(**inputs)[0], without)
        assert torch.equal(model(**inputs)[0], want), "each has its own"


def test_what_is_refused() -> None:
    model, placed, enabled, compiled = (small_model("wan", SIZE) for _ in range(4))
    offload(placed, min_bytes=1024)
    enable_adapters(enabled)
    compiled.compile()
    given: dict[str, Any]
    for target, given, said in (
        (model, {"rank": 0}, "rank=0 must"),
        (model, {"slots": 1.5}, "slots=1.5 must"),
        (model, {"targets": ["nowhere"]}, "no layers for targets"),
        (nn.Sequential(nn.Linear(2, 2)), {}, "has no repeated blocks"),
        (3, {}, "takes a model or a pipeline"),
        (placed, {}, "is placed already"),
        (enabled, {}, "are enabled already"),
        (compiled, {}, "compiled already"),
    ):
        with pytest.raises(ChunkflowError, match=said):
            enable_adapters(target, **given)
    assert not any(isinstance(m, Slotted) for refused in (model, placed, compiled) for m in refused.modules())
