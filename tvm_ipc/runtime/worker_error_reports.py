# SPDX-License-Identifier: Apache-2.0
"""Convert the errors that workers report, and explain those whose own text does not help."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tvm_ipc.errors import RankError
from tvm_ipc.packed_functions.nvshmem_names import NO_NVSHMEM, is_nvshmem

#: The message of our workers, and of TVM's virtual machine, about a function that is missing.
_MISSING: Final = re.compile(r"(?:no global function|Cannot find ffi::Function) ([\w.]+)")
#: The message of TVM's KV cache if it is created for disaggregated inference.
_KV_CACHE: Final = "NVSHMEM is not enabled"


def rank_errors(records: Iterable[Mapping[str, Any]]) -> list[RankError]:
    """Return the errors of a report, in its order."""
    return [
        RankError(**{**record, "message": _explained(str(record["message"]))}) for record in records
    ]


def _explained(message: str) -> str:
    missing = _MISSING.search(message)
    if missing is not None and is_nvshmem(missing[1]):
        return f"there is no function {missing[1]}: {NO_NVSHMEM}"
    if _KV_CACHE in message:
        return f"a KV cache with enable_disaggregation=True uses NVSHMEM: {NO_NVSHMEM}"
    return message
