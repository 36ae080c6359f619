# SPDX-License-Identifier: Apache-2.0
"""The decoder on one worker and on two: the same tokens."""

import tvm

import tvm_ipc

from . import decoder_model, random_weights
from .decoder_config import Config
from .generate import Generator

config = Config(layers=2, hidden=128, heads=4, kv_heads=2, inner=256, vocabulary=512)
weights = list(random_weights.make(config))
target = tvm_ipc.cpu_target()
tokens = {}
for workers in (1, 2):
    pipeline = tvm_ipc.get_pipeline(target, workers)
    program = tvm.compile(decoder_model.build(config, workers), target, relax_pipeline=pipeline)
    with tvm_ipc.Session(workers) as session:
        generator = Generator(session, program, config, weights)
        tokens[workers] = generator.generate(prompt=[1, 15, 33], count=12).tokens
    print(f"workers: {workers}, tokens: {tokens[workers][0]}")
assert tokens[2] == tokens[1] * 2
