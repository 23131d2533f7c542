"""Converts a compilation stage to lines of text.  Each line refers to its op, node and weight, so that lines can be
annotated, folded and counted.

Every stage is printed with one op per line, as valid Python.  The stage ``traced`` is the ATen graph.  The stage ``regions``
adds the cuts, and the stage ``planned`` adds the transfers.  In the stage ``rewritten``, each region is a single call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import Node
from torch.fx.node import map_arg

from chunkflow_compile.passes.graph.discover import input_key
from chunkflow_compile.passes.graph.listing import node_text, target_name
from chunkflow_compile.passes.graph.regions import Cut, CutRegion
from chunkflow_compile.passes.graph.segments import block_labels
from chunkflow_compile.passes.ops import Prefetch, TransferOp, folded, transfer_name, transfer_of, transfer_text
from chunkflow_compile.passes.pass_pipeline import Stage
from chunkflow_compile.passes.program.rewrite import Program, issued
from chunkflow_compile.passes.step import Copy, Evict, Finish, Op, Run, Start, Step, Wait, order, transfers

PROOF, INPUTS = "proof", "inputs"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a listing.

    ``op``: the name of the function that the line calls; empty for comments.  ``part``: the name of the part of the listing
    to which the line belongs: a block, the inputs of a block, :data:`INPUTS` or :data:`PROOF`; empty outside these parts.
    ``like``: the text of the line without names; empty for transfers.  ``defines``: the name that the line assigns.
    ``uses``: the names of its operands.  Two parts have equal structure if ``like`` is equal in all lines, and if ``defines``
    and ``uses`` connect the lines in the same way.
    ``region``: the index of the region that the line runs.  ``collective``: the index of the collective that the line starts.
    ``copy``: the copy that a prefetch starts.  ``weight``: the name of the weight that is an input or is evicted.
    ``readable``: the names of the weights that may be read after a wait.  ``barrier``: whether the line is a wait before a
    collective.
    """

    text: str
    op: str = ""
    part: str = ""
    like: str = ""
    defines: str = ""
    uses: tuple[str, ...] = ()
    region: int | None = None
    collective: int | None = None
    copy: Copy | None = None
    node: Node | None = None
    weight: str = ""
    readable: tuple[str, ...] = ()
    barrier: bool = False


def stage_lines(stage: Stage) -> list[Line]:
    """Return the lines of a stage.

    The lines show the program of the stage.  If the stage has no program yet, the lines show its regions.  If it has no
    regions either, they show the traced graph.
    """
    if stage.program is not None and stage.cut is not None:
        return [*_proof_lines(stage), *_program_lines(stage)]
    if stage.cut is not None:
        step = () if stage.plan is None else order(stage.cut.problem, stage.plan)
        return list(_regions(stage.cut, step))
    return list(_graph_lines(stage))


def _proof_lines(stage: Stage) -> list[Line]:
    """Return comments that list the proved properties of the program and the size of the proof.

    The list is empty if the program is not verified yet.
    """
    if stage.proof is None:
        return []
    proved = "# proved: no weight is read before it has arrived, or overwritten before its last reader"
    return [Line(text=text, part=PROOF) for text in (proved, f"# ({stage.proof})")]


def op_counts(lines: Sequence[Line]) -> Counter[str]:
    """Return, for each op, the number of lines that call it."""
    return Counter(line.op for line in lines if line.op)


def _graph_lines(stage: Stage) -> Iterator[Line]:
    names = {p.key: p.name for p in stage.traced.parameters}
    blocks = block_labels(stage.traced.graph, stage.traced.blocks)
    for node in stage.traced.graph.graph.nodes:
        if node.op == "placeholder":
            block = next((blocks.get(u, "") for u in node.users), "")
            name = names.get(input_key(node.meta.get("desc")), "")
            yield from _input(node, name, block, name)
        else:
            yield _node_line(node, blocks.get(node, ""))


def _regions(cut: Cut, step: Step) -> Iterator[Line]:
    before, after = transfers(step)
    weights = {w.node: w.parameter for w in cut.discovery.weights}
    first_reader = {n: r.info.block for r in reversed(cut.regions) for n in r.inputs}
    for node in cut.source.graph.nodes:
        if node.op == "placeholder":
            weight = weights.get(node)
            name = "" if weight is None else weight.name
            note = (
                f"{name}{', packed' * weight.source.compressed}{', in pieces' * weight.source.sharded}"
                if weight is not None
                else name
            )
            yield from _input(node, name, first_reader.get(node, ""), note)
        elif node.op == "get_attr":
            yield _node_line(node, INPUTS)
    collectives = {c.name: i for i, c in enumerate(cut.problem.collectives)}
    blocks = [*(r.block for r in cut.problem.regions), ""]
    following = 0
    for item in cut.sequence:
        if isinstance(item, CutRegion):
            yield from _region(item, before, after)
            following = item.info.index + 1
            continue
        start = Start(collectives[item.name]) if item.name in collectives else None
        held = before.get(start, ()) if start is not None else ()
        yield from (_transfer(op, blocks[following], barrier=True) for op in folded(held))
        yield _node_line(item, blocks[following], start)
    (output,) = cut.source.graph.find_nodes(op="output")
    yield _node_line(output, "")


