# SPDX-License-Identifier: Apache-2.0
"""Generate the operator functions and session methods of collectives from their entries.

They are defined when a program starts, as `dataclasses` defines methods. Type checkers, editors and
the site run no code. They read the same signatures and docstrings in a stub, which is not in the
repository. The build writes it, and so does this command:

    python -m tvm_ipc.packed_functions.generate_collective_functions [FILE]

By default FILE is `generated_collective_functions.pyi` beside this module. The build runs the
command without site-packages, so this module and what it imports need only the standard library.
"""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tvm_ipc.packed_functions.collective_declarations import KINDS
from tvm_ipc.packed_functions.collective_kind import Kind

#: The declarations of a function's parameters, each with its text in the docstring.
_Parameters = list[tuple[str, str]]

STUB: Final = Path(__file__).with_name("generated_collective_functions.pyi")
_HEAD: Final = '''\
# SPDX-License-Identifier: Apache-2.0
"""The functions of collectives, written by `generate_collective_functions`."""

from collections.abc import Sequence
from typing import Any

from tvm import relax

from tvm_ipc.runtime.references import DRef
from tvm_ipc.runtime.team import Team

'''
_CLASS_DOC: Final = "The collectives of a session, among the values that its workers hold."
_REDUCTIONS: Final = (
    '"sum", "prod", "min", "max", "avg", "tree_sum", or of integers "band", "bor" or "bxor", the '
    'bitwise and, or and exclusive or. "tree_sum" adds as a balanced binary tree over the ranks.'
)


def _operator_parameters(kind: Kind) -> _Parameters:
    on_axes = kind.splits or kind.concatenates
    on_two_axes = kind.splits and kind.concatenates
    whose = "the tensor; only the root's is read." if kind.source_on_root else ""
    candidates = (
        (True, "x: relax.Expr", whose or "the tensor of this rank."),
        (kind.reduces, 'reduction: str = "sum"', _REDUCTIONS),
        (
            kind.rooted,
            "root: Any = 0",
            "the index of the root in its team, a number or a symbolic integer.",
        ),
        (on_two_axes, "split_axis: int = 0", "the axis that is split among the ranks."),
        (
            on_two_axes,
            "concat_axis: int = 0",
            "the axis along which the shards of all ranks are concatenated.",
        ),
        (
            "pairs" in kind.pairs,
            "pairs: Sequence[Sequence[int]]",
            "pairs of a sender and a receiver, by their indices in the team.",
        ),
        (
            kind.has_symbolic_pair,
            "source: Any",
            "the index of the sender in its team, a number or a symbolic integer.",
        ),
        (
            kind.has_symbolic_pair,
            "target: Any",
            "the index of the receiver in its team, a number or a symbolic integer. If it is the "
            "sender, the sender gets its own tensor.",
        ),
        (True, "*", ""),
        (
            on_axes and not on_two_axes,
            "axis: int = 0",
            "the axis of `x` that is split."
            if kind.splits
            else "the axis along which tensors are concatenated.",
        ),
        (
            True,
            'team: Any = "world"',
            '"world", "group", a team of ranks, or several teams of equal size, as `Mesh.teams` '
            "returns them. A rank that is in no team takes no part, and gets zeros.",
        ),
        (
            kind.rooted,
            "root_rank: int | None = None",
            "the rank of the root, instead of its index, for one team; it need not be in the team. "
            "A root outside contributes nothing to a gather or reduction, and gets zeros from a "
            "scatter.",
        ),
        (
            kind.reduces,
            "scale: float | None = None",
            "a factor of every tensor: the result is the sum of `scale * x`, as NCCL's "
            "pre-multiplied sum. Only for sums; None for no factor.",
        ),
        (
            on_axes or kind.paired,
            "workers: int | None = None",
            'the number of ranks in a team; required for "world" and "group".',
        ),
        (
            kind.splits and not kind.concatenates,
            "uneven: bool = False",
            "True allows an extent of `axis` that is not a multiple of the number of ranks. All "
            "shards then have the same extent, rounded up, and what lies beyond the end of `axis` "
            "is 0.",
        ),
        (
            kind.concatenates,
            "extent: Any = None",
            "the extent of the result along the concatenated axis, if shards are uneven; rows "
            "beyond it are dropped."
            + " Shards along `split_axis` may then be uneven too."
            * on_two_axes,
        ),
        (
            True,
            'backend: str = "auto"',
            'the backend that runs the collective; "auto" is the backend of the session.',
        ),
    )
    return [(declaration, text) for has, declaration, text in candidates if has]


def operator_source(kind: Kind, body: str = "") -> str:
    """Return the definition of the operator function of a kind."""
    if kind.splits:
        result = "the concatenated shards" if kind.concatenates else "a shard"
    else:
        result = "the concatenation" if kind.concatenates else "`x`"
    everywhere = " on every rank" * kind.result_on_root
    parameters = _operator_parameters(kind)
    doc = [
        f"Return {kind.result}.",
        "On other ranks the result is undefined." if kind.result_on_root else kind.details,
        _documented(parameters),
        _section("Returns", f"relax.Call\n    The call, with the type of {result}{everywhere}."),
        _section(
            "Examples",
            ">>> import tvm",
            ">>> main = tvm.script.from_source('''",
            "... @R.function",
            '... def main(x: R.Tensor((4, 8), "float32")):',
            f"...     return R.comm.{kind.example}",
            "... ''')",
            ">>> main.ret_ty",
            f'R.Tensor(({kind.example_extents}), dtype="float32")',
        ),
    ]
    return _definition(kind.name, parameters, "relax.Call", doc, body)


