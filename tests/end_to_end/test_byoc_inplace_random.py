# SPDX-License-Identifier: Apache-2.0
"""Random programs whose external functions work in place give what NumPy gives with copies.

The source of a program is TVMScript, and plain Python for NumPy, whose functions change nothing.
The external functions fill what they overwrite with NaN before they read anything else, so that an
argument which is the same memory, or a value that is still wanted, shows in the result. Values get
further names: in tuples, as views, by branches, through functions, and by packed functions that
return what they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from tests.end_to_end.random_byoc import (
    PARAM,
    TENSOR,
    Source,
    by_numpy,
    registered,
    virtual_machine,
)
from tvm_ipc.transform import Compiled, RunModuleCodegen

#: Parameters, results, and the parameters that results may be in place of.
KERNELS = {
    "one": (("a",), ("R.negative(a)",), ([0],)),
    "two": (("a", "b"), ("R.subtract(a, b)",), ([0], [1])),
    "pair": (
        ("a", "b"),
        ("R.add(a, b)", "R.subtract(a, b)"),
        ([0, -1], [1, -1], [-1, 0], [0, 1], [1, 0]),
    ),
    "three": (
        ("a", "b", "c"),
        ("R.subtract(a, b)", "R.subtract(b, c)"),
        ([0, 1], [2, -1], [-1, 1], [2, 0]),
    ),
}
SAME = "test.byoc.inplace.last"


class InplaceSource(Source):
    """Kernels in place, helpers, and a function `main`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.helpers: list[str] = []

    def text(self) -> str:
        self.lines = ["@I.ir_module", "class Module:"]
        for name, (params, results, choices) in KERNELS.items():
            self.kernel(name, params, results, self.random.choice(choices))
        for _ in range(self.random.randint(0, 2)):
            self.helper()
        self.add(1, "@R.function(pure=False)")
        self.add(1, f'def main(c: R.Tensor((), "bool"), x: {PARAM}, y: {PARAM}):')
        self.begin()
        values = self.block(["x", "y"], 2, 0, self.random.randint(5, 12))
        self.add(2, f"return ({', '.join(self.random.sample(values, 3))},)")
        return "\n".join(self.lines) + "\n"

    def kernel(
        self, name: str, params: Sequence[str], results: Sequence[str], inplace: list[int]
    ) -> None:
        several = ", ".join([TENSOR] * len(results)).replace("(n,", '("n",')
        result = several if len(results) == 1 else f"R.Tuple({several})"
        self.add(1, "@R.function")
        self.add(1, f"def {name}({', '.join(f'{one}: {PARAM}' for one in params)}) -> {result}:")
        self.add(2, f'R.func_attr({{"Codegen": "cc", "tvm_ipc.inplace_outputs": {inplace}}})')
        names = [f"r{number}" for number in range(len(results))]
        for one, value in zip(names, results, strict=True):
            self.add(2, f"{one} = {value}")
        self.add(2, f"return {names[0] if len(names) == 1 else '(' + ', '.join(names) + ')'}")

    def helper(self) -> None:
        name = f"helper{len(self.helpers)}"
        self.add(1, "@R.function(private=True, pure=False)")
        head = f'def {name}(c: R.Tensor((), "bool"), x: {PARAM}, y: {PARAM})'
        self.add(1, f"{head} -> R.Tuple({TENSOR}, {TENSOR}):".replace("(n,", '("n",'))
        self.begin()
        values = self.block(["x", "y"], 2, 1, self.random.randint(1, 3))
        self.add(2, f"return ({self.random.choice(values)}, {values[-1]})")
        self.helpers.append(name)

    def begin(self) -> None:
        self.add(2, "n = T.int64()")
        self.add(2, "cls = Module")

    def block(self, values: list[str], level: int, depth: int, length: int) -> list[str]:
        """Add statements that use and extend the values; return all of them."""
        values = list(values)
        for _ in range(length):
            kinds = ["operator"] * 3 + ["kernel_call"] * 6 + ["zeros", "match_cast", "view"]
            kinds += ["tuple_field", "packed", "packed"]
            kinds += ["branch"] if depth == 0 else []
            kinds += ["call"] * 2 if self.helpers and depth == 0 else []
            getattr(self, f"add_{self.random.choice(kinds)}")(values, level)
        return values

    def pick(self, values: list[str]) -> str:
        # What came last is read once more the least often, so that it may be overwritten.
        return self.random.choice(values[-3:] if self.random.random() < 0.7 else values)

    def add_operator(self, values: list[str], level: int) -> None:
        name, count = self.random.choice([("tanh", 1), ("negative", 1), ("add", 2)])
        operands = ", ".join(self.pick(values) for _ in range(count))
        self.bind(values, level, f"R.{name}({operands})")

    def add_match_cast(self, values: list[str], level: int) -> None:
        self.bind(values, level, f"R.match_cast({self.pick(values)}, {TENSOR})")

    def add_view(self, values: list[str], level: int) -> None:
        self.bind(values, level, f"R.reshape({self.pick(values)}, R.shape([4, n]))")
        self.bind(values, level, f"R.reshape({values.pop()}, R.shape([n, 4]))")

    def add_tuple_field(self, values: list[str], level: int) -> None:
        name, inner = self.fresh(), self.fresh()
        one, two, three = (self.pick(values) for _ in range(3))
        self.add(level, f"{name} = ({one}, ({two}, {three}))")
        self.add(level, f"{inner} = {name}[1]")
        self.bind(values, level, self.random.choice([f"{name}[0]", f"{inner}[0]", f"{inner}[1]"]))

    def add_packed(self, values: list[str], level: int) -> None:
        operands = ", ".join(self.pick(values) for _ in range(self.random.randint(1, 2)))
        self.bind(values, level, f'R.call_packed("{SAME}", {operands}, ty_args=({TENSOR},))')

    def add_kernel_call(self, values: list[str], level: int) -> None:
        name, (params, results, _) = self.random.choice(list(KERNELS.items()))
        call = f"cls.{name}({', '.join(self.pick(values) for _ in params)})"
        self.results(values, level, call, len(results))

    def add_call(self, values: list[str], level: int) -> None:
        call = (
            f"cls.{self.random.choice(self.helpers)}(c, {self.pick(values)}, {self.pick(values)})"
        )
        self.results(values, level, call, 2)

    def results(self, values: list[str], level: int, call: str, count: int) -> None:
        if count == 1:
            self.bind(values, level, call)
            return
        name = self.fresh()
        self.add(level, f"{name} = {call}")
        for number in range(count):
            self.bind(values, level, f"{name}[{number}]")

    def add_branch(self, values: list[str], level: int) -> None:
        result = self.fresh()
        for head in ("if c:", "else:"):
            self.add(level, head)
            inside = self.block(values, level + 1, 1, self.random.randint(0, 3))
            self.add(level + 1, f"{result} = {self.pick(inside)}")
        values.append(result)


