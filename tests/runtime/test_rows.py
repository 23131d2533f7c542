"""The table of rows: a row is found if and only if all bits of its inputs are equal, with few reads and good guesses."""

from __future__ import annotations

import gc
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_programs import examples

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.runtime.input_bits import MOST_BASE_BYTES, InputBits, values_like
from chunkflow_compile.runtime.rows import MOST_ROWS, Missing, Row, Rows

STEPS = 28
ROW_BYTES = 64


def table(most_bytes: Callable[[], int] = lambda: 1 << 40, on_host: bool = False) -> Rows:
    """Rows for inputs on a device, as far as InputBits can see, unless they are ``on_host``."""
    return Rows(most_bytes, InputBits() if on_host else InputBits(lambda tensor: False))


def call(rows: Rows, inputs: Sequence[Any], versions: tuple[int, ...] = (0,), row_bytes: int = ROW_BYTES) -> int:
    """One call of a model: the number of rows that it computes, 0 for a hit.  Each value of a row names its inputs."""
    key = rows.key(inputs)
    row = rows.find(key, versions)
    missing = [] if row is not None else rows.missing(key, inputs, row_bytes)
    if row is None:
        row = rows.add(missing, [(named(m.inputs),) for m in missing])
    assert torch.equal(row.values[0], named(inputs)), "the row of other inputs"
    return len(missing)


def named(inputs: Sequence[Any]) -> torch.Tensor:
    """A value of ROW_BYTES that depends on all bits of the inputs."""
    return torch.full((ROW_BYTES // 8,), hash(scratch(inputs)), dtype=torch.int64)


def scratch(inputs: Sequence[Any]) -> tuple[object, ...]:
    """A key that is computed anew: what Rows knows from objects, versions and bases plays no part."""
    return tuple(scratch_of(value) for value in inputs)


def scratch_of(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).clone()
        return str(value.dtype), tuple(value.shape), tuple(flat.view(torch.uint8).tolist())
    return type(value).__name__, struct.pack("d", value) if isinstance(value, float) else value


def float32(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


# 0.0, -0.0, 1.0 and two NaNs
BITS = [0, -(1 << 31), 0x3F800000, 0x7FC00000, 0x7FC00001]
NUMBERS = [0.0, -0.0, 1.0, float("nan"), 0, 1, False, True, None]


class Inputs:
    """Three slow inputs of which actions change one, in every way in which an input changes between calls."""

    def __init__(self) -> None:
        self.base = torch.zeros(4)
        self.memory = [torch.zeros(2).untyped_storage() for _ in range(3)]
        self.values: list[Any] = [torch.zeros(2), torch.ones(2), 1.0]
        self.versions = (3, 5)

    def again(self, slot: int, j: int) -> None:
        pass

    def new(self, slot: int, j: int) -> None:
        self.values[slot] = float32(BITS[j % 5]).repeat(2)

    def number(self, slot: int, j: int) -> None:
        self.values[slot] = NUMBERS[j]

    def write(self, slot: int, j: int) -> None:
        value = self.values[slot]
        if isinstance(value, torch.Tensor):
            target = value if value._base is None else value._base
            with torch.inference_mode(value.is_inference()):
                target.view(-1)[j % target.numel()].copy_(float32(BITS[j % 5])[0])

    def reuse(self, slot: int, j: int) -> None:
        """The tensor dies, and another has its memory: the same address and version, other values."""
        self.values[slot] = None
        torch.empty(0).set_(self.memory[slot], 0, (2,)).copy_(float32(BITS[j % 5]).repeat(2))
        self.values[slot] = torch.empty(0).set_(self.memory[slot], 0, (2,))

    def element(self, slot: int, j: int) -> None:
        self.values[slot] = self.base[j % 4].expand(2)

    def part(self, slot: int, j: int) -> None:
        self.values[slot] = self.base[:2] if j % 2 else self.base.view(2, 2).t()

    def rewrite_base(self, slot: int, j: int) -> None:
        self.base[j % 4] = float32(BITS[j % 5])[0]

    def cast(self, slot: int, j: int) -> None:
        if isinstance(value := self.values[slot], torch.Tensor):
            self.values[slot] = value.clone().view(torch.int32) if j % 2 else value.to(torch.bfloat16)

    def reshape(self, slot: int, j: int) -> None:
        if isinstance(value := self.values[slot], torch.Tensor):
            self.values[slot] = value.clone().reshape(-1, 1)

    def inference(self, slot: int, j: int) -> None:
        with torch.inference_mode():
            self.values[slot] = float32(BITS[j % 5]).repeat(2)

    def data(self, slot: int, j: int) -> None:
        if isinstance(value := self.values[slot], torch.Tensor) and not value.is_inference() and value._base is None:
            value.data = float32(BITS[j % 5]).repeat(2)

    def weight(self, slot: int, j: int) -> None:
        self.versions = (3, 5 + j)


ACTIONS = [
    name for name, member in vars(Inputs).items() if callable(member) and not name.startswith("_")
]  # each takes a slot and a number


@pytest.mark.parametrize("on_host", [False, True])
def test_a_row_is_found_if_and_only_if_all_bits_and_versions_are_equal(on_host: bool) -> None:
    @examples(80, 200)
    @given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2), st.integers(0, 8)), max_size=20))
    def check(actions: list[tuple[str, int, int]]) -> None:
        rows, inputs = table(on_host=on_host), Inputs()
        known: dict[object, Row] = {}
        versions = inputs.versions
        for action, slot, j in [("again", 0, 0), *actions]:
            getattr(inputs, action)(slot, j)
            if inputs.versions != versions:
                known, versions = {}, inputs.versions
            transfers = rows.sources.transfers
            key = rows.key(inputs.values)
            assert rows.sources.transfers - transfers <= (not on_host)
            row, expected = rows.find(key, versions), known.get(scratch(inputs.values))
            assert row is expected
            if row is None:
                missing = [Missing(key, [*inputs.values])]
                if len(known) < MOST_ROWS // 2:  # else the table would be full
                    missing = rows.missing(key, inputs.values, ROW_BYTES)
                made = [(named(m.inputs),) for m in missing]
                assert rows.add(missing, made).values is not None
                # a guessed input has the bits under which its row is kept
                for m, values in zip(missing, made, strict=True):
                    assert rows.find(m.key, versions).values == values
                    known[scratch(m.inputs)] = rows.find(m.key, versions)

    check()