def _method_parameters(kind: Kind) -> _Parameters:
    source, target = kind.method_operands
    candidates = (
        (True, "self", ""),
        (True, f"{source}: DRef", ""),
        # Without the target, only the root could tell its shape.
        (True, f"{target}: DRef" if kind.source_on_root else f"{target}: DRef | None = None", ""),
        (kind.reduces, 'op: str = "sum"', _REDUCTIONS),
        (
            kind.rooted and not kind.disco,
            "root: int = 0",
            "the index, in its group or team, of the worker that gets the result.",
        ),
        (True, "in_group: bool = True", ""),
        (
            bool(kind.packed_parameters),
            "parts: Sequence[Sequence[int]] | None = None",
            "`parts[i][j]` is the number of elements that worker i sends to worker j, by their "
            "indices in the group or team; None if all parts are equal.",
        ),
        (True, "*", ""),
        (True, "team: Team | None = None", ""),
    )
    return [(declaration, text) for has, declaration, text in candidates if has]


def method_source(kind: Kind, body: str = "") -> str:
    """Return the definition of the session method of a kind that has one."""
    parameters = _method_parameters(kind)
    doc = [*inspect.cleandoc(kind.method_doc).split("\n\n"), _documented(parameters)]
    result = "None" if kind.source_on_root else "DRef"
    return _definition(kind.method, parameters, result, doc, body)


def _documented(parameters: _Parameters) -> str:
    """Return the section of a docstring with the parameters that have a text."""
    items = [
        textwrap.fill(f"{_name(declaration)} : {text}", 92, subsequent_indent="    ")
        for declaration, text in parameters
        if text
    ]
    return _section("Parameters", *items) if items else ""


def _section(title: str, *lines: str) -> str:
    return "\n".join((title, "-" * len(title), *lines))


def _name(declaration: str) -> str:
    return declaration.partition(":")[0]


def _definition(
    name: str, parameters: _Parameters, result: str, doc: Sequence[str], body: str
) -> str:
    """Return the definition of a function; of its docstring only plain paragraphs are wrapped."""
    texts = [text if "\n---" in text else textwrap.fill(text, 92) for text in doc if text]
    end = "\n" if len(texts) > 1 else ""
    docstring = '"""' + "\n\n".join(texts) + end + '"""'
    return "\n".join(
        (
            f"def {name}(",
            *(f"    {declaration}," for declaration, _ in parameters),
            f") -> {result}:",
            textwrap.indent(docstring, "    "),
            *([f"    {body}"] if body else []),
            "",
        )
    )


def define_operators(namespace: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    """Define the operator functions in a namespace that has the names in their annotations.

    They call `construct` of the namespace with their name and arguments.
    """
    for kind in KINDS.values():
        exec(operator_source(kind, f'return construct("{kind.name}", **locals())'), namespace)
    return {name: namespace[name] for name in KINDS}


def define_session_methods(namespace: dict[str, Any]) -> type:
    """Define the base class of sessions, with methods in a namespace with their annotations' names.

    They call `scope` and `run` of the session's `_collectives`.
    """
    methods: dict[str, Any] = {"__doc__": _CLASS_DOC, "__slots__": ()}
    for kind in KINDS.values():
        if not kind.method_doc:
            continue
        names = [_name(declaration) for declaration, _ in _method_parameters(kind)]
        options = "".join(f", {name}={name}" for name in ("op", "root", "parts") if name in names)
        scope = f'self._collectives.scope("{kind.method}", in_group, team)'
        operands = ", ".join(kind.method_operands)
        call = f'self._collectives.run("{kind.name}", {scope}, {operands}{options})'
        exec(method_source(kind, call if kind.source_on_root else f"return {call}"), namespace)
        methods[kind.method] = namespace[kind.method]
    return type("SessionCollectives", (), methods)


def stub() -> str:
    """Return the text of the stub."""
    operators = "\n".join(map(operator_source, KINDS.values()))
    methods = "\n".join(
        textwrap.indent(method_source(kind), "    ") for kind in KINDS.values() if kind.method_doc
    )
    names = "".join(f'    "{name}",\n' for name in sorted(KINDS))
    head = f'class SessionCollectives:\n    """{_CLASS_DOC}"""\n'
    return f"{_HEAD}__all__ = [\n{names}]\n\n{operators}\n{head}\n{methods}"


def write_stub(path: Path = STUB) -> None:
    """Write the stub; a process that reads the file meanwhile sees the old or the new one."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(stub())
    temporary.replace(path)


if __name__ == "__main__":
    write_stub(*map(Path, sys.argv[1:2]))
