# SPDX-License-Identifier: Apache-2.0
"""Whether what there is is what the program wants: all that is wrong is said at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes  # noqa: F401  makes bfloat16 and others known to NumPy
import numpy as np

from tvm_ipc.errors import WeightsError
from tvm_ipc.weights.held import Held
from tvm_ipc.weights.joined import Name, Whole, leaves, whole_of
from tvm_ipc.weights.stored import Stored

if TYPE_CHECKING:
    from tvm_ipc.parallel import Cut

#: Types between which weights are converted.
FLOATS: Final = ("bfloat16", "float16", "float32", "float64")
#: How many of each kind are said.
_MOST: Final = 10


def matched(
    source: str,
    cuts: Mapping[str, Cut],
    names: Mapping[str, Name],
    tensors: Mapping[str, Stored | Held],
    ignore: Sequence[str],
    strict: bool,
) -> dict[str, Whole]:
    """Return what a source has for each parameter.

    Parameters
    ----------
    source : where tensors are from, for people.
    cuts : the parameters.
    names : of the weight of each parameter.
    tensors : all that there are.
    ignore : patterns of names of tensors that no parameter need have.
    strict : whether others are too many.

    Raises
    ------
    WeightsError
        Tensors are missing, too many, or of another shape or type.
    """
    used = {one for name in names.values() for one in leaves(name)}
    left = [name for name in tensors if name not in used]
    missing = [(one, name) for name in cuts for one in leaves(names[name]) if one not in tensors]
    without = {name for _, name in missing}
    wholes: dict[str, Whole] = {}
    wrong: list[str] = []
    for name, cut in cuts.items():
        if name in without:
            continue
        called = names[name]
        shown = repr(name) if called == name else f"{_shown(called)}, for {name!r},"
        try:
            wholes[name] = whole_of(called, tensors)
        except ValueError as error:
            wrong.append(f"{shown} cannot be joined: {error}")
        else:
            wrong += _wrong(shown, cut, wholes[name])
    problems = _some(
        (_missing(one, name, names[name], cuts[name], tensors, left) for one, name in missing),
        len(missing),
        "are missing",
    )
    many = [name for name in left if not any(fnmatchcase(name, one) for one in ignore)]
    if strict:
        problems += _some(
            (f"{name!r} is the weight of no parameter" for name in many),
            len(many),
            "are the weights of no parameter",
        )
    problems += _some(iter(wrong), len(wrong), "differ in shape or type")
    if not problems:
        return wholes
    if missing:
        problems.append(
            "names={...} says what the weight of a parameter is called there, and parameters that "
            "share a weight; of inputs that are no weights the function says num_input"
        )
    if strict and many:
        problems.append("ignore=[...] has patterns of names that are not wanted")
    raise WeightsError(
        "\n  ".join([f"load_weights: {source} is not what the program wants:", *problems])
    )


def _some(lines: Iterator[str], count: int, what: str) -> list[str]:
    found = list(islice(lines, _MOST))
    return [*found, f"and {count - _MOST} more {what}"] if count > _MOST else found


def _missing(
    wanted: str,
    name: str,
    called: Name,
    cut: Cut,
    tensors: Mapping[str, Stored | Held],
    left: Sequence[str],
) -> str:
    shown = repr(name) if called == name else f"{wanted!r}, for {name!r},"
    return f"{shown} is missing; {_near(wanted, cut, tensors, left)}"


def _shown(name: Name) -> str:
    found = list(leaves(name))
    return repr(found[0]) if len(found) == 1 else f"{found[0]!r} and {len(found) - 1} more"


def _near(name: str, cut: Cut, tensors: Mapping[str, Stored | Held], left: Sequence[str]) -> str:
    """Return what may have been meant."""
    ends = [one for one in left if one.endswith(f".{name}") or name.endswith(f".{one}")]
    near = ends[:3] or get_close_matches(name, left, n=3)
    if near:
        return f"near it are {', '.join(map(repr, near))}"
    alike = [one for one, tensor in tensors.items() if tensor.shape == tuple(cut.shape)]
    if alike and len(alike) < 4:
        return f"of its shape are {', '.join(map(repr, alike))}"
    return "no name is near it"


def _wrong(called: str, cut: Cut, tensor: Whole) -> Iterator[str]:
    wanted = tuple(cut.shape)
    if len(wanted) != len(tensor.shape) or any(
        isinstance(extent, int) and extent != found
        for extent, found in zip(wanted, tensor.shape, strict=True)
    ):
        turned = len(wanted) == 2 and wanted == tensor.shape[::-1]
        hint = ", which is it transposed" if turned else ""
        found = _text(tensor.shape)
        yield f"{called} is {found} there, and the program wants {_text(wanted)}{hint}"
    if not converts(tensor.dtype, cut.dtype):
        yield (
            f"{called} is {tensor.dtype} there, and the program wants {cut.dtype}, which would not "
            "be the same numbers"
        )


def converts(found: str, wanted: str) -> bool:
    """Whether a type is converted to another: floats, and integers without any loss."""
    if found == wanted or (found in FLOATS and wanted in FLOATS):
        return True
    try:
        kinds = np.dtype(found), np.dtype(wanted)
    except TypeError:
        return False
    integers = all(kind.kind in "iu" for kind in kinds)
    return bool(integers and np.can_cast(*kinds, casting="safe"))


def _text(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))})"
