# SPDX-License-Identifier: Apache-2.0
"""Test whether a node shares memory with the controller, with a file of random bytes in /dev/shm.

Host names and boot ids are not proof, because containers may have those of other machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvm_ipc.errors import IPCError

if TYPE_CHECKING:
    from typing_extensions import Self

FOLDER: Final = Path("/dev/shm")
_PREFIX: Final = "tvm_ipc-proof-"
#: Seconds that one start spends on removing orphans. A later start removes the rest.
_ORPHAN_SECONDS: Final = 0.05


def digest(path: Path) -> str | None:
    """Return the digest of a short file; None if it cannot be read."""
    try:
        with _open_regular(path) as file:
            return hashlib.sha256(os.read(file, 4096)).hexdigest()
    except OSError:
        return None


class ShmProbe:
    """A context manager for a file of random bytes in the shared memory of this machine.

    The file is locked as long as its process lives. Each new probe removes the unlocked files of
    processes that were killed.
    """

    def __enter__(self) -> Self:
        """Create the file with random content that nodes look for."""
        _remove_orphans()
        data = secrets.token_bytes(32)
        self.path = FOLDER / f"{_PREFIX}{secrets.token_hex(8)}"
        self.digest = hashlib.sha256(data).hexdigest()
        try:
            self._file = _create_locked(self.path, data)
        except OSError as error:
            raise IPCError(f"no file can be created in {FOLDER}: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def _create_locked(path: Path, data: bytes) -> int:
    """Create a file, and return the descriptor that locks it."""
    file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, data)
        # The file gets its name when it is complete and locked. os.link follows the symbolic link
        # in /proc only if src_dir_fd is passed, although the path is absolute.
        folder = os.open(FOLDER, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.link(f"/proc/self/fd/{file}", path, src_dir_fd=folder)
        finally:
            os.close(folder)
    except BaseException:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def _open_regular(path: Path | str) -> Iterator[int]:
    """Open a regular file for reading; raise OSError for other files.

    All users may create files in the folder. Opening a FIFO would wait for a writer, and a symbolic
    link may lead to any file.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is not a regular file")
        yield file
    finally:
        os.close(file)


def _remove_orphans() -> None:
    """Remove this user's files that no process has locked."""
    end = time.monotonic() + _ORPHAN_SECONDS
    with contextlib.suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            if time.monotonic() > end:  # other users may have created any number of files
                return
            if entry.name.startswith(_PREFIX):
                _remove_orphan(entry)


def _remove_orphan(entry: os.DirEntry[str]) -> None:
    with contextlib.suppress(OSError):  # the file is in use, or gone
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return
        with _open_regular(entry.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(status, os.fstat(file)):
                Path(entry.path).unlink()
