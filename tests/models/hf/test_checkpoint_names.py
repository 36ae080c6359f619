# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as transformers writes them are loaded under the names that models have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.models.weights import weight_files
from tvm_ipc.errors import ModelError
from tvm_ipc.models.weights.list_checkpoint_tensors import read_checkpoint

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
names_of = pytest.importorskip(
    "tvm_ipc.models.hf.checkpoint_names", reason="transformers is not installed"
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
#: More experts than ten: their order is that of numbers, not of texts.
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 11},
    "Qwen2Moe": {
        "num_experts": 12,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1,
    },
    "Qwen3Moe": {"num_experts": 3, "moe_intermediate_size": 16, "head_dim": 8},
    "Qwen2": {"tie_word_embeddings": True},
    "Gemma2": {"head_dim": 8},
    "Phi3": {"pad_token_id": 0},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


def arrays_of(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: one.detach().numpy() for name, one in parameters}


@pytest.mark.parametrize(
    ("name", "head"),
    [*((name, "ForCausalLM") for name in MODELS), ("Mixtral", "Model"), ("Qwen2", "Model")],
)
def test_what_save_pretrained_writes(name: str, head: str, tmp_path: Path) -> None:
    """Of a model with its head, and one without; each is loaded into the one with it."""
    sizes = {**({} if name == "GPT2" else SIZES), **MODELS[name]}
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(
        config
    )
    saved = model if head == "ForCausalLM" else model.base_model
    saved.save_pretrained(tmp_path, max_shard_size="40KB")
    arrays = arrays_of(model)
    cuts = weight_files.cuts_of(arrays, 2)
    found = names_of.checkpoint_names(model, read_checkpoint(tmp_path))
    if head == "Model" and not config.tie_word_embeddings:
        del cuts["lm_head.weight"]
    names = {name: found[name] for name in cuts}
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        weights = tvm_ipc.load_weights(session, tmp_path, cuts, names=names)
        weight_files.compare(session, weights, cuts, arrays)


def test_a_weight_that_is_made_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))
    turned = WeightConverter("wte.weight", "embed_tokens.weight", [Transpose(0, 1)])
    monkeypatch.setattr(names_of, "get_model_conversion_mapping", lambda _: [turned])
    said = r"builds 'model\.embed_tokens\.weight' from .* with Transpose, which is not supported; s"
    with pytest.raises(ModelError, match=said):
        names_of.checkpoint_names(model, ["model.wte.weight"])


def test_names_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each list of names in files; what was damaged is found once more."""
    from tests.models.hf.checkpoints import saved
    from tvm_ipc.models.hf.compile_cache import CompiledModel
    from tvm_ipc.models.hf.model_folder import read_folder
    from tvm_ipc.models.hf.weight_to_stored_name_cache import weight_names

    model = saved(tmp_path / "model", "Mixtral")
    folder, stored = read_folder(tmp_path / "model"), read_checkpoint(tmp_path / "model")
    (tmp_path / "kept").mkdir()
    library = tmp_path / "kept" / "model.so"
    cuts = weight_files.cuts_of(arrays_of(model), 1)
    made = CompiledModel(library, cuts, (), 67, "float32", (), {})
    asked: list[object] = []
    ask = names_of.checkpoint_names
    monkeypatch.setattr(
        names_of, "checkpoint_names", lambda *given: (asked.append(given), ask(*given))[1]
    )
    first = weight_names(folder, stored, made)
    assert set(first) == set(made.shards)
    assert weight_names(folder, reversed(stored), made) == first
    assert len(asked) == 1
    (file,) = library.parent.iterdir()
    for damaged in (file.read_text()[:-9], '[["a"]]', '{"a": {"stack": []}}', '{"a": 3}'):
        file.write_text(damaged)
        assert weight_names(folder, stored, made) == first
    assert len(asked) == 5
    fewer = [name for name in stored if "experts.10." not in name]
    assert weight_names(folder, fewer, made) != first
    assert len(list(library.parent.iterdir())) == 2
    # In a folder that cannot be written they are found each time.
    gone = CompiledModel(tmp_path / "gone" / "model.so", made.shards, (), 67, "float32", (), {})
    assert weight_names(folder, stored, gone) == first
