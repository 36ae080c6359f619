# SPDX-License-Identifier: Apache-2.0
"""Runs a program on ranks that are threads, and compares what each of them gets with NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm

import tvm_ipc
from tests.runtime.tensors_of_ranks import (
    OfRanks,
    assert_each,
    assert_each_tuple,
    by_rank,
    put_each,
    write_each,
)
from tvm_ipc.transform import verify_cross_rank_safety

#: The first argument of each rank, what all of them get beside it, and the results of each rank: an
#: array, or a list of them where the program returns a tuple.
Example = tuple[OfRanks, Sequence[Any], OfRanks]


@dataclass(frozen=True)
class Each:
    """A further argument that each rank has its own values of."""

    values: OfRanks


def compiled(module: tvm.IRModule, ranks: int, **options: Any) -> Any:
    """Return what our pipeline makes of a module."""
    pipeline = tvm_ipc.get_pipeline("llvm", ranks, **options)
    return tvm.compile(module, "llvm", relax_pipeline=pipeline)


def verified(module: tvm.IRModule, ranks: int, **options: Any) -> Any:
    """Likewise; in what the pipeline makes no hazard is found."""
    lowered = tvm_ipc.get_pipeline("llvm", ranks, **options)(module)
    assert verify_cross_rank_safety(lowered) == []
    return tvm.compile(lowered, "llvm", relax_pipeline=tvm.transform.Sequential([]))


def compare_with_numpy(
    program: Any,
    ranks: int,
    examples: Iterable[Example],
    before_each: Callable[[Any, int], None] = lambda session, number: None,
) -> None:
    """Call `main` with fresh values in the same buffers, which were full of NaN before."""
    with tvm_ipc.Session(ranks, threads=True, timeout=60) as session:
        main = session.load_vm_module(program)["main"]
        buffers: dict[Any, Any] = {}
        for number, (first, given, wanted) in enumerate(examples):
            before_each(session, number)
            others = [put_each(session, o.values) if isinstance(o, Each) else o for o in given]
            values = by_rank(first)
            one = next(iter(values.values()))
            key = one.shape, str(one.dtype)
            if key not in buffers:
                buffers[key] = session.empty(*key)
                if one.dtype.kind == "f":
                    write_each(buffers[key], dict.fromkeys(values, np.full_like(one, np.nan)))
                    main(buffers[key], *others)
            write_each(buffers[key], values)
            result = main(buffers[key], *others)
            rights = by_rank(wanted)
            is_tuple = isinstance(next(iter(rights.values())), list)
            (assert_each_tuple if is_tuple else assert_each)(result, rights)
