# SPDX-License-Identifier: Apache-2.0
"""`get_pipeline`: from modules with collectives to what workers run."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tests.runtime.tensors_of_ranks import put_each
from tvm_ipc.errors import IPCError, TransformError
from tvm_ipc.runtime import config

RANKS = 2


def mlp(layers: int, rows: int | str, hidden: int = 32) -> Any:
    """Layers of x = allreduce(relu(x @ w)) with one weight, and what every rank had at the end."""
    builder = relax.BlockBuilder()
    n = tvm.tirx.Var(rows, "int64") if isinstance(rows, str) else rows
    x = relax.Var("x", R.Tensor((n, hidden), "float32"))
    w = relax.Var("w", R.Tensor((hidden, hidden), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = x
            for _ in range(layers):
                y = builder.emit(relax.op.nn.relu(relax.op.matmul(y, w)))
                y = builder.emit(relax.op.ccl.allreduce(y, "sum"))
            own = builder.emit(relax.op.add(y, x))
            result = builder.emit_output(relax.op.ccl.allgather(own, RANKS))
        builder.emit_func_output(result)
    return builder.get()


def mlp_in_numpy(layers: int, xs: list[Any], ws: list[Any]) -> Any:
    ys = xs
    for _ in range(layers):
        total = sum(np.maximum(y @ w, 0) for y, w in zip(ys, ws, strict=True))
        ys = [total] * len(xs)
    return np.concatenate([y + x for y, x in zip(ys, xs, strict=True)])


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with tvm_ipc.Session(RANKS, timeout=60) as session:
        yield session


def run(session: Any, path: Path, mod: Any, arguments: list[list[Any]], **options: Any) -> Any:
    """Build, load in the workers, call main with each rank's arguments, take rank 0's result."""
    pipeline = tvm_ipc.get_pipeline("llvm", RANKS, **options)
    tvm.compile(mod, "llvm", relax_pipeline=pipeline).export_library(str(path))
    main = session.load_vm_module(str(path))["main"]
    inputs = []
    for per_rank in zip(*arguments, strict=True):
        tensor = put_each(session, per_rank)
        inputs.append(tensor)
    return session.get(main(*inputs))


@pytest.mark.parametrize("strategy", ["auto", "oneshot", "twoshot", "default", 1])
@pytest.mark.parametrize(("declared", "rows"), [(5, 5), ("n", 5), ("n", 0), ("n", 64)])
def test_layers_in_workers(
    strategy: str | int, declared: int | str, rows: int, session: Any, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    xs = [random.uniform(-1, 1, (rows, 32)).astype("float32") for _ in range(RANKS)]
    ws = [random.uniform(-0.2, 0.2, (32, 32)).astype("float32") for _ in range(RANKS)]
    result = run(
        session,
        tmp_path / "mlp.so",
        mlp(3, declared),
        [[x, w] for x, w in zip(xs, ws, strict=True)],
        allreduce_strategy=strategy,
    )
    np.testing.assert_allclose(result, mlp_in_numpy(3, xs, ws), rtol=1e-4, atol=1e-5)


def test_module_without_collectives(tmp_path: Path) -> None:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 4), "float32")) -> R.Tensor(("n", 4), "float32"):
            with R.dataflow():
                y = R.add(R.multiply(x, x), x)
                R.output(y)
            return y

    executable = relax.build(Module, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 1))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    for rows in (0, 1, 7):
        x = np.arange(rows * 4, dtype="float32").reshape(rows, 4)
        np.testing.assert_array_equal(machine["main"](tvm.runtime.tensor(x)).numpy(), x * x + x)


def test_c_target_has_the_passes_of_llvm() -> None:
    executable = tvm.compile(mlp(2, 4), "c", relax_pipeline=tvm_ipc.get_pipeline("c", RANKS))
    assert "runtime.disco.cuda_ipc.alloc_storage" in executable.as_text()


def test_cuda_target_compiles_to_source() -> None:
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
    mod = tvm_ipc.get_pipeline(target, RANKS)(mlp(2, 4))
    text = mod.script()
    assert '"runtime.disco.cuda_ipc.alloc_storage"' in text
    assert "blockIdx.x" in text


def test_packed_plan_and_cuda_graphs_understand_each_other() -> None:
    with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": True}):
        text = tvm_ipc.get_pipeline({"kind": "cuda", "arch": "sm_90"}, RANKS)(mlp(3, 4)).script()
    assert "vm.builtin.cuda_graph.run_or_capture" in text
    assert '"tvm_ipc.alloc_tensor"' in text
    assert "R.vm.alloc_tensor(storage, 0" in text
    assert not re.search(r"R.vm.alloc_tensor\(storage\d*, [1-9]", text)


def test_dump_of_every_phase(tmp_path: Path) -> None:
    tvm_ipc.get_pipeline("llvm", RANKS, dump=tmp_path / "phases")(mlp(2, 4))
    files = sorted((tmp_path / "phases").iterdir())
    assert [file.name.split("-")[0] for file in files] == [
        str(number + 1) for number in range(len(files))
    ]
    assert "R.ccl" not in files[-1].read_text()
    assert 'R.str("ipc_memory")' in (tmp_path / "phases" / "5-rewrite.py").read_text()


def test_input_module_stays_as_it_was() -> None:
    mod = mlp(2, 4)
    before = mod.script()
    tvm_ipc.get_pipeline("llvm", RANKS)(mod)
    assert mod.script() == before


# ---- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("llvm", 2, "fastest"), ValueError, r"no all-reduce strategy 'fastest'.*'oneshot' \(1\)"),
        (
            ("metal", 2),
            ValueError,
            "is 'metal', but tvm_ipc has no collectives for 'metal'; ",
        ),
    ],
)
def test_wrong_options(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        tvm_ipc.get_pipeline(*arguments)


def test_world_that_the_groups_do_not_divide() -> None:
    with pytest.raises(ValueError, match="world_size 4 cannot be divided into num_groups 3"):
        tvm_ipc.get_pipeline("llvm", 4, num_groups=3)


def test_collective_for_another_number_of_workers() -> None:
    pipeline = tvm_ipc.get_pipeline("llvm", 4)
    with pytest.raises(TransformError, match=r"'main' has a relax.ccl.allgather over 2 workers"):
        pipeline(mlp(1, 4))


def test_collective_over_a_group() -> None:
    tvm_ipc.get_pipeline("llvm", 4, num_groups=2)(mlp(1, 4))


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_afterwards_as_it_was_before(enabled: bool) -> None:
    seen = []

    @tvm.transform.module_pass(opt_level=0)
    def schedule(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        seen.append(gc.isenabled())
        return mod

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        tvm_ipc.get_pipeline("llvm", 2, schedule=schedule)(mlp(1, 2))
        assert gc.isenabled() is enabled
        assert seen == [enabled]
    finally:
        (gc.enable if before else gc.disable)()


def test_module_that_is_not_well_formed() -> None:
    x = relax.Var("x", R.Tensor((4,), "float32"))
    stranger = relax.Var("stranger", R.Tensor((4,), "float32"))
    function = relax.Function([x], relax.SeqExpr([], stranger), R.Tensor((4,), "float32"))
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    with pytest.raises(TransformError, match="not well-formed"):
        tvm_ipc.get_pipeline("llvm", 2)(mod)


def test_module_with_a_call_of_no_type() -> None:
    x, y = (relax.Var(name, R.Tensor((4,), "float32")) for name in "xy")
    block = relax.BindingBlock([relax.VarBinding(y, relax.op.add(x, x))])  # by no block builder
    function = relax.Function([x], relax.SeqExpr([block], y), R.Tensor((4,), "float32"))
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    with pytest.raises(TransformError, match="not well-formed: The ty of Expr"):
        tvm_ipc.get_pipeline("llvm", 2)(mod)


@I.ir_module
class Hints:
    """Values that are said to be where they are anyhow."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0, "global")]})

    @R.function
    def main(c: R.Tensor((), "bool"), x: R.Tensor(("n", 4), "float32")):
        given = R.hint_on_device(x, R.device(1, 0), "global")
        y = R.exp(given)
        once = R.hint_on_device(y, R.device(1, 0))
        twice = R.hint_on_device(once, R.device(1, 0), "global")
        constant = R.hint_on_device(R.const([1.0, 2.0, 3.0, 4.0]), R.device(1, 0), "global")
        if c:
            branch = R.hint_on_device(twice, R.device(1, 0), "global")
        else:
            total = R.add(twice, constant)
            branch = R.hint_on_device(total, R.device(1, 0), "global")
        moved = R.to_vdevice(branch, "llvm:0")
        again = R.to_vdevice(moved, "llvm:0")
        result = R.hint_on_device(again, R.device(1, 0), "global")
        return (result, branch)


