"""The checkpoint's own MTP head as drafter, with the trunk's whole output head."""

from __future__ import annotations

from backend.drafters.recursive import RecursiveDrafter
from backend.models.draft_block import NativeBlock
from backend.models.qwen3_5 import Qwen35


def mtp_drafter(model: Qwen35, fingerprint: str) -> RecursiveDrafter:
    """`fingerprint`: of the `mtp.*` tensors. Raises ValueError for a model without them."""
    return RecursiveDrafter(model, NativeBlock(model), "mtp", fingerprint, fingerprint)
