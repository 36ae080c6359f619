# SPDX-License-Identifier: Apache-2.0
"""TVM's own passes in the order of other pipelines, between which tests put ours or TVM's."""

from __future__ import annotations

from tvm.relax import transform

#: Operators become kernels, which are fused.
FUSE = [
    transform.LegalizeOps(),
    transform.AnnotateTIROpPattern(),
    transform.FoldConstant(),
    transform.FuseOps(),
    transform.FuseTIR(),
]
#: Kernels and packed functions write into tensors that are allocated.
ALLOCATE = [
    transform.ToNonDataflow(),
    transform.RemovePurityChecking(),
    transform.CallTIRRewrite(),
]
#: A planned module becomes what the virtual machine runs.
LOWER = [
    transform.LowerAllocTensor(),
    transform.KillAfterLastUse(),
    transform.LowerRuntimeBuiltin(),
    transform.ComputePrimValue(),
    transform.VMShapeLower(),
    transform.AttachGlobalSymbol(),
]
