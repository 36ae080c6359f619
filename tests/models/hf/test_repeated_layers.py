# SPDX-License-Identifier: Apache-2.0
"""One of several equal layers is exported, and the imported program is that of all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax

from tests.models.hf.checkpoints import model_of, torch
from tvm_ipc.models.hf import torch_import, transformers_attention
from tvm_ipc.models.hf.equal_layers import find_layers, trace
from tvm_ipc.models.hf.repeated_layers import NotRepeatableError

LOWER_BOUND = "tir_var_lower_bound"
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
    """Check that two decoders are equal, except for the names of symbolic variables."""
    functions = [{g.name_hint: f for g, f in d.module.functions.items()} for d in (found, expected)]
    assert functions[0].keys() == functions[1].keys()
    for name, function in functions[1].items():
        repeated = functions[0][name]
        tvm.ir.assert_structural_equal(without_bounds(repeated), without_bounds(function))
        assert sorted(bounds(repeated).values()) == sorted(bounds(function).values())
        names, expected_names = ([str(p.name) for p in f.params] for f in (repeated, function))
        assert names == expected_names
    for name in ("names", "plan", "caches", "vocabulary"):
        assert getattr(found, name) == getattr(expected, name), name


def bounds(function: relax.Function) -> dict[str, int]:
    """Return the lower bounds of symbolic variables, which must be variables of the function."""
    found = {str(name): int(bound) for name, bound in function.attrs[LOWER_BOUND].items()}
    assert {*found} <= {var.name for var in relax.analysis.defined_symbolic_vars(function)}
    return found


def without_bounds(function: relax.Function) -> relax.Function:
    return function.without_attr(LOWER_BOUND)


@pytest.mark.parametrize("name", MODELS)
def test_equal_layers(name: str) -> None:
    sizes, first = MODELS[name]
    model = model_of(name, **sizes)
    assert firsts_of(model, 7) == firsts_of(model, 1) == first


@pytest.mark.parametrize("name", MODELS)
def test_program_is_that_of_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, first = MODELS[name]
    model = model_of(name, **sizes)
    modules, exported = list(model.modules()), weights_of_exports(monkeypatch)
    found = torch_import.import_decoder(model, 2)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True)), "nothing is left"
    layers = [name for name, _ in find_layers(model, len(first))]
    skipped = [f".{name}." for layer, name in enumerate(layers) if first[layer] != layer]
    assert len(exported) == 2
    for weights in exported:
        assert weights
        assert not [weight for weight in weights if any(name in weight for name in skipped)]
    check_equal(found, exported_whole(model))


def weights_of_exports(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that gets the names of the weights of each export."""
    exported: list[list[str]] = []
    export = torch_import._export

    def recorded(*args: Any) -> Any:
        program = export(*args)
        exported.append(list(program.graph_signature.inputs_to_parameters.values()))
        return program

    monkeypatch.setattr(torch_import, "_export", recorded)
    return exported


@pytest.mark.parametrize("what", ["weight", "buffer"])
def test_layers_of_which_more_is_used_are_all_exported(what: str) -> None:
    """The model uses the weight of a layer that would be skipped, or the layer has a buffer."""
    model = model_of("Llama", num_hidden_layers=3)
    layers = model.model.layers
    if what == "buffer":
        for layer in layers:
            layer.register_buffer("unused", torch.ones(2))
    else:
        forward = model.model.norm.forward
        model.model.norm.forward = lambda x: forward(x) * layers[2].input_layernorm.weight
    assert firsts_of(model) == (0, 0, 0)
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
