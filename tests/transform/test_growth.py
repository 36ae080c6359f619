# SPDX-License-Identifier: Apache-2.0
"""The work of every pass grows linearly with a module, whatever the module has many of.

Instructions are counted, not seconds. `benchmarks/compile_time.py` measures times, of TVM's passes
too.
"""

from __future__ import annotations

from collections import defaultdict
from math import log2
from typing import Any

import pytest
from growth_programs import SHAPES
from work import work

from tvm_ipc.transform import (
    IPCAllReduceRewrite,
    LowerGPUIPCAllocStorage,
    PostCollectives,
    StaticPlanBlockMemory,
    VerifyCrossRankSafety,
)
from tvm_ipc.transform.memory import packing

PASSES = [
    PostCollectives(),
    IPCAllReduceRewrite(3),
    StaticPlanBlockMemory(packed=True),
    VerifyCrossRankSafety(),
    LowerGPUIPCAllocStorage(),
]
#: Quadratic is 2. States of the check are copied where paths part, which shows a little.
LINEAR = 1.3


@pytest.mark.parametrize(("shape", "least"), [pytest.param(*s, id=s[0].__name__) for s in SHAPES])
def test_work_grows_linearly(shape: Any, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where little is live together, packings of every pair are tried: their number has a bound,
    # which small modules do not reach.
    monkeypatch.setattr(packing, "_MANY_PAIRS", 0)
    monkeypatch.setattr(packing, "_MANY_PAIRS_EACH", 4)
    counts: dict[str, list[int]] = defaultdict(list)
    for size in (least, 2 * least, 4 * least):
        mod = shape(size)
        for one in PASSES:
            results: list[Any] = []
            counts[one.info.name].append(work(lambda: results.append(one(mod))))  # noqa: B023
            mod = results[0]
    for name, (few, more, many) in counts.items():
        assert log2((many - more) / (more - few)) < LINEAR, name
