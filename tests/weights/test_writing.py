"""Writes to weights that ranks share: inside ``writing`` and beside it, and what was handed out before."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import WITHIN
from test_shared_memory import LEAST, SIZE, large, shared
from torch import nn

from chunkflow_compile import ChunkflowError, offload, writing
from chunkflow_compile.models.small import small_model
from chunkflow_compile.weights.home import home_of
from chunkflow_compile.weights.mapping import map_file, map_over

NAME = "blocks.0.ffn.net.0.proj.weight"


def heard() -> list[str]:
    """What the package says in this process from now on."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("chunkflow_compile").addHandler(handler)
    return records


def state_from_inside(rank: int) -> None:
    model = small_model("wan", SIZE)
    offload(model, min_bytes=LEAST, share=True)
    with writing(model):
        model.get_parameter(NAME).fill_(0.5)
        state = model.state_dict()
    assert shared(model) == large(model)
    assert bool((state[NAME] == 0.5).all())
    dist.barrier()
    if rank == 0:
        state[NAME].zero_()
    dist.barrier()
    assert bool((model.get_parameter(NAME) == 0.5).all()), "no rank writes the memory of all"


def test_a_state_dict_from_inside_writing_is_a_copy(on_ranks: Callable[..., None]) -> None:
    on_ranks(state_from_inside)


def data_and_new_memory(rank: int) -> None:
    model, twin = small_model("wan", SIZE), small_model("wan", SIZE)
    offload(model, min_bytes=LEAST, share=True)
    names, said = shared(model), heard()
    with writing(model):
        for m in (model, twin):
            m.get_parameter(NAME).data += 1  # as peft fuses a LoRA
        assert NAME not in shared(model)
    assert shared(model) == names and not said
    assert torch.equal(model.get_parameter(NAME), twin.get_parameter(NAME))
    with writing(model):
        model.load_state_dict({NAME: torch.zeros(model.get_parameter(NAME).shape)}, strict=False, assign=True)
    assert shared(model) == names - {NAME}
    (warning,) = said
    assert warning.startswith(f"{NAME} got new memory inside writing, and ranks do not share it")


def test_what_lora_fusing_writes_is_shared_again(on_ranks: Callable[..., None]) -> None:
    """And what got new memory is named."""
    on_ranks(data_and_new_memory)


def interrupted(rank: int) -> None:
    """Ctrl-C on one rank, just after it has mapped the memory of all again."""
    model = small_model("wan", SIZE)
    offload(model, min_bytes=LEAST, share=True)
    weight = model.get_parameter(NAME)

    def mapped(*args: Any) -> None:
        map_over(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("chunkflow_compile.weights.sharing.map_over", mapped)
        with pytest.raises((KeyboardInterrupt, ChunkflowError), match=None if rank else "another rank failed"):  # noqa: SIM117
            with writing(model):
                weight.fill_(0.5)
    dist.barrier()
    if rank == 1:
        weight.fill_(2)
    dist.barrier()
    assert bool((weight.detach() == (2 if rank else 0.5)).all()), "a write stays on its rank"


def test_an_interrupt_while_weights_are_shared_again(on_ranks: Callable[..., None]) -> None:
    on_ranks(interrupted)


def interrupted_leader(rank: int) -> None:
    """Ctrl-C on the leader leaves it in the memory of before, while the other rank is in that of the round."""
    model = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(4))
    weights: list[Any] = [layer.weight for layer in model]
    for weight in weights:
        weight.fill_(1)
    offload(model, min_bytes=LEAST, share=True, device="cpu")
    kept = model.state_dict()["1.weight"] if rank == 1 else None

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr("chunkflow_compile.weights.sharing.map_over", interrupt)
        with pytest.raises((KeyboardInterrupt, ChunkflowError)):  # noqa: SIM117
            with writing(model):
                for weight in weights[:3]:
                    weight.fill_(2)
    dist.barrier()
    with writing(model):
        for weight in weights[:2]:
            weight.fill_(3)
    dist.barrier()  # the leader gives back what nobody sees
    assert kept is None or bool((kept == 1).all()), "what state_dict has made keeps its values"


def test_a_rank_keeps_what_only_the_leader_has_left(on_ranks: Callable[..., None]) -> None:
    on_ranks(interrupted_leader)


