"""Stand-ins of modules that vLLM-Omni imports beside its transformers: media and GPU libraries that no test calls.

``install`` must run before ``import vllm_omni``.  Each name is imported at the top of some module of the server, and nothing
of it runs on the way of a denoising step.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WHY = {
    "av": "video files, 40 MB: the outputs of a pipeline are not encoded here",
    "soxr": "resampling of audio",
    "torchaudio": "audio; its CPU builds are not on PyPI",
    "torchcodec": "decodes videos with libraries of FFmpeg, which a machine may lack",
    "torchvision": "transforms of images; the build on PyPI needs the CUDA build of torch",
    "cv2": "images, 60 MB",
}


class _Anything(type):
    """A class whose attributes are classes like it: names are imported from a stand-in, and used in annotations."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __or__


class _Module(ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        wanted = fullname.partition(".")[0] in WHY and _importer().partition(".")[0] in ("vllm", "vllm_omni", *WHY)
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


def install() -> None:
    """Let vLLM and vLLM-Omni import the modules of ``WHY``, in place of those that may be installed."""
    sys.meta_path.insert(0, _Finder())