def external(source: str) -> Callable[[tvm.IRModule, object], Compiled]:
    """A compiler whose functions overwrite first and read later."""
    module = by_numpy(source, 0)

    def compile_fn(functions: tvm.IRModule, _options: object) -> Compiled:
        def compiled(name: str) -> Callable[..., None]:
            inplace = list(map(int, functions[name].attrs["tvm_ipc.inplace_outputs"]))
            compute = getattr(module, name.removesuffix("_cc_0"))  # an unused one
            count = len(functions[name].params)

            def run(*given):
                params, outputs = given[:count], iter(given[count:])
                values = dict(enumerate(params))
                for index in inplace:
                    if index != -1:
                        values[index] = params[index].numpy()
                        params[index].copyfrom(np.full(params[index].shape, np.nan, "float32"))
                operands = [
                    value if isinstance(value, np.ndarray) else value.numpy()
                    for _, value in sorted(values.items())
                ]
                results = compute(*operands)
                results = results if isinstance(results, tuple) else (results,)
                for index, result in zip(inplace, results, strict=True):
                    (params[index] if index != -1 else next(outputs)).copyfrom(result)

            return run

        return registered(functions, "test.byoc.inplace", compiled)

    return compile_fn


@pytest.fixture(scope="module", autouse=True)
def last() -> None:
    """A packed function that returns its last argument itself."""
    tvm_ffi.register_global_func(SAME, lambda *given: given[-1], override=True)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["lowered_first", "lowered_by_the_pipeline"])
@pytest.mark.parametrize("first", range(3))
def test_nothing_is_overwritten_that_is_still_wanted(
    first: int, late: bool, request: pytest.FixtureRequest
) -> None:
    # LLVM may believe that buffers do not overlap where it optimizes.
    target = {"kind": "llvm", "opt-level": 3} if first == 0 else "llvm"
    for seed in range(first, request.config.getoption("--programs"), 3):
        check(InplaceSource(seed).text(), late=late, target=target)


def check(source: str, *, late: bool, target: str | dict[str, object] = "llvm") -> None:
    module = tvm.script.from_source(source)
    module = RunModuleCodegen("cc", external(source), lower=not late)(module)
    relax.analysis.well_formed(module)
    vm = virtual_machine(module, tvm.target.Target(target))
    for rows, condition, twice in ((3, True, False), (2, False, True), (3, True, True)):
        rng = np.random.default_rng(rows)
        x, y = (rng.standard_normal((rows, 4)).astype("float32") for _ in range(2))
        given = [tvm.runtime.tensor(x), tvm.runtime.tensor(y)]
        if twice:  # the caller passes one tensor for both
            y, given = x, [given[0], given[0]]
        results = vm["main"](tvm.runtime.tensor(np.array(condition)), *given)
        for result, right in zip(
            results, by_numpy(source, rows).main(condition, x, y), strict=True
        ):
            np.testing.assert_allclose(result.numpy(), right, rtol=1e-4, atol=1e-4)
        for one, right in zip(given, (x, y), strict=True):
            np.testing.assert_array_equal(one.numpy(), right)
