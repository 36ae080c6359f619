# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, who reads the environment, and who knows TVM in the native code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from tvm_ipc import contract

PACKAGE = Path(__file__).resolve().parents[1] / "tvm_ipc"
COMPILER = ("tvm.relax", "tvm.tirx", "tvm.te", "tvm.target", "tvm.s_tir", "tvm.topi")
PARTS = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
#: What each part may import of ours, besides itself. `tvm_ipc` is what `__init__.py` offers.
ALLOWED = {
    "csrc": (),  # what compiles a part of it
    "contract": (),
    "errors": (),
    "arguments": (),
    "parts": (),
    "machine": (),
    "calibration": ("contract", "errors", "arguments", "machine"),
    "comm": ("contract", "arguments"),
    "transform": ("contract", "errors", "arguments", "calibration", "comm"),
    "parallel": (
        *("contract", "errors", "arguments", "calibration", "comm", "parts", "transform"),
    ),
    "blas": ("errors",),
    "pipeline": ("contract", "errors", "arguments", "calibration", "comm", "transform", "blas"),
    "runtime": ("contract", "errors", "arguments", "blas", "machine"),
    "weights": ("contract", "errors", "arguments", "parts", "parallel", "runtime", "terminal"),
    "nodes": ("arguments", "contract", "errors", "machine", "runtime"),
    "inspection": ("contract", "pipeline", "transform"),
    "terminal": ("runtime",),
    "doctor": ("tvm_ipc", "contract", "errors", "machine", "nodes", "runtime"),
    "demo": (
        *("tvm_ipc", "comm", "contract", "errors", "machine"),
        *("inspection", "nodes", "pipeline", "runtime", "terminal"),
    ),
    "bench": (
        *("tvm_ipc", "blas", "calibration", "comm", "contract", "errors", "machine"),
        *("runtime", "terminal", "transform"),
    ),
    "hf": (
        *("arguments", "comm", "contract", "errors", "machine", "parallel", "pipeline"),
        *("nodes", "runtime", "terminal", "transform", "weights"),
    ),
    "explain": ("calibration", "contract", "errors", "inspection", "terminal", "transform"),
    "command_line": (
        *("tvm_ipc", "errors", "terminal"),
        *("bench", "doctor", "demo", "explain", "hf", "nodes"),
    ),
    "__main__": ("command_line",),
    "__init__": (
        *("calibration", "comm", "contract", "errors", "hf", "parallel", "pipeline"),
        *("runtime", "transform", "weights"),
    ),
}
#: Parts that need no TVM.
NO_TVM = {"contract", "errors", "arguments", "parts", "machine", "calibration"}
#: What folders of `transform` may import of it, besides themselves; others are not restrained.
#: The checker is a second opinion: a mistake of what plans must not be its own too. It shares the
#: arithmetic of sizes, which knows no program.
WITHIN_TRANSFORM = {"ir": (), "safety": ("ir.polynomials",)}
#: Lines of a file, at most, and of half of them.
LONGEST = 400
MEDIAN = 130
CSRC = PACKAGE / "csrc"
#: What each folder of the native code may include of ours, besides itself. At the top, register.cc
#: may include all of them but backends, and backends.cc those and core.
NATIVE = {
    "core": (),
    "driver": ("core",),
    "shm": ("core",),
    "mpi": ("core", "shm"),
    "nccl": ("core", "driver"),
    "cuda": ("core", "driver", "cuda/kernels"),
    "blas": ("core",),
    "engine": ("core",),
    "disco": ("core", "engine"),
    "cuda/kernels": (),
}
BACKENDS = ("shm", "mpi", "cuda", "nccl")
#: Names of packed functions outside register.cc, and what looks like one.
NAMED_ELSEWHERE = {
    ("disco/node_wire.cc", '"tvm_ipc.NodeWire"'),  # the name of a class
    ("disco/outbox.cc", '"tvm_ipc.FreedRegisters"'),  # likewise
    ("disco/node.cc", '"tvm_ipc.Node"'),  # likewise
    ("disco/node_wire.cc", '"tvm_ipc.NodeWire"'),  # likewise
    ("disco/posting.cc", '"tvm_ipc.Work"'),  # likewise
    ("disco/shows.cc", '"tvm_ipc.Shown"'),  # likewise
    ("disco/worker.cc", '"tvm_ipc.cuda.bring_up"'),  # Python's
    ("blas/blas.cc", '"tvm_ipc.blas.find"'),
    ("blas/blas.cc", '"tvm_ipc.blas.matmul: "'),  # in errors
}


