# SPDX-License-Identifier: Apache-2.0
"""Read the configuration and the tokenizer of a model's folder with transformers."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.model_folder import CONFIG, ModelFolder
from tvm_ipc.models.hf.optional_deps import require
from tvm_ipc.runtime.import_tvm_without_compiler import without_torch


def configuration(folder: ModelFolder) -> Any:
    """Return the configuration of a folder.

    Raises
    ------
    ModelError
        The folder has no causal language model, or transformers cannot read the configuration.
    """
    (transformers,) = require("to read a configuration", "transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    where, model_type = folder.path / CONFIG, str(folder.config["model_type"])
    supported = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        similar = get_close_matches(model_type, supported, n=3) or ["llama", "qwen3"]
        problem = (
            "is not a causal language model"
            if model_type in CONFIG_MAPPING_NAMES
            else f"is not an architecture of transformers {transformers.__version__}"
        )
        raise ModelError(
            f"{where}: model_type {model_type!r} {problem}; use one such as "
            f"{', '.join(map(repr, similar))}"
        )
    if folder.config.get("is_encoder_decoder"):
        raise ModelError(
            f"{where}: {model_type!r} has an encoder and a decoder; only models without an encoder "
            "are supported"
        )
    problem = f"{where}: transformers cannot read the configuration"
    return _from_pretrained(transformers.AutoConfig, folder, problem)


def _from_pretrained(auto_class: Any, folder: ModelFolder, problem: str) -> Any:
    """Return what a class of transformers reads from a folder; raise `ModelError` if it fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return auto_class.from_pretrained(
                str(folder.path), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"{problem}: {line}") from error


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Keep transformers from importing PyTorch, and from warning that PyTorch is missing."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with without_torch():
            yield
    finally:
        logging.disable(disabled)


@_without_torch()
def tokenizer(folder: ModelFolder) -> Any:
    """Return the tokenizer of a folder, without importing PyTorch."""
    (transformers,) = require("to read a tokenizer", "transformers")
    if not folder.has_tokenizer:
        raise ModelError(
            f"{folder.path}: there is no tokenizer (tokenizer.json), so a text cannot be "
            "tokenized; give token ids with --tokens 1,2,3, or with generate([1, 2, 3]) in Python"
        )
    problem = f"{folder.path}: the tokenizer cannot be read"
    return _from_pretrained(transformers.AutoTokenizer, folder, problem)
