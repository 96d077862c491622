"""The delta rule's two forms against each other and float64, and what the start-up probe must be able to see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backend.engine.probe import find_tile
from backend.ops.delta_rule import chunked_delta_rule, recurrent_delta_rule, unit_lower_inverse
from backend.ops.linear import linear


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("alike", [0.0, 0.9, 1.0])
def test_the_triangular_inverse_is_stable_even_for_repeated_keys(size: int, alike: float) -> None:
    """Equal keys make every entry below the diagonal alike: powers of the matrix then grow like binomials."""
    noise = torch.rand(size, size, generator=torch.Generator().manual_seed(size)) * (1 - alike)
    a = (alike + noise).tril(-1)
    exact = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + a.double())
    assert (unit_lower_inverse(a) - exact).abs().max() < 1e-5 * exact.abs().max()


def inputs(rows: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(2, rows, 3, 16, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(2, rows, 3, 8, generator=generator)
    g, beta = -torch.rand(2, rows, 3, generator=generator), torch.rand(2, rows, 3, generator=generator)
    return q, k, v, g, beta, torch.randn(2, 3, 16, 8, generator=generator)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100])
def test_the_chunked_form_computes_what_the_recurrence_computes(rows: int) -> None:
    *rest, state = inputs(rows, seed=rows)
    chunked, recurrent = chunked_delta_rule(*rest, state, 32), recurrent_delta_rule(*rest, state)
    assert torch.allclose(chunked[0], recurrent[0], atol=1e-5)
    assert torch.allclose(chunked[1], recurrent[1], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("inputs_", "outputs"), [(2048, 1024), (3584, 1024), (1024, 16), (64, 96)])
def test_under_the_probed_tile_no_rounding_depends_on_the_row_count(
    inputs_: int, outputs: int, dtype: torch.dtype
) -> None:
    """Products that cancel exactly: what is left is each kernel's own rounding, which ordinary data hides in bf16."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, inputs_ // 2, generator=generator).to(dtype)
    w = torch.randn(outputs, inputs_ // 2, generator=generator).to(dtype)
    x, w = torch.cat((x, x.roll(1, 1)), dim=1), torch.cat((w, -w.roll(1, 1)), dim=1)
    tile = find_tile(w)
    whole = linear(x, w, tile)
    for count in range(1, 18):
        assert torch.equal(linear(x[:count], w, tile), whole[:count])
        assert torch.equal(linear(x[7 : 7 + count], w, tile), whole[7 : 7 + count])
