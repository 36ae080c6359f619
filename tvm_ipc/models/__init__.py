# SPDX-License-Identifier: Apache-2.0
"""Run Hugging Face models on the workers of a session, and load weights into their memory.

with tvm_ipc.Session(num_workers=4) as session:
    model = tvm_ipc.models.load("folder", session)
    for piece in model.generate("Once upon a time", max_new_tokens=16):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_ipc.lazy_exports import export_on_first_use

if TYPE_CHECKING:
    from tvm_ipc.models.hf.batch import Batch, BatchRequest
    from tvm_ipc.models.hf.load_and_generate import Model, load
    from tvm_ipc.models.hf.text_stream import TextStream
    from tvm_ipc.models.weights.load import load_weights
    from tvm_ipc.models.weights.stack_or_concat_source_tensors import concat, stack

__all__ = [
    "Batch",
    "BatchRequest",
    "Model",
    "TextStream",
    "concat",
    "load",
    "load_weights",
    "stack",
]

if not TYPE_CHECKING:  # a type checker would take every name for defined
    __getattr__, __dir__ = export_on_first_use(
        __name__,
        {
            "Batch": "hf.batch",
            "BatchRequest": "hf.batch",
            "concat": "weights.stack_or_concat_source_tensors",
            "load": "hf.load_and_generate",
            "load_weights": "weights.load",
            "Model": "hf.load_and_generate",
            "stack": "weights.stack_or_concat_source_tensors",
            "TextStream": "hf.text_stream",
        },
    )
