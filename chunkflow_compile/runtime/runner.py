"""A runner is a compiled program; a session is that program on the weights of one model.

Dynamo shares a compiled graph between models of one class: a runner may be called with the parameters of several, and
keeps a session for each.  It holds them weakly; they belong to the placements of their models, and end with them.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkflow_compile.passes.plan import Plan, runs
from chunkflow_compile.passes.rewrite import Program

from .arena import allocate_arena, as_weight, flat_bytes, slot_bytes
from .device import make_device
from .executor import Binding, Executor
from .host_store import Home, home_of
from .measurement import MEASURED_FILE, StepMeasurement, measured


class Session:
    """A program with the memory that it runs on: arena, resident copies, streams."""

    def __init__(
        self,
        program: Program,
        regions: Mapping[str, Callable[..., Sequence[Any]]],
        device: torch.device,
        parameters: Mapping[str, nn.Parameter],
        folder: Path | None = None,
        debug: Collection[str] = (),
    ) -> None:
        self.program = program
        self._folder = folder
        self._steps = 0
        self.started = time.monotonic()
        self._lock = threading.Lock()
        self._homes = {name: home for name, p in parameters.items() if (home := home_of(p)) is not None}
        self._in_place = {name: p for name, p in parameters.items() if name not in self._homes}
        self._versions = _versions(self._homes.values())
        chosen = make_device(device, threads="threads" in debug)
        self.executor = Executor(program, regions, chosen, self._bind(device), poison="poison" in debug)
        self.closed = False

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The newest steps, oldest first."""
        return tuple(self.executor.measurements)

    def fits(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether the session can run on ``parameters`` as they are now; False if it must be made anew.

        Raises ChunkflowError if an offloaded weight was changed behind the host store's back.
        """
        for name, home in self._homes.items():
            home.check(parameters[name])
        for name, parameter in self._in_place.items():
            if parameters[name] is not parameter or home_of(parameter) is not None:
                return False
        # load_state_dict wrote new values: what was fetched is old
        return not self.closed and self._versions == _versions(self._homes.values())

    def run(self, inputs: Sequence[Any]) -> Any:
        """One step; a second thread waits for the first to end its step."""
        with self._lock:
            outputs = self.executor.run(inputs)
            self._steps += 1
            if not self._steps & (self._steps - 1):  # behind steps 1, 2, 4, 8: a killed run leaves its figures too
                self._save()
            return outputs

    def close(self) -> None:
        """Waits for the step and the copies in flight, and frees arena and streams."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self._save()
                self.executor.forget()
                self.executor.device.close()

    def _save(self) -> None:
        """Into the folder of the dump, if there is one; a full disk must not end a step."""
        if self._folder is not None and self.measurements:
            path = self._folder / MEASURED_FILE
            with contextlib.suppress(OSError):
                part = path.with_suffix(".part")  # never half a file, for who reads meanwhile
                part.write_text(measured(self.plan.digest, self.measurements).to_json())
                part.replace(path)

    def _bind(self, device: torch.device) -> Binding:
        arena = allocate_arena(self.plan, device)
        values: dict[str, torch.Tensor] = {}
        slots: dict[str, torch.Tensor] = {}
        for weight in self.plan.weights:
            home = self._homes.get(weight.name)
            if home is None:
                continue
            home.check(home.parameter)
            if weight.offset is not None:
                slots[weight.name] = slot_bytes(arena, weight.offset, weight.nbytes)
                values[weight.name] = as_weight(slots[weight.name], home.host)
                for run in runs(weight.windows):
                    if run.window is None:  # these chunks stay: nothing else ever lies in their bytes
                        begin, end = self.plan.span(weight, run.first, run.end)
                        slots[weight.name][begin:end].copy_(flat_bytes(home.host)[begin:end])
            else:
                values[weight.name] = home.host.to(device, copy=True)
        return Binding(values, slots, {name: flat_bytes(self._homes[name].host) for name in slots})


# Moves the weights named into the host store and ties the session that ``start`` makes to the model's placement.
Place = Callable[[Mapping[str, nn.Parameter], Sequence[str], Callable[[], Session]], Session]


class Runner:
    """Called by AOTAutograd with the inputs of the traced graph, as one list that it may empty."""

    _boxed_call = True

    def __init__(
        self,
        program: Program,
        regions: Mapping[str, Callable[..., Sequence[Any]]],
        device: torch.device,
        place: Place,
        folder: Path | None = None,
        debug: Collection[str] = (),
    ) -> None:
        self.program = program
        self._folder = folder
        self._debug = debug
        self._regions = regions
        self._device = device
        self._place = place
        self._sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._sessions)
        placeholders = [n.name for n in program.module.graph.nodes if n.op == "placeholder"]
        position = {name: i for i, name in enumerate(placeholders)}
        self._position = {w: position[p] for w, p in program.weight_inputs.items()}

    def __call__(self, args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        parameters = {name: inputs[position] for name, position in self._position.items()}
        with self._lock:
            session = self._session(parameters)
        return session.run(inputs)

    def _session(self, parameters: Mapping[str, nn.Parameter]) -> Session:
        """The session of the model that ``parameters`` belong to: its first parameter tells which one."""
        key = id(next(iter(parameters.values())))
        session = self._sessions.get(key)
        if session is not None and not session.closed:
            if session.fits(parameters):
                return session
            session.close()
        missing = [w.name for w in self.program.plan.streamed if home_of(parameters[w.name]) is None]
        fresh = self._place(parameters, missing, lambda: self._start(parameters))
        if session is not None:
            fresh.executor.measurements.extend(session.measurements)
        self._sessions[key] = fresh
        return fresh

    def _start(self, parameters: Mapping[str, nn.Parameter]) -> Session:
        return Session(self.program, self._regions, self._device, parameters, self._folder, self._debug)


def _close_all(sessions: weakref.WeakValueDictionary[int, Session]) -> None:
    """The compiled code is gone (torch._dynamo.reset): nothing can run these sessions again."""
    for session in list(sessions.values()):
        session.close()


def _versions(homes: Iterable[Home]) -> tuple[int, ...]:
    return tuple(h.host._version for h in homes)
