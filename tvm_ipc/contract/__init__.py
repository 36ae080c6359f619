# SPDX-License-Identifier: Apache-2.0
"""What compiled programs, the runtime and the native library agree on.

Every packed function is listed here once: `programs` has those that programs call, with all that
passes ask about them, and `sessions` has the others. `function` says how to read a line, and
`values` has the scopes, limits and numbers that Python and C++ both know. Passes emit calls to
these names and know nothing else about the runtime. Tests compare the table with what is registered
and the numbers with those of the library. This package imports nothing of ours.
"""

from __future__ import annotations

from typing import Final

from tvm_ipc.contract.function import ANY, RESULT, ROLES, Function, Meeting, Parameter, Registered
from tvm_ipc.contract.programs import MODULE_CHECK, PROGRAM_FUNCTIONS, PROGRAMS, find
from tvm_ipc.contract.sessions import SESSION_FUNCTIONS
from tvm_ipc.contract.values import (
    BACKENDS,
    DEVICES,
    IPC_MEMORY,
    LIBRARIES,
    MAX_SHOWN,
    MAX_STEPS,
    MAX_WORKERS,
    REDUCED_TYPES,
    AllReduceStrategy,
    AnyTeam,
    CollectiveFlag,
    Epilogue,
    Progress,
    ReduceKind,
    Team,
    backend_of_nodes,
    backends_of,
    pack_digits,
)

__all__ = [
    "ANY",
    "BACKENDS",
    "DEVICES",
    "FUNCTIONS",
    "IPC_MEMORY",
    "LIBRARIES",
    "MAX_SHOWN",
    "MAX_STEPS",
    "MAX_WORKERS",
    "MODULE_CHECK",
    "PROGRAMS",
    "REDUCED_TYPES",
    "RESULT",
    "ROLES",
    "AllReduceStrategy",
    "AnyTeam",
    "CollectiveFlag",
    "Epilogue",
    "Function",
    "Meeting",
    "Parameter",
    "Progress",
    "ReduceKind",
    "Registered",
    "Team",
    "backend_of_nodes",
    "backends_of",
    "find",
    "pack_digits",
]

#: All of them; those of TVM are here too, as far as programs that we compile call them.
FUNCTIONS: Final = PROGRAM_FUNCTIONS + SESSION_FUNCTIONS
