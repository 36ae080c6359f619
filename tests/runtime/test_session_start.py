# SPDX-License-Identifier: Apache-2.0
"""Sessions start, or say at once why not, whatever the process around them is like: strange paths,
no descriptors, no memory, calls that are refused, strangers; and children have no part in them."""

from __future__ import annotations

import os
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

import tvm_ipc
from tests.child_python import output_of_code
from tests.runtime.disco_kinds import on_workers

QUICK = """
import time
before = time.monotonic()
try:
    with tvm_ipc.Session(2) as session:
        said = "started"
except tvm_ipc.errors.IPCError as error:
    said = f"IPCError: {error}"
assert time.monotonic() - before < 60
print(said)
"""


def run(code: str) -> str:
    """The output of a program, which must end as it should."""
    code = "import os, sys\nimport tvm_ipc\ntvm_ipc.Session\n" + textwrap.dedent(code)
    return output_of_code(code, timeout=100)


def test_import_paths_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than an argument may hold, and what Python itself passes over."""
    (tmp_path / "new\nline").mkdir()
    (tmp_path / "new\nline" / "found_in_workers.py").write_text("")
    many = [f"/no/such/place/{i:04}/{'x' * 100}" for i in range(1600)]
    strange: list[Any] = [Path("/no/such"), None, 7, "/lone/\udcff", "{braces}"]
    monkeypatch.setattr(sys, "path", [*many, *strange, str(tmp_path / "new\nline"), *sys.path])
    with tvm_ipc.Session(2) as session:
        session.import_python_module("found_in_workers")


def test_workers_start_without_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM imports it wherever it is installed. What wants it in a worker can import it."""
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "asks_for_torch.py").write_text(
        "import sys\nfrom tvm_ffi import register_global_func\n"
        "@register_global_func('tests.has_torch', override=True)\n"
        "def has_torch() -> bool:\n    return 'torch' in sys.modules\n"
        "@register_global_func('tests.import_torch', override=True)\n"
        "def import_torch() -> str:\n    import torch\n    return torch.__file__\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    here = types.ModuleType("torch")  # worker 0 is a thread of this process
    here.__file__ = ""
    monkeypatch.setitem(sys.modules, "torch", here)
    with tvm_ipc.Session(2) as session:
        session.import_python_module("asks_for_torch")
        assert on_workers(session.get_global_func("tests.has_torch")(), [1]) == [False]
        found = session.get_global_func("tests.import_torch")()
        assert on_workers(found, [1]) == [str(tmp_path / "torch.py")]


def test_environment_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_STRANGE", "new\nline = \udcff")
    monkeypatch.setenv("TESTS_LONG", "x" * 100_000)
    with tvm_ipc.Session(2) as session:
        session.sync()


@pytest.mark.slow
@pytest.mark.parametrize("files", [8, 10, 12, 13, 14, 16])
def test_few_descriptors(files: int) -> None:
    """Wherever they run out, the start ends at once and says so."""
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))\n"
    said = run(limit + QUICK)
    assert "started" in said or "Too many open files" in said or "RLIMIT_NOFILE" in said
    assert "another machine" not in said


def test_little_memory() -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
    assert "a higher RLIMIT_AS helps" in run(limit + QUICK) or os.sysconf("SC_PHYS_PAGES") < 1 << 19


def test_cores_that_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> Any:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    with tvm_ipc.Session(2, threads=True) as session:
        session.sync()


STRANGERS = """
import contextlib, socket, threading
from tvm.runtime import disco

stop = threading.Event()
kept = []

def bother():
    while not stop.is_set():
        for line in open("/proc/net/unix"):
            name = line.split()[-1]
            if not name.startswith("@tvm_ipc."):
                continue
            for words in (b"", b"x", b"GET / HTTP/1.1\\r\\n" * 9, bytes(1000)):
                with contextlib.suppress(OSError):
                    stranger = socket.socket(socket.AF_UNIX)
                    stranger.settimeout(0.1)
                    stranger.connect("\\0" + name[1:])
                    stranger.send(words)
                    kept.append(stranger)
            del kept[:-50]

threading.Thread(target=bother, daemon=True).start()
with tvm_ipc.Session(2) as session:
    session.sync()
own = disco.ProcessSession(2)
own.init_ccl("shm")
own.shutdown()
stop.set()
print("started", len(kept) > 0)
"""


