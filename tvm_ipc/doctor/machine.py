# SPDX-License-Identifier: Apache-2.0
"""What the system says of this machine and of what a process may take of it."""

from __future__ import annotations

import resource
from pathlib import Path


def cgroup_limit(membership: Path, root: Path) -> int | None:
    """Return the smallest memory limit of this process's control groups; None without one."""
    limits = []
    try:
        entries = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, group in entries:
        if controllers == "":
            directory, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            directory, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container sees its own group as the root although the path names the host's.
        for part in (Path(group.lstrip("/")), *Path(group.lstrip("/")).parents):
            try:
                text = (directory / part / name).read_text().strip()
            except OSError:
                continue
            # Version 1 writes "no limit" as a number of nearly 2**63.
            if text.isdecimal() and int(text) < 1 << 60:
                limits.append(int(text))
    return min(limits, default=None)


def resource_limit(kind: int) -> int | None:
    """Return the soft limit of a resource; None without one."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
