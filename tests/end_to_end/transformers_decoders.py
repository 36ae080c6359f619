# SPDX-License-Identifier: Apache-2.0
"""Small decoders of `transformers`: their functions for prompts and for one more token.

What PyTorch says of a text is compared step by step, on the tokens that PyTorch has chosen: where
two tokens are as likely, numbers of 16 bits choose by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import tvm
import tvm_ffi
from transformers.cache_utils import Cache, StaticLayer
from tvm.relax.frontend.torch import from_exported_program

import tvm_ipc
from tests.end_to_end.placed_programs import put, session_of
from tests.end_to_end.test_placed_operators import FAST_TO_COMPILE
from tests.end_to_end.transformers_models import MODELS, error_of, random_model
from tvm_ipc.models.hf.imported_decoder import Decoder
from tvm_ipc.models.hf.inplace_kv_cache_update import update_in_place
from tvm_ipc.models.hf.shard_imported_model import kv_cache_specs
from tvm_ipc.models.hf.torch_import import import_decoder
from tvm_ipc.models.hf.torch_operators import OPERATORS
from tvm_ipc.spmd import Parallelized

PROMPT = [5, 61, 17, 3, 44, 60, 2, 29, 31]
#: Tokens after the prompt, each of which is given to the model.
STEPS = 16
#: Of these models.
DECODERS = [name for name, one in MODELS.items() if one.name not in ("Bert", "ViT")]


@dataclass(frozen=True)
class Text:
    """What PyTorch says of a text.

    Attributes
    ----------
    model : of PyTorch.
    tokens : the prompt, and what PyTorch says that comes next.
    logits : of the end of the prompt and of each token after it.
    exact : the same with 32 bits throughout.
    """

    model: Any
    tokens: list[int]
    logits: Any
    exact: Any

    def steps(self) -> Iterator[tuple[int, int]]:
        """Yield where the tokens of each step begin and end: of the prompt, and of one more."""
        yield from pairwise([0, *range(len(PROMPT), len(self.tokens) + 1)])

    def check(self, found: Any) -> None:
        """Check logits of all steps.

        Those of 32 bits are right to 1e-4. Others are no further from the exact ones than those of
        PyTorch, all steps together and each of them.
        """
        if np.array_equal(self.logits, self.exact):
            np.testing.assert_allclose(found, self.logits, rtol=1e-4, atol=1e-4)
            return
        theirs = [error_of(one, right) for one, right in zip(self.logits, self.exact, strict=True)]
        for one, right in zip(found, self.exact, strict=True):
            assert error_of(one, right) < 1.5 * max(theirs)
        assert error_of(found, self.exact) < 1.5 * error_of(self.logits, self.exact)


@cache
def text(key: str, dtype: str = "float32", **sizes: Any) -> Text:
    """Return what a model with random weights says."""
    model = random_model(key, dtype, **sizes)
    ids = torch.tensor([PROMPT])
    said = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=STEPS + 1,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(said.logits).float().numpy()
    tokens = said.sequences[0, :-1].tolist()
    exact = logits
    if dtype != "float32":
        with torch.no_grad():
            all_at_once = deepcopy(model).float()(torch.tensor([tokens])).logits
        exact = all_at_once[0, len(PROMPT) - 1 :].numpy()
    return Text(model, tokens, logits, exact)


@cache
def decoder_of(
    key: str, dtype: str = "float32", workers: int = 1, shard_experts: bool = False, **sizes: Any
) -> Decoder:
    """Return a model as it is imported for a number of workers, or others with like heads."""
    model = deepcopy(text(key, dtype, **sizes).model)
    return import_decoder(model, workers, shard_experts=shard_experts)


def check(one: Text, decoder: Decoder, made: Parallelized) -> None:
    """Run what ranks have of a decoder, and compare what each of them says with PyTorch."""
    ranks = made.mesh.ranks
    module = update_in_place(made.module, len(decoder.caches))
    found = []
    with session_of(made.mesh) as session:
        program = session.load_vm_module(_compiled(module, len(ranks)))
        pack = session.get_global_func("vm.builtin.make_tuple")
        weights = pack(*_weights(session, one, made))
        kept = kv_cache_specs(made, decoder)
        room = len(one.tokens)
        caches = pack(*(session.empty((room, x.heads, x.dim), x.dtype) for x in kept))
        for seen, end in one.steps():
            ids = np.array([one.tokens[seen:end]], "int64")
            places = np.arange(seen, end, dtype="int64")[None]
            function = program["decode" if seen else "prefill"]
            result = function(ids, places, tvm_ffi.Shape([seen]), caches, weights)
            found.append([session.get(result, rank)[0] for rank in ranks])
    for of_rank in zip(*found, strict=True):
        one.check(np.stack(of_rank))


def _compiled(module: tvm.IRModule, workers: int) -> Any:
    pipeline = tvm_ipc.get_pipeline("llvm", workers)
    return tvm.compile(module, FAST_TO_COMPILE, relax_pipeline=pipeline)


def _weights(session: Any, one: Text, made: Parallelized) -> list[Any]:
    cut = {name: each for name, each in made.shards.items() if not each.is_input}
    return list(tvm_ipc.load_weights(session, one.model, cut).values())


class _Static(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A model with transformers' caches of a fixed length, as a function of what is in them."""

    def __init__(self, inner: Any, room: int) -> None:
        super().__init__()
        self.inner, self.room = inner, room

    def forward(self, ids: Any, at: Any, past: Any) -> Any:
        layers = []
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = StaticLayer(self.room)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys.clone(), values.clone()
            layer.cumulative_length = at.clone()
            layers.append(layer)
        positions = (torch.arange(ids.shape[1]) + at)[None]
        cache = Cache(layers=layers)
        said = self.inner(input_ids=ids, position_ids=positions, past_key_values=cache)
        return (said.logits[:, -1:], *(x for one in layers for x in (one.keys, one.values)))


