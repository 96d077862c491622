"""Independent oracles: transformers' Qwen3.5 and its MTP block, loaded from a checkpoint directory of ours, and the
gated delta rule as its paper writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel


def trunk(directory: Path) -> Any:
    """transformers' causal language model in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def mtp(directory: Path) -> tuple[Any, Any]:
    """(trunk, MtpModel) with the checkpoint's mtp.* weights; transformers needs its own names for the layer count."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}))
    main = trunk(directory)
    return main, MtpModel.from_pretrained(main).eval()


@torch.no_grad()
def logits(model: Any, tokens: list[int]) -> Tensor:
    """[T, V] of a whole sequence without a cache."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """`count` greedy tokens through transformers' own generate and cache."""
    ids = torch.tensor([prompt])
    # Without a mask, generate would infer one from the pad id and hide prompt tokens that equal it.
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def draft_logits(main: Any, block: Any, tokens: list[int], drafts: list[int]) -> Tensor:
    """[len(drafts) + 1, V]: the MTP block's logits after the committed `tokens`, slot by slot, teacher-fed `drafts`.

    Recomputes every row from scratch: row p = (x_p, H_{p-1}) for committed tokens, then (draft, previous output).
    """
    hidden = main.model(torch.tensor([tokens]), use_cache=False).last_hidden_state  # post-final-norm
    ids, previous = tokens[1:], hidden[:, :-1]
    out = []
    for draft in [*drafts, None]:
        positions = torch.arange(1, 1 + len(ids))[None]
        y = block.forward_layer(0, previous, positions, None, input_ids=torch.tensor([ids]))
        out.append(block._project_to_logits(y[:, -1:])[0, 0].float())
        if draft is not None:
            ids = [*ids, draft]
            previous = torch.cat((previous, y[:, -1:]), dim=1)
    return torch.stack(out)


def recurrent_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k [B, T, H, dk]; v [B, T, H, dv]; g, beta [B, T, H]; state [B, H, dk, dv] → o [B, T, H, dv], new state."""
    S, outputs = state, []
    for t in range(q.shape[1]):
        S = g[:, t, :, None, None].exp() * S
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1), S
