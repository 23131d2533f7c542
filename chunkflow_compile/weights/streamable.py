"""Which weights can be streamed, by their class and their memory."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .bytes import is_dense
from .host_weight import HostWeight
from .leaves import stream_inside
from .modules import ModelIndex

# A FakeTensor is a weight of a model that is planned without its values.
PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
BITSANDBYTES_INT8 = "bitsandbytes.nn.modules.Int8Params"
GGUF = "diffusers.quantizers.gguf.utils.GGUFParameter"
# Parameters of libraries that differ from ordinary ones in their attributes only, by the name of the class.
_WITH_ATTRIBUTES = ("bitsandbytes.nn.modules.Params4bit",)
# Classes that cannot be streamed -> why, and what can.
_NOT_STREAMED = {
    BITSANDBYTES_INT8: "its layer keeps the bytes a second time; int8 of torchao or quanto streams",
    GGUF: "its class takes part in every op; int8 or nf4 of torchao, quanto or bitsandbytes streams",
}


def class_of(tensor: torch.Tensor) -> str:
    """The full name of a tensor's class."""
    kind = type(tensor)
    return f"{kind.__module__}.{kind.__qualname__}"


def why_not(parameter: torch.Tensor, index: ModelIndex, inside: str = "") -> str | None:
    """Why a weight of a model cannot be streamed, None if it can.  ``inside``: where it is in a tensor subclass."""
    if isinstance(parameter, HostWeight):
        return None
    if inside and not stream_inside():
        return "inside a tensor subclass, which needs torch 2.13 to be streamed"
    name = class_of(parameter)
    if type(parameter) not in PLAIN and name not in _WITH_ATTRIBUTES:
        reason = _NOT_STREAMED.get(name)
        return f"a tensor subclass ({type(parameter).__name__})" + (f": {reason}" if reason else "")
    if parameter.layout != torch.strided or not is_dense(parameter):
        return "its elements do not fill one range of memory"
    if id(parameter) in index.shared:
        return "it shares memory with another tensor"
    return None
