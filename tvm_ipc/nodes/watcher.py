# SPDX-License-Identifier: Apache-2.0
"""Ends an agent that does not get into its session in time, or whose launcher's daemon has died.

MPI's start waits for the launcher, for ever if the network is gone, and nothing of the agent's own
runs meanwhile. So a process beside the agent looks at the time. It imports little, and has nothing
of the agent's but one end of a pipe: it ends when the agent closes the other one, or is no more.

    python -I -S watcher.py AGENT DAEMON SECONDS FOLDER
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
    """End a launcher's daemon with its temporary files.

    Parameters
    ----------
    daemon : the process that started the agent.
    folder : where it keeps files; "" if nowhere.
    parent : whose child the agent is. If its daemon has died, that is a process of others.
    """
    if parent == daemon != 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon, _SIGKILL)
    if folder:
        import shutil  # with much that is not wanted until now

        shutil.rmtree(folder, ignore_errors=True)


def parent_of(process: int) -> int:
    """Return whose child a process is; 0 if it is no more."""
    try:
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def watch(agent: int, daemon: int, seconds: float, folder: str) -> None:
    """Wait until standard input ends; if it does not in time, end the agent and its daemon."""
    end = time.monotonic() + seconds
    while parent_of(agent) == daemon and (left := end - time.monotonic()) > 0:
        if select.select([0], [], [], min(left, _ROUND))[0]:
            return
    parent = parent_of(agent)
    if os.getppid() == agent:  # which has not ended meanwhile
        os.kill(agent, _SIGKILL)
        end_daemon(daemon, folder, parent)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
