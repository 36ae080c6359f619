# SPDX-License-Identifier: Apache-2.0
"""Plans that are found: as good as those that people write, explained, and soon."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tests.end_to_end.small_decoder import PLAN, Decoder
from tests.one_function_modules import one_function
from tvm_ipc import comm, parallelize
from tvm_ipc.comm import Mesh, Replica, Shard
from tvm_ipc.spmd import Parallelized
from tvm_ipc.spmd.op_costs import Costs, Seconds, nominal, predicted

#: Large enough that it is worth to divide it.
LARGE = {"heads": 8, "kv_heads": 4, "width": 32, "inner": 704, "vocabulary": 8000}


def seconds(made: Parallelized) -> float:
    """Return what one rank is predicted to take for what it really runs."""
    return predicted(made.module, Costs(nominal(len(made.mesh.ranks)))).total


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_decoder_is_divided_as_people_do(workers: int) -> None:
    decoder = Decoder(**LARGE)
    made = parallelize(decoder.module, "auto", workers)
    own = parallelize(decoder.module, PLAN, workers)
    assert seconds(made) <= 1.05 * seconds(own)
    assert made.bytes_per_rank < own.bytes_per_rank, "the table of the vocabulary is divided too"
    assert made.collectives == {"allreduce": 5, "allgather": 1}
    first = [made.shards[f"model.layers.0.self_attn.{one}_proj.weight"] for one in "qkvo"]
    axes = [one.placements[0].axis for one in first]  # type: ignore[union-attr]
    assert axes == [0, 0, 0, 1]


def test_layers_are_divided_alike_and_in_seconds() -> None:
    """After the first layer nothing is left to choose."""
    made = parallelize(Decoder(**LARGE, layers=16).module, "auto", 2)
    assert made.collectives == {"allreduce": 33, "allgather": 1}


def mlp(widths: list[int], rows: int) -> tuple[tvm.IRModule, dict[str, Any]]:
    """Return a stack of products, and the plan that people would write for it."""
    shapes = {f"layers.{k}.weight": pair for k, pair in enumerate(pairwise(widths))}

    def result(emit: Any, y: relax.Expr, *weights: relax.Var) -> relax.Expr:
        for weight in weights:
            y = emit(op.nn.relu(emit(op.matmul(y, weight))))
        return y

    mod = one_function(result, {"x": (rows, widths[0]), **shapes}, num_input=1)
    return mod, {f"layers.{k}": Shard((k + 1) % 2) for k in range(len(shapes))}


@pytest.mark.parametrize("seed", range(12))
def test_stacks_of_products(seed: int) -> None:
    random = Random(seed)
    widths = [random.choice((96, 200, 512, 1024)) for _ in range(random.randint(2, 7))]
    mod, own = mlp(widths, random.choice((1, 16, 200)))
    workers = random.choice((2, 3, 4))
    found, written = parallelize(mod, "auto", workers), parallelize(mod, own, workers)
    whole = parallelize(mod, {"layers.0": "R"}, workers)
    assert seconds(found) <= 1.1 * min(seconds(written), seconds(whole))


def test_what_the_report_says_is_what_the_program_has() -> None:
    made = parallelize(Decoder(**LARGE).module, "auto", 4)
    said = re.search(r"sharding: ([\d.]+) ms .* of which [\d.]+ ms are (\d+) coll", made.notes[0])
    assert said is not None
    assert float(said[1]) == pytest.approx(seconds(made) * 1e3, rel=0.02)
    assert int(said[2]) == sum(made.collectives.values())
    assert "from nominal figures, since there is no calibration" in made.notes[0]
    assert made.notes[0] in str(made)


def test_nothing_is_divided_in_silence() -> None:
    """Where it does not pay, the report says what the best division would take."""
    mod, _ = mlp([16, 16, 16], 1)
    made = parallelize(mod, "auto", 2)
    assert made.collectives == {}
    assert re.match(
        r"automatic sharding: no weight is sharded, which is predicted to be fastest: [\d.]+ ms, "
        r"and the best plan with sharded weights takes [\d.]+ ms .* of which [\d.]+ ms are "
        r"\d collectives?; predicted from",
        made.notes[0],
    )
    alone = parallelize(mod, "auto", 1)
    assert "no weight has an axis that several ranks could share" in alone.notes[0]


def test_what_is_said_holds() -> None:
    """Some patterns, and the best of the rest."""
    decoder = Decoder(**LARGE)
    plan = {"lm_head": "replicated", "layers.*.mlp.down_proj": "S[0]", "*": "auto"}
    made = parallelize(decoder.module, plan, 2)
    assert made.shards["lm_head.weight"].placements == (Replica(),)
    assert made.shards["model.layers.1.mlp.down_proj.weight"].placements == (Shard(0),)
    assert made.shards["model.layers.1.self_attn.q_proj.weight"].placements == (Shard(0),)
    only = parallelize(decoder.module, {"layers.*.mlp.*": "auto"}, 2)
    divided = [one.name for one in only.shards.values() if one.placements != (Replica(),)]
    assert len(divided) == 6
    assert all(".mlp." in name for name in divided)


def test_the_calibration_decides() -> None:
    decoder = Decoder(**LARGE)
    slow = dataclasses.replace(nominal(2), machine="a far one", bandwidth=1e6, latency=1e-2)
    made = parallelize(decoder.module, "auto", 2, calibration=slow)
    assert made.collectives == {}
    assert "from the calibration of a far one" in made.notes[0]


@pytest.mark.parametrize("rows", [8, 2000])
@pytest.mark.parametrize("mesh", [Mesh({"dp": 2, "tp": 4}), Mesh({"tp": 2, "dp": 2})])
def test_weights_along_the_axis_that_divides_no_input(mesh: Mesh, rows: int) -> None:
    mod, plan = mlp([1024, 4096, 1024, 4096, 1024], rows)
    batch = {"x": {"dp": Shard(0)}}
    made = parallelize(mod, {**batch, "*": "auto"}, mesh)
    own = {name: {"tp": given} for name, given in plan.items()}
    people = parallelize(mod, {**batch, **own}, mesh)
    costs = Costs(nominal(mesh.extent("tp")))
    assert predicted(made.module, costs).total <= 1.1 * predicted(people.module, costs).total
    whole = parallelize(mod, batch, mesh)
    assert predicted(made.module, costs).total < 0.8 * predicted(whole.module, costs).total
    at = list(mesh.axes).index("dp")
    assert all(one.is_input or one.placements[at] == Replica() for one in made.shards.values())


def test_weights_within_stages() -> None:
    decoder = Decoder(**LARGE)
    made = parallelize(decoder.module, "auto", Mesh({"pp": 2, "tp": 2}))
    assert made.collectives == {"allreduce": 5, "allgather": 1, "send_recv": 1}
    assert parallelize(decoder.module, "auto", Mesh({"pp": 2})).collectives == {"send_recv": 1}


def test_what_is_refused() -> None:
    mod, _ = mlp([16, 16], 1)
    with pytest.raises(ValueError, match=r"has 'dp', 'tp' along which the plan shards no input"):
        parallelize(mod, "auto", Mesh({"dp": 2, "tp": 2}))
    with pytest.raises(ValueError, match="has none along which the plan shards no input"):
        parallelize(mod, {"x": {"a": Shard(0), "b": Shard(1)}, "*": "auto"}, Mesh({"a": 1, "b": 1}))
    with pytest.raises(ValueError, match="measured with 4 workers, but the mesh has 2 along 'tp'"):
        parallelize(mod, "auto", Mesh({"pp": 1, "tp": 2}), calibration=nominal(4))
    with pytest.raises(ValueError, match="it was measured with 2 workers, but the mesh has 4"):
        parallelize(mod, "auto", 4, calibration=nominal(2))
    with pytest.raises(ValueError, match=r"'layer.0' matches no parameter; a similar name is"):
        parallelize(mod, {"layer.0": "auto"}, 2)


def test_large_weights_that_are_not_divided_are_named() -> None:
    made = parallelize(Decoder(**LARGE).module, {**PLAN, "lm_head": "replicated"}, 2)
    table = 8000 * 256 * 4
    assert made.notes[0].startswith(
        f"model.embed_tokens.weight is replicated: {table} bytes on each rank, 4"
    )
    assert made.notes[1].startswith(f"lm_head.weight is replicated: {table} bytes on each rank")
    assert len(made.notes) == 2
    assert made.notes[0] in str(made)
    assert parallelize(Decoder(**LARGE).module, {"lm_head": "replicated"}, 1).notes == ()


def test_mixtures_of_experts_have_costs() -> None:
    """Each token is multiplied with the matrices of its experts, sent to them, and back."""

    def seconds_of_tokens(tokens: int, workers: int) -> Seconds:
        types = [
            ((tokens, 64), "float32"),
            ((tokens, 2), "int64"),
            ((tokens, 2), "float32"),
            ((4, 2000, 64), "float32"),
            ((4, 64, 1000), "float32"),
        ]
        builder = relax.BlockBuilder()
        params = [relax.Var(f"x{k}", relax.TensorType(*ty)) for k, ty in enumerate(types)]
        with builder.function("main", params):
            builder.emit_func_output(builder.emit(comm.moe(*params, workers=workers)))
        return predicted(builder.get(), Costs(nominal(4)))

    alone, shared = seconds_of_tokens(1000, 1), seconds_of_tokens(1000, 4)
    assert alone.communicating == 0
    assert shared.communicating > 0
    assert shared.computing == alone.computing
    assert alone.computing > 1.9 * seconds_of_tokens(500, 1).computing