def test_the_bits_of_an_input_are_read_once_for_each_object_and_version() -> None:
    rows, pooled, guidance = table(), torch.randn(1, 8), torch.full([1], 3.5).expand(2)
    for call_count in (1, 2, 3):
        rows.key([torch.tensor([0.5]), guidance, pooled, 7, None])
        assert rows.sources.transfers == call_count
    assert (rows.sources.same_object, rows.sources.read, rows.sources.on_host) == (4, 5, 6)
    pooled.add_(1)
    rows.key([pooled, guidance])
    rows.key([pooled, guidance])
    assert (rows.sources.same_object, rows.sources.read, rows.sources.transfers) == (7, 6, 4)


def test_views_of_a_schedule_take_one_read_for_all_of_it_and_one_more_when_it_is_written() -> None:
    rows, timesteps = table(), torch.linspace(1000, 1, STEPS)
    for t in timesteps:
        for _ in ("two prompts", "of one step"):
            assert rows.key([t.expand(2)]) == rows.key([t.clone().expand(2).contiguous()])
    assert rows.sources.view_of_base == 2 * STEPS - 1
    assert rows.sources.transfers == 1 + 2 * STEPS, "one, and those of the clones"
    before, t = rows.key([timesteps[3]]), timesteps[3]
    timesteps.mul_(2)
    assert rows.key([t]) != before
    assert rows.sources.transfers == 2 + 2 * STEPS


DIFFERENT = [
    *NUMBERS,
    complex(0.0, -0.0),
    complex(0.0, 0.0),
    *(float32(bits) for bits in BITS),
    torch.zeros(1, dtype=torch.int32),
    torch.zeros(()),
    torch.zeros(1, 1),
    torch.zeros(2),
    torch.zeros(2, dtype=torch.bfloat16),
]


def test_values_that_differ_in_type_shape_or_any_bit_have_different_keys() -> None:
    for rows in table(), table(on_host=True):
        keys = [rows.key([value]) for value in DIFFERENT]
        assert len(set(keys)) == len(DIFFERENT)
        assert keys == [rows.key([value]) for value in DIFFERENT]


def test_a_tensor_at_the_address_of_one_that_has_died_is_read() -> None:
    rows, memory = table(), torch.zeros(2)

    def at_the_same_address() -> torch.Tensor:
        return torch.empty(0).set_(memory.untyped_storage(), 0, (2,))

    before = rows.key([dies := at_the_same_address()])
    died = dies.data_ptr(), dies._version
    del dies
    memory.add_(1)
    new = at_the_same_address()
    assert (new.data_ptr(), new._version) == died and rows.key([new]) != before


