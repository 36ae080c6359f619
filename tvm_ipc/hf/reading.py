# SPDX-License-Identifier: Apache-2.0
"""What transformers makes of a folder: the configuration of a language model, and a tokenizer."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from tvm_ipc.errors import ModelError
from tvm_ipc.hf.folder import CONFIG, Folder
from tvm_ipc.hf.packages import needed
from tvm_ipc.runtime.importing import without_torch


def configuration(folder: Folder) -> Any:
    """Return the configuration of a folder; raise `ModelError` if it is no language model's."""
    (transformers,) = needed("to read a configuration", "transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    where, kind = folder.path / CONFIG, str(folder.config["model_type"])
    known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = get_close_matches(kind, known, n=3)
        hint = f"near it are {', '.join(map(repr, near))}" if near else "known are 'llama', 'qwen3'"
        what = (
            "is an architecture that does not continue texts"
            if kind in CONFIG_MAPPING_NAMES
            else f"is no architecture that transformers {transformers.__version__} knows"
        )
        raise ModelError(f"{where}: model_type {kind!r} {what}; {hint}")
    if folder.config.get("is_encoder_decoder"):
        raise ModelError(f"{where}: {kind!r} has an encoder and a decoder; only decoders are known")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = transformers.AutoConfig.from_pretrained(
                str(folder.path), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"{where}: transformers does not take it: {first}") from error
    return found


def tokenizer(folder: Folder) -> Any:
    """Return the tokenizer of a folder; reading it needs no PyTorch, and does not import it."""
    with _without_torch():
        return _tokenizer(folder)


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Keep transformers from importing PyTorch, and from saying that it found none."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with without_torch():
            yield
    finally:
        logging.disable(disabled)


def _tokenizer(folder: Folder) -> Any:
    (transformers,) = needed("to read a tokenizer", "transformers")
    if not folder.has_tokenizer:
        raise ModelError(
            f"{folder.path}: there is no tokenizer (tokenizer.json), so a prompt cannot be read; "
            "give token ids with --tokens 1,2,3"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformers.AutoTokenizer.from_pretrained(
                str(folder.path), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelError(f"{folder.path}: its tokenizer cannot be read: {first}") from error
