# SPDX-License-Identifier: Apache-2.0
"""The compilation target for the processor of this machine."""

from __future__ import annotations

from typing import Final

import tvm
import tvm_ffi

from tvm_ipc import arguments
from tvm_ipc.tvm_private_names import HOST_CPU_FEATURES, LLVM_CPU_FEATURES

#: Any x86-64 processor with AVX2, without fused multiply-add: LLVM chooses where to use it, and it
#: rounds once where a multiplication and an addition round twice.
_REPRODUCIBLE: Final = {"mcpu": "x86-64-v3", "mattr": ["-fma"]}


def cpu_target(*, reproducible: bool = False) -> tvm.target.Target:
    """Return the target for this processor, without instructions that it lacks.

    `tvm.target.Target.from_device("cpu")` only names the processor. LLVM then uses all instructions
    that processors of that name have, including those that a virtual machine hides, and the
    program crashes with an illegal instruction.

    Parameters
    ----------
    reproducible : whether the target is for `get_pipeline(..., reproducible=True)`. Then it is the
        same for all x86-64 processors with AVX2, and has no fused multiply-add.

    Returns
    -------
    target : the target of `tvm.target.Target.from_device("cpu")`, with missing features in `mattr`.

    Examples
    --------
    >>> import tvm_ipc
    >>> tvm_ipc.cpu_target().kind.name
    'llvm'

    Compile a module for it, here for two workers:

    >>> target = tvm_ipc.cpu_target()
    >>> pipeline = tvm_ipc.get_pipeline(target, world_size=2)
    >>> program = tvm.compile(module, target, relax_pipeline=pipeline)  # doctest: +SKIP
    """
    arguments.flag("cpu_target: reproducible", reproducible)
    target = tvm.target.Target.from_device("cpu")
    if reproducible:
        return tvm.target.Target({**target.export(), **_REPRODUCIBLE})
    target_features = tvm_ffi.get_global_func(LLVM_CPU_FEATURES)(target)
    host_features = tvm_ffi.get_global_func(HOST_CPU_FEATURES)()
    present = {str(name): bool(enabled) for name, enabled in host_features.items()}
    missing = sorted(name for name in map(str, target_features) if not present.get(name, True))
    if not missing:
        return target
    return tvm.target.Target({**target.export(), "mattr": [f"-{name}" for name in missing]})
