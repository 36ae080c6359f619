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
cut          what a rank has of a parameter
model        all of it together
"""

from tvm_ipc.parallel.cut import Cut
from tvm_ipc.parallel.model import Parallelized, parallelize

__all__ = ["Cut", "Parallelized", "parallelize"]
