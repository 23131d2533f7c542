"""Guards of an offloaded model, whose parameters are empty: accesses are answered from the host copies or refused.

* ``state_dict`` and ``load_state_dict`` go through the host copies.
* An eager call, ``deepcopy``, pickling and ``.to()`` that would change a weight raise ChunkflowError.

The guards are attached to the model's own modules and parameters; :meth:`Guards.remove` detaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from chunkflow_compile.passes.errors import ChunkflowError

from .host_store import Home, home_of
from .modules import owners


class Guards:
    """The hooks of one offloaded model."""

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._root = root
        self._device = device
        self._handles: list[RemovableHandle] = []
        self._holding: dict[int, nn.Module] = {}  # by id: they hold offloaded parameters directly
        self._above: dict[int, nn.Module] = {}  # by id: those and all modules around them
        self._refusing: list[nn.Parameter] = []

    def add(self, homes: Iterable[Home]) -> None:
        """Guard the parameters of ``homes`` and the modules that hold them."""
        homes = list(homes)
        holding = owners(self._root, (h.parameter for h in homes))
        for home in homes:
            _refuse_copies(home)
            self._refusing.append(home.parameter)
        fresh = {id(m): m for modules in holding.values() for m in modules if id(m) not in self._holding}
        self._holding.update(fresh)
        for module in fresh.values():
            self._handles.append(module.register_state_dict_post_hook(_read_host_copies))
            self._handles.append(module.register_load_state_dict_pre_hook(_write_host_copies))
        self._guard_around()

    def watch_calls(self, homes: Callable[[], Iterable[Home]]) -> None:
        """Refuse inputs on another device and changed weights, which would fail inside Dynamo with a less clear error.

        Dynamo traces the hook, so its result is fixed when the model is compiled.  The runner checks every step again.
        """

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def changed() -> str:
            try:
                for home in homes():
                    home.check(home.parameter)
            except ChunkflowError as error:
                return str(error)
            return ""

        def check(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if changed():
                raise ChunkflowError(changed())
            _check_inputs(self._device, module, args, kwargs)

        self._handles.append(self._root.register_forward_pre_hook(check, with_kwargs=True))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        for module in self._above.values():
            module.__dict__.pop("_apply", None)
        self._above.clear()
        self._holding.clear()
        for parameter in self._refusing:
            for name in ("__deepcopy__", "__reduce_ex__"):
                parameter.__dict__.pop(name, None)
        self._refusing.clear()

    def _guard_around(self) -> None:
        """Guard every module that contains an offloaded weight, at any depth.

        An eager call may read the weight of a module below.  ``.to()`` reaches parameters through ``_apply`` of every
        module; it is refused before the first change.
        """

        def visit(module: nn.Module) -> bool:
            below = [visit(child) for child in module.children()]  # a list: visit all of them
            if not (id(module) in self._holding or any(below)):
                return False
            if id(module) not in self._above:
                module.__dict__["_apply"] = _GuardedApply(module)
                # Dynamo traces the hook, in the model's graph or as a frame of its own, so the hook can tell a compiled
                # call from an eager one.
                self._handles.append(module.register_forward_pre_hook(_refuse_eager_call))
                self._above[id(module)] = module
            return True

        visit(self._root)


class _GuardedApply:
    """Replaces ``module._apply`` while weights are offloaded."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self._module
        for parameter in module.parameters(recurse=recurse):
            home = home_of(parameter)
            if home is None:
                continue
            probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            result = fn(probe)
            if result.dtype != probe.dtype or result.device != probe.device:
                raise ChunkflowError(
                    f"The weight {home.name} lives in ChunkFlow's host store, so the model cannot become {result.dtype} on "
                    f"{result.device} now: call chunkflow_compile.restore(model), convert, and offload again."
                )
        applied: nn.Module = type(module)._apply(module, lambda t: t if home_of(t) is not None else fn(t), recurse)
        return applied

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ChunkflowError(
            "A module of an offloaded model cannot be copied: call chunkflow_compile.restore(model) first, or copy its "
            "state_dict()."
        )


def _refuse_copies(home: Home) -> None:
    def refuse(*_: Any) -> NoReturn:
        raise ChunkflowError(
            f"The weight {home.name} lives in ChunkFlow's host store and cannot be copied or pickled as a parameter: use "
            "state_dict(), which reads the host copy, or call chunkflow_compile.restore(model) first."
        )

    home.parameter.__deepcopy__ = refuse  # type: ignore[method-assign]
    home.parameter.__reduce_ex__ = refuse  # type: ignore[method-assign]


def _refuse_eager_call(module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    name = next((h.name for p in module.parameters() if (h := home_of(p)) is not None), "a weight")
    raise ChunkflowError(
        f"{type(module).__name__} was called eagerly, but {name} lives in ChunkFlow's host store: call the model that "
        'torch.compile(model, backend="chunkflow") returned, or chunkflow_compile.restore(model) first. If this was the '
        "compiled model, a graph break, or more shapes than torch._dynamo.config.recompile_limit, left this part outside the "
        "graph: compile with fullgraph=True to see which."
    )


def _read_host_copies(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in module._parameters.items():
        home = home_of(parameter)
        if home is not None and prefix + name in state:
            state[prefix + name] = home.host.detach()


def _write_host_copies(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, *messages: Any
) -> None:
    for name, parameter in module._parameters.items():
        home = home_of(parameter)
        value = state.get(prefix + name)
        if home is None or not isinstance(value, torch.Tensor) or value.shape != home.host.shape:
            continue  # load_state_dict itself reports missing keys and wrong shapes
        home.settle()
        with torch.no_grad():
            home.host.copy_(value)
        state[prefix + name] = parameter  # copying a parameter onto itself does nothing


def _check_inputs(device: torch.device, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    for name, value in {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.device.type != device.type:
            raise ChunkflowError(
                f"The weights of {type(module).__name__} are placed for {device}, but {name} is on {value.device}: move "
                f"it to {device}, or place the model for {value.device} with offload(model, device)."
            )
