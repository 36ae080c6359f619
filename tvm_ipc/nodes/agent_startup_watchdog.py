# SPDX-License-Identifier: Apache-2.0
"""End an agent that does not join its session in time, or whose launcher's daemon has died.

    python -I -S agent_startup_watchdog.py AGENT DAEMON SECONDS FOLDER

The initialization of MPI waits for the launcher, indefinitely if the network is down, and no code
of the agent runs meanwhile. This separate process therefore watches the time. It imports little,
and shares only a pipe with the agent: it ends when the agent closes the other end, or dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from pathlib import Path
from typing import Final

_SIGKILL: Final = 9
_ROUND: Final = 0.5


def end_daemon(daemon: int, folder: str, parent: int) -> None:
    """End a launcher's daemon, and remove its temporary files.

    Parameters
    ----------
    daemon : the process that started the agent.
    folder : the folder of its temporary files; "" if there is none.
    parent : the current parent process of the agent. If the daemon has died, it is another one.
    """
    if parent == daemon != 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, _SIGKILL)
    if folder:
        import shutil  # imports much, so only when needed

        shutil.rmtree(folder, ignore_errors=True)


def parent_of(process: int) -> int:
    """Return the parent of a process; 0 if the process does not exist any more."""
    try:
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def watch(agent: int, daemon: int, seconds: float, folder: str) -> None:
    """Wait for the end of standard input; after a timeout, end the agent and its daemon."""
    end = time.monotonic() + seconds
    while parent_of(agent) == daemon and (remaining := end - time.monotonic()) > 0:
        if select.select([0], [], [], min(remaining, _ROUND))[0]:
            return
    parent = parent_of(agent)
    if os.getppid() == agent:  # the agent still runs
        os.kill(agent, _SIGKILL)
        end_daemon(daemon, folder, parent)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
