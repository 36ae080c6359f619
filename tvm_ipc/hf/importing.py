# SPDX-License-Identifier: Apache-2.0
"""From a configuration of transformers to Relax functions for one device.

    prefill(ids (1, n), positions (1, n), keys and values of p tokens, weights...)
        -> logits of the last token, keys and values of p + n tokens
    decode(id (1, 1), position (1, 1), keys and values of p tokens, weights...)
        -> the same of one more token

Positions are given, and not made of p, since TVM's fusion fails on functions of such a number whose
shapes have another symbol.

The model is transformers' own, exported by torch.export. Its weights are memory that nobody has
touched: the module has their names and types, and none of their values.
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
from tvm_ipc.hf import attention
from tvm_ipc.hf.caches import Cached
from tvm_ipc.hf.operators import OPERATORS
from tvm_ipc.hf.plans import OURS

PREFILL: Final = "prefill"
DECODE: Final = "decode"
#: Lengths to export with. They stand for any, and must differ from all sizes of the model.
_PROMPT: Final = 7
_PAST: Final = 5
#: How transformers computes experts: the only way without sizes that depend on values.
_EXPERTS: Final = "batched_mm"
_ATEN: Final = torch.ops.aten
_KEPT: Final = (
    *(_ATEN.linear.default, _ATEN.matmul.default, _ATEN.silu.default),
    *(_ATEN.gelu.default, _ATEN.layer_norm.default),
)


@dataclass(frozen=True)
class Decoder:
    """A model that continues texts, for one device.

    Attributes
    ----------
    module : with `prefill` and `decode`.
    names : of the weights, as checkpoints and plans have them, by those of parameters.
    plan : the model's own: which weights are divided among ranks, and how; empty if it has none.
    caches : keys and values of each layer in turn.
    vocabulary : how many tokens there are.
    """

    module: tvm.IRModule
    names: Mapping[str, str]
    plan: Mapping[str, str]
    caches: tuple[Cached, ...]
    vocabulary: int


def build(config: Any, dtype: str) -> PreTrainedModel:
    """Return the model of a configuration, whose weights nobody has written."""
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
    """Return the functions of a language model.

    Parameters
    ----------
    model : a model of transformers. Its weights are not looked at.
    workers : how many ranks will run it, which decides how it attends.
    """
    attention.register()
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    divided = heads is None or heads % workers == 0
    model.set_attn_implementation(attention.GROUPED if divided else attention.REPEATED)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(_EXPERTS)
    layers = int(model.config.get_text_config().num_hidden_layers)
    step = _Step(model, layers)
    dynamic = torch.export.Dim.DYNAMIC
    # Two tensors: torch.export takes one that is given twice for one input.
    prompt, places = (torch.zeros(1, _PROMPT, dtype=torch.int64) for _ in range(2))
    past = _past(step, prompt, places)
    of_past = tuple({2: dynamic} for _ in past)
    of_tokens = {1: dynamic}
    shapes = {"ids": of_tokens, "positions": of_tokens, "past": of_past}
    prefill = _exported(step, (prompt, places, past), shapes)
    one = (prompt[:, :1].clone(), places[:, :1].clone(), past)
    decode = _exported(step, one, {"ids": {}, "positions": {}, "past": of_past})
    names: dict[str, str] = {}
    functions = {}
    for name, program in ((PREFILL, prefill), (DECODE, decode)):
        functions[name] = _imported(name, program)
        inputs = program.graph_signature.inputs_to_parameters
        names.update({key: one.removeprefix("inner.") for key, one in inputs.items()})
    caches = tuple(
        Cached(int(one.shape[1]), int(one.shape[3]), str(one.dtype).removeprefix("torch."))
        for one in past
    )
    return Decoder(
        tvm.IRModule(functions),
        names,
        _plan(model, names),
        caches,
        int(_results(prefill)[0].shape[-1]),
    )


class _Step(nn.Module):  # type: ignore[misc]
    """A model as a function of tokens, and of the keys and values of those before."""

    def __init__(self, inner: nn.Module, layers: int) -> None:
        super().__init__()
        self.inner, self.layers = inner, layers

    def forward(self, ids: Any, positions: Any, past: Any) -> Any:
        """Return the logits of the last token, and all keys and values."""
        for one in past[1:]:
            torch._check(one.shape[2] == past[0].shape[2])
        cache = attention.cache_of(past, self.layers)
        with attention.queries_at(positions):
            said = self.inner(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        kept = [one for layer in cache.layers for one in (layer.keys, layer.values)]
        # Not [:, -1]: TVM imports a negative index as one before the memory of the tensor.
        logits = said.logits if said.logits.shape[1] == 1 else said.logits[:, -1:]
        return (logits.reshape(1, logits.shape[-1]).float(), *kept)


def _past(step: _Step, prompt: Any, places: Any) -> tuple[Any, ...]:
    """Return keys and values of some tokens, as each layer has them."""
    program = _exported(step, (prompt, places, ()), {"ids": {}, "positions": {}, "past": ()})
    return tuple(
        torch.zeros(one.shape[0], one.shape[1], _PAST, one.shape[3], dtype=one.dtype)
        for one in _results(program)[1:]
    )


def _exported(step: nn.Module, given: Any, shapes: Any) -> Any:
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(step, given, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        name = type(step.inner).__name__
        first = str(error).strip().splitlines()[0]
        raise ModelError(
            f"torch.export cannot follow {name} of transformers with a cache of keys and values: "
            f"{type(error).__name__}: {first}"
        ) from error


def _results(program: Any) -> list[Any]:
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    return [one.meta["val"] for one in output.args[0]]


def _imported(name: str, program: Any) -> relax.Function:
    try:
        with _quiet():
            mod = from_exported_program(
                program.run_decompositions(_decompositions()),
                keep_params_as_input=True,
                custom_convert_map=OPERATORS,
                run_ep_decomposition=False,
            )
    except Exception as error:
        first = str(error).strip().splitlines()[-1]
        raise ModelError(f"TVM cannot import {name}: {first}") from error
    function = mod["main"].without_attr("params")
    return function.with_attr("global_symbol", name)


def _decompositions() -> Any:
    """Return how operators become others, without those that Relax has as they are."""
    table = torch.export.default_decompositions()
    for operator in _KEPT:
        table.pop(operator, None)
    return table


def ignored(model: PreTrainedModel) -> Iterator[str]:
    """Yield expressions for names that checkpoints may have beside those of the parameters."""
    yield from model._keys_to_ignore_on_load_unexpected or ()
    yield r"\.rotary_emb\.inv_freq$"
    yield from (f"^{re.escape(name)}$" for name in model.all_tied_weights_keys)


def _plan(model: PreTrainedModel, names: Mapping[str, str]) -> dict[str, str]:
    """Return transformers' plan, or ours, by names that parameters have.

    Left out are modules that the plan of an architecture names and this model has not.
    """
    known = set(names.values())
    modules = {name for name, _ in model.named_modules()} | known
    tied = model.all_tied_weights_keys
    plan = model._tp_plan or OURS.get(model.config.model_type, {})
    found = {}
    for pattern, style in plan.items():
        if any(fnmatchcase(name, pattern) for name in modules):
            # One of several names of a weight is that of a parameter.
            other = tied.get(f"{pattern}.weight")
            found[other if f"{pattern}.weight" not in known and other in known else pattern] = style
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
