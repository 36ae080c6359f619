# SPDX-License-Identifier: Apache-2.0
"""`get_pipeline` for the target cuda: what programs call. No GPU is needed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.s_tir import dlight
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tests.made_up_calibration import calibration
from tests.passes_of_tvm import ALLOCATE, FUSE, LOWER
from tvm_ipc import comm, pipeline
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions import find
from tvm_ipc.transform import collect_report

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
GRAPHS = {"relax.backend.use_cuda_graph": True}
DTYPES = ["float16", "bfloat16", "float32"]


def layers(dtype: str, rows: int | str = 4, norm: bool = True, in_group: bool = False) -> Any:
    """Two products with all-reduce, residual and norm; the weights are static for CUDA graphs."""
    builder = relax.BlockBuilder()
    n = tvm.tirx.Var(rows, "int64") if isinstance(rows, str) else rows
    x, residual = (relax.Var(name, R.Tensor((n, 64), dtype)) for name in ("x", "residual"))
    w, weight = relax.Var("w", R.Tensor((64, 64), dtype)), relax.Var("g", R.Tensor((64,), dtype))
    with builder.function("main", [x, residual, w, weight], {"num_input": 2}):
        with builder.dataflow():
            normed = x
            for _ in range(2):
                total = builder.emit(relax.op.matmul(normed, w))
                total = builder.emit(relax.op.ccl.allreduce(total, "sum", in_group))
                residual = builder.emit(relax.op.add(residual, total))
                normed = residual
                if norm:
                    normed = builder.emit(relax.op.nn.rms_norm(residual, weight, axes=[-1]))
            result = builder.emit_output(relax.op.add(normed, x))
        builder.emit_func_output(result)
    return builder.get()


@I.ir_module
class SequenceParallel:
    @R.function
    def main(
        x: R.Tensor((32, 64), "float16"),
        up: R.Tensor((64, 64), "float16"),
        down: R.Tensor((64, 64), "float16"),
    ):
        with R.dataflow():
            rows = R.comm.allgather(x, workers=2)
            y = R.nn.relu(R.matmul(rows, up))
            z = R.comm.reduce_scatter(R.matmul(y, down), "sum", workers=2)
            out = R.add(z, x)
            R.output(out)
        return out


@I.ir_module
class Beside:
    """A sum, and products that do not need it, but for the addition at the end."""

    @R.function
    def main(
        x: R.Tensor((32, 64), "float16"),
        w: R.Tensor((64, 64), "float16"),
        v: R.Tensor((64, 64), "float16"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            total = R.comm.allreduce(R.matmul(x, w), "sum")
            y = R.nn.relu(R.matmul(x, v))
            z = R.nn.relu(R.matmul(y, v))
            out = R.add(total, R.matmul(z, v))
            R.output(out)
        return out


def lower(mod: Any, *, graphs: bool = False, **options: Any) -> Any:
    with tvm.transform.PassContext(config=GRAPHS if graphs else {}):
        return tvm_ipc.get_pipeline(TARGET, 2, **options)(mod)


def packed(function: Any) -> list[str]:
    """The packed functions of ours that a function calls, without what only finds memory."""
    found = re.findall(r'call_packed\("((?:tvm_ipc|runtime\.disco)\.[\w.]+)', function.script())
    return [
        name
        for name in found
        if not name.endswith(("alloc_tensor", ".view", "own_slice", "require_workers"))
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduces_read_memory_that_peers_map(dtype: str) -> None:
    main = lower(layers(dtype, norm=False))["main"]
    assert packed(main) == [
        "runtime.disco.cuda_ipc.alloc_storage",
        "tvm_ipc.allreduce",  # which is told to leave its exit barrier out
        "tvm_ipc.allreduce",
    ]


@pytest.mark.parametrize("rows", [4, "n"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_fused_with_the_sum_before_them(dtype: str, rows: int | str) -> None:
    with collect_report() as report:
        mod = lower(layers(dtype, rows))
    names = packed(mod["main"])
    assert names.count("tvm_ipc.allreduce_rms_norm") == 2
    assert not any("rms_norm" in one.name_hint for one in mod.get_global_vars())
    said = [one.verdict for one in report.decisions if one.pass_name == "StaticPlanBlockMemory"]
    assert said == ["barrier left out", "barrier kept"]
    apart = packed(lower(layers(dtype, rows), fuse_epilogue=False)["main"])
    assert not any("rms_norm" in name for name in apart)


@pytest.mark.parametrize(
    ("graphs", "options", "fused"),
    [
        *((False, {}, True), (False, {"fuse_epilogue": False}, False)),
        *((True, {}, False), (True, {"fuse_epilogue": True}, True)),
    ],
)
def test_norms_are_fused_unless_graphs_capture_the_program(
    graphs: bool, options: dict[str, bool], fused: bool
) -> None:
    """In a graph three kernels are faster than one (docs/gpus.md); the report gives the reason."""
    with collect_report() as report:
        names = packed(lower(layers("bfloat16"), graphs=graphs, **options)["main"])
    assert ("tvm_ipc.allreduce_rms_norm" in names) == fused
    reasons = [one.reason for one in report.decisions if one.verdict == "not fused"]
    assert any("CUDA graphs" in reason for reason in reasons) == (graphs and not options)


@pytest.mark.parametrize("rows", [4, "n"])
def test_the_program_compiles(rows: int | str) -> None:
    """Epsilon, and what is computed of sizes, is the host's; kernels are source for the GPU."""
    executable = tvm.compile(
        layers("bfloat16", rows), TARGET, relax_pipeline=tvm_ipc.get_pipeline(TARGET, 2)
    )
    (host,) = executable.mod.imports
    (device,) = host.imports
    assert (host.kind, device.kind) == ("llvm", "cuda")
    assert "__global__" in device.inspect_source()


