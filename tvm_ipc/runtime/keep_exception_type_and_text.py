# SPDX-License-Identifier: Apache-2.0
"""Keep the type and the text of exceptions that Python functions raise in workers.

The FFI passes an exception on as a type name and a text. It supports eight types, and turns all
others into RuntimeError: `sys.exit(5)` would be "RuntimeError: 5". Its text is `str(error)`, which
leaves out notes and the members of an exception group; it crashes if `str(error)` raises. Functions
that are registered after `install` raise errors with the original type name and the full text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from tvm_ffi import core

from tvm_ipc.tvm_private_names import REGISTER_GLOBAL_FUNC, has_ffi_error, set_ffi_error

_register = REGISTER_GLOBAL_FUNC.get()


def install() -> None:
    """Wrap every Python function that is registered with the FFI from now on."""
    REGISTER_GLOBAL_FUNC.set(_register_wrapped)


def _register_wrapped(name: str, function: Any, override: bool) -> Any:
    if not isinstance(function, core.Function):
        function = _keep_error_text(function)
    return _register(name, function, override)


def _keep_error_text(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            if _survives_ffi(error):
                raise
            kind, text = type(error).__name__, "\n".join(_lines(error))
            replacement = RuntimeError(text).with_traceback(error.__traceback__)
            set_ffi_error(replacement, kind, text)
            raise replacement from None

    return wrapped


def _survives_ffi(error: BaseException) -> bool:
    """Return whether the FFI passes on the type and the whole text of an exception."""
    if has_ffi_error(error):
        return True
    supported = type(error) in core.ERROR_TYPE_TO_NAME and not hasattr(error, "__notes__")
    try:
        return supported and bool(str(error).encode() or True)
    except Exception:
        return False


def _lines(error: BaseException, indent: str = "") -> Iterator[str]:
    """Yield the text of an exception, its notes, and the members of an exception group."""
    try:
        text = str(error)
    except Exception as problem:
        text = f"(its text raises {type(problem).__name__})"
    text = text.encode(errors="backslashreplace").decode()
    yield text.replace("\n", f"\n{indent}")
    for note in getattr(error, "__notes__", ()):
        yield f"{indent}{note}".encode(errors="backslashreplace").decode()
    for inner in getattr(error, "exceptions", ()):  # of an exception group, since Python 3.11
        if isinstance(inner, BaseException):
            first, *more = _lines(inner, f"{indent}    ")
            yield f"{indent}  - {type(inner).__name__}: {first}"
            yield from more
