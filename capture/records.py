"""One generation as a value, and as a row of the `generations` table.

Knows the encoding of every column (blobs, JSON, the seed) and nothing of files, models or tokenizers.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Status = Literal["finished", "cancelled", "failed"]
TokenIds = Sequence[int] | NDArray[np.uint32]
Steps = Sequence[tuple[int, int]]

STATUSES: tuple[Status, ...] = get_args(Status)
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


class CaptureError(Exception):
    """Base of everything capture raises on purpose. `str(error)` is one line, fit for a user."""


class RecordError(CaptureError):
    """A generation that no row can hold; names the field and what it should have been."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """One generation, however it ended. Token ids are the record; text is a view of them.

    Sequences may be given as any integers or floats; read back from a file, ids are `uint32` and log-probabilities
    `float32` arrays. `None` for tokens, log-probabilities or seed means "not kept": such a row is never exported.
    """

    id: str  # 1 … 36 ASCII characters; `new_id()` makes one
    created_at: str  # ISO 8601 UTC with microseconds and Z; `utc_now()` makes one
    status: Status
    finish_reason: str | None
    model: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    template_fingerprint: str
    drafter_fingerprint: str
    build: str
    drafter: str
    seed: int | None  # uint64; a negative int64 is taken modulo 2**64
    parameters: Mapping[str, Any]  # effective sampling parameters
    request: Mapping[str, Any]  # the request's body
    response_text: str
    prompt_tokens: TokenIds | None
    completion_tokens: TokenIds | None
    logprobs: Sequence[float] | NDArray[np.float32] | None  # one per completion token, natural logarithm; or empty
    steps: Steps  # (drafted, accepted) of each verify step, each 0 … 255
    timings: Mapping[str, Any]
    reasoning: str = ""
    tool_calls: Sequence[Any] = ()
    client: str | None = None
    error: str | None = None
    split_key_length: int = 0  # prompt tokens up to the end of the first user turn; 0 = the whole prompt

    @property
    def redacted(self) -> int:
        """How many pieces of text were redacted in it. Such a row cannot be replayed and trains nothing."""
        return int(self.parameters.get("redacted", 0))


# Column names are field names. Small columns stand first, so that lists and counts need not walk the large ones.
COLUMNS: Mapping[str, type] = {
    "id": str,
    "created_at": str,
    "status": str,
    "finish_reason": str,
    "model": str,
    "weights_fingerprint": str,
    "tokenizer_fingerprint": str,
    "template_fingerprint": str,
    "drafter_fingerprint": str,
    "build": str,
    "drafter": str,
    "seed": int,
    "client": str,
    "error": str,
    "split_key_length": int,
    "parameters": str,
    "timings": str,
    "steps": bytes,
    "completion_tokens": bytes,
    "logprobs": bytes,
    "prompt_tokens": bytes,
    "response_text": str,
    "reasoning": str,
    "tool_calls": str,
    "request": str,
}
NULLABLE = {"finish_reason", "seed", "client", "error", "prompt_tokens", "completion_tokens", "logprobs"}
JSON_FIELDS = ("parameters", "timings", "tool_calls", "request")


@dataclass
class _IdClock:
    """The last 90 bits issued: 48 of milliseconds over a 42-bit counter."""

    last: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tick(self) -> int:
        # A new millisecond starts its counter at random with the top bit clear; within one, or when the wall clock
        # steps back, the counter goes on, and an overflow borrows the next millisecond.
        fresh = (time.time_ns() // 1_000_000) << 42 | secrets.randbits(41)
        with self.lock:
            self.last = fresh if fresh >> 42 > self.last >> 42 else self.last + 1
            return self.last


_ids = _IdClock()


def new_id() -> str:
    """A UUIDv7 (RFC 9562) in canonical form; each one of this process sorts after the one before it."""
    stamp = _ids.tick()
    low = (stamp & (1 << 30) - 1) << 32 | secrets.randbits(32)
    digits = f"{(stamp >> 42) << 80 | 7 << 76 | (stamp >> 30 & 0xFFF) << 64 | 2 << 62 | low:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def utc_now() -> str:
    """The current time as `created_at` wants it."""
    return timestamp(datetime.now(UTC))


def timestamp(time: datetime) -> str:
    """A time in UTC as `created_at` wants it."""
    return time.isoformat(timespec="microseconds").replace("+00:00", "Z")


def to_row(generation: Generation) -> dict[str, object]:
    """The row of a generation, in the order of `COLUMNS`. Raises RecordError."""
    try:
        return _encode(generation)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"generation {generation.id}: {error}") from error


def from_row(row: Mapping[str, Any]) -> Generation:
    """The generation of a row read with every column of `COLUMNS`. Raises RecordError where it holds no generation."""
    try:
        return _decode(row)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"generation {row['id']} cannot be read: {error}") from error


def _decode(row: Mapping[str, Any]) -> Generation:
    values = {f.name: row[f.name] for f in fields(Generation)}
    for name in JSON_FIELDS:
        values[name] = json.loads(values[name])
        kind, told = (list, "array") if name == "tool_calls" else (dict, "object")
        if not isinstance(values[name], kind):
            raise ValueError(f"{name} must be a JSON {told}")
    for name, dtype in (("prompt_tokens", "<u4"), ("completion_tokens", "<u4"), ("logprobs", "<f4")):
        if values[name] is not None:
            values[name] = np.frombuffer(values[name], dtype=dtype)
    steps = values["steps"]
    values["steps"] = list(zip(steps[::2], steps[1::2], strict=True))
    if values["seed"] is not None:
        values["seed"] %= 1 << 64
    return Generation(**values)


def to_json(generation: Generation) -> dict[str, Any]:
    """Every field, JSON-ready: tokens as integers; a log-probability that is not finite, which JSON lacks, as null."""
    values = {f.name: getattr(generation, f.name) for f in fields(Generation)}
    for name in ("prompt_tokens", "completion_tokens"):
        if values[name] is not None:
            values[name] = [int(token) for token in values[name]]
    if values["logprobs"] is not None:
        values["logprobs"] = [float(value) if np.isfinite(value) else None for value in values["logprobs"]]
    return values


def seed_to_int64(generation: Generation) -> int | None:
    """The seed as SQLite can hold it: the signed integer with the same 64 bits (2**64 - 1 becomes -1)."""
    seed = generation.seed
    if seed is None:
        return None
    _require(-(1 << 63) <= seed < 1 << 64, generation, "seed", "an integer of 64 bits")
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _encode(g: Generation) -> dict[str, object]:
    _require(g.id.isascii() and 0 < len(g.id) <= 36, g, "id", "1 to 36 ASCII characters")
    _require(TIMESTAMP.fullmatch(g.created_at) is not None, g, "created_at", "like 2025-01-31T12:00:00.000000Z")
    _require(g.status in STATUSES, g, "status", "one of " + ", ".join(STATUSES))
    row: dict[str, object] = {name: getattr(g, name) for name in COLUMNS}
    for name, column_type in COLUMNS.items():
        if name in JSON_FIELDS:
            row[name] = _json_text(g, name)
        elif column_type is str and row[name] is not None:
            row[name] = storable(str(row[name]))
    prompt, completion = _token_blob(g, "prompt_tokens"), _token_blob(g, "completion_tokens")
    row |= {"prompt_tokens": prompt, "completion_tokens": completion}
    row |= {"logprobs": _logprob_blob(g, completion), "steps": _step_blob(g), "seed": seed_to_int64(g)}
    length = 0 if prompt is None else len(prompt) // 4
    _require(0 <= g.split_key_length <= length or prompt is None, g, "split_key_length", f"0 to {length}")
    return row


def storable(text: str) -> str:
    """Text as the file holds it: lone surrogates, which are not UTF-8, as \\udXXX (inside JSON, the same text)."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _require(condition: bool, generation: Generation, name: str, expected: str) -> None:
    if not condition:
        raise RecordError(f"generation {generation.id}: {name} must be {expected}")


