# SPDX-License-Identifier: Apache-2.0
"""Temporary folders that a killed process leaves to nobody.

A folder is locked by the process whose it is, and the system unlocks it when that process ends,
however it does. So whoever can lock a folder may remove it: its owner is gone. One that is not
locked yet may be removed too; its maker notices, and makes another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from tvm_ipc.runtime.uninterrupted import uninterrupted

_PREFIX: Final = "tvm_ipc_session-"


class Folder:
    """A folder that is made when it is first asked for."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lock = -1

    def path(self) -> Path:
        """Return where it is."""
        if self._path is None:
            uninterrupted(self._make)
        assert self._path is not None
        return self._path

    def _make(self) -> None:
        while self._path is None:
            path = tempfile.mkdtemp(prefix=_PREFIX)
            lock = _lock(path)
            if lock is None:
                continue  # removed, or about to be
            self._lock, self._path = lock, Path(path)

    def remove(self) -> None:
        """Remove it with all that is in it."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self.disown()

    def disown(self) -> None:
        """Leave it to the process that this one was forked from."""
        if self._path is not None:
            self._path = None
            os.close(self._lock)


def remove_orphans() -> None:
    """Remove the folders of processes of this user that are no more."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX):
                continue
            lock = _lock(entry.path)
            if lock is not None:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _lock(path: str) -> int | None:
    """Return a descriptor that locks a folder of this user; None if it is another's, or gone."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(folder)
        if found.st_uid == os.geteuid() and os.path.samestat(found, os.lstat(path)):
            return folder
    except OSError:
        pass
    os.close(folder)
    return None
