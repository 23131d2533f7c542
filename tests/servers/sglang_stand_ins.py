"""Stand-ins for modules that SGLang imports and that have no build for a CPU, or that no test calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

# Module -> why it is not the real one.
STANDS_IN = {
}


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


class _Module(types.ModuleType):
    __path__: list[str] = []
    __version__ = "99"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] not in STANDS_IN:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def stand_in() -> None:
    """Let imports of the modules find their stand-ins."""
    sys.meta_path.append(_Finder())
