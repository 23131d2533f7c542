"""Lowering of each structurally unique region, once, with Inductor, TensorRT or eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from subprocess import SubprocessError
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _BoxedCodeGen

from chunkflow_compile.hardware.caches import check_compile_cache, remove_torn
from chunkflow_compile.passes.errors import first_line
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.private_torch.inductor import CppCompileError, SubprocException
from chunkflow_compile.releases import release_of
from chunkflow_compile.runtime.wrapped_calls import LoweredRegion

from .inductor import through_inductor
from .tensorrt import through_tensorrt

Lowering = Literal["inductor", "eager", "tensorrt"]

# Errors about files, including errors of compilers, which print their own messages, and of Inductor's worker processes,
# which pass on only text.
_FILE_ERRORS = (OSError, ImportError, SubprocessError, CppCompileError, SubprocException)


def lower_regions(
    program: Program,
    lowering: Lowering,
    inductor: Mapping[str, Any],
    report: Callable[[str], object] = str,
    note: Callable[[str], object] = str,
) -> dict[str, LoweredRegion]:
    """Return submodule name -> callable.  The callable takes the region's inputs in a list, which it empties, and returns
    the outputs as a sequence.

    ``inductor``: the user's Inductor configuration, for every region.  ``report``: called with a description of each
    step.  ``note``: called with a message when a request of the user cannot be fulfilled.  Must be called inside a
    torch.compile backend, because the metadata of the regions belong to its fake mode.
    """
    modules = {name: region.module for name, region in program.regions.items()}
    if lowering == "eager":
        return {name: _eager(module).forward for name, module in modules.items()}
    lowered = dict[str, LoweredRegion]()
    if lowering == "tensorrt":
        for number, (name, module) in enumerate(modules.items(), 1):
            report(f"building engine {number} of {len(modules)}")
            try:
                lowered[name] = through_tensorrt(module)
            except Exception as error:  # noqa: BLE001  (any op or type that TensorRT does not support)
                note(f"{name} goes to Inductor: TensorRT says {first_line(error)}")
    rest = {name: _with_numbered_nodes(module) for name, module in modules.items() if name not in lowered}
    for number, (name, module) in enumerate(rest.items(), 1):
        report(f"lowering region {number} of {len(rest)}")
        lowered[name] = _from_whole_caches(module, inductor)
    return {name: lowered[name] for name in modules}


def _from_whole_caches(module: GraphModule, inductor: Mapping[str, Any]) -> LoweredRegion:
    """Lower with Inductor.  If that fails because its caches contained truncated libraries, remove them and try once
    more.

    Raises ChunkflowError if the folder of the caches can no longer be used.
    """
    try:
        return through_inductor(module, inductor)
    except Exception as error:
        if not _is_file_error(error):
            raise
        if not remove_torn():
            check_compile_cache(needed=True)
            raise
        return through_inductor(module, inductor)


def _is_file_error(error: BaseException | None) -> bool:
    """Whether the cause is a file that could not be written, compiled or loaded.  Inductor's other errors recur in every
    folder."""
    while error is not None:
        if isinstance(error, _FILE_ERRORS):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False


def _eager(module: GraphModule) -> GraphModule:
    """Return the region with a ``forward`` that takes its inputs in a list, and frees each value, inputs included, after
    its last use."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(_BoxedCodeGen())
    return GraphModule(module, graph)


def _with_numbered_nodes(module: GraphModule) -> GraphModule:
    """Return the region with numbered nodes, so that Inductor's caches also match a region of another model whose ops
    have other names."""
    graph, copies = Graph(), dict[Node, Node]()
    for number, node in enumerate(module.graph.nodes):
        copies[node] = copied = graph.node_copy(node, copies.__getitem__)
        if node.op != "output":
            copied.name = f"v{number}"
            if node.op == "placeholder":
                copied.target = copied.name
                if isinstance(value := node.meta.get("val"), torch.SymInt) and release_of(torch.__version__) >= (2, 14):
                    # If an input is marked as a symbol, AOTAutograd's cache keys leave out the present value of the
                    # symbol.
                    copied.type, copied.target = torch.SymInt, str(value)
    return GraphModule(module, graph)
