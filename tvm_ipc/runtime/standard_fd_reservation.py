# SPDX-License-Identifier: Apache-2.0
"""Open the standard streams, descriptors 0 to 2, that a program was started without.

The system gives the lowest free number to each file that is opened. In a program whose standard
output is closed, a connection or a pipe would become descriptor 1, and receive everything that is
printed. Moving our own descriptors to higher numbers is not enough: Python's sockets and pipes,
MPI, CUDA and TVM open files too. Each process therefore fills the numbers of its closed streams
before any of them opens a file. Our native code also moves its descriptors
(core/file_descriptor_and_memory_file.h), for programs that close their standard streams later.
Imports no TVM.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

#: The lowest number after those of the standard streams.
_FIRST: Final = 3


def fill() -> None:
    """Open /dev/null in the place of each standard stream that is closed.

    The streams still behave as closed ones. Reading from 0 and writing to 1 or 2 fails with EBADF,
    because each is opened for the opposite. Processes that are started do not inherit them. Python
    decided at its start that `sys.stdout` is None.
    """
    for number in range(_FIRST):
        try:
            os.fstat(number)
        except OSError:
            filler = os.open(os.devnull, os.O_RDONLY if number else os.O_WRONLY)
            if filler != number:  # another thread has filled the number meanwhile
                os.close(filler)


def duplicate(number: int) -> int | None:
    """Return another descriptor of a standard stream; None if processes started now get none.

    A file of the program may have the number by chance. It is not inherited, and no such stream.
    """
    try:
        if not os.get_inheritable(number):
            return None
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FIRST)
    except OSError:
        return None
