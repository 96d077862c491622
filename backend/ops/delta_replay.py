"""The gated delta rule in the verify form: rows are answered from a base state and records of the rows since.

Unrolling the recurrence of `delta_rule` from the state S_b after row b - 1, with G the running sum of g:

    u_i = beta_i (v_i - e^(G_i - G_(b-1)) S_bᵀ k_i - Σ_{b ≤ j < i} e^(G_i - G_j) (k_j · k_i) u_j)
    o_i = e^(G_i - G_(b-1)) S_bᵀ q_i + Σ_{b ≤ j ≤ i} e^(G_i - G_j) (k_j · q_i) u_j

(Yang et al., arXiv 2412.06464, equations of the chunked form, one row at a time.) A step reads S once however many rows
it verifies, and writes it only when the base moves; rejected rows are forgotten by not counting them. Which base a row
has, and which record stands where in the ring, depend on its index alone: so do its bits (law L1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.ops.elementwise import exp

MAX_ROWS = 9  # of one sequence in one step: a token and eight drafts
RING = 32  # records kept; a whole number of vectors
CHUNK = (RING - MAX_ROWS - 1) // 2  # rows folded at a time: a block, the chunk before it and the base's own G fit in
_ROWS = 4  # matrix products of two or three rows come out of another kernel; from four on, multiples agree


def base_of(index: int) -> int:
    """The base of row `index` (0 = first generated): every row has between CHUNK and 2·CHUNK - 1 records, or all."""
    return CHUNK * max(0, index // CHUNK - 1)


@dataclass(frozen=True)
class Records:
    """One layer's memory of B sequences; rows of a ring are addressed by row index modulo RING."""

    S: Tensor  # [B, H, dk, dv] float32, the state after row base - 1
    k: Tensor  # [B, H, RING, dk] float32
    u: Tensor  # [B, H, RING, dv] float32
    G: Tensor  # [B, H, RING] float64, running sum of g since the first generated row


@dataclass(frozen=True)
class Window:
    """Where the rows of a step stand, for all layers alike. R rows of each sequence, padded to R' = 4, 8 or 12."""

    rows: Tensor  # int64 [B · H · R], records to write in the flattened ring
    row: tuple[Tensor, ...]  # R times int64 [B · H]: those of one row
    previous: Tensor  # int64 [B · H], the record before the first row
    reach: Tensor  # float64 [B, 1, R', RING]: 0 for records a row may use (its own and its base's too), else -inf
    counted: Tensor  # float32 [B, 1, 2, R', RING]: 1 for records the row's o (first) and u (second) sum over
    base: Tensor  # int64 [B, H, R', 1], the record before the row's base
    padded: int

    @classmethod
    def at(cls, starts: Sequence[int], rows: int, heads: int, device: torch.device) -> Window:
        """For sequences whose next rows have indices starts[i] … starts[i] + rows - 1."""
        alike = tuple(_alike(start) for start in starts)
        one = len(alike) == 1  # of these there are few, and every step of a lone sequence needs one
        return _window_of_one(alike, rows, heads, device) if one else cls.of(alike, rows, heads, device)

    @classmethod
    def of(cls, starts: tuple[int, ...], rows: int, heads: int, device: torch.device) -> Window:
        """The same for starts less than the period."""
        table = _table(rows, device)
        first = torch.tensor(starts, device=device)
        owner = torch.arange(len(starts) * heads, device=device).view(-1, heads, 1) * RING  # [B, H, 1]
        written = owner + table.ring[first][:, None]  # [B, H, 1 + R]: the record before the first row, then theirs
        return cls(
            rows=written[..., 1:].reshape(-1),
            row=tuple(column.reshape(-1) for column in written[..., 1:].unbind(-1)),
            previous=written[..., 0].reshape(-1),
            reach=table.reach[first],
            counted=table.counted[first],
            base=table.base[first].expand(-1, heads, -1, -1),
            padded=table.base.shape[2],
        )


_PERIOD = CHUNK * RING  # of everything a window says, once there are two chunks before a row (the two have no factor)


def _alike(index: int) -> int:
    """The least index whose window is the same."""
    return index if index < 2 * CHUNK else 2 * CHUNK + (index - 2 * CHUNK) % _PERIOD


@lru_cache(maxsize=512)  # those of one block size and some: of all sizes they would be tens of MiB
def _window_of_one(starts: tuple[int, ...], rows: int, heads: int, device: torch.device) -> Window:
    return Window.of(starts, rows, heads, device)


@dataclass(frozen=True)
class _Table:
    """The windows of all N first rows that differ, for blocks of R rows."""

    ring: Tensor  # int64 [N, 1 + R]
    reach: Tensor  # [N, 1, R', RING], as the rest in Window
    counted: Tensor  # [N, 1, 2, R', RING]
    base: Tensor  # [N, 1, R', 1]