def state_beside_writing(rank: int) -> None:
    """A thread that makes a ``state_dict`` is held up while its rank writes and shares again."""
    model = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(2))
    weight: Any = model[0].weight
    weight.fill_(1)
    offload(model, min_bytes=LEAST, share=True, device="cpu")
    state: dict[str, torch.Tensor] = {}
    reader = threading.Thread(target=lambda: state.update(model[0].state_dict()))
    begun, shared_again = threading.Event(), threading.Event()

    def late(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is reader and not begun.is_set():
            begun.set()
            shared_again.wait(WITHIN)
        return map_file(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkflow_compile.weights.sharing.map_file", late)
        if rank == 1:
            reader.start()
            begun.wait(WITHIN)
        with writing(model):
            weight.fill_(2)
        dist.barrier()  # the leader gives back what nobody sees
        if rank == 1:
            shared_again.set()
            reader.join()
            assert bool((state["weight"] == 2).all())


def test_a_state_dict_beside_writing_has_the_values(on_ranks: Callable[..., None]) -> None:
    on_ranks(state_beside_writing)


def written_by_one(rank: int) -> None:
    model, said = small_model("wan", SIZE), heard()
    offload(model, min_bytes=LEAST, share=True)
    other = "blocks.1.ffn.net.0.proj.weight"
    with writing(model):
        model.get_parameter(other).fill_(rank)
        if rank == 0:
            model.get_parameter(NAME).mul_(2)
        private = home_of(model.get_parameter(other)).host.data_ptr()  # type: ignore[union-attr]
    wrote = [f"rank 0 has written {NAME}, and not every rank has: it keeps its own copy"]
    assert said == [
        *(wrote if rank == 0 else []),
        f"rank 1 has other values than rank 0 in {other}, and keeps its own copy of them",
    ]
    assert home_of(model.get_parameter(other)).host.data_ptr() == private  # type: ignore[union-attr]
    assert NAME not in shared(model) or rank == 1


def test_what_not_all_ranks_have_written_is_named(on_ranks: Callable[..., None]) -> None:
    on_ranks(written_by_one)


def taken(model: nn.Module) -> int:
    """Bytes of the files that hold the weights of all ranks, without their holes."""
    numbers = set[int]()
    for p in model.parameters():
        if (home := home_of(p)) is not None:
            if home.cell.shared is not None:
                numbers.add(home.cell.shared._descriptor.number)
            elif home.drive is not None:
                numbers.add(home.drive.file.descriptor.number)
    return sum(512 * os.fstat(number).st_blocks for number in numbers)


def rounds(rank: int, host_memory: int | None) -> None:
    """The same weight each time, and another one, which keeps the file of its round."""
    model = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(6))
    for i, layer in enumerate(model):
        layer.weight.fill_(i)  # type: ignore[operator,union-attr]
    offload(model, min_bytes=LEAST, share=True, device="cpu", host_memory=host_memory)
    first, before = model[0].weight, taken(model)
    assert before == 6 * first.nbytes  # type: ignore[operator,union-attr]
    for i in range(1, 5):
        old = model[0].state_dict()["weight"] if i == 3 else None
        with writing(model):
            first.fill_(10 * i)  # type: ignore[operator,union-attr]
            model[i].weight.fill_(10 * i)  # type: ignore[operator,union-attr]
        dist.barrier()  # the leader gives it back
        kept = first.nbytes if old is not None and host_memory is None else 0  # type: ignore[operator,union-attr]
        assert taken(model) == before + kept
        if kept:
            assert old is not None and bool((old == 20).all()), "what state_dict has made keeps its values"
            before += kept
        dist.barrier()
    values = [float(layer.weight.mean()) for layer in model]  # type: ignore[operator,union-attr]
    assert values == [40, 10, 20, 30, 40, 5]


@pytest.mark.parametrize("host_memory", [None, 0])
def test_what_nobody_sees_any_more_is_given_back(on_ranks: Callable[..., None], host_memory: int | None) -> None:
    on_ranks(rounds, host_memory)


def forked(rank: int) -> None:
    """The child of a rank reads a weight only after the ranks have written it for the first time."""
    model = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(2))
    for layer in model:
        layer.weight.fill_(1)  # type: ignore[operator,union-attr]
    offload(model, min_bytes=LEAST, share=True, device="cpu")
    weight: Any = model[0].weight
    told, tell = os.pipe()
    child = os.fork() if rank == 1 else None
    if child == 0:
        os.read(told, 1)
        os._exit(0 if bool((weight.host == 1).all()) else 1)
    with writing(model):
        weight.fill_(2)
    dist.barrier()  # the leader gives back what nobody sees
    if child is not None:
        os.write(tell, b" ")
        assert os.waitpid(child, 0)[1] == 0, "the child has the values from before"


def test_a_child_from_before_the_first_write_keeps_its_values(on_ranks: Callable[..., None]) -> None:
    on_ranks(forked)


def sealed(rank: int) -> None:
    model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
    offload(model, min_bytes=LEAST, share=True, device="cpu")
    number = home_of(model[0].weight).cell.shared._descriptor.number  # type: ignore[union-attr,arg-type]
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    assert fcntl.fcntl(number, fcntl.F_GET_SEALS) & wanted == wanted
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(number, size)


def test_no_rank_can_cut_the_memory_of_all(on_ranks: Callable[..., None]) -> None:
    on_ranks(sealed)
