"""Generations for tests of capture: a plausible one, any field of it replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from capture.records import Generation, new_id, utc_now
from capture.writer import CaptureWriter


def generation(**fields: Any) -> Generation:
    given: dict[str, Any] = {
        "id": new_id(),
        "created_at": utc_now(),
        "status": "finished",
        "finish_reason": "stop",
        "model": "tiny",
        "weights_fingerprint": "a" * 64,
        "tokenizer_fingerprint": "b" * 64,
        "template_fingerprint": "c" * 64,
        "drafter_fingerprint": "d" * 64,
        "build": "torch 2.13.0 cpu fp32",
        "drafter": "mtp",
        "seed": 7,
        "parameters": {"temperature": 0.7},
        "request": {"messages": [{"role": "user", "content": "Hello"}]},
        "response_text": "Hi there",
        "prompt_tokens": [5, 6, 7],
        "completion_tokens": [8, 9],
        "logprobs": [-0.5, -0.25],
        "steps": [(2, 1)],
        "timings": {"prompt_ms": 1.5},
    }
    return Generation(**given | fields)


def write(path: Path, *generations: Generation) -> Path:
    """A capture file holding these generations, written as the server writes them."""
    writer = CaptureWriter(path, synchronous="NORMAL")
    writer.start()
    futures = [writer.submit(g) for g in generations]
    assert writer.close(timeout=30)
    for future in futures:
        future.result(timeout=0)
    return path
