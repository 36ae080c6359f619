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

from tests.transform.growth_programs import SHAPES, reducing_ifs
from tests.transform.loads import work
from tvm_ipc import get_pipeline
from tvm_ipc.transform import (
    AsyncCollectives,
    IPCAllReduceRewrite,
    LowerGPUIPCAllocStorage,
    StaticPlanBlockMemory,
    VerifyCrossRankSafety,
)
from tvm_ipc.transform.memory_plan import packing

PASSES = [
    AsyncCollectives(),
    IPCAllReduceRewrite(3),
    StaticPlanBlockMemory(packed=True),
    VerifyCrossRankSafety(),
    LowerGPUIPCAllocStorage(),
]
#: Quadratic is 2. States of the check are copied where paths part, which shows a little.
LINEAR = 1.3


#: Instructions of the pipeline for an `if` with an all-reduce in each branch, and for any module.
#: 80,000 and 48,100 were counted.
FOR_AN_IF, FOR_ANY_MODULE = 81_000, 49_000


def test_work_of_the_pipeline() -> None:
    """TVM has little to do for such ifs, so what the pipeline adds for each of them has a bound."""
    pipeline = get_pipeline("llvm", 2, blas=False)
    pipeline(reducing_ifs(1))  # loads what is loaded at first use
    modules = {size: reducing_ifs(size) for size in (10, 20, 40)}
    few, more, many = (work(lambda mod=mod: pipeline(mod)) for mod in modules.values())
    assert (many - more) / (more - few) < 2.1
    assert (many - more) / 20 < FOR_AN_IF
    assert few - (more - few) < FOR_ANY_MODULE


@pytest.mark.slow
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
