"""Weights fingerprints (law L4): sha256 over sorted (name, dtype, shape, sha256 of the bytes).

Tensor hashes are cached by (path, size, mtime) so that a restart need not read 19 GB twice.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

TensorHash = str  # "dtype shape sha256"
_ENTRIES = TypeAdapter(dict[str, dict[str, TensorHash]])


def hash_tensor(tensor: Tensor) -> TensorHash:
    """dtype, shape and sha256 of a host tensor's bytes, as one string."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(flat.numpy().data).hexdigest()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {digest}"


def combine(hashes: Mapping[str, TensorHash]) -> str:
    """One hex digest over sorted names and tensor hashes."""
    text = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(text.encode()).hexdigest()


def hash_ids(ids: Tensor) -> str:
    """sha256 over ids as little-endian int32: vocabulary maps are compared by it, never by size."""
    return hashlib.sha256(ids.detach().cpu().numpy().astype("<i4").tobytes()).hexdigest()


class HashCache:
    """A JSON file under the user's cache directory; a cache that cannot be read or written is only slower."""

    def __init__(self, path: Path, entries: dict[str, dict[str, TensorHash]]) -> None:
        self._path = path
        self._entries = entries
        self._dirty = False

    @classmethod
    def open(cls) -> HashCache:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        path = root / "draftloop" / "tensor-hashes.json"
        try:
            return cls(path, _ENTRIES.validate_json(path.read_bytes(), strict=True))
        except (OSError, ValueError):
            return cls(path, {})

    @staticmethod
    def key(file: Path) -> str:
        """What identifies the file's present content. Take it before reading: the file may change meanwhile."""
        stat = file.stat()
        return f"{file.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"

    def get(self, key: str) -> dict[str, TensorHash]:
        """Hashes by raw tensor name, empty unless the file is unchanged since they were put."""
        return self._entries.get(key, {})

    def put(self, key: str, hashes: dict[str, TensorHash]) -> None:
        if self._entries.get(key) != hashes:
            file = key.split("\n")[0]
            self._entries = {k: v for k, v in self._entries.items() if k.split("\n")[0] != file}
            self._entries[key] = hashes
            self._dirty = True

    def save(self) -> None:
        if not self._dirty:
            return
        temporary = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self._entries), encoding="utf-8")
            temporary.replace(self._path)
        except OSError:
            return  # a read-only home costs a re-hash at the next start, nothing else
