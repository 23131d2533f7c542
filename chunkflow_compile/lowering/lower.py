"""Lowering of regions: they are compiled with Inductor or TensorRT, or run eagerly.  Regions of equal structure are lowered
once."""

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

# Errors that a damaged or missing file may cause, including errors of compilers and of Inductor's worker processes.
_FILE_ERRORS = (OSError, ImportError, SubprocessError, CppCompileError, SubprocException)


def lower_regions(
    program: Program,
    lowering: Lowering,
    inductor: Mapping[str, Any],
    report: Callable[[str], object] = str,
    note: Callable[[str], object] = str,
) -> dict[str, LoweredRegion]:
    """Return a mapping: name of the submodule of a region -> lowered code.  The lowered code is a callable that takes the
    inputs of the region in a list, empties this list, and returns the outputs as a sequence.

    ``inductor``: the user's Inductor configuration, which applies to every region.  ``report``: a function that is called
    with messages about progress.  ``note``: a function that is called with a message if a region cannot be lowered with
    TensorRT.  This function must be called inside a torch.compile backend, because the fake tensors of the regions belong to
    the FakeTensorMode of the backend.
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
    """Lower a region with Inductor.  If lowering fails because Inductor's caches contain truncated libraries, remove these
    libraries and try once more.

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
    """Return whether an error was caused by a file that could not be written, compiled or loaded."""
    while error is not None:
        if isinstance(error, _FILE_ERRORS):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False


def _eager(module: GraphModule) -> GraphModule:
    """Return a copy of a region.  Its ``forward`` takes the inputs in a list, and frees each input and each intermediate
    value after the last use of this value."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(_BoxedCodeGen())
    return GraphModule(module, graph)


def _with_numbered_nodes(module: GraphModule) -> GraphModule:
    """Return a copy of a region with numbers as node names, so that Inductor's cache keys do not depend on the names of
    ops."""
    graph, copies = Graph(), dict[Node, Node]()
    for number, node in enumerate(module.graph.nodes):
        copies[node] = copied = graph.node_copy(node, copies.__getitem__)
        if node.op != "output":
            copied.name = f"v{number}"
            if node.op == "placeholder":
                copied.target = copied.name
                if isinstance(value := node.meta.get("val"), torch.SymInt) and release_of(torch.__version__) >= (2, 14):
                    # mark the input as a symbol, so that AOTAutograd's cache keys do not contain its present value
                    copied.type, copied.target = torch.SymInt, str(value)
    return GraphModule(module, graph)
