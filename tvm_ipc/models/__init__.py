# SPDX-License-Identifier: Apache-2.0
"""Run Hugging Face models on the workers of a session, and load weights into their memory.

with tvm_ipc.Session(num_workers=4) as session:
    model = tvm_ipc.models.load("folder", session)
    for piece in model.generate("Once upon a time", max_new_tokens=16):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_ipc.models.hf.model import Model, load
    from tvm_ipc.models.hf.text_stream import TextStream
    from tvm_ipc.models.weights.fused import concat, stack
    from tvm_ipc.models.weights.load import load_weights

__all__ = ["Model", "TextStream", "concat", "load", "load_weights", "stack"]

_MODULES = {
    "concat": "weights.fused",
    "load": "hf.model",
    "load_weights": "weights.load",
    "Model": "hf.model",
    "stack": "weights.fused",
    "TextStream": "hf.text_stream",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"tvm_ipc.models.{_MODULES[name]}")
        return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
