"""How much memory could be had now: of a GPU, or of the machine and the control groups that this process runs in.

Knows what the system tells, and not what the memory is for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import torch

# By version: where the hierarchy is mounted, its limit, its use, and of its statistics what it would give back first.
_V2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
_V1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Bytes, page cache that would give way included; None where the system does not tell. `root`: of /proc and /sys.

    The least of the machine's MemAvailable and of what every control group above this process leaves: its limit less
    its working set, as Kubernetes reckons it. Without /proc the pages that sysconf calls available. Of a GPU: what its
    driver has, and what torch keeps for itself unused.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    machine = _machine(root)
    return None if machine is None else max(min([machine, *_groups(root)]), 0)


def _machine(root: Path) -> int | None:
    told = _fields(root / "proc/meminfo")
    if "MemAvailable:" in told:
        return told["MemAvailable:"] * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no such function, or name
        return None


def _groups(root: Path) -> Iterator[int]:
    """What each limit leaves. A container may see its own group as the root, whatever path it is told: so every path
    above is looked at, and the ones that are not there say nothing."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if hierarchy != "0" and "memory" not in controllers.split(","):
            continue
        mount, limit, use, cache = _V2 if hierarchy == "0" else _V1
        below = PurePosixPath(group.lstrip("/"))
        for place in (root / mount / one for one in (below, *below.parents)):
            most, used = _text(place / limit).strip(), _text(place / use).strip()
            if most.isdecimal() and used.isdecimal():  # "max" is none
                yield int(most) - (int(used) - min(_fields(place / "memory.stat").get(cache, 0), int(used)))


def _fields(path: Path) -> Mapping[str, int]:
    """Of lines `name number …`."""
    words = (line.split() for line in _text(path).splitlines())
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdecimal()}


def _text(path: Path) -> str:
    """Nothing where there is no such file, or none that may be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
