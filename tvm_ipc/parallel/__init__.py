# SPDX-License-Identifier: Apache-2.0
"""From a model for one device to what each rank of a mesh runs of it.

plan         which weights are cut how: patterns of names
styles       what transformers and PyTorch call the ways to cut them
auto         plans that are found: search goes through the program, outcomes says what becomes of a
             call, and costs what that takes
uses         where in the program weights meet other values
activations  places where a plan divides what is between weights
axes, divisions, repeats, products
             how axes of weights are divided so that what is made of them needs no collective
meet         places in the program where what operators need is not what there is; cheapest decides
caches       inputs that lie as the heads do which they are made of
layout       where each parameter lies, by the program, the plan, its use, its cost
parameters   what a model is given, by the names that plans know
cut          what a rank has of a parameter
model        parallelize(), step by step; parallelized is what it returns

`Cut` describes what was compiled without a compiler; the others load it when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tvm_ipc.parallel.cut import Cut

if TYPE_CHECKING:
    from tvm_ipc.parallel.model import parallelize
    from tvm_ipc.parallel.parallelized import Parallelized

__all__ = ["Cut", "Parallelized", "parallelize"]

if not TYPE_CHECKING:
    _MODULES = {"Parallelized": "parallelized", "parallelize": "model"}

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"tvm_ipc.parallel.{_MODULES[name]}")
        return globals().setdefault(name, getattr(module, name))
