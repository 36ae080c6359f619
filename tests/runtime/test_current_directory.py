# SPDX-License-Identifier: Apache-2.0
"""No child process runs a file of the current directory, in whatever way the package starts it.

A program runs in a directory that has a file for each module of the standard library and for the
packages that children import. Each file writes down who imported it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_ipc.errors import IPCError
from tvm_ipc.nodes.find_mpi_installation import find_mpi
from tvm_ipc.runtime import start_child_process

PACKAGE = Path(start_child_process.__file__).parents[1]
#: Writes down its name and the command line of the process, with nothing but the interpreter.
TRAP = """
import posix, sys
report = posix.open({report!r}, posix.O_WRONLY | posix.O_APPEND)
posix.write(report, (__name__ + " in " + repr(sys.orig_argv) + "\\n").encode())
posix.close(report)
raise ImportError("a trap")
"""
PACKAGES = (
    "tvm",
    "tvm_ffi",
    "tvm_ipc",
    "numpy",
    "ml_dtypes",
    "mpi4py",
    "torch",
    "scipy_openblas64",
)
#: A module beside the program, which workers find there.
BESIDE = """
import tvm_ffi

@tvm_ffi.register_global_func("tests.beside", override=True)
def beside() -> str:
    return __file__

def answer(given, tell):
    return [given, __file__]
"""
FOUND = """
session.import_python_module("beside_the_program")
found = session.get_global_func("tests.beside")()
assert found.debug_get_from_remote(session.num_workers - 1) == beside_the_program.__file__
"""
SESSION = "with tvm_ipc.Session(2) as session:\n" + FOUND.replace("\n", "\n    ")
DISCO = """
from tvm.runtime import disco
session = disco.ProcessSession(2)
session.init_ccl("shm")
session.import_python_module("beside_the_program")
session._sync_all()  # raises what a worker raised
session.shutdown()
"""
RUN_IN_CHILD = """
from tvm_ipc.runtime.subprocess_call import run_in_child
assert run_in_child("beside_the_program:answer", 7) == [7, beside_the_program.__file__]
"""
FIND_MPI = "from tvm_ipc.nodes.find_mpi_installation import find_mpi\nfind_mpi()"
NODES = SESSION.replace("Session(2)", "Session(3, hosts=2, timeout=100)")
DOCTOR = """
from tvm_ipc.tools.command_line import main
assert main(["doctor"]) == 0
"""
WAYS = {
    "session": SESSION,
    "disco": DISCO,
    "run_in_child": RUN_IN_CHILD,
    "find_mpi": FIND_MPI,
    "nodes": NODES,
    "doctor": DOCTOR,
}
WANT_MPI = ("find_mpi", "nodes")
#: Each function that starts a process, and what shows that it runs no file of the directory: one of
#: the ways above, or the program that it starts, which is not a Python of ours.
PLACES = {
    "runtime/start_child_process.py:start_python": "a child of one of the functions below",
    "runtime/process_pool.py:start_worker": "a worker of one of the two below",
    "runtime/process_pool.py:__init__": "session",
    "runtime/subprocess_call.py:_start": "run_in_child",
    "runtime/disco_processes.py:__init__": "disco",
    "runtime/forked_call.py:call_in_fork": "a fork, which starts no program",
    "nodes/agent.py:_start_worker": "nodes",
    "nodes/agent.py:watched": "nodes",
    "nodes/mpiexec_launcher.py:__init__": "nodes",
    "nodes/find_mpi_installation.py:_run": "find_mpi",
    "nodes/node_command_under_mpiexec.py:_run_rank_0": "the command of tvm-ipc node",
    "tools/doctor/cxx_compiler.py:_run": "the C++ compiler",
}
#: Calls that start a process, by the last part of their name.
STARTS = {"Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}
STARTS |= {
    "create_subprocess_exec",
    "create_subprocess_shell",
    "system",
    "popen",
    "posix_spawn",
    "posix_spawnp",
    "fork",
    "forkpty",
}
OWN_STARTS = {"ChildProcess", "start_python", "start_worker"}
OWNERS = {"os", "subprocess", "pty", "asyncio"}
MODULES = {"multiprocessing", "concurrent.futures.process", "pty"}


def start(directory: Path, program: str, *flags: str) -> None:
    """Run a program among traps, and fail if a process has gone into one."""
    traps, home, report = directory / "traps", directory / "home", directory / "report"
    traps.mkdir()
    home.mkdir()
    report.write_text("")
    names = {*sys.stdlib_module_names, *PACKAGES} - set(sys.builtin_module_names)
    for name in names:
        (traps / f"{name}.py").write_text(TRAP.format(report=str(report)))
    (home / "beside_the_program.py").write_text(BESIDE)
    script = home / "program.py"
    beginning = f"import sys\nsys.path.append({str(home)!r})\n"  # which -I leaves out
    beginning += "import tvm_ipc, beside_the_program\n"
    script.write_text(beginning + program)
    # Our own tests have it set, which is what users do not.
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, *flags, str(script)],
        cwd=traps,
        env={**environment, "TVM_USE_RUNTIME_LIB": "1", "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert report.read_text() == ""
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize("flags", ["", pytest.param("-I", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_no_child_runs_a_file_of_the_current_directory(
    way: str, flags: str, tmp_path: Path
) -> None:
    if way in WANT_MPI:
        try:
            find_mpi()
        except IPCError as error:
            pytest.skip(str(error))
    start(tmp_path, WAYS[way], *flags.split())


def starts(source: str) -> set[str]:
    """Return the functions that start a process; a class body or a module is ""."""
    found = set()

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            *owner, name = ast.unparse(node.func).split(".")
            of_os = owner == ["os"] and name.startswith(("exec", "spawn"))
            if of_os or name in OWN_STARTS or (owner and owner[-1] in OWNERS and name in STARTS):
                found.add(function)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def test_every_place_that_starts_a_process_is_known() -> None:
    """A new one is added to `PLACES`, and to the ways above where it starts a Python."""
    found, imported, interpreters = set(), set(), set()
    for path in PACKAGE.rglob("*.py"):
        name, source = str(path.relative_to(PACKAGE)), path.read_text()
        if name.startswith("examples/"):  # in wheels; programs of users start what they like
            continue
        found |= {f"{name}:{function}" for function in starts(source)}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {str(node.module), *(f"{node.module}.{a.name}" for a in node.names)}
            elif isinstance(node, ast.Attribute) and node.attr in (
                "executable",
                "_base_executable",
            ):
                interpreters.add(name)
    assert found == PLACES.keys()
    assert not imported & MODULES
    assert {way for way in PLACES.values() if " " not in way} == WAYS.keys() - {"doctor"}
    # The command lines of `starting`; the others name the interpreter in facts and messages.
    assert interpreters == {
        "runtime/start_child_process.py",
        "nodes/agent.py",
        "nodes/find_mpi_installation.py",
    }


def test_the_native_library_starts_no_process() -> None:
    calls = re.compile(r"\b(exec[lv]p?e?|fexecve|popen|posix_spawnp?|system|v?fork|clone3?)\(")
    sources = [path for path in (PACKAGE / "csrc").rglob("*") if path.suffix in (".cc", ".h")]
    assert sources or not (PACKAGE / "csrc").exists()  # an installed package has none
    assert [str(path) for path in sources if calls.search(path.read_text())] == []


def names_of_trapped(directory: Path, command: list[str], **more: object) -> str:
    """Return what a command prints in a directory that has a trap for what it imports."""
    for name in ("json", "runpy", "signal", "readline", "rlcompleter"):
        (directory / f"{name}.py").write_text("raise SystemExit('a trap')")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=True, **more
    )
    return done.stdout


@pytest.mark.parametrize("safe_path", [start_child_process._SAFE_PATH, False])
def test_without_the_flag_of_python_3_11(
    safe_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.10 has no -P."""
    monkeypatch.setattr(start_child_process, "_SAFE_PATH", safe_path)
    text = "import json, sys; print(json.__file__, sys.argv[1:])"
    assert (
        names_of_trapped(tmp_path, start_child_process.python_text(text)) == f"{json.__file__} []\n"
    )
    with start_child_process.passed(["/no/such/place", *sys.path]) as path:
        command = start_child_process.python_with_path(
            path, text + "; print(sys.path[0])", 1, "a b"
        )
        printed = names_of_trapped(tmp_path, command, pass_fds=(path,))
    assert printed == f"{json.__file__} ['1', 'a b']\n/no/such/place\n"
    command = [*start_child_process.python_module("json.tool"), "--help"]
    assert names_of_trapped(tmp_path, command).startswith("usage: ")
    assert "\n" not in "".join(command)


