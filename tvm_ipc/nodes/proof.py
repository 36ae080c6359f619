# SPDX-License-Identifier: Apache-2.0
"""Who has the same shared memory as the controller: who can read bytes that it puts there.

Names do not tell: containers have the host name, or the number of the boot, of others.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvm_ipc.errors import IPCError

if TYPE_CHECKING:
    from typing_extensions import Self

FOLDER: Final = Path("/dev/shm")
_PREFIX: Final = "tvm_ipc-proof-"


def digest(path: Path) -> str | None:
    """Return the digest of a short file; None where there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.sha256(file.read(4096)).hexdigest()
    except OSError:
        return None


class Proof:
    """A file of random bytes in the shared memory of this machine, while the block lasts.

    It is locked as long as its process lives. Files that nobody has locked any more, since their
    processes were killed, go when the next one is made.
    """

    def __enter__(self) -> Self:
        _remove_orphans()
        data = secrets.token_bytes(32)
        self.path = FOLDER / f"{_PREFIX}{secrets.token_hex(8)}"
        self.digest = hashlib.sha256(data).hexdigest()
        try:
            self._file = _locked(self.path, data)
        except OSError as error:
            raise IPCError(f"no file can be made in {FOLDER}: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def _locked(path: Path, data: bytes) -> int:
    """Make a file, and return the descriptor that locks it."""
    file = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.write(file, data)
        # It gets its name when it is whole and locked. Python follows the link to the file
        # only if it is told of a folder, which an absolute path does not want.
        folder = os.open(FOLDER, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.link(f"/proc/self/fd/{file}", path, src_dir_fd=folder)
        finally:
            os.close(folder)
    except BaseException:
        os.close(file)
        raise
    return file


def _remove_orphans() -> None:
    for path in FOLDER.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:  # of others, in use, or gone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