def _standing(
    index: NDArray[np.int64], base: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Of each place of the ring, [..., RING]: the last row up to `index`; is it since `base`; or base - 1."""
    ring = np.arange(RING)
    latest = index[..., None] - (index[..., None] - ring) % RING
    since = latest >= base[..., None]
    return latest, since, since | (ring == ((base - 1) % RING)[..., None])


@cache
def _table(rows: int, device: torch.device) -> _Table:
    padding = -rows % _ROWS
    index = np.arange(2 * CHUNK + _PERIOD)[:, None] + np.arange(rows)  # [N, R]
    base = CHUNK * np.maximum(0, index // CHUNK - 1)
    latest, summed, reach = _standing(index, base)  # [N, R, RING] each
    earlier = summed & (latest < index[..., None])

    def tensor(x: NDArray[np.generic], axis: int) -> Tensor:
        """On the device, its rows padded."""
        pad = [(0, padding if i == axis else 0) for i in range(x.ndim)]
        return torch.from_numpy(np.pad(x, pad)).to(device)

    return _Table(
        ring=torch.from_numpy(np.concatenate((index[:, :1] - 1, index), axis=1) % RING).to(device),
        reach=torch.where(tensor(reach[:, None], 2), 0.0, -torch.inf).double(),
        counted=tensor(np.stack((summed, earlier), axis=1)[:, None].astype(np.float32), 3),
        base=tensor(((base - 1) % RING)[:, None, :, None], 2),
    )


@dataclass(frozen=True)
class Ahead:
    """Rows `first` … of sequence `owner` whose base is one chunk further than S, and that base's state."""

    owner: int
    first: int
    S: Tensor  # [H, dk, dv]


def replayed_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    records: Records,
    window: Window,
    ahead: Sequence[Ahead] = (),
) -> Tensor:
    """q, k [B, R, H, dk]; v [B, R, H, dv]; g, beta [B, R, H], float32 → o [B, R, H, dv]; R ≤ MAX_ROWS.

    Writes the rows' k, u and G into the records (all contiguous); S is read only.
    """
    B, R, H, dk = k.shape
    dv, padding = v.shape[-1], window.padded - R
    G, u_ring = records.G, records.u.view(B * H, RING, dv)
    kt = k.transpose(1, 2)  # [B, H, R, dk]
    records.k.view(-1, dk).index_copy_(0, window.rows, kt.reshape(-1, dk))
    total = _running_sum(G.view(-1).index_select(0, window.previous).view(B, H, 1), g.transpose(1, 2))  # [B, H, R]
    G.view(-1).index_copy_(0, window.rows, total.reshape(-1))

    x = torch.stack((q.transpose(1, 2), kt), dim=2)  # [B, H, 2, R, dk]
    if padding:
        x = torch.nn.functional.pad(x, (0, 0, 0, padding))
        total = torch.nn.functional.pad(total, (0, padding))
    x = x.view(B * H, 2 * window.padded, dk)
    keyed = torch.bmm(x, records.k.view(B * H, RING, dk).transpose(1, 2)).view(B, H, 2, window.padded, RING)
    stated = torch.bmm(x, records.S.view(B * H, dk, dv)).view(B, H, 2, window.padded, dv)
    for rest in ahead:
        later = torch.bmm(x.view(B, H, -1, dk)[rest.owner], rest.S).view(H, 2, window.padded, dv)
        stated[rest.owner, :, :, rest.first : R] = later[:, :, rest.first : R]

    decay = exp((total[..., None] - G[:, :, None]).add_(window.reach).float())  # [B, H, R', RING]
    weights = keyed.mul_(decay[:, :, None]).mul_(window.counted)
    stated = stated.mul_(decay.gather(3, window.base)[:, :, None])
    b = beta.transpose(1, 2)[..., None]  # [B, H, R, 1]
    fresh = b * (v.transpose(1, 2) - stated[:, :, 1, :R])  # [B, H, R, dv]
    onto = b * weights[:, :, 1, :R]  # [B, H, R, RING]
    for t in range(R):  # a row's u needs those before it
        u = torch.baddbmm(fresh[:, :, t].reshape(B * H, 1, dv), onto[:, :, t].reshape(B * H, 1, RING), u_ring, alpha=-1)
        records.u.view(-1, dv).index_copy_(0, window.row[t], u.view(B * H, dv))
    o = torch.baddbmm(stated[:, :, 0].reshape(B * H, -1, dv), weights[:, :, 0].reshape(B * H, -1, RING), u_ring)
    return o.view(B, H, window.padded, dv)[:, :, :R].transpose(1, 2)


def _running_sum(previous: Tensor, g: Tensor) -> Tensor:
    """previous float64 [B, H, 1], g float32 [B, H, R] → G of each row [B, H, R], added strictly one after the other."""
    sums = [previous]
    for row in g.split(1, dim=-1):  # a scan's order would be the kernel's choice
        sums.append(sums[-1] + row)
    return torch.cat(sums[1:], dim=-1)


def folded(records: Records, base: int) -> Tensor:
    """The state one chunk after `base`, [B, H, dk, dv]: rows base … base + CHUNK - 1 must have been recorded."""
    B, H, dk, dv = records.S.shape
    last, device = base + CHUNK - 1, records.G.device
    _, summed, usable = _standing(np.asarray(last), np.asarray(base))
    reach = torch.from_numpy(np.where(usable, 0.0, -np.inf)).to(device)
    decay = exp((records.G[..., last % RING, None] - records.G + reach).float())  # [B, H, RING]
    before = decay[..., (base - 1) % RING, None, None]
    counted = torch.from_numpy(summed.astype(np.float32)).to(device)
    fresh = records.u * (decay * counted)[..., None]  # [B, H, RING, dv]
    S = (records.S * before).reshape(B * H, dk, dv)
    k = records.k.reshape(B * H, RING, dk).transpose(1, 2)
    return torch.baddbmm(S, k, fresh.view(B * H, RING, dv)).view(B, H, dk, dv)
