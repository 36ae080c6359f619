# SPDX-License-Identifier: Apache-2.0
"""Random programs with functions for two compilers give what NumPy gives, whoever compiles them.

The source of a program is TVMScript, and plain Python for NumPy as well. Its literals capture
values and symbolic shapes, are nested, stand in branches, and are called once, twice or never.
"""

from __future__ import annotations

import random
import types

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

import tvm_ipc
from tvm_ipc.transform import (
    Compiled,
    InlineCompilerFunctions,
    OutlineCompilerFunctions,
    RunModuleCodegen,
)

TENSOR = 'R.Tensor((n, 4), "float32")'


class Source:
    """A program, line by line."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.count = 0

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

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def add(self, level: int, line: str) -> None:
        self.lines.append("    " * level + line)

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
        values.append(self.fresh())
        self.add(level, f"{values[-1]} = R.{name}({', '.join(operands)})")

    def zeros(self, values: list[str], _closures: list[str], level: int, _depth: int) -> None:
        values.append(self.fresh())
        self.add(level, f'{values[-1]} = R.zeros(R.shape([n, 4]), "float32")')

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
        values.append(self.fresh())
        self.add(level, f"{values[-1]} = {self.random.choice(closures)}({operand})")

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


def by_numpy(source: str, condition: bool, x: np.ndarray) -> np.ndarray:
    def identity(value):
        return value

    names = dict.fromkeys(["Tensor", "func_attr"], lambda *_: None)
    operators = {name: getattr(np, name) for name in ("tanh", "negative", "add", "multiply")}
    zeros = {"shape": identity, "zeros": lambda shape, dtype: np.zeros(shape, dtype)}
    scope = {
        "I": types.SimpleNamespace(ir_module=identity),
        "R": types.SimpleNamespace(function=identity, **names, **operators, **zeros),
        "T": types.SimpleNamespace(int64=lambda: len(x)),
        "n": len(x),
    }
    exec(source, scope)
    return scope["Module"].main(condition, x)


def virtual_machine(module: tvm.IRModule) -> relax.VirtualMachine:
    # TVM's own memory plan lets one branch use a storage that the other one allocates.
    pipeline = tvm_ipc.get_pipeline("llvm", world_size=1, blas=False)
    return relax.VirtualMachine(relax.build(module, "llvm", relax_pipeline=pipeline), tvm.cpu())


def by_tvm_itself(functions: tvm.IRModule, options) -> Compiled:
    """An external compiler: TVM, behind a packed function for each function."""
    vm = virtual_machine(OutlineCompilerFunctions()(functions))
    registered = {}
    for global_var in functions.get_global_vars():
        name = str(global_var.name_hint)
        registered[name] = f"test.byoc.random.{name}"

        def run(*arguments, compiled=vm[name]):
            compiled(*arguments[:-1]).copyto(arguments[-1])

        tvm_ffi.register_global_func(registered[name], run, override=True)
    return Compiled(registered=registered)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
def test_random_programs(first: int, request: pytest.FixtureRequest) -> None:
    for seed in range(first, request.config.getoption("--programs"), 4):
        check(Source(seed).text())


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
            right = by_numpy(source, condition, x)
            np.testing.assert_allclose(result.numpy(), right, rtol=1e-4, atol=1e-5)