def test_inference_tensors_are_read_in_every_call() -> None:
    rows = table()
    with torch.inference_mode():
        timestep = torch.zeros(1)
        before = rows.key([timestep])
        timestep.add_(1)
        assert rows.key([timestep]) != before
        assert rows.key([timestep]) == rows.key([timestep])
    assert rows.sources.read == rows.sources.transfers == 4


def test_values_in_host_memory_are_never_transferred_and_a_write_that_torch_does_not_count_is_seen() -> None:
    rows, timestep = table(on_host=True), torch.zeros(1)
    before = rows.key([timestep, 1.0])
    timestep.numpy()[:] = 1
    assert rows.key([timestep, 1.0]) != before
    assert (rows.sources.on_host, rows.sources.transfers) == (4, 0)


ODD = {
    "empty": torch.zeros(0, 3),
    "0-d": torch.tensor(2.0),
    "expanded": torch.randn(3, 1).expand(3, 4),
    "one element, stride 0": torch.zeros(()).expand(1),
    "transposed": torch.randn(3, 4).t(),
    "strided": torch.arange(12.0)[1::3],
    "overlapping": torch.arange(9.0).as_strided((3, 3), (2, 1)),
    "outside its base": torch.arange(9.0)[:2].detach()[:1].as_strided((3,), (1,), 4),
    "another dtype than its base": torch.arange(8.0).view(torch.int16)[1:6],
    "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
    "negative": torch.randn(2, dtype=torch.complex64).conj().imag,
    "large base": torch.zeros(MOST_BASE_BYTES, dtype=torch.int16)[5:7],
    "needs a gradient": torch.ones(2, requires_grad=True),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD.keys())
def test_tensors_of_any_layout_have_the_key_of_their_values(value: torch.Tensor) -> None:
    copy = value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    for rows in table(), table(on_host=True):
        alone = rows.key([value])
        assert alone == rows.key([copy]) == rows.key([value])
        # beside others of one transfer
        assert rows.key([torch.ones(3, dtype=torch.uint8), value.detach(), torch.ones(1)])[1] == alone[0]


@pytest.mark.parametrize(
    "like", [v for v in ODD.values() if v.numel() > 1], ids=[k for k, v in ODD.items() if v.numel() > 1]
)
def test_a_guessed_input_has_the_layout_of_the_calls_input_and_the_bits_of_its_key(like: torch.Tensor) -> None:
    rows = table()
    wanted = rows.key([like])[0]
    [made, other] = values_like(like, [wanted, (*wanted[:-1], bytes(range(1, 1 + len(wanted[-1]))))])
    assert (made.shape, made.stride(), made.dtype, made.device) == (like.shape, like.stride(), like.dtype, like.device)
    assert rows.key([made]) == (wanted,)
    assert made.data_ptr() % 16 == 0
    if 0 in like.stride() or like.stride() == (2, 1):
        assert other is None, "its values differ where the strides repeat one"
    else:
        assert rows.key([other])[0][-1] == bytes(range(1, 1 + len(wanted[-1])))


def test_no_tensor_of_the_user_is_kept_alive() -> None:
    rows, timesteps = table(), torch.linspace(1000, 1, 4)
    rows.expect(timesteps)
    pooled = torch.randn(1, 8)
    call(rows, [timesteps[0].expand(2), pooled, timesteps[1] / 1000])
    held = [weakref.ref(timesteps), weakref.ref(pooled)]
    del timesteps, pooled
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    call(rows, [torch.ones(2), torch.zeros(1, 8), torch.ones(())])


# How a pipeline passes the element t of a scheduler's timesteps, to a model in bfloat16.
PIPELINES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flux, qwen-image, flux.2, longcat-image": lambda t: t.expand(2).to(torch.bfloat16) / 1000,
    "float32": lambda t: t.expand(1).to(torch.float32) / 1000,
    "z-image": lambda t: (1000 - t.expand(2)) / 1000,
    "sd3, which clones": lambda t: t.expand(4).clone(),
    "hunyuan-video-1.5": lambda t: t.expand(2).to(torch.bfloat16),
}


