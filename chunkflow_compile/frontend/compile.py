"""``compile``: place a model and compile each of its block types once, in place; ``restore`` undoes it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from typing_extensions import Unpack

from chunkflow_compile.frontend.backend import chunkflow
from chunkflow_compile.frontend.block_kinds import (
    Kind,
    between_hooks,
    caching_hook,
    calls_of_hooks,
    kinds_of,
    parts_of,
    repeated_blocks,
    runs_op_by_op,
    structure_of,
)
from chunkflow_compile.frontend.compiled_calls import (
    CallWithDynamicSizes,
    CallWithProgress,
    CompiledForward,
    EagerForNested,
)
from chunkflow_compile.frontend.guard_filter import needed
from chunkflow_compile.frontend.preconditions import guard_hooks, warn_of_small_weights
from chunkflow_compile.option_parsing import for_backend, parse_options
from chunkflow_compile.options import BackendOptions, Options
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import OnPeers
from chunkflow_compile.placed.model_arguments import unwrap
from chunkflow_compile.placed.offload import bring_back, group_of_peers, offload, refuse_applied, target_of
from chunkflow_compile.placed.placement import Placement, placement_of, placements_of
from chunkflow_compile.private_torch.dynamo import backend_of, compile_lock
from chunkflow_compile.report.record import check_folder
from chunkflow_compile.units import Size

_log = logging.getLogger(__name__)

# With these values of the option cudagraphs, the whole model is compiled as one graph.
_WHOLE = (True, "collectives")

# The maximum number of compilations per code object, after which Dynamo runs the code eagerly.  Dynamo's default of 8 is too
# low for blocks whose code reads a block index: they share one code object, which is compiled once per block.
_RECOMPILE_LIMIT = 256


def compile(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    share: Any = None,
    host_memory: Size | None = None,
    peers: OnPeers = False,
    mode: str | None = None,
    dynamic: bool | None = None,
    **options: Unpack[BackendOptions],
) -> nn.Module:
    """``chunkflow_compile.compile`` for a model: place it and compile each block type once, in place; return ``model``.

    At run time, the compiled parts run one after another as a cycle.  Their copies are scheduled together, as if the whole
    model were compiled as one graph.  But Dynamo traces only one block of each type instead of the whole model.
    """
    _check_arguments(model, dynamic)
    given_place = {"device": device, "dtype": dtype, "share": share, "host_memory": host_memory, "peers": peers or None}
    if placement_of(model) is not None and (named := [k for k, v in given_place.items() if v is not None]):
        raise ChunkflowError(
            f"This model is placed already, so {' and '.join(named)} would change nothing: leave out what offload() was "
            "given, or call chunkflow_compile.restore(model) first."
        )
    chosen = check_options(options, mode, compile)
    if placement_of(model) is None:
        if peers:
            refuse_no_peers(peers, share, target_of(model, device), chosen)
        placing = {"dtype": dtype, "share": share, "host_memory": host_memory, "pack": chosen.pack, "peers": peers}
        offload(model, device, min_bytes=chosen.min_bytes, **placing)
    warn_of_small_weights(model)
    placement = placement_of(model)
    assert placement is not None
    compile_by_kind(model, placement, for_backend(options, chosen), dynamic)
    return model


def _check_arguments(model: nn.Module, dynamic: bool | None) -> None:
    """Raise ChunkflowError if ``dynamic`` is invalid, or if the model or a part of it is already compiled."""
    root = unwrap(model)
    refuse_applied(root)
    check_dynamic(dynamic)
    calls = [call for m in root.modules() if (call := m._compiled_call_impl) is not None]
    if not calls and model is root:
        return
    what = "This model" if model is not root or root._compiled_call_impl is not None else "A part of this model"
    fix = "call chunkflow_compile.restore(model) first, or pass a model that was never compiled."
    if model is not root or not all(map(is_ours, calls)):
        fix = "pass the model itself, before torch.compile or module.compile() is called for it or for a part of it."
    raise ChunkflowError(f"{what} is compiled already: {fix}")


def refuse_no_peers(peers: OnPeers, share: Any, device: torch.device, chosen: Options) -> None:
    """Raise ChunkflowError for peers=True if the hardware profile says that ranks cannot read each other's GPU memory."""
    group = group_of_peers(peers, share, device)
    if group is not None and peers is True:
        chosen.on(device).profile().check_peers(len(group.ranks))


