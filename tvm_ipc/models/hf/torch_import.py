# SPDX-License-Identifier: Apache-2.0
"""Import a transformers model into Relax functions for one device.

    prefill(ids (1, n), positions (1, n), keys and values of p tokens, weights...)
        -> logits of the last token, keys and values of p + n tokens
    decode(id (1, 1), position (1, 1), keys and values of p tokens, weights...)
        -> logits of that token, keys and values of p + 1 tokens
    decode_batch(ids (b, 1), positions (b, 1), keys and values of p tokens each, weights...)
        -> logits of each token, keys and values of p + 1 tokens each

`decode_batch` is a module of its own. Positions are an input. They are not computed from p, because
TVM's fusion fails on a PrimFunc that takes such a scalar and whose shapes have another symbolic
variable.

The model is the class of transformers, exported with torch.export. Its weights are uninitialized
memory: the module has their names and types, not their values.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from tvm_ipc.models.hf import transformers_attention, transformers_experts
from tvm_ipc.models.hf.compile_cache import KvCacheSpec
from tvm_ipc.models.hf.equal_layers import EqualLayers, Layers, find_layers, trace
from tvm_ipc.models.hf.imported_decoder import (
    DECODE,
    DECODE_BATCH,
    PREFILL,
    Decoder,
    shards_heads,
)
from tvm_ipc.models.hf.repeated_layers import (
    NotRepeatableError,
    convert_mark,
    marked,
    repeat_layers,
)
from tvm_ipc.models.hf.torch_operators import OPERATORS
from tvm_ipc.models.hf.user_sharding_plan import BUILTIN_PLANS, EXPERT_STYLE
from tvm_ipc.runtime.forked_call import call_in_fork
from tvm_ipc.spmd.plan_parser import matches
from tvm_ipc.spmd.weight_placements_of_styles import transformers_plan

#: Example lengths for the export. They are dynamic, and must differ from all sizes of the model.
_PROMPT: Final = 7
_PAST: Final = 5
_BATCH: Final = 3
#: The implementation of experts in transformers whose shapes do not depend on values.
_EXPERTS: Final = "batched_mm"
_ATEN: Final = torch.ops.aten
#: Operators that are not decomposed, because Relax has them.
_NOT_DECOMPOSED: Final = (
    *(_ATEN.linear.default, _ATEN.matmul.default, _ATEN.silu.default),
    *(_ATEN.gelu.default, _ATEN.layer_norm.default),
)


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


def import_decoder(
    model: PreTrainedModel,
    workers: int = 1,
    *,
    shard_experts: bool = False,
    batch: bool = False,
    progress: Callable[[str], None] = lambda _: None,
    side_by_side: bool = False,
) -> Decoder:
    """Import a language model of transformers.

    Parameters
    ----------
    model : a model of transformers. The values of its weights are not read.
    workers : the number of ranks that will run it, which decides the attention implementation.
    shard_experts : whether ranks share the experts of each layer, and dispatch tokens to them. The
        plan of the model then shards the experts, and everything else as its usual plan does.
    batch : whether to import `decode_batch`, instead of the other two functions.
    progress : called with a short text before each step.
    side_by_side : whether `prefill` and `decode` are exported at the same time, one of them in a
        fork of this process. The process must have only one thread of Python.

    Raises
    ------
    ModelError
        The model cannot be exported or imported, or has no experts that ranks could share.
    """
    transformers_attention.register()
    heads = getattr(model.config.get_text_config(), "num_key_value_heads", None)
    is_sharded = shards_heads(heads, workers)
    model.set_attn_implementation(
        transformers_attention.GROUPED if is_sharded else transformers_attention.REPEATED
    )
    if shard_experts:
        _check_has_experts(model)
        transformers_experts.register()
    if model._can_set_experts_implementation():
        model.set_experts_implementation(
            transformers_experts.DISPATCHED if shard_experts else _EXPERTS
        )
    count = int(model.config.get_text_config().num_hidden_layers)
    step = Step(model, count)
    layers = find_layers(model, count)
    progress("comparing the layers of the model")
    past = _example_past(step)

    def imported(name: str) -> tuple[relax.Function, dict[str, str]]:
        return _export_and_import(name, step, layers, past, progress)

    functions: dict[str, relax.Function] = {}
    if batch:
        functions[DECODE_BATCH], names = imported(DECODE_BATCH)
    else:
        if side_by_side:
            with call_in_fork(lambda: _to_bytes(imported(DECODE))) as result:
                functions[PREFILL], names = imported(PREFILL)
                data = result()
            # The fork cannot raise its errors here, so they are raised by another try.
            decoded = imported(DECODE) if data is None else _from_bytes(data)
        else:
            functions[PREFILL], names = imported(PREFILL)
            decoded = imported(DECODE)
        functions[DECODE], decode_names = decoded
        names = {**names, **decode_names}
    caches = tuple(
        KvCacheSpec(int(t.shape[1]), int(t.shape[3]), str(t.dtype).removeprefix("torch."))
        for t in past
    )
    return Decoder(
        tvm.IRModule(functions),
        names,
        _plan(model, names, shard_experts),
        caches,
        int(next(iter(functions.values())).ret_ty.fields[0].shape[-1]),
        tuple(_ignored(model)),
        heads,
    )


def _to_bytes(imported: tuple[relax.Function, dict[str, str]]) -> bytes:
    function, names = imported
    return json.dumps([tvm.ir.save_json(tvm.IRModule({DECODE: function})), names]).encode()


def _from_bytes(data: bytes) -> tuple[relax.Function, dict[str, str]]:
    module, names = json.loads(data)
    return tvm.ir.load_json(module)[DECODE], names


class Step(nn.Module):  # type: ignore[misc]
    """A model as a function of token ids, positions, and the keys and values of past tokens.

    Parameters
    ----------
    inner : the model.
    layers : the number of its layers.
    first : for each layer the layer whose keys and values it gets and returns; None if each layer
        has its own.
    """

    def __init__(self, inner: nn.Module, layers: int, first: Sequence[int] | None = None) -> None:
        super().__init__()
        first = range(layers) if first is None else first
        self.inner, self.own = inner, sorted(set(first))
        self._pairs = [self.own.index(layer) for layer in first]

    def forward(self, ids: Any, positions: Any, past: Any) -> Any:
        """Return the logits of the last tokens, and the keys and values of the layers `own`."""
        for states in past[1:]:
            torch._check(states.shape[0] == past[0].shape[0])
            torch._check(states.shape[2] == past[0].shape[2])
        if past:
            past = [past[2 * pair + kind] for pair in self._pairs for kind in range(2)]
        cache = transformers_attention.make_cache(past, len(self._pairs))
        with transformers_attention.query_positions(positions):
            output = self.inner(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        own = [cache.layers[layer] for layer in self.own]
        states = [tensor for layer in own for tensor in (layer.keys, layer.values)]
        # TVM imports the index -1 of [:, -1] as an access before the tensor's memory.
        logits = output.logits if output.logits.shape[1] == 1 else output.logits[:, -1:]
        return (logits.reshape(logits.shape[0], logits.shape[-1]).float(), *states)


def _example_past(step: Step) -> tuple[Any, ...]:
    """Return zeros in the shapes of the keys and values of `_PAST` tokens, for all layers."""
    ids, positions = _example_tokens(_PROMPT)
    traced = _trace(step, [], (ids, positions, ()))
    if traced is None:
        program = _export(step, (ids, positions, ()), {"ids": {}, "positions": {}, "past": ()})
        results = _results(program)
    else:
        results, _ = traced
    return tuple(
        torch.zeros(t.shape[0], t.shape[1], _PAST, t.shape[3], dtype=t.dtype) for t in results[1:]
    )


def _example_tokens(count: int) -> tuple[Any, Any]:
    """Return ids and positions: two tensors, since torch.export takes one passed twice for one."""
    return torch.zeros(1, count, dtype=torch.int64), torch.zeros(1, count, dtype=torch.int64)


def _example_inputs(name: str, past: tuple[Any, ...]) -> tuple[Any, dict[str, Any]]:
    """Return inputs for the export of a function, and their dynamic axes."""
    dynamic = torch.export.Dim.DYNAMIC
    if name == DECODE_BATCH:
        tokens = tuple(token.expand(_BATCH, -1).clone() for token in _example_tokens(1))
        past = tuple(tensor.expand(_BATCH, -1, -1, -1).clone() for tensor in past)
        of_token, of_past = {0: dynamic}, {0: dynamic, 2: dynamic}
    elif name == DECODE:
        tokens, of_token, of_past = _example_tokens(1), {}, {2: dynamic}
    else:
        tokens, of_token, of_past = _example_tokens(_PROMPT), {1: dynamic}, {2: dynamic}
    shapes = {"ids": of_token, "positions": of_token, "past": tuple(of_past for _ in past)}
    return (*tokens, past), shapes


def _trace(step: Step, layers: Layers, inputs: Any) -> tuple[Any, EqualLayers] | None:
    """Call the model without data; return None if that fails, as torch.export then may not."""
    try:
        with _quiet():
            return trace(step, layers, inputs)
    except Exception:
        return None


def _export_and_import(
    name: str,
    step: Step,
    layers: Layers,
    past: tuple[Any, ...],
    progress: Callable[[str], None],
) -> tuple[relax.Function, dict[str, str]]:
    """Return a function by its name, and the names of weights by its parameters.

    Of equal layers one is exported, and its operators are repeated for the others.
    """
    inputs, shapes = _example_inputs(name, past)
    traced = _trace(step, layers, inputs) if layers else None
    equal = None if traced is None else traced[1]
    if equal is None or equal.exported == len(layers):
        progress(f"exporting the function {name}")
        return _imported(name, _export(step, inputs, shapes))
    progress(f"exporting the function {name}: {equal.exported} of {len(layers)} layers")
    try:
        return _export_equal_layers(name, step, layers, equal, past)
    except (ModelError, NotRepeatableError):
        return _imported(name, _export(step, inputs, shapes))


def _export_equal_layers(
    function_name: str, step: Step, layers: Layers, equal: EqualLayers, past: tuple[Any, ...]
) -> tuple[relax.Function, dict[str, str]]:
    """Return a function of which one of equal layers is exported."""
    of_layers = Step(step.inner, len(layers), equal.first)
    weights = [name for name, _ in step.inner.named_parameters(remove_duplicate=False)]
    inputs, shapes = _example_inputs(
        function_name,
        tuple(past[2 * layer + kind] for layer in of_layers.own for kind in range(2)),
    )
    with marked(step.inner, layers, equal):
        function, names = _imported(function_name, _export(of_layers, inputs, shapes))
    layer_names = [layer_name for layer_name, _ in layers]
    return repeat_layers(function, names, layer_names, equal.first, weights)


def _imported(name: str, program: Any) -> tuple[relax.Function, dict[str, str]]:
    inputs = program.graph_signature.inputs_to_parameters
    weights = {key: weight.removeprefix("inner.") for key, weight in inputs.items()}
    return _import(name, program), weights


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
                custom_convert_map={
                    **OPERATORS,
                    "mark.default": convert_mark,
                    "moe.default": transformers_experts.convert_moe,
                },
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


def _ignored(model: PreTrainedModel) -> Iterator[str]:
    """Yield regular expressions for names in checkpoints that are not parameters."""
    yield from model._keys_to_ignore_on_load_unexpected or ()
    yield r"\.rotary_emb\.inv_freq$"
    yield from (f"^{re.escape(name)}$" for name in model.all_tied_weights_keys)


def _check_has_experts(model: PreTrainedModel) -> None:
    """Raise `ModelError` unless transformers has a plan that shards experts for the model."""
    if not any(style == EXPERT_STYLE for style in (model._ep_plan or {}).values()):
        raise ModelError(
            f"{type(model).__name__}: transformers has no plan that shards experts of this model; "
            f"load it with a plan other than 'experts', and without the style {EXPERT_STYLE!r}"
        )


def _plan(model: PreTrainedModel, names: Mapping[str, str], shard_experts: bool) -> dict[str, str]:
    """Return the plan of transformers, or a built-in one, by the names of parameters.

    Patterns that match no module of this model are dropped: an architecture's plan may name more
    modules than a model has.
    """
    parameters = set(names.values())
    modules = {name for name, _ in model.named_modules()} | parameters
    tied = model.all_tied_weights_keys
    all_styles = model._tp_plan or BUILTIN_PLANS.get(model.config.model_type, {})
    if shard_experts:
        all_styles = {**all_styles, **model._ep_plan}
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