def schedule(steps: int = STEPS) -> torch.Tensor:
    """Timesteps of which neighbours differ in bfloat16, the first 1000 and the last 0."""
    return 1000 * torch.linspace(1, 0, steps) ** 1.5


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("pass_", PIPELINES.values(), ids=PIPELINES.keys())
def test_the_schedulers_timesteps_fill_the_table_at_the_first_miss(
    pass_: Callable[[torch.Tensor], torch.Tensor], inference: bool
) -> None:
    rows = table()
    for prompt in 1.5, 2.5:
        timesteps, pooled = schedule(), torch.full([2, 4], prompt)
        rows.expect(timesteps)
        with torch.inference_mode(inference):
            computed = [call(rows, [pass_(t), pooled]) for t in timesteps]
        assert computed == [len({scratch_of(pass_(t)) for t in timesteps}), *[0] * (STEPS - 1)]
    assert rows.sources.transfers <= 2 * STEPS, "the schedule is read together with the first timestep"


@pytest.mark.parametrize("first", [0, 5])
def test_the_base_of_a_view_fills_the_table_the_later_timesteps_first(first: int) -> None:
    rows, timesteps = table(lambda: 100 * ROW_BYTES), torch.linspace(1000, 1, STEPS)
    pooled = torch.randn(2, 4)
    key = rows.key(inputs := [timesteps[first].expand(2, 3), pooled])
    assert rows.find(key, ()) is None
    missing = rows.missing(key, inputs, ROW_BYTES)
    order = [*range(first, STEPS), *range(first)]
    assert [m.inputs[0].unique().item() for m in missing] == timesteps[order].tolist()
    assert all(m.inputs[0].stride() == (0, 0) and m.inputs[1] is pooled for m in missing)
    assert rows.sources.transfers == 1


def test_inputs_that_look_like_an_element_of_a_schedule_do_not_hide_the_timestep() -> None:
    rows, guidances, timesteps = table(), torch.tensor([3.5, 4.5]), schedule()
    rows.expect(timesteps)
    for t in timesteps:
        call(rows, [guidances[0].expand(2), torch.ones(1, 8), t.expand(2) / 1000])
    assert rows.statistics.misses == 1


def flux(prompt: float, steps: int = STEPS, prompts: int = 1) -> Iterator[list[torch.Tensor]]:
    """The slow inputs of one generation; two ``prompts`` are two calls per step."""
    guidance, pooled = torch.full([1], 3.5), [torch.full([1, 4], prompt + i / 2) for i in range(prompts)]
    for t in schedule(steps):
        yield from ([t.expand(1).to(torch.bfloat16) / 1000, guidance, text] for text in pooled)


@pytest.mark.parametrize("prompts", [1, 2])
def test_without_a_scheduler_a_new_prompt_takes_the_timesteps_of_the_last_generation(prompts: int) -> None:
    rows = table()
    first = [call(rows, inputs) for inputs in flux(0, prompts=prompts)]
    assert first == ([1] * STEPS if prompts == 1 else [1, 1, *[2, 0] * (STEPS - 1)]), "two prompts at one timestep"
    for prompt in 1, 2, 3:
        computed = [call(rows, inputs) for inputs in flux(prompt, prompts=prompts)]
        assert computed == [STEPS] * prompts + [0] * (STEPS - 1) * prompts
    assert [call(rows, inputs) for inputs in flux(3, prompts=prompts)] == [0] * STEPS * prompts, "the prompt of before"


def test_written_weights_drop_all_rows_and_the_next_call_computes_the_generation_in_one_pass() -> None:
    rows = table()
    for inputs in flux(0):
        call(rows, inputs, versions=(1, 1))
    assert rows.statistics.rows == STEPS
    computed = [call(rows, inputs, versions=(1, 2)) for inputs in flux(0)]
    assert computed == [STEPS, *[0] * (STEPS - 1)]
    rows.drop()
    assert (rows.statistics.rows, rows.statistics.nbytes) == (0, 0)
    assert [call(rows, inputs, versions=(1, 2)) for inputs in flux(0)] == computed


def test_many_prompts_of_few_steps_are_not_taken_for_a_schedule() -> None:
    rows = table()
    for prompt in range(20):
        computed = [call(rows, inputs) for inputs in flux(prompt, steps=4)]
        assert computed == ([4, 0, 0, 0] if prompt else [1, 1, 1, 1])


def test_a_new_schedule_and_prompt_compute_no_row_of_the_old_schedule() -> None:
    rows = table()
    for inputs in flux(0):
        call(rows, inputs)
    old = [[torch.full([1], 7.0 + i).to(torch.bfloat16), torch.full([1], 3.5), torch.zeros(1, 4) - 1] for i in range(9)]
    assert [call(rows, inputs) for inputs in old] == [1] * 9


