# SPDX-License-Identifier: Apache-2.0
"""Tensor and pipeline parallelism for Relax programs: placements, sharding rules and plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_ipc.lazy_exports import export_on_first_use

if TYPE_CHECKING:
    from tvm_ipc.spmd.lower_placements import LowerPlacements
    from tvm_ipc.spmd.parallelize_model import parallelize
    from tvm_ipc.spmd.parallelize_result import Parallelized
    from tvm_ipc.spmd.parameter_shard_spec import ShardSpec
    from tvm_ipc.spmd.rules.operator_rule_table import declare_rule

__all__ = ["LowerPlacements", "Parallelized", "ShardSpec", "declare_rule", "parallelize"]

if not TYPE_CHECKING:  # a type checker would take every name for defined
    __getattr__, __dir__ = export_on_first_use(
        __name__,
        {
            "declare_rule": "rules.operator_rule_table",
            "LowerPlacements": "lower_placements",
            "parallelize": "parallelize_model",
            "Parallelized": "parallelize_result",
            "ShardSpec": "parameter_shard_spec",
        },
    )