def test_kernels_read_no_bools() -> None:
    """TVM's code for GPUs reads two bools as two of 16 bits: what it masks ends elsewhere."""
    mesh = comm.Mesh({"tp": 2})
    builder = relax.BlockBuilder()
    x, w, v = (
        relax.Var(name, R.Tensor(shape, "float32"))
        for name, shape in (("x", (5, 6)), ("w", (6, 7)), ("v", (7, 8)))
    )
    with builder.function("main", [x, w, v]):
        with builder.dataflow():
            columns = builder.emit(comm.place(w, mesh, {"tp": comm.Shard(1)}))
            h = builder.emit(relax.op.exp(builder.emit(relax.op.matmul(x, columns))))
            rows = builder.emit(comm.place(v, mesh, {"tp": comm.Shard(0)}))
            y = builder.emit_output(relax.op.matmul(h, rows))
        builder.emit_func_output(y)
    with collect_report() as report:
        pipeline_ = tvm_ipc.get_pipeline(TARGET, 2)
        executable = tvm.compile(builder.get(), TARGET, relax_pipeline=pipeline_)
    assert any(one.verdict == "filled with 0" for one in report.decisions)
    assert "bool*" not in executable.mod.imports[0].imports[0].inspect_source()


def test_rows_are_read_where_they_lie_beside_products() -> None:
    main = lower(SequenceParallel, overlap=2)["main"]
    names = [name.removeprefix("tvm_ipc.") for name in packed(main) if "alloc" not in name]
    assert names == [
        *("copy", "expose", "copy", "expose", "peer_view", "peer_view", "release"),
        *(
            "expose",
            "expose",
            "peer_view",
            "reduce_slices",
            "peer_view",
            "reduce_slices",
            "release",
        ),
    ]


def captured(mod: Any) -> set[str]:
    return {
        name
        for variable, function in mod.functions_items()
        if "cuda_graph_capture" in variable.name_hint
        for name in packed(function)
    }


def test_graphs_hold_collectives() -> None:
    fused = captured(lower(layers("float16"), graphs=True, fuse_epilogue=True))
    assert fused == {"tvm_ipc.allreduce_rms_norm"}
    apart = captured(lower(layers("float16"), graphs=True))
    assert apart == {"tvm_ipc.allreduce"}


@pytest.mark.parametrize("overlap", [None, 1, 2])
def test_graphs_hold_nothing_that_peers_are_told_of(overlap: int | None) -> None:
    mod = tvm.IRModule({"main": SequenceParallel["main"].with_attr("num_input", 1)})
    lowered = lower(mod, graphs=True, overlap=overlap)
    inside, outside = captured(lowered), packed(lowered["main"])
    told = {name for name in inside if (f := find(name)) and (f.exposes or f.releases or f.starts)}
    assert not told | inside & {"tvm_ipc.peer_view", "tvm_ipc.wait"}
    assert ("tvm_ipc.expose" in outside) is (overlap is not None)
    assert ("tvm_ipc.reduce_scatter" in inside) is (overlap is None)


