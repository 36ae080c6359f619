# SPDX-License-Identifier: Apache-2.0
"""What each rank does in each way of an all-reduce, as the model has it: steps.trace beside this.

The model is compared with that file here, and the native code in
tests/native/test_protocol_trace.cc, so neither can change without the other one. `python -m
tests.model.traces` writes the file.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.model import steps_model

FILE = Path(__file__).with_name("steps.trace")
WAYS = ("eager", "direct", "sliced", "in_place", "relayed")
#: What a step of the model is called in the trace. Other steps have no place in it.
_EVENTS = (
    (re.compile(r"write \('staging', (\d), (\d), 0\)"), "stage {0} {1}"),
    (re.compile(r"write \('seq', (\d), (\d), 0\)"), "publish {0} {1}"),
    (re.compile(r"wait for rank (\d) in step (\d)"), "see {0} {1}"),
    (re.compile(r"read \('staging', (\d), (\d), 0\)"), "read staging {0} {1}"),
    (re.compile(r"read \('input', (\d), .*\)"), "read input {0} 0"),
)


def trace(way: str, size: int, me: int) -> str:
    """What one rank does in one all-reduce, the first of its team."""
    rank = steps_model.Rank(me, size, steps_model.Protocol())
    getattr(rank, way)(0)
    events = []
    for step in rank.program:
        for pattern, event in _EVENTS:
            if found := pattern.fullmatch(step.says):
                who, slot = found[1], int(found[2]) % 2 if found.lastindex == 2 else 0
                events.append(event.format(who, slot))
    return f"{way} {size} {me}: {', '.join(events)}"


def traces() -> str:
    """Every way, with two and three ranks."""
    return "".join(
        trace(way, size, me) + "\n" for size in (2, 3) for way in WAYS for me in range(size)
    )


if __name__ == "__main__":
    FILE.write_text(traces())
