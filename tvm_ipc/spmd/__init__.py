# SPDX-License-Identifier: Apache-2.0
"""Tensor and pipeline parallelism for Relax programs: placements, sharding rules and plans."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_ipc.spmd.lower_placements import LowerPlacements
    from tvm_ipc.spmd.parallelize_model import parallelize
    from tvm_ipc.spmd.parallelized import Parallelized
    from tvm_ipc.spmd.parameter_shards import ShardSpec
    from tvm_ipc.spmd.rules.table import declare_rule

__all__ = ["LowerPlacements", "Parallelized", "ShardSpec", "declare_rule", "parallelize"]

_MODULES = {
    "declare_rule": "rules.table",
    "LowerPlacements": "lower_placements",
    "parallelize": "parallelize_model",
    "Parallelized": "parallelized",
    "ShardSpec": "parameter_shards",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"tvm_ipc.spmd.{_MODULES[name]}")
        return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
