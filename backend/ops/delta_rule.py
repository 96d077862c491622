"""The gated delta rule (Yang et al., arXiv 2412.06464) by chunks: the prefill and training form; all in float32.

Per value head with state S [dk, dv], token by token:
    S ← e^g S;   u = beta (v - Sᵀ k);   S ← S + k uᵀ;   o = Sᵀ q
Here the tokens of a chunk are solved together; `delta_replay` computes the same for generated tokens (the verify form).
The forms agree to rounding, not bitwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """q, k [B, T, H, dk]; v [B, T, H, dv]; g, beta [B, T, H]; state [B, H, dk, dv] → o [B, T, H, dv], new state.

    T is zero-padded to whole chunks inside, which leaves the state as it is; `chunk` is a power of two.
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
