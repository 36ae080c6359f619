# SPDX-License-Identifier: Apache-2.0
"""A model's folder, as `save_pretrained` of transformers writes it and the hub has it.

Reading it needs neither PyTorch nor transformers.
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
#: What a folder with a tokenizer has, at least one of them.
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
#: Element types that a model may compute in.
DTYPES: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Folder:
    """A model's folder.

    Attributes
    ----------
    path : of the folder.
    config : what config.json says.
    """

    path: Path
    config: Mapping[str, Any]

    @property
    def dtype(self) -> str:
        """The type of the weights, as the configuration says."""
        text = self._of_text()
        named = str(text.get("dtype") or text.get("torch_dtype") or "float32")
        return named.removeprefix("torch.")

    @property
    def context(self) -> int | None:
        """How many tokens the model was made for, None if it does not say."""
        text = self._of_text()
        found = text.get("max_position_embeddings", text.get("n_positions"))
        return found if isinstance(found, int) and found > 0 else None

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer."""
        return any((self.path / name).is_file() for name in _TOKENIZERS)

    def ends(self) -> frozenset[int]:
        """Return the tokens after which there is nothing to say."""
        found = None
        generation = self.path / _GENERATION
        if generation.is_file():
            found = read_object(generation).get("eos_token_id")
        if found is None:
            found = self._of_text().get("eos_token_id")
        given = found if isinstance(found, list) else [found]
        return frozenset(one for one in given if isinstance(one, int))

    def _of_text(self) -> Mapping[str, Any]:
        inner = self.config.get("text_config")
        return {**self.config, **inner} if isinstance(inner, dict) else self.config


def read_folder(folder: object) -> Folder:
    """Return what a folder has; raise `ModelError` if it is no model's."""
    path = arguments.path("folder", folder, "a folder with config.json and *.safetensors")
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ModelError(
            f"{path}: {what}; a model is a folder with {CONFIG} and *.safetensors, as "
            "save_pretrained writes it"
        )
    if not (path / CONFIG).is_file():
        raise ModelError(
            f"{path}: there is no {CONFIG}; a model is a folder with {CONFIG} and *.safetensors, "
            "as save_pretrained writes it"
        )
    config = read_object(path / CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"{path / CONFIG}: it has no 'model_type', which says what architecture it is; save "
            "the model again with save_pretrained"
        )
    if "quantization_config" in config:
        how = config["quantization_config"]
        method = how.get("quant_method", "") if isinstance(how, dict) else ""
        raise ModelError(
            f"{path / CONFIG}: the weights are quantized ({method or 'quantization_config'}); take "
            "the model in float32, float16 or bfloat16"
        )
    if not any(path.glob("*.safetensors")):
        others = sorted(one.name for one in (*path.glob("*.bin"), *path.glob("*.gguf")))
        found = f"found {', '.join(others[:3])}; " if others else ""
        raise ModelError(
            f"{path}: there are no weights in *.safetensors; {found}save the model with "
            "save_pretrained of transformers, which writes them"
        )
    return Folder(path, config)


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; raise `ModelError` if it has none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, ValueError) as error:
        raise ModelError(f"{path}: it cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: it is no JSON object, but a {type(found).__name__}")
    return found
