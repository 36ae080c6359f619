# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, who reads the environment, and who knows TVM in the native code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import kit
from tvm_ipc import packed_functions

PACKAGE = Path(__file__).resolve().parents[1] / "tvm_ipc"
COMPILER = ("tvm.relax", "tvm.tirx", "tvm.te", "tvm.target", "tvm.s_tir", "tvm.topi")
PARTS = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
#: The parts that each part of the core may import, besides itself. A wing is never one of them.
CORE: dict[str, tuple[str, ...]] = {
    "csrc": (),  # the script that compiles a part of it
    "packed_functions": (),
    "errors": (),
    "arguments": (),
    "html_tables": (),
    "tvm_private_names": ("packed_functions",),
    "tvm_moved_names": ("tvm_private_names",),
    "script_namespace": ("tvm_private_names",),
    "lazy_exports": (),
    "index_spans_per_axis": (),
    "this_machine": (),
    "pip_install_commands": (),
    "calibration": ("packed_functions", "errors", "arguments", "this_machine"),
    "comm": ("packed_functions", "arguments", "tvm_private_names", "tvm_moved_names"),
    "analysis": ("packed_functions", "errors", "tvm_private_names", "tvm_moved_names", "comm"),
    "verify": ("packed_functions", "tvm_moved_names", "analysis"),
    "transform": (
        *("packed_functions", "errors", "arguments", "calibration"),
        *("tvm_private_names", "tvm_moved_names"),
        *("comm", "analysis", "verify", "html_tables"),
    ),
    "runtime": (
        *("packed_functions", "errors", "arguments", "this_machine", "pip_install_commands"),
        *("html_tables", "tvm_private_names"),
    ),
}
#: The parts that every wing with passes may import.
_PASSES = (
    "lazy_exports",
    "packed_functions",
    "errors",
    "arguments",
    "html_tables",
    "tvm_private_names",
    "tvm_moved_names",
    "script_namespace",
    "calibration",
    "comm",
    "analysis",
    "transform",
)
#: The parts of the core, and the other wings, that a wing may import; its README lists the wings.
WINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "spmd": ((*_PASSES, "index_spans_per_axis"), ()),
    "cpu": (_PASSES, ()),
    "gpu": ((*_PASSES, "pip_install_commands", "runtime"), ()),
    "nodes": (
        (
            "packed_functions",
            "errors",
            "arguments",
            "this_machine",
            "pip_install_commands",
            "runtime",
        ),
        (),
    ),
    "models": (
        (*_PASSES, "index_spans_per_axis", "this_machine", "pip_install_commands", "runtime"),
        ("cpu", "spmd", "pipeline"),
    ),
}
#: These see everything; `tvm_ipc` is what `__init__.py` offers.
SEE_ALL = ("pipeline", "tools", "__init__", "__main__")
EVERYTHING = (*CORE, *WINGS, *SEE_ALL, "tvm_ipc")
ALLOWED = {
    **CORE,
    **{wing: (*core, *wings) for wing, (core, wings) in WINGS.items()},
    **dict.fromkeys(SEE_ALL, EVERYTHING),
    "pipeline": (*CORE, *WINGS),
}
#: Parts that need no TVM.
NO_TVM = {
    *(
        "packed_functions",
        "errors",
        "arguments",
        "index_spans_per_axis",
        "this_machine",
        "pip_install_commands",
    ),
    *("calibration", "script_namespace", "lazy_exports", "html_tables"),
}
#: The analyses that the verifier may import. Others are used by the planner, and a mistake in them
#: would be repeated by the verifier. These two know nothing of programs: they are the arithmetic of
#: sizes and the conversion of arrays.
SHARED_WITH_VERIFIER = {"tvm_ipc.analysis.ffi_arrays", "tvm_ipc.analysis.polynomials"}
#: Lines of a file, at most.
LONGEST = 600
CSRC = PACKAGE / "csrc"
#: What each folder of the native code may include of ours, besides itself. At the top, register.cc
#: may include all of them but backends, and backends.cc those and core.
NATIVE_CORE = {
    "core": (),
    "shm": ("core",),
    "disco": ("core",),
}
NATIVE_WINGS = {
    "blas": ("core",),
    "driver": ("core",),
    "nccl": ("core", "driver"),
    "cuda": ("core", "driver", "cuda/kernels"),
    "cuda/kernels": (),
    "mpi": ("core", "shm"),
    "engine": ("core", "disco"),
}
NATIVE = {**NATIVE_CORE, **NATIVE_WINGS}
BACKENDS = ("shm", "mpi", "cuda", "nccl")
#: Names of packed functions outside register.cc, and what looks like one.
NAMED_ELSEWHERE = {
    ("engine/serve_mpi_for_node_agent.cc", '"tvm_ipc.NodeRing"'),  # the name of a class
    (
        "disco/command_queue_and_freed_references.cc",
        '"tvm_ipc.FreedRegisters"',
    ),  # the name of a class
    ("disco/node_session_functions.cc", '"tvm_ipc.Node"'),  # the name of a class
    ("disco/start_async_packed_functions.cc", '"tvm_ipc.Request"'),  # the name of a class
    ("disco/exposed_tensors_and_slices.cc", '"tvm_ipc.ExposedTensor"'),  # the name of a class
    ("disco/worker_session_functions.cc", '"tvm_ipc.cuda.bring_up"'),  # Python's
    ("blas/matmul_packed_function.cc", '"tvm_ipc.blas.find"'),  # Python's
    ("blas/matmul_packed_function.cc", '"tvm_ipc.blas.matmul"'),  # in errors
    ("blas/attention_packed_function.cc", '"tvm_ipc.blas.attention"'),  # in errors
    ("blas/attention_packed_function.cc", '"tvm_ipc.blas.attention_of_sequences"'),  # in errors
    ("blas/batch_attention_packed_function.cc", '"tvm_ipc.blas.batch_attention"'),  # in errors
    ("disco/worker_session_functions.cc", '"runtime.disco.empty"'),  # TVM's
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
    """The folder of a module; the module itself where others stand beside folders of their own."""
    parent = module.rpartition(".")[0]
    beside = ("tvm_ipc", *(f"tvm_ipc.{one}" for one in ("transform", "tools", *WINGS)))
    return module if parent in beside else parent


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


def test_the_core_knows_no_wing() -> None:
    above = {*WINGS, *SEE_ALL, "tvm_ipc"}
    assert not {part for allowed in CORE.values() for part in allowed} & above
    assert all(set(core) <= CORE.keys() for core, _ in WINGS.values())
    assert not {folder for allowed in NATIVE_CORE.values() for folder in allowed} - {*NATIVE_CORE}


@pytest.mark.parametrize("wing", [*WINGS, "tools"])
def test_wing_has_a_readme_that_lists_what_it_imports(wing: str) -> None:
    text = (PACKAGE / wing / "README.md").read_text()
    assert len(text.splitlines()) <= 20
    (line,) = re.findall(r"^May import: (.*?)\.(?: |$)", text, re.MULTILINE)
    if wing == "tools":
        assert line == "everything"
    else:
        named = {name.removesuffix(".py") for name in re.findall(r"`([\w.]+)`", line)}
        assert named == set(WINGS[wing][1])
        assert line.startswith("the core")


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


def test_the_verifier_is_independent() -> None:
    for module, others in import_graph().items():
        if module.startswith("tvm_ipc.verify"):
            analyses = {one for one in others if one.startswith("tvm_ipc.analysis")}
            assert analyses <= SHARED_WITH_VERIFIER, module


def test_runtime_needs_no_compiler() -> None:
    places = (PACKAGE / "runtime", PACKAGE / "tools" / "doctor")
    for path in (p for p in python_files() if any(p.is_relative_to(one) for one in places)):
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
    assert not long, f"{sorted(long)} have more than {LONGEST} lines; split them by concept"


def test_no_two_classes_of_the_compiler_have_one_name() -> None:
    parts = (
        "analysis",
        "transform",
        "verify",
        "spmd/rules",
        "spmd/placements",
        "spmd/streams",
        "cpu",
    )
    files = [path for part in parts for path in (PACKAGE / part).rglob("*.py")]
    names = Counter(name for path in files for name in classes(path.read_text()))
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []


def test_passes_look_no_function_up() -> None:
    parts = {"analysis", "transform", "verify", "spmd", "pipeline"}
    for path in (p for p in python_files() if part_of(p) in parts):
        assert "get_global_func" not in path.read_text(), path.name


def test_only_config_touches_the_environment() -> None:
    users = [p for p in python_files() if reads_environment(p.read_text())]
    assert users == [PACKAGE / "runtime" / "config.py"]


def test_native_code_reads_no_environment() -> None:
    reads = re.compile(r"\b(?:secure_)?getenv\b|\bsetenv\b|\bputenv\b|\benviron\b")
    users = [str(p.relative_to(CSRC)) for p in native_files() if reads.search(p.read_text())]
    assert users == [], "read settings in runtime/config.py, and pass them on"


@pytest.mark.parametrize("folder", NATIVE)
def test_native_folder_includes_only_what_it_may(folder: str) -> None:
    for path in (p for p in native_files() if native_folder(p) == folder):
        for name in includes(path.read_text()):
            assert (CSRC / name).is_file(), f"{path.name} includes {name}: say it from csrc on"
            assert str(Path(name).parent) in {folder, *NATIVE[folder]}, (
                f"{path.name} includes {name}"
            )


def test_a_backend_is_a_folder_and_a_line_in_a_table() -> None:
    assert set(BACKENDS) == set(packed_functions.BACKENDS) <= NATIVE.keys()
    for path in (p for p in native_files() if native_folder(p) == ""):
        folders = {name.partition("/")[0] for name in includes(path.read_text()) if "/" in name}
        assert path.name == "backends.cc" or not folders & set(BACKENDS), path.name
    # Names of devices and of libraries of others may be said anywhere, and a backend's be the same.
    own = [
        name
        for name in BACKENDS
        if name not in {*packed_functions.DEVICES, *packed_functions.LIBRARIES}
    ]
    for path in native_files():
        named = [name for name in own if f'"{name}"' in path.read_text()]
        assert not named or native_folder(path) in named, f"{path.name} names {named}"
    for path in python_files():
        # An extra may have the name of a backend.
        code = re.sub(r"""install_extra\(['"]\w+['"]\)""", "", code_of(path))
        named = [name for name in own if re.search(rf"""['"]{name}['"]""", code)]
        assert (
            not named
            or path == PACKAGE / "packed_functions" / "constants_shared_with_native_library.py"
        ), f"{path} names {named}"


def test_native_code_knows_tvm_only_where_it_must() -> None:
    tvm_header = re.compile(r"#\s*include\s*<(tvm|dlpack)/")
    users = {str(p.relative_to(CSRC)) for p in native_files() if tvm_header.search(p.read_text())}
    assert {u for u in users if not u.startswith("disco/")} == {
        "register.cc",
        "constants_repeated_in_python.cc",
        "constants_repeated_in_python.h",
        "start_session_with_backend.h",
        "blas/attention_packed_function.h",
        "blas/batch_attention_packed_function.cc",
        "blas/batch_attention_packed_function.h",
        "blas/matmul_packed_function.cc",
        "blas/matmul_packed_function.h",
        "blas/tensor_view.h",
        "blas/kernel_threads.cc",
        "engine/serve_mpi_for_node_agent.h",
    }
    # Folders without TVM are compiled as a whole, but for these.
    (listed,) = re.findall(
        r"set\(TVM_IPC_SOURCES_WITH_TVM\s([^)]*)\)",
        (CSRC / "static_libraries_without_tvm.cmake").read_text(),
    )
    assert set(listed.split()) == {
        "blas/attention_packed_function.cc",
        "blas/batch_attention_packed_function.cc",
        "blas/kernel_threads.cc",
        "blas/matmul_packed_function.cc",
        "engine/serve_mpi_for_node_agent.cc",
    }


def test_only_register_names_packed_functions() -> None:
    packed_name = re.compile(r'"(runtime\.disco|tvm_ipc)\.\w+[^"]*"')
    users = {
        (str(path.relative_to(CSRC)), found[0])
        for path in native_files()
        for found in packed_name.finditer(path.read_text())
    }
    assert {user for user in users if user[0] != "register.cc"} == NAMED_ELSEWHERE


def test_the_kit_for_gpus_has_what_its_tests_import() -> None:
    tests = Path(__file__).resolve().parent
    workers = [path for path in (tests / "runtime").glob("*.py") if path.name[:5] != "test_"]
    pending = [*(tests / "gpu").glob("*.py"), tests / "conftest.py", *workers]
    found = set(pending)
    while pending:
        for name in imported(pending.pop().read_text()):
            for module in (name, name.rpartition(".")[0]):
                path = tests.parent / f"{module.replace('.', '/')}.py"
                if module.startswith("tests.") and path.exists() and path not in found:
                    found.add(path)
                    pending.append(path)
    brought = tuple(str(tests.parent / name) for name in kit.TESTS)
    assert not [path for path in found if not str(path).startswith(brought)]


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
    assert (
        "tvm_ipc.runtime.send_commands_and_raise_errors"
        in import_graph()["tvm_ipc.runtime.value_transfer"]
    )
    assert folder_of("tvm_ipc.spmd.rules.operator_rule_table") == "tvm_ipc.spmd.rules"
    assert folder_of("tvm_ipc.transform.report") == "tvm_ipc.transform.report"
    assert python_files()
    assert {native_folder(path) for path in native_files()} == {"", *NATIVE}
    assert list(includes('#include <x>\n# include "core/wait.h"')) == ["core/wait.h"]


def test_tables_of_packages_list_their_modules() -> None:
    """A table in the docstring of a package lists each module, under its name, in any order."""
    tables = 0
    for init in PACKAGE.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(init.read_text())) or ""
        listed = re.findall(r"^ {0,4}([a-z][a-z_0-9]*)(?: {2,}\S.*|)$", text, re.MULTILINE)
        if len(listed) < 2:
            continue
        tables += 1
        modules = {path.stem for path in init.parent.glob("*.py")} - {"__init__"}
        modules |= {path.parent.name for path in init.parent.glob("*/__init__.py")}
        assert (init, sorted(listed)) == (init, sorted(modules))
    assert tables > 5
