# SPDX-License-Identifier: Apache-2.0
"""Load weights from files or from the controller's memory into the workers of a session.

- `load.py`: `load_weights()`, which puts the other modules together.
- `list_checkpoint_tensors.py`: the tensors of a checkpoint, a file or a folder, by their names.
- `safetensors_header.py`, `read_tvmjs_index.py`: the two file formats; `read_and_check_json.py`:
  what they share; `tensor_in_file.py`: a tensor in a file.
- `in_memory_weight_sources.py`: tensors in the controller's memory, from PyTorch, NumPy or TVM.
- `stack_or_concat_source_tensors.py`: parameters that are stacked or concatenated from several
  tensors of the source.
- `match.py`: compares the names, shapes and types of a source with those of the program.
- `worker.py`, `slice_reader.py`: what runs in the workers, and reads a rank's shard of a file.
- `files_unreadable_on_other_nodes.py`: files that other nodes cannot read.

Workers import `worker.py`, so nothing that it imports needs TVM's compiler.
"""

from tvm_ipc.models.weights.stack_or_concat_source_tensors import concat, stack

__all__ = ["concat", "stack"]
