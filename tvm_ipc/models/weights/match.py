# SPDX-License-Identifier: Apache-2.0
"""Compare the names, shapes and types of a source with those of a program's parameters.

All problems are reported in one error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes  # noqa: F401  registers bfloat16 and others with NumPy
import numpy as np

from tvm_ipc import arguments
from tvm_ipc.errors import WeightsError
from tvm_ipc.models.weights.in_memory_weight_sources import HostTensor
from tvm_ipc.models.weights.stack_or_concat_source_tensors import (
    Name,
    SourceTensor,
    leaf_names,
    resolve,
)
from tvm_ipc.models.weights.tensor_in_file import FileTensor

if TYPE_CHECKING:
    from tvm_ipc.spmd import ShardSpec

#: Weights are converted between these types.
_FLOATS: Final = ("bfloat16", "float16", "float32", "float64")
#: The most problems of each kind that the error lists.
_MAX_LISTED: Final = 10


def match_weights(
    source: str,
    shards: Mapping[str, ShardSpec],
    names: Mapping[str, Name],
    tensors: Mapping[str, FileTensor | HostTensor],
    ignore: Sequence[str],
    strict: bool,
) -> dict[str, SourceTensor]:
    """Return the tensor of the source for each parameter.

    Parameters
    ----------
    source : the name of the source, for error messages.
    shards : the parameters.
    names : the name in the source of each parameter.
    tensors : all tensors of the source.
    ignore : patterns of names of tensors that need not be the weight of a parameter.
    strict : whether other tensors that are not the weight of a parameter are an error.

    Raises
    ------
    WeightsError
        Tensors are missing or superfluous, or have another shape or type.
    """
    used = {leaf for name in names.values() for leaf in leaf_names(name)}
    unused = [name for name in tensors if name not in used]
    missing = [
        (leaf, parameter)
        for parameter in shards
        for leaf in leaf_names(names[parameter])
        if leaf not in tensors
    ]
    incomplete = {parameter for _, parameter in missing}
    matched: dict[str, SourceTensor] = {}
    mismatches: list[str] = []
    for parameter, spec in shards.items():
        if parameter in incomplete:
            continue
        name = names[parameter]
        subject = repr(parameter)
        if name != parameter:
            subject = f"{_format_name(name)}, for {parameter!r},"
        try:
            matched[parameter] = resolve(name, tensors)
        except ValueError as error:
            mismatches.append(f"{subject} cannot be fused: {error}")
        else:
            mismatches += _mismatches(subject, spec, matched[parameter])
    problems = _first_problems(
        (
            _describe_missing(leaf, parameter, names[parameter], shards[parameter], tensors, unused)
            for leaf, parameter in missing
        ),
        len(missing),
        "are missing",
    )
    superfluous = [
        name for name in unused if not any(fnmatchcase(name, pattern) for pattern in ignore)
    ]
    if strict:
        problems += _first_problems(
            (f"{name!r} is not the weight of any parameter" for name in superfluous),
            len(superfluous),
            "are not the weight of any parameter",
        )
    problems += _first_problems(iter(mismatches), len(mismatches), "differ in shape or type")
    if not problems:
        return matched
    if missing:
        problems.append(
            "pass names={...} with the name in the source of each parameter whose name differs, or "
            "that shares a weight; if inputs are among the missing, set the function's num_input"
        )
    if strict and superfluous:
        problems.append("pass ignore=[...] with patterns of names that the program does not need")
    raise WeightsError(
        "\n  ".join([f"load_weights: {source} does not match the program:", *problems])
    )


def _first_problems(lines: Iterator[str], count: int, summary: str) -> list[str]:
    """Return the first lines, and one that counts the rest."""
    first = list(islice(lines, _MAX_LISTED))
    return [*first, f"and {count - _MAX_LISTED} more {summary}"] if count > _MAX_LISTED else first


def _describe_missing(
    leaf: str,
    parameter: str,
    name: Name,
    spec: ShardSpec,
    tensors: Mapping[str, FileTensor | HostTensor],
    unused: Sequence[str],
) -> str:
    subject = repr(parameter) if name == parameter else f"{leaf!r}, for {parameter!r},"
    return f"{subject} is missing; {_suggest(leaf, spec, tensors, unused)}"


def _format_name(name: Name) -> str:
    leaves = list(leaf_names(name))
    return repr(leaves[0]) if len(leaves) == 1 else f"{leaves[0]!r} and {len(leaves) - 1} more"


def _suggest(
    name: str,
    spec: ShardSpec,
    tensors: Mapping[str, FileTensor | HostTensor],
    unused: Sequence[str],
) -> str:
    """Return a phrase with the tensors that may have been meant."""
    same_end = [n for n in unused if n.endswith(f".{name}") or name.endswith(f".{n}")]
    near = same_end[:3] or get_close_matches(name, unused, n=3)
    if near:
        return arguments.similar(near)
    same_shape = [n for n, tensor in tensors.items() if tensor.shape == tuple(spec.shape)]
    if same_shape and len(same_shape) < 4:
        quoted = ", ".join(map(repr, same_shape))
        one = len(same_shape) == 1
        return f"a tensor of its shape is {quoted}" if one else f"tensors of its shape are {quoted}"
    return "no name is similar"


def _mismatches(subject: str, spec: ShardSpec, tensor: SourceTensor) -> Iterator[str]:
    """Yield a sentence if the shape differs, and one if the type cannot be converted."""
    expected = tuple(spec.shape)
    if len(expected) != len(tensor.shape) or any(
        isinstance(extent, int) and extent != actual
        for extent, actual in zip(expected, tensor.shape, strict=True)
    ):
        is_transposed = len(expected) == 2 and expected == tensor.shape[::-1]
        hint = ", its transpose" if is_transposed else ""
        shape = _format_shape(tensor.shape)
        yield f"{subject} has shape {shape}; the program expects {_format_shape(expected)}{hint}"
    if not _is_convertible(tensor.dtype, spec.dtype):
        yield (
            f"{subject} has type {tensor.dtype}; the program expects {spec.dtype}, and the "
            "conversion would change values"
        )


def _is_convertible(source: str, target: str) -> bool:
    """Return whether weights are converted: between floats, and losslessly between integers."""
    if source == target or (source in _FLOATS and target in _FLOATS):
        return True
    try:
        dtypes = np.dtype(source), np.dtype(target)
    except TypeError:
        return False
    integers = all(dtype.kind in "iu" for dtype in dtypes)
    return bool(integers and np.can_cast(*dtypes, casting="safe"))


def _format_shape(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))})"
