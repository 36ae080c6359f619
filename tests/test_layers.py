# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, who reads the environment, and who knows TVM in the native code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "tvm_ipc"
COMPILER = ("tvm.relax", "tvm.tirx", "tvm.te", "tvm.target", "tvm.s_tir", "tvm.topi")
PARTS = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
#: What each part may import of ours, besides itself. `tvm_ipc` is what `__init__.py` offers.
ALLOWED = {
    "contract": (),
    "errors": (),
    "arguments": (),
    "transform": ("contract", "errors", "arguments"),
    "blas": ("errors",),
    "pipeline": ("contract", "errors", "arguments", "transform", "blas"),
    "runtime": ("contract", "errors", "arguments", "blas"),
    "inspection": ("contract", "pipeline", "transform"),
    "terminal": ("runtime",),
    "doctor": ("tvm_ipc", "errors", "runtime"),
    "demo": ("tvm_ipc", "contract", "errors", "inspection", "pipeline", "runtime", "terminal"),
    "explain": ("contract", "errors", "inspection", "terminal", "transform"),
    "command_line": ("tvm_ipc", "errors", "terminal", "doctor", "demo", "explain"),
    "__main__": ("command_line",),
    "__init__": ("contract", "errors", "pipeline", "runtime", "transform"),
}


def imported(source: str) -> Iterator[str]:
    """Every dotted name that an import statement may bind, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in this package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reads_environment(source: str) -> bool:
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    return any(
        (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and any(a.name in names for a in node.names))
        for node in ast.walk(ast.parse(source))
    )


def ours(name: str) -> str | None:
    """The part of the package that a dotted name lies in; `tvm_ipc` for the package's face."""
    parts = name.split(".")
    if parts[0] != "tvm_ipc":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in PARTS else "tvm_ipc"


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def native_core() -> set[Path]:
    """The sources of the library that is built without TVM, and all that they include."""
    csrc = PACKAGE / "csrc"
    lists = re.findall(r"set\(TVM_IPC_\w+_SOURCES([^)]*)\)", (csrc / "core.cmake").read_text())
    core: set[Path] = set()
    new = {csrc / name for names in lists for name in names.split()}
    assert new
    while new:
        core |= new
        headers = (re.findall(r'#\s*include\s*"([^"]+)"', path.read_text()) for path in new)
        new = {csrc / name for names in headers for name in names} - core
    return core


def test_the_table_has_every_part() -> None:
    assert ALLOWED.keys() == PARTS


@pytest.mark.parametrize("part", ALLOWED)
def test_part_imports_only_what_it_may(part: str) -> None:
    allowed = {None, part, *ALLOWED[part]}
    for path in (p for p in python_files() if part_of(p) == part):
        parts = {ours(name) for name in imported(path.read_text())}
        assert parts <= allowed, f"{path.name} imports {parts - allowed}"


def test_runtime_needs_no_compiler() -> None:
    for path in (p for p in python_files() if part_of(p) in {"runtime", "doctor"}):
        compiler = [n for n in imported(path.read_text()) if n.startswith(COMPILER)]
        assert not compiler, f"{path.name} imports {compiler}"


def test_what_all_stand_on_needs_no_tvm() -> None:
    for path in (p for p in python_files() if part_of(p) in {"contract", "errors", "arguments"}):
        names = imported(path.read_text())
        assert not [n for n in names if n.split(".")[0] in {"tvm", "tvm_ffi"}], path.name


def test_passes_look_no_function_up() -> None:
    for path in (p for p in python_files() if part_of(p) in {"transform", "pipeline"}):
        assert "get_global_func" not in path.read_text(), path.name


def test_only_config_touches_the_environment() -> None:
    users = [p for p in python_files() if reads_environment(p.read_text())]
    assert users == [PACKAGE / "runtime" / "config.py"]


def test_native_core_knows_nothing_of_tvm() -> None:
    tvm_header = re.compile(r"#\s*include\s*<(tvm|dlpack)/")
    packed_name = re.compile(r'"(runtime\.disco|tvm_ipc)\.\w')
    for path in native_core():
        text = path.read_text()
        assert not tvm_header.search(text), f"{path.name} includes a header of TVM"
        assert not packed_name.search(text), f"{path.name} names a packed function"


def test_checks_see_what_they_look_for() -> None:
    source = "def f():\n  import os\n  from tvm import relax\n  return os.environ['A']"
    assert set(imported(source)) == {"os", "tvm.relax"}
    assert reads_environment(source)
    assert reads_environment("from os import getenv")
    assert not reads_environment("import os\nos.getpid()")
    assert ours("tvm_ipc.runtime.session") == "runtime"
    assert ours("tvm_ipc.Session") == ours("tvm_ipc") == "tvm_ipc"
    assert ours("tvm.relax") is None
    assert python_files()
    names = {path.name for path in native_core()}
    assert names >= {"group.cc", "group.h", "arena.cc", "arena.h"}
    assert "register.cc" not in names
