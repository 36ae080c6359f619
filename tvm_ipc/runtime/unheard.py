# SPDX-License-Identifier: Apache-2.0
"""Errors that no `sync`, `get` or `close` raised, since the program called none after them.

They are said on stderr when the session ends, be it at the end of the program or by the garbage
collector. A program that would end with exit code 0 all the same ends with 1, unless an exception
of its own came between: whoever started it must not take the work for done.
"""

from __future__ import annotations

from collections.abc import Iterable

import tvm_ffi

from tvm_ipc.errors import RankError, describe
from tvm_ipc.runtime import error_output

_fail_at_exit = tvm_ffi.get_global_func("tvm_ipc.session.fail_at_exit")


def say_errors(session: object, errors: Iterable[RankError], *, fail: bool) -> None:
    """Say what workers reported; not what only stopped because of it, or because of the end."""
    causes = sorted((e for e in errors if e.kind != "PeerError"), key=lambda e: e.rank)
    if causes:
        say(session, describe(causes), fail=fail)


def say(session: object, error: object, *, fail: bool = True) -> None:
    """Say what went wrong in a session that has ended; with `fail`, by the exit code too."""
    if fail:
        _fail_at_exit()
    error_output.say(
        f"tvm_ipc: {session!r} ended with an error that was not raised, for no sync, get or "
        f"close came after it:\n{error}\n"
    )
