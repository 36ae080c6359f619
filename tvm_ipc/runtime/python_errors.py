# SPDX-License-Identifier: Apache-2.0
"""What a Python function raises in a worker keeps its name and its words.

The FFI passes an exception on as a kind and a text. It knows eight kinds, and calls all others a
RuntimeError: `sys.exit(5)` would be "RuntimeError: 5". It takes `str(error)` for the text, which
leaves out what is inside an exception group, and notes; and it crashes where there is no such text.
So the functions that are registered from now on pass these exceptions on in words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tvm_ffi import core

_register = core._register_global_func


def install() -> None:
    """Do it for every function that is registered from now on."""
    core._register_global_func = _register_speaking  # type: ignore[assignment]


def _register_speaking(name: str, function: Any, override: bool) -> Any:
    if not isinstance(function, core.Function):
        function = _speaking(function)
    return _register(name, function, override)


def _speaking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def speaking(*args: Any) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            if _arrives_as_it_is(error):
                raise
            kind, said = type(error).__name__, "\n".join(_lines(error))
            words = RuntimeError(said).with_traceback(error.__traceback__)
            words.__tvm_ffi_error__ = core.Error(kind, said, "")  # type: ignore[attr-defined]
            raise words from None

    return speaking


def _arrives_as_it_is(error: BaseException) -> bool:
    """Whether the FFI knows the kind, and the text is all there is to say."""
    if hasattr(error, "__tvm_ffi_error__"):
        return True
    known = type(error) in core.ERROR_TYPE_TO_NAME and not hasattr(error, "__notes__")
    try:
        return known and bool(str(error).encode() or True)
    except Exception:
        return False


def _lines(error: BaseException, indent: str = "") -> Iterator[str]:
    """Yield the text of an exception, its notes, and what it is a group of."""
    try:
        said = str(error)
    except Exception as problem:
        said = f"(its text raises {type(problem).__name__})"
    said = said.encode(errors="backslashreplace").decode()
    yield said.replace("\n", f"\n{indent}")
    for note in getattr(error, "__notes__", ()):
        yield f"{indent}{note}".encode(errors="backslashreplace").decode()
    for inner in getattr(error, "exceptions", ()):  # of an exception group, since Python 3.11
        if isinstance(inner, BaseException):
            first, *more = _lines(inner, f"{indent}    ")
            yield f"{indent}  - {type(inner).__name__}: {first}"
            yield from more
