# SPDX-License-Identifier: Apache-2.0
"""Read a model's folder, as `save_pretrained` of transformers writes it and the hub stores it.

This module needs neither PyTorch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tvm_ipc import arguments
from tvm_ipc.errors import ModelError

CONFIG: Final = "config.json"
_GENERATION: Final = "generation_config.json"
#: A folder with a tokenizer has at least one of these files.
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
#: Element types that a model may compute in.
DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder.

    Attributes
    ----------
    path : the path of the folder.
    config : the content of config.json.
    """

    path: Path
    config: Mapping[str, Any]

    @property
    def dtype(self) -> str:
        """The type of the weights, according to the configuration."""
        text = self._text_config()
        dtype = str(text.get("dtype") or text.get("torch_dtype") or "float32")
        return dtype.removeprefix("torch.")

    @property
    def context(self) -> int | None:
        """The longest sequence that the model supports, in tokens; None if it is not specified."""
        text = self._text_config()
        length = text.get("max_position_embeddings", text.get("n_positions"))
        return length if isinstance(length, int) and length > 0 else None

    @property
    def has_tokenizer(self) -> bool:
        """True if the folder has a tokenizer."""
        return any((self.path / name).is_file() for name in _TOKENIZERS)

    def ends(self) -> frozenset[int]:
        """Return the end-of-sequence tokens."""
        ids = None
        generation = self.path / _GENERATION
        if generation.is_file():
            ids = read_object(generation).get("eos_token_id")
        if ids is None:
            ids = self._text_config().get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        return frozenset(token for token in ids if isinstance(token, int))

    def _text_config(self) -> Mapping[str, Any]:
        inner = self.config.get("text_config")
        return {**self.config, **inner} if isinstance(inner, dict) else self.config


def read_folder(folder: object) -> ModelFolder:
    """Read and check the configuration of a folder; raise `ModelError` if it has no model."""
    path = arguments.path("folder", folder, "a folder with config.json and *.safetensors")
    problem = ""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
    elif not (path / CONFIG).is_file():
        problem = f"there is no {CONFIG}"
    if problem:
        raise ModelError(
            f"{path}: {problem}; a model is a folder with {CONFIG} and *.safetensors, as "
            "save_pretrained writes it"
        )
    config = read_object(path / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{path / CONFIG}: it has no 'model_type', which names the architecture; save the "
            "model again with save_pretrained"
        )
    if "quantization_config" in config:
        quantization = config["quantization_config"]
        method = quantization.get("quant_method", "") if isinstance(quantization, dict) else ""
        raise ModelError(
            f"{path / CONFIG}: the weights are quantized ({method or 'quantization_config'}), "
            "which is not supported; use the model in float32, float16 or bfloat16"
        )
    if not any(path.glob("*.safetensors")):
        others = sorted(file.name for file in (*path.glob("*.bin"), *path.glob("*.gguf")))
        found = f"found {', '.join(others[:3])}; " if others else ""
        raise ModelError(
            f"{path}: there are no weights in *.safetensors; {found}save the model with "
            "save_pretrained of transformers, which writes them"
        )
    return ModelFolder(path, config)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; raise `ModelError` if the file has none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, ValueError) as error:
        raise ModelError(f"{path}: the file cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path}: the file has a {type(content).__name__}; it must have a JSON object"
        )
    return content
