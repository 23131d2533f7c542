"""Hoist: splits a traced graph into two halves, the preamble and main.

A diffusion transformer computes its modulations from the timestep, the guidance and the pooled text.  These *slow* inputs
are small and take few different values, whereas the latent changes in every step.  The *preamble* computes the matrix
products that depend only on slow inputs.  *Main* computes the rest, and takes the results of these products as inputs.
These results *cross* from the preamble into main.  The results for one set of slow inputs form a *row*.  A caller that caches
rows need not stream the weights of the preamble in each step.

Contract
    On entry: a Traced, which is not changed.
    On exit: preamble and main together are equivalent to the traced graph (:func:`check_halves`).  The preamble reads
    weights and slow inputs only.  The preamble contains no collectives, random ops, ops that write in place, or symbolic
    sizes.  Only results of matrix products cross, because they are stored and rounded in any case.  Inductor does not round
    the result of a pointwise op inside a fused kernel, so this result would change if it were stored in a row.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.errors import FindingError
from chunkflow_compile.passes.names import KNOWN_NAMESPACES
from chunkflow_compile.passes.problem import Parameter

from .discover import collective_kind, input_key, is_view, is_wait_tensor, mutated_inputs, nbytes
from .symbolic_sizes import is_size
from .traced import Traced

# The maximum bytes of a slow input, unless the user names the slow inputs.  Text and latents are larger.  The timestep, the
# guidance and the pooled prompt of two samples take 12 KiB.
MOST_SLOW_BYTES = 64 << 10
# A matrix product is hoisted only if its weights are at least this many times as large as its result.  The weight of a
# modulation is thousands of times as large as the result.  With one timestep per token, the result would be larger than the
# weight.
LEAST_RATIO = 8
# The input index that the first crossing value gets in main.  Crossing values are not inputs of the Dynamo graph, so this
# index is larger than the index of any input of the Dynamo graph.
_CROSSING = 1 << 24

_PRODUCTS = frozenset(
    (
        torch.ops.aten.addmm.default,
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.linear.default,
        torch.ops.aten.convolution.default,
    )
)


@dataclass(frozen=True, kw_only=True)
class Halves:
    """A graph that is split in two.  Positions refer to the inputs of the whole graph.

    ``preamble_inputs``, ``main_inputs``: positions of the inputs that each half takes.  After these, main also takes the
    outputs of the preamble, in order.  ``slow``: positions of the preamble's inputs that are not weights.
    ``hoisted``: names of the weights that only the preamble reads.  ``hoisted_bytes``: total bytes of the hoisted
    weights that can be streamed.  ``row_bytes``: total bytes of the outputs of the preamble.  ``key``: digest of the ops of
    the preamble, of the shapes of its inputs and, unless the graph is a block, of the names of its weights.
    """

    preamble: Traced
    main: Traced
    preamble_inputs: tuple[int, ...]
    main_inputs: tuple[int, ...]
    slow: tuple[int, ...]
    hoisted: tuple[str, ...]
    hoisted_bytes: int
    row_bytes: int
    key: str


def split(traced: Traced) -> Halves | None:
    """Split a graph into halves, or return None if there is nothing to hoist.

    The slow inputs are ``traced.slow``.  If this is None, they are the inputs of at most :data:`MOST_SLOW_BYTES` bytes that
    are smaller than the largest result of the graph.  This excludes the latent, because a result is as large as the latent.
    If the graph is a block, slow inputs must be smaller than every result.  This excludes the text, which a block also takes
    and returns, and which is small for a short prompt.
    """
    found = _Slow(traced)
    crossing = found.crossing()
    if not crossing:
        return None
    preamble = found.ancestors(crossing)
    inputs = [n for n in found.nodes if n.op == "placeholder"]
    position = {node: i for i, node in enumerate(inputs)}
    of_preamble = [n for n in inputs if n in preamble]
    kept = found.in_main(frozenset(crossing))
    of_main = [n for n in inputs if n in kept or not n.users]
    parameters = found.parameters
    hoisted = [n for n in of_preamble if n in parameters and n not in kept]
    if not any(parameters[n].keep is None for n in hoisted):
        return None
    names = {parameters[n].name for n in hoisted}

    def label(parameter: Parameter) -> str:
        # the weights in a block's graph have the names of the block that is compiled first, so the key must not contain names
        return parameter.name if traced.repeats is None else "of a block"

    preamble_graph = _preamble(traced, [n for n in found.nodes if n in preamble], crossing)
    return Halves(
        preamble=_part(
            traced,
            preamble_graph,
            {parameters[n] for n in of_preamble if n in parameters},
            large=tuple(each for each in traced.large if each[0] in names),
        ),
        main=_part(
            traced,
            _main(traced, of_main, crossing, kept),
            {parameters[n] for n in of_main if n in parameters},
            large=tuple(each for each in traced.large if each[0] not in names),
        ),
        preamble_inputs=tuple(position[n] for n in of_preamble),
        main_inputs=tuple(position[n] for n in of_main),
        slow=tuple(position[n] for n in of_preamble if n not in parameters),
        hoisted=tuple(parameters[n].name for n in hoisted),
        hoisted_bytes=sum(nbytes(n) for n in hoisted if parameters[n].keep is None),
        row_bytes=sum(map(nbytes, crossing)),
        key=_key(preamble_graph, [label(parameters[n]) if n in parameters else "" for n in of_preamble]),
    )


class _Slow:
    """Finds the nodes of a graph that depend on slow inputs only.  ``nodes``: all nodes, in program order.  ``parameters``:
    for each placeholder of a parameter, the parameter."""

    def __init__(self, traced: Traced) -> None:
        slow = traced.slow
        self.nodes = list(traced.graph.graph.nodes)
        by_key = {p.key: p for p in traced.parameters}
        keys = {n: input_key(n.meta.get("desc")) for n in self.nodes if n.op == "placeholder"}
        self.parameters: dict[Node, Parameter] = {n: by_key[key] for n, key in keys.items() if key in by_key}
        written = mutated_inputs(traced.graph)
        results = [*_result_bytes(traced.graph.graph)] or [0]
        most = min(MOST_SLOW_BYTES + 1, max(results) if traced.repeats is None else min(results))
        inputs = {
            n
            for n, key in keys.items()
            if n not in self.parameters
            and key not in written
            and _is_concrete(n)
            and (nbytes(n) < most if slow is None else key[0] in slow)
        }
        self._inputs = inputs
        self._slow, self._constant = set[Node](), set[Node]()
        # nodes that depend on slow inputs only, but are not hoisted, because another reader of their weight is not hoisted
        latent = set[Node]()
        while True:
            self._classify(latent)
            shared = {reader for reader in self._readers_of_shared() if reader in self._slow}
            if not shared:
                return
            latent |= shared

    def _classify(self, latent: Collection[Node]) -> None:
        self._slow, self._constant = set(self._inputs), set()
        for node in self.nodes:
            if node in self.parameters or node.op == "get_attr":
                self._constant.add(node)
            if node.op != "call_function" or node in latent or not (_is_pure(node) and _is_concrete(node)):
                continue
            operands = node.all_input_nodes
            if all(o in self._constant for o in operands):
                self._constant.add(node)
            elif all(o in self._constant or o in self._slow for o in operands):
                self._slow.add(node)

    def _readers_of_shared(self) -> Iterator[Node]:
        """Yield the readers of each weight that may be streamed and that has a reader outside ``_slow``."""
        for node, parameter in self.parameters.items():
            readers = self._readers(node)
            if parameter.keep is None and any(r not in self._slow for r in readers):
                yield from readers

    def _readers(self, weight: Node) -> set[Node]:
        """Return the nodes that combine a weight, or a value computed from weights alone, with other values."""
        readers, todo = set[Node](), [weight]
        while todo:
            for user in todo.pop().users:
                if user in self._constant:
                    todo.append(user)
                else:
                    readers.add(user)
        return readers

    def crossing(self) -> list[Node]:
        """Return, in program order, the matrix products whose results cross from the preamble into main (the rest of the
        graph).  The weights of these products are large enough to hoist the products (:data:`LEAST_RATIO`)."""
        replaced: dict[Node, int] = {}
        for node, parameter in self.parameters.items():
            for reader in self._readers(node) if parameter.keep is None else ():
                replaced[reader] = replaced.get(reader, 0) + nbytes(node)
        hoisted = {n for n in self._slow if n.target in _PRODUCTS and not _is_returned(n)}
        while True:
            kept = self.in_main(hoisted)
            crossing = [n for n in self.nodes if n in hoisted and any(user in kept for user in n.users)]
            read = (w for w, parameter in self.parameters.items() if parameter.keep is None and w in kept)
            in_both = hoisted.intersection(self._computed_from(read))
            small = {n for n in crossing if replaced.get(n, 0) < LEAST_RATIO * nbytes(n)}
            if not (dropped := small | in_both):
                return crossing
            hoisted -= dropped

    def _computed_from(self, weights: Iterable[Node]) -> set[Node]:
        """Return the slow nodes that depend on any of these weights."""
        needing = {reader for weight in weights for reader in self._readers(weight)}
        for node in self.nodes:
            if node in self._slow and not needing.isdisjoint(node.all_input_nodes):
                needing.add(node)
        return needing

    def in_main(self, hoisted: Collection[Node]) -> set[Node]:
        """Return the nodes of main (the graph without the preamble) if the products ``hoisted`` are hoisted.  Any other slow
        value is computed both in the preamble and in main if both need the value."""
        kept = {n for n in self.nodes if n.op != "placeholder" and n not in self._slow and n not in self._constant}
        return self._with_operands(kept, hoisted)

    def ancestors(self, crossing: Iterable[Node]) -> set[Node]:
        """Return the nodes of the preamble, including inputs and constants."""
        return self._with_operands(set(crossing), ())

    def _with_operands(self, nodes: set[Node], but: Collection[Node]) -> set[Node]:
        todo = list(nodes)
        while todo:
            for operand in todo.pop().all_input_nodes:
                if operand not in nodes and operand not in but:
                    nodes.add(operand)
                    todo.append(operand)
        return nodes


def _is_pure(node: Node) -> bool:
    """Return whether a node only computes a result that depends on nothing but its operands.  Such a node is not random, does
    not write to tensors, and does not communicate."""
    if node.target is operator.getitem or is_size(node):
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in KNOWN_NAMESPACES:
        return False
    communicates = collective_kind(node) is not None or is_wait_tensor(node)
    return not (target._schema.is_mutable or communicates or _is_random(node))


def _is_random(node: Node) -> bool:
    """Return whether a node is random.  Attention without dropout is not random, although torch tags it as such."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = node.args[i] if i < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(value != 0)
    return True


