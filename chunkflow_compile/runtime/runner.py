"""A runner: a compiled program and, from its first call on, the memory it runs on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.rewrite import Program

from .arena import allocate_arena, as_weight, flat_bytes, slot_bytes
from .device import make_device
from .executor import Binding, Executor
from .host_store import Home, home_of
from .measurement import StepMeasurement


@dataclass
class _Bound:
    """What a runner holds between its first call and restore."""

    executor: Executor
    homes: tuple[tuple[int, Home], ...]
    parameters: tuple[tuple[int, torch.Tensor], ...]
    versions: tuple[int, ...]


class Runner:
    """Called by AOTAutograd with the inputs of the traced graph, as one list that it may empty."""

    _boxed_call = True

    def __init__(
        self,
        program: Program,
        regions: Mapping[str, Callable[..., Sequence[Any]]],
        device: torch.device,
        place: Callable[[Runner, Sequence[tuple[tuple[str, ...], nn.Parameter]]], None],
    ) -> None:
        self.program = program
        self._regions = regions
        self._device = device
        self._place = place
        self._bound: _Bound | None = None
        self._lock = threading.RLock()
        placeholders = [n.name for n in program.module.graph.nodes if n.op == "placeholder"]
        position = {name: i for i, name in enumerate(placeholders)}
        self._position = {w: position[p] for w, p in program.weight_inputs.items()}

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The newest steps, oldest first."""
        return tuple(self._bound.executor.measurements) if self._bound else ()

    @property
    def executor(self) -> Executor:
        """Raises ChunkflowError before the first call and after restore."""
        if self._bound is None:
            raise ChunkflowError("The program has no memory yet: call the compiled model once.")
        return self._bound.executor

    def __call__(self, args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        with self._lock:  # a second thread waits for the first to end its step
            if self._bound is None:
                self._bound = self._bind(inputs)
            self._check(self._bound, inputs)
            return self._bound.executor.run(inputs)

    def unbind(self) -> None:
        """Frees arena and streams; the next call binds again."""
        if self._bound is not None:
            self._bound.executor.forget()
            self._bound.executor.device.close()
            self._bound = None

    def _bind(self, inputs: Sequence[Any]) -> _Bound:
        parameters = {name: inputs[position] for name, position in self._position.items()}
        plan, names = self.plan, {w.name: w.names for w in self.program.problem.weights}
        arena = allocate_arena(plan, self._device)
        missing = [(names[w.name], parameters[w.name]) for w in plan.streamed if home_of(parameters[w.name]) is None]
        self._place(self, missing)
        homes = {name: home for name, p in parameters.items() if (home := home_of(p)) is not None}
        values: dict[str, torch.Tensor] = {}
        slots: dict[str, torch.Tensor] = {}
        for weight in plan.weights:
            home = homes.get(weight.name)
            if weight.offset is not None:
                slots[weight.name] = slot_bytes(arena, weight.offset, weight.nbytes)
                values[weight.name] = as_weight(slots[weight.name], homes[weight.name].host)
            elif home is not None:
                home.check(parameters[weight.name])
                values[weight.name] = home.host.to(self._device, copy=True)
            else:
                values[weight.name] = parameters[weight.name].detach()
        hosts = {name: flat_bytes(homes[name].host) for name in slots}
        executor = Executor(self.program, self._regions, make_device(self._device), Binding(values, slots, hosts))
        return _Bound(
            executor,
            tuple((self._position[name], home) for name, home in homes.items()),
            tuple((self._position[n], p) for n, p in parameters.items() if n not in homes),
            _versions(homes.values()),
        )

    def _check(self, bound: _Bound, inputs: Sequence[Any]) -> None:
        for position, home in bound.homes:
            home.check(inputs[position])
        for position, parameter in bound.parameters:
            if inputs[position] is not parameter or home_of(parameter) is not None:
                return self._rebind(inputs)
        if bound.versions != _versions(home for _, home in bound.homes):  # load_state_dict: what was fetched is old
            self._rebind(inputs)

    def _rebind(self, inputs: Sequence[Any]) -> None:
        measurements = self.executor.measurements
        self.unbind()
        self._bound = self._bind(inputs)
        self._bound.executor.measurements.extend(measurements)


def _versions(homes: Any) -> tuple[int, ...]:
    return tuple(0 if h.host.is_inference() else h.host._version for h in homes)
