# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints with random weights, made by transformers itself, and what PyTorch says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

_USUAL: Final = {
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "max_position_embeddings": 4096,
    "eos_token_id": None,  # so that there are as many tokens as are wanted
}
#: What is said of architectures beside that. Windows are shorter than the texts.
SIZES: Final[dict[str, dict[str, Any]]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mistral": {"sliding_window": 6},
    "Phi3": {"pad_token_id": 0},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 6},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 6},
    # More experts than ten: the order of their files is that of numbers, not of texts.
    "Mixtral": {"num_local_experts": 11},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 14,
        "shared_expert_intermediate_size": 22,
        "decoder_sparse_step": 2,  # every other layer has one MLP
    },
    "Qwen3Moe": {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 14,
        "head_dim": 8,
    },
    "GPT2": {"n_embd": 48, "n_layer": 2, "n_head": 6, "vocab_size": 67, "n_positions": 64},
}


def model_of(name: str, dtype: str = "float32", **sizes: Any) -> Any:
    """Return a model whose weights all do something."""
    usual = {} if name == "GPT2" else _USUAL
    config = getattr(transformers, f"{name}Config")(**{**usual, **SIZES[name], **sizes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the other ways want sizes of many bytes
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        else:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.to(getattr(torch, dtype))


def saved(folder: Path, name: str, dtype: str = "float32", **sizes: Any) -> Any:
    """Save a model in a folder, and return it."""
    model = model_of(name, dtype, **sizes)
    model.save_pretrained(folder)
    return model


def saved_with(tokenizer: Any, folder: Path, **sizes: Any) -> Any:
    """Save a model with a tokenizer, which has a token for each one of the model; return it."""
    model = saved(folder, "Llama", vocab_size=len(tokenizer), **sizes)
    tokenizer.save_pretrained(folder)
    return model


def continued(model: Any, ids: list[int], count: int) -> list[int]:
    """Return what PyTorch says that comes next."""
    with torch.no_grad():
        said = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),  # token 0 is no padding
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    found: list[int] = said[0, len(ids) :].tolist()
    return found
