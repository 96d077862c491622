"""Arrays of uncompressed npz files, left where they lie: rows are a view of a memory map, made anew when asked for.

What nobody looks at takes no memory, what was looked at is let go with its tensor, and no file is kept open. Knows
files and arrays, and nothing of what stands in them.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from training.errors import TrainingError

_LOCAL_HEADER = 30  # bytes of a member's header in the archive, before its name; the lengths of both parts end it
_DTYPES = {"<u2": torch.uint16, "<f2": torch.float16, "<f4": torch.float32}


@dataclass(frozen=True)
class Stored:
    """An array [N, …] of an npz file, from byte `offset` on. `stamp`: of the file when it was found."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    stamp: tuple[int, ...]

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start … stop - 1, on the CPU: a private map, written to without the file changing, and a copy only where
        the array begins at no multiple of its items' size. Raises TrainingError where the file has changed."""
        if _stamp(self.path) != self.stamp:
            raise TrainingError(f"{self.path} has changed since it was checked: begin again")
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        first, end = self.offset + start * row, self.offset + stop * row
        if first >= end:
            return torch.empty(max(stop - start, 0), *self.shape[1:], dtype=self.dtype)
        found = torch.from_file(str(self.path), shared=False, size=end, dtype=torch.uint8)[first:end]
        if first % self.dtype.itemsize:
            found = found.clone()
        return found.view(self.dtype).view(stop - start, *self.shape[1:])


def find(path: Path, *names: str) -> dict[str, Stored]:
    """Where arrays lie in an npz file; those it does not have are left out.

    Raises OSError, ValueError, BadZipFile and struct.error for a file that is none, or stores them otherwise.
    """
    stamp = _stamp(path)
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        return {name: _found(path, file, members[name], stamp) for name in names if name in members}


def _found(path: Path, file: IO[bytes], member: zipfile.ZipInfo, stamp: tuple[int, ...]) -> Stored:
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{member.filename} is compressed")
    file.seek(member.header_offset)
    name, extra = struct.unpack("<HH", file.read(_LOCAL_HEADER)[-4:])
    file.seek(name + extra, os.SEEK_CUR)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = read(file)
    if by_columns or dtype.str not in _DTYPES or math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError(f"{member.filename} is stored as {dtype.str} {shape}")
    return Stored(path, file.tell(), shape, _DTYPES[dtype.str], stamp)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        about = path.stat()
    except OSError as error:
        raise TrainingError(f"cannot read {path}: {error.strerror or error}") from error
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
