"""Free memory: page cache counts as free, a control group's limit counts where there is one, and none is guessed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from backend import loading
from backend.free_memory import free_bytes
from backend.interface import BackendError
from backend.loading import LocalOptions

CPU = torch.device("cpu")
MIB = 2**20
MEMINFO = "MemTotal: 9000000 kB\nMemFree: 1024 kB\nMemAvailable: 4096000 kB\nHugePages_Total: 0\n"
FREE = 4096000 * 1024


def system(root: Path, files: Mapping[str, Any]) -> Path:
    for name, held in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(held))
    return root


def v2(group: str, limit: object, used: int, cached: int = 0) -> dict[str, Any]:
    place = f"sys/fs/cgroup/{group}".rstrip("/")
    stat = f"anon 7\ninactive_file {cached}\nactive_file 5\n"
    return {f"{place}/memory.max": f"{limit}\n", f"{place}/memory.current": f"{used}\n", f"{place}/memory.stat": stat}


def v1(group: str, limit: object, used: int, cached: int = 0) -> dict[str, Any]:
    place = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    stat = f"inactive_file 1\ntotal_inactive_file {cached}\n"
    files = {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}
    return {f"{place}/{name}": held for name, held in files.items()}


IN_V2, IN_V1 = {"proc/self/cgroup": "0::/a/b\n"}, {"proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/a/b\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, FREE),
        ({**IN_V2, **v2("a/b", "max", MIB)}, FREE),
        ({**IN_V2, **v2("a/b", 10 * MIB, 4 * MIB)}, 6 * MIB),
        ({**IN_V2, **v2("a/b", 10 * MIB, 9 * MIB, cached=5 * MIB)}, 6 * MIB),
        ({**IN_V2, **v2("a/b", "max", 4 * MIB), **v2("a", 10 * MIB, 8 * MIB)}, 2 * MIB),
        ({**IN_V2, **v2("", 10 * MIB, 4 * MIB)}, 6 * MIB),
        ({**IN_V2, **v2("a/b", 4 * MIB, 5 * MIB)}, 0),
        ({**IN_V2, **v2("a/b", 2**40, MIB)}, FREE),
        ({**IN_V2, **v2("other", 4 * MIB, MIB)}, FREE),
        ({**IN_V2, **v2("a/b", "torn", MIB)}, FREE),
        ({**IN_V1, **v1("a/b", 10 * MIB, 9 * MIB, cached=5 * MIB)}, 6 * MIB),
        ({**IN_V1, **v1("a/b", 9223372036854771712, MIB)}, FREE),
        ({**IN_V1, **v1("", 10 * MIB, 4 * MIB)}, 6 * MIB),
    ],
    ids=[
        *("no groups", "no limit", "a limit", "cache in the group", "limit above", "group seen as root", "over it"),
        *("limit above the machine", "another's limit", "no number", "v1", "v1 without limit", "v1 seen as root"),
    ],
)
def test_free_is_what_the_machine_and_every_group_above_leave(tmp_path: Path, files: dict[str, Any], free: int) -> None:
    assert free_bytes(CPU, system(tmp_path, files)) == free


def test_where_proc_tells_nothing_the_system_is_asked_and_none_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = {"SC_AVPHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert free_bytes(CPU, tmp_path) == 40960

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    assert free_bytes(CPU, tmp_path) is None
    monkeypatch.delattr(os, "sysconf")
    assert free_bytes(CPU, tmp_path) is None


def test_this_machine_tells() -> None:
    free = free_bytes(CPU)
    assert free is not None
    assert free > MIB


def test_unknown_free_memory_is_asked_for_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_bytes", lambda device: None)
    options = LocalOptions("tiny", threads=1, drafter="none", max_num_seqs=1)
    with pytest.raises(BackendError, match=r"^this system does not tell [^\n]*--kv-memory[^\n]*$"):
        loading.load(options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of a GPU")
def test_what_torch_keeps_unused_of_a_gpu_is_free() -> None:
    device = torch.device("cuda", 0)
    held = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    before = free_bytes(device)
    del held
    after = free_bytes(device)
    assert before is not None
    assert after is not None
    assert after - before >= 64 * MIB