def imported(source: str) -> Iterator[str]:
    """Every dotted name that an import statement may bind, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in this package"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def classes(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


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


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def folder_of(module: str) -> str:
    """The folder that a module lies in, or the module itself where that is `transform`'s face."""
    parent = module.rpartition(".")[0]
    return module if parent in ("tvm_ipc", "tvm_ipc.transform") else parent


def import_graph() -> dict[str, set[str]]:
    """Every module of the package and those that it imports, anywhere in it."""
    modules = {module_of(path): path for path in python_files()}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        graph[module] = set()
        for name in imported(path.read_text()):
            parts = name.split(".")
            prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            graph[module] |= {next((p for p in prefixes if p in modules), module)} - {module}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return nodes of which each leads to the next, and the last to the first; none without one."""
    done: set[str] = set()
    way: list[str] = []

    def visit(node: str) -> list[str]:
        if node in way:
            return way[way.index(node) :]
        if node in done:
            return []
        way.append(node)
        found = next((c for c in map(visit, sorted(graph[node])) if c), [])
        way.pop()
        done.add(node)
        return found

    return next((c for c in map(visit, sorted(graph)) if c), [])


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def code_of(path: Path) -> str:
    """A module without its comments and the text that documents it."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(value=None)
    return ast.unparse(tree)


def native_files() -> list[Path]:
    """The native sources; headers that stand in for TVM's are not ours."""
    return sorted(p for p in CSRC.rglob("*") if p.suffix in {".cc", ".h"} and "shim" not in p.parts)


def native_folder(path: Path) -> str:
    """The folder of csrc that a file is in; empty for what is at the top."""
    return str(path.relative_to(CSRC).parent).removesuffix(".")


def includes(source: str) -> list[str]:
    return re.findall(r'#\s*include\s*"([^"]+)"', source)


def test_the_table_has_every_part() -> None:
    assert ALLOWED.keys() == PARTS


@pytest.mark.parametrize("part", ALLOWED)
def test_part_imports_only_what_it_may(part: str) -> None:
    allowed = {None, part, *ALLOWED[part]}
    for path in (p for p in python_files() if part_of(p) == part):
        parts = {ours(name) for name in imported(path.read_text())}
        assert parts <= allowed, f"{path.name} imports {parts - allowed}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert circle(import_graph()) == []


def test_no_folder_imports_itself_by_way_of_others() -> None:
    folders: dict[str, set[str]] = {}
    for module, others in import_graph().items():
        folder = folder_of(module)
        folders.setdefault(folder, set()).update({folder_of(one) for one in others} - {folder})
    assert circle(folders) == []


@pytest.mark.parametrize("part", WITHIN_TRANSFORM)
def test_part_of_transform_imports_only_what_it_may(part: str) -> None:
    transform = "tvm_ipc.transform."
    allowed = {transform + one for one in WITHIN_TRANSFORM[part]}
    for module, others in import_graph().items():
        if folder_of(module) == transform + part:
            found = {m for m in others if f"{m}.".startswith(transform)} - allowed
            foreign = sorted(m for m in found if folder_of(m) != transform + part)
            assert not foreign, f"{module} imports {foreign}"


def test_runtime_needs_no_compiler() -> None:
    for path in (p for p in python_files() if part_of(p) in {"runtime", "doctor"}):
        compiler = [n for n in imported(path.read_text()) if n.startswith(COMPILER)]
        assert not compiler, f"{path.name} imports {compiler}"


def test_what_all_stand_on_needs_no_tvm() -> None:
    for path in (p for p in python_files() if part_of(p) in NO_TVM):
        names = imported(path.read_text())
        assert not [n for n in names if n.split(".")[0] in {"tvm", "tvm_ffi"}], path.name


def test_files_are_short() -> None:
    lengths = {
        path: len(path.read_text().splitlines()) for path in [*python_files(), *native_files()]
    }
    long = {str(path.relative_to(PACKAGE)) for path, lines in lengths.items() if lines > LONGEST}
    assert not long, f"{sorted(long)} have more than {LONGEST} lines: split them by concept"
    assert median(lengths.values()) < MEDIAN


