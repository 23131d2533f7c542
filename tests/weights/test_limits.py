"""What host memory is free, in the layouts of control groups that machines have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import diffusers
import pytest
import torch
from torch import nn

from chunkflow_compile import ChunkflowError, offload, restore
from chunkflow_compile.catalog.small import Size, small_model
from chunkflow_compile.units import size
from chunkflow_compile.weights import host_store, limits, loader
from chunkflow_compile.weights.backing import Backing, SharedMemory, Where
from chunkflow_compile.weights.host_buffer import HostBuffer, buffer_of
from chunkflow_compile.weights.limits import LEAST_RESERVED, HostMemory, PinAllowance, host_memory, no_room
from chunkflow_compile.weights.pin_order import pin_all

GIB = 1 << 30
V1 = "35 31 0:32 {mounted} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2 = "41 31 0:38 {mounted} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def write(root: Path, files: dict[str, str | int]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def machine(root: Path, mounts: str, groups: str) -> None:
    write(
        root,
        {
            "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {40 << 20} kB\nHugePages_Total: 0",
            "proc/self/mountinfo": mounts,
            "proc/self/cgroup": groups,
        },
    )


def group(root: Path, path: str, limit: int | str, used: int, cache: int, v1: bool = False) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    total = "total_" * v1
    stat = f"cache 1\n{total}inactive_file {cache // 4}\n{total}active_file {cache - cache // 4}"
    write(
        root,
        {f"{path}/{name}": value for name, value in zip((*names, "memory.stat"), (limit, used, stat), strict=True)},
    )


def test_the_machine_alone(tmp_path: Path) -> None:
    machine(tmp_path, "", "")
    assert host_memory(tmp_path) == HostMemory(64 * GIB, 40 * GIB)
    assert host_memory(tmp_path / "nothing") == HostMemory(0, 0)


def test_an_ancestor_of_v2_limits_the_most(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    machine(tmp_path, V2.format(mounted="/"), "0::/job.slice/run.scope")
    group(tmp_path, f"{top}/job.slice", 16 * GIB, 12 * GIB, 2 * GIB)
    group(tmp_path, f"{top}/job.slice/run.scope", "max", 3 * GIB, 0)
    found = host_memory(tmp_path)
    assert found == HostMemory(16 * GIB, 6 * GIB, tmp_path / top / "job.slice" / "memory.max")
    write(tmp_path, {f"{top}/job.slice/run.scope/memory.high": 5 * GIB})
    assert host_memory(tmp_path).free == 2 * GIB
    group(tmp_path, f"{top}/job.slice", 16 * GIB, 17 * GIB, 0)
    assert host_memory(tmp_path).free == 0, "a group above its limit"


@pytest.mark.parametrize("mounted", ["/", "/docker/abc"])
def test_v1_in_a_container(tmp_path: Path, mounted: str) -> None:
    """A container without a name space of its own is told the host's path, and sees its group at the mount."""
    machine(tmp_path, V1.format(mounted=mounted), "9:name=systemd:/\n4:memory:/docker/abc\n0::/")
    inside = "sys/fs/cgroup/memory" if mounted != "/" else "sys/fs/cgroup/memory/docker/abc"
    group(tmp_path, "sys/fs/cgroup/memory", 9223372036854771712, 30 * GIB, GIB, v1=True)
    group(tmp_path, inside, 8 * GIB, 5 * GIB, GIB, v1=True)
    assert host_memory(tmp_path).free == 4 * GIB


