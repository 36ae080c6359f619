# SPDX-License-Identifier: Apache-2.0
"""Checks that the input of `get_pipeline`, and the result of each phase, is well-formed."""

from __future__ import annotations

import tvm
from tvm import relax

from tvm_ipc.analysis.walk_and_rewrite_bindings import relax_functions
from tvm_ipc.errors import TransformError


def check_input(mod: tvm.IRModule) -> None:
    """Raise an error if the input of the pipeline is not well-formed."""
    # `check_ty` visits the type at every use of a variable, which takes quadratic time if weights
    # are one tuple. Missing types are detected without it.
    error = _violation(mod, check_ty=False)
    if error is not None:
        raise TransformError(f"get_pipeline: the module is not well-formed: {error}") from error


def check_phase(phase: str, mod: tvm.IRModule) -> None:
    """Raise an error that names the phase and the function if the module is not well-formed."""
    # TVM infers the VDevice of an allocation from its device index. If a device has several scopes,
    # it has several VDevices with one index in a lowered program, and the inferred type may differ.
    check_ty = len(mod.global_infos.get("vdevice", ())) < 2
    error = _violation(mod, check_ty=check_ty)
    if error is None:
        return
    # The module may be ill-formed although each function is well-formed, if two functions share a
    # definition.
    where = "the module"
    for global_var, function in relax_functions(mod):
        of_function = _violation(function, check_ty=check_ty)
        if of_function is not None:
            where, error = f"function {global_var.name_hint!r}", of_function
            break
    raise TransformError(
        f"get_pipeline: after the phase {phase!r}, {where} is not well-formed: {error}; each pass "
        "must return a well-formed module; compare the modules before and after the phase, which "
        "dump=FOLDER writes"
    ) from error


def _violation(obj: tvm.IRModule | relax.Function, *, check_ty: bool) -> Exception | None:
    """Return the error of TVM's check, None if the object is well-formed."""
    try:
        relax.analysis.well_formed(obj, check_ty=check_ty)
    except (TypeError, ValueError) as error:
        return error
    return None
