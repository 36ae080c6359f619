# SPDX-License-Identifier: Apache-2.0
"""What the system says of this machine's processor. Imports nothing of ours."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path


def cpu_model() -> str | None:
    """Return what the processor calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), None)


def instruction_sets() -> str:
    """Return what tells processors apart for which different code is compiled."""
    told = (
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features", "isa"),
    )
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in told:
                found.setdefault(name.strip(), value.strip())
    return "; ".join([platform.machine(), *(f"{name}: {value}" for name, value in found.items())])


def available_cores() -> int:
    """Return how many cores this process may use; all, where the system does not say which."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:  # refused, as some sandboxes do
        return os.cpu_count() or 1


class OtherPrograms:
    """What other programs have of the cores that this process may use, from now on.

    Processes that this one starts count as its own once they have ended.
    """

    def __init__(self) -> None:
        self._seconds, self._busy = time.monotonic(), _busy_seconds()

    def cores(self) -> float:
        """Return how many cores they kept busy in the mean; 0 where the system does not say."""
        seconds = time.monotonic() - self._seconds
        return max(0.0, _busy_seconds() - self._busy) / seconds if seconds > 0 else 0.0


def _busy_seconds() -> float:
    """Return for how long the cores that we may use have worked for other programs."""
    own = sum(os.times()[:4])
    try:
        usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    found = [words for line in lines if (words := line.split())[0] in usable]
    # user, nice, system, idle, waiting for a disk, interrupts of two kinds, taken by a hypervisor
    ticks = sum(int(words[number]) for words in found for number in (1, 2, 3, 6, 7, 8))
    return ticks / os.sysconf("SC_CLK_TCK") - own


def gpu_models() -> list[str]:
    """Return what the GPUs call themselves, as the driver's module says; nothing without one."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        found += [x.partition(":")[2].strip() for x in lines if x.startswith("Model")]
    return found


def name(*, gpus: bool = False) -> str:
    """Return what tells this machine from others: the processor, and the cores that we may use.

    With `gpus`, its GPUs too.
    """
    cores = available_cores()
    parts = [cpu_model() or "an unknown processor", f"{cores} core{'s' * (cores != 1)}"]
    return ", ".join(parts + (gpu_models() if gpus else []))
