# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of transformers models, whose experts the ranks share.

transformers lets users register the function that runs the experts of a layer. The function here is
one operator of PyTorch, which is imported as `R.comm.moe`. It sends each token to the ranks of its
experts, where the other way of exporting experts takes the matrices of experts to the tokens.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from tvm import relax

from tvm_ipc import comm
from tvm_ipc.comm.expert_ops import ACTIVATIONS
from tvm_ipc.errors import ModelError

#: The implementation of experts for models whose experts the ranks share.
DISPATCHED: Final = "tvm_ipc_dispatched"
#: The activations of `R.comm.moe`, by their names in configurations.
_ACTIVATIONS: Final = {**{name: name for name in ACTIVATIONS}, "swish": "silu"}


def _moe(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    raise NotImplementedError("it is only exported")


def _type_of_moe(x: Any, *_: Any) -> Any:
    return torch.empty_like(x)


torch.library.custom_op("tvm_ipc::moe", _moe, mutates_args=())
torch.library.register_fake("tvm_ipc::moe", _type_of_moe)


def register() -> None:
    """Register the implementation of experts with transformers."""
    ALL_EXPERTS_FUNCTIONS.register(DISPATCHED, _run_experts)


def _run_experts(module: Any, x: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """Run the experts of a layer, as one operator."""
    activation = _ACTIVATIONS.get(str(getattr(module.config, "hidden_act", "")))
    standard = (
        module.has_gate
        and not module.has_bias
        and not module.is_transposed
        and module.is_concatenated
        and not module.has_post_expert_norm
        and type(module)._apply_gate is _default_apply_gate
    )
    if not standard or activation is None:
        raise ModelError(
            f"{type(module).__name__} has experts of another form than gate, up and down matrices "
            f"without bias and an activation of {', '.join(_ACTIVATIONS)}; load the model with a "
            "plan that shards the features of experts, or without a plan"
        )
    weights = (module.gate_up_proj, module.down_proj)
    return torch.ops.tvm_ipc.moe(x, top_k_index, top_k_weights, *weights, activation)


def convert_moe(node: Any, importer: Any) -> relax.Var:
    """Import the operator as `R.comm.moe`."""
    *operands, activation = node.args
    tensors = [importer.env[operand] for operand in operands]
    return importer.block_builder.emit(comm.moe(*tensors, activation=activation))
