"""Stand-ins for modules that servers import and that have no build for a CPU, or that no test calls."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Anything(type):
    """A class that has every attribute, and returns a function that it decorates."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_itself") and len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return type.__call__(cls) if cls.__dict__.get("_itself") else type.__call__(cls, *args, **kwargs)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _anything(name: str) -> type:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    return _Anything(name, (), {"_itself": True, "__call__": called, "__iter__": lambda self: iter(())})


class _Module(ModuleType):
    __path__ = ()
    __version__ = "99"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class Finder(MetaPathFinder, Loader):
    """Finds stand-ins for the modules of these names.  ``importers``: the packages that get them; all, if there are none."""

    def __init__(self, names: Iterable[str], importers: Iterable[str] = ()) -> None:
        self._names = {*names}
        self._importers = {*importers, *self._names} if importers else set()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        wanted = fullname.partition(".")[0] in self._names
        if wanted and self._importers:
            wanted = _importer().partition(".")[0] in self._importers
        return ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _importer() -> str:
    """The name of the module that imports: transformers, too, asks which libraries are there, and must not find these."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))
