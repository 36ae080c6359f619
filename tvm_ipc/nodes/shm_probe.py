# SPDX-License-Identifier: Apache-2.0
"""Test whether a node shares memory with the controller, with a file of random bytes in /dev/shm.

Host names and boot ids are not proof, because containers may have those of other machines.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime.scratch_dir import ScratchDir, remove_orphans

if TYPE_CHECKING:
    from typing_extensions import Self

FOLDER: Final = Path("/dev/shm")


def digest(path: Path) -> str | None:
    """Return the digest of a short regular file; None if it cannot be read.

    All users may create files in the folder. Opening a FIFO would wait for a writer, and a symbolic
    link may lead to any file.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        regular = stat.S_ISREG(os.fstat(file).st_mode)
        return hashlib.sha256(os.read(file, 4096)).hexdigest() if regular else None
    finally:
        os.close(file)


class ShmProbe:
    """A context manager for a file of random bytes in the shared memory of this machine.

    Its folder is removed even if the process is killed, as each `ScratchDir` is.
    """

    def __enter__(self) -> Self:
        """Create the file with random content that nodes look for."""
        remove_orphans(FOLDER)
        data = secrets.token_bytes(32)
        self.digest = hashlib.sha256(data).hexdigest()
        self._folder = ScratchDir(FOLDER)
        try:
            self.path = self._folder.path() / "proof"
            self.path.write_bytes(data)
        except OSError as error:
            self._folder.remove()
            raise IPCError(f"no file can be created in {FOLDER}: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file."""
        self._folder.remove()
