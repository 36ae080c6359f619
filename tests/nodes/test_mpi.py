# SPDX-License-Identifier: Apache-2.0
"""Which MPI is taken, and what is said where there is none, or another than mpi4py's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.find_mpi_installation import (
    MPICH,
    OPEN_MPI,
    Mpi,
    find_mpi,
    load_mpi4py,
    refuse_launched,
)
from tvm_ipc.pip_install_commands import install_extra

INSTALL = re.escape(install_extra("mpi"))
SAYS = {
    OPEN_MPI: "mpiexec (Open MPI) 5.0.11",
    MPICH: "HYDRA build details:\n    Version:      5.0.2",
}
LIBRARY = {OPEN_MPI: "Open MPI v5.0.11, package: a", MPICH: "MPICH Version:      5.0.2"}
VERSION = {OPEN_MPI: "5.0.11", MPICH: "5.0.2"}


def script(path: Path, text: str, code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    to = 2 if code else 1
    path.write_text(f"#!/bin/sh\ncat >&{to} <<'END'\n{text}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH, but for what scripts want."""
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "cat").symlink_to("/bin/cat")
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.mark.parametrize("kind", [OPEN_MPI, MPICH])
def test_the_environment_comes_before_the_system(kind: str, tmp_path: Path, nowhere: Path) -> None:
    python = script(tmp_path / "env" / "bin" / "python", LIBRARY[kind])
    system = script(nowhere / "mpiexec", SAYS[kind])
    assert find_mpi(str(python)) == Mpi(kind, system, f"{kind} {VERSION[kind]}")
    own = script(python.parent / "mpiexec", SAYS[kind])
    assert find_mpi(str(python)).mpiexec == own


def test_without_mpi_it_says_what_to_install(tmp_path: Path, nowhere: Path) -> None:
    python = script(tmp_path / "bin" / "python", "No module named 'mpi4py'", code=1)
    with pytest.raises(IPCError, match=f"there is no mpiexec, neither in .*bin nor on .*{INSTALL}"):
        find_mpi(str(python))
    launcher = script(nowhere / "mpiexec", SAYS[OPEN_MPI])
    with pytest.raises(IPCError, match=rf"mpi4py does not load .*{INSTALL}.*No module named"):
        find_mpi(str(python))
    script(launcher, "Intel MPI 2026")
    with pytest.raises(IPCError, match=rf"is neither Open MPI's nor MPICH's: .*Intel.*{INSTALL}"):
        find_mpi(str(python))
    script(launcher, "libprrte.so: no such file", code=127)
    with pytest.raises(IPCError, match=r"exit code 127 and printed: libprrte\.so: no such file"):
        find_mpi(str(python))


def test_a_launcher_of_another_mpi_is_refused(tmp_path: Path, nowhere: Path) -> None:
    python = script(tmp_path / "bin" / "python", LIBRARY[MPICH])
    script(nowhere / "mpiexec", SAYS[OPEN_MPI])
    with pytest.raises(IPCError, match=r"\(Open MPI 5\.0\.11\), and mpi4py .* 'MPICH Version"):
        find_mpi(str(python))


def test_a_program_that_a_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_launched()
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "0")
            with pytest.raises(IPCError, match=f"{name} shows, and a launcher inside another"):
                refuse_launched()
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # the shell of an allocation
    refuse_launched()


def test_the_mpi_of_this_environment(mpi: Mpi) -> None:
    assert mpi.kind in (OPEN_MPI, MPICH) and mpi.mpiexec.is_file()
    assert mpi.version.startswith(mpi.kind)


@pytest.mark.parametrize(("own", "seen"), [(None, "163840"), ("65536", "65536")])
def test_settings_of_mpi_are_made_before_it_starts_and_those_of_the_user_stay(
    own: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "OMPI_MCA_btl_tcp_eager_limit"
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text(f"import os\nSEEN = os.environ.get({name!r})\n")
    monkeypatch.setenv(name, own or "")
    if own is None:
        monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(tmp_path)
    for module in [m for m in sys.modules if m.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, module)
    found = load_mpi4py().SEEN
    assert found == seen
    for module in ("mpi4py", "mpi4py.MPI"):
        del sys.modules[module]
