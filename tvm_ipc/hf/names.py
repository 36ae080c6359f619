# SPDX-License-Identifier: Apache-2.0
"""What checkpoints call the weights of a model of transformers.

Models of transformers change and their checkpoints do not: experts that lie one by one in files are
one tensor of the model, names have other prefixes. What transformers would do with the tensors is
done with their names here, so that each rank reads its parts of the files as they are.

    names = checkpoint_names(model, stored)
    load_weights(session, folder, parallel.cut, names={name: names[name] for name in parallel.cut})
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
from tvm_ipc.weights import concat, stack
from tvm_ipc.weights.joined import Name


def checkpoint_names(model: Any, stored: Iterable[str]) -> dict[str, Name]:
    """Return what the weights of a model are called in a checkpoint, by their names in the model.

    Parameters
    ----------
    model : of transformers; its weights are not looked at.
    stored : the names in the checkpoint.

    Raises
    ------
    ModelError
        A weight is made of others in a way that is not known here.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    of_model = model.state_dict()
    found: dict[str, Name] = {}
    parts: dict[str, dict[str, list[Name]]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, of_model
        )
        if pattern is None:
            found[target] = name
        else:
            parts.setdefault(target, {}).setdefault(pattern, []).append(name)
    for target, by_pattern in parts.items():
        converter = next(one for one in converters if set(by_pattern) <= set(one.source_patterns))
        found[target] = _joined(target, by_pattern, converter)
    for tied, source in getattr(model, "all_tied_weights_keys", {}).items():
        if tied not in found and source in found:
            found[tied] = found[source]
        elif source not in found and tied in found:
            found[source] = found[tied]
    return found


def _joined(target: str, parts: Mapping[str, Sequence[Name]], converter: Any) -> Name:
    """Return what a converter of transformers would make, as a name."""
    found = {
        pattern: list(parts[pattern]) for pattern in converter.source_patterns if pattern in parts
    }
    for operation in converter.operations:
        if type(operation) is MergeModulelist:
            found = {pattern: [stack(names, operation.dim)] for pattern, names in found.items()}
        elif type(operation) is Concatenate:
            every = [name for names in found.values() for name in names]
            found = {converter.target_patterns[0]: [concat(every, operation.dim)]}
        else:
            raise ModelError(
                f"transformers makes {target!r} of the weights of this checkpoint by "
                f"{type(operation).__name__}, which is not known here; save the model once more "
                "with transformers, as it is in memory: save_pretrained(..., "
                "save_original_format=False)"
            )
    made = [name for names in found.values() for name in names]
    if len(made) != 1:
        raise ModelError(f"the checkpoint has {len(made)} weights for {target!r}: {made[:3]}")
    return made[0]
