# SPDX-License-Identifier: Apache-2.0
"""Weights in files or in memory, and their parts on the workers of a session.

stored       tensors as they lie in a file, and the file as it was when it was looked at
safetensors  what a file of that format holds
tvmjs        what a folder that TVM or mlc-llm wrote holds
folder       which files of a folder hold what
held         tensors of the controller: PyTorch's, NumPy's, TVM's
joined       several of them that are one parameter
match        whether what there is is what the program wants
reading      a rank's part of a file, into its memory
worker       what the workers call
elsewhere    files that other nodes do not have
load         all of it together

Workers import `worker`, and so nothing here that needs TVM's compiler.
"""

from tvm_ipc.weights.joined import concat, stack

__all__ = ["concat", "stack"]