def test_memory_that_grows_as_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment says how much there will be; a control group may still leave less."""
    machine(tmp_path, V2.format(mounted="/"), "0::/job")
    monkeypatch.setenv("CHUNKFLOW_HOST_MEMORY", "128GiB")
    assert host_memory(tmp_path) == HostMemory(128 * GIB, 104 * GIB, "CHUNKFLOW_HOST_MEMORY")
    group(tmp_path, "sys/fs/cgroup/job", 50 * GIB, 10 * GIB, 0)
    assert host_memory(tmp_path).free == 40 * GIB
    monkeypatch.setenv("CHUNKFLOW_HOST_MEMORY", "plenty")
    with pytest.raises(ChunkflowError, match=r"CHUNKFLOW_HOST_MEMORY='plenty' is not a size: give bytes, or a text"):
        host_memory(tmp_path)


def test_what_refuses_for_memory_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "meminfo", lambda _: {"MemTotal": 4 * GIB, "MemAvailable": 2 * GIB})
    monkeypatch.setattr(limits, "_groups", lambda _: iter(()))
    found = no_room(4 * GIB)
    assert found is not None and "CHUNKFLOW_HOST_MEMORY=64GiB says how much there will be" in found
    monkeypatch.setenv("CHUNKFLOW_HOST_MEMORY", "64GiB")
    assert no_room(4 * GIB) is None
    assert "are free by CHUNKFLOW_HOST_MEMORY" in (no_room(64 * GIB) or "")


def test_room(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(64 * GIB, 10 * GIB)
    monkeypatch.setattr(limits, "host_memory", lambda: memory)
    assert (reserve := memory.reserve) == int(0.05 * 64 * GIB) and HostMemory(8 * GIB, GIB).reserve == LEAST_RESERVED
    assert no_room(10 * GIB - reserve) is None and no_room(GIB) is None
    assert (no_room(10 * GIB) or "").startswith("10.00 GiB are free, and 3.20 GiB must stay free")
    monkeypatch.setattr(limits, "host_memory", lambda: HostMemory(0, 0))
    assert no_room(GIB) is None, "a machine that does not say"


class Reader:
    """A device that notes what it pins, of the name of a GPU."""

    name, closed = "cuda", False

    def __init__(self) -> None:
        self.pinned: list[int] = []

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        self.pinned.append(host.data_ptr())
        return lambda: None

    def sync_copies(self) -> None:
        """Nothing is copied."""


def buffers_of(model: nn.Module) -> list[HostBuffer]:
    return [buffer for p in model.parameters() if (buffer := buffer_of(p)) is not None]


@pytest.fixture
def buffers() -> list[HostBuffer]:
    return buffers_of(offload(small_model("wan", Size(layers=2)), min_bytes=1024))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_begin_to_pin_at_different_weights(
    buffers: list[HostBuffer], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    device, order = Reader(), [buffer.host.data_ptr() for buffer in buffers]
    half = len(order) // 2 * rank
    assert pin_all(buffers, device, None) and device.pinned == [*order[half:], *order[:half]]


def test_what_a_store_may_pin(buffers: list[HostBuffer], monkeypatch: pytest.MonkeyPatch) -> None:
    memory, store = HostMemory(64 * GIB, 10 * GIB, Path("/sys/fs/cgroup/memory.max")), buffers[0].store
    monkeypatch.setattr(host_store, "host_memory", lambda: memory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    most = store.held_bytes + (10 * GIB - memory.reserve) // 2
    told = f"10.00 GiB are free below /sys/fs/cgroup/memory.max, and 3.20 GiB stay in reserve: at most {size(most)}"
    assert store.pin_allowance(None) == PinAllowance(most, told)
    buffers[0].pin(Reader())
    assert store.pin_allowance(None).left == most - buffers[0].nbytes
    assert store.pin_allowance(1000 + buffers[0].nbytes).left == 1000
    memory = HostMemory(64 * GIB, 0)
    assert store.pin_allowance(None).left < store.held_bytes
    with pytest.warns(
        UserWarning, match=r"could not be pinned after .*0 B are free, and 3.20 GiB stay in reserve: at most 0 B"
    ):
        assert not pin_all(buffers, Reader(), None)


def test_ranks_that_share_pin_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones that find room, wherever a rank begins: with collectives, the slowest rank sets the step."""
    monkeypatch.setattr(host_store, "host_memory", lambda: HostMemory(64 * GIB, 10 * GIB))
    pinned = []
    for rank in range(3):
        model = offload(small_model("wan", Size(layers=2)), min_bytes=1024)
        buffers, device = buffers_of(model), Reader()
        store = buffers[0].store
        store.rank_and_count, store.agreed_pin_bytes = (rank, 3), sum(buffer.nbytes for buffer in buffers[:7]) + 1
        with pytest.warns(UserWarning, match="the ranks that share weights pin at most"):
            assert not pin_all(buffers, device, None)
        assert [buffer.pinned for buffer in buffers] == [True] * 7 + [False] * (len(buffers) - 7)
        pinned.append([buffers.index(next(h for h in buffers if h.host.data_ptr() == at)) for at in device.pinned])
        restore(model)
    assert len({found[0] for found in pinned}) > 1, "they begin at different ones"


