# SPDX-License-Identifier: Apache-2.0
"""Print on stderr: log lines, and the errors of sessions that ended before anything raised them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable

from tvm_ipc.errors import RankError, describe


def print_err(text: str) -> None:
    """Write a text to the current `sys.stderr`; ignore a stream that is closed or full.

    The text bypasses Python's buffer where possible. A child that was forked while another thread
    held the buffer's lock would wait for that lock indefinitely. Text that a closed stream did not
    accept would stay in the buffer and make Python exit with code 120.
    """
    output = sys.stderr
    with contextlib.suppress(Exception):
        if output is None:
            return
        replaced_by_program = output is not sys.__stderr__
        if replaced_by_program:
            output.write(text)
            output.flush()
            return
        # One write, so that lines of several processes do not mix.
        remaining = text.encode(output.encoding, "backslashreplace")
        while remaining:
            remaining = remaining[os.write(output.fileno(), remaining) :]


def report_unraised_errors(session: object, errors: Iterable[RankError], *, fail: bool) -> None:
    """Print the errors that workers reported and that no `sync`, `get` or `close` raised.

    Errors that are only the consequence of another rank's error, or of the session's end, are left
    out. A session calls this when it ends, at the end of the program or in the garbage collector.

    Parameters
    ----------
    session : the session that has ended.
    errors : the reports of its workers.
    fail : exit with code 1 where the program would exit with 0. The process that started the
        program must not take the work for done.
    """
    causes = sorted((e for e in errors if e.kind != "PeerError"), key=lambda e: e.rank)
    if causes:
        report_unraised_error(session, describe(causes), fail=fail)


def report_unraised_error(session: object, error: object, *, fail: bool = True) -> None:
    """Print one error of a session that has ended; `fail` as in `report_unraised_errors`."""
    import tvm_ffi  # log lines are printed before it may be imported

    if fail:
        tvm_ffi.get_global_func("tvm_ipc.session.fail_at_exit")()
    print_err(
        f"tvm_ipc: {session!r} ended with an error that was not raised, because no sync, get "
        f"or close came after it:\n{error}\n"
    )
