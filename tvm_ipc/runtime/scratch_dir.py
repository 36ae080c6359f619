# SPDX-License-Identifier: Apache-2.0
"""Temporary folders that are removed even if the process that owns them is killed.

The process that owns a folder locks it, and the system unlocks it when that process ends, however
it ends. A folder that can be locked has therefore lost its owner, and may be removed. A new folder
that is not locked yet may be removed too; the process that created it notices, and creates another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime.defer_sigint import defer_sigint

#: The beginning of the names of all folders.
PREFIX: Final = "tvm_ipc_session-"
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: How often a folder is created again because another process has removed it.
_ATTEMPTS: Final = 100
#: The errors of a new folder that another process has removed.
_REMOVED: Final = (errno.ENOENT, errno.EWOULDBLOCK)
#: Seconds for one search for folders without owners, and the number of entries between two checks
#: of the clock.
_SEARCH_SECONDS: Final = 0.01
_BATCH: Final = 64


class ScratchDir:
    """A temporary folder that is created on first use.

    Parameters
    ----------
    parent : the folder that it is created in; by default the system's for temporary files.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._path: Path | None = None
        self._lock = -1

    def path(self) -> Path:
        """Return the path of the folder, which is created if necessary.

        Raises
        ------
        IPCError
            This process cannot lock the folder that it has created.
        """
        if self._path is None:
            defer_sigint(self._create)
        assert self._path is not None
        return self._path

    def _create(self) -> None:
        for _ in range(_ATTEMPTS):
            path = tempfile.mkdtemp(prefix=PREFIX, dir=self._parent)
            try:
                self._lock, self._path = _lock(path), Path(path)
                return
            except OSError as error:
                with contextlib.suppress(OSError):
                    Path(path).rmdir()
                reason = error.strerror
                if error.errno not in _REMOVED:
                    break
        raise IPCError(
            f"temporary folder: {path} was made and cannot be locked: {reason}; the umask must "
            "leave its owner access, as 077 does, and the file system must have locks: change the "
            "umask, or set TMPDIR to a folder on another file system"
        )

    def remove(self) -> None:
        """Remove the folder with its contents."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self.disown()

    def disown(self) -> None:
        """Leave the folder to the process that this one was forked from."""
        if self._path is not None:
            self._path = None
            os.close(self._lock)


def remove_orphans(parent: Path | None = None) -> None:
    """Remove folders of this user whose processes have ended, as many as the time allows.

    Later calls remove the rest. If the parent folder has more entries than can be listed in half of
    the time, the search covers those that the system lists first.

    Parameters
    ----------
    parent : the folder to search; by default the system's for temporary files.
    """
    deadline = time.monotonic() + _SEARCH_SECONDS
    paths: list[str] = []
    with contextlib.suppress(OSError), os.scandir(parent or tempfile.gettempdir()) as entries:
        while batch := list(itertools.islice(entries, _BATCH)):
            paths += [entry.path for entry in batch if entry.name.startswith(PREFIX)]
            if time.monotonic() > deadline - _SEARCH_SECONDS / 2:
                break
    random.shuffle(paths)  # otherwise folders in use could always come first
    for path in paths:
        with contextlib.suppress(OSError):
            _remove_orphan(path, deadline)
        if time.monotonic() > deadline:
            return


def _remove_orphan(path: str, deadline: float) -> None:
    """Remove a folder that can be locked, or as much of its contents as the time allows."""
    lock = _lock(path)
    try:
        if _empty(lock, deadline):
            Path(path).rmdir()
    finally:
        os.close(lock)


def _empty(folder: int, deadline: float) -> bool:
    """Remove the contents of an open folder; return whether the time was enough."""
    while True:
        with os.scandir(folder) as entries:
            batch = list(itertools.islice(entries, _BATCH))
        for entry in batch:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
                continue
            inner = os.open(entry.name, _FOLDER_FLAGS, dir_fd=folder)
            try:
                if not _empty(inner, deadline):
                    return False
            finally:
                os.close(inner)
            os.rmdir(entry.name, dir_fd=folder)
        if len(batch) < _BATCH:
            return True
        if time.monotonic() > deadline:
            return False


def _lock(path: str) -> int:
    """Return a descriptor that locks a folder of this user.

    Raises
    ------
    OSError
        The folder is locked, gone, or another user's, or the system refuses to open or lock it.
    """
    folder = os.open(path, _FOLDER_FLAGS)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user owns it", path)
        if not os.path.samestat(status, os.lstat(path)):
            raise FileNotFoundError(errno.ENOENT, "it was replaced", path)
    except BaseException:
        os.close(folder)
        raise
    return folder
