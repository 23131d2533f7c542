"""Lowering: each structurally unique region once, with Inductor, TensorRT or eager."""

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

# Also those of compilers, which write their own messages, and of Inductor's processes, which pass on text alone.
_ERRORS_OF_FILES = (OSError, ImportError, SubprocessError, CppCompileError, SubprocException)


def lower_regions(
    program: Program,
    lowering: Lowering,
    inductor: Mapping[str, Any],
    report: Callable[[str], object] = str,
    note: Callable[[str], object] = str,
) -> dict[str, LoweredRegion]:
    """Submodule name -> callable that takes the region's inputs, in a list that it empties, and returns its outputs as a
    sequence.

    ``inductor``: the user's Inductor configuration, for every region.  ``report``: called with what is being done.  ``note``:
    called with what the user asked for and does not get.  Must be called inside a torch.compile backend: the metadata of
    the regions belong to its fake mode.
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
    rest = {name: _named_by_place(module) for name, module in modules.items() if name not in lowered}
    for number, (name, module) in enumerate(rest.items(), 1):
        report(f"lowering region {number} of {len(rest)}")
        lowered[name] = _from_whole_caches(module, inductor)
    return {name: lowered[name] for name in modules}


def _from_whole_caches(module: GraphModule, inductor: Mapping[str, Any]) -> LoweredRegion:
    """Lower through Inductor; once more if its caches contained libraries that were written only in part.

    Raises ChunkflowError if their folder cannot be used any more.
    """
    try:
        return through_inductor(module, inductor)
    except Exception as error:
        if not _is_of_files(error):
            raise
        if not remove_torn():
            check_compile_cache(needed=True)
            raise
        return through_inductor(module, inductor)


def _is_of_files(error: BaseException | None) -> bool:
    """Whether a file could not be written, compiled or loaded.  Inductor's other errors recur in every folder."""
    while error is not None:
        if isinstance(error, _ERRORS_OF_FILES):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False


def _eager(module: GraphModule) -> GraphModule:
    """The region with a ``forward`` that is called with a list, and drops each value after its last use, inputs too."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(_BoxedCodeGen())
    return GraphModule(module, graph)


def _named_by_place(module: GraphModule) -> GraphModule:
    """The region with its nodes numbered: Inductor's caches then find it in another model, where its ops have other names."""
    graph, copies = Graph(), dict[Node, Node]()
    for number, node in enumerate(module.graph.nodes):
        copies[node] = copied = graph.node_copy(node, copies.__getitem__)
        if node.op != "output":
            copied.name = f"v{number}"
            if node.op == "placeholder":
                copied.target = copied.name
                if isinstance(value := node.meta.get("val"), torch.SymInt) and release_of(torch.__version__) >= (2, 14):
                    # AOTAutograd's keys leave out the value that the symbol has now if the input is marked as a symbol.
                    copied.type, copied.target = torch.SymInt, str(value)
    return GraphModule(module, graph)
