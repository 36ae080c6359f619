# SPDX-License-Identifier: Apache-2.0
"""Styles: those of transformers and PyTorch, by name and as objects, and models with a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from tvm import relax
from tvm.relax import op

from tests.one_function_modules import one_function
from tvm_ipc import parallelize
from tvm_ipc.comm import Mesh, Replica, Shard
from tvm_ipc.spmd.plan_parser import read_plan
from tvm_ipc.spmd.weight_placements_of_styles import STYLES, Matmul, Use

PAIR = Mesh({"tp": 2})
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (10, 6),
    "layers.0.q.weight": (8, 6),
    "layers.0.q.bias": (8,),
    "layers.0.mlp.experts.up": (4, 12, 6),
    "layers.0.mlp.experts.down": (4, 6, 12),
    "layers.0.conv.weight": (8, 6, 3, 3),
}
UNUSED = Use(unused=True)
TABLE = Use(rows={0})
HEAD = Matmul("logits", outputs=frozenset({0}), inputs=frozenset({1}))
TIED = Use(rows={0}, matmuls=[HEAD])
EXPERTS = Use(matmuls=[Matmul("h", outputs=frozenset({1}), inputs=frozenset({2}))])


def lies(style: Any, name: str, use: Use = UNUSED) -> Any:
    return read_plan({name: style}, PAIR, SHAPES, lambda _: use).placements[name][0]


# What PyTorch has, without PyTorch: it is recognised by its names.
class Replicate:
    pass


class TorchShard:
    def __init__(self, dim: int) -> None:
        self.dim = dim


TorchShard.__name__ = "Shard"


class ColwiseParallel:
    def __init__(self, output_layouts: Any = None) -> None:
        self.output_layouts = (output_layouts or TorchShard(-1),)


class RowwiseParallel:
    def __init__(self, output_layouts: Any = None) -> None:
        self.output_layouts = (output_layouts or Replicate(),)


class SequenceParallel:
    def __init__(self, dim: int) -> None:
        self.sequence_sharding = (TorchShard(dim),)


class PrepareModuleInput:
    def __init__(self, *desired: Any) -> None:
        self.desired_input_layouts = desired


@pytest.mark.parametrize(
    ("style", "matrix", "bias", "experts"),
    [
        ("colwise", Shard(0), Shard(0), Shard(1)),
        ("colwise_gather_output", Shard(0), Shard(0), Shard(1)),
        ("local_colwise", Shard(0), Shard(0), Shard(1)),
        ("rowwise", Shard(1), Replica(), Shard(2)),
        ("rowwise_split_input", Shard(1), Replica(), Shard(2)),
        ("packed_colwise", Shard(0), Shard(0), Shard(1)),
        ("packed_rowwise", Shard(1), Replica(), Shard(2)),
        ("grouped_gemm", Shard(0), Shard(0), Shard(0)),
        ("ep_router", Replica(), Replica(), Replica()),
        ("mla_kv_a_proj", Replica(), Replica(), Replica()),
        ("replicated_with_grad_allreduce", Replica(), Replica(), Replica()),
        ("sequence_parallel", Replica(), Replica(), Replica()),
        (ColwiseParallel(), Shard(0), Shard(0), Shard(1)),
        (RowwiseParallel(), Shard(1), Replica(), Shard(2)),
        ("RowwiseParallel", Shard(1), Replica(), Shard(2)),
    ],
)
def test_axes_of_weights(style: Any, matrix: Any, bias: Any, experts: Any) -> None:
    """Outputs are the last axis but one, also of a stack of matrices, and inputs the last one."""
    assert lies(style, "layers.0.q.weight") == matrix
    assert lies(style, "layers.0.q.bias") == bias
    assert lies(style, "layers.0.mlp.experts.up") == experts


def test_tables() -> None:
    """Of a table the rows are inputs and the columns outputs, if it is no matrix as well."""
    assert lies("embedding_rowwise", "embed.weight") == Shard(0)
    assert lies("embedding_colwise", "embed.weight") == Shard(1)
    assert lies("rowwise", "embed.weight", TABLE) == Shard(0)
    assert lies("colwise", "embed.weight", TABLE) == Shard(1)
    assert lies("colwise", "embed.weight", TIED) == Shard(0)
    assert lies("embedding_rowwise", "embed.weight", TIED) == Shard(0)
    assert lies("colwise", "layers.0.mlp.experts.up", EXPERTS) == Shard(1)
    assert lies("rowwise", "layers.0.mlp.experts.up", EXPERTS) == Shard(2)
    with pytest.raises(ValueError, match=r"'embed.weight': the program uses it both as a t"):
        lies("rowwise", "embed.weight", TIED)


def test_what_a_module_is_used_for() -> None:
    """Whether a weight is a table is read from the program."""
    mod = one_function(
        lambda emit, ids, table, head: op.matmul(
            emit(op.take(table, ids, 0)), op.permute_dims(head)
        ),
        {"ids": relax.TensorType((5,), "int64"), "table": (10, 6), "head": (10, 6)},
        num_input=1,
    )
    plan = {"table": RowwiseParallel(), "head": ColwiseParallel(Replicate())}
    made = parallelize(mod, plan, 2)
    assert made.shards["table"].placements == (Shard(0),)
    assert made.shards["head"].placements == (Shard(0),)
    assert made.collectives == {"allreduce": 1, "allgather": 1}


def test_placements_of_torch() -> None:
    assert lies(TorchShard(0), "layers.0.q.weight") == Shard(0)
    assert lies(TorchShard(-1), "layers.0.q.weight") == Shard(1)
    assert lies(Replicate(), "layers.0.q.weight") == Replica()
    with pytest.raises(ValueError, match=r"S\[2\]: 'layers.0.q.weight' has no axis 2"):
        lies(TorchShard(2), "layers.0.q.weight")
    with pytest.raises(TypeError, match="is a placement, such as"):
        lies(TorchShard(-3), "layers.0.q.weight")


def test_hooks_say_nothing_of_weights() -> None:
    """They are found by the name of any module around weights."""
    plan = {
        "layers.*.mlp.experts.up": "packed_colwise",
        "layers.*.mlp.experts.down": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp": "gather",
        "layers.*.mlp.experts.identity_expert": "moe_identity_expert",
        "layers.*.q": PrepareModuleInput(Replicate(), None),
    }
    assert read_plan(plan, PAIR, SHAPES).placements == {
        "layers.0.mlp.experts.up": (Shard(1),),
        "layers.0.mlp.experts.down": (Shard(2),),
    }
    for pattern in ("layers.*.mlp.expert", "layers.*.mlp.expert.identity_expert"):
        style = "moe_identity_expert" if "identity" in pattern else "moe_tp_experts"
        with pytest.raises(ValueError, match="matches no parameter"):
            read_plan({pattern: style}, PAIR, SHAPES)


@pytest.mark.parametrize(
    ("style", "words"),
    [
        ("keep_full_weight", "'keep_full_weight' is a style for data parallelism"),
        ("colwize", "not 'colwize'; a similar style is 'colwise'"),
        (PrepareModuleInput(TorchShard(1)), "the PrepareModuleInput shards axis 1"),
    ],
)
def test_what_is_refused(style: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        lies(style, "layers.0.q.weight")


def test_a_style_for_matrices_is_none_for_images() -> None:
    with pytest.raises(
        ValueError, match=r"'layers.0.conv.weight' has the shape \(8, 6, 3, 3\); write a plac"
    ):
        lies("colwise", "layers.0.conv.weight")


class Model:
    """What a model of transformers has."""

    def __init__(
        self, plan: Mapping[str, str], *modules: str, parameters: Iterable[str] = SHAPES
    ) -> None:
        self.tp_plan, self.modules, self.parameters = plan, modules, parameters

    def named_modules(self) -> list[tuple[str, None]]:
        return [("", None), *((name, None) for name in self.modules)]

    def named_parameters(self, remove_duplicate: bool) -> list[tuple[str, None]]:
        return [(name, None) for name in self.parameters]


def test_a_model_is_the_plan_that_it_has() -> None:
    """Entries for layers that this one does not have are left out, others must fit the program."""
    plan = {"layers.*.q": "colwise", "layers.*.shared": "rowwise"}
    found = read_plan(Model(plan, "layers.0.q"), PAIR, SHAPES).placements
    assert found == {"layers.0.q.weight": (Shard(0),), "layers.0.q.bias": (Shard(0),)}
    with pytest.raises(ValueError, match=r"'layers.\*.shared' matches no parameter"):
        read_plan(Model(plan, "layers.0.q", "layers.0.shared"), PAIR, SHAPES)
    with pytest.raises(ValueError, match="Model has no plan of its own"):
        read_plan(Model({}), PAIR, SHAPES)


def test_all_styles_of_transformers() -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor_parallel = pytest.importorskip(
        "transformers.integrations.tensor_parallel", reason="transformers is not installed"
    )
    known = set(tensor_parallel.ALL_PARALLEL_STYLES.keys())
    assert len(known) > 10
    assert known <= set(STYLES), "a style that nobody has looked at"


def test_objects_of_torch() -> None:
    """Those above are like PyTorch's own."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch.distributed.tensor import Replicate as WholeOfTorch
    from torch.distributed.tensor import Shard as PartOfTorch
    from torch.distributed.tensor import parallel

    def results(style: Any) -> Any:
        name = "layers.0.q.weight"
        return read_plan({name: style}, PAIR, SHAPES).styles.get(name)

    def result(style: Any) -> Any:
        return results(style)["tp"].result

    assert lies(parallel.ColwiseParallel(), "layers.0.q.weight") == Shard(0)
    assert lies(parallel.RowwiseParallel(), "layers.0.q.weight") == Shard(1)
    assert lies(parallel.RowwiseParallel(), "embed.weight", TABLE) == Shard(0)
    assert lies(PartOfTorch(-2), "layers.0.q.weight") == Shard(0)
    assert lies(WholeOfTorch(), "layers.0.q.weight") == Replica()
    assert result(parallel.ColwiseParallel()) is None
    assert result(parallel.ColwiseParallel(output_layouts=WholeOfTorch())) is None
    assert result(parallel.RowwiseParallel()) is None
    assert result(parallel.RowwiseParallel(output_layouts=PartOfTorch(1))) == 1
    assert result(parallel.SequenceParallel(sequence_dim=2)) == 2
    prepared = parallel.PrepareModuleInput(
        input_layouts=(PartOfTorch(1), None), desired_input_layouts=(WholeOfTorch(), None)
    )
    assert results(prepared) is None
    given = parallel.PrepareModuleOutput(
        output_layouts=WholeOfTorch(), desired_output_layouts=PartOfTorch(1)
    )
    with pytest.raises(ValueError, match="PrepareModuleOutput shards axis 1"):
        results(given)
