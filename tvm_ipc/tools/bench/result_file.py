# SPDX-License-Identifier: Apache-2.0
"""Save, load and compare the measurements of `tvm-ipc bench`."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from tvm_ipc import this_machine
from tvm_ipc.errors import IPCError
from tvm_ipc.packed_functions import BACKENDS, MAX_WORKERS
from tvm_ipc.runtime import config

#: The key that identifies a saved measurement; its value is the version of the format.
_FORMAT_KEY: Final = "tvm_ipc_bench"
_FORMAT_VERSION: Final = 1
_MEASURE_AGAIN: Final = "measure again with `tvm-ipc bench --json FILE`"


@dataclass(frozen=True)
class Run:
    """The times of all cases on one machine.

    Attributes
    ----------
    about : properties of the machine and the versions of the packages, by name.
    times : seconds of each round, by case and bytes; 0 bytes for a case without a size.
    """

    workers: int
    device: str
    about: Mapping[str, str]
    times: Mapping[tuple[str, int], tuple[float, ...]]

    def cases(self) -> list[str]:
        """Return the cases that have sizes, in the order of measurement."""
        return list(dict.fromkeys(case for case, size in self.times if size))

    def sizes(self) -> list[int]:
        """Return all sizes in ascending order."""
        return sorted({size for _, size in self.times if size})

    def fixed(self) -> dict[str, float]:
        """Return the median seconds of each case without a size."""
        return {case: median(times) for (case, size), times in self.times.items() if not size}

    def at(self, case: str, size: int) -> float | None:
        """Return the median seconds of a case at a size; None if it was not measured."""
        times = self.times.get((case, size))
        return median(times) if times else None

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        rows = [
            json.dumps({"case": case, "bytes": size, "seconds": [float(f"{t:.4g}") for t in times]})
            for (case, size), times in self.times.items()
        ]
        head = {_FORMAT_KEY: _FORMAT_VERSION, "workers": self.workers, "device": self.device}
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
        The file cannot be read, or does not hold a measurement.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise IPCError(f"cannot read the measurement {path}: {error.strerror}") from error
    except ValueError as error:
        raise IPCError(f"{path} is not a measurement: it is not JSON; {_MEASURE_AGAIN}") from error
    if not isinstance(content, dict) or _FORMAT_KEY not in content:
        is_calibration = isinstance(content, dict) and "matmul" in content
        kind = "a calibration" if is_calibration else "other JSON"
        raise IPCError(f"{path} is not a measurement, but {kind}; {_MEASURE_AGAIN}")
    if content[_FORMAT_KEY] != _FORMAT_VERSION:
        raise IPCError(
            f"the measurement {path} has format version {content[_FORMAT_KEY]!r}, and this "
            f"version of tvm_ipc reads version {_FORMAT_VERSION}; {_MEASURE_AGAIN}"
        )
    try:
        return _parse(content)
    except (KeyError, TypeError, ValueError) as error:
        raise IPCError(f"the measurement {path} is damaged: {error!r}; {_MEASURE_AGAIN}") from error


def _parse(content: dict[str, Any]) -> Run:
    workers, device, about = content["workers"], content["device"], content["about"]
    if type(workers) is not int or not 2 <= workers <= MAX_WORKERS:
        raise ValueError(f"workers is {workers!r}")
    if device not in BACKENDS.values():
        raise ValueError(f"device is {device!r}")
    if not all(isinstance(item, str) for pair in about.items() for item in pair):
        raise ValueError("about has keys or values that are not strings")
    times = {}
    for row in content["times"]:
        seconds = tuple(float(number) for number in row["seconds"])
        if not seconds or not all(0 < number < math.inf for number in seconds):
            raise ValueError(f"seconds of {row['case']!r} are {row['seconds']!r}")
        if type(row["bytes"]) is not int or row["bytes"] < 0:
            raise ValueError(f"bytes of {row['case']!r} are {row['bytes']!r}")
        times[str(row["case"]), row["bytes"]] = seconds
    return Run(workers, device, dict(about), times)


def describe_environment(
    backend: str, versions: Mapping[str, str], *, gpus: bool
) -> dict[str, str]:
    """Return the properties of this machine and its software that can change the times."""
    properties = {
        "machine": this_machine.name(gpus=gpus),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
        "backend": backend,
    }
    settings = {k: v for k, v in config.own_settings().items() if k != "TVM_IPC_CACHE"}
    if settings:
        properties["settings"] = " ".join(
            f"{name}={text}" for name, text in sorted(settings.items())
        )
    return properties


@dataclass(frozen=True)
class Ratio:
    """A speedup of one run over another; `clear` if it is larger than the noise."""

    value: float
    clear: bool


def ratio(now: Run, saved: Run, case: str, size: int) -> Ratio | None:
    """Return the speedup of `now` over `saved`; None if one of them lacks the case."""
    times, saved_times = now.times.get((case, size)), saved.times.get((case, size))
    if not times or not saved_times:
        return None
    (low, high), (saved_low, saved_high) = _middle_half(times), _middle_half(saved_times)
    return Ratio(median(saved_times) / median(times), high < saved_low or saved_high < low)


def _middle_half(times: tuple[float, ...]) -> tuple[float, float]:
    """Return the first and the third quartile of the rounds."""
    if len(times) < 2:
        return times[0], times[0]
    first, _, last = quantiles(times, n=4, method="inclusive")
    return first, last


def differences(now: Run, saved: Run) -> list[str]:
    """Return a line for each property that differs between two runs."""
    keys = dict.fromkeys([*now.about, *saved.about])
    return [
        f"{key}: {saved.about.get(key, 'nothing')} then, {now.about.get(key, 'nothing')} now"
        for key in keys
        if now.about.get(key) != saved.about.get(key)
    ]
