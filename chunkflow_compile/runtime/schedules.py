"""Guesses of the values that the slow inputs, such as the timestep, will have in the next calls.  A wrong guess costs time,
but never changes a result."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.weak import TensorWeakRef

from .input_bits import Bits, split

# The key of a row: the bits of all slow inputs of a call, in the order of the inputs.
Key: TypeAlias = tuple[Bits, ...]

# The maximum number of keys of previous calls that are kept.  It is enough for two generations of 50 steps, or for one
# generation of 50 steps with two prompts.
_MOST_KEYS = 128

# The dtypes that a timestep may have.  Booleans are left out because they cannot be timesteps.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32)


def with_value(key: Key, position: int, value: Bits) -> Key:
    """Return a key that equals ``key`` except for the value at ``position``."""
    return (*key[:position], value, *key[position + 1 :])


def later_then_earlier(values: Sequence[Any], index: int) -> list[Any]:
    """Return the values after ``index``, followed by the values before ``index``."""
    return [*values[index + 1 :], *values[:index]]


def keys_with(key: Key, position: int, elements: list[bytes]) -> list[Key]:
    """Return one key for each value in ``elements``.  Each returned key equals ``key``, except that all elements of the
    tensor at ``position`` have this value."""
    dtype, shape, _ = key[position]
    return [with_value(key, position, (dtype, shape, element * shape.numel())) for element in elements]


class ExpectedSchedule:
    """The timesteps of a scheduler, in each *form* in which diffusers pipelines pass timesteps to a model: unchanged, divided
    by 1000, or inverted (see :func:`_forms`).

    Only a weak reference to the tensor of timesteps is kept.  The forms are computed on the device of this tensor, because
    results may be rounded differently on the CPU: CUDA implements a division by 1000 as a multiplication by 1 / 1000.
    """

    def __init__(self) -> None:
        self._timesteps: TensorWeakRef | None = None
        self._version = 0
        self._forms: dict[torch.dtype, list[list[bytes]]] = {}

    def expect(self, timesteps: torch.Tensor) -> None:
        """From now on, guess keys from these ``timesteps``.  Do nothing if keys are already guessed from this tensor, and the
        tensor was not written in the meantime."""
        version = 0 if timesteps.is_inference() else timesteps._version
        if self._timesteps is None or self._timesteps() is not timesteps or version != self._version:
            self._timesteps, self._version, self._forms = TensorWeakRef(timesteps), version, {}

    def unread(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Return the timesteps in all forms, as one tensor for each dtype that occurs among ``inputs``.  A dtype is left out
        if the bits of its tensor have been read before."""
        timesteps = None if self._timesteps is None else self._timesteps()
        if timesteps is None:
            return []
        dtypes = dict.fromkeys(value.dtype for value in inputs if isinstance(value, torch.Tensor))
        return [_forms(timesteps, dtype) for dtype in dtypes if dtype in _DTYPES and dtype not in self._forms]

    def learn(self, found: Sequence[Bits]) -> None:
        """Store the bits of the tensors that :meth:`unread` has returned."""
        for dtype, (forms, count), content in found:
            elements = split(content, dtype.itemsize)
            self._forms[dtype] = [elements[i * count : (i + 1) * count] for i in range(forms)]

    def guesses(self, key: Key, position: int) -> list[Key]:
        """If the present value at ``position`` is a timestep in some form, return one key for each of the other timesteps.

        Each returned key equals ``key``, except that another timestep, in the same form, replaces the present value.  The
        keys for the timesteps after the present one come first.

        The present value may equal a timestep in several forms, such as unchanged and divided by 1000.  Then the form
        with the earliest match in the schedule is used.  For example, 0 may be the last timestep, or it may be the first
        timestep of a pipeline that passes ``(1000 - t) / 1000``.
        """
        dtype, *shape, content = key[position]
        forms = self._forms.get(dtype, [])
        element = content[: dtype.itemsize] if forms else b""
        found = [(form.index(element), i) for i, form in enumerate(forms) if element in form]
        if not found or element * shape[0].numel() != content:
            return []
        index, form = min(found)
        return keys_with(key, position, later_then_earlier(forms[form], index))


def _forms(timesteps: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # The pipelines of Wan, SD3 and HunyuanVideo pass the form ``cast``.  The pipelines of FLUX, FLUX.2, Qwen-Image and
    # LongCat-Image cast the timesteps before they divide, and pass ``scaled``.  The pipeline of Z-Image passes ``inverted``.
    with torch.no_grad():
        t = timesteps.detach().reshape(-1)
        cast = t.to(dtype)
        scaled = cast / 1000
        inverted = (1000 - t) / 1000
        return torch.stack([form.to(dtype) for form in (cast, scaled, inverted)])


class UsedKeys:
    """The keys of the latest calls, oldest first.  A key is kept here even if its row is dropped, so that the schedules of
    previous generations stay known."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def use(self, key: Key) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > _MOST_KEYS:
            self._keys.popitem(last=False)

    def guesses(self, key: Key, has_row: Callable[[Key], bool]) -> list[Key]:
        """Return keys that are equal to ``key`` except for one input, such as the timestep.  In these keys, this input has
        the values that it had in a previous generation.

        An input is varied only if its present value was used before.  The text of a new prompt, for example, is not varied.
        If several inputs qualify, the input that had the most values in the previous generation is varied.  Previous
        generations are tried from the most recent one backwards, until the values of one of them give a key that has no row
        yet.
        """
        used = [old for old in self._keys if _form(old) == _form(key)]
        positions = [i for i, value in enumerate(key) if any(old[i] == value for old in used)]
        if not positions:
            return []
        values: dict[tuple[int, Key], list[Bits]] = {}
        for old in used:
            for i in positions:
                values.setdefault(_without(old, i), []).append(old[i])
        for old in reversed(used):
            generation, position = max(
                ((values[_without(old, i)], i) for i in positions), key=lambda found: len(found[0])
            )
            index = generation.index(key[position]) if key[position] in generation else -1
            ordered = later_then_earlier(generation, index) if index >= 0 else generation
            found = [with_value(key, position, value) for value in ordered]
            if any(not has_row(guess) for guess in found if guess != key):
                return found
        return []


def _without(key: Key, position: int) -> tuple[int, Key]:
    return position, key[:position] + key[position + 1 :]


def _form(key: Key) -> list[Any]:
    """Return the dtype and shape of each tensor in a key, and the type of each other input."""
    return [value[:-1] for value in key]


def guesses(
    key: Key,
    inputs: Sequence[Any],
    bases: Callable[[Any], tuple[list[bytes], int] | None],
    expected: ExpectedSchedule,
    used: UsedKeys,
    has_row: Callable[[Key], bool],
) -> Iterator[Key]:
    """Yield the keys of calls that are likely to follow the call with this ``key``, in the order in which they are expected.

    There are three sources of guesses for the next values of an input.  The first source is a base tensor, if the input is
    one element of it (``bases``: see :meth:`InputBits.elements_of_base`).  The second source is the timesteps of the
    scheduler (``expected``).  The third source is the calls of previous generations (``used``).  It is used only if the first
    two sources yield nothing.
    """
    known = False
    for position, value in enumerate(inputs):
        if (found := bases(value)) is not None and len(found[0]) > 1:
            known = True
            yield from keys_with(key, position, later_then_earlier(*found))
    for position in range(len(key)):
        if keys := expected.guesses(key, position):
            known = True
            yield from keys
    if not known:
        yield from used.guesses(key, has_row)
