"""At start: which row counts are bitwise equal on this machine, for every distinct projection of the loaded weights.

The prefix law needs one fact of the BLAS below us: that a row's result does not depend on its companions. Where that
holds only for some row counts, projections are padded to those; where it never holds, rows are computed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backend.engine.forms import GRID
from backend.engine.runner import Runner
from backend.models.layers import Joined, Linear, products
from backend.ops.attention import KEY_BLOCK, cached_attention, visibility
from backend.ops.delta_replay import MAX_ROWS
from backend.ops.linear import RowTile, linear, pack

_MULTIPLES = (1, 2, 4, 8, 16)
_MOST_ROWS = 192  # sixteen sequences of nine rows, and some
_LARGE = 2**26  # elements of a weight for which fewer row counts are tried
_CUDA_TILE = RowTile(rows=64, fixed=True)
_PROMPT = (1, 2, 3, 5, 8)
_TOKENS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5)
_SINGLE, _GROUPED = (9, 9, *[1] * 14), (9, 9, 2, 5, 3, 4)  # over a move of the recurrence's base, which is at row 22


@dataclass(frozen=True)
class ProbeReport:
    """What `/version` says: the tile of each projection shape, and whether whole blocks agree with single rows."""

    tiles: dict[str, RowTile]  # "in x out dtype" → tile
    attention_rows_agree: bool
    blocks_agree: bool

    @property
    def lawful(self) -> bool:
        """Does everything the prefix law needs hold here?"""
        return self.attention_rows_agree and self.blocks_agree

    def as_json(self) -> dict[str, Any]:
        return {
            "row_tiles": {shape: {"rows": tile.rows, "fixed": tile.fixed} for shape, tile in self.tiles.items()},
            "attention_rows_bitwise_equal": self.attention_rows_agree,
            "verify_blocks_bitwise_equal": self.blocks_agree,
        }


def probe(runner: Runner) -> ProbeReport:
    """Set the `tile` of every Linear of the runner's model, then check whole verify blocks against single rows.

    Runs on the calling thread's thread count, which must be the one that serves.
    """
    tiles: dict[str, RowTile] = {}
    settle(runner.model, tiles)
    return ProbeReport(tiles, attention_rows_agree(runner), blocks_agree(runner, _PROMPT, _TOKENS, _SINGLE, _GROUPED))


def settle(module: nn.Module, tiles: dict[str, RowTile]) -> None:
    """Set the `tile` of every product of a module that is ready to decode: from `tiles` by shape, which grows.

    A drafter's rows need it as the trunk's do, for a draft not to depend on the company it is made in.
    """
    for product in products(module):
        shape = shape_of(product)
        if shape not in tiles:
            tiles[shape] = find_tile(product)
        product.tile = tiles[shape]


def shape_of(product: Linear | Joined) -> str:
    """What distinguishes products to a kernel, as the report names it."""
    dtype = str(product.weight.dtype).removeprefix("torch.")
    return f"{product.inputs} x {product.outputs} {dtype}{'' if product.packed is None else ' packed'}"


def find_tile(product: Linear | Joined) -> RowTile:
    """The cheapest RowTile under which rows of the product are invariant; CUDA always takes fixed tiles."""
    device, dtype = product.weight.device, product.weight.dtype
    if device.type == "cuda":
        return _CUDA_TILE
    x, weight = _cancelling(product.inputs, product.outputs, dtype)
    packed = product.packed is not None
    if packed:
        weight = pack(weight)

    def compute(rows: Tensor) -> Tensor:
        return linear(rows, weight, RowTile(1), packed)

    reference = compute(x)
    many = range(16, _MOST_ROWS + 1, 16) if weight.numel() < _LARGE else (48, 144)
    for rows in _MULTIPLES:
        few = range(rows, 16 * rows, rows) if weight.numel() < _LARGE else (rows, 2 * rows, 3 * rows, 9 * rows)
        if all(_rows_agree(compute, x, reference, count) for count in sorted({*few, *many})):
            return RowTile(rows)
    return RowTile(1, fixed=True)


def _cancelling(inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows [192, in] and a weight of the given shape and dtype whose exact products are all zero.

    What a kernel then returns is the rounding of its own summation order, in full: with ordinary data a bfloat16
    result hides a different order in all but a few outputs in a million.
    """
    generator = torch.Generator().manual_seed(0)
    half = inputs // 2
    order = torch.randperm(half, generator=generator)
    x = torch.randn(_MOST_ROWS, half, generator=generator).to(dtype)
    # A kernel does not look at values: some rows, over and over, do for all.
    some = torch.randn(min(outputs, 1024), half, generator=generator).to(dtype)
    w = some.repeat(-(-outputs // len(some)), 1)[:outputs]
    odd = x.new_zeros(_MOST_ROWS, inputs % 2), w.new_zeros(outputs, inputs % 2)
    return torch.cat((x, x[:, order], odd[0]), dim=1), torch.cat((w, -w[:, order], odd[1]), dim=1)


def _rows_agree(compute: Callable[[Tensor], Tensor], x: Tensor, reference: Tensor, count: int) -> bool:
    """The first and the last `count` rows alone give what they gave among all: neither count nor place matters."""
    first, last = compute(x[:count]), compute(x[-count:])
    return torch.equal(first, reference[:count]) and torch.equal(last, reference[-count:])


def attention_rows_agree(runner: Runner) -> bool:
    """Is a query row's attention bitwise the same for every padded row count and cache length?

    Keys come in equal pairs whose values cancel, so the exact result is zero and only rounding is compared.
    """
    config = runner.model.config
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(runner.device, runner.dtype)

    half = KEY_BLOCK // 4
    k = random(1, config.num_key_value_heads, half, config.head_dim)
    v = random(1, config.num_key_value_heads, half, config.head_dim)
    empty = k.new_zeros(1, config.num_key_value_heads, 2 * KEY_BLOCK - 2 * half, config.head_dim)
    keys, values = torch.cat((k, k, empty), dim=2), torch.cat((v, -v, empty), dim=2)
    q = random(1, GRID, config.num_attention_heads, config.head_dim)

    def attend(first: int, count: int, length: int, batch: int = 1) -> Tensor:
        positions = torch.full((batch, count), 2 * half - 1, device=runner.device)
        mask = visibility(positions, length, config.query_groups, runner.dtype)
        rows, k, v = (x.expand(batch, -1, -1, -1) for x in (q[:, first : first + count], keys, values))
        return cached_attention(rows, k[:, :, :length], v[:, :, :length], mask)[-1:]

    reference = attend(0, 1, KEY_BLOCK)
    first = all(
        torch.equal(attend(0, count, length, batch)[:, :1], reference)
        for count in (*range(1, MAX_ROWS + 1), GRID)
        for length in (KEY_BLOCK, 2 * KEY_BLOCK)
        for batch in (1, 2, 3, 16)
    )
    later = attend(5, 1, KEY_BLOCK)
    return first and all(torch.equal(attend(4, count, KEY_BLOCK)[:, 1:2], later) for count in range(2, MAX_ROWS + 1))


def blocks_agree(
    runner: Runner, prompt: Sequence[int], tokens: Sequence[int], one: Sequence[int], other: Sequence[int]
) -> bool:
    """Do the logits of forced tokens come out bitwise equal in blocks of one and of other sizes?"""
    single = torch.cat([logits for logits, _ in runner.force(prompt, tokens, one)])
    grouped = torch.cat([logits for logits, _ in runner.force(prompt, tokens, other)])
    return torch.equal(single, grouped)
