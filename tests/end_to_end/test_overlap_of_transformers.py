# SPDX-License-Identifier: Apache-2.0
"""The products of a Llama of `transformers` go on beside what its ranks exchange."""

from __future__ import annotations

import pytest
import tvm

import tvm_ipc
from tvm_ipc import parallelize
from tvm_ipc.spmd import Parallelized
from tvm_ipc.transform import OverlapCommunication

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from tests.end_to_end.test_parallelize_transformers import check
from tests.end_to_end.transformers_models import SIZES, Imported, imported
from tvm_ipc.models.hf import shard_imported_model, torch_import

NORMS = ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "model.norm")
#: Rows of a rank begin at multiples of 64 bytes, where kernels expect them.
ALIGNED = {"intermediate_size": 96}
#: Of each layer, and what comes after the last one: the table and the logits have no product.
SUMS = ["allreduce"] * 4
SCATTERED = ["allgather", "reduce_scatter"] * 4 + ["allgather"]


def sites_of(module: tvm.IRModule, workers: int) -> dict[str, list[str]]:
    """Return the kinds of what goes on beside products, by functions."""
    with tvm_ipc.transform.collect_report() as report:
        OverlapCommunication(chunks=2, world_size=workers)(module)
    found: dict[str, list[str]] = {}
    for one in report.decisions:
        kinds = found.setdefault(one.function, [])
        if one.verdict == "in 2 chunks":
            kinds.append(one.subject.split(" of ")[0])
    return found


def divided(one: Imported, workers: int, sequence: bool) -> Parallelized:
    plan = {**one.plan._tp_plan, **(dict.fromkeys(NORMS, "sequence_parallel") if sequence else {})}
    made = parallelize(one.module, plan, workers, names=one.names)
    wanted = {"reduce_scatter": 5, "allgather": 6} if sequence else {"allreduce": 5, "allgather": 1}
    assert made.collectives == wanted
    return made


@pytest.mark.parametrize(("workers", "dynamic"), [(2, True), (3, True), (2, False)])
def test_all_sites_are_found(workers: int, dynamic: bool, pytestconfig: pytest.Config) -> None:
    """Two sequences, of a length that ranks do not divide, or that is known when they are given."""
    if not (dynamic or pytestconfig.getoption("--every-model")):
        pytest.skip("--every-model runs it")
    one = imported("Llama", "float32", dynamic, **ALIGNED)
    assert sites_of(divided(one, workers, False).module, workers) == {"main": SUMS}
    assert sites_of(divided(one, workers, True).module, workers) == {"main": SCATTERED}


def test_sites_of_a_decoder() -> None:
    """The prompt is of any length; the one row of a step of decode cannot be divided."""
    config = transformers.LlamaConfig(**SIZES | ALIGNED | {"num_hidden_layers": 1})
    decoder = torch_import.import_decoder(torch_import.build(config, "float32"), 2)
    sums = sites_of(shard_imported_model.shard(decoder, 2).module, 2)
    assert sums == {torch_import.PREFILL: SUMS[:2], torch_import.DECODE: []}
    plan = {**decoder.plan, **dict.fromkeys(NORMS, "sequence_parallel")}
    scattered = sites_of(shard_imported_model.shard(decoder, 2, plan).module, 2)
    # The last norm is of all tokens, and the logits of the last one.
    assert scattered == {torch_import.PREFILL: SCATTERED[:4], torch_import.DECODE: []}


FEW = [(2, True, 2), (3, False, 1)]


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("sequence", [True, False], ids=["scattered", "summed"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_logits(workers: int, sequence: bool, chunks: int, pytestconfig: pytest.Config) -> None:
    """Of sequences of several lengths."""
    if not (pytestconfig.getoption("--every-model") or (workers, sequence, chunks) in FEW):
        pytest.skip("--every-model runs it")
    one = imported("Llama", "float32", True, **ALIGNED)
    check(one, divided(one, workers, sequence), overlap=chunks)
