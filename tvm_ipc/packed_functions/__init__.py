# SPDX-License-Identifier: Apache-2.0
"""The table of packed functions that compiled programs, the runtime and the native library share.

A collective is one entry of `collective_declarations`, whose fields `collective_kind` defines. Its
packed functions derive from it, and so do its operator and its session method, whose signatures
and docstrings `generate_collective_functions` builds.

All other packed functions are listed once, in `program_function_declarations` (what compiled
programs call, with its effects for passes) or `session_function_declarations`.
`function_signature_and_effects` defines the fields of a packed function.
`nvshmem_names` has the names of TVM that are refused.
`constants_shared_with_native_library` has the scopes, limits and numbers that Python and C++ share.
Passes emit calls to these names and know nothing else about the runtime. Tests compare the table
with the registered functions, and the numbers with those of the library. This package imports no
other module of tvm_ipc.
"""

from __future__ import annotations

from typing import Final

from tvm_ipc.packed_functions.collective_declarations import KINDS
from tvm_ipc.packed_functions.collective_kind import Kind
from tvm_ipc.packed_functions.constants_shared_with_native_library import (
    BACKENDS,
    DEVICES,
    IPC_MEMORY,
    LIBRARIES,
    MAX_EXPOSED,
    MAX_STEPS,
    MAX_STREAMS,
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
from tvm_ipc.packed_functions.function_signature_and_effects import (
    ANY,
    RESULT,
    ROLES,
    Function,
    Parameter,
    Registered,
    Sync,
)
from tvm_ipc.packed_functions.program_function_declarations import (
    MODULE_CHECK,
    PROGRAM_FUNCTIONS,
    PROGRAMS,
    find,
)
from tvm_ipc.packed_functions.session_function_declarations import SESSION_FUNCTIONS

__all__ = [
    "ANY",
    "BACKENDS",
    "DEVICES",
    "FUNCTIONS",
    "IPC_MEMORY",
    "KINDS",
    "LIBRARIES",
    "MAX_EXPOSED",
    "MAX_STEPS",
    "MAX_STREAMS",
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
    "Kind",
    "Parameter",
    "Progress",
    "ReduceKind",
    "Registered",
    "Sync",
    "Team",
    "backend_of_nodes",
    "backends_of",
    "find",
    "pack_digits",
]

#: All functions, including those of TVM that programs compiled by tvm_ipc call.
FUNCTIONS: Final = PROGRAM_FUNCTIONS + SESSION_FUNCTIONS
