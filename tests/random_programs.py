"""Random models and random legal plans, which hypothesis draws and shrinks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import hypothesis
import torch
import torch.distributed as dist
from helpers import gather_heads, scatter_heads
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.lowering import lower
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.graph.head_groups import in_head_groups
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.shard import on_peers, streamable
from chunkflow_compile.passes.pieces import parts, piece_bytes
from chunkflow_compile.passes.placement.place import PlanBuilder
from chunkflow_compile.passes.placement.search import Planner
from chunkflow_compile.passes.placement.timeline import Simulator
from chunkflow_compile.passes.placement.windows import as_windows
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.passes.program.rewrite import Program, rewrite
from chunkflow_compile.passes.program.verify import verify_together
from chunkflow_compile.runtime.arena import Arena, Binding
from chunkflow_compile.runtime.device import DeviceKind
from chunkflow_compile.runtime.executor import Executor
from chunkflow_compile.runtime.wrapped_calls import LoweredRegion
from chunkflow_compile.weights.bytes import as_weight, flat_bytes
from chunkflow_compile.weights.peer_pieces import Pieces
from chunkflow_compile.weights.source import Bytes

CHUNK = 512
MACHINE = load_profile(Path(__file__).parent / "slow_compute.json")


@dataclass(frozen=True)
class Layer:
    """``exchange``: whether two all-to-alls follow, or, if ``beside``, one runs while the layer computes.  ``attends``:
    whether there is attention between these, of queries, keys and values that are exchanged one by one."""

    hidden: int
    bias: bool
    exchange: bool
    beside: bool = False
    attends: bool = False


@dataclass(frozen=True)
class Spec:
    """``twice``: the first layer is read again at the end.  ``tied``: the head is the first layer's weight.  ``groups``: of
    heads, into which exchanges around attention are divided."""

    width: int
    layers: tuple[Layer, ...]
    twice: bool
    tied: bool
    seed: int
    groups: int = 1


@dataclass(frozen=True)
class Choices:
    """``stay``: share of the chunks that stay resident; ``reach``: maximum number of windows of a prefetch ahead, 0 for no
    limit.  ``peers``: whether some weights are sharded over the devices of ranks.  ``drive``: whether every other of the rest
    is in a file, in a cycle.
    """

    stay: float
    reach: int
    hard: bool
    seed: int
    peers: bool = False
    drive: bool = False


def examples(seed: int, count: int) -> Callable[[Any], Any]:
    """Decorates a test on ``count`` examples, the same in every run; hypothesis shrinks a failure."""

    def decorate(test: Any) -> Any:
        phases = (Phase.generate, Phase.shrink)
        quiet = settings(
            max_examples=count, database=None, deadline=None, phases=phases, suppress_health_check=HealthCheck
        )
        return hypothesis.seed(seed)(quiet(test))

    return decorate


layers = st.builds(Layer, st.sampled_from([8, 20, 36, 200]), st.booleans(), st.booleans(), st.booleans())
specs = st.builds(
    Spec,
    st.sampled_from([8, 16, 24]),
    st.lists(layers, min_size=1, max_size=4).map(tuple),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)
_RNG = random.Random(0)
# Few specs, which many tests share, because tracing a model takes longer than running several programs of it.
POOL = [
    Spec(
        _RNG.choice([8, 16, 24]),
        tuple(
            Layer(_RNG.choice([8, 20, 36, 200]), *(_RNG.random() < 0.5 for _ in range(3)))
            for _ in range(_RNG.randint(1, 3))
        ),
        *(_RNG.random() < 0.5 for _ in range(2)),
        seed,
    )
    for seed in range(16)
]
pooled = st.sampled_from(POOL)
_CHOSEN = st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([1, 2, 0]), st.booleans(), st.integers(0, 2**16)
# Plans of weights in host memory, and plans that also draw where the weights are.
choices = st.builds(Choices, *_CHOSEN)
anywhere = st.builds(Choices, *_CHOSEN, st.booleans(), st.booleans())


def begin_exchange(x: torch.Tensor, group: str) -> torch.Tensor:
    """Start an all-to-all of equal parts, and do not wait for it."""
    ranks = dist.get_world_size()
    rows = [x.shape[0] // ranks] * ranks
    return torch.ops._c10d_functional.all_to_all_single(x, rows, rows, group)


def end_exchange(sent: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(sent)


def attended(x: torch.Tensor) -> torch.Tensor:
    """Attention of four heads, which the ranks divide."""
    q, k, v = (scatter_heads(factor * x, 4)[None] for factor in (1.0, 0.5, 2.0))
    return gather_heads(nn.functional.scaled_dot_product_attention(q, k, v)[0]).reshape(x.shape)


class RandomModel(nn.Module):
    """Layers of odd widths: some read twice, some with a collective, one tied to the first, one larger than the others.

    A layer that computes beside a collective reads what the collective sends.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        torch.manual_seed(spec.seed)
        self.spec = spec
        self.group = dist.group.WORLD.group_name
        self.up = nn.ModuleList([nn.Linear(spec.width, layer.hidden, bias=layer.bias) for layer in spec.layers])
        self.down = nn.ModuleList([nn.Linear(layer.hidden, spec.width, bias=False) for layer in spec.layers])
        self.head = nn.Linear(spec.width, spec.layers[0].hidden if spec.tied else 12, bias=False)
        if spec.tied:
            self.head.weight = self.up[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down, layer in zip(self.up, self.down, self.spec.layers, strict=True):
            sent = begin_exchange(x, self.group) if layer.exchange and layer.beside else None
            y = x + torch.tanh(down(torch.nn.functional.gelu(up(x))))
            if sent is not None:
                x = y + end_exchange(sent)
            elif layer.exchange and layer.attends:
                x = y + attended(y)
            elif layer.exchange:
                x = y + gather_heads(scatter_heads(y, 4)).reshape(y.shape)
            else:
                x = y
        if self.spec.twice:
            x = x + self.down[0](self.up[0](x))
        return self.head(x)


@dataclass(frozen=True)
class Tenant:
    """What an arena needs of a program."""

    plan: Plan
    program: None = None

    def unbind(self) -> None:
        raise AssertionError("the arena was made large enough")


@lru_cache(maxsize=64)  # tests with the same seed draw the same specs
def traced(spec: Spec, ranks: int) -> tuple[RandomModel, torch.Tensor, Cut]:
    """A model, an input, and its regions, which all programs of the model on so many ranks share unchanged."""
    torch._dynamo.reset()
    model = RandomModel(spec).eval()
    x = torch.randn(4, spec.width)
    return model, x, make_cut(in_head_groups(trace(model, {"x": x}, 0), spec.groups), 1)


@lru_cache(maxsize=512)  # all programs of a model run its regions
def lowered(region: GraphModule) -> LoweredRegion:
    """The region as the eager lowering calls it."""
    return lower._eager(region).forward


class Runs:
    """Weights, and the programs on them: what runs them in an arena of a test.

    ``weights``: by their names in the programs.
    """

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.tenants: list[Tenant] = []

    def join(self, arena: Arena, plan: Plan) -> torch.Tensor:
        """The arena's memory, for as long as this lives."""
        self.tenants.append(Tenant(plan))
        arena.add(self.tenants[-1], DeviceKind())
        return arena.reserve(plan.arena_bytes)

    def bind(self, arena: Arena, plan: Plan, names: Iterable[str], *more: Any) -> Binding:
        """The memory of a program that reads the weights of these names.  The slots are full of NaN before its first step."""
        memory = self.join(arena, plan)
        if arena.contents is None:
            memory.fill_(255)
        slots = {w.name: memory.narrow(0, w.offset or 0, w.nbytes) for w in plan.streamed}
        values = {n: as_weight(slots[n], self.weights[n]) if n in slots else self.weights[n] for n in names}
        return Binding(arena, values, slots, {n: self.source(n) for n in slots}, *more)

    def source(self, name: str) -> Bytes:
        """The bytes of a weight that its copies read."""
        return flat_bytes(self.weights[name])

    def arguments(self, program: Program, x: torch.Tensor) -> list[Any]:
        """The inputs of the traced graph: the activation, and a placeholder for each weight."""
        names = {placeholder: weight for weight, placeholder in program.weight_inputs.items()}
        nodes = program.module.graph.find_nodes(op="placeholder")
        return [self.weights[names[n.name]] if n.name in names else x for n in nodes]

    def start(self, program: Program, binding: Binding, **cycle: Any) -> Executor:
        """An executor that poisons evicted weights."""
        regions = {name: lowered(region.module) for name, region in program.regions.items()}
        return Executor(program, regions, binding, poison=True, **cycle)


class Bench(Runs):
    """A traced model with its weights, for programs of any plan.

    ``chosen``: the choices that say whether some of its weights are sharded over the devices of ranks, of which this is one.
    """

    def __init__(self, spec: Spec, chosen: Choices | None = None) -> None:
        super().__init__()
        self.model, self.x, self.cut = traced(spec, dist.get_world_size())
        torch.manual_seed(spec.seed + 1)  # the same inputs whether the trace is cached or not
        self.weights = {name: p.detach() for name, p in self.model.named_parameters(remove_duplicate=False)}
        self.pieces: dict[str, Pieces] = {}
        if chosen is not None and chosen.peers:
            self.shard(chosen)

    def shard(self, chosen: Choices) -> None:
        """Shard some weights, for the programs that are made from now on; earlier ones keep their pieces."""
        rng = random.Random(chosen.seed)
        ranks = rng.randint(2, 4)
        names = [name for name in sorted(streamable(self.cut)) if rng.random() < 0.6]
        self.cut = on_peers(self.cut, names, ranks)
        for name in names:
            self.pieces[name] = _dealt(flat_bytes(self.weights[name]), ranks, rng.randrange(ranks))

    @property
    def problem(self) -> Problem:
        return self.cut.problem

    def program(self, chosen: Choices) -> Program:
        return rewrite(self.cut, random_plan(self.problem, chosen))

    def source(self, name: str) -> Bytes:
        return self.pieces.get(name, super().source(name))

    def inputs(self, steps: int) -> list[torch.Tensor]:
        return [torch.randn_like(self.x) for _ in range(steps)]

    def expected(self, turns: Sequence[tuple[Program, torch.Tensor]]) -> list[torch.Tensor]:
        """The outputs of the model itself."""
        return [self.model(x) for _, x in turns]

    def executor(self, program: Program, arena: Arena) -> Executor:
        return self.start(program, self.bind(arena, program.plan, (w.name for w in program.plan.weights)))


def in_turns(spec: Spec, one: Choices, other: Choices) -> tuple[Bench, list[tuple[Program, torch.Tensor]]]:
    """Steps of two verified programs in one arena, each with its own choice of sharded weights."""
    found = Bench(spec, one)
    a = found.program(one)
    if other.peers:
        found.shard(other)
    b = found.program(other)
    verify_together(a, b)
    order = [a, b, b, a, a, b]
    return found, list(zip(order, found.inputs(len(order)), strict=True))


def _dealt(values: torch.Tensor, ranks: int, place: int) -> Pieces:
    """The pieces of a weight, as the rank at ``place`` maps them."""
    nbytes = values.numel()
    held = [torch.full((piece_bytes(nbytes, ranks),), 255, dtype=torch.uint8) for _ in range(ranks)]
    for part in parts(0, nbytes, nbytes, ranks):
        held[part.owner].narrow(0, part.offset, part.nbytes).copy_(values.narrow(0, part.begin, part.nbytes))
    return Pieces(held, place, nbytes, 0, 0, nbytes)


@lru_cache(maxsize=512)  # each mutation is tried on the same plans
def random_plan(problem: Problem, chosen: Choices, inside: bool = False) -> Plan:
    """A random legal plan: each chunk has any window that is legal, or stays; some plans have barriers.

    ``inside``: whether resident weights lie in the arena.
    """
    rng = random.Random(chosen.seed)
    planner = Planner(problem, Simulator(problem, MACHINE, CHUNK))
    count = planner.count
    placed: list[int | None] = []
    for chunk in planner.chunks:
        earliest = max(chunk.last + 1 - count, chunk.first - (chosen.reach or count))
        placed.append(None if rng.random() < chosen.stay else rng.randint(earliest, chunk.first))
    windows = as_windows(planner.chunks, placed, count)
    hard = planner.barriers(planner.scheduler.step(windows)) if chosen.hard else ()
    return PlanBuilder(planner, inside).plan(windows, hard)