def test_strangers_fail_nothing() -> None:
    assert run(STRANGERS) == "started True\n"


# ---- children -------------------------------------------------------------------------------


def test_a_child_may_have_a_session_of_its_own() -> None:
    """Worker 0 is a thread of the parent, at its first collective when the child is forked."""
    out = run(
        """
        with tvm_ipc.Session(2) as session:
            session.put([1.0])
            child = os.fork()
            if child == 0:
                with tvm_ipc.Session(2) as own:
                    print(own.get(own.put([2.0]), 1).tolist(), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
        """
    )
    assert out == "[2.0]\n"


FORKING = """
import contextlib, multiprocessing, os, threading, time
import tvm_ffi

everyone, turn = threading.Barrier(3), threading.Lock()

@contextlib.contextmanager
def one_fork_at_a_time(threads):
    # In Python before 3.12 a child waits for ever if it is forked while another thread enters
    # Python from elsewhere, as threads of ranks do: so all have entered before one forks.
    process = os.getpid()
    if threads:
        everyone.wait()
    with turn:
        yield
    if threads and os.getpid() == process:
        everyone.wait()

@tvm_ffi.register_global_func("tests.fork_and_come_back")
def fork_and_come_back(threads):
    with one_fork_at_a_time(threads):
        child = os.fork()
        if child == 0:
            return -1
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

@tvm_ffi.register_global_func("tests.fork_a_bystander")
def fork_a_bystander():
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return child

def in_child(queue):
    try:
        tvm_ffi.get_global_func("tvm_ipc.arena_stats")()
    except RuntimeError as error:
        queue.put(str(error))

@tvm_ffi.register_global_func("tests.use_in_child")
def use_in_child(threads):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=in_child, args=(queue,))
    with one_fork_at_a_time(threads):
        process.start()
        said = queue.get()
        process.join()
    return said

@tvm_ffi.register_global_func("tests.inherited")
def inherited():
    import subprocess, sys
    return subprocess.run(
        [sys.executable, "-c", "import os; print(sorted(map(int, os.listdir('/proc/self/fd'))))"],
        close_fds=False, capture_output=True, text=True,
    ).stdout
"""


@pytest.fixture
def forking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "forking_functions.py").write_text(FORKING)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("threads", [False, True])
def test_a_child_is_no_worker(
    forking: Path, threads: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with tvm_ipc.Session(3, threads=threads, timeout=60) as session:
        session.import_python_module("forking_functions")
        for _ in range(3):
            came_back = session.get_global_func("tests.fork_and_come_back")(threads)
            assert on_workers(came_back, 3) == [1, 1, 1]
        said = on_workers(session.get_global_func("tests.use_in_child")(threads), 3)
        refused = "a forked process is not a worker and cannot use the session"
        assert all(refused in str(one) for one in said)
        x = session.put([1.0])
        session.allreduce(x, x)
        assert [float(one[0]) for one in on_workers(x, 3)] == [3.0] * 3
    assert capfd.readouterr().err.count("returned from the function and is ended here") == 9


def test_a_child_does_not_hide_a_death(forking: Path) -> None:
    with pytest.raises(tvm_ipc.errors.WorkerDiedError), tvm_ipc.Session(2) as session:
        session.import_python_module("forking_functions")
        bystanders = on_workers(session.get_global_func("tests.fork_a_bystander")(), 2)
        try:
            os.kill(session.pids[1], 9)
            session.sync()
        finally:
            for bystander in bystanders:
                os.kill(bystander, 9)


def test_programs_that_a_worker_starts_inherit_nothing(forking: Path) -> None:
    with tvm_ipc.Session(2) as session:
        session.import_python_module("forking_functions")
        inherited = session.get_global_func("tests.inherited")()
        # And the one that lists the folder.
        assert str(inherited.debug_get_from_remote(1)) == "[0, 1, 2, 3]\n"
