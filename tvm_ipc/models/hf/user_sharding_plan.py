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

#: A plan whose styles and placements are texts, "auto" for automatic sharding, or None for the
#: plan of the model. If the model has no plan, None means "auto".
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
    "'auto', a mapping from patterns of names to styles such as 'colwise' or placements, or None "
    "for the plan of the model"
)


def parse_plan(name: str, plan: Any) -> Plan:
    """Check the types of a plan, and return it with its placements as texts.

    Parameters
    ----------
    name : the name of the argument, for error messages.
    plan : the plan that the caller passed.
    """
    if plan is None or (isinstance(plan, str) and plan == AUTO):
        return None if plan is None else AUTO
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
