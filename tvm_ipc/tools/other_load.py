# SPDX-License-Identifier: Apache-2.0
"""Warn about the load of other programs, for all commands that measure times."""

from __future__ import annotations

from typing import Final

from tvm_ipc import host

#: Cores that other programs may keep busy without a warning.
_TOLERATED: Final = 0.3


def warning(others: host.OtherPrograms, used: int, remedy: str) -> str | None:
    """Return a sentence if other programs kept cores busy that a command used; None if not.

    Parameters
    ----------
    others : the load of other programs, measured since the command began.
    used : number of cores that the command used.
    remedy : what to do about it.
    """
    cores, busy = host.available_cores(), others.cores()
    if busy <= max(0, cores - used) + _TOLERATED:
        return None
    return (
        f"Other programs kept {busy:.1f} of {cores} cores busy meanwhile, so the times are not "
        f"reliable; {remedy}."
    )
