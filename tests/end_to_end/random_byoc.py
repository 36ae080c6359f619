# SPDX-License-Identifier: Apache-2.0
"""Random programs with functions of other compilers, as TVMScript that NumPy can run as well."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

import tvm_ipc
from tvm_ipc.transform import Compiled

TENSOR = 'R.Tensor((n, 4), "float32")'
PARAM = 'R.Tensor(("n", 4), "float32")'


class Source:
    """A program while it is written, line by line."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def add(self, level: int, line: str) -> None:
        self.lines.append("    " * level + line)

    def bind(self, values: list[str], level: int, value: str) -> None:
        values.append(self.fresh())
        self.add(level, f"{values[-1]} = {value}")

    def add_zeros(self, values: list[str], level: int) -> None:
        self.bind(values, level, 'R.zeros(R.shape([n, 4]), "float32")')


def by_numpy(source: str, rows: int) -> Any:
    """Return the class of a module, whose functions NumPy computes where `n` is so many rows."""

    def identity(value: Any, *_: Any, **__: Any) -> Any:
        return value

    nothing = dict.fromkeys(["Tensor", "Tuple", "func_attr"], lambda *_: None)
    operators = ("tanh", "negative", "add", "subtract", "multiply", "reshape")
    relax_shim = types.SimpleNamespace(
        function=lambda *given, **_: given[0] if given else identity,
        shape=identity,
        zeros=lambda shape, dtype: np.zeros(shape, dtype),
        match_cast=identity,
        call_packed=lambda _, *operands, ty_args: operands[-1],
        **nothing,
        **{name: getattr(np, name) for name in operators},
    )
    scope = {
        "I": types.SimpleNamespace(ir_module=identity),
        "R": relax_shim,
        "T": types.SimpleNamespace(int64=lambda: rows),
        "n": rows,
    }
    exec(source, scope)
    return scope["Module"]


def virtual_machine(module: tvm.IRModule, target: Any = "llvm") -> relax.VirtualMachine:
    # TVM's own memory plan lets one branch use a storage that the other one allocates.
    pipeline = tvm_ipc.get_pipeline(target, world_size=1, blas=False)
    return relax.VirtualMachine(relax.build(module, target, relax_pipeline=pipeline), tvm.cpu())


def registered(
    functions: tvm.IRModule, prefix: str, compiled: Callable[[str], Callable[..., None]]
) -> Compiled:
    """Register what each function was compiled to, under its name."""
    names = {str(one.name_hint): f"{prefix}.{one.name_hint}" for one in functions.get_global_vars()}
    for name, packed in names.items():
        tvm_ffi.register_global_func(packed, compiled(name), override=True)
    return Compiled(registered=names)
