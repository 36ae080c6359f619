# SPDX-License-Identifier: Apache-2.0
"""Shard an imported model for a number of ranks, with its KV caches sharded by heads."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from tvm_ipc.comm.collective_relax_op import dtype_of
from tvm_ipc.models.hf.compile_cache import KvCacheSpec
from tvm_ipc.models.hf.imported_decoder import DECODE, DECODE_BATCH, Decoder
from tvm_ipc.models.hf.user_sharding_plan import EXPERTS, Plan
from tvm_ipc.spmd import Parallelized, parallelize
from tvm_ipc.spmd.plan_parser import AUTO

#: A pattern for the parameters that are keys or values.
_PAST: Final = "past_*"
#: The number of parameters before the keys and values: token ids and positions.
_INPUTS: Final = 2


def shard(
    decoder: Decoder, workers: int, plan: Plan = None, *, reproducible: bool = False
) -> Parallelized:
    """Return the program that each rank runs.

    Parameters
    ----------
    decoder : the model.
    workers : the number of ranks.
    plan : which weights to shard, and how. None means the model's own plan, or automatic sharding
        if the model has none. "experts" means the plan of a model that was imported with
        `shard_experts`.
    reproducible : whether results of matmuls are summed over ranks before any other operator.

    Raises
    ------
    ValueError
        The plan names an unknown weight, or shards a weight that cannot be sharded.
    """
    chosen = decoder.plan or AUTO if plan in (None, EXPERTS) else plan
    parallel = parallelize(
        decoder.module,
        chosen,
        workers,
        names=decoder.names,
        caches=[_PAST],
        reproducible=reproducible,
    )
    for spec in parallel.shards.values():
        if spec.is_input and not fnmatchcase(spec.name, _PAST):
            raise ValueError(
                f"the plan shards {spec.name!r}, which is not a weight: each worker gets all of "
                "it; a plan names weights only"
            )
    return parallel


def kv_cache_specs(parallel: Parallelized, decoder: Decoder) -> tuple[KvCacheSpec, ...]:
    """Return the specs of the keys and values that one rank stores."""
    name = next(name for name in (DECODE, DECODE_BATCH) if name in decoder.module)
    params = parallel.module[name].params[_INPUTS : _INPUTS + len(decoder.caches)]
    types = [param.ty for param in params]
    return tuple(KvCacheSpec(int(ty.shape[1]), int(ty.shape[3]), dtype_of(ty)) for ty in types)