def _json_text(generation: Generation, name: str) -> str:
    value = getattr(generation, name)
    value = list(value) if name == "tool_calls" else value
    try:
        return storable(_compact(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"generation {generation.id}: {name} must be JSON ({error})") from error


def _compact(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        # JSON has no NaN and no infinity: such a figure becomes null rather than costing the row.
        finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(finite, ensure_ascii=False, separators=(",", ":"))


def _token_blob(generation: Generation, name: str) -> bytes | None:
    tokens = getattr(generation, name)
    if tokens is None:
        return None
    ids = np.asarray(tokens)
    # Below 2**31: the export's shards hold int32.
    fits = ids.ndim == 1 and (ids.size == 0 or (ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < 1 << 31))
    _require(fits, generation, name, "a flat sequence of token ids, each 0 to 2**31 - 1")
    return ids.astype("<u4").tobytes()


def _logprob_blob(generation: Generation, completion: bytes | None) -> bytes | None:
    if generation.logprobs is None:
        return None
    values = np.asarray(generation.logprobs, dtype="<f4")
    length = 0 if completion is None else len(completion) // 4
    _require(values.ndim == 1 and values.size in (0, length), generation, "logprobs", f"{length} numbers, or none")
    return values.tobytes()


def _step_blob(generation: Generation) -> bytes:
    """Two bytes a step: drafted, accepted."""
    steps = np.asarray(generation.steps)
    if steps.size == 0:
        return b""
    fits = steps.ndim == 2 and steps.shape[1] == 2 and steps.dtype.kind in "iu"
    _require(fits, generation, "steps", "pairs of integers (drafted, accepted)")
    drafted, accepted = steps[:, 0], steps[:, 1]
    ordered = bool(np.all((accepted >= 0) & (accepted <= drafted) & (drafted <= 255)))
    _require(ordered, generation, "steps", "pairs with 0 ≤ accepted ≤ drafted ≤ 255")
    return steps.astype(np.uint8).tobytes()
