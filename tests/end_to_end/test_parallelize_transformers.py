# SPDX-License-Identifier: Apache-2.0
"""Models of `transformers` with random weights, cut by their own plans, against PyTorch."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tvm
from placed_programs import session_of
from test_placed_operators import FAST_TO_COMPILE
from tvm import relax

import tvm_ipc
from tvm_ipc import parallelize

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@cache
def exported(name: str) -> tuple[Any, ...]:
    """Return a model, the module that TVM imports of it, weights, names, and its logits."""
    from tvm.relax.frontend.torch import from_exported_program

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        hidden_size=48,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=67,
        max_position_embeddings=64,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms and biases that do something
            torch.nn.init.normal_(parameter, 1.0, 0.3)

    class Logits(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.inner(input_ids=ids, attention_mask=mask, use_cache=False).logits

    given = (torch.randint(0, 67, (1, 7)), torch.ones(1, 7, dtype=torch.int64))
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {"ids": {1: length}, "mask": {1: length}}
    program = torch.export.export(Logits(), given, dynamic_shapes=shapes)
    mod = from_exported_program(program, keep_params_as_input=True)
    mod, weights = relax.frontend.detach_params(mod)
    with torch.no_grad():
        logits = model(input_ids=given[0], attention_mask=given[1], use_cache=False).logits
    names = dict(program.graph_signature.inputs_to_parameters)
    return model, mod, weights["main"], names, [one.numpy() for one in given], logits.numpy()


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_logits(name: str, workers: int) -> None:
    model, mod, weights, names, given, logits = exported(name)
    plan = {**type(model.config).base_model_tp_plan, **type(model)._tp_plan}
    made = parallelize(mod, plan, workers, names=names)
    assert made.collectives["allreduce"] == 4, "two a layer"
    if workers == 2:
        assert made.collectives == {"allreduce": 4, "allgather": 1}
    pipeline = tvm_ipc.get_pipeline("llvm", workers)
    executable = tvm.compile(made.module, FAST_TO_COMPILE, relax_pipeline=pipeline)
    with session_of(made.mesh) as session:
        references = [[one] * workers for one in given]
        for cut, weight in zip(made.cut.values(), weights, strict=True):
            references.append([cut.part(weight.numpy(), rank) for rank in range(workers)])
        arguments = []
        for parts in references:
            reference = session.empty(parts[0].shape, str(parts[0].dtype))
            for rank, part in enumerate(parts):
                reference.debug_copy_from(rank, part)
            arguments.append(reference)
        result = session.load_vm_module(executable)["main"](*arguments)
        for rank in range(workers):
            (found,) = result.debug_get_from_remote(rank)
            np.testing.assert_allclose(found.numpy(), logits, rtol=1e-4, atol=1e-5)
