# SPDX-License-Identifier: Apache-2.0
"""Which MPI is there: a launcher, `mpiexec`, and mpi4py, which must find the same one.

The controller never loads MPI: it is no rank, and an abort of MPI's must not be its end.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tvm_ipc.errors import IPCError
from tvm_ipc.runtime import config

OPEN_MPI: Final = "Open MPI"
MPICH: Final = "MPICH"
_INSTALL: Final = "pip install 'tvm-ipc[mpi]'"
#: What a launcher says of itself, in small letters.
_SIGNS: Final = {"open mpi": OPEN_MPI, "openrte": OPEN_MPI, "hydra": MPICH, "mpich": MPICH}
_SECONDS: Final = 30.0
#: Before Open MPI sends a message that is longer it asks the other side, whose answer comes behind
#: all that it sends itself. Those of a reduction over two nodes have 128 KB and a head.
_SETTINGS: Final = {"OMPI_MCA_btl_tcp_eager_limit": str(160 << 10)}
_ASK: Final = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


@dataclass(frozen=True)
class Mpi:
    """An MPI that can start agents.

    Attributes
    ----------
    kind : `OPEN_MPI` or `MPICH`.
    mpiexec : the launcher.
    version : what it says of itself.
    """

    kind: str
    mpiexec: Path
    version: str

    def __str__(self) -> str:
        return f"{self.mpiexec} ({self.version})"


def find_mpi(python: str = sys.executable) -> Mpi:
    """Return the MPI of an interpreter's environment; if it has none, that of the system.

    Raises
    ------
    IPCError
        There is no launcher or no mpi4py, or they are of different MPIs; it says what to install.
    """
    own = Path(python).parent / "mpiexec"
    found = own if own.is_file() else shutil.which("mpiexec")
    if found is None:
        raise IPCError(
            f"nodes start through MPI, and there is no mpiexec, neither in {own.parent} nor on "
            f"PATH: {_INSTALL}, or install the system's Open MPI or MPICH"
        )
    launcher = Path(found)
    version = _say([str(launcher), "--version"])
    kind = next((kind for sign, kind in _SIGNS.items() if sign in version.lower()), None)
    if kind is None:
        raise IPCError(
            f"{launcher} is neither Open MPI's nor MPICH's: it says {version.strip()!r}; "
            f"{_INSTALL} brings one that works"
        )
    mpi = Mpi(kind, launcher, _first_words(version, kind))
    library = _say(
        [python, "-c", _ASK],
        f"nodes start through MPI, and mpi4py does not load in {python}: {_INSTALL}",
    )
    other = MPICH if kind == OPEN_MPI else OPEN_MPI
    if kind.lower() not in library.lower():
        raise IPCError(
            f"the launcher is {mpi}, and mpi4py of {python} finds another MPI, "
            f"{library.strip()!r}: each rank would be alone. Use an environment that has {kind} "
            f"and no {other}, or the other way round: {_INSTALL}"
        )
    return mpi


def load_mpi4py() -> Any:
    """Return `mpi4py.MPI`, which starts MPI, to a process that a launcher has started.

    Settings of MPI that the user has made stay.

    Raises
    ------
    IPCError
        It does not load here; it says what to install.
    """
    config.set_where_unset(_SETTINGS)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # it is not there; there is no library of MPI
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise IPCError(
            f"node: each node is a rank of MPI, and mpi4py does not load in {sys.executable}: "
            f"{_INSTALL}: {why}"
        ) from error
    return MPI


def refuse_launched() -> None:
    """Raise in a process that a launcher of MPI has started: another one in it hangs, or fails."""
    if name := config.started_by_launcher():
        raise IPCError(
            f"a launcher started this program, as {name} says, and one in another hangs: start the "
            "program itself without mpiexec or srun, in the allocation's shell"
        )


def _say(command: list[str], otherwise: str = "") -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IPCError(f"{otherwise or command[0]}: {error}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise IPCError(
            f"{otherwise or ' '.join(command)}: exit code {done.returncode}, it said: {last}"
        )
    return done.stdout


def _first_words(version: str, kind: str) -> str:
    words = version.replace(":", " ").split()
    return next((f"{kind} {word}" for word in words if word[:1].isdigit()), kind)
