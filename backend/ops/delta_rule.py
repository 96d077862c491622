"""The gated delta rule (Yang et al., arXiv 2412.06464) in its two forms; all arithmetic in float32.

Per value head with state S [dk, dv], token by token:
    S ← e^g S;   u = beta (v - Sᵀ k);   S ← S + k uᵀ;   o = Sᵀ q
`recurrent` is that loop (the verify form); `chunked` is the same function with the tokens of a chunk solved together
(the prefill and training form). They agree to rounding, not bitwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.ops.elementwise import exp


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, dk]; v [B, T, H, dv]; g, beta [B, T, H]; state [B, H, dk, dv] → o [B, T, H, dv], new state.

    Row t is computed by operations whose shapes do not depend on T, so it is bitwise the same in any block.
    `state` is not modified. Zero rows (k = v = g = beta = 0) leave the state as it is.
    """
    B, T, H, dk = k.shape
    dv = v.shape[-1]
    S = state.reshape(B * H, dk, dv)
    decay = exp(g)
    outputs = []
    for t in range(T):
        qt = q[:, t].reshape(B * H, 1, dk)
        kt = k[:, t].reshape(B * H, 1, dk)
        vt = v[:, t].reshape(B * H, 1, dv)
        S = S * decay[:, t].reshape(B * H, 1, 1)
        u = beta[:, t].reshape(B * H, 1, 1) * (vt - torch.bmm(kt, S))  # [BH, 1, dv]
        S = S + kt.transpose(1, 2) * u
        outputs.append(torch.bmm(qt, S))  # [BH, 1, dv]
    o = torch.cat(outputs, dim=1) if outputs else v.new_zeros(B * H, 0, dv)
    return o.reshape(B, H, T, dv).transpose(1, 2), S.reshape(B, H, dk, dv)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)⁻¹ for strictly lower triangular a [..., C, C], C a power of two, by doubling the block size.

    [[P, 0], [L, Q]]⁻¹ = [[P⁻¹, 0], [-Q⁻¹ L P⁻¹, Q⁻¹]]. As stable as forward substitution and made of matrix products
    only. (The product Π(I + (-a)^(2^i)) is not stable: repeated keys make the powers grow like binomials.)
    """
    C = a.shape[-1]
    lead = a.shape[:-2]
    inverse = a.new_ones(*lead, C, 1, 1)  # one block per row
    size = 1
    while size < C:
        pairs = C // (2 * size)
        blocks = a.reshape(*lead, pairs, 2 * size, pairs, 2 * size).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(lower @ blocks[..., size:, :size] @ upper)
        inverse = torch.cat(
            (
                torch.cat((upper, torch.zeros_like(upper)), dim=-1),
                torch.cat((corner, lower), dim=-1),
            ),
            dim=-2,
        )
        size *= 2
    return inverse[..., 0, :, :]


def chunked_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Shapes as `recurrent_delta_rule`; T is zero-padded to whole chunks inside; `chunk` is a power of two.

    Chunk borders are counted from the first row given, so callers that need an absolute grid start on it.
    """
    B, T = k.shape[:2]
    padding = -T % chunk
    n = (T + padding) // chunk

    def chunks(x: Tensor) -> Tensor:  # [B, T, H, ...] → [B, H, n, chunk, ...]
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, padding))
        return x.reshape(B, n, chunk, *x.shape[2:]).movedim(3, 1)

    q, k, v, g, beta = chunks(q), chunks(k), chunks(v), chunks(g), chunks(beta)
    G = g.cumsum(-1)  # [B, H, n, C]
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    D = (G[..., :, None] - G[..., None, :]).masked_fill(~lower, float("-inf")).exp()  # [B, H, n, C, C]
    k_beta = k * beta[..., None]
    A = ((k_beta @ k.transpose(-1, -2)) * D).tril(-1)
    inverse = unit_lower_inverse(A)
    U = inverse @ (v * beta[..., None])  # [B, H, n, C, dv]
    W = inverse @ (k_beta * G.exp()[..., None])  # [B, H, n, C, dk]
    scores = (q @ k.transpose(-1, -2)) * D
    q_decayed = q * G.exp()[..., None]
    k_rest = k * (G[..., -1:] - G).exp()[..., None]
    total = G[..., -1].exp()[..., None, None]  # [B, H, n, 1, 1]

    S = state
    outputs = []
    for i in range(n):
        fresh = U[:, :, i] - W[:, :, i] @ S
        outputs.append(q_decayed[:, :, i] @ S + scores[:, :, i] @ fresh)
        S = S * total[:, :, i] + k_rest[:, :, i].transpose(-1, -2) @ fresh
    o = torch.stack(outputs, dim=2).flatten(2, 3)  # [B, H, n·C, dv]
    return o.transpose(1, 2)[:, :T], S
