"""What the debugging commands print, on models of two blocks.  Update with EXPECTTEST_ACCEPT=1, then review."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import HERE
from expecttest import TestCase

from chunkflow_compile.cli.main import main
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.report.comparison import explain_plan
from chunkflow_compile.runtime.measurement import Measured, WindowSeconds

pytestmark = pytest.mark.usefixtures("traced_once")


def cli(*arguments: str, code: int = 0) -> str:
    """What a command prints; it must end with ``code``."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(arguments) == code
    # Digests of code change with torch's ops.
    return re.sub(r"key [0-9a-f]{16}", "key ...", out.getvalue().replace(f"{HERE}/", ""))


class TestDebuggingCli(TestCase):
    maxDiff = None

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        machine = replace(load_profile(HERE / "slow_compute.json"), name="machine", launch_s=1e-3, h2d_bandwidth=2e7)
        (self.folder / "machine.json").write_text(machine.to_json())

    def target(self, function: str = "ulysses", slowdown: str = "1.0") -> tuple[str, ...]:
        """A model with a millisecond of compute a region, its weights in chunks of 4 KiB."""
        sizes = ("--min-bytes", "0", "--chunk-bytes", "4096", "--slowdown", slowdown)
        machine = ("--hardware", str(self.folder / "machine.json"), "--ulysses", "1" if function == "stack" else "2")
        return (f"{HERE / 'two_blocks.py'}:{function}", *machine, *sizes)

    def plan(self, name: str, *arguments: str) -> Path:
        path = self.folder / name
        cli("plan", *arguments, "--json", str(path))
        return path

    def test_dump_annotated_and_folded(self) -> None:
        """And, on stderr, what each stage took and what was proved."""
        with contextlib.redirect_stderr(io.StringIO()) as said:
            shown = cli("dump", *self.target("block"), "--annotate", "--verbose")
        took = r"planned +\d\.\d\d s\n.*verified +\d\.\d\d s +2 steps, 82 ops, 97 edges; rules 11"
        assert re.search(took, said.getvalue(), re.S)
        self.assertExpectedInline(
            shown,
            """\
# proved: no weight is read before it has arrived, or overwritten before its last reader
# (2 steps, 82 ops, 97 edges; rules 11)
#                                                                                               #         cost    window          slot       bytes  slack or work
arg0_1: float32[4, 32]
blocks_0_qkv_weight: float32[96, 32]                                                            #                           at 4.0 KiB    12.0 KiB  host, 3 chunks
blocks_0_out_weight: float32[32, 32]                                                            #                               at 0 B     4.0 KiB  host, 1 chunks
# blocks.0: regions 0 to 4
wait(0, 'blocks.0.qkv.weight')                                                                  #                           at 4.0 KiB              slack 0.383 ms
region_0 = lowered_0(arg0_1, blocks_0_qkv_weight)                                               #     1.000 ms  window 0                            24.6 kFLOP
getitem_1: float32[4, 32] = region_0[0]
getitem_2: float32[4, 32] = region_0[1]
clone: float32[2, 4, 2, 8] = region_0[2]
evict('blocks.0.qkv.weight')                                                                    #                           at 4.0 KiB              free
all_to_all_single: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(clone, [1, 1], [ ...#     0.100 ms                               256 B
wait_tensor: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single)
region_1 = lowered_1(wait_tensor, getitem_1)                                                    #     1.000 ms  window 1
transpose: float32[2, 8, 8] = region_1[0]
clone_1: float32[2, 4, 2, 8] = region_1[1]
all_to_all_single_1: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(clone_1, [1, 1 ...#     0.100 ms                               256 B
wait_tensor_1: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single_1)
region_2 = lowered_2(wait_tensor_1, getitem_2)                                                  #     1.000 ms  window 2
transpose_1: float32[2, 8, 8] = region_2[0]
clone_2: float32[2, 4, 2, 8] = region_2[1]
all_to_all_single_2: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(clone_2, [1, 1 ...#     0.100 ms                               256 B
wait_tensor_2: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single_2)
prefetch('blocks.0.out.weight', chunks[0:1], window=3, after=1, then=2)                         #     0.206 ms  window 3        at 0 B     4.0 KiB  slack 0.894 ms
region_3 = lowered_3(wait_tensor_2, transpose, transpose_1)                                     #     1.000 ms  window 3                            4.1 kFLOP
view_6: float32[2, 4, 2, 8] = region_3[0]
all_to_all_single_3: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(view_6, [1, 1] ...#     0.100 ms                               256 B
wait_tensor_3: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single_3)
prefetch('blocks.0.qkv.weight', chunks[0:3], window=4, next_step=True, after=3, then=0)         #     0.617 ms  window 4    at 4.0 KiB    12.0 KiB  slack 0.383 ms
wait(2, 'blocks.0.out.weight')                                                                  #                               at 0 B              slack 0.894 ms
region_4 = lowered_4(wait_tensor_3, blocks_0_out_weight, arg0_1)                                #     1.000 ms  window 4                            8.19 kFLOP
add: float32[4, 32] = region_4[0]
evict('blocks.0.out.weight')                                                                    #                               at 0 B              free
return (add,)
""",
        )

    def test_dump_of_all_stages(self) -> None:
        out = self.folder / "stages"
        said = cli("dump", *self.target("stack"), "--out", str(out), "--verify-each").replace(str(self.folder), "")
        self.assertExpectedInline(
            said,
            """\
two_blocks.py:stack; on machine, 1 forward per step

stage      file               lines    added    removed
---------  ---------------  -------  -------  ---------
traced     00_traced.py          26
regions    01_regions.py         30       +4         -0
planned    02_planned.py         52      +22         -0
rewritten  03_rewritten.py       40      +16        -28
verified   04_verified.py        42       +2         -0

read first: /stages/report.txt
""",
        )
        regions = cli("dump", *self.target("stack"), "--stage", "regions")
        assert "# inputs of blocks.1: as inputs of blocks.0, 2 lines folded\n" in regions
        assert (
            "# region_2(add, arg5_1, arg6_1): blocks.1, 4 ops, key ...\nt_3: float32[32, 64] = aten.t(arg5_1)\n"
            in regions
        )
        hunks = re.split(r"(?m)^(?=@@ )", (out / "02_planned.diff").read_text())
        assert (
            len(hunks) == 6 and "+prefetch('embed.weight', chunks[0:1], window=3, next_step=True, then=2)\n" in hunks[4]
        )
        self.assertExpectedInline(
            re.sub(r"key [0-9a-f]{16}", "key ...", "".join(hunks[:2])),
            """\
# evict: 0 -> 8
# prefetch: 0 -> 10
# wait: 0 -> 4
--- 01_regions.py
+++ 02_planned.py
@@ -9,2 +9,6 @@
 arg8_1: float32[8]  # head.bias
+prefetch('blocks.0.down.weight', chunks[1:2], window=0, after=0)
+prefetch('blocks.0.up.weight', chunks[0:2], window=0, then=1)
+prefetch('blocks.1.down.weight', chunks[0:1], window=0)
+wait(2, 'embed.bias', 'embed.weight')
 # region_0(arg1_1, arg2_1, arg0_1): outside blocks, 1 ops, key ...
""",
        )

    def test_a_weight_on_the_drive(self) -> None:
        drive = ("--host-memory", "1B", "--drive", "20MB/s")
        said = cli("why", *self.target(), "blocks.1.out", *drive)
        assert "reads it from" in said and "copied from" in said
        assert "an SSD twice as fast" in said
        with tempfile.TemporaryDirectory() as folder:
            cli("timeline", *self.target(), *drive, "--out", f"{folder}/step.json")
            assert '"cat": "read"' in Path(folder, "step.json").read_text()

    def test_why(self) -> None:
        self.assertExpectedInline(
            cli("why", *self.target(), "blocks.1.out"),
            """\
two_blocks.py:ulysses; Ulysses degree 2 on machine, 1 forward per step

blocks.1.out.weight: float32[32, 32], 4.0 KiB

weight               size     home    why
-------------------  -------  ------  ---------------------------------------------------------
blocks.1.out.weight  4.0 KiB  host    hidden: copied from window 8, 1 window ahead of region 9,
                                      there 0.894 ms before it is read

read by  region_9 (blocks.1: out)
         from 9.802 ms to 10.802 ms of a call
slot     0 B to 4.0 KiB of the arena

  chunks  bytes      window  copied from    to
--------  -------  --------  -------------  --------
       0  4.0 KiB         8  8.702 ms       8.908 ms

what would change it:

with                streamed    slack     forward    weights on the GPU
------------------  ----------  --------  ---------  --------------------
slowdown 1.1        100 %       0.894 ms  11.2 ms    12.0 KiB
PCIe twice as fast  100 %       0.997 ms  10.8 ms    16.0 KiB
PCIe half as fast   100 %       1.790 ms  10.8 ms    16.0 KiB
chunks of 1.0 KiB   100 %       0.891 ms  10.8 ms    16.0 KiB
""",
        )

    def test_explain(self) -> None:
        plan = Plan.from_json(self.plan("plan.json", *self.target()).read_text())
        self.assertExpectedInline(
            explain_plan(plan, slow_run(plan)).report(details=True),
            """\
step:           25.0 ms for a call of the model (median of 7, 10.8 ms planned)
stalls:         3.0 ms, 12 % of it, waiting for weights
device memory:  16.0 KiB of 32.0 KiB of weights
host memory:    32.0 KiB copied to the device per step
to go faster:   more memory than 16.0 KiB (all weights: 32.0 KiB), pack=True, or quantised weights

policy chunkflow, planned for machine; medians of 7 calls; plan ce8c4b8e71195e8f

                     predicted    measured    ratio
-------------------  -----------  ----------  -------
a call of the model  10.8 ms      25.0 ms     2.31
compute              10.0 ms      20.0 ms     2.00
waiting for weights  0.0 ms       3.0 ms
collectives          0.8 ms       1.0 ms      1.25
host, and the rest   0.0 ms       1.0 ms
copies (concurrent)  1.6 ms       3.3 ms      2.00
copied               32.0 KiB     32.0 KiB    1.00
rate of copies       0.02 GB/s    0.01 GB/s   0.50

limited by compute, 80 % of the step; compute waits 12 % of it for weights, and the link is busy 13
% of it

a call of the model takes 2.31 times what was predicted, most of it compute (+10.0 ms): the profile
'machine' does not fit this machine, or the machine was busy; run chunkflow calibrate and compile
with hardware='measured'

worst stalls:

  window  region         predicted    measured    waits for            why
--------  -------------  -----------  ----------  -------------------  -----------------------------
       4  blocks.0: out  0.0 ms       3.0 ms      blocks.0.out.weight  planned with 0.9 ms to spare;
                                                                       the copies or what they wait
                                                                       for came later than predicted

windows that differ most from what was predicted:

window    region                 compute, ms    waited, ms    collectives, ms
--------  ---------------------  -------------  ------------  -----------------
4         blocks.0: out          1.00 / 2.00    0.00 / 3.00   0.10 / 0.10
5         blocks.1: qkv          1.00 / 2.00    0.00 / 0.00   0.00 / 0.10
0         blocks.0: qkv          1.00 / 2.00    0.00 / 0.00   0.00 / 0.10
7         blocks.1: elementwise  1.00 / 2.00    0.00 / 0.00   0.10 / 0.10
2         blocks.0: elementwise  1.00 / 2.00    0.00 / 0.00   0.10 / 0.10
(predicted / measured)""",
        )


def slow_run(plan: Plan) -> Measured:
    """A step whose compute takes twice as long as planned, and whose fifth region waits 3 ms for its weights."""
    predicted = plan.predicted
    assert predicted is not None
    count = len(plan.regions)
    windows = WindowSeconds([2e-3] * count, [0.0] * 4 + [3e-3] + [0.0] * (count - 5), [1e-4] * count, [0.0] * count)
    return Measured(
        plan=plan.digest,
        problem=plan.problem,
        alone_s=[1e-4] * count,
        steps=7,
        step_s=2e-3 * count + 3e-3 + 1e-4 * count + 1e-3,
        compute_s=2e-3 * count,
        exposed_s=3e-3,
        collective_s=1e-4 * count,
        copy_s=2 * predicted.copy_s,
        moved_bytes=plan.moved_bytes,
        windows=windows,
    )
