# SPDX-License-Identifier: Apache-2.0
"""Sessions over NCCL, on doubles of CUDA and of NCCL; and what the real NCCL does without a GPU.

`tests/native/test_nccl.cc` has every collective, type and size, and what goes wrong in calls.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cuda_double
from tests.child_python import output_of_code
from tests.shared_memory_files import FOLDER, shared_memory_files, wait_until_gone
from tvm_ipc.packed_functions import LIBRARIES

PREAMBLE = """
import os, signal
import numpy as np
import tvm
import tvm_ipc

def error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
        session.sync()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

def session_of(workers, **options):
    options = {"backend": "nccl", **options}
    return tvm_ipc.Session(workers, device="cuda", timeout=60, **options)
"""

SESSION = """
with session_of(4, threads=threads, num_groups=2) as session:
    x = session.put(np.arange(8, dtype="float32"))
    out = session.empty((8,), "float32")
    session.allreduce(x, out, in_group=False)
    print(session.get(out, rank=2).tolist())
    session.allreduce(x, out, "max")
    print(session.get(out, rank=3).tolist())
    part = session.empty((2,), "float32")
    session.reduce_scatter(x, part, in_group=False)
    print([session.get(part, rank).tolist() for rank in range(4)])
    everything = session.empty((4, 8), "float32")
    gather = session.get_global_func("runtime.disco.nccl.allgather")
    session.call_packed(gather, x, False, everything)
    print(session.get(everything, rank=1).sum())
    storage = session.get_global_func("runtime.disco.cuda_ipc.alloc_storage")
    session.call_packed(storage, tvm.runtime.ShapeTuple([1 << 10]), tvm.DataType("uint8"))
    session.sync()
    small = session.empty((4,), "int16")
    print(error_of(session.allreduce, small, small))
    session.allreduce(x, out, in_group=False)
    print(session.get(out, rank=0).tolist())
"""

OTHER = """
session = tvm.runtime.disco.ProcessSession(2)
session.init_ccl("nccl", 0, 1)
x = session.empty((3,), "float32")
session.copy_to_worker_0(tvm.runtime.tensor(np.array([1, 2, 3], "float32")), x)
out = session.empty((3,), "float32")
session.broadcast_from_worker0(x, out)
session.allreduce(out, x)
session.sync_worker_0()
print(x.debug_get_from_remote(0).numpy().tolist(), x.debug_get_from_remote(1).numpy().tolist())
session.shutdown()
"""

PROGRAM = """
from tvm.script import ir as I, relax as R

@I.ir_module
class Model:
    @R.function
    def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 4), "float32")):
        with R.dataflow():
            part = R.matmul(x, w)
            total = R.ccl.allreduce(part, "sum")
            every = R.ccl.allgather(total, 2)
            R.output(every)
        return every

from tvm.target import Target
target = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
with target:
    program = tvm.compile(
        Model, target=target,
        relax_pipeline=tvm_ipc.get_pipeline(target, world_size=2, fuse_epilogue=False))
x, w = np.random.rand(4, 16).astype("float32"), np.random.rand(16, 4).astype("float32")
with session_of(2) as session:
    main = session.load_vm_module(program)["main"]
    for _ in range(3):
        result = main(session.scatter(np.stack(np.split(x, 2, axis=1))),
                      session.scatter(np.stack(np.split(w, 2, axis=0))))
        np.testing.assert_allclose(session.get(result, rank=1), np.concatenate([x @ w] * 2), 1e-5)
print("right")
"""

DEATH = """
session = session_of(3)
session.sync()
os.kill(session.pids[1], signal.SIGKILL)
x = session.empty((8,), "float32") if session.usable else None
print(error_of(session.allreduce, x, x))
session.close()
"""

FAULT = """
with session_of(2) as session:
    x = session.put(np.ones(4, "float32"))
    print(error_of(session.allreduce, x, x))
    print(error_of(session.allreduce, x, x))
