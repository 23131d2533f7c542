"""What rewritten graphs look like.  Update with EXPECTTEST_ACCEPT=1 pytest tests/test_snapshots.py, then review."""

from __future__ import annotations

from typing import Any

import torch
from expecttest import TestCase
from helpers import Stack, cut_of, plan_of, ulysses_cut
from torch import nn

from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.program.rewrite import rewrite
from chunkflow_compile.passes.program.verify import verify


def body(cut: Cut, **options: Any) -> str:
    """The program's lines without its inputs."""
    plan = plan_of(cut.problem, **options)
    program = rewrite(cut, plan)
    verify(program)
    lines = str(program).splitlines()
    kept = {w.name: w.why for w in plan.weights if w.home == "device"}
    head = [f"# {w.name}: slot {w.offset}, {len(w.windows)} chunks\n#   {w.why}" for w in plan.streamed]
    head += [f"# {name}: resident ({why})" for name, why in kept.items()]
    inputs = {n.name for n in program.module.graph.nodes if n.op == "placeholder"}
    return "\n".join(head + [line for line in lines if line.split(":")[0] not in inputs]) + "\n"


class Tied(nn.Module):
    """The head is the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(32, 32, bias=False) for _ in range(2)])
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x @ self.head.weight


class TestSnapshots(TestCase):
    def test_no_collectives(self) -> None:
        self.assertExpectedInline(
            body(cut_of(Stack(), torch.randn(4, 8))),
            """\
# embed.weight: slot 12288, 1 chunks
#   hidden: copied from window 3, 1 window ahead of region 0, there 0.940 ms before it is read
# embed.bias: slot 13312, 1 chunks
#   hidden: copied from window 3, 1 window ahead of region 0, there 0.993 ms before it is read
# blocks.0.up.weight: slot 0, 2 chunks
#   hidden: copied from window 0, 1 window ahead of region 1, there 0.383 ms before it is read
# blocks.0.down.weight: slot 24576, 2 chunks
#   hidden: copied from window 3, 2 windows ahead of region 1, there 0.794 ms before it is read
# blocks.1.up.weight: slot 16384, 2 chunks
#   hidden: copied from window 1, 1 window ahead of region 2, there 0.383 ms before it is read
# blocks.1.down.weight: slot 8192, 2 chunks
#   hidden: copied from window 0, 2 windows ahead of region 2, there 0.794 ms before it is read
# head.weight: slot 0, 1 chunks
#   hidden: copied from window 2, 1 window ahead of region 3, there 0.945 ms before it is read
# head.bias: slot 1024, 1 chunks
#   hidden: copied from window 2, 1 window ahead of region 3, there 0.997 ms before it is read
prefetch('blocks.0.down.weight', chunks[1:2], window=0, after=0)
prefetch('blocks.0.up.weight', chunks[0:2], window=0, then=1)
prefetch('blocks.1.down.weight', chunks[0:1], window=0)
wait(2, 'embed.bias', 'embed.weight')
region_0 = lowered_0(embed_bias, arg2_1, embed_weight)
addmm: float32[4, 32] = region_0[0]
evict('embed.bias')
evict('embed.weight')
prefetch('blocks.1.down.weight', chunks[1:2], window=1, after=3)
prefetch('blocks.1.up.weight', chunks[0:2], window=1, then=4)
wait(1, 'blocks.0.down.weight', 'blocks.0.up.weight')
region_1 = lowered_1(addmm, blocks_0_up_weight, blocks_0_down_weight)
add: float32[4, 32] = region_1[0]
evict('blocks.0.down.weight')
evict('blocks.0.up.weight')
prefetch('head.bias', chunks[0:1], window=2, after=5)
prefetch('head.weight', chunks[0:1], window=2, then=6)
wait(4, 'blocks.1.down.weight', 'blocks.1.up.weight')
region_2 = lowered_1(add, blocks_1_up_weight, blocks_1_down_weight)
add_1: float32[4, 32] = region_2[0]
evict('blocks.1.down.weight')
evict('blocks.1.up.weight')
prefetch('embed.bias', chunks[0:1], window=3, next_step=True, after=7)
prefetch('embed.weight', chunks[0:1], window=3, next_step=True, then=2)
prefetch('blocks.0.down.weight', chunks[0:1], window=3, next_step=True)
wait(6, 'head.bias', 'head.weight')
region_3 = lowered_2(head_bias, add_1, head_weight)
addmm_1: float32[4, 8] = region_3[0]
evict('head.bias')
evict('head.weight')
return (addmm_1,)
""",
        )

    def test_ulysses_2_on_a_fake_process_group(self) -> None:
        self.assertExpectedInline(
            body(ulysses_cut()),
            """\
