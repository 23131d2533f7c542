"""Exchanges in groups of heads: graphs that compute the same bits on ranks in one process, and those that are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from helpers import InTurn, UlyssesBlock, UlyssesStack, fake_ranks, gather_heads, scatter_heads
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.attention.flex_attention import flex_attention

from chunkflow_compile import register_collective
from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import choose_cut, groups_for, make_cut
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.discover import collective_kind, discover, is_wait_tensor
from chunkflow_compile.passes.graph.exchanges import NoGroups, exchanges, groups_of
from chunkflow_compile.passes.graph.head_groups import in_head_groups, possible_groups
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.planning import Settings

RANKS, TOKENS, WIDTH, HEADS = 2, 3, 32, 8

pytestmark = pytest.mark.usefixtures("no_grad")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]


class Attention(UlyssesBlock):
    """Between its exchanges, ``inside`` changes what was received: queries, keys or values of a rank's heads.
    ``attend`` computes attention."""

    def __init__(
        self,
        inside: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = attention,
    ) -> None:
        super().__init__(WIDTH, HEADS)
        self.inside, self.attend = inside, attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.inside(scatter_heads(t, HEADS)) for t in self.qkv(x).chunk(3, dim=-1))
        return x + self.out(gather_heads(self.attend(q, k, v)).reshape(x.shape))


class Together(Attention):
    """Queries, keys and values in one exchange.  ``after`` changes the result, and may read what was received."""

    def __init__(self, after: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda x, received: x) -> None:
        super().__init__()
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(TOKENS, RANKS, HEADS // RANKS, -1) for t in self.qkv(x).chunk(3, dim=-1))
        sent = torch.stack([q, k, v]).permute(2, 1, 0, 3, 4).contiguous()
        received = funcol.all_to_all_single(sent, None, None, dist.group.WORLD)
        q, k, v = received.reshape(RANKS * TOKENS, 3, HEADS // RANKS, -1).permute(1, 2, 0, 3).unbind()
        return self.after(x + self.out(gather_heads(attention(q, k, v)).reshape(x.shape)), received)


class Uneven(Attention):
    """The first rank has ``heads`` of the heads; the second rank has ``tokens`` tokens."""

    def __init__(self, heads: int = HEADS // RANKS, tokens: int = TOKENS) -> None:
        super().__init__()
        self.split, self.tokens = [heads, HEADS - heads], [TOKENS, tokens]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group, received = dist.group.WORLD, [self.split[0] * tokens for tokens in self.tokens]
        sent = [heads * TOKENS for heads in self.split]

        def scattered(t: torch.Tensor) -> torch.Tensor:
            rows = t.view(TOKENS, HEADS, -1).transpose(0, 1).reshape(HEADS * TOKENS, -1)
            ranks = funcol.all_to_all_single(rows, received, sent, group).split(received)
            return torch.cat([r.view(self.split[0], -1, WIDTH // HEADS) for r in ranks], dim=1)

        attended = attention(*map(scattered, self.qkv(x).chunk(3, dim=-1))).split(self.tokens, dim=1)
        rows = torch.cat([r.reshape(-1, WIDTH // HEADS) for r in attended])
        back = funcol.all_to_all_single(rows, sent, received, group)
        return x + self.out(back.view(HEADS, TOKENS, -1).transpose(0, 1).reshape(x.shape))


class Masked(Attention):
    """With a mask for each head, and keys of a text that each rank has whole."""

    def __init__(self) -> None:
        super().__init__()
        heads, tokens = HEADS // RANKS, RANKS * TOKENS
        self.register_buffer("mask", torch.randn(heads, tokens, tokens + 2))
        self.register_buffer("text", torch.randn(heads, 2, WIDTH // HEADS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (scatter_heads(t, HEADS) for t in self.qkv(x).chunk(3, dim=-1))
        k, v = (torch.cat([t, self.text], dim=1) for t in (k, v))
        attended = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], self.mask[None])[0]
        return x + self.out(gather_heads(attended).reshape(x.shape))


def grouped_query(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Two heads of queries share a head of keys and values."""
    return nn.functional.scaled_dot_product_attention(q[None], k[None, ::2], v[None, ::2], enable_gqa=True)[0]