def one_has_less_room(rank: int) -> None:
    host_store.host_memory = limits.host_memory = lambda *_: HostMemory(64 * GIB, (10 - 4 * rank) * GIB)
    model = offload(small_model("wan", Size(layers=2)), min_bytes=1024, share=True)
    (store,) = {id(buffer.store): buffer.store for buffer in buffers_of(model)}.values()
    memory = HostMemory(64 * GIB, 6 * GIB)
    assert store.agreed_pin_bytes == store.held_bytes + (6 * GIB - memory.reserve) // 2


def test_what_ranks_pin_is_decided_together(on_ranks: Callable[..., None]) -> None:
    on_ranks(one_has_less_room)


def test_no_room_for_the_weights_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before the kernel kills the process, at the begin or while others take memory too."""
    small_model("wan", Size(layers=2)).save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = diffusers.WanTransformer3DModel.from_pretrained
    model, twin, cast = loaded(tmp_path), loaded(tmp_path), loaded(tmp_path, torch_dtype=torch.bfloat16)
    full, told = HostMemory(GIB, 5, Path("/sys/fs/cgroup/memory.max")), list[HostMemory]()
    monkeypatch.setattr(limits, "host_memory", lambda: told.pop(0) if told else full)
    for free, checked in ([], GIB), ([HostMemory(64 * GIB, 40 * GIB)] * 3, 1 << 14):
        told[:] = free
        monkeypatch.setattr(loader, "_CHECKED", checked)
        with pytest.raises(
            ChunkflowError, match=r"take [\d.]+ [KM]iB more of host memory, and 5 B are free below .*memory.max"
        ):
            offload(model, min_bytes=1024, dtype=torch.bfloat16)
        assert not told and all(buffer_of(p) is None for p in model.parameters())
    assert all(
        torch.equal(p.to(torch.bfloat16), q.to(torch.bfloat16))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    ), "weights that were cast before an error stay cast"
    model = loaded(tmp_path)
    offload(model, min_bytes=1024)  # takes none
    restore(model)
    told[:] = [HostMemory(64 * GIB, 40 * GIB)] * 1000
    offload(model, min_bytes=1024, dtype=torch.bfloat16)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), cast.parameters(), strict=True))


def half_a_copy_is_free(rank: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(16))
    total = sum(p.nbytes for p in model.parameters())
    limits.host_memory = lambda *_: HostMemory(1 << 34, total // 2)
    offload(model, min_bytes=1024, share=True, device="cpu")
    assert all(buffer.backing.where is Where.SHARED for buffer in buffers_of(model))


def test_weights_make_room_for_their_shared_copy(on_ranks: Callable[..., None]) -> None:
    """They are in memory already, and leave it one by one."""
    on_ranks(half_a_copy_is_free)


def test_ranks_that_share_pin_in_turns(buffers: list[HostBuffer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an environment that counts them; and pages that another rank pins at the moment are pinned a little later."""
    monkeypatch.setattr("chunkflow_compile.weights.pinning._RETRY_S", 0.0)
    device, store, refused = Reader(), buffers[0].store, list[int]()
    plain, store.rank_and_count = device.pin, (1, 2)
    memory = HostMemory(64 * GIB, 10 * GIB)
    monkeypatch.setattr(host_store, "host_memory", lambda: memory)
    assert store.pin_allowance(None).left == store.held_bytes + (10 * GIB - memory.reserve) // 2

    def pin(host: torch.Tensor) -> Callable[[], None]:
        if len(refused) < 2:
            refused.append(host.data_ptr())
            raise OSError("part or all of the requested memory range is already mapped")
        return plain(host)

    monkeypatch.setattr(device, "pin", pin)
    half = buffers[len(buffers) // 2]
    monkeypatch.setattr(half, "backing", SharedMemory.__new__(SharedMemory))
    with pytest.warns(UserWarning, match="could not be pinned"):
        assert not pin_all(buffers, device, None)
    assert refused == [half.host.data_ptr()] * 2
    store.pins, refused[:] = True, [1]
    assert pin_all(buffers, device, None) and refused == [1, half.host.data_ptr()]
    monkeypatch.setattr(half, "backing", Backing(half.host))