# blocks.0.qkv.weight: slot 4096, 3 chunks
#   hidden: copied from window 9, 1 window ahead of region 0, there 0.383 ms before it is read
# blocks.0.out.weight: slot 0, 1 chunks
#   hidden: copied from window 3, 1 window ahead of region 4, there 0.894 ms before it is read
# blocks.1.qkv.weight: slot 4096, 3 chunks
#   hidden: copied from window 4, 1 window ahead of region 5, there 0.383 ms before it is read
# blocks.1.out.weight: slot 0, 1 chunks
#   hidden: copied from window 8, 1 window ahead of region 9, there 0.894 ms before it is read
wait(0, 'blocks.0.qkv.weight')
region_0 = lowered_0(arg0_1, blocks_0_qkv_weight)
getitem_1: float32[4, 32] = region_0[0]
getitem_2: float32[4, 32] = region_0[1]
clone: float32[2, 4, 2, 8] = region_0[2]
evict('blocks.0.qkv.weight')
all_to_all_single: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(clone, [1, 1], [1, 1], '0')
wait_tensor: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single)
region_1 = lowered_1(wait_tensor, getitem_1)
transpose: float32[2, 8, 8] = region_1[0]
clone_1: float32[2, 4, 2, 8] = region_1[1]
all_to_all_single_1: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(clone_1, [1, 1], [1, 1], '0')
wait_tensor_1: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single_1)
region_2 = lowered_2(wait_tensor_1, getitem_2)
transpose_1: float32[2, 8, 8] = region_2[0]
clone_2: float32[2, 4, 2, 8] = region_2[1]
all_to_all_single_2: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(clone_2, [1, 1], [1, 1], '0')
wait_tensor_2: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single_2)
prefetch('blocks.0.out.weight', chunks[0:1], window=3, after=1, then=2)
region_3 = lowered_3(wait_tensor_2, transpose, transpose_1)
view_6: float32[2, 4, 2, 8] = region_3[0]
all_to_all_single_3: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(view_6, [1, 1], [1, 1], '0')
wait_tensor_3: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single_3)
prefetch('blocks.1.qkv.weight', chunks[0:3], window=4, after=3, then=4)
wait(2, 'blocks.0.out.weight')
region_4 = lowered_4(wait_tensor_3, blocks_0_out_weight, arg0_1)
add: float32[4, 32] = region_4[0]
evict('blocks.0.out.weight')
wait(4, 'blocks.1.qkv.weight')
region_5 = lowered_0(add, blocks_1_qkv_weight)
getitem_6: float32[4, 32] = region_5[0]
getitem_7: float32[4, 32] = region_5[1]
clone_4: float32[2, 4, 2, 8] = region_5[2]
evict('blocks.1.qkv.weight')
all_to_all_single_4: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(clone_4, [1, 1], [1, 1], '0')
wait_tensor_4: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single_4)
region_6 = lowered_1(wait_tensor_4, getitem_6)
transpose_4: float32[2, 8, 8] = region_6[0]
clone_5: float32[2, 4, 2, 8] = region_6[1]
all_to_all_single_5: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(clone_5, [1, 1], [1, 1], '0')
wait_tensor_5: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single_5)
region_7 = lowered_2(wait_tensor_5, getitem_7)
transpose_5: float32[2, 8, 8] = region_7[0]
clone_6: float32[2, 4, 2, 8] = region_7[1]
all_to_all_single_6: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(clone_6, [1, 1], [1, 1], '0')
wait_tensor_6: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single_6)
prefetch('blocks.1.out.weight', chunks[0:1], window=8, after=5, then=6)
region_8 = lowered_3(wait_tensor_6, transpose_4, transpose_5)
view_14: float32[2, 4, 2, 8] = region_8[0]
all_to_all_single_7: float32[2, 4, 2, 8] = _c10d_functional.all_to_all_single(view_14, [1, 1], [1, 1], '0')
wait_tensor_7: float32[2, 4, 2, 8] = _c10d_functional.wait_tensor(all_to_all_single_7)
prefetch('blocks.0.qkv.weight', chunks[0:3], window=9, next_step=True, after=7, then=0)
wait(6, 'blocks.1.out.weight')
region_9 = lowered_4(wait_tensor_7, blocks_1_out_weight, add)
add_1: float32[4, 32] = region_9[0]
evict('blocks.1.out.weight')
return (add_1,)
""",
        )

    def test_a_small_weight_stays_resident(self) -> None:
        cut = cut_of(Stack(layers=1), torch.randn(4, 8), min_bytes=2048)
        self.assertExpectedInline(
            body(cut),
            """\
