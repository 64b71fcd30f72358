"""Limits of control groups (v1 and v2) on this process: CPU quota and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60  # v1 writes "no limit" as a huge number


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """The tightest limit of the process's group and of every group around it; None: no limit."""

    cpu_quota: float | None  # CPUs' worth of time
    memory_bytes: int | None
    memory_free_bytes: int | None  # limit minus what is used and cannot be given back


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Reads /proc/self/cgroup and the groups it names under `root`; absent files mean no limit."""
    quotas: list[float] = []
    limits: list[int] = []
    free: list[int] = []
    for group in _groups(root):
        quotas += _present(_quota_v2(group), _quota_v1(group))
        limit = _limit(group)
        if limit is not None:
            limits.append(limit)
            free.append(max(0, limit - _used(group)))
    return CgroupLimits(min(quotas, default=None), min(limits, default=None), min(free, default=None))


def _present(*values: float | None) -> list[float]:
    return [v for v in values if v is not None]


def _groups(root: Path) -> Iterator[Path]:
    """Every directory that may hold a limit: each controller's group of this process, and the groups above it."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        tops = [mount / name for name in (controllers, *controllers.split(","))] if controllers else [mount]
        for top in dict.fromkeys(tops):
            yield from _upwards(top, path)


def _upwards(top: Path, path: str) -> Iterator[Path]:
    # In a container the path may be the host's and not exist here; its own group is then the mount itself.
    here = top / path.strip("/")
    while here != top:
        yield here
        here = here.parent
    yield top


def _quota_v2(group: Path) -> float | None:
    words = _text(group / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_v1(group: Path) -> float | None:
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


def _limit(group: Path) -> int | None:
    limits = [_number(group / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    return min((n for n in limits if n is not None and n < _UNLIMITED_BYTES), default=None)


def _used(group: Path) -> int:
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
    return used - _reclaimable(group)


def _reclaimable(group: Path) -> int:
    """Bytes of file cache that the kernel gives back on demand; a mapped model file is such cache."""
    names = ("inactive_file", "active_file")
    stat = dict(line.split()[:2] for line in _lines(group / "memory.stat") if len(line.split()) >= 2)
    return sum(int(stat.get(f"total_{n}", stat.get(n, 0))) for n in names)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