def test_the_table_never_exceeds_its_limit_and_evicts_the_least_recently_used_rows() -> None:
    most = 20 * ROW_BYTES
    rows, timesteps = table(lambda: most), torch.arange(1000.0)
    for t in timesteps:
        assert call(rows, [t.expand(2)]) <= 20
        assert rows.statistics.nbytes == ROW_BYTES * rows.statistics.rows <= most
    assert rows.statistics.misses == 50, "each computes the next twenty"
    held = rows.find(rows.key([timesteps[990].expand(2)]), (0,))
    most = 2 * ROW_BYTES
    assert call(rows, [timesteps[999].expand(2)]) == 0
    assert rows.statistics.rows == 2
    assert call(rows, [timesteps[990].expand(2)]) == 0, "used a moment ago"
    call(rows, [timesteps[998].expand(2)])
    assert rows.statistics.nbytes == most
    assert held is not None and torch.equal(held.values[0], named([timesteps[990].expand(2)])), "its holder keeps it"


def test_room_is_made_before_rows_are_computed() -> None:
    rows = table(lambda: 20 * ROW_BYTES)
    timesteps = torch.arange(60.0)
    call(rows, [timesteps[0].expand(2)])
    assert rows.statistics.rows == 20
    key = rows.key(inputs := [timesteps[30].expand(2)])
    assert rows.find(key, (0,)) is None
    assert rows.statistics.rows + len(rows.missing(key, inputs, ROW_BYTES)) == 30
    assert rows.statistics.rows == 10, "half as many are guessed as at the first miss"


def test_of_rows_that_are_larger_than_expected_the_calls_own_and_the_next_ones_stay() -> None:
    rows, timesteps = table(lambda: 5 * ROW_BYTES), torch.arange(40.0)
    assert call(rows, [timesteps[0].expand(2)], row_bytes=ROW_BYTES // 8) == 40
    assert rows.statistics.nbytes == 5 * ROW_BYTES
    assert [call(rows, [t.expand(2)]) for t in timesteps[:6]] == [0, 0, 0, 0, 0, 5]


def test_the_number_of_rows_is_limited_too() -> None:
    rows, timesteps = table(), torch.arange(1000.0)
    assert call(rows, [timesteps[0].expand(2)]) == MOST_ROWS == rows.statistics.rows


def test_a_row_that_does_not_fit_is_an_error_before_and_after_it_is_computed() -> None:
    rows, inputs = table(lambda: 3000), [torch.zeros(1)]
    key = rows.key(inputs)
    said = r"One row of hoisted values takes 4\.0 KiB, but the table may use 2\.9 KiB\. Raise the budget"
    with pytest.raises(ChunkflowError, match=said):
        rows.missing(key, inputs, 4096)
    missing = rows.missing(key, inputs, ROW_BYTES)
    with pytest.raises(ChunkflowError, match=said):
        rows.add(missing, [(torch.zeros(1024),)])
    assert rows.statistics.rows == 0 and rows.find(key, ()) is None


def test_memory_that_values_of_a_row_share_counts_once() -> None:
    whole = torch.zeros(64)
    assert Row.of([whole[:32], whole[32:], torch.zeros(4)]).nbytes == 256 + 16


def test_rows_are_spent_after_64_misses_in_a_row_and_fewer_are_guessed_with_each() -> None:
    rows = table()
    for i in range(63):  # each a new base of other values
        call(rows, [(torch.rand(1000) + i)[0].expand(2)])
    assert not rows.spent
    assert rows.statistics.computed <= 63 + 2 * MOST_ROWS
    last = (torch.rand(1000) + 63)[0].expand(2)
    call(rows, [last])
    assert rows.spent
    call(rows, [last])
    assert not rows.spent, "a row was read again"


def test_statistics_count_calls_rows_reads_and_seconds() -> None:
    rows, timesteps = table(), torch.linspace(1000, 1, 4)
    for t in timesteps:
        key = rows.key(inputs := [t.expand(2)])
        if rows.find(key, ()) is None:
            missing = rows.missing(key, inputs, ROW_BYTES)
            rows.add(missing, [(named(m.inputs),) for m in missing], seconds=0.5)
    found = rows.statistics
    assert (found.hits, found.misses, found.computed, found.rows) == (3, 1, 4, 4)
    assert (found.nbytes, found.transfers, found.fill_s) == (4 * ROW_BYTES, 1, 0.5)
