# SPDX-License-Identifier: Apache-2.0
"""A measurement of this machine, as `tvm-ipc bench` takes, saves and compares it."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from tvm_ipc import machine
from tvm_ipc.contract import BACKENDS, MAX_WORKERS
from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config

#: What a file of ours begins with; the number is that of the form.
_MARK: Final = "tvm_ipc_bench"
_FORM: Final = 1
_AGAIN: Final = "measure again with `tvm-ipc bench --json FILE`"


@dataclass(frozen=True)
class Run:
    """What was measured, and where.

    Attributes
    ----------
    about : what tells machines and versions apart, by what it is.
    times : seconds of each round, by case and bytes; 0 bytes where there is no size.
    """

    workers: int
    device: str
    about: Mapping[str, str]
    times: Mapping[tuple[str, int], tuple[float, ...]]

    def cases(self) -> list[str]:
        """Return the cases that have sizes, in their order."""
        return list(dict.fromkeys(case for case, size in self.times if size))

    def sizes(self) -> list[int]:
        """Return all sizes, rising."""
        return sorted({size for _, size in self.times if size})

    def fixed(self) -> dict[str, float]:
        """Return the seconds of what has no size."""
        return {case: median(times) for (case, size), times in self.times.items() if not size}

    def at(self, case: str, size: int) -> float | None:
        """Return the median of the seconds; None where it was not measured."""
        times = self.times.get((case, size))
        return median(times) if times else None

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        rows = [
            json.dumps({"case": case, "bytes": size, "seconds": [float(f"{t:.4g}") for t in times]})
            for (case, size), times in self.times.items()
        ]
        head = {_MARK: _FORM, "workers": self.workers, "device": self.device}
        text = json.dumps({**head, "about": dict(self.about)}, indent=1).removesuffix("\n}")
        text += ',\n "times": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
        try:
            path.write_text(text)
        except OSError as error:
            raise IPCError(f"cannot write the measurement {path}: {error.strerror}") from error


def load(path: Path) -> Run:
    """Read a file that `Run.save` wrote.

    Raises
    ------
    IPCError
        It cannot be read, or is none of ours.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise IPCError(f"cannot read the measurement {path}: {error.strerror}") from error
    except ValueError as error:
        raise IPCError(f"{path} is no measurement: it is no JSON; {_AGAIN}") from error
    if not isinstance(found, dict) or _MARK not in found:
        what = "a calibration" if isinstance(found, dict) and "matmul" in found else "other JSON"
        raise IPCError(f"{path} is no measurement, but {what}; {_AGAIN}")
    if found[_MARK] != _FORM:
        raise IPCError(
            f"the measurement {path} has form {found[_MARK]!r}, and this version of tvm_ipc reads "
            f"form {_FORM}; {_AGAIN}"
        )
    try:
        return _read(found)
    except (KeyError, TypeError, ValueError) as error:
        raise IPCError(f"the measurement {path} is damaged: {error!r}; {_AGAIN}") from error


def _read(found: dict[str, Any]) -> Run:
    workers, device, about = found["workers"], found["device"], found["about"]
    if type(workers) is not int or not 2 <= workers <= MAX_WORKERS:
        raise ValueError(f"workers is {workers!r}")
    if device not in BACKENDS.values():
        raise ValueError(f"device is {device!r}")
    if not all(isinstance(one, str) for pair in about.items() for one in pair):
        raise ValueError("about has other things than texts")
    times = {}
    for row in found["times"]:
        seconds = tuple(float(one) for one in row["seconds"])
        if not seconds or not all(0 < one < math.inf for one in seconds):
            raise ValueError(f"seconds of {row['case']!r} are {row['seconds']!r}")
        if type(row["bytes"]) is not int or row["bytes"] < 0:
            raise ValueError(f"bytes of {row['case']!r} are {row['bytes']!r}")
        times[str(row["case"]), row["bytes"]] = seconds
    return Run(workers, device, dict(about), times)


def here(backend: str, versions: Mapping[str, str], *, gpus: bool) -> dict[str, str]:
    """Return what tells this machine and what is installed from others."""
    found = {
        "machine": machine.name(gpus=gpus),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
        "backend": backend,
    }
    settings = {k: v for k, v in config.own_settings().items() if k != "TVM_IPC_CACHE"}
    if settings:
        found["settings"] = " ".join(f"{name}={text}" for name, text in sorted(settings.items()))
    return found


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one run is as another; `clear` where noise alone does not say so."""

    value: float
    clear: bool


def ratio(now: Run, saved: Run, case: str, size: int) -> Ratio | None:
    """Compare two runs; None where one of them lacks the case."""
    ours, theirs = now.times.get((case, size)), saved.times.get((case, size))
    if not ours or not theirs:
        return None
    (low, high), (saved_low, saved_high) = _middle(ours), _middle(theirs)
    return Ratio(median(theirs) / median(ours), high < saved_low or saved_high < low)


def _middle(times: tuple[float, ...]) -> tuple[float, float]:
    """Return between which seconds the middle half of the rounds lies."""
    if len(times) < 2:
        return times[0], times[0]
    first, _, last = quantiles(times, n=4, method="inclusive")
    return first, last


def differences(now: Run, saved: Run) -> list[str]:
    """Return what differs between the machines and versions of two runs."""
    keys = dict.fromkeys([*now.about, *saved.about])
    return [
        f"{key}: {saved.about.get(key, 'nothing')} then, {now.about.get(key, 'nothing')} now"
        for key in keys
        if now.about.get(key) != saved.about.get(key)
    ]
