# SPDX-License-Identifier: Apache-2.0
"""What `allreduce_cuda.py` wants of one GPU, and whether figures say that it is so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: One-shot of 16 KB in so many times a meeting without data at most, two-shot of 64 MB at so much
#: of the speed of copies at least, sum, residual and norm in one so many times as fast as apart.
MOST_MEETINGS, LEAST_SHARE, LEAST_GAIN = 1.5, 0.8, 1.5
SMALL, LARGE = 1 << 14, 1 << 26
#: Rows of 16-bit elements that a decoder normalises for so many sequences at a time.
ROWS = (1, 4, 16, 64)
HIDDEN, HALF = 4096, 2

MET, MISSED, NOT_MEASURED = "met", "missed", "not measured"
#: The median seconds of what some ranks did with so many bytes, or None.
Find = Callable[[str, str, int], float | None]


@dataclass(frozen=True)
class Verdict:
    """Of a goal, for some ranks: "2 threads"."""

    goal: str
    ranks: str
    verdict: str
    wanted: str
    #: The ratio that is compared; None where something was not measured, which `text` names.
    found: float | None
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:12} {self.goal}, {self.ranks}: {self.text}, wanted {self.wanted}"


def judge(find: Find, all_ranks: Iterable[str], devices: int) -> list[Verdict]:
    """Each goal for ranks that are threads: those of several processes take turns on a GPU."""
    verdicts = []
    for ranks in all_ranks:
        if ranks.endswith("threads"):
            verdicts += [_small(find, ranks), _large(find, ranks, devices)]
            verdicts += [_norm(find, ranks, rows) for rows in ROWS]
    return verdicts


def status(verdicts: Iterable[Verdict]) -> int:
    """The exit status: 0 where all goals are met, 1 where one is missed, else 2."""
    said = [one.verdict for one in verdicts]
    if MISSED in said:
        return 1
    return 0 if said and set(said) == {MET} else 2


def _small(find: Find, ranks: str) -> Verdict:
    goal = f"one-shot of {SMALL >> 10} KB"
    wanted = f"at most {MOST_MEETINGS} times a meeting without data"
    seconds = {"oneshot": find(ranks, "oneshot", SMALL), "meeting": find(ranks, "meeting", 0)}
    return _compare(
        goal, ranks, wanted, seconds, "times a meeting",
        lambda times: times["oneshot"] / times["meeting"], most=MOST_MEETINGS,
    )  # fmt: skip


def _large(find: Find, ranks: str, devices: int) -> Verdict:
    goal = f"two-shot of {LARGE >> 20} MB"
    wanted = f"at least {LEAST_SHARE} of the speed of copies"
    if devices != 1:
        text = f"{devices} GPUs are here, whose links are the limit; CUDA_VISIBLE_DEVICES=0 judges"
        return Verdict(goal, ranks, NOT_MEASURED, wanted, None, text)
    seconds = {"twoshot": find(ranks, "twoshot", LARGE), "copies": find(ranks, "copies", LARGE)}
    n = int(ranks.split()[0])

    def share(times: dict[str, float]) -> float:
        # Copies read and write what each of n ranks has. Of the all-reduce all inputs are read,
        # slices written and read by all, and results written.
        return (3 * n + 1) * LARGE / times["twoshot"] / (2 * n * LARGE / times["copies"])

    return _compare(goal, ranks, wanted, seconds, "of it", share, least=LEAST_SHARE)


def _norm(find: Find, ranks: str, rows: int) -> Verdict:
    goal = f"sum, residual and RMSNorm of {rows} x {HIDDEN}"
    wanted = f"at least {LEAST_GAIN} times as fast as apart"
    size = rows * HIDDEN * HALF
    seconds = {what: find(ranks, what, size) for what in ("fused norm", "norm apart")}
    return _compare(
        goal, ranks, wanted, seconds, "times as fast",
        lambda times: times["norm apart"] / times["fused norm"], least=LEAST_GAIN,
    )  # fmt: skip


def _compare(
    goal: str,
    ranks: str,
    wanted: str,
    seconds: dict[str, float | None],
    unit: str,
    ratio: Callable[[dict[str, float]], float],
    *,
    most: float = math.inf,
    least: float = -math.inf,
) -> Verdict:
    times: dict[str, float] = {}
    for what, one in seconds.items():
        if one is None or not (math.isfinite(one) and one > 0):
            said = "there is no time" if one is None else f"a time is {one}"
            return Verdict(goal, ranks, NOT_MEASURED, wanted, None, f"{said} of {what}")
        times[what] = one
    found = ratio(times)
    verdict = MET if least <= found <= most else MISSED
    return Verdict(goal, ranks, verdict, wanted, found, f"{found:.2f} {unit}")