def of_products(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def flexible(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex_attention(q[None], k[None], v[None])[0]


def norm_per_head(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, (WIDTH // HEADS,))


def norm_across_heads(x: torch.Tensor) -> torch.Tensor:
    heads, tokens, depth = x.shape
    flat = nn.functional.rms_norm(x.transpose(0, 1).reshape(tokens, heads * depth), (heads * depth,))
    return flat.view(tokens, heads, depth).transpose(0, 1)


def rotated(x: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.ones(x.shape[2] // 2)
    pairs = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1)
    return x * pairs + torch.cat([-x[..., 1::2], x[..., ::2]], dim=-1)


def traced(model: nn.Module, **inputs: Any) -> Traced:
    """The graph of a call on one of two ranks."""
    with fake_ranks():
        return trace(model, inputs or {"x": torch.randn(TOKENS, WIDTH)}, 0)


def evaluated(
    graph: GraphModule, traced: Traced, model: nn.Module, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What each rank returns for its input."""
    values = [dict[Node, Any]() for _ in inputs]
    names = {w.node.name: w.parameter.name for w in discover(traced).weights}
    given = dict(model.named_parameters()) | dict(model.named_buffers())
    for node in graph.graph.nodes:
        if collective_kind(node) is not None:
            rows = [value[node.args[0]].split(node.args[2]) for value in values]
            for rank, value in enumerate(values):
                value[node] = torch.cat([row[rank] for row in rows])
            continue
        for rank, value in enumerate(values):
            args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), value.__getitem__)
            if node.op == "placeholder":
                value[node] = given[names[node.name]] if node.name in names else inputs[rank]
            elif node.op == "get_attr":
                value[node] = getattr(graph, str(node.target))
            elif is_wait_tensor(node):
                value[node] = args[0]
            elif node.op == "call_function":
                value[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    results: Any = graph.graph.output_node().args[0]
    return [value[results[0]] for value in values]


@cache  # no test changes one of these
def whole_attention() -> Traced:
    return traced(Attention())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: UlyssesStack(2, WIDTH, HEADS),
    "a norm per head": lambda: Attention(norm_per_head),
    "rotated": lambda: Attention(rotated),
    "one exchange": Together,
    "masked": Masked,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    model = InTurn([MODELS[name]()]).eval()
    whole = traced(model)
    inputs = [torch.randn(TOKENS, WIDTH) for _ in range(RANKS)]
    wanted = evaluated(whole.graph, whole, model, inputs)
    for groups in (2, 4):
        divided = in_head_groups(whole, groups)
        for one, other in zip(evaluated(divided.graph, whole, model, inputs), wanted, strict=True):
            assert torch.equal(one, other)
        before, after = (sum(collective_kind(n) is not None for n in t.graph.graph.nodes) for t in (whole, divided))
        assert after == groups * before and groups_of(divided.graph.graph.nodes) == groups


def test_results_of_groups_that_are_swapped_give_other_bits() -> None:
    """So that the test above would find it."""
    torch.manual_seed(0)
    model = Attention().eval()
    whole = traced(model)
    divided = in_head_groups(whole, 2)
    *_, first, second = [n for n in divided.graph.graph.nodes if is_wait_tensor(n)]
    operands = first.args, second.args
    second.args, first.args = operands
    inputs = [torch.randn(TOKENS, WIDTH) for _ in range(RANKS)]
    results = [evaluated(t.graph, whole, model, inputs) for t in (whole, divided)]
    assert not torch.equal(results[0][0], results[1][0])


def test_all_groups_are_sent_before_the_first_is_awaited() -> None:
    problem = make_cut(in_head_groups(whole_attention(), 2)).problem
    assert [(c.before, c.until) for c in problem.collectives] == [(1, 1)] * 3 + [(1, 2)] * 3 + [(2, 3), (3, 3)]
    assert [region.groups for region in problem.regions] == [1, 2, 2, 1]
    assert problem.regions[1].key == problem.regions[2].key, "groups share their code"
    assert problem.regions[1].cost.attention_tiles and not problem.regions[0].cost.attention_tiles


def test_a_group_is_received_before_the_result_of_the_one_before_is_sent() -> None:
    """The all-to-alls of a rank run in the order of the graph: one that waits for attention must not hold up another that
    the next attention needs."""

    def kind(node: Node) -> str:
        attends = node.op == "call_function" and "attention" in str(node.target)
        return "sent " if collective_kind(node) is not None else "got " if is_wait_tensor(node) else "attend " * attends

    divided = in_head_groups(whole_attention(), 2).graph.graph
    order = 6 * "sent " + 3 * "got " + "attend " + 3 * "got " + "sent " + "attend " + "sent " + 2 * "got "
    assert "".join(map(kind, divided.nodes)) == order


class Opaque(Attention):
    """Its exchange is a custom op, which is declared to be an all-to-all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (torch.ops.testing.exchange(t, dist.group.WORLD.group_name) for t in self.qkv(x).chunk(3, dim=-1))
        q, k, v = (t.view(TOKENS, HEADS, -1).transpose(0, 1)[None] for t in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(x.shape)
        return x + self.out(torch.ops.testing.exchange(attended, dist.group.WORLD.group_name))


@pytest.fixture
def exchange_op() -> None:
    if not hasattr(torch.ops.testing, "exchange"):

        @torch.library.custom_op("testing::exchange", mutates_args=())
        def exchange(x: torch.Tensor, group_name: str) -> torch.Tensor:
            return x.clone()

        exchange.register_fake(lambda x, group_name: torch.empty_like(x, memory_format=torch.contiguous_format))
    register_collective("testing::exchange", "all-to-all")


def across(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


def rolled(x: torch.Tensor) -> torch.Tensor:
    """The heads in another order."""
    return torch.cat([x[1:], x[:1]])


def repeated(x: torch.Tensor) -> torch.Tensor:
    """Half of the heads, twice."""
    return torch.cat([x[: len(x) // 2]] * 2)


class RolledBack(Attention):
    """The heads of the result are sent back in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (scatter_heads(t, HEADS) for t in self.qkv(x).chunk(3, dim=-1))
        attended = rolled(nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0])
        return x + self.out(gather_heads(attended).reshape(x.shape))


@pytest.mark.parametrize(
    ("make", "groups", "said"),
    [
        (None, 3, r"^3 groups do not divide the 4 attention heads of each rank .*: choose one of 1, 2, 4\.$"),
        (
            lambda: Attention(norm_across_heads),
            2,
            r"in groups: an op before attention reads all heads of .* a norm across",
        ),
        (lambda: Attention(across), 2, r"cannot be exchanged in groups: flip works along the dimension\.$"),
        (lambda: Attention(rolled), 2, r"cannot be exchanged in groups: "),
        (lambda: Attention(repeated), 2, r"cannot be exchanged in groups: "),
        (RolledBack, 2, r"cannot be exchanged in groups: "),
        (Uneven, 3, r"^3 groups do not divide the 4 attention heads"),
        (
            lambda: Uneven(heads=6),
            2,
            r"^The ranks have different numbers of tokens or heads .*: give each rank as many\.$",
        ),
        (
            lambda: Uneven(tokens=5),
            2,
            r"^The ranks have different numbers of tokens or heads .*: give each rank as many\.$",
        ),
        (lambda: Attention(attend=grouped_query), 2, r"has fewer heads of keys and values than of queries\.$"),
        (
            lambda: Attention(attend=nn.functional.scaled_dot_product_attention),
            2,
            r"^The attention before .* separate products \(bmm\).* with four-dimensional",
        ),
        (lambda: Attention(attend=of_products), 2, r"^The attention before .* is computed by separate products "),
        (lambda: Attention(attend=flexible), 2, r"^The attention op flex_attention has no rule"),
        (Opaque, 2, r"^The collective testing.exchange.* returns only when it is complete, .*all_to_all_single\.$"),
    ],
    ids=[
        *(
            "heads",
            "norm",
            "across",
            "rolled",
            "repeated",
            "rolled back",
            "split sizes",
            "uneven heads",
            "uneven tokens",
        ),
        *("grouped-query", "three dimensions", "products", "flex_attention", "custom"),
    ],
)
@pytest.mark.usefixtures("exchange_op")
def test_what_cannot_be_divided(make: Callable[[], nn.Module] | None, groups: int, said: str) -> None:
    """A number is refused in a sentence; the choice is whole exchanges, with the same reason."""
    found = whole_attention() if make is None else traced(make())
    with pytest.raises(NoGroups, match=said):
        in_head_groups(found, groups)
    if groups == 2:
        choice = groups_for(found, Settings(hardware=load_profile("cpu")))
        assert choice.groups == 1 and re.search(said.lower().strip("^$.\\"), choice.why.lower())


class Read(Attention):
    """Values between its exchanges and its attention are also read elsewhere, in many places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (scatter_heads(t, HEADS) for t in self.qkv(x).chunk(3, dim=-1))
        means = []
        for _ in range(8):
            q = q * 2
            means.append(q.mean())
        return x + self.out(gather_heads(attention(q, k, v)).reshape(x.shape)) + sum(means)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Read, "^mean also reads mul,"),
        (lambda: Together(lambda x, received: x + received.mean()), "^mean also reads wait_tensor,"),
    ],
    ids=["later", "received"],
)
def test_a_reader_of_what_is_exchanged(make: Callable[[], nn.Module], said: str) -> None:
    """The error names the first of them, whatever the order of a set."""
    found = traced(make())
    for _ in range(3):
        with pytest.raises(NoGroups, match=said):
            in_head_groups(found, 2)
    assert re.search(said, groups_for(found, Settings(hardware=load_profile("cpu"))).why)


def test_a_graph_is_divided_once() -> None:
    """The passes take a graph that is divided already as it is, and cut it as they cut the whole graph."""
    whole = whole_attention()
    divided = in_head_groups(whole, 2)
    assert divided.exchange_groups == 2 and in_head_groups(divided, 2) is divided
    settings = Settings(hardware=load_profile("cpu"), goal=Goal(exchange_groups=2))
    assert choose_cut(divided, settings).traced.graph.graph is divided.graph.graph
    assert len({choose_cut(each, settings).problem.digest for each in (whole, divided)}) == 1


def test_without_exchanges_nothing_changes() -> None:
    whole = traced(nn.Sequential(nn.Linear(WIDTH, WIDTH)), input=torch.randn(TOKENS, WIDTH))
    assert exchanges(whole.graph.graph) == () == possible_groups(whole)
    made = [str(in_head_groups(whole, groups).graph.graph) for groups in (1, 2)]
    assert made[0] == made[1]