# ---- pipelines that others have ----------------------------------------------------------------


PASSES = {"ours": tvm_ipc.transform, "TVM's": relax.transform}


def as_mlc_llm_does(passes: Any) -> tvm.transform.Pass:
    """The order of mlc-llm: with TVM's passes, or with ours, which are imported instead."""
    return tvm.transform.Sequential(
        [
            *FUSE,
            dlight.ApplyDefaultSchedule(
                dlight.gpu.Matmul(),
                dlight.gpu.GEMV(),
                dlight.gpu.Reduction(),
                dlight.gpu.GeneralReduction(),
                dlight.gpu.Fallback(),
            ),
            relax.transform.RewriteDataflowReshape(),
            *ALLOCATE,
            passes.IPCAllReduceRewrite(3),
            passes.StaticPlanBlockMemory(),
            (tvm_ipc.gpu if passes is tvm_ipc.transform else passes).RewriteCUDAGraph(),
            passes.LowerGPUIPCAllocStorage(),
            *LOWER,
        ]
    )


@pytest.mark.parametrize("graphs", [False, True], ids=["calls", "graphs"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("whose", PASSES)
def test_the_order_of_mlc_llm(whose: str, dtype: str, graphs: bool) -> None:
    seen = []

    @tvm.transform.module_pass(opt_level=0)
    def pipeline_for(mod: Any, _: Any) -> Any:
        with TARGET:
            seen.append(as_mlc_llm_does(PASSES[whose])(mod))
        return seen[-1]

    with tvm.transform.PassContext(config=GRAPHS if graphs else {}):
        module = layers(dtype, in_group=True)
        executable = tvm.compile(module, TARGET, relax_pipeline=pipeline_for)
    assert executable.mod.imports[0].imports[0].kind == "cuda"
    where = captured(seen[0]) if graphs else set(packed(seen[0]["main"]))
    assert "runtime.disco.cuda_ipc.custom_allreduce" in where
    found = re.search(
        r'"runtime\.disco\.cuda_ipc\.alloc_storage", R\.shape\(\[(\d+)\]\), R\.dtype\("(\w+)"\)',
        seen[0].script(),
    )
    assert found is not None
    # TVM's is given bytes, and has as many elements allocated.
    size = str(4 * 64 * (4 if dtype == "float32" else 2))
    assert found.groups() == (size, "uint8" if whose == "ours" else dtype)


# ---- what is refused ------------------------------------------------------------------------


def test_a_calibration_is_for_the_devices_it_was_measured_on() -> None:
    wrong = (
        r"overlap is a calibration of a machine with the backend 'shm', which does not apply to "
    )
    with pytest.raises(ValueError, match=wrong + "'cuda'; pass a number of chunks"):
        tvm_ipc.get_pipeline(TARGET, 2, overlap=calibration(machine="a machine", backend="shm"))
    with pytest.raises(ValueError, match=r"the backend 'cuda', which does not apply to 'llvm'"):
        tvm_ipc.get_pipeline("llvm", 2, overlap=calibration(backend="cuda"))
    tvm_ipc.get_pipeline(TARGET, 2, overlap=calibration(backend="cuda"))
    tvm_ipc.get_pipeline("llvm", 2, overlap=calibration(backend="shm"))


def test_graphs_of_tvms_pass_are_refused_where_they_hold_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "RewriteCUDAGraph", relax.transform.RewriteCUDAGraph)
    lower(SequenceParallel, graphs=True)
    with pytest.raises(TransformError) as refused:
        lower(SequenceParallel, graphs=True, overlap=1)
    text = str(refused.value)
    assert (
        "tvm_ipc.expose is captured in a CUDA graph; replays of main_cuda_graph_capture skip the"
        in text
    )
    assert "use tvm_ipc.gpu.RewriteCUDAGraph instead of TVM's" in text


@pytest.mark.parametrize("graphs", [False, True])
def test_works_stay_out_of_graphs(graphs: bool) -> None:
    """What is posted is waited for; kernels before and behind it are captured."""
    text = lower(Beside, graphs=graphs, async_collectives=True).script()
    assert text.index('"tvm_ipc.start"') < text.index('"tvm_ipc.wait"')
    captured = re.findall(r"def \w*cuda_graph_capture.*?return", text, re.DOTALL)
    assert len(captured) == (1 if graphs else 0)
    assert not any("tvm_ipc." in one for one in captured)
