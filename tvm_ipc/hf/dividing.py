# SPDX-License-Identifier: Apache-2.0
"""What each rank runs of a model, with the keys and values of its own heads."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from tvm_ipc.comm.operator import dtype_of
from tvm_ipc.hf.caches import Cached
from tvm_ipc.hf.importing import DECODE, Decoder
from tvm_ipc.hf.plans import Plan
from tvm_ipc.parallel import Parallelized, parallelize
from tvm_ipc.parallel.plan import AUTO

#: Keys and values among the parameters.
_PAST: Final = "past_*"
#: Tokens and positions, before the keys and values.
_INPUTS: Final = 2


def divide(decoder: Decoder, workers: int, plan: Plan = None) -> Parallelized:
    """Return what each of some ranks runs.

    Parameters
    ----------
    decoder : the model.
    workers : how many ranks.
    plan : which weights are divided, and how; the model's own plan if None, or if it has none the
        one that is found.

    Raises
    ------
    ValueError
        The plan names what there is not, or divides what cannot be divided.
    """
    chosen = decoder.plan or AUTO if plan is None else plan
    parallel = parallelize(decoder.module, chosen, workers, names=decoder.names, caches=[_PAST])
    for one in parallel.cut.values():
        if one.is_input and not fnmatchcase(one.name, _PAST):
            raise ValueError(
                f"the plan names {one.name!r}, which each worker is given whole; a plan says of "
                "weights how they are divided"
            )
    return parallel


def caches_of_a_rank(parallel: Parallelized, decoder: Decoder) -> tuple[Cached, ...]:
    """Return what a rank keeps of keys and values."""
    params = parallel.module[DECODE].params[_INPUTS : _INPUTS + len(decoder.caches)]
    return tuple(
        Cached(int(one.ty.shape[1]), int(one.ty.shape[3]), dtype_of(one.ty)) for one in params
    )
