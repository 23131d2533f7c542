"""A runner is a compiled program; a session is that program on the weights of one model.

Dynamo shares a compiled graph between models of one class: a runner may be called with the parameters of several, and
keeps a session for each.  It holds them weakly; they belong to the placements of their models, and end with them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.program.rewrite import Program
from chunkflow_compile.passes.program.verify import verify_together
from chunkflow_compile.weights.bytes import as_weight, flat_bytes, slot_bytes
from chunkflow_compile.weights.host_store import Home, home_of

from .arena import Arena
from .binding import Binding
from .device import DeviceKind, check_kind
from .executor import Executor
from .locks import ProcessLock
from .measurement import MEASURED_FILE, StepMeasurement, measured

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Code:
    """What compilation made.  ``regions``: name of a submodule of the program -> its lowered code.

    ``make``: makes the program by other settings of the passes, given by name; the same regions run it.
    ``replan_after``: warm steps behind which it is made from what they took; 0 for never.
    ``folder``: gets what was measured.  ``kind``: of device; ``poison``: as the executor's.  ``verified``: whether the
    program was, and is to be with others in its arena.  ``pin_bytes``: most host bytes to pin.  ``advice``: a sentence on
    what would fit, where the arena does not.
    """

    program: Program
    regions: Mapping[str, Callable[..., Sequence[Any]]]
    make: Callable[..., tuple[Program, Path | None]]
    replan_after: int = 0
    folder: Path | None = None
    kind: DeviceKind
    poison: bool = False
    verified: bool = True
    pin_bytes: int = 0
    advice: Callable[..., str] = str

    def remade(self, **settings: Any) -> Code:
        """By other settings, without compiling.  Raises ChunkflowError if they have no plan."""
        program, folder = self.make(**settings)
        advice = partial(self.advice, memory=settings["memory"]) if "memory" in settings else self.advice
        make = partial(self.make, **settings)
        return replace(self, program=program, folder=folder, make=make, advice=advice, replan_after=0)


@dataclass(eq=False)
class Choice:
    """What runs on the weights of one model: its sessions come and go, the choice stays.

    ``by_itself``: it was made behind some steps, and nobody waits for it.
    """

    code: Code
    by_itself: bool = False


class Session:
    """A program with the memory that it runs on: its place in an arena, resident copies."""

    def __init__(self, choice: Choice, arena: Arena, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raises ChunkflowError if the arena has no room, or if two programs in it could touch the same bytes at once."""
        self.choice = choice
        self.code = code = choice.code
        self._replan_after = code.replan_after
        self.program = code.program
        self.arena = arena
        check_kind(arena.device, code.kind, code.program.plan.policy)
        self._folder = code.folder
        self._steps = 0
        self.started = time.monotonic()
        self.closed = False
        self._homes = {name: home for name, p in parameters.items() if (home := home_of(p)) is not None}
        self._in_place = {name: p for name, p in parameters.items() if name not in self._homes}
        self._versions = _versions(self._homes.values())
        self._gone = weakref.finalize(self, _sweep, weakref.ref(arena))
        self._gone.atexit = False
        with arena.lock():
            if code.verified:
                arena.prove(code, lambda other: verify_together(other.program, code.program))
            memory = arena.join(self, kind=code.kind, advice=code.advice)
            try:
                binding = self._bind(memory)
                self.executor = Executor(code.program, code.regions, binding, poison=code.poison)
            except BaseException:
                arena.leave(self)
                raise

    @property
    def plan(self) -> Plan:
        return self.program.plan

    @property
    def measurements(self) -> tuple[StepMeasurement, ...]:
        """The newest steps that were measured, oldest first; waits for those under way."""
        return self.executor.measured_steps(wait=True)

    def fits(self, parameters: Mapping[str, nn.Parameter]) -> bool:
        """Whether the session can run on ``parameters`` as they are now; False if it must be made anew.

        Raises ChunkflowError if an offloaded weight was changed behind the host store's back.
        """
        if self.closed or self.choice.code is not self.code:
            return False
        for name, home in self._homes.items():
            if home_of(home.parameter) is not home:  # another thread restored the model
                return False
            home.check(parameters[name])
        for name, parameter in self._in_place.items():
            if parameters[name] is not parameter or home_of(parameter) is not None:
                return False
        # load_state_dict wrote new values: what was fetched is old
        return self._versions == _versions(self._homes.values())

    def run(self, inputs: Sequence[Any]) -> Any:
        """One step; its caller holds the lock of the arena."""
        outputs = self.executor.run(inputs)
        self._steps += 1
        if not self._steps & (self._steps - 1):  # behind steps 1, 2, 4, 8: a killed run leaves its figures too
            self._save()
        if self._replan_after:
            self._replan()
        return outputs

    def _replan(self) -> None:
        """Behind the steps asked for: a plan from what they took, run from the next step on if it is another."""
        warm = [m for m in self.executor.measured_steps()[1:] if not m.primed_bytes]  # the first pays for first touches
        if len(warm) < self._replan_after:
            return
        self._replan_after = 0
        try:
            code = self.code.remade(timings=measured(self.plan, warm).timings())
        except ChunkflowError as error:  # the plan that runs is as good as before
            _log.warning("the plan stays as it is: %s", error)
            return
        if code.program.plan.placement != self.plan.placement:
            self.choice.code, self.choice.by_itself = code, True

    def close(self) -> None:
        """Waits for the step and the copies in flight, and leaves the arena."""
        with self.arena.lock():
            if not self.closed:
                try:
                    self._save(wait=True)
                    self.executor.vacate()
                finally:  # an interrupt must not keep the memory
                    self.closed = True
                    self._gone.detach()
                    self.arena.leave(self)

    def _save(self, wait: bool = False) -> None:
        """Into the folder of the dump, if there is one; a full disk, or a device that failed, must not end a step."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError, ChunkflowError):
            if steps := self.executor.measured_steps(wait):
                path = self._folder / MEASURED_FILE
                part = path.with_suffix(".part")  # never half a file, for who reads meanwhile
                part.write_text(measured(self.plan, steps).to_json())
                part.replace(path)

    def _bind(self, memory: torch.Tensor) -> Binding:
        values: dict[str, torch.Tensor] = {}
        slots: dict[str, torch.Tensor] = {}
        for weight in self.plan.weights:
            home = self._homes.get(weight.name)
            if home is None:
                continue
            home.check(home.parameter)
            if weight.offset is None:
                try:
                    values[weight.name] = home.resident()
                except torch.OutOfMemoryError as error:
                    raise ChunkflowError(
                        f"The device {self.arena.device} has no room for {weight.name} ({weight.nbytes} bytes), which stays "
                        f"on it. {self.code.advice()}Free memory on the device, or give less as memory=."
                    ) from error
                continue
            home.pin(self.arena.streams, self.code.pin_bytes)
            slots[weight.name] = slot_bytes(memory, weight.offset, weight.nbytes)
            values[weight.name] = as_weight(slots[weight.name], home.host)
        return Binding(self.arena, values, slots, {name: flat_bytes(self._homes[name].host) for name in slots})


# Moves the weights named into the host store and ties the session that ``start`` makes, in the arena that it is given,
# to the model's placement.
Place = Callable[[Mapping[str, nn.Parameter], Sequence[str], Callable[[Arena], Session]], Session]


class Runner:
    """Called by AOTAutograd with the inputs of the traced graph, as one list that it may empty."""

    _boxed_call = True

    def __init__(self, code: Code, place: Place, arena: Arena | None = None) -> None:
        """``arena``: what the user gave; each model's own if None."""
        self.code = code
        self._place = place
        self._arena = arena
        self._sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        self._choices: list[tuple[weakref.ref[nn.Parameter], Choice]] = []  # by first parameter
        self._lock = ProcessLock()
        weakref.finalize(self, _close_all, self._sessions).atexit = False
        program = code.program
        placeholders = [n.name for n in program.module.graph.nodes if n.op == "placeholder"]
        position = {name: i for i, name in enumerate(placeholders)}
        self._position = {w: position[p] for w, p in program.weight_inputs.items()}

    def __call__(self, args: list[Any]) -> Any:
        """One step; a second thread waits for the first to end its own."""
        inputs = list(args)
        args.clear()
        parameters = {name: inputs[position] for name, position in self._position.items()}
        first = next(iter(parameters.values()))  # tells which model it is
        key = id(first)
        while True:
            session = self._sessions.get(key)
            if session is not None:
                with session.arena.lock():
                    if session.fits(parameters):
                        return session.run(inputs)
            with self._lock():
                if self._sessions.get(key) is session:  # no other thread has made one meanwhile
                    self._renew(first, session, parameters)

    def _renew(self, first: nn.Parameter, stale: Session | None, parameters: Mapping[str, nn.Parameter]) -> None:
        choice = self._choice(first)
        if stale is not None:
            stale.close()
        wanted = [w.name for w in choice.code.program.plan.streamed]
        try:
            fresh = self._place(parameters, wanted, partial(self._start, choice, parameters))
        except BaseException as error:
            if stale is None or choice.code is stale.code:
                raise
            choice.code = replace(stale.code, replan_after=0)  # the next call runs what ran before
            if not choice.by_itself or not isinstance(error, ChunkflowError):
                raise
            _log.warning("the plan stays as it is: %s", error)
            return
        if stale is not None and stale.plan == fresh.plan:
            fresh.executor.adopt(stale.executor.measured_steps())
        self._sessions[id(first)] = fresh

    def _choice(self, first: nn.Parameter) -> Choice:
        """Made if there is none.  A weak dictionary would call back in the collector, where Python drops a Ctrl-C."""
        self._choices = [(ref, choice) for ref, choice in self._choices if ref() is not None]
        for ref, choice in self._choices:
            if ref() is first:
                return choice
        self._choices.append((weakref.ref(first), Choice(self.code)))
        return self._choices[-1][1]

    def _start(self, choice: Choice, parameters: Mapping[str, nn.Parameter], arena: Arena) -> Session:
        return Session(choice, self._arena or arena, parameters)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _close_all(sessions: weakref.WeakValueDictionary[int, Session]) -> None:
    """The compiled code is gone (torch._dynamo.reset): nothing can run these sessions again."""
    for session in list(sessions.values()):
        _aside(session.close)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _sweep(ref: weakref.ref[Arena]) -> None:
    """The session was dropped with its model: an arena that others have must not keep its place."""
    if (arena := ref()) is not None:
        _aside(arena.sweep)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _aside(work: Callable[[], None]) -> None:
    """For finalizers: on a thread of its own, because it waits for locks and streams, and the collector may come anywhere.

    A process that ends takes everything with it.
    """
    if threading.main_thread().is_alive():
        threading.Thread(target=work, name="chunkflow-close").start()


def _versions(homes: Iterable[Home]) -> tuple[int, ...]:
    return tuple(h.host._version for h in homes)