"""


def run(code: str, **settings: object) -> str:
    # What compiles nothing starts in half the time.
    first = "" if code is PROGRAM else "import tvm_ipc\ntvm_ipc.runtime_only()\n"
    return cuda_double.run(first + PREAMBLE + code, devices=4, **settings)[0]


@pytest.mark.parametrize("threads", [False, True])
def test_a_session(threads: bool) -> None:
    lines = run(f"threads = {threads}" + SESSION).splitlines()
    assert lines[0] == str([4.0 * i for i in range(8)])
    assert lines[1] == str([1.0 * i for i in range(8)])
    assert lines[2] == "[[0.0, 4.0], [8.0, 12.0], [16.0, 20.0], [24.0, 28.0]]"
    assert lines[3] == str(4.0 * sum(range(8)))
    assert "TypeError: allreduce: NCCL does not do sum of int16: it has no such type" in lines[4]
    assert lines[5] == lines[0]


def test_as_programs_of_other_builds_begin() -> None:
    assert run(OTHER) == "[2.0, 4.0, 6.0] [2.0, 4.0, 6.0]\n"


def test_a_program_whose_buffers_peers_would_map() -> None:
    assert run(PROGRAM) == "right\n"


def test_a_worker_that_dies() -> None:
    assert "rank 1" in run(DEATH)


def test_killed_workers_leave_no_files() -> None:
    """Ours have none to leave, and the double of NCCL removes those of the dead."""
    prefixes = ("tvm_ipc", "nccl_double")
    before = shared_memory_files(prefixes)
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
    of_the_dead = FOLDER / f"nccl_double.{dead.stdout.strip()}.0123"
    of_the_dead.touch()
    for backend in ("nccl", "cuda"):
        run(f"""
session = session_of(3, backend={backend!r})
x = session.empty((8,), "float32")
session.allreduce(x, x)
for pid in session.pids[1:]:
    os.kill(pid, signal.SIGKILL)
print(error_of(session.sync))
session.close()
""")
    assert not of_the_dead.exists()
    wait_until_gone(shared_memory_files(prefixes) - before)


def test_a_call_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_FAIL", "ncclAllReduce:1:3")
    first, second = run(FAULT).splitlines()
    assert "RuntimeError: allreduce(sum" in first
    assert "ncclAllReduce: internal error: ncclAllReduce was told to fail" in first
    assert second == "no error"


def test_a_version_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DOUBLE_VERSION", "21805")
    out = run("print(error_of(session_of, 2))")
    assert "NCCL 2.18.5" in out
    assert "is too old, needed is 2.19.0 or newer; the extra `cuda` of tvm-ipc installs it" in out


def test_a_device_for_each_worker() -> None:
    out = run("print(error_of(session_of, 2, device_ids=[1, 1]))")
    assert "NCCL wants a device for each worker, and two would share cuda:1" in out


def wheel() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    places = [
        Path(one, LIBRARIES["nccl"]) for one in (spec and spec.submodule_search_locations) or ()
    ]
    return next((place for place in places if place.is_file()), None)


@pytest.mark.skipif(wheel() is None, reason="nvidia-nccl-cu13 is not installed")
def test_the_real_one_without_a_gpu() -> None:
    code = """
import ctypes, json, sys, tvm_ffi, tvm_ipc
tvm_ipc.Session
found = json.loads(tvm_ffi.get_global_func("tvm_ipc.nccl.info")())
assert found["version"] >= 21900 and found["path"] == sys.argv[1], found
identity = ctypes.create_string_buffer(128)
assert ctypes.CDLL(sys.argv[1]).ncclGetUniqueId(identity) == 0
assert any(identity.raw)
print(tvm_ffi.get_global_func("tvm_ipc.refusal")("nccl", tvm_ffi.Shape([0, 1])))
"""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    said = output_of_code(code, str(wheel()), environment=hidden, compiler=True)
    assert "NVIDIA's driver" in said


def test_nothing_is_loaded_before_it_is_asked_for(run_python: Callable[..., str]) -> None:
    code = "import tvm_ipc; session = tvm_ipc.Session(1, threads=True); session.close()"
    code += "; print('libnccl' in open('/proc/self/maps').read())"
    assert run_python(code).strip() == "False"
