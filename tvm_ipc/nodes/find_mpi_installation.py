# SPDX-License-Identifier: Apache-2.0
"""Find the launcher `mpiexec`, and check that mpi4py uses the same MPI.

The controller never loads MPI: it is not a rank, and an abort of MPI must not end it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tvm_ipc.errors import IPCError
from tvm_ipc.pip_install_commands import install_extra
from tvm_ipc.runtime import config
from tvm_ipc.runtime.start_child_process import python_text

OPEN_MPI: Final = "Open MPI"
MPICH: Final = "MPICH"
#: The command that installs an MPI into the environment.
INSTALL: Final = install_extra("mpi")
#: Lower-case words in the output of `mpiexec --version`, and the MPI that they identify.
_SIGNATURES: Final = {"open mpi": OPEN_MPI, "openrte": OPEN_MPI, "hydra": MPICH, "mpich": MPICH}
_SECONDS: Final = 30.0
#: Open MPI sends longer messages only after a handshake, whose answer is queued behind the data
#: that the other side sends. The messages of a reduction over two nodes have 128 KB and a header.
_SETTINGS: Final = {"OMPI_MCA_btl_tcp_eager_limit": str(160 << 10)}
_PRINT_LIBRARY_VERSION: Final = """
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
    version : the name and the version of the MPI.
    """

    kind: str
    mpiexec: Path
    version: str

    def __str__(self) -> str:
        """Return the path of `mpiexec` and the version."""
        return f"{self.mpiexec} ({self.version})"


def find_launcher(python: str = sys.executable) -> Path | None:
    """Return the `mpiexec` of an interpreter's environment, or else that of PATH."""
    in_environment = Path(python).parent / "mpiexec"
    if in_environment.is_file():
        return in_environment
    on_path = shutil.which("mpiexec")
    return None if on_path is None else Path(on_path)


def find_mpi(python: str = sys.executable) -> Mpi:
    """Return the MPI of an interpreter's environment, or else that of the system.

    Raises
    ------
    IPCError
        There is no launcher or no mpi4py, or they belong to different MPIs.
    """
    launcher = find_launcher(python)
    if launcher is None:
        raise IPCError(
            "nodes start through MPI, and there is no mpiexec, neither in "
            f"{Path(python).parent} nor on PATH: {INSTALL}, or install the system's Open MPI "
            "or MPICH"
        )
    version = _run([str(launcher), "--version"])
    kind = next((kind for words, kind in _SIGNATURES.items() if words in version.lower()), None)
    if kind is None:
        raise IPCError(
            f"{launcher} is neither Open MPI's nor MPICH's: its version is {version.strip()!r}; "
            f"install a supported one: {INSTALL}"
        )
    mpi = Mpi(kind, launcher, _short_version(version, kind))
    library = _run(
        python_text(_PRINT_LIBRARY_VERSION, python),
        f"nodes start through MPI, and mpi4py does not load in {python}: {INSTALL}",
    )
    other = MPICH if kind == OPEN_MPI else OPEN_MPI
    if kind.lower() not in library.lower():
        raise IPCError(
            f"the launcher is {mpi}, and mpi4py of {python} loads another MPI, "
            f"{library.strip()!r}, so the ranks would not find each other; use an environment that "
            f"has {kind} and no {other}, or the other way round: {INSTALL}"
        )
    return mpi


def load_mpi4py() -> Any:
    """Import and return `mpi4py.MPI`, which initializes MPI, in a process that a launcher started.

    Settings of MPI in the user's environment take precedence.

    Raises
    ------
    IPCError
        mpi4py does not load.
    """
    config.set_where_unset(_SETTINGS)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no library of MPI
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise IPCError(
            f"node: each node is a rank of MPI, and mpi4py does not load in {sys.executable}: "
            f"{INSTALL}: {line}"
        ) from error
    return MPI


def refuse_launched() -> None:
    """Raise in a process that a launcher of MPI has started, where another one hangs or fails."""
    if name := config.started_by_launcher():
        raise IPCError(
            f"a launcher started this program, as the variable {name} shows, and a launcher inside "
            "another one hangs; start the program without mpiexec or srun, in the shell of the "
            "allocation"
        )


def _run(command: list[str], problem: str = "") -> str:
    """Return the output of a command; an error begins with `problem`, or else the command."""
    try:
        completed = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IPCError(f"{problem or command[0]}: {error}") from error
    if completed.returncode:
        output = completed.stderr.strip() or completed.stdout.strip() or "nothing"
        raise IPCError(
            f"{problem or ' '.join(command)}: it ended with exit code {completed.returncode} and "
            f"printed: {output.splitlines()[-1]}"
        )
    return completed.stdout


def _short_version(version: str, kind: str) -> str:
    words = version.replace(":", " ").split()
    return next((f"{kind} {word}" for word in words if word[:1].isdigit()), kind)
