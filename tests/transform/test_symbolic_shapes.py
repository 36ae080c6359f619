# SPDX-License-Identifier: Apache-2.0
"""Tensors whose extents are expressions go through the whole pipeline, and run right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tests.transform.memory_programs import prepared, storages
from tvm_ipc.transform import StaticPlanBlockMemory, collect_report

#: Extents, with what they are.
EXTENTS: dict[str, Any] = {
    "n": lambda n, m: n,
    "n - 1": lambda n, m: n - 1,
    "n // 2": lambda n, m: n // 2,
    "T.max(n, m)": max,
    "T.min(n, m)": min,
    "n - m": lambda n, m: n - m,
    "n * (m - 1)": lambda n, m: n * (m - 1),
    "(n - 1) * (m - 1)": lambda n, m: (n - 1) * (m - 1),
    "(n + 3) // 4": lambda n, m: (n + 3) // 4,
    "n // m": lambda n, m: n // m,
    "n % m": lambda n, m: n % m,
    "n % 8": lambda n, m: n % 8,
    "n * m // 8": lambda n, m: n * m // 8,
    "T.truncdiv(n, m)": lambda n, m: n // m,
    "T.ceildiv(n, m)": lambda n, m: -(-n // m),
    "T.max(n - m, T.int64(0))": lambda n, m: max(n - m, 0),
    "T.abs(n - m)": lambda n, m: abs(n - m),
    "T.Select(n > m, n - m, m)": lambda n, m: n - m if n > m else m,
    "T.if_then_else(n > m, n - m, m)": lambda n, m: n - m if n > m else m,
    "T.shift_left(n, T.int64(1))": lambda n, m: n << 1,
    "T.shift_right(n, T.int64(1))": lambda n, m: n >> 1,
    "T.bitwise_and(n, T.int64(3))": lambda n, m: n & 3,
    "T.bitwise_or(n, m)": lambda n, m: n | m,
    "T.bitwise_xor(n, m)": lambda n, m: n ^ m,
    'T.Cast("int64", T.Cast("int32", n)) + 1': lambda n, m: n + 1,
}
SIZES = [(5, 3), (4, 4), (1, 1), (33, 2), (64, 8), (0, 0)]


def function(name: str, extent: str, straight: bool) -> str:
    """One that makes tensors of three types, several of which are live at once."""
    lines = [
        f"a = R.broadcast_to(s, R.shape([{extent}, 3]))",
        "b = R.permute_dims(a)",
        'd = R.astype(b, "float16")',
        "e = R.permute_dims(d)",
        "f = R.permute_dims(b)",
        'g = R.add(R.astype(e, "float32"), f)',
        "h = R.permute_dims(g)",
        'i = R.astype(R.permute_dims(h), "float64")',
    ]
    if straight:
        lines = ["with R.dataflow():", *("    " + line for line in lines), "    R.output(i)"]
    body = "".join(f"        {line}\n" for line in [*lines, "return i"])
    return f"""
    @R.function
    def {name}(
        x: R.Tensor(("n", 4), "float32"),
        z: R.Tensor(("m",), "float32"),
        s: R.Tensor((1, 3), "float32"),
    ):
        n, m = T.int64(), T.int64()
{body}"""


@pytest.fixture(scope="module", params=[True, False], ids=["dataflow", "plain"])
def machine(request: pytest.FixtureRequest) -> Any:
    functions = [function(f"f{i}", extent, request.param) for i, extent in enumerate(EXTENTS)]
    module = tvm.script.from_source("@I.ir_module\nclass Module:" + "".join(functions))
    with collect_report() as report:
        compiled = tvm.compile(
            module, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", world_size=1)
        )
    assert [one for one in report.decisions if one.verdict == "not proved"] == []
    left_out = [one for one in report.decisions if one.subject == "fusion"]
    assert len(left_out) == 7
    return relax.VirtualMachine(compiled, tvm.cpu())


def call(machine: Any, name: str, *arguments: Any) -> Any:
    return machine[name](*map(tvm.runtime.tensor, arguments)).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("extent", EXTENTS)
def test_extents_run(machine: Any, extent: str) -> None:
    name = f"f{list(EXTENTS).index(extent)}"
    for n, m in SIZES:
        if m == 0:
            continue  # TVM divides by it whether a tensor needs it or not
        rows = EXTENTS[extent](n, m)
        if rows < 0:
            continue
        s = np.array([[1, 2, 4]], "float32")
        result = call(machine, name, np.zeros((n, 4), "float32"), np.zeros(m, "float32"), s)
        assert result.tolist() == [[2, 4, 8]] * rows, (n, m)


BRANCHES = """
@I.ir_module
class Module:
    @R.function
    def main(
        x: R.Tensor(("n", 4), "float32"),
        s: R.Tensor((1, 3), "float32"),
        c: R.Tensor((), "bool"),
        d: R.Tensor((), "bool"),
    ):
        n = T.int64()
        if c:
            a = R.permute_dims(R.broadcast_to(s, R.shape([n - 7, 3])))
            b = R.permute_dims(a)
            r = R.sum(R.add(b, b), axis=[0], keepdims=True)
        else:
            if d:
                e = R.permute_dims(R.broadcast_to(s, R.shape([n - 7, 3])))
                f = R.permute_dims(e)
                q = R.sum(R.add(f, f), axis=[0], keepdims=True)
            else:
                q = R.add(s, s)
            r = q
        return r
"""


def test_a_storage_that_no_tensor_may_need_is_allocated_empty() -> None:
    module = tvm.script.from_source(BRANCHES)
    planned = StaticPlanBlockMemory(packed=True)(prepared(module))
    assert "T.max" in planned.script()  # before the outer `if`, where nothing is known of n
    compiled = tvm.compile(module, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 1))
    machine = relax.VirtualMachine(compiled, tvm.cpu())
    s = np.array([[1, 2, 4]], "float32")
    for n, c, d, times in [(2, False, False, 2), (9, False, True, 4), (10, True, False, 6)]:
        flags = [np.array(c), np.array(d)]
        result = call(machine, "main", np.zeros((n, 4), "float32"), s, *flags)
        assert result.tolist() == (s * times).tolist()


def test_what_a_type_can_hold_is_no_bound() -> None:
    module = tvm.script.from_source(
        "@I.ir_module\nclass Module:"
        + function("main", 'T.Cast("int64", T.Cast("int32", n)) + m % 8', straight=False)
    )
    planned = storages(StaticPlanBlockMemory(packed=True)(prepared(module)))
    assert sum(planned["global"]) < 10_000
