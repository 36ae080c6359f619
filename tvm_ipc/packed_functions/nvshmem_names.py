# SPDX-License-Identifier: Apache-2.0
"""The names of TVM's functions of NVSHMEM, which no session of this package has.

Released wheels of TVM do not register them either, and programs look a name up to find out whether
NVSHMEM is there. So nothing is registered under these names: the verifier rejects calls of them,
and the errors of workers that look one up are replaced by a sentence from here.
"""

from __future__ import annotations

from typing import Final

_PREFIXES: Final = ("runtime.disco.nvshmem.", "runtime.nvshmem.", "nvshmem.")
#: The end of the sentences that refuse NVSHMEM: why, and what to use.
NO_NVSHMEM: Final = (
    "tvm_ipc has no NVSHMEM; a session starts its backend itself, workers share memory through "
    "collectives (R.ccl.* and R.comm.*) and exposed tensors (R.comm.expose), and send tensors, "
    "such as pages of a KV cache, with R.comm.send_recv"
)


def is_nvshmem(name: str) -> bool:
    """Return whether a packed function is one of TVM's for NVSHMEM."""
    return name.startswith(_PREFIXES)
