# SPDX-License-Identifier: Apache-2.0
"""Makes a folder that tests and measures GPUs on a machine that has nothing and reaches nothing.

    python -m tests.gpu.kit DIR

On the GPU machine `DIR/run` wants NVIDIA's driver, Python 3.10 or newer, NumPy and pytest. The
folder has wheels of this package, of TVM without its compiler, and of what both need, for several
versions of Python; programs that were compiled here; the tests and the benchmark. This machine
needs no GPU, but the extra `dev`, gcc, and a package index for wheels of other Pythons.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: What has a wheel for each version of Python. Others serve all of them.
OF_EACH_PYTHON = ("apache-tvm-ffi", "ml-dtypes")
OF_ALL_PYTHONS = ("typing-extensions",)
#: More than this cannot be brought to some machines in one go.
MOST_BYTES = 64 << 20
#: In TVM's wheel, what its runtime has no use for; the compiler is 260 MB.
LEFT_OUT = ("tvm/3rdparty/", "tvm/src/", "tvm/web/", "tvm/include/", "tvm/lib/libtvm_compiler.so")
TESTS = (
    *("tests/__init__.py", "tests/conftest.py", "tests/child_python.py", "tests/passes_of_tvm.py"),
    "tests/collective_results.py",
    *("tests/gpu", "tests/runtime"),
)
BENCHMARKS = "*cuda*.py"
#: Tests of collectives read limits there.
SOURCES = "tvm_ipc/csrc"
PYTEST = """\
[pytest]
addopts = -ra --strict-markers --import-mode=append -p no:cacheprovider
markers =
    slow: takes more than a few seconds
    gpu: wants an NVIDIA GPU
"""


def make(folder: Path, wheel: Path | None, pythons: Iterable[str]) -> None:
    """Fill an empty folder."""
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty: name a folder that is, or none that exists")
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    if wheel is None:
        pip("wheel", "--no-deps", "-w", str(wheels), str(ROOT))
    else:
        shutil.copy(wheel, wheels)
    repack("apache-tvm", wheels, wanted_of_tvm)
    repack("nvidia-cuda-runtime", wheels, lambda name: name.endswith("libcudart.so.13"))
    download(wheels, pythons)
    compile_programs(folder / "programs")
    copy_tests(folder)
    write_about(folder, pythons)
    check_size(folder)


def wanted_of_tvm(name: str) -> bool:
    """Whether TVM's runtime needs this file of its wheel."""
    return name.endswith((".py", ".so")) and not name.startswith(LEFT_OUT)


def repack(package: str, wheels: Path, wanted: Callable[[str], bool]) -> None:
    """Put some files of an installed package, and what says which it is, into a wheel."""
    installed = importlib.metadata.distribution(package)
    name = f"{package.replace('-', '_')}-{installed.version}"
    with zipfile.ZipFile(
        wheels / f"{name}-py3-none-linux_{platform.machine()}.whl", "w", zipfile.ZIP_DEFLATED
    ) as archive:
        count = 0
        for file in sorted(installed.files or (), key=str):
            about = file.parts[0].endswith(".dist-info")
            if about and file.name in {"METADATA", "entry_points.txt", "top_level.txt", "WHEEL"}:
                archive.write(str(file.locate()), str(file))
            elif not about and wanted(str(file)):
                archive.write(str(file.locate()), str(file))
                count += 1
    if not count:
        raise SystemExit(f"{package} {installed.version} has none of the files that the kit needs")


def download(wheels: Path, pythons: Iterable[str]) -> None:
    """Get wheels of the installed versions for each Python."""
    glibc = [f"--platform=manylinux_2_{n}_{platform.machine()}" for n in range(17, 36)]
    old = [f"--platform=manylinux2014_{platform.machine()}"]
    for python in pythons:
        packages = OF_EACH_PYTHON + OF_ALL_PYTHONS
        exact = [f"{name}=={importlib.metadata.version(name)}" for name in packages]
        pip(
            *("download", "--no-deps", "--only-binary=:all:", "-d", str(wheels)),
            *("--implementation", "cp", "--python-version", python, *glibc, *old, *exact),
        )


def pip(*arguments: str) -> None:
    """Run pip of this Python."""
    command = [sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"]
    subprocess.run(command, check=True)


def compile_programs(folder: Path) -> None:
    """In a process of its own, which may load a stand-in for NVIDIA's driver."""
    subprocess.run([sys.executable, str(HERE / "compile_gpu_programs.py"), str(folder)], check=True)


def copy_tests(folder: Path) -> None:
    """Tests, the benchmark, and what runs them."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in TESTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "benchmarks").mkdir()
    for path in (ROOT / "benchmarks").glob(BENCHMARKS):
        shutil.copy(path, folder / "benchmarks")
    shutil.copytree(ROOT / SOURCES, folder / SOURCES, ignore=ignore)
    (folder / "pytest.ini").write_text(PYTEST)
    shutil.copy(HERE / "README.md", folder)
    run = folder / "run"
    shutil.copy(HERE / "run_kit.py", run)
    run.chmod(run.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def write_about(folder: Path, pythons: Iterable[str]) -> None:
    """What the kit was made of."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    about = {
        "made": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": git.stdout.strip() or "unknown",
        "pythons": list(pythons),
        "glibc": platform.libc_ver()[1],
        "machine": platform.machine(),
        "tvm": importlib.metadata.version("apache-tvm"),
    }
    (folder / "kit.json").write_text(json.dumps(about, indent=2) + "\n")


def check_size(folder: Path) -> None:
    """Say how large it is, and fail if that is too much."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    print(f"{folder}: {len(sizes)} files, {total / 2**20:.1f} MiB")
    if total > MOST_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
        names = ", ".join(f"{path.name} {sizes[path] >> 20} MiB" for path in largest)
        raise SystemExit(
            f"a kit has at most {MOST_BYTES >> 20} MiB, this one {total >> 20}: make it for fewer "
            f"Pythons (--python); the largest files are {names}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.kit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="where to make it: empty, or not there yet")
    parser.add_argument("--wheel", type=Path, help="of this package; by default it is built")
    parser.add_argument(
        "--python",
        dest="pythons",
        action="append",
        metavar="VERSION",
        help=f"of the GPU machine, such as 3.12; can be repeated (default: {', '.join(PYTHONS)})",
    )
    options = parser.parse_args()
    make(options.folder, options.wheel, options.pythons or PYTHONS)


if __name__ == "__main__":
    main()