def with_static_caches(one: Text, decoder: Decoder) -> tuple[tvm.IRModule, dict[str, str]]:
    """Return functions for the prompt and for one more token, and the names of weights.

    All lengths are fixed, of prompt and caches.
    """
    step = _Static(deepcopy(one.model), len(one.tokens))
    past = [
        torch.zeros(1, kept.heads, step.room, kept.dim, dtype=getattr(torch, kept.dtype))
        for kept in decoder.caches
    ]
    functions, names = {}, {}
    for name, count in (("prefill", len(PROMPT)), ("decode", 1)):
        given = (torch.zeros(1, count, dtype=torch.int64), torch.tensor(0), past)
        program = torch.export.export(step, given, strict=False)
        mod = from_exported_program(
            program, keep_params_as_input=True, custom_convert_map=OPERATORS
        )
        functions[name] = mod["main"].without_attr("params").with_attr("global_symbol", name)
        found = program.graph_signature.inputs_to_parameters
        names |= {key: value.removeprefix("inner.") for key, value in found.items()}
    return tvm.IRModule(functions), names


def check_with_static_caches(one: Text, made: Parallelized) -> None:
    """Run what ranks have, which are given the caches that they return."""
    ranks = made.mesh.ranks
    found = []
    with session_of(made.mesh) as session:
        program = session.load_vm_module(_compiled(made.module, len(ranks)))
        weights = _weights(session, one, made)
        past = [
            put(session, [np.zeros(cut.shard_shape, cut.dtype)] * len(ranks))
            for cut in made.shards.values()
            if cut.is_input
        ]
        for seen, end in one.steps():
            ids = np.array([one.tokens[seen:end]], "int64")
            function = program["decode" if seen else "prefill"]
            result = function(ids, np.array(seen, "int64"), *past, *weights)
            of_ranks = [[x.numpy() for x in result.debug_get_from_remote(rank)] for rank in ranks]
            found.append([logits[0, -1].astype("float32") for logits, *_ in of_ranks])
            past = [put(session, list(x)) for x in zip(*(x for _, *x in of_ranks), strict=True)]
    for of_rank in zip(*found, strict=True):
        one.check(np.stack(of_rank))
