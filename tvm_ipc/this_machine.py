# SPDX-License-Identifier: Apache-2.0
"""Query this machine's processor, cores and GPUs. Imports no other module of tvm_ipc."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path
from typing import Final

#: Cores that other programs may keep busy without a warning.
_TOLERATED: Final = 0.3


def cpu_model() -> str | None:
    """Return the model name of the processor; None if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), None)


def instruction_sets() -> str:
    """Return a text that differs between processors for which different code is compiled."""
    relevant = (
        *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
        *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features", "isa"),
    )
    properties: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in relevant:
                properties.setdefault(name.strip(), value.strip())
    return "; ".join(
        [platform.machine(), *(f"{name}: {value}" for name, value in properties.items())]
    )


def available_cores() -> int:
    """Return how many cores this process may use; all cores if the system does not report it."""
    try:
        return len(os.sched_getaffinity(0))
    except OSError:  # refused, as some sandboxes do
        return os.cpu_count() or 1


class OtherPrograms:
    """The load of other programs on the cores of this process, from construction on.

    Child processes count as part of this process once they have ended.
    """

    def __init__(self) -> None:
        self._begin, self._busy_at_begin = time.monotonic(), _busy_seconds()

    def cores(self) -> float:
        """Return how many cores they kept busy on average; 0 if the system does not report it."""
        seconds = time.monotonic() - self._begin
        return max(0.0, _busy_seconds() - self._busy_at_begin) / seconds if seconds > 0 else 0.0

    def warning(self, used: int, remedy: str) -> str | None:
        """Return a sentence if other programs kept cores busy that a command used; None if not.

        Parameters
        ----------
        used : number of cores that the command used.
        remedy : what to do about it.
        """
        cores, busy = available_cores(), self.cores()
        if busy <= max(0, cores - used) + _TOLERATED:
            return None
        return (
            f"Other programs kept {busy:.1f} of {cores} cores busy meanwhile, so the times are not "
            f"reliable; {remedy}."
        )


def _busy_seconds() -> float:
    """Return the seconds that this process's cores have spent on other programs since boot."""
    own = sum(os.times()[:4])
    try:
        usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0.0
    rows = [fields for line in lines if (fields := line.split())[0] in usable]
    # The fields are: name, user, nice, system, idle, iowait, irq, softirq, steal.
    ticks = sum(int(fields[number]) for fields in rows for number in (1, 2, 3, 6, 7, 8))
    return ticks / os.sysconf("SC_CLK_TCK") - own


def gpu_models() -> list[str]:
    """Return the model names of the GPUs from the NVIDIA driver; none without the driver."""
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        models += [x.partition(":")[2].strip() for x in lines if x.startswith("Model")]
    return models


def name(*, gpus: bool = False) -> str:
    """Return a name for this machine: its processor and usable cores, and its GPUs with `gpus`."""
    cores = available_cores()
    parts = [cpu_model() or "an unknown processor", f"{cores} core{'s' * (cores != 1)}"]
    return ", ".join(parts + (gpu_models() if gpus else []))
