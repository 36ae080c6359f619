# SPDX-License-Identifier: Apache-2.0
"""Programs that say with TVM's annotations how their weights are divided: no plan is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.distributed import DeviceMesh
from tvm.relax.distributed import Placement as DistPlacement
from tvm.relax.expr_functor import PyExprMutator, mutator

from tests.end_to_end.test_parallelize import run
from tests.one_function_modules import one_function
from tvm_ipc import parallelize
from tvm_ipc.comm import Mesh, Shard


@mutator
class _Annotating(PyExprMutator):
    """Annotates parameters where they are used."""

    def __init__(self, placed: dict[relax.Var, relax.Expr]) -> None:
        super().__init__()
        self.placed = placed

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self.placed.get(var, var)


def annotated(mod: tvm.IRModule, plan: dict[str, str], grid: DeviceMesh) -> tvm.IRModule:
    """Return the module with annotations at its beginning, by the names of parameters."""
    function = mod["main"]
    placed = {}
    first = []
    for param in function.params:
        if str(param.name) in plan:
            spec = DistPlacement.from_text(plan[str(param.name)])
            call = relax.BlockBuilder().normalize(
                op.distributed.annotate_sharding(param, grid, spec)
            )
            placed[param] = relax.Var(f"{param.name}_annotated", param.ty)
            first.append(relax.VarBinding(placed[param], call))
    assert len(first) == len(plan)
    body = _Annotating(placed).visit_expr(function.body)
    body = relax.SeqExpr([relax.BindingBlock(first), *body.blocks], body.body)
    new = relax.Function(function.params, body, function.ret_ty, attrs=function.attrs)
    return tvm.IRModule({"main": relax.BlockBuilder().normalize(new)})


def mlp(rows: Any) -> tvm.IRModule:
    shapes = {"x": (rows, 8), "up": (8, 10), "up_bias": (10,), "down": (10, 8), "down_bias": (8,)}

    def result(emit: Any, x: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
        hidden = emit(op.nn.silu(op.add(op.matmul(x, up), up_bias)))
        return op.add(op.matmul(hidden, down), down_bias)

    return one_function(result, shapes, num_input=1)


PLAN = {"up": "S[1]", "up_bias": "S[0]", "down": "S[0]"}


def arrays_of(mod: tvm.IRModule) -> list[Any]:
    random = np.random.default_rng(3)
    return [
        random.normal(0, 1, [int(extent) for extent in param.ty.shape]).astype("float32")
        for param in mod["main"].params
    ]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_an_mlp(workers: int) -> None:
    """The bias is added once, and the sum is that of the whole product."""
    mod = mlp(5)
    x, up, up_bias, down, down_bias = arrays = arrays_of(mod)
    hidden = x @ up + up_bias
    expected = hidden / (1 + np.exp(-hidden)) @ down + down_bias
    made = parallelize(
        annotated(mod, PLAN, DeviceMesh((workers,), list(range(workers)))), {}, workers
    )
    assert made.mesh == Mesh({"axis0": workers})
    assert made.collectives == {"allreduce": 1}
    assert made.shards["up"].placements == (Shard(1),)
    assert made.shards["up"].shard_shape == (8, -(-10 // workers))
    for found in run(made, "main", arrays):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_grid() -> None:
    """Rows of the input along one axis, which the caller cuts too, weights along the other."""
    grid = DeviceMesh((2, 2), [2, 0, 3, 1])
    plan = {name: f"R, {one}" for name, one in PLAN.items()} | {"x": "S[0], R"}
    mod = mlp(6)
    arrays = arrays_of(mod)
    x, up, up_bias, down, down_bias = arrays
    hidden = x @ up + up_bias
    expected = hidden / (1 + np.exp(-hidden)) @ down + down_bias
    made = parallelize(annotated(mod, plan, grid), {}, 4)
    assert made.shards["x"].is_input
    assert made.collectives == {"allreduce": 1, "allgather": 1}
    for found in run(made, "main", arrays):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_functions_that_differ() -> None:
    grid = DeviceMesh((2,), [0, 1])
    one, other = (annotated(mlp(5), {"up": where}, grid)["main"] for where in ("S[0]", "S[1]"))
    mod = tvm.IRModule({"one": one, "other": other})
    with pytest.raises(ValueError, match=r"'one' places 'up' on S\[0\].* and function 'other'"):
        parallelize(mod, {}, 2)


def test_a_function_that_says_nothing_takes_what_another_says() -> None:
    """They share their weights."""
    grid = DeviceMesh((2,), [0, 1])
    said = annotated(mlp(5), PLAN, grid)["main"]
    mod = tvm.IRModule({"said": said, "silent": mlp(7)["main"]})
    made = parallelize(mod, {}, 2)
    assert made.collectives == {"allreduce": 2}
    assert [int(extent) for extent in made.module["silent"].params[1].ty.shape] == [8, 5]


def test_the_plan_is_first() -> None:
    """What it says of a parameter holds; the annotation moves it."""
    mod = annotated(mlp(5), {"up": "S[1]"}, DeviceMesh((2,), [0, 1]))
    made = parallelize(mod, {"up": Shard(0)}, 2)
    assert made.shards["up"].placements == (Shard(0),)
    assert made.collectives == {"all_to_all": 1, "allreduce": 1}


def test_a_mesh_of_another_size() -> None:
    mod = annotated(mlp(5), PLAN, DeviceMesh((2,), [0, 1]))
    with pytest.raises(ValueError, match=r"places tensors on Mesh\(\{'axis0': 2\}\), and mesh is"):
        parallelize(mod, {}, 3)


RESNETS = [
    (dtype, dynamic, workers)
    for dtype in ("float32", "bfloat16")
    for dynamic in (True, False)
    for workers in (1, 2, 3, 4)
]


@pytest.mark.parametrize(("dtype", "dynamic", "workers"), RESNETS)
def test_a_resnet(dtype: str, dynamic: bool, workers: int, pytestconfig: pytest.Config) -> None:
    """Channels of a block's first convolution, and of what is summed in its last one."""
    few = {("bfloat16", True, 3)}
    if not pytestconfig.getoption("--every-model") and (dtype, dynamic, workers) not in few:
        pytest.skip("--every-model runs it")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tvm.relax.frontend.torch import from_exported_program

    from tests.end_to_end.transformers_models import Call
    from tvm_ipc.models.hf.torch_operators import OPERATORS

    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=6, hidden_sizes=[6, 9], depths=[1, 2], layer_type="basic", num_labels=7
        )
    ).eval()
    for buffer in (*model.parameters(), *model.buffers()):
        if buffer.dim() == 1:
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    model = model.to(getattr(torch, dtype))

    class Logits(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, pixels: Any) -> Any:
            return self.inner(pixels).logits

    images = torch.export.Dim("images", min=1, max=8)
    pixels = torch.randn(3 if dynamic else 2, 3, 32, 32).to(getattr(torch, dtype))
    program = torch.export.export(
        Logits(model), (pixels[:2],), dynamic_shapes=({0: images},) if dynamic else None
    )
    mod = from_exported_program(program, keep_params_as_input=True, custom_convert_map=OPERATORS)
    mod, weights = relax.frontend.detach_params(mod)
    with torch.no_grad():
        said = Logits(model)(pixels).float().numpy()
        call = Call([], said, Logits(model.float())(pixels.float()).numpy())
    plan = {}
    for param in mod["main"].params:
        name = str(param.name)
        if "_layer_0_" in name:  # a block's first convolution and norm
            plan[name] = "S[0]"
        elif "_layer_1_convolution" in name:
            plan[name] = "S[1]"
    grid = DeviceMesh((workers,), list(range(workers)))
    made = parallelize(annotated(mod, plan, grid), {}, workers)
    assert made.collectives == {"allreduce": 3}, "one a block"
    arrays = [tvm.runtime.from_dlpack(pixels).numpy(), *(one.numpy() for one in weights["main"])]
    for found in run(made, "main", arrays):
        call.check(found[0].numpy())
