"""What this process may use of its machine, which in containers is less than there is: CPUs, and limits of cgroups.

It imports no torch: those who start other processes ask as well. A file that cannot be read sets no limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Cgroup(NamedTuple):
    """A group of processes that share limits.

    Attributes:
        folder: holds the files of its limits.
        version: 1 or 2, which decides how these are called.
    """

    folder: Path
    version: int

    def text(self, name: str) -> str:
        """Content of one of its files, "" where there is none."""
        return read_text(self.folder / name).strip()

    def number(self, name: str) -> int | None:
        """Content of a file that holds one number, None where it holds none ("max", -1)."""
        text = self.text(name)
        return int(text) if text.isdigit() else None


def cgroups(controller: str) -> Iterator[Cgroup]:
    """The cgroups of this process that a controller (`cpu`, `memory`) may limit, from its own up to the root."""
    for line in read_text(_OWN_CGROUPS).splitlines():
        _, *rest = line.split(":", 2)
        if len(rest) < 2:
            continue
        controllers, path = rest
        if not controllers:
            root, version = _CGROUPS, 2
        elif controller in controllers.split(","):
            root, version = _CGROUPS / controller, 1
        else:
            continue
        folder = root / path.lstrip("/")
        # Inside a container the path is the host's: the container's own group is then mounted at the root.
        for group in [folder, *folder.parents]:
            if group.is_relative_to(root):
                yield Cgroup(group, version)


def cpu_quota() -> float | None:
    """CPUs whose time the cgroups of this process allow it, such as 1.5 (`docker run --cpus=1.5`); None for all."""
    quotas = []
    for group in cgroups("cpu"):
        if group.version == 2:
            quota, _, period = group.text("cpu.max").partition(" ")
        else:
            quota, period = group.text("cpu.cfs_quota_us"), group.text("cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def visible_cpus() -> int:
    """CPUs that this process may run on, whatever share of their time it gets."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_cpus() -> int:
    """CPUs that this process can keep busy, at least 1: those that it may run on, or fewer under a quota.

    A quota is rounded down: where threads wait for each other, one that is paused holds all of them up.
    """
    quota = cpu_quota()
    return visible_cpus() if quota is None else max(1, min(visible_cpus(), int(quota)))


def thread_settings(processes: int) -> dict[str, str]:
    """Environment of one of several processes that share the cores, where the user has not set it.

    How threads wait is what scripts/threads.sh says; torch reads it when it is imported.
    """
    settings = {"OMP_NUM_THREADS": str(max(1, available_cpus() // processes))}
    if "OMP_WAIT_POLICY" not in os.environ:
        settings |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
    return {name: value for name, value in settings.items() if name not in os.environ}


def read_text(path: Path) -> str:
    """Content of a file of the system, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