def test_no_two_classes_of_transform_have_one_name() -> None:
    files = [path for path in python_files() if part_of(path) == "transform"]
    names = Counter(name for path in files for name in classes(path.read_text()))
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []


def test_passes_look_no_function_up() -> None:
    for path in (p for p in python_files() if part_of(p) in {"transform", "pipeline"}):
        assert "get_global_func" not in path.read_text(), path.name


def test_only_config_touches_the_environment() -> None:
    users = [p for p in python_files() if reads_environment(p.read_text())]
    assert users == [PACKAGE / "runtime" / "config.py"]


@pytest.mark.parametrize("folder", NATIVE)
def test_native_folder_includes_only_what_it_may(folder: str) -> None:
    for path in (p for p in native_files() if native_folder(p) == folder):
        for name in includes(path.read_text()):
            assert (CSRC / name).is_file(), f"{path.name} includes {name}: say it from csrc on"
            assert str(Path(name).parent) in {folder, *NATIVE[folder]}, (
                f"{path.name} includes {name}"
            )


def test_a_backend_is_a_folder_and_a_line_in_a_table() -> None:
    assert set(BACKENDS) == set(contract.BACKENDS) <= NATIVE.keys()
    for path in (p for p in native_files() if native_folder(p) == ""):
        folders = {name.partition("/")[0] for name in includes(path.read_text()) if "/" in name}
        assert path.name == "backends.cc" or not folders & set(BACKENDS), path.name
    # Names of devices and of libraries of others may be said anywhere, and a backend's be the same.
    own = [name for name in BACKENDS if name not in {*contract.DEVICES, *contract.LIBRARIES}]
    for path in native_files():
        named = [name for name in own if f'"{name}"' in path.read_text()]
        assert not named or native_folder(path) in named, f"{path.name} names {named}"
    for path in python_files():
        named = [name for name in own if re.search(rf"""['"]{name}['"]""", code_of(path))]
        assert not named or path == PACKAGE / "contract" / "values.py", f"{path} names {named}"


def test_native_code_knows_tvm_only_where_it_must() -> None:
    tvm_header = re.compile(r"#\s*include\s*<(tvm|dlpack)/")
    users = {str(p.relative_to(CSRC)) for p in native_files() if tvm_header.search(p.read_text())}
    assert {u for u in users if not u.startswith("disco/")} == {
        "register.cc",
        "numbers.cc",
        "numbers.h",
        "opening.h",
        "blas/blas.cc",
        "blas/blas.h",
    }
    lists = re.findall(r"set\(TVM_IPC_\w+_SOURCES([^)]*)\)", (CSRC / "core.cmake").read_text())
    built_without = {Path(name).name for names in lists for name in names.split()}
    without = {p.name for p in native_files() if p.suffix == ".cc" and native_folder(p) != "disco"}
    assert built_without == without - {"register.cc", "numbers.cc", "opening.cc", "blas.cc"}


def test_only_register_names_packed_functions() -> None:
    packed_name = re.compile(r'"(runtime\.disco|tvm_ipc)\.\w+[^"]*"')
    users = {
        (str(path.relative_to(CSRC)), found[0])
        for path in native_files()
        for found in packed_name.finditer(path.read_text())
    }
    assert {user for user in users if user[0] != "register.cc"} == NAMED_ELSEWHERE


def test_checks_see_what_they_look_for() -> None:
    source = "def f():\n  import os\n  from tvm import relax\n  return os.environ['A']"
    assert set(imported(source)) == {"os", "tvm.relax"}
    assert reads_environment(source)
    assert reads_environment("from os import getenv")
    assert not reads_environment("import os\nos.getpid()")
    assert classes("class A:\n  class B: pass\nclass A: pass") == ["A", "A", "B"]
    assert ours("tvm_ipc.runtime.session") == "runtime"
    assert ours("tvm_ipc.Session") == ours("tvm_ipc") == "tvm_ipc"
    assert ours("tvm.relax") is None
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert "tvm_ipc.runtime.commands" in import_graph()["tvm_ipc.runtime.values"]
    assert folder_of("tvm_ipc.transform.ir.aliases") == "tvm_ipc.transform.ir"
    assert folder_of("tvm_ipc.transform.report") == "tvm_ipc.transform.report"
    assert python_files()
    assert {native_folder(path) for path in native_files()} == {"", *NATIVE}
    assert list(includes('#include <x>\n# include "core/wait.h"')) == ["core/wait.h"]