def _is_concrete(node: Node) -> bool:
    """Return whether the value of a node consists of tensors without symbolic sizes."""
    value = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(t, FakeTensor) and all(type(s) is int for s in (*t.shape, *t.stride())) for t in tensors)


def _is_returned(node: Node) -> bool:
    """Return whether a value, or a view of the value, is a result of the graph.  The caller may write to such a value."""
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)


def _result_bytes(graph: Graph) -> Iterator[int]:
    (output,) = graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            yield nbytes(node) if _is_concrete(node) else MOST_SLOW_BYTES + 1


def _part(
    traced: Traced, graph: GraphModule, parameters: Collection[Parameter], large: tuple[tuple[str, int], ...]
) -> Traced:
    return replace(traced, graph=graph, parameters=tuple(p for p in traced.parameters if p in parameters), large=large)


def _preamble(traced: Traced, nodes: Iterable[Node], crossing: Iterable[Node]) -> GraphModule:
    """Return the graph of the preamble.  ``nodes``: nodes of the preamble, in program order."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    returned = graph.output(tuple(copies[n] for n in crossing))
    returned.meta["desc"] = [PlainAOTOutput(idx=i) for i, _ in enumerate(crossing)]
    return GraphModule(traced.graph, graph)


def _main(traced: Traced, inputs: Iterable[Node], crossing: Iterable[Node], kept: Collection[Node]) -> GraphModule:
    graph = Graph()
    copies = {node: graph.node_copy(node) for node in inputs}
    for i, node in enumerate(crossing):
        copies[node] = crossed = graph.placeholder(f"row_{node.name}")
        crossed.meta = {"val": node.meta["val"], "desc": PlainAOTInput(idx=_CROSSING + i)}
    for node in traced.graph.graph.nodes:
        if node in kept and node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return GraphModule(traced.graph, graph)


def _key(preamble: GraphModule, weights: Sequence[str]) -> str:
    """Return a digest of the ops and inputs of a preamble.  ``weights``: for each input that is a weight, a label; for each
    other input, an empty string."""
    numbers: dict[Any, int] = {}
    results = _numbered(preamble, range(len(weights)), numbers).results
    values = [str(n.meta["val"]) for n in preamble.graph.find_nodes(op="placeholder")]
    return hashlib.sha256(repr((weights, values, [*numbers], results)).encode()).hexdigest()


def check_halves(traced: Traced, halves: Halves) -> None:
    """Check the contract of :func:`split`.  Raises FindingError for the first violation."""
    numbers: dict[Any, int] = {}
    whole = _numbered(traced.graph, range(1 << 62), numbers)
    given = dict(enumerate(whole.inputs))
    preamble = _numbered(halves.preamble.graph, [given[i] for i in halves.preamble_inputs], numbers)
    main = _numbered(halves.main.graph, [*(given[i] for i in halves.main_inputs), *preamble.results], numbers)
    if preamble.effects:
        _broken(f"the preamble has {preamble.effects[0]}, which may run once for several calls")
    if main.effects != whole.effects:
        odd = next((name for name in whole.effects if name not in main.effects), "an op twice")
        _broken(f"main and the traced graph differ in the ops with effects: {odd}")
    if main.results != whole.results:
        _broken("preamble and main, put back together, compute other results than the traced graph")
    keys = {p.key for p in traced.parameters}
    for position, node in zip(
        halves.preamble_inputs, halves.preamble.graph.graph.find_nodes(op="placeholder"), strict=True
    ):
        if input_key(node.meta["desc"]) not in keys and position not in halves.slow:
            _broken(f"the preamble reads {node.name}, which is no slow input")
    (returned,) = halves.preamble.graph.graph.find_nodes(op="output")
    for node in returned.all_input_nodes:
        if node.target not in _PRODUCTS:
            _broken(f"{node.name} crosses, which is no result of a matrix product")
    for node in halves.preamble.graph.graph.nodes:
        if node.op != "output" and not _is_concrete(node):
            _broken(f"{node.name} of the preamble has symbols in its sizes")


@dataclass(frozen=True)
class _Numbered:
    """The inputs and results of a graph, each replaced by the number of its value.  Equal ops on equal operands have equal
    numbers (:func:`_numbered`), so that two graphs can be compared.

    ``effects``: calls of ops that are not pure (:func:`_is_pure`), as text, in program order.
    """

    inputs: list[int]
    results: Any
    effects: list[str]


def _numbered(graph: GraphModule, inputs: Iterable[int], numbers: dict[Any, int]) -> _Numbered:
    """Assign numbers to the values of a graph.  Equal ops on equal operands have equal numbers.  ``inputs``: numbers of the
    graph's inputs.  ``numbers``: numbers that were assigned before; new numbers are added."""
    given, of, effects = iter(inputs), dict[Node, int](), list[str]()
    mine = list[int]()
    results: Any = None
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            of[node] = next(given)
            mine.append(of[node])
            continue
        if node.op == "output":
            results = map_arg(node.args[0], of.__getitem__)
            continue
        if node.op == "get_attr":
            key: Any = "constant", id(getattr(graph, str(node.target)))
        else:
            key = str(node.target), repr(map_arg((node.args, dict(node.kwargs)), lambda n: f"%{of[n]}"))
            if not _is_pure(node):
                effects.append(" of ".join(key))
                key = "effect", len(effects)
        of[node] = numbers.setdefault(key, -1 - len(numbers))
    return _Numbered(mine, results, effects)


def _broken(what: str) -> None:
    raise FindingError(f"The contract of hoist is broken: {what}. This is a bug in ChunkFlow; please report it.")