def test_hints_of_the_ordinary_scope_change_nothing() -> None:
    pipeline = tvm_ipc.get_pipeline("llvm", 1)
    executable = relax.build(Hints, "llvm", relax_pipeline=pipeline)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    x = np.random.default_rng(0).random((3, 4), dtype="float32")
    for c in (True, False):
        right = np.exp(x) if c else np.exp(x) + np.arange(1, 5, dtype="float32")
        for found in machine["main"](*map(tvm.runtime.tensor, (np.array(c), x))):
            np.testing.assert_allclose(found.numpy(), right, rtol=1e-5)


@pytest.mark.parametrize("device", [tvm.cuda(0), tvm.cpu(1)], ids=str)
def test_hints_of_other_devices_are_refused(device: Any) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((4,), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.hint_on_device(x, device)))
    with pytest.raises(TransformError, match="function 'main' has a hint_on_device for"):
        tvm_ipc.get_pipeline("llvm", 1)(builder.get())


@pytest.mark.parametrize("bounds", [{"n": 16}, {"n": 16, "m": 4}])
def test_extents_beyond_the_bounds_of_a_plan_are_refused(bounds: Any) -> None:
    """They would have tensors of one storage overlap."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", "m"), "float32")):
            R.func_attr({"tir_var_lower_bound": {"n": 2}})
            with R.dataflow():
                a = R.add(x, x)
                total = R.sum(R.concat([a, R.exp(a)], axis=0), axis=0)
                R.output(total)
            return total

    module = tvm.IRModule({"main": Module["main"].with_attr("tir_var_upper_bound", bounds)})
    pipeline = tvm_ipc.get_pipeline("llvm", world_size=1)
    program = tvm.compile(module, target="llvm", relax_pipeline=pipeline)
    main = relax.VirtualMachine(program, tvm.cpu())["main"]
    for shape in ((2, 4), (16, 4), (7, 0)):
        x = np.random.rand(*shape).astype("float32")
        expected = (2 * x).sum(0) + np.exp(2 * x).sum(0)
        np.testing.assert_allclose(main(tvm.runtime.tensor(x)).numpy(), expected, rtol=1e-5)
    for shape, text in (
        ((17, 4), r"main: n is 17, .* 2 to 16"),
        ((1, 4), r"main: n is 1, .* 2 to"),
    ):
        with pytest.raises(ValueError, match=text):
            main(tvm.runtime.tensor(np.ones(shape, "float32")))
    if "m" in bounds:
        with pytest.raises(ValueError, match=r"main: m is 5, .* 0 to 4"):
            main(tvm.runtime.tensor(np.ones((2, 5), "float32")))


@tvm.transform.module_pass(opt_level=0, name="ForgetABinding")
def forget_a_binding(mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
    """Remove the first binding of `main`, whose variable is used later."""
    function = mod["main"]
    first, *others = function.body.blocks
    block = relax.BindingBlock(list(first.bindings)[1:])
    body = relax.SeqExpr([block, *others], function.body.body)
    result = mod.clone()
    result["main"] = relax.Function(function.params, body, function.ret_ty, function.is_pure)
    return result


def test_each_phase_is_verified_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tvm_ipc.get_pipeline("llvm", RANKS, schedule=forget_a_binding)
    with pytest.raises(TransformError, match=r"after the phase 'schedule', function 'main' is not"):
        pipeline(mlp(1, 4))
    phases: list[str] = []
    monkeypatch.setattr(tvm_ipc.pipeline, "check_phase", lambda name, _mod: phases.append(name))
    tvm_ipc.get_pipeline("llvm", RANKS)(mlp(1, 4))
    assert phases == [
        *("placements", "dispatch", "legalize", "schedule", "dataflow"),
        *("rewrite", "plan", "verify", "lower", "finalize"),
    ]
    for off in ("0", ""):
        monkeypatch.setenv("TVM_IPC_VERIFY_EACH", off)
        tvm_ipc.get_pipeline("llvm", RANKS)(mlp(1, 4))
    assert len(phases) == 10
    monkeypatch.setenv("TVM_IPC_VERIFY_EACH", "yes")
    with pytest.raises(IPCError, match="TVM_IPC_VERIFY_EACH is 'yes'; it must be 0 or 1"):
        tvm_ipc.get_pipeline("llvm", RANKS)


def test_tests_verify_each_phase_in_other_processes_too(run_python: Callable[..., str]) -> None:
    assert config.verify_each()
    code = "from tvm_ipc.runtime import config; print(config.verify_each())"
    assert run_python(code).strip() == "True"
