# SPDX-License-Identifier: Apache-2.0
"""Map the weights of a transformers model to their names in a checkpoint.

The models of transformers change while their checkpoints do not: experts that are separate tensors
in the files are one tensor in the model, and prefixes of names differ. transformers converts the
tensors when it loads them. This module applies the same conversions to the names only, so each rank
can read its shards from the files as they are.

    names = checkpoint_names(model, stored)
    names = {name: names[name] for name in parallel.shards}
    load_weights(session, folder, parallel.shards, names=names)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tvm_ipc.errors import ModelError
from tvm_ipc.models.weights import concat, stack
from tvm_ipc.models.weights.stack_or_concat_source_tensors import Name


def checkpoint_names(model: Any, stored: Iterable[str]) -> dict[str, Name]:
    """Return the names that the weights of a model have in a checkpoint, by their model names.

    Parameters
    ----------
    model : a model of transformers; the values of its weights are not read.
    stored : the names in the checkpoint.

    Raises
    ------
    ModelError
        transformers converts a weight with an operation that is not supported.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [item for item in conversions if isinstance(item, WeightRenaming)]
    converters = [item for item in conversions if isinstance(item, WeightConverter)]
    model_weights = model.state_dict()
    names: dict[str, Name] = {}
    sources: dict[str, dict[str, list[Name]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, model_weights
        )
        if pattern is None:
            names[target] = name
        else:
            sources.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, by_pattern in sources.items():
        converter = next(c for c in converters if set(by_pattern) <= set(c.source_patterns))
        names[target] = _apply_converter(target, by_pattern, converter)
    for tied, source in getattr(model, "all_tied_weights_keys", {}).items():
        if tied not in names and source in names:
            names[tied] = names[source]
        elif source not in names and tied in names:
            names[source] = names[tied]
    return names


def _apply_converter(target: str, by_pattern: Mapping[str, Sequence[Name]], converter: Any) -> Name:
    """Return the name of the tensor that a converter of transformers builds."""
    groups = {
        pattern: list(by_pattern[pattern])
        for pattern in converter.source_patterns
        if pattern in by_pattern
    }
    for operation in converter.operations:
        if type(operation) is MergeModulelist:
            groups = {pattern: [stack(names, operation.dim)] for pattern, names in groups.items()}
        elif type(operation) is Concatenate:
            every = [name for names in groups.values() for name in names]
            groups = {converter.target_patterns[0]: [concat(every, operation.dim)]}
        else:
            raise ModelError(
                f"transformers builds {target!r} from the weights of this checkpoint with "
                f"{type(operation).__name__}, which is not supported; save the model again with "
                "transformers, in its current format: save_pretrained(..., "
                "save_original_format=False)"
            )
    results = [name for names in groups.values() for name in names]
    if len(results) != 1:
        raise ModelError(
            f"the checkpoint has {len(results)} weights for {target!r}: {results[:3]}; expected one"
        )
    return results[0]
