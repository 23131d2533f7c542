"""What ``chunkflow doctor`` says of a machine.  Update with EXPECTTEST_ACCEPT=1, then review."""

from __future__ import annotations

from dataclasses import replace

from expecttest import TestCase

from chunkflow_compile.hardware.caches import Folder
from chunkflow_compile.hardware.machine import Gpu, Machine
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.hardware.read_time import ReadTime
from chunkflow_compile.report.health import Finding, copy_rates, findings, health_table, host_memory_for
from chunkflow_compile.weights.limits import HostMemory

FAULTY = Machine(
    python="3.11.7",
    torch="2.10.0+cu128",
    cuda_build="12.8",
    driver="570.86",
    gpus=(
        Gpu(name="NVIDIA L40S", memory_bytes=48 << 30, link=(4, 8), most_link=(4, 16), numa=0),
        Gpu(name="NVIDIA L40S", memory_bytes=48 << 30, link=(1, 16), most_link=(4, 16), numa=1),
    ),
    cpus=32,
    numa_nodes=2,
    memory=HostMemory(64 << 30, 8 << 30, "/sys/fs/cgroup/memory.max"),
    huge_pages=("madvise", ""),
    pinnable_bytes=8 << 20,
    gloo=True,
    nccl=False,
    compiler=None,
    triton=False,
    libraries={"diffusers": None, "matplotlib": "3.11.2", "torch-tensorrt": None},
    profile=None,
    profile_fault="This user has no home folder: set HOME or XDG_CACHE_HOME.",
    compile_cache=Folder("/cache", fault="Read-only file system"),
    temporary=Folder("/tmp", 30 << 30),
)


def test_copies_in_host_memory_are_counted_by_numa_nodes() -> None:
    assert [FAULTY.host_copies(ranks) for ranks in (1, 2, 8)] == [1, 2, 2]
    assert replace(FAULTY, gpus=(), numa_nodes=2).host_copies(4) == replace(FAULTY, numa_nodes=1).host_copies(2) == 1
    found = host_memory_for("wan", ReadTime(3 << 30, 3e9), 2, FAULTY.memory, FAULTY.host_copies(2))
    assert found.found.startswith("6.00 GiB of host memory, 2 copies for 2 ranks;") and found.verdict == "missing"


def test_the_rates_of_copies() -> None:
    card = load_profile("rtx-5090-pcie")
    assert copy_rates(card, 1) == Finding("copies", "54.8 GB/s alone (profile rtx-5090-pcie)")
    together = "54.8 GB/s alone, 27.5 GB/s each of 2 at once (profile rtx-5090-pcie)"
    assert copy_rates(card, 2) == Finding("copies", together)
    unknown = copy_rates(replace(card, host_bandwidth=0.0), 2)
    assert unknown.verdict == "note" and "calibrate --ranks 2" in unknown.fix
    assert "no profile" in copy_rates(None, 2).found


def test_room_for_a_model() -> None:
    found = host_memory_for("wan", ReadTime(4 << 30, 3e9), 1, FAULTY.memory)
    assert found == Finding("wan", "4.00 GiB of host memory; from a drive of 3.0 GB/s in 1 s; 4.00 GiB left")
    assert host_memory_for("wan", ReadTime(6 << 30, 3e9), 1, FAULTY.memory).verdict == "missing", (
        "offload leaves a reserve"
    )
    found = host_memory_for("wan", ReadTime(30 << 30, 3e9), 8, FAULTY.memory)
    fix = "load it in a smaller dtype or quantised, leave some of it on the drive with host_memory="
    assert found.verdict == "missing" and found.fix.startswith(fix)
    said = (
        "30.00 GiB of host memory, one copy for 8 ranks; from a drive of 3.0 GB/s in 11 s; 8.00 GiB free, and 3.20 GiB"
    )
    assert found.found == f"{said} must stay free"


class TestDoctor(TestCase):
    maxDiff = None

    def test_doctor_of_a_machine_with_faults(self) -> None:
        self.assertExpectedInline(
            health_table(findings(FAULTY)),
            """\
what              found
----------------  ------------------------------------------------------------------  -------
python            3.11.7                                                              ok
torch             2.10.0+cu128                                                        note
CUDA              torch built for CUDA 12.8, driver 570.86                            ok
GPU 0             NVIDIA L40S, 48.00 GiB, PCIe 4 x8, NUMA node 0                      note
GPU 1             NVIDIA L40S, 48.00 GiB, PCIe 1 x16, NUMA node 1                     note
cpu               32 cores, 2 NUMA nodes                                              ok
host copies       2, one for each NUMA node with GPUs, of a model that 2 ranks share  ok
CUDA graphs       a step can be one: cudagraphs=True                                  ok
host memory       8.00 GiB free of 64.00 GiB (/sys/fs/cgroup/memory.max)              note
huge pages        private: madvise shared: none                                       ok
pinnable memory   limit 8.0 MiB                                                       note
gloo              available                                                           ok
NCCL              not in this torch                                                   missing
C++ compiler      none                                                                missing
triton            none                                                                missing
diffusers         not installed                                                       note
matplotlib        3.11.2                                                              ok
torch-tensorrt    not installed                                                       ok
compile cache     /cache, not usable: Read-only file system                           note
temporary files   /tmp, 30.00 GiB free                                                ok
hardware profile  not looked for                                                      note

torch: ChunkFlow is tested on 2.11 to 2.15: install one of these if this one fails

GPU 0: its link runs 8 of 16 lanes: check the slot, the riser and the BIOS

GPU 1: its link runs at generation 1 of 4, as links do when idle: check again while something copies

host memory: the host holds all streamed weights: a model of 14 billion parameters takes 28 GB in
bfloat16

pinnable memory: copies from unpinned memory are slow: raise the limit with ulimit -l unlimited

NCCL: several GPUs need it

C++ compiler: Inductor needs one for the CPU: install g++ or set CXX; lowering='eager' works without

triton: Inductor needs it for GPUs: install a CUDA build of torch, which includes it

diffusers: the presets, the demo and diffusers pipelines need it:
  pip install 'diffusers>=0.38' transformers accelerate ftfy sentencepiece protobuf imageio imageio-ffmpeg

compile cache: set TORCHINDUCTOR_CACHE_DIR to a folder that can be written

hardware profile: This user has no home folder: set HOME or XDG_CACHE_HOME.""",
        )