def check_options(
    options: Mapping[str, Any], mode: str | None, caller: Callable[..., Any], refused: Collection[str] = ()
) -> Options:
    """Parse and check the options of ``caller`` before any weight moves.

    Also check that the files that the options name can be read, and that the folder for dumps can be written.
    ``refused``: see :func:`parse_options`.  Raises ChunkflowError for invalid options.
    """
    if theirs := [name for name in ("backend", "fullgraph", "options", "recompile_limit") if name in options]:
        raise ChunkflowError(
            f"{theirs[0]} is an argument of torch.compile: pass options of ChunkFlow by name, such as memory='8GiB'."
        )
    chosen = parse_options(options, mode, caller, refused)
    chosen.settings()  # reads the files with the plan and the timings
    if chosen.dump is not None:
        check_folder(chosen.dump)
    return chosen


def check_dynamic(dynamic: bool | None) -> None:
    """Raise ChunkflowError if ``dynamic`` is a value that torch.compile does not accept."""
    if dynamic not in (None, True, False):
        raise ChunkflowError(f"dynamic={dynamic!r} must be True, False or None, as in torch.compile.")


def compiled_whole(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether :func:`compile_by_kind` compiles the whole model as one graph instead of block by block."""
    return bool(_why_whole(model, options))


def _why_whole(model: nn.Module, options: Mapping[str, Any]) -> str:
    """Return the reason why a model is compiled as one graph, or an empty string if it is compiled block by block."""
    if not repeated_blocks(model):
        return "has no repeated blocks"
    if options.get("cudagraphs") in _WHOLE:
        return "is to be one CUDA graph"
    hoist = options.get("hoist")
    if not hoist or (isinstance(hoist, bool | str) and _hoists_by_kind(model)):
        return ""
    # Only a trace of the whole model shows whether hoisting is worth it.  This trace takes most of the time of compiling the
    # model as one graph, so compiling block by block after the trace would save little.  Therefore the model is compiled as
    # one graph for hoist="auto", as for hoist=True.
    return "may have hoisted weights" if hoist == "auto" else "has hoisted weights"


def _hoists_by_kind(model: nn.Module) -> bool:
    """Whether hoisting works if blocks are compiled separately, that is, whether each block can reuse the rows (the results
    of hoisted products) that were computed in earlier generations.

    Each block receives one embedding, which the model computes from all small inputs, such as the timestep.  If the pooled
    text is one of these inputs, the embedding differs from prompt to prompt, so blocks cannot reuse the rows of an earlier
    prompt.  In this case, only a graph of the whole model can compute the rows of all steps in advance.

    Whether pooled text is an input is guessed from the argument names of the model's forward.  The argument ``guidance`` does
    not matter: some models never read it, and users of the other models rarely change it.  A wrong guess only costs time.

    The result is always True for a model with a step cache, because its blocks have to be compiled separately: the cache runs
    eager code between them.
    """
    names = inspect.signature(model.forward).parameters
    if any(caching_hook(module) is not None for module in model.modules()):
        return True
    return "timestep" in names and not any("pooled" in name for name in names)


def compile_by_kind(
    model: nn.Module,
    placement: Placement,
    options: Mapping[str, Any],
    dynamic: bool | None,
    *,
    name: str | None = None,
    levels: bool = False,
) -> None:
    """Compile a placed model, or a module inside a placed model, in place; each block type is compiled once.

    In three cases, the model is compiled as one graph instead: it has no repeated blocks, each of its calls has to be one
    CUDA graph, or hoisting needs a graph of the whole model.

    ``options``: options of the backend.  ``dynamic``: see torch.compile.  ``name``: the name of the model in progress
    displays; by default the name of its class.  ``levels``: whether blocks are called with several input sizes within one
    call of the model, as in the decoder of a VAE.
    """
    name = type(model).__name__ if name is None else name
    if placement.hoist:
        options = {"hoist": placement.hoist, **options}
    blocks = repeated_blocks(model)
    if why := _why_whole(model, options):
        _log.warning("%s %s: it is compiled whole", type(model).__name__, why)
        _compile_module(model, options, dynamic)
        model._compiled_call_impl = CallWithProgress(model, placement.begin_compilation(name, 1, model), whole=True)
        return
    kinds = kinds_of(between_hooks(blocks, placement.min_bytes))
    for kind in kinds:
        _warn_of_counters(kind)
    parts = parts_of(model, blocks.values(), placement.min_bytes)
    op_by_op = {path: part for path, part in parts.items() if runs_op_by_op(part, placement.min_bytes)}
    kinds += kinds_of({path: part for path, part in parts.items() if path not in op_by_op})
    said = ", ".join(f"{kind.name} ({len(kind.members)})" for kind in kinds)
    others = f"; {', '.join(op_by_op)} run op by op" if op_by_op else ""
    _log.info("%s is compiled by kind: %s%s", type(model).__name__, said, others)
    for kind in kinds:
        for module in kind.members.values():
            _compile_module(module, options, dynamic, _with_hooks, levels)
    for part in op_by_op.values():
        _compile_module(part, {**options, "lowering": "eager"}, dynamic, _with_hooks, levels)
    progress = placement.begin_compilation(name, len(kinds) + len(kinds_of(op_by_op)), model)
    model._compiled_call_impl = CallWithProgress(model, progress)


def restore(model: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """``chunkflow_compile.restore`` for a model: make it an ordinary eager model again, bit for bit; return ``model``.

    ``device``: see :func:`bring_back`.
    """
    with compile_lock:  # keeps calls in other threads from placing the model meanwhile
        roots = [unwrap(model), *(placement.root for placement in placements_of(model))]
        refuse_applied(model)
        bring_back(model, device)
        for root in roots:
            uncompile(root)
    return model


def uncompile(model: nn.Module) -> None:
    """Undo :func:`compile_by_kind` and ``module.compile(backend="chunkflow")``, so that all modules run eagerly again.

    The model may have gained or lost hooks since it was compiled.
    """
    for module in model.modules():
        if is_ours(module._compiled_call_impl):
            module.__dict__.pop("_compiled_call_impl", None)
        if (forward := module.__dict__.get("forward")) is not None and _eager(forward) is not forward:
            module.forward = _eager(forward)
            if module.forward == type(module).forward.__get__(module):
                del module.__dict__["forward"]
        for call in calls_of_hooks(module):
            call.forward, call.original_forward = _eager(call.forward), _eager(call.original_forward)


def is_ours(call: Any) -> bool:
    """Whether ChunkFlow made ``call``, the compiled call of a module."""
    return isinstance(call, EagerForNested | CallWithDynamicSizes | CallWithProgress) or backend_of(call) in (
        chunkflow,
        _with_hooks,
    )


def _eager(forward: Any) -> Any:
    """Return the original forward of ``forward`` if it is a CompiledForward, otherwise ``forward`` itself."""
    return forward.eager if isinstance(forward, CompiledForward) else forward


def _with_hooks(graph: GraphModule, inputs: list[Any], **given: Any) -> Any:
    """The backend for a part of a model.  It differs from :func:`chunkflow` in that Dynamo always adds guards on the hooks of
    modules."""
    guard_hooks()
    return chunkflow(graph, inputs, by_kind=True, **given)


_with_hooks.__name__ = "chunkflow"  # torch shows this name in its errors


def _compile_module(
    module: nn.Module,
    options: Mapping[str, Any],
    dynamic: bool | None,
    backend: str | Callable[..., Any] = "chunkflow",
    levels: bool = False,
) -> None:
    """Prepare a module, in place, so that its first call compiles it.  ``levels``: see :func:`compile_by_kind`."""
    opened = levels and dynamic is None
    limited = "recompile_limit" in inspect.signature(torch.compile).parameters
    more: dict[str, Any] = {"recompile_limit": _RECOMPILE_LIMIT} if limited else {}
    more |= {"backend": backend, "options": {**options, "guard_filter_fn": needed}}
    more["dynamic"] = False if opened else dynamic
    if (hook := caching_hook(module)) is not None:
        forward = hook.fn_ref.original_forward
        hook.fn_ref.original_forward = CompiledForward(forward, torch.compile(forward, **more))
        return
    module.compile(**more)
    if type(module).forward.__module__.startswith("torch.nn."):
        # Dynamo does not compile the forward of torch's own modules, such as Linear.  It only traces such a forward as a part
        # of other code that calls the module.
        module._compiled_call_impl = torch.compile(_function_that_calls(module), **more)
    call = module._compiled_call_impl
    assert call is not None
    module._compiled_call_impl = EagerForNested(module._call_impl, CallWithDynamicSizes(call) if opened else call)


def _function_that_calls(module: nn.Module) -> FunctionType:
    """Return a function that calls a module.  For modules with the same structure, these functions share one code object."""
    call = module._call_impl

    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    assert isinstance(called, FunctionType)
    called.__code__ = _copy(called.__code__, structure_of(module))
    return called


@functools.cache  # per process, like Dynamo's cache: another model of the same class reuses the compiled code
def _copy(code: CodeType, structure: object) -> CodeType:
    """Return the copy of ``code`` for modules with the structure ``structure``.

    Each structure needs its own copy, because Dynamo counts and caches compilations per code object.
    """
    return code.replace()


def _warn_of_counters(kind: Kind) -> None:
    if kind.counters:
        _log.warning(
            "The %s blocks of %s differ in %s, which their code reads: each is compiled by itself, which takes as long as "
            "compiling the whole model. Pass what depends on it to forward, or read it outside the blocks.",
            len(kind.members),
            kind.name,
            " and ".join(kind.counters),
        )
