# SPDX-License-Identifier: Apache-2.0
"""A language model of transformers on two workers, from its folder to tokens, as PyTorch says them.

The model is small and has random weights, so that nothing is downloaded; give the folder of another
one as the first argument. Wants the extra `hf`: torch, transformers and safetensors.
"""

import sys
import tempfile

import torch
import transformers

import tvm_ipc

PROMPT, NEW = [1, 15, 33], 12

if len(sys.argv) > 1:
    folder = sys.argv[1]
else:
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=100,
        eos_token_id=None,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)

with tvm_ipc.Session(num_workers=2) as session:
    model = tvm_ipc.models.load(folder, session)  # compiled once, then kept in a cache
    ours = list(model.generate(PROMPT, max_new_tokens=NEW))
print(f"two workers: {ours}")

rival = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
given = torch.tensor([PROMPT])
said = rival.generate(
    given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, do_sample=False
)
theirs = said[0, len(PROMPT) :].tolist()
print(f"PyTorch:     {theirs}")
print("the same tokens" if ours == theirs else "they part where two tokens are about as likely")