def _region(
    region: CutRegion, before: Mapping[Op, Sequence[Op]], after: Mapping[Op, Sequence[Evict]]
) -> Iterator[Line]:
    info, run = region.info, Run(region.info.index)
    yield from (_transfer(op, info.block) for op in folded(before.get(run, ())))
    inputs = ", ".join(n.name for n in region.inputs)
    where = info.block or "outside blocks"
    yield Line(
        text=f"# {info.name}({inputs}): {where}, {info.nodes} ops, key {info.key}{_group(info.groups)}",
        part=info.block,
        like=info.key,
        region=info.index,
    )
    taken = zip(
        region.module.graph.find_nodes(op="placeholder"), region.inputs, strict=False
    )  # the placeholders after the region's inputs are memory that the region writes to
    names = {inside: outside.name for inside, outside in taken}
    for node in region.module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            line = _node_line(node, info.block)
            yield replace(line, text=node_text(node, names), uses=_uses(node, names))
    yield from (_transfer(op, info.block) for op in after.get(run, ()))


def _group(groups: int) -> str:
    return f", one of {groups} groups of heads" if groups > 1 else ""


def _program_lines(stage: Stage) -> Iterator[Line]:
    program = stage.program
    assert program is not None
    names = {placeholder: weight for weight, placeholder in program.weight_inputs.items()}
    regions, packed = program.problem.regions, {w.name for w in program.problem.weights if w.source.compressed}
    block_of = {r.name: r.block for r in regions}
    blocks = [*block_of.values(), ""]
    at, computed = 0, False  # the index of the current region, and whether it has run; the evicts of a region follow it
    for node, item, barrier in _items(program):
        if node.op == "placeholder":
            name, block = names.get(node.name, ""), next((block_of.get(u.name, "") for u in node.users), "")
            yield from _input(node, name, block, "packed" if name in packed else "")
            continue
        if computed and not isinstance(item, Evict) and (item is not None or node.op == "output"):
            at, computed = at + 1, False
        if isinstance(item, Run):
            at, computed = item.region, True
        part = INPUTS if node.op == "get_attr" else blocks[at]
        if isinstance(item, TransferOp):
            yield _transfer(item, part, barrier)
        elif isinstance(item, Run):
            yield replace(_node_line(node, part), op="region", like=regions[at].key, region=item.region)
        else:
            yield _node_line(node, part, item)


def _items(program: Program) -> Iterator[tuple[Node, TransferOp | Op | None, bool]]:
    """Yield each node of a program, the operation of the node, and whether the node is a wait before a collective."""
    found = [(node, transfer_of(node) or _placed(ops)) for node, ops in issued(program)]
    barriers, barrier = set[Node](), False
    for node, item in reversed(found):
        barrier = barrier if isinstance(item, Wait) else isinstance(item, Start)
        barriers |= {node} if barrier else set()
    return ((node, item, node in barriers) for node, item in found)


def _placed(ops: Step) -> Op | None:
    """Return the first of ``ops`` that runs a region, or that starts or finishes a collective; None if there is none."""
    return next((op for op in ops if isinstance(op, Run | Start | Finish)), None)


def _input(node: Node, weight: str, block: str, note: str) -> Iterator[Line]:
    """Yield the line for an input, unless the input is unused.  ``note``: a comment to add to the line; may be empty."""
    if node.users:
        line = _node_line(node, f"{INPUTS} of {block}" if block else INPUTS)
        text = f"{line.text}  # {note}" if note else line.text
        yield replace(line, weight=weight, text=text)


def _node_line(node: Node, part: str, start: Op | None = None) -> Line:
    op = "" if node.op in ("placeholder", "get_attr", "output") else target_name(node)
    return Line(
        text=node_text(node),
        op=op,
        part=part,
        like=node_text(node, dict.fromkeys(node.all_input_nodes, "%")).removeprefix(node.name),  # drop the names
        defines=node.name,
        uses=_uses(node),
        collective=start.collective if isinstance(start, Start) else None,
        node=node,
    )


def _uses(node: Node, names: Mapping[Node, str] | None = None) -> tuple[str, ...]:
    """Return the names of a node's operands in order.  An operand that is used twice is listed twice."""
    operands: list[str] = []
    map_arg((node.args, node.kwargs), lambda n: operands.append((names or {}).get(n, n.name)))
    return tuple(operands)


def _transfer(op: TransferOp, part: str, barrier: bool = False) -> Line:
    line = Line(text=transfer_text(op), op=transfer_name(op), part=part)
    if isinstance(op, Prefetch):
        return replace(line, copy=op.copy)
    if isinstance(op, Wait):
        return replace(line, readable=op.weights, barrier=barrier)
    return replace(line, weight=op.weight) if isinstance(op, Evict) else line
