"""Tokens from many rows of logits at once, in static shapes and without reading a value (DESIGN §5).

The same choice as `choose_on_host`, for where a host read or a shape that depends on data would cost more than the
arithmetic. Sums are of integers and maxima are exact, so that a row's choice is its own in any company.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from backend.engine.choose_on_host import WEIGHT_ONE
from backend.engine.noise import device_noise, device_vocabulary_noise, split_seed
from backend.engine.parameters import SamplingParams

WIDTHS = (32, 128, 1024)  # candidates looked at where top_k allows no more
GREEDY = 0
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class RowParams:
    """Parameters of M rows, each [M, 1] on the device; top_p is float64, the temperature and floor float32, else int64.

    `floor` is log min_p, -inf where off; `top_k` the vocabulary's size where off.
    """

    temperature: Tensor
    floor: Tensor
    top_p: Tensor
    top_k: Tensor
    key_low: Tensor
    key_high: Tensor
    position: Tensor
    choice: Tensor

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], positions: Sequence[int], vocab: int, device: torch.device
    ) -> RowParams:
        """One row for each sequence; two transfers."""
        real = [(p.temperature or 1.0, math.log(p.min_p) if p.min_p > 0 else -math.inf, p.top_p) for p in params]
        whole = [
            (p.top_k if 0 < p.top_k < vocab else vocab, *split_seed(p.seed), position, p.choice)
            for p, position in zip(params, positions, strict=True)
        ]
        temperature, floor, top_p = _columns(torch.tensor(real, dtype=torch.float64), device)
        return cls(temperature.float(), floor.float(), top_p, *_columns(torch.tensor(whole), device))

    def block(self, rows: int, first: int) -> RowParams:
        """`rows` rows of each, of consecutive positions from `first` on."""
        repeated = RowParams(*(getattr(self, field.name).repeat_interleave(rows, 0) for field in fields(self)))
        offsets = torch.arange(first, first + rows, device=self.position.device).repeat(len(self.position))
        return replace(repeated, position=repeated.position + offsets[:, None])


class DeviceChooser:
    """Chooses for a batch of sequences whose logits are on a device.

    Sequences are grouped by what their parameters, never their logits, ask for; a batch of one group is chosen by one
    sequence of kernels, without index or copy.
    """

    def __init__(
        self, params: Sequence[SamplingParams], positions: Sequence[int], vocab: int, device: torch.device
    ) -> None:
        self._vocab = vocab
        members: dict[int | None, list[int]] = {}
        for index, p in enumerate(params):
            members.setdefault(_width(p, vocab), []).append(index)
        self._groups = [
            _Group.of(width, [params[i] for i in indices], [positions[i] for i in indices], vocab, device)
            for width, indices in members.items()
        ]
        alone = len(members) == 1
        self._where: list[Tensor | None] = [
            None if alone else _to(torch.tensor(indices), device) for indices in members.values()
        ]

    def __call__(self, logits: Tensor, first: int = 0) -> Tensor:
        """logits float32 [B, R, ≥ V], row r choosing the token at positions + first + r → int64 [B, R]."""
        logits = logits[..., : self._vocab]
        rows = logits.shape[1]
        out = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
        for group, where in zip(self._groups, self._where, strict=True):
            part = (logits if where is None else logits[where]).flatten(0, 1)  # [M, V]
            chosen = group.choose(part, rows, first).view(-1, rows)
            if where is None:
                return chosen
            out[where] = chosen
        return out


@dataclass(frozen=True)
class _Group:
    """Sequences chosen for alike. `width`: candidates that suffice, None where only the whole vocabulary does."""

    width: int | None
    params: RowParams | None  # greedy sequences have no use for any
    cuts: bool

    @classmethod
    def of(
        cls,
        width: int | None,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        vocab: int,
        device: torch.device,
    ) -> _Group:
        cuts = any(p.top_p < 1 or 0 < p.top_k < vocab for p in params)
        return cls(width, None if width == GREEDY else RowParams.of(params, positions, vocab, device), cuts)

    def choose(self, logits: Tensor, rows: int, first: int) -> Tensor:
        if self.params is None:
            return logits.argmax(-1)
        params = self.params.block(rows, first)
        if self.width is None:
            return choose_among_all(logits, params, self.cuts)
        return choose_among_leading(logits, params, self.width)


def choose_among_leading(logits: Tensor, rows: RowParams, width: int) -> Tensor:
    """Where top_k ≤ width: logits float32 [M, V] → int64 [M]."""
    vocab = logits.shape[-1]
    z = logits / rows.temperature
    ids = leading(z, min(width, vocab))  # [M, W]
    z = z.gather(-1, ids)
    keep = (torch.arange(ids.shape[-1], device=z.device) < rows.top_k) & (z >= z[:, :1] + rows.floor)
    weight = _weights(z, z[:, :1]).where(keep, 0)
    before = weight.cumsum(-1) - weight
    keep &= (before < _share(rows.top_p, weight)) | (rows.top_p >= 1)
    scores = (z + device_noise(rows, ids)).where(keep, -torch.inf)
    best_ids = ids.where(scores == scores.amax(-1, keepdim=True), vocab)
    return best_ids.amin(-1).clamp(max=vocab - 1)  # where logits are not numbers, none is best


def choose_among_all(logits: Tensor, rows: RowParams, cuts: bool) -> Tensor:
    """Whatever the parameters; `cuts`: some row has a top_k or top_p. logits float32 [M, V] → int64 [M]."""
    z = logits / rows.temperature
    peak = z.amax(-1, keepdim=True)
    keep = z >= peak + rows.floor
    if cuts:
        order = _ordered(z)
        keep &= _prefix(order, keep.long(), rows.top_k)
        weight = _weights(z, peak).where(keep, 0)
        keep &= _prefix(order, weight, _share(rows.top_p, weight)) | (rows.top_p >= 1)
    noise = device_vocabulary_noise(rows, z.shape[-1])
    return (z + noise).where(keep, -torch.inf).argmax(-1)


def leading(z: Tensor, count: int) -> Tensor:
    """The first `count` ids in the order (z descending, id ascending): float32 [..., V] → int64 [..., count]."""
    # One integer holds value and id, so that no two are equal and topk breaks no tie by chance.
    backwards = _LOW - torch.arange(z.shape[-1], device=z.device)
    best = ((_ordered(z) << 32) | backwards).topk(count).values
    return _LOW - (best & _LOW)


def _width(params: SamplingParams, vocab: int) -> int | None:
    if params.greedy:
        return GREEDY
    return next((width for width in WIDTHS if 0 < params.top_k <= min(width, vocab - 1)), None)


def _columns(table: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """[M, C] → C tensors [M, 1]."""
    return tuple(_to(table, device)[..., None].unbind(1))


def _to(table: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)


def _ordered(z: Tensor) -> Tensor:
    """int64 in the order of float32 z, equal where z is."""
    bits = (z + 0.0).view(torch.int32)  # no negative zero
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _weights(z: Tensor, peak: Tensor) -> Tensor:
    return ((z - peak).exp() * WEIGHT_ONE).long()


def _share(top_p: Tensor, weight: Tensor) -> Tensor:
    return (top_p * weight.sum(-1, keepdim=True).double()).ceil().long().clamp(min=1)


def _prefix(order: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Mask of the smallest prefix, by (order descending, id ascending), whose weights reach the target [M, 1].

    Halves the range of values 32 times rather than sort: every pass is one masked sum of integers.
    """
    low = torch.full_like(target, -(2**31))
    high = torch.full_like(target, 2**31 - 1)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        reached = weight.where(order >= middle, 0).sum(-1, keepdim=True) >= target
        low, high = middle.where(reached, low), high.where(reached, middle - 1)
    above, tied = order > low, order == low
    ties = weight.where(tied, 0)
    before = weight.where(above, 0).sum(-1, keepdim=True) + ties.cumsum(-1) - ties
    return above | (tied & (before < target))
