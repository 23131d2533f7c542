"""Alternatives to an arm that plans the whole model.  Each alternative is a separate model with the same weights:
torch.compile alone, compilation by block type, a pipeline, and diffusers' compile_repeated_blocks and group offload."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from chunkflow_compile.passes.errors import ChunkflowError

if TYPE_CHECKING:
    import torch
    from torch import nn

# Two arms that run the same alternative.  Their difference shows the noise of a measurement.
INDUCTOR, INDUCTOR_AGAIN = "inductor", "inductor-again"
GROUP_OFFLOAD, GROUP_OFFLOAD_COMPILED = "diffusers-group-offload", "diffusers-group-offload-compiled"
REPEATED, BY_KIND, APPLY = "diffusers-repeated-blocks", "by-kind", "apply"
# Alternatives that run a step as one CUDA graph.  ChunkFlow's graph includes copies; torch's graph runs with all weights
# on the device.
GRAPH, INDUCTOR_GRAPH = "graph", "inductor-graph"
# The pipeline (APPLY) is made last, because its budget counts the device memory of the other arms as activations, so this
# memory must not change any more.
ALTERNATIVES = (
    INDUCTOR,
    INDUCTOR_AGAIN,
    INDUCTOR_GRAPH,
    REPEATED,
    BY_KIND,
    GRAPH,
    GROUP_OFFLOAD,
    GROUP_OFFLOAD_COMPILED,
    APPLY,
)
# The alternatives whose weights are in host memory.
OFFLOADED = (BY_KIND, GRAPH, APPLY, GROUP_OFFLOAD, GROUP_OFFLOAD_COMPILED)
# The number of recompilations that Dynamo allows per function.  All blocks share the function of the hooks of group
# offload, so the limit must be raised; this value is from the documentation of diffusers.
RECOMPILE_LIMIT = 1000


def alternative_of(arm: str) -> str:
    """Return the name of the alternative that an arm runs."""
    return INDUCTOR if arm == INDUCTOR_AGAIN else arm


def alternative_calls(alternative: str, device: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the calls that set up an alternative, in order, with their keyword arguments.  ``device``: the device type.

    Group offload is configured as the documentation of diffusers recommends for speed: copies overlap with compute, and
    the host does not wait.  A model with its hooks cannot be compiled as one graph, so diffusers compiles each block.
    """
    if alternative == INDUCTOR:
        return {"torch.compile": {"fullgraph": True, "dynamic": False}}
    if alternative == REPEATED:
        return {"compile_repeated_blocks": {"fullgraph": True, "dynamic": False}}
    if alternative == INDUCTOR_GRAPH:
        return {"torch.compile": {"fullgraph": True, "dynamic": False, "mode": "reduce-overhead"}}
    if alternative == BY_KIND:
        return {"chunkflow_compile.compile": {"device": device}}
    if alternative == GRAPH:
        return {"chunkflow_compile.compile": {"device": device, "cudagraphs": True}}
    if alternative == APPLY:
        return {"chunkflow_compile.apply": {"device": device}}
    on_gpu = device == "cuda"
    calls: dict[str, dict[str, Any]] = {
        "enable_group_offload": {
            "onload_device": device,
            "offload_device": "cpu",
            "offload_type": "block_level",
            "num_blocks_per_group": 1,
            "use_stream": on_gpu,
            "record_stream": on_gpu,
        }
    }
    if alternative == GROUP_OFFLOAD_COMPILED:
        calls["compile_repeated_blocks"] = {"dynamic": False}
        calls["torch._dynamo.config.patch"] = {"recompile_limit": RECOMPILE_LIMIT}
    return calls


def describe_calls(calls: Mapping[str, Mapping[str, Any]]) -> str:
    """Return calls as text, as a user would write them."""
    return ", ".join(f"{name}({', '.join(f'{k}={v!r}' for k, v in given.items())})" for name, given in calls.items())


def make_alternative(alternative: str, model: nn.Module, device: torch.device) -> Callable[..., Any]:
    """Set up an alternative for a model; return a function that runs one step.  The model must be in host memory for the
    alternatives in :data:`OFFLOADED`, and on ``device`` for all others.

    Raises ChunkflowError if the alternative needs a diffusers method that the model does not have.
    """
    import torch  # import torch only here, because --help imports this module

    import chunkflow_compile

    calls = dict(alternative_calls(alternative, device.type))
    if alternative in (INDUCTOR, INDUCTOR_GRAPH):
        return torch.compile(model, **calls["torch.compile"])
    if alternative in (BY_KIND, GRAPH):
        return chunkflow_compile.compile(model, **calls["chunkflow_compile.compile"])
    if alternative == APPLY:
        pipe = chunkflow_compile.apply(pipeline_of(model), **calls["chunkflow_compile.apply"])
        # call the transformer directly, to leave out what the pipeline does before the first step
        return lambda **inputs: pipe.transformer(**inputs)
    if not all(hasattr(model, name) for name in calls if "." not in name):
        raise ChunkflowError(
            f"--arms {alternative}: {type(model).__name__} is not a model of diffusers. Leave this arm out."
        )
    limits = calls.pop("torch._dynamo.config.patch", {})
    for method, given in calls.items():
        getattr(model, method)(**given)
    if not limits:
        return model
    from chunkflow_compile.private_torch import dynamo

    def call(**inputs: Any) -> Any:
        with dynamo.config.patch(**limits):
            return model(**inputs)

    return call


def pipeline_of(transformer: nn.Module) -> Any:
    """Return a diffusers pipeline whose only component is a given transformer."""
    from diffusers import DiffusionPipeline

    class OneModel(DiffusionPipeline):  # type: ignore[misc]
        def __init__(self, transformer: nn.Module) -> None:
            super().__init__()
            self.register_modules(transformer=transformer)

        def __call__(self, steps: Sequence[Mapping[str, Any]]) -> list[Any]:
            """Run one step per element of ``steps``, which are keyword arguments of the transformer."""
            return [self.transformer(**inputs) for inputs in steps]

    return OneModel(transformer)
