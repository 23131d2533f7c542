"""Complex rotary embeddings in real arithmetic: where, with which bits, and in the code that Inductor makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.graph.rotary import in_real_arithmetic
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.program.contracts import check_traced


def rotated(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """As Qwen-Image, Z-Image and Lumina2 in diffusers."""
    return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs).flatten(3).type_as(x)


class Rotary(nn.Module):
    """A projection whose result is rotated."""

    def __init__(self, rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], heads: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rotate, self.heads = rotate, heads
        self.proj = nn.Linear(width, heads * width, bias=False)

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        return self.rotate(self.proj(x).unflatten(-1, (self.heads, -1)), freqs)


def inputs(width: int, tokens: int = 5, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """``dtype``: of the angles."""
    angles = 50 * torch.randn(tokens, 1, width // 2, dtype=dtype)
    return {"x": torch.randn(2, tokens, width), "freqs": torch.polar(torch.ones_like(angles), angles)}


def in_double(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """As Wan-Animate and AnyFlow."""
    return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * freqs).flatten(3).type_as(x)


def heads_first(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    return rotated(x.transpose(1, 2), freqs.transpose(0, 1)).transpose(1, 2)


def table_first(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(freqs * torch.view_as_complex(x.unflatten(-1, (-1, 2)))).flatten(3)


def conjugated(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """As SANA-WM."""
    return rotated(x, freqs.conj())


def complex_products(traced: Traced) -> int:
    products = traced.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    return sum(node.meta["val"].is_complex() for node in products)


@pytest.mark.parametrize("width", [16, 96])
@pytest.mark.parametrize(
    "rotate, dtype",
    [
        (rotated, torch.float32),
        (heads_first, torch.float32),
        (table_first, torch.float32),
        (conjugated, torch.float32),
        (in_double, torch.float64),
    ],
)
def test_real_arithmetic_gives_the_same_bits_and_layout(
    rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype, width: int
) -> None:
    model, given = Rotary(rotate, 3, width), inputs(width, dtype=dtype)
    before = trace(model, given, 0)
    after = in_real_arithmetic(before)
    check_traced(after)
    assert (complex_products(before), complex_products(after)) == (1, 0)
    values = {(5, 1, width // 2): given["freqs"], (2, 5, width): given["x"], (3 * width, width): model.proj.weight}
    arguments = [values[tuple(n.meta["val"].shape)] for n in before.graph.graph.find_nodes(op="placeholder")]
    expected, found = before.graph(*arguments)[0], after.graph(*arguments)[0]
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    (result,) = after.graph.graph.output_node().all_input_nodes
    assert result.meta["val"].stride() == expected.stride()


def squared(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """The complex product is read as such."""
    product = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs
    return torch.view_as_real(product).flatten(3) * product.abs().repeat_interleave(2, -1)


def by_columns(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """With a table in whose memory the rows are not dense: torch has other code for it."""
    return rotated(x, freqs.transpose(0, -1).contiguous().transpose(0, -1))


@pytest.mark.parametrize("rotate, width", [(squared, 16), (rotated, 20), (by_columns, 16)])
def test_other_products_stay_complex(rotate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], width: int) -> None:
    """Also rows that do not fill torch's vectors: it fuses multiplications with additions in the rest of a row."""
    traced = trace(Rotary(rotate, 3, width), inputs(width), 0)
    assert in_real_arithmetic(traced) is traced


def test_only_inductor_computes_in_real_arithmetic() -> None:
    """One op at a time, it would take more memory, and on a GPU fuse no multiplication with an addition."""
    traced = trace(Rotary(rotated, 3, 16), inputs(16), 0)
    assert complex_products(make_cut(traced).traced) == 0
    assert complex_products(make_cut(traced, disabled=("rotary",)).traced) == 1
    assert complex_products(make_cut(replace(traced, fused=False)).traced) == 1


@pytest.mark.long
def test_code_of_inductor_gives_the_same_bits_without_a_complex_kernel() -> None:
    model, given = Rotary(rotated, 3, 32).bfloat16(), inputs(32)
    given["x"] = given["x"].bfloat16()
    results, kernels = [], []
    for disable in (["rotary"], []):
        torch._dynamo.reset()
        run = torch.compile(model, backend="chunkflow", options={"min_bytes": 0, "disable": disable})
        with torch.no_grad():
            result, codes = run_and_get_code(run, **given)
        results.append(result)
        kernels.append(sum(code.count("torch.ops.aten.mul.Tensor(") for code in codes))
    assert torch.equal(*results)
    assert kernels == [1, 0]
