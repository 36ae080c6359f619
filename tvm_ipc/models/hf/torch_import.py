# SPDX-License-Identifier: Apache-2.0
"""Import a transformers model into Relax functions for one device.

    prefill(ids (1, n), positions (1, n), keys and values of p tokens, weights...)
        -> logits of the last token, keys and values of p + n tokens
    decode(id (1, 1), position (1, 1), keys and values of p tokens, weights...)
        -> logits of that token, keys and values of p + 1 tokens

Positions are an input. They are not computed from p, because TVM's fusion fails on a PrimFunc that
takes such a scalar and whose shapes have another symbolic variable.

The model is the class of transformers, exported with torch.export. Its weights are uninitialized
memory: the module has their names and types, not their values.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
import tvm
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf import transformers_attention
from tvm_ipc.models.hf.compile_cache import KvCacheSpec
from tvm_ipc.models.hf.torch_operators import OPERATORS
from tvm_ipc.models.hf.user_sharding_plan import BUILTIN_PLANS
from tvm_ipc.spmd.plan_parser import matches
from tvm_ipc.spmd.weight_placements_of_styles import transformers_plan

PREFILL: Final = "prefill"
DECODE: Final = "decode"
#: Example lengths for the export. They are dynamic, and must differ from all sizes of the model.
_PROMPT: Final = 7
_PAST: Final = 5
#: The implementation of experts in transformers whose shapes do not depend on values.
_EXPERTS: Final = "batched_mm"
_ATEN: Final = torch.ops.aten
#: Operators that are not decomposed, because Relax has them.
_NOT_DECOMPOSED: Final = (
    *(_ATEN.linear.default, _ATEN.matmul.default, _ATEN.silu.default),
    *(_ATEN.gelu.default, _ATEN.layer_norm.default),
)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A causal language model as Relax functions for one device.

    Attributes
    ----------
    module : the functions `prefill` and `decode`.
    names : the names of the weights in checkpoints and plans, by the names of the parameters.
    plan : the model's own sharding plan; empty if it has none.
    caches : the keys and the values of each layer, in turn.
    vocabulary : the number of tokens in the vocabulary.
    """

    module: tvm.IRModule
    names: Mapping[str, str]
    plan: Mapping[str, str]
    caches: tuple[KvCacheSpec, ...]
    vocabulary: int


def build(config: Any, dtype: str) -> PreTrainedModel:
    """Build the model of a configuration, with uninitialized weights."""
    try:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except (ImportError, KeyError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"transformers has no language model for {type(config).__name__}: {first}"
        ) from error
    model.tie_weights()
    return model.eval()


def import_decoder(model: PreTrainedModel, workers: int = 1) -> Decoder:
    """Import a language model of transformers.

    Parameters
    ----------
    model : a model of transformers. The values of its weights are not read.
    workers : the number of ranks that will run it, which decides the attention implementation.
    """
    transformers_attention.register()
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    is_sharded = heads is None or heads % workers == 0
    model.set_attn_implementation(
        transformers_attention.GROUPED if is_sharded else transformers_attention.REPEATED
    )
    if model._can_set_experts_implementation():
        model.set_experts_implementation(_EXPERTS)
    layers = int(model.config.get_text_config().num_hidden_layers)
    step = _Step(model, layers)
    dynamic = torch.export.Dim.DYNAMIC
    # These are two tensors because torch.export treats a tensor that is passed twice as one input.
    ids, positions = (torch.zeros(1, _PROMPT, dtype=torch.int64) for _ in range(2))
    past = _example_past(step, ids, positions)
    past_shapes = tuple({2: dynamic} for _ in past)
    token_shape = {1: dynamic}
    shapes = {"ids": token_shape, "positions": token_shape, "past": past_shapes}
    prefill = _export(step, (ids, positions, past), shapes)
    decode_inputs = (ids[:, :1].clone(), positions[:, :1].clone(), past)
    decode = _export(step, decode_inputs, {"ids": {}, "positions": {}, "past": past_shapes})
    names: dict[str, str] = {}
    functions = {}
    for name, program in ((PREFILL, prefill), (DECODE, decode)):
        functions[name] = _import(name, program)
        inputs = program.graph_signature.inputs_to_parameters
        names.update({key: weight.removeprefix("inner.") for key, weight in inputs.items()})
    caches = tuple(
        KvCacheSpec(int(t.shape[1]), int(t.shape[3]), str(t.dtype).removeprefix("torch."))
        for t in past
    )
    return Decoder(
        tvm.IRModule(functions),
        names,
        _plan(model, names),
        caches,
        int(_results(prefill)[0].shape[-1]),
    )


