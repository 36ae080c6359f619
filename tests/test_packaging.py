# SPDX-License-Identifier: Apache-2.0
"""The source distribution is complete, and the wheel built from it holds what it must.

`--packages FOLDER` tests those that are there, which were built in this way too (see .ci/run).
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.test_project_urls import check_urls
from tvm_ipc.packed_functions import generate_collective_functions

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "tvm_ipc" / "csrc"
pytestmark = pytest.mark.slow


def build(hook: str, source: Path, target: Path) -> Path:
    """Call the build backend without an environment of its own; return what it made."""
    pytest.importorskip("scikit_build_core", reason="needs the packages of the extra `dev`")
    code = f"import sys; from scikit_build_core.build import {hook}; {hook}(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(target)], cwd=source, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (made,) = target.iterdir()
    return made


def given(request: pytest.FixtureRequest, pattern: str) -> Path | None:
    """The package of `--packages`."""
    folder = request.config.getoption("--packages")
    if folder is None:
        return None
    (package,) = folder.glob(pattern)
    return Path(package)


@pytest.fixture(scope="module")
def sdist(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = given(request, "*.tar.gz")
    archive = archive or build("build_sdist", ROOT, tmp_path_factory.mktemp("sdist"))
    target = tmp_path_factory.mktemp("source")
    with tarfile.open(archive) as tar:
        # Without the filter newer Pythons warn; Pythons before 3.10.12 and 3.11.4 have none.
        tar.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = target.iterdir()
    return source


@pytest.fixture(scope="module")
def wheel(
    request: pytest.FixtureRequest, sdist: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    package = given(request, "*.whl")
    return package or build("build_wheel", sdist, tmp_path_factory.mktemp("wheel"))


def test_sdist_holds_every_native_source_and_nothing_that_is_built(sdist: Path) -> None:
    def native(root: Path) -> set[str]:
        csrc = root / "tvm_ipc" / "csrc"
        files = (path for path in csrc.rglob("*") if path.is_file())
        return {str(path.relative_to(csrc)) for path in files if path.suffix != ".pyc"}

    assert native(sdist) == native(ROOT)
    assert (sdist / "README.md").is_file()
    assert (sdist / "LICENSE").is_file()
    assert [*sdist.rglob("*.so"), *sdist.rglob("*.pyi")] == []


def test_wheel_serves_every_python_version(wheel: Path) -> None:
    # As it is built for oneself; and as it is published, for systems that TVM's wheel takes too.
    assert re.search(r"-py3-none-(linux|manylinux_2_27_x86_64\.manylinux_2_28)_", wheel.name)


def test_wheel_has_addresses(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (folder,) = tmp_path.glob("*.dist-info")
    check_urls(importlib.metadata.Distribution.at(folder))


def test_wheel_holds_library_types_and_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        library = archive.read("tvm_ipc/lib/libtvm_ipc.so")
        stub = archive.read(f"tvm_ipc/packed_functions/{generate_collective_functions.STUB.name}")
        (entry_points,) = (n for n in names if n.endswith("entry_points.txt"))
        text = archive.read(entry_points).decode()
    assert "tvm_ipc/py.typed" in names
    assert stub.decode() == generate_collective_functions.stub()
    assert len(names) == len({*names})
    # The demo runs this program of examples/.
    assert "tvm_ipc/examples/tensor_parallel_decoder/decoder_model.py" in names
    assert not [name for name in names if "csrc" in name]
    assert [name for name in names if name.endswith(".so")] == ["tvm_ipc/lib/libtvm_ipc.so"]
    assert "[tvm.backends]\ntvm_ipc=tvm_ipc:_autoload" in text.replace(" ", "")
    assert "tvm-ipc=tvm_ipc.__main__:main" in text.replace(" ", "")
    # TVM's libraries are found beside the package, wherever it is installed.
    assert b"$ORIGIN/../../tvm/lib:$ORIGIN/../../tvm_ffi/lib" in library