@pytest.mark.parametrize(
    "flags",
    [
        ["-E", "-s", "-B"],
        ["-I"],
        ["-OO", "-W", "ignore::UserWarning", "-X", "utf8", "-X", "pycache_prefix=CACHE"],
        ["-S", "-bb"],
    ],
)
def test_children_inherit_the_flags_of_the_interpreter(flags: list[str], tmp_path: Path) -> None:
    show = "import sys; print(sys.flags, sys.warnoptions, sys._xoptions)"
    program = tmp_path / "program.py"
    program.write_text(
        f"import importlib.util, subprocess, sys\n{show}\n"
        f"path = {start_child_process.__file__!r}\n"
        "spec = importlib.util.spec_from_file_location('start_child_process', path)\n"
        "children = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(children)\n"
        "sys.stdout.flush()\n"
        "with children.passed(children.import_path()) as path:\n"
        f"    command = children.python_with_path(path, {show!r})\n"
        "    subprocess.run(command, pass_fds=(path,), check=True)\n"
    )
    environment = {"PYTHONWARNINGS": "ignore::ImportWarning", "LC_ALL": "C.UTF-8"}
    flags = [flag.replace("CACHE", str(tmp_path / "cache")) for flag in flags]
    done = subprocess.run(
        [sys.executable, *flags, program], env=environment, capture_output=True, text=True
    )
    parent, child = done.stdout.splitlines()
    if start_child_process._SAFE_PATH:
        parent = parent.replace("safe_path=False", "safe_path=True")
    assert parent == child, done.stderr


def test_the_import_path_is_that_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry of an interactive program is its directory, whatever a child's is."""
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "below", "__editable__.hook", "/no/such"])
    assert start_child_process.import_path() == [
        *(str(tmp_path), str(tmp_path / "below")),
        *("__editable__.hook", "/no/such"),
    ]
