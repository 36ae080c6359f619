# SPDX-License-Identifier: Apache-2.0
"""A tensor-parallel decoder on TVM's Relax frontend, from the model to tokens.

`tvm-ipc demo` runs it, and `python -m tvm_ipc.examples.tensor_parallel_decoder` a small one.

decoder_config            the sizes of the model
decoder_model             the program of one worker
attention_kernels         TIR kernels for CPUs and GPUs
residual_stream_sharding  the rows that each worker has
schedule_matmuls          CPU schedules for programs without OpenBLAS
random_weights            weights and their shards
generate                  generation of tokens in a session


"""