class _Step(nn.Module):  # type: ignore[misc]
    """A model as a function of token ids, positions, and the keys and values of past tokens."""

    def __init__(self, inner: nn.Module, layers: int) -> None:
        super().__init__()
        self.inner, self.layers = inner, layers

    def forward(self, ids: Any, positions: Any, past: Any) -> Any:
        """Return the logits of the last token, and all keys and values."""
        for states in past[1:]:
            torch._check(states.shape[2] == past[0].shape[2])
        cache = transformers_attention.make_cache(past, self.layers)
        with transformers_attention.query_positions(positions):
            output = self.inner(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        states = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        # TVM imports the index -1 of [:, -1] as an access before the tensor's memory.
        logits = output.logits if output.logits.shape[1] == 1 else output.logits[:, -1:]
        return (logits.reshape(1, logits.shape[-1]).float(), *states)


def _example_past(step: _Step, ids: Any, positions: Any) -> tuple[Any, ...]:
    """Return zeros in the shapes of the keys and values of `_PAST` tokens, for all layers."""
    program = _export(step, (ids, positions, ()), {"ids": {}, "positions": {}, "past": ()})
    return tuple(
        torch.zeros(t.shape[0], t.shape[1], _PAST, t.shape[3], dtype=t.dtype)
        for t in _results(program)[1:]
    )


def _export(step: nn.Module, inputs: Any, shapes: Any) -> Any:
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(step, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        name = type(step.inner).__name__
        line = str(error).strip().splitlines()[0]
        raise ModelError(
            f"torch.export cannot export {name} of transformers with a KV cache: "
            f"{type(error).__name__}: {line}"
        ) from error


def _results(program: Any) -> list[Any]:
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    return [result.meta["val"] for result in output.args[0]]


def _import(name: str, program: Any) -> relax.Function:
    try:
        with _quiet():
            mod = from_exported_program(
                program.run_decompositions(_decompositions()),
                keep_params_as_input=True,
                custom_convert_map=OPERATORS,
                run_ep_decomposition=False,
            )
    except Exception as error:
        line = str(error).strip().splitlines()[-1]
        raise ModelError(f"TVM cannot import {name}: {line}") from error
    function = mod["main"].without_attr("params")
    return function.with_attr("global_symbol", name)


def _decompositions() -> Any:
    """Return PyTorch's decompositions, without those of operators that Relax has."""
    table = torch.export.default_decompositions()
    for operator in _NOT_DECOMPOSED:
        table.pop(operator, None)
    return table


def ignored(model: PreTrainedModel) -> Iterator[str]:
    """Yield regular expressions for names in checkpoints that are not parameters."""
    yield from model._keys_to_ignore_on_load_unexpected or ()
    yield r"\.rotary_emb\.inv_freq$"
    yield from (f"^{re.escape(name)}$" for name in model.all_tied_weights_keys)


def _plan(model: PreTrainedModel, names: Mapping[str, str]) -> dict[str, str]:
    """Return the plan of transformers, or a built-in one, by the names of parameters.

    Patterns that match no module of this model are dropped: an architecture's plan may name more
    modules than a model has.
    """
    parameters = set(names.values())
    modules = {name for name, _ in model.named_modules()} | parameters
    tied = model.all_tied_weights_keys
    all_styles = model._tp_plan or BUILTIN_PLANS.get(model.config.model_type, {})
    ndims = {name: parameter.ndim for name, parameter in model.named_parameters()}
    all_styles = transformers_plan(
        all_styles,
        lambda pattern: (ndim for name, ndim in ndims.items() if matches(pattern, name)),
    )
    plan = {}
    for pattern, style in all_styles.items():
        if any(fnmatchcase(name, pattern) for name in modules):
            # Only one of the names of a tied weight is the name of a parameter.
            weight = f"{pattern}.weight"
            source = tied.get(weight)
            plan[source if weight not in parameters and source in parameters else pattern] = style
    return plan


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
