# SPDX-License-Identifier: Apache-2.0
"""Which weights are divided: as transformers plans it, as somebody else does, or as it is found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from tvm_ipc import arguments
from tvm_ipc.comm import Placement
from tvm_ipc.errors import ModelError
from tvm_ipc.hf.folder import read_object
from tvm_ipc.parallel.plan import AUTO

#: A plan as its parts are written; None is the model's own, or a found one where it has none.
Plan: TypeAlias = "Mapping[str, str] | str | None"
#: Plans of architectures for which transformers has none, by their types.
OURS: Final[Mapping[str, Mapping[str, str]]] = {
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
    "for that of the model"
)


def plan_of(name: str, given: Any) -> Plan:
    """Return a plan as it is written, whatever else is wrong with it."""
    if given is None or (isinstance(given, str) and given == AUTO):
        return None if given is None else AUTO
    if isinstance(given, str):
        raise arguments.wrong_value(name, _WANTED, given)
    if not isinstance(given, Mapping):
        raise arguments.wrong_type(name, _WANTED, given)
    found = {}
    for pattern, how in given.items():
        arguments.text(f"{name}, a pattern", pattern, "a name, or a pattern of names")
        if not isinstance(how, (str, Placement)):
            wanted = "a style such as 'colwise', or a placement such as 'S[0]'"
            raise arguments.wrong_type(f"{name}, of {pattern!r}", wanted, how)
        found[pattern] = str(how)
    return found


def read_plan(path: str) -> Plan:
    """Return the plan of a file; raise `ModelError` if it is no JSON object of plans."""
    found = read_object(Path(path))
    for pattern, how in found.items():
        if not isinstance(how, str):
            raise ModelError(
                f"{path}: of {pattern!r} it says {arguments.show(how)}; it must be a style such as "
                '"colwise", or a placement such as "S[0]"'
            )
    return found
