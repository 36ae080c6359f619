# SPDX-License-Identifier: Apache-2.0
"""Language models of transformers on the workers of a session.

    with tvm_ipc.Session(num_workers=4) as session:
        model = tvm_ipc.hf.load("folder", session)
        for token in model.generate([1, 15043, 3186], max_new_tokens=16):
            print(token)

folder     what a model's folder has           reading    what transformers makes of it
importing  from a configuration to Relax       attention  as it is exported
operators  PyTorch's in Relax                  dividing   what each rank runs, and keeps
keeping    keys and values stay in place       compiling  into a library, kept in the cache
model      on workers: prompts in, tokens out  sampling   which token comes next
names      of weights in checkpoints     called    those of a folder, found once
command    `tvm-ipc run`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_ipc.hf.model import Model, load

__all__ = ["Model", "load"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tvm_ipc.hf import model

        return getattr(model, name)
