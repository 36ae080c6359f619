# SPDX-License-Identifier: Apache-2.0
"""Check and read sharding plans: mappings from patterns of weight names to styles or placements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from tvm_ipc import arguments
from tvm_ipc.comm import Placement
from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.model_folder import read_object
from tvm_ipc.spmd.plan_parser import AUTO

#: The plan that shards the experts of a model, and everything else as its own plan does.
EXPERTS: Final = "experts"
#: The plans that have a name.
NAMED_PLANS: Final = (AUTO, EXPERTS)
#: The style of weights that are sharded by experts.
EXPERT_STYLE: Final = "grouped_gemm"
#: A plan whose styles and placements are texts, "auto" for automatic sharding, "experts" for the
#: model's own plan with sharded experts, or None for the plan of the model. If the model has no
#: plan, None means "auto".
Plan: TypeAlias = "Mapping[str, str] | str | None"
#: Plans for architectures that have none in transformers, by model_type.
BUILTIN_PLANS: Final[Mapping[str, Mapping[str, str]]] = {
    "gpt2": {
        "transformer.h.*.attn.c_attn.weight": "S[1]",
        "transformer.h.*.attn.c_attn.bias": "S[0]",
        "transformer.h.*.attn.c_proj.weight": "S[0]",
        "transformer.h.*.mlp.c_fc.weight": "S[1]",
        "transformer.h.*.mlp.c_fc.bias": "S[0]",
        "transformer.h.*.mlp.c_proj.weight": "S[0]",
    },
}
_WANTED: Final = (
    "'auto', 'experts', a mapping from patterns of names to styles such as 'colwise' or "
    "placements, or None for the plan of the model"
)


def parse_plan(name: str, plan: Any) -> Plan:
    """Check the types of a plan, and return it with its placements as texts.

    Parameters
    ----------
    name : the name of the argument, for error messages.
    plan : the plan that the caller passed.
    """
    if plan is None or (isinstance(plan, str) and plan in NAMED_PLANS):
        return plan
    if isinstance(plan, str):
        raise arguments.wrong_value(name, _WANTED, plan)
    if not isinstance(plan, Mapping):
        raise arguments.wrong_type(name, _WANTED, plan)
    styles = {}
    for pattern, style in plan.items():
        arguments.text(f"{name}, a pattern", pattern, "a name, or a pattern of names")
        if not isinstance(style, (str, Placement)):
            wanted = "a style such as 'colwise', or a placement such as 'S[0]'"
            raise arguments.wrong_type(f"{name}, of {pattern!r}", wanted, style)
        styles[pattern] = str(style)
    return styles


def shards_experts(plan: Plan) -> bool:
    """Return whether ranks share the experts of a model, so that tokens are dispatched to them."""
    if isinstance(plan, str) or plan is None:
        return plan == EXPERTS
    return EXPERT_STYLE in plan.values()


def read_plan(path: str) -> Plan:
    """Read a plan from a JSON file; raise `ModelError` if it is not an object of texts."""
    plan = read_object(Path(path))
    for pattern, style in plan.items():
        if not isinstance(style, str):
            raise ModelError(
                f"{path}: {pattern!r} maps to {arguments.quote(style)}; it must map to a style "
                'such as "colwise", or a placement such as "S[0]"'
            )
    return plan
