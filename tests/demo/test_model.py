# SPDX-License-Identifier: Apache-2.0
"""The decoder on workers against NumPy: the same tokens, the same logits, any prompt length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from reference import Reference
from tvm import relax

import tvm_ipc
from tvm_ipc.demo import model, weights
from tvm_ipc.demo.config import Config

CONFIG = Config(layers=2, hidden=64, heads=8, kv_heads=4, inner=96, vocabulary=128, context=40)


@pytest.fixture(scope="module", params=[1, 2, 4])
def session(request: pytest.FixtureRequest) -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(request.param) as session:
        yield session


def test_tokens_and_logits_are_those_of_numpy(session: Any) -> None:
    n = session.num_workers
    target = tvm.target.Target("llvm")
    pipeline = relax.get_default_pipeline(target)
    program = relax.build(model.build(CONFIG, n), target, relax_pipeline=pipeline)
    functions = session.load_vm_module(program)
    pack = session.get_global_func("vm.builtin.make_tuple")
    field = session.get_global_func("vm.builtin.tuple_getitem")
    parts = pack(
        *[
            session.put(w) if how is None else session.scatter(weights.shard(w, how, n))
            for _, w, how in weights.make(CONFIG)
        ]
    )
    caches = pack(*[session.empty(s, CONFIG.dtype) for s in model.cache_shapes(CONFIG, n)])
    for prompt in ([3, 5, 17, 99, 4, 4, 28], [1], list(range(30, 50))):
        expected, expected_logits = Reference(CONFIG).generate(prompt, 6)
        tokens, logits = [], []
        total = len(prompt)
        out = functions["prefill"](
            session.put(np.array(prompt, "int32")), tvm_ffi.Shape([total]), caches, parts
        )
        while True:
            token = field(out, 0)
            tokens.append(int(session.get(token, rank=n - 1)[0]))
            logits.append(session.get(field(out, 1), rank=n - 1))
            if len(tokens) == 6:
                break
            total += 1
            out = functions["decode"](token, tvm_ffi.Shape([total]), caches, parts)
        assert tokens == expected
        np.testing.assert_allclose(np.stack(logits), expected_logits, atol=1e-5)
