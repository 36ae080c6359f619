# SPDX-License-Identifier: Apache-2.0
"""Small models of `transformers` with random weights: what TVM imports of them, and their plans.

All heads are divided by 2, 3 and 4 ranks, so that models exchange what they must; vocabularies and
the inner rows of MLPs are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

from tvm_ipc.models.hf.torch_operators import OPERATORS

#: Of models that are made of attention with 24 heads, 12 of them of keys and values.
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
#: How many sequences, or images, a model is given at a time.
ROWS = 2
EXPERTS = {
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",  # the only one without sizes that depend on values
}
#: Two sums a layer, and the logits.
TWO_A_LAYER = {"allreduce": 4, "allgather": 1}
#: Plans of transformers divide the table of the vocabulary as well.
AND_THE_VOCABULARY = {"allreduce": 5, "allgather": 1}


@dataclass(frozen=True)
class Model:
    """A model of `transformers`.

    Attributes
    ----------
    name : of its configuration.
    task : how its class ends.
    sizes : of its configuration.
    plan : which of its weights are divided how, the model's own one where it has None.
    """

    name: str
    task: str = "ForCausalLM"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None

    @property
    def collectives(self) -> Mapping[str, int]:
        """The collectives that it has on any number of workers but one."""
        return AND_THE_VOCABULARY if self.plan is None else TWO_A_LAYER

    @property
    def sees(self) -> bool:
        """Whether it is given images."""
        return self.task == "ForImageClassification"


MODELS = {
    "Llama": Model("Llama"),
    "Qwen2": Model("Qwen2"),
    "Mistral": Model("Mistral", sizes={"sliding_window": 4}),
    "Gemma2": Model(
        "Gemma2",
        sizes={
            "attn_implementation": "eager",  # caps scores
            "head_dim": 4,
            "query_pre_attn_scalar": 4,
            "sliding_window": 4,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma3": Model(
        "Gemma3",
        sizes={"head_dim": 4, "query_pre_attn_scalar": 4, "sliding_window": 4},
    ),
    "Qwen3": Model("Qwen3", sizes={"head_dim": 4}),
    "Phi3": Model("Phi3", sizes={"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "GPT2": Model(
        "GPT2",
        "LMHeadModel",
        sizes={
            # PyTorch's decomposition of the other one leaves strides that it then refuses.
            "attn_implementation": "eager",
            "n_embd": 96,
            "n_layer": 2,
            "n_head": 24,
            "n_inner": 90,
            "n_positions": 64,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        # Its weights have outputs last.
        plan={
            "attn.c_attn.weight": "S[1]",
            "attn.c_attn.bias": "S[0]",
            "attn.c_proj.weight": "S[0]",
            "mlp.c_fc.weight": "S[1]",
            "mlp.c_fc.bias": "S[0]",
            "mlp.c_proj.weight": "S[0]",
            "lm_head": "colwise",
        },
    ),
    "Mixtral": Model("Mixtral", sizes={**EXPERTS, "num_local_experts": 4}),
    "Qwen2Moe": Model(
        "Qwen2Moe",
        sizes={
            **EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 30,
            "shared_expert_intermediate_size": 50,
        },
    ),
    "Qwen3Moe": Model(
        "Qwen3Moe",
        sizes={**EXPERTS, "num_experts": 4, "moe_intermediate_size": 30, "head_dim": 4},
    ),
    "Bert": Model(
        "Bert",
        "ForMaskedLM",
        plan={
            "attention.self.query": "colwise",
            "attention.self.key": "colwise",
            "attention.self.value": "colwise",
            "attention.output.dense": "rowwise",
            "intermediate.dense": "colwise",
            "layer.*.output.dense": "rowwise",
            "cls.predictions.decoder": "colwise",
        },
    ),
    "ViT": Model(
        "ViT",
        "ForImageClassification",
        sizes={"image_size": 16, "patch_size": 4, "num_labels": 7},
        plan={
            "attention.q_proj": "colwise",
            "attention.k_proj": "colwise",
            "attention.v_proj": "colwise",
            "attention.o_proj": "rowwise",
            "mlp.fc1": "colwise",
            "mlp.fc2": "rowwise",
            "classifier": "colwise",
        },
    ),
}


@dataclass(frozen=True)
class Call:
    """What a model is given, and what PyTorch makes of it.

    Attributes
    ----------
    inputs : as NumPy has them.
    logits : that PyTorch makes of these.
    exact : the same with 32 bits throughout.
    """

    inputs: list[Any]
    logits: Any
    exact: Any

    def check(self, found: Any) -> None:
        """Check logits: those of 32 bits to 1e-4, others are no further from the exact ones."""
        if np.array_equal(self.logits, self.exact):
            np.testing.assert_allclose(found, self.logits, rtol=1e-4, atol=1e-4)
        else:
            assert error_of(found, self.exact) < 1.5 * error_of(self.logits, self.exact)


@dataclass(frozen=True)
class Imported:
    """A model as TVM imports it.

    Attributes
    ----------
    module : with weights as parameters.
    weights : in the order of the parameters.
    names : of the parameters, as PyTorch has them.
    plan : for these.
    calls : of lengths, or numbers of images, with which it was not exported, if these are dynamic.
    """

    module: tvm.IRModule
    weights: list[tvm.runtime.Tensor]
    names: dict[str, str]
    plan: Any
    calls: list[Call]


def random_model(key: str, dtype: str = "float32", **sizes: Any) -> Any:
    """Return a model of PyTorch with random weights."""
    one = MODELS[key]
    torch.manual_seed(0)
    model = getattr(transformers, f"{one.name}{one.task}")(
        getattr(transformers, f"{one.name}{'Text' * (one.name == 'Gemma3')}Config")(
            **{**SIZES, **one.sizes, **sizes}
        )
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases that do something
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.to(getattr(torch, dtype))


@cache
def imported(key: str, dtype: str = "float32", dynamic: bool = True, **sizes: Any) -> Imported:
    """Return a model with random weights, and what it makes of random inputs."""
    one = MODELS[key]
    model = random_model(key, dtype, **sizes)
    whole = _Logits(model, one)
    given = _inputs(one, dtype, ROWS, 7)
    shapes = None
    others = [given]
    if dynamic:
        other_sizes = [(3, 7), (1, 7)] if one.sees else [(ROWS, 12), (ROWS, 3)]
        others = [_inputs(one, dtype, *some) for some in other_sizes]
        extent = torch.export.Dim("extent", min=1, max=SIZES["max_position_embeddings"])
        shapes = {"inputs": tuple({0 if one.sees else 1: extent} for _ in given)}
    exact = _Logits(deepcopy(model).float(), one)
    calls = []
    with torch.no_grad():
        for inputs in others:
            wide = [x.float() if x.is_floating_point() else x for x in inputs]
            arrays = [tvm.runtime.from_dlpack(x.contiguous()).numpy() for x in inputs]
            calls.append(Call(arrays, whole(*inputs).float().numpy(), exact(*wide).numpy()))
    program = torch.export.export(whole, tuple(given), dynamic_shapes=shapes)
    mod, weights = relax.frontend.detach_params(
        from_exported_program(program, keep_params_as_input=True, custom_convert_map=OPERATORS)
    )
    return Imported(
        mod,
        weights["main"],
        dict(program.graph_signature.inputs_to_parameters),
        model if one.plan is None else one.plan,
        calls,
    )


class _Logits(torch.nn.Module):
    def __init__(self, model: Any, one: Model) -> None:
        super().__init__()
        self.inner = model
        self.one = one

    def forward(self, *inputs: Any) -> Any:
        if self.one.sees:
            return self.inner(pixel_values=inputs[0]).logits
        given: dict[str, Any] = {"input_ids": inputs[0], "attention_mask": inputs[1]}
        if self.one.task != "ForMaskedLM":
            given["use_cache"] = False
        return self.inner(**given).logits


def _inputs(one: Model, dtype: str, rows: int, length: int) -> list[Any]:
    """Return random sequences, the last of which is shorter, or images."""
    if one.sees:
        return [torch.randn(rows, 3, 16, 16).to(getattr(torch, dtype))]
    ids = torch.randint(0, SIZES["vocab_size"], (rows, length))
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[-1, length - 2 :] = 0
    return [ids, mask]


def error_of(found: Any, right: Any) -> float:
    """Return how far numbers are apart, relative to how large they are."""
    found, right = np.asarray(found, "float64"), np.asarray(right, "float64")
    return float(np.sqrt(np.mean((found - right) ** 2) / np.mean(right**2)))
