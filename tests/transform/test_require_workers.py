# SPDX-License-Identifier: Apache-2.0
"""RequireWorkers: a module runs on as many workers as it was compiled for, or not at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tvm_ipc import comm  # noqa: F401 - R.comm
from tvm_ipc.errors import TransformError, WorkerError
from tvm_ipc.transform import RequireWorkers


@I.ir_module
class Summed:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.add(x, x)
            z = R.ccl.allreduce(y, "sum")
            R.output(z)
        return z

    @R.function
    def alone(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        return y


@I.ir_module
class Local:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        return y


def test_functions_that_meet_others_ask_first():
    @I.ir_module
    class Before:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(private=True)
        def inner(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")) -> R.Tuple:
            R.func_attr({"relax.force_pure": True})
            if c:
                _ = R.call_packed(
                    "runtime.disco.allreduce", x, R.shape([0]), False, x, ty_args=(R.Tuple([]),)
                )
                y = x
            else:
                y = x  # noqa: F841
            return R.tuple()

        @R.function
        def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")) -> R.Tuple:
            R.func_attr({"relax.force_pure": True})
            Before.f(x, x)
            _ = Before.inner(x, c)
            return R.tuple()

    @I.ir_module
    class Expected:
        @T.prim_func(s_tir=True)
        def f(a: T.handle, b: T.handle):
            T.evaluate(0)

        @R.function(private=True)
        def inner(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")) -> R.Tuple:
            R.func_attr({"relax.force_pure": True})
            _1 = R.call_packed("tvm_ipc.require_workers", 4, 2, ty_args=(R.Tuple([]),))
            if c:
                _ = R.call_packed(
                    "runtime.disco.allreduce", x, R.shape([0]), False, x, ty_args=(R.Tuple([]),)
                )
                y = x
            else:
                y = x  # noqa: F841
            return R.tuple()

        @R.function
        def main(x: R.Tensor((4,), "float32"), c: R.Tensor((), "bool")) -> R.Tuple:
            R.func_attr({"relax.force_pure": True})
            Expected.f(x, x)
            _ = Expected.inner(x, c)
            return R.tuple()

        @R.function(pure=False)
        def tvm_ipc_require_workers() -> R.Tuple:
            _ = R.call_packed("tvm_ipc.require_workers", 4, 2, ty_args=(R.Tuple([]),))
            return R.tuple()

    after = RequireWorkers(4, 2)(Before)
    # Two blocks of bindings in a row are one in a script.
    after = tvm.script.from_source(after.script())
    tvm.ir.assert_structural_equal(after, Expected)
    tvm.ir.assert_structural_equal(RequireWorkers(4, 2)(Local), Local)


@I.ir_module
class Showing:
    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")) -> R.Tuple:
        s = R.comm.expose(x)
        _ = R.comm.release(s)
        return R.tuple()


@I.ir_module
class OfAPart:
    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32")) -> R.Tensor((2,), "float32"):
        y = R.comm.own_slice(x, 1, (2,))
        return y


@pytest.mark.parametrize("module", [Showing, OfAPart])
def test_functions_that_show_or_know_their_place_ask_first(module: tvm.IRModule) -> None:
    first = RequireWorkers(2)(module)["main"].body.blocks[0].bindings[0].value
    assert str(first.op.global_symbol) == "tvm_ipc.require_workers"


def test_the_name_of_the_check_is_taken() -> None:
    @I.ir_module
    class Taken:
        @R.function(pure=False)
        def tvm_ipc_require_workers(x: R.Tensor((4,), "float32")) -> R.Tuple:
            _ = R.call_packed("tvm_ipc.allreduce", x, 0, 0, 0, 0, x, ty_args=(R.Tuple([]),))
            return R.tuple()

    with pytest.raises(
        TransformError, match="already has a function named 'tvm_ipc_require_workers'"
    ):
        RequireWorkers(2)(Taken)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    folder = tmp_path_factory.mktemp("libraries")

    def compiled(mod: tvm.IRModule, *world: int) -> str:
        name = "Local" if mod is Local else "Summed"
        path: Path = folder / f"{name}-{'-'.join(map(str, world))}.so"
        if not path.exists():
            size, groups = world if world else (None, None)
            pipeline = tvm_ipc.get_pipeline("llvm", size, num_groups=groups) if size else "default"
            tvm.compile(mod, "llvm", relax_pipeline=pipeline).export_library(str(path))
        return str(path)

    return compiled


@pytest.fixture(scope="module", params=[(2, 1), (4, 2)], ids=["2 workers", "2 groups"])
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    workers, groups = request.param
    with tvm_ipc.Session(workers, num_groups=groups, threads=workers > 2) as session:
        yield session


SIZES = {
    (1, 1): "1 worker",
    (2, 1): "2 workers",
    (4, 1): "4 workers",
    (4, 2): "4 workers in 2 groups",
    (4, 4): "4 workers in 4 groups",
}


@pytest.mark.parametrize("world", SIZES)
def test_sessions_of_another_size_refuse_a_module(
    world: tuple[int, int], session: Any, library: Callable[..., str]
) -> None:
    x = np.arange(4, dtype="float32")
    module = session.load_vm_module(library(Summed, *world))
    own = (2, 1) if session.num_workers == 2 else (4, 2)
    if world == own:
        # A group is of two in both.
        assert np.array_equal(session.get(module["main"](session.put(x))), 2 * 2 * x)
        return
    refusal = f"compiled for {SIZES[world]}, and this session has {SIZES[own]};"
    with pytest.raises(WorkerError, match=refusal):
        session.sync()
    # Nor does a function with a collective run that is called all the same. Another one does.
    assert np.array_equal(session.get(module["alone"](session.put(x))), 2 * x)
    with pytest.raises(WorkerError, match=refusal):
        session.get(module["main"](session.put(x)))


def test_what_does_not_depend_on_the_workers_loads_anywhere(
    session: Any, library: Callable[..., str]
) -> None:
    x = np.arange(4, dtype="float32")
    for path in (library(Local, 3, 1), library(Local), library(Summed)):
        module = session.load_vm_module(path)
        name = "main" if "Local" in path else "alone"
        assert np.array_equal(session.get(module[name](session.put(x))), 2 * x)


IN_DISCO = """
import sys, numpy as np, tvm_ipc
from tvm.runtime import disco

session = disco.ThreadedSession(2)
tvm_ipc.init_ccl(session)
x = session.empty((4,), "float32")
for rank in range(2):
    x.debug_copy_from(rank, np.ones(4, "float32"))
y = session.load_vm_module(sys.argv[1])["main"](x)
print(y.debug_get_from_remote(0).numpy().tolist())
session.shutdown()
"""


@pytest.mark.parametrize("world", [2, 3])
def test_sessions_of_disco_refuse_it_too(world: int, library: Callable[..., str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", IN_DISCO, library(Summed, world, 1)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if world == 2:
        assert result.stdout == "[4.0, 4.0, 4.0, 4.0]\n", result.stderr
    else:
        assert result.returncode != 0
        refusal = "compiled for 3 workers, and this session has 2 workers;"
        assert refusal in result.stderr, result.stderr
