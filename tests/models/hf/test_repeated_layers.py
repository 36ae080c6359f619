# SPDX-License-Identifier: Apache-2.0
"""One of several equal layers is exported, and the imported program is that of all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm

from tests.models.hf.checkpoints import model_of, torch
from tvm_ipc.models.hf import torch_import, transformers_attention
from tvm_ipc.models.hf.equal_layers import find_layers, trace
from tvm_ipc.models.hf.repeated_layers import NotRepeatableError

#: Models, and for each layer the first one that equals it.
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Llama": ({"num_hidden_layers": 4}, (0, 0, 0, 0)),
    "Gemma3Text": ({"num_hidden_layers": 7}, (0, 0, 0, 0, 0, 5, 0)),
    "Qwen2Moe": ({"num_hidden_layers": 4}, (0, 1, 0, 1)),
    "GPT2": ({"n_layer": 3}, (0, 0, 0)),
}


def firsts_of(model: Any, tokens: int = 7) -> tuple[int, ...]:
    """Return for each layer of a model the first one that equals it."""
    transformers_attention.register()
    model.set_attn_implementation(transformers_attention.GROUPED)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    count = model.config.num_hidden_layers
    config = model.config.get_text_config()
    step = torch_import.Step(model, count)
    inputs = [torch.zeros(1, tokens, dtype=torch.int64) for _ in range(2)]
    results, _ = trace(step, [], (*inputs, ()))
    past = tuple(torch.zeros_like(state, device="cpu") for state in results[1:])
    assert past[0].shape[1] == getattr(config, "num_key_value_heads", config.num_attention_heads)
    return trace(step, find_layers(model, count), (*inputs, past))[1].first


def exported_whole(model: Any) -> Any:
    """Import a model of which every layer is exported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_import, "find_layers", lambda *_: [])
        return torch_import.import_decoder(model, 2)


def check_equal(found: Any, expected: Any) -> None:
    tvm.ir.assert_structural_equal(found.module, expected.module)
    for name in ("names", "plan", "caches", "vocabulary"):
        assert getattr(found, name) == getattr(expected, name), name


@pytest.mark.parametrize("name", MODELS)
def test_equal_layers(name: str) -> None:
    sizes, first = MODELS[name]
    model = model_of(name, **sizes)
    assert firsts_of(model, 7) == firsts_of(model, 1) == first


@pytest.mark.parametrize("name", ["Llama", "Qwen2Moe"])
def test_program_is_that_of_all_layers(name: str) -> None:
    sizes, _ = MODELS[name]
    model = model_of(name, **sizes)
    check_equal(torch_import.import_decoder(model, 2), exported_whole(model))


def _scale(layer: Any) -> None:
    layer.self_attn.scaling = 0.5


def _epsilon(layer: Any) -> None:
    layer.input_layernorm.variance_epsilon = 0.25


def _constant(layer: Any) -> None:
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * torch.tensor(2.0)


def _number(layer: Any) -> None:
    forward, index = layer.forward, layer.self_attn.layer_idx
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * (1.0 + index)


def _attribute(layer: Any) -> None:
    layer.only_here = True


@pytest.mark.parametrize("change", [_scale, _epsilon, _constant, _attribute])
def test_layers_that_differ_are_exported(change: Callable[[Any], None]) -> None:
    model = model_of("Llama", num_hidden_layers=3)
    change(model.model.layers[1])
    assert firsts_of(model) == (0, 1, 0)


@pytest.mark.parametrize("change", [_number, _constant])
def test_values_that_depend_on_the_index_of_a_layer(change: Callable[[Any], None]) -> None:
    model = model_of("Llama", num_hidden_layers=3)
    for layer in model.model.layers:
        change(layer)
    assert firsts_of(model) == (0, 1, 2)


def test_results_of_layers_that_other_layers_use() -> None:
    """Layer 2 uses what layer 0 computes inside, so layer 0 equals no other one."""
    model = model_of("Llama", num_hidden_layers=4)
    first, _, third, _ = model.model.layers
    kept: list[Any] = []
    norm = first.input_layernorm.forward

    def keep(x: Any) -> Any:
        kept[:] = [norm(x)]
        return kept[0]

    first.input_layernorm.forward = keep
    forward = third.forward
    third.forward = lambda *args, **kwargs: forward(*args, **kwargs) + kept[0]
    assert firsts_of(model) == (0, 1, 2, 1)


def test_layer_that_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are exported then."""

    def refuse(*_: Any) -> Any:
        raise NotRepeatableError("it cannot")

    model = model_of("Llama", num_hidden_layers=2)
    monkeypatch.setattr(torch_import, "repeat_layers", refuse)
    check_equal(torch_import.import_decoder(model, 2), exported_whole(model))


@pytest.mark.parametrize("is_forked", [True, False])
def test_functions_that_are_exported_side_by_side(
    is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is the same, also where the fork fails."""
    model = model_of("Llama", num_hidden_layers=2)
    expected = torch_import.import_decoder(model, 2)
    if not is_forked:
        monkeypatch.setattr(torch_import, "_to_bytes", lambda _: None)
    check_equal(torch_import.import_decoder(model, 2, side_by_side=True), expected)
