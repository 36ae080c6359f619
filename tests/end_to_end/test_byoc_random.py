# SPDX-License-Identifier: Apache-2.0
"""Random programs with functions for two compilers give what NumPy gives, whoever compiles them.

The source of a program is TVMScript, and plain Python for NumPy as well. Its literals capture
values and symbolic shapes, are nested, stand in branches, and are called once, twice or never.
"""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.end_to_end.random_byoc import TENSOR, Source, by_numpy, registered, virtual_machine
from tvm_ipc.transform import (
    Compiled,
    InlineCompilerFunctions,
    OutlineCompilerFunctions,
    RunModuleCodegen,
)


class ClosureSource(Source):
    """Literals with a compiler, in a function `main`."""

    def text(self) -> str:
        head = [
            "@I.ir_module",
            "class Module:",
            "    @R.function",
            '    def main(c: R.Tensor((), "bool"), x: R.Tensor(("n", 4), "float32")):',
            "        n = T.int64()",
        ]
        result = self.block(["x"], 2, depth=0, length=self.random.randint(2, 6))
        return "\n".join([*head, *self.lines, f"        return {result}"]) + "\n"

    def block(self, values: list[str], level: int, depth: int, length: int) -> str:
        """Add statements that use and extend `values`; return the last one."""
        values, closures = list(values), []
        for _ in range(length):
            kinds = ["operator", "operator", "zeros"]
            kinds += ["literal"] * 3 if depth < 2 else []
            kinds += ["branch"] if depth == 0 else []
            kinds += ["call"] * 3 if closures else []
            getattr(self, self.random.choice(kinds))(values, closures, level, depth)
        result = self.fresh()
        self.add(level, f"{result} = R.tanh(R.add({values[-1]}, {self.random.choice(values)}))")
        return result

    def operator(self, values: list[str], _closures: list[str], level: int, _depth: int) -> None:
        name = self.random.choice(["tanh", "negative", "add", "multiply"])
        operands = [self.random.choice(values) for _ in range(1 + (name in ("add", "multiply")))]
        self.bind(values, level, f"R.{name}({', '.join(operands)})")

    def zeros(self, values: list[str], _closures: list[str], level: int, _depth: int) -> None:
        self.add_zeros(values, level)

    def literal(self, values: list[str], closures: list[str], level: int, depth: int) -> None:
        name, param = self.fresh(), self.fresh()
        compiler = self.random.choice(["aa", "bb"])
        self.add(level, "@R.function")
        self.add(level, f"def {name}({param}: {TENSOR}) -> {TENSOR}:")
        self.add(level + 1, f'R.func_attr({{"Codegen": "{compiler}"}})')
        inside = [param, *self.random.sample(values, self.random.randint(0, min(2, len(values))))]
        self.random.shuffle(inside)
        result = self.block(inside, level + 1, depth + 1, self.random.randint(1, 3))
        self.add(level + 1, f"return {result}")
        closures.append(name)

    def call(self, values: list[str], closures: list[str], level: int, _depth: int) -> None:
        operand = self.random.choice(values)
        self.bind(values, level, f"{self.random.choice(closures)}({operand})")

    def branch(self, values: list[str], closures: list[str], level: int, depth: int) -> None:
        result = self.fresh()
        for head in ("if c:", "else:"):
            self.add(level, head)
            inside = [*values]
            if closures and self.random.random() < 0.7:
                self.call(inside, closures, level + 1, depth)
            last = self.block(inside, level + 1, depth + 1, self.random.randint(1, 2))
            self.add(level + 1, f"{result} = R.negative({last})")
        values.append(result)


def by_tvm_itself(functions: tvm.IRModule, options) -> Compiled:
    """An external compiler: TVM, behind a packed function for each function."""
    vm = virtual_machine(OutlineCompilerFunctions()(functions))

    def compiled(name: str):
        function = vm[name]
        return lambda *arguments: function(*arguments[:-1]).copyto(arguments[-1])

    return registered(functions, "test.byoc.random", compiled)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_random_programs(first: int, request: pytest.FixtureRequest) -> None:
    for seed in range(first, request.config.getoption("--programs"), 4):
        check(ClosureSource(seed).text())


def check(source: str) -> None:
    module = tvm.script.from_source(source)
    outlined = OutlineCompilerFunctions()(module)
    external = InlineCompilerFunctions("bb")(RunModuleCodegen("aa", by_tvm_itself)(module))
    for one in (
        outlined,
        InlineCompilerFunctions()(outlined),
        InlineCompilerFunctions()(module),
        external,
    ):
        relax.analysis.well_formed(one)
        vm = virtual_machine(one)
        for rows, condition in ((3, True), (0, False), (5, False)):
            x = np.random.default_rng(rows).standard_normal((rows, 4)).astype("float32")
            result = vm["main"](*map(tvm.runtime.tensor, (np.array(condition), x)))
            right = by_numpy(source, rows).main(condition, x)
            np.testing.assert_allclose(result.numpy(), right, rtol=1e-4, atol=1e-5)
