# SPDX-License-Identifier: Apache-2.0
"""Whether what there is is what the program wants: all that is wrong is said at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

import ml_dtypes  # noqa: F401  makes bfloat16 and others known to NumPy
import numpy as np

from tvm_ipc.errors import WeightsError

if TYPE_CHECKING:
    from tvm_ipc.parallel import Cut

#: Types between which weights are converted.
FLOATS: Final = ("bfloat16", "float16", "float32", "float64")
#: How many of each kind are said.
_MOST: Final = 10


class Tensor(Protocol):
    """A tensor of a source."""

    @property
    def dtype(self) -> str:
        """Of its elements."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""


def check(
    source: str,
    cuts: Mapping[str, Cut],
    names: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    ignore: Sequence[str],
    strict: bool,
) -> None:
    """Raise WeightsError if tensors are missing, too many, or of another shape or type.

    Parameters
    ----------
    source : where tensors are from, for people.
    cuts : the parameters.
    names : of the tensor of each parameter.
    tensors : all that there are.
    ignore : patterns of names of tensors that no parameter need have.
    strict : whether others are too many.
    """
    used = set(names.values())
    missing = [name for name in cuts if names[name] not in tensors]
    left = [name for name in tensors if name not in used]
    wrong = [
        line
        for name, cut in cuts.items()
        if names[name] in tensors
        for line in _wrong(name, names[name], cut, tensors[names[name]])
    ]
    problems = _some(
        (_missing(names[name], name, cuts[name], tensors, left) for name in missing),
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
        return
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
    wanted: str, name: str, cut: Cut, tensors: Mapping[str, Tensor], left: Sequence[str]
) -> str:
    called = f"{wanted!r}" if wanted == name else f"{wanted!r}, for {name!r},"
    return f"{called} is missing; {_near(wanted, cut, tensors, left)}"


def _near(name: str, cut: Cut, tensors: Mapping[str, Tensor], left: Sequence[str]) -> str:
    """Return what may have been meant."""
    ends = [one for one in left if one.endswith(f".{name}") or name.endswith(f".{one}")]
    near = ends[:3] or get_close_matches(name, left, n=3)
    if near:
        return f"near it are {', '.join(map(repr, near))}"
    alike = [one for one, tensor in tensors.items() if tensor.shape == tuple(cut.shape)]
    if alike and len(alike) < 4:
        return f"of its shape are {', '.join(map(repr, alike))}"
    return "no name is near it"


def _wrong(name: str, stored: str, cut: Cut, tensor: Tensor) -> Iterator[str]:
    called = f"{name!r}" if stored == name else f"{stored!r}, for {name!r},"
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
