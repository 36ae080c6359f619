# SPDX-License-Identifier: Apache-2.0
"""Make the model of `engines.py` with random weights, and convert it for each engine.

    python engine_models.py make FOLDER DTYPE SIZES      # in an environment with transformers
    python engine_models.py gguf FOLDER FILE             # in an environment with gguf

SIZES is a JSON object with arguments of `LlamaConfig`. The weights depend on nothing else: those in
bfloat16 are the rounded ones in float32. The other engines have converters of their own, which
`conversion` lists.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FULL = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16_000,
}
#: The vocabulary has a size of its own, by which ONNX Runtime's converter finds the last matmul.
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
CONTEXT = 4096
#: Tokens below this begin and end texts, so prompts have none of them.
FIRST_ORDINARY = 3


def weights_read(sizes: dict[str, int]) -> int:
    """Return the number of weights that decode reads for each token: all but the embedding."""
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
    return sizes["num_hidden_layers"] * layer + hidden + sizes["vocab_size"] * hidden


def cached_per_token(sizes: dict[str, int]) -> int:
    """Return the number of elements of the keys and values of one token."""
    head = sizes["hidden_size"] // sizes["num_attention_heads"]
    return 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * head


def conversion(engine: str, python: str, source: Path, target: Path, dtype: str) -> list[str]:
    """Return the command that converts a folder of transformers; an empty one if none is needed."""
    if engine == "openvino":
        options = ["--task", "text-generation-with-past"]
        options += ["--weight-format", "fp32"] if dtype == "float32" else []
        program = ["-c", "from optimum.commands.optimum_cli import main; main()"]
        return [python, *program, "export", "openvino", "-m", str(source), *options, str(target)]
    if engine == "onnxruntime":
        precision = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
        builder = ["-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", precision]
        return [python, *builder, "-m", str(source), "-o", str(target)]
    if engine == "ctranslate2":
        script = "from ctranslate2.converters.transformers import main; main()"
        return [python, "-c", script, "--model", str(source), "--output_dir", str(target)]
    if engine == "llama.cpp":
        return [python, str(Path(__file__).resolve()), "gguf", str(source), str(target)]
    return []


def make(folder: str, dtype: str, sizes: dict[str, int]) -> None:
    """Save a model and a tokenizer, in which the token 5 is the word `t5`."""
    import tokenizers
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **sizes, max_position_embeddings=CONTEXT, tie_word_embeddings=False
    )
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    words = {f"t{number}": number for number in range(sizes["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(
        folder
    )


#: The names of weights in GGUF files; layers have `blk.0.` and so on before them.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """Return the name in GGUF files of a weight of transformers' Llama."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.weight"
    number, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{GGUF_NAMES[rest]}.weight"


def _stored_tensors(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield names, types and bits of the tensors of a folder; those of bfloat16 are uint16."""
    import numpy as np

    kinds = {"F32": np.float32, "BF16": np.uint16}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                begin, end = tensor["data_offsets"]
                stream.seek(8 + length + begin)
                kind = tensor["dtype"]
                flat = np.frombuffer(stream.read(end - begin), kinds[kind])
                yield name, kind, flat.reshape(tensor["shape"])


def rotating_neighbours(weight: Any, heads: int) -> Any:
    """Reorder the rows of each head: transformers rotates its two halves, llama.cpp neighbours."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(source: Path, target: Path) -> None:
    """Write the folder of a Llama as a GGUF file, without a vocabulary."""
    import gguf
    import numpy as np

    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, kind, tensor in _stored_tensors(source):
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                tensor = rotating_neighbours(tensor, count)
        if tensor.ndim == 1 and kind == "BF16":  # norms are in float32 there
            kind, tensor = "F32", (tensor.astype(np.uint32) << 16).view(np.float32)
        if kind == "BF16":
            bits = np.ascontiguousarray(tensor).view(np.uint8)
            writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: list[str]) -> None:
    os.dup2(2, 1)  # no output but the log
    if arguments[0] == "make":
        make(arguments[1], arguments[2], json.loads(arguments[3]))
    else:
        write_gguf(Path(arguments[1]), Path(arguments[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
