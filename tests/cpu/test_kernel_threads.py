# SPDX-License-Identifier: Apache-2.0
"""Kernels of TVM run on the threads of tvm_ipc in modules that are loaded after it."""

from __future__ import annotations

from tests import child_python

PROGRAM = """
import os
import time
import numpy as np, tvm, tvm_ipc

def tensor(size):
    return tvm.runtime.tensor(np.arange(size, dtype="float32"))

def kernel(text):
    module = tvm.script.from_source("@I.ir_module\\nclass M:\\n" + text)
    return tvm.compile(module, target="llvm")["main"]

def number_of_threads():
    return len(os.listdir("/proc/self/task"))

add = kernel('''
    @T.prim_func
    def main(a: T.Buffer((100,), "float32"), b: T.Buffer((100,), "float32")):
        for i in T.parallel(100):
            assert a[i] < T.float32(100), "a value is too large"
            b[i] = a[i] + T.float32(1)
''')
sum_of_results = kernel('''
    @T.prim_func
    def main(
        a: T.Buffer((3,), "float32"), b: T.Buffer((3,), "float32"), c: T.Buffer((3,), "float32")
    ):
        T.attr({"pragma_parallel_launch_point": 1})
        with T.attr({"pragma_parallel_barrier_when_finish": 1}):
            for i in T.parallel(3):
                b[i] = a[i] + T.float32(1)
        for i in T.parallel(3):
            c[i] = b[0] + b[1] + b[2]
''')
threads = number_of_threads()
cores = os.sched_getaffinity(0)
x, y = tensor(100), tensor(100)

def check_add():
    y.copyfrom(np.zeros(100, "float32"))
    add(x, y)
    np.testing.assert_array_equal(y.numpy(), np.arange(1, 101, dtype="float32"))
"""


def output_of(code: str) -> list[str]:
    """Run a program with three threads in a process of its own."""
    done = child_python.run_code(
        PROGRAM + code, compiler=True, environment={"TVM_NUM_THREADS": "3"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_helper_threads_are_not_bound_to_cores() -> None:
    out = output_of("""
for _ in range(1000):
    check_add()
print(number_of_threads() - threads)
# A helper that has not run since it was woken up is still kept away from the core of its caller.
deadline = time.monotonic() + 30
while any(os.sched_getaffinity(int(i)) != cores for i in os.listdir("/proc/self/task")):
    assert time.monotonic() < deadline, "a thread stays bound"
    time.sleep(0.01)
""")
    assert out == ["2"]


def test_an_error_in_a_task_is_raised() -> None:
    out = output_of("""
large = tvm.runtime.tensor(np.full(100, 1000, "float32"))
for _ in range(100):
    try:
        add(large, y)
    except RuntimeError as error:
        assert "a value is too large" in str(error), error
    else:
        raise SystemExit("no error")
    check_add()
print("ok")
""")
    assert out == ["ok"]


def test_tasks_wait_for_each_other_at_a_barrier() -> None:
    out = output_of("""
b, c = tensor(3), tensor(3)
for round in range(1000):
    b.copyfrom(np.full(3, -1, "float32"))
    sum_of_results(tensor(3), b, c)
    assert c.numpy().tolist() == [6, 6, 6], (round, c.numpy())
print("ok")
""")
    assert out == ["ok"]


def test_kernels_run_in_forked_children_and_several_threads() -> None:
    out = output_of("""
import threading
check_add()
child = os.fork()
if child == 0:
    check_add()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0

def work():
    own = tensor(100)
    for _ in range(200):
        add(x, own)
        assert own.numpy().tolist() == list(range(1, 101))
    done.append(1)

done = []
workers = [threading.Thread(target=work) for _ in range(3)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
print(len(done))
""")
    assert out == ["3"]