# blocks.0.up.weight: slot 8192, 2 chunks
#   hidden: copied from window 0, 1 window ahead of region 1, there 0.383 ms before it is read
# blocks.0.down.weight: slot 0, 2 chunks
#   hidden: copied from window 2, 2 windows ahead of region 1, there 0.794 ms before it is read
# embed.weight: resident (small: 1.0 KiB)
# embed.bias: resident (small: 128 B)
# head.weight: resident (small: 1.0 KiB)
# head.bias: resident (small: 32 B)
prefetch('blocks.0.down.weight', chunks[1:2], window=0, after=0)
prefetch('blocks.0.up.weight', chunks[0:2], window=0, then=1)
region_0 = lowered_0(embed_weight, embed_bias, arg2_1)
addmm: float32[4, 32] = region_0[0]
wait(1, 'blocks.0.down.weight', 'blocks.0.up.weight')
region_1 = lowered_1(addmm, blocks_0_up_weight, blocks_0_down_weight)
add: float32[4, 32] = region_1[0]
evict('blocks.0.down.weight')
evict('blocks.0.up.weight')
prefetch('blocks.0.down.weight', chunks[0:1], window=2, next_step=True, after=2)
region_2 = lowered_2(head_weight, head_bias, add)
addmm_1: float32[4, 8] = region_2[0]
return (addmm_1,)
""",
        )

    def test_a_tied_weight_stays_resident(self) -> None:
        self.assertExpectedInline(
            body(cut_of(Tied(), torch.randn(4, 8))),
            """\
# blocks.0.weight: slot 0, 1 chunks
#   hidden: copied from window 2, 3 windows ahead of region 1, there 2.794 ms before it is read
# blocks.1.weight: slot 4096, 1 chunks
#   hidden: copied from window 1, 1 window ahead of region 2, there 0.794 ms before it is read
# embed.weight: resident (tied: also head.weight)
region_0 = lowered_0(embed_weight, arg1_1)
mm: float32[4, 32] = region_0[0]
prefetch('blocks.1.weight', chunks[0:1], window=1, after=0, then=1)
wait(2, 'blocks.0.weight')
region_1 = lowered_1(mm, blocks_0_weight)
mm_1: float32[4, 32] = region_1[0]
evict('blocks.0.weight')
prefetch('blocks.0.weight', chunks[0:1], window=2, next_step=True, after=3, then=2)
wait(1, 'blocks.1.weight')
region_2 = lowered_1(mm_1, blocks_1_weight)
mm_2: float32[4, 32] = region_2[0]
evict('blocks.1.weight')
region_3 = lowered_2(mm_2, embed_weight)
mm_3: float32[4, 8] = region_3[0]
return (mm_3,)
""",
        )
