# SPDX-License-Identifier: Apache-2.0
"""Kernels on fibers: barriers, warps, shared memory, and what is missing without them."""

from __future__ import annotations

import pytest

from tests import cuda_double

HEADER = """
import sys, struct
from tests.cuda_double.driver_in_python import *
context()
def ints(pointer, count):
    return list(struct.unpack(str(count) + "i", get(pointer, 4 * count)))
"""


def run(code: str, **settings: object) -> cuda_double.Report:
    return cuda_double.run(HEADER + code, **settings)[1]


@pytest.mark.parametrize("shuffle", [0, 1])
@pytest.mark.parametrize("memory", ["__shared__ int all[1024];", "extern __shared__ int all[];"])
def test_barriers_and_shared_memory(memory: str, shuffle: int) -> None:
    run(
        f"""
source = '''extern "C" __global__ void __launch_bounds__(1024) turn(int* out, int* sum) {{
  {memory}
  int me = threadIdx.x, n = blockDim.x;
  all[me] = blockIdx.x * 1000 + me;
  BARRIER
  out[blockIdx.x * n + me] = all[n - 1 - me];
  for (int step = n / 2; step > 0; step /= 2) {{
    __syncthreads();
    if (me < step) all[me] += all[me + step];
  }}
  if (me == 0) atomicAdd(sum, all[0]);
}}'''
[right] = kernels(source.replace("BARRIER", "__syncthreads();"), "turn")
[wrong] = kernels(source.replace("BARRIER", ""), "turn")
out, total = device_memory(4 * 3 * 256), device_memory(4)
expected = [block * 1000 + 255 - i for block in range(3) for i in range(256)]
put(total, bytes(4))
launch(right, 3, 256, out, total, shared=4096)
assert ints(out, 3 * 256) == expected
assert ints(total, 1) == [sum(expected)]
launch(wrong, 3, 256, out, total, shared=4096)
assert ints(out, 3 * 256) != expected, "a missing barrier shows"
""",
        shuffle=shuffle,
    )


@pytest.mark.parametrize("shuffle", [0, 1])
def test_lanes_of_a_warp(shuffle: int) -> None:
    run(
        """
[lanes] = kernels('''extern "C" __global__ void lanes(int* out) {
  int me = threadIdx.x, n = blockDim.x;
  unsigned mask = __activemask();
  out[me] = __shfl_down_sync(mask, me, 3);
  out[n + me] = __shfl_xor_sync(mask, me, 1, 8);
  out[2 * n + me] = __shfl_sync(mask, me, 5, 8);
  out[3 * n + me] = (int)__ballot_sync(mask, me % 3 == 0);
  double sum = me;
  for (int by = 16; by > 0; by /= 2) sum += __shfl_down_sync(mask, sum, by);
  out[4 * n + me] = (int)sum;
}''', "lanes")
out = device_memory(4 * 5 * 64)
launch(lanes, 1, 64, out)
found = ints(out, 5 * 64)
down, across, part, ballot, sums = (found[i * 64 : i * 64 + 64] for i in range(5))
assert down == [i + 3 if i % 32 < 29 else i for i in range(64)]
assert across == [i ^ 1 for i in range(64)]
assert part == [i // 8 * 8 + 5 for i in range(64)]
votes = [sum(1 << i for i in range(32) if (first + i) % 3 == 0) for first in (0, 32)]
assert [vote & 0xffffffff for vote in ballot[::32]] == votes
assert sums[::32] == [sum(range(32)), sum(range(32, 64))]
""",
        shuffle=shuffle,
    )


def test_threads_that_can_never_meet() -> None:
    report = run(
        """
[never] = kernels('''extern "C" __global__ void never(int* p) {
  if (threadIdx.x < 16) __syncthreads(); else __syncwarp();
}''', "never")
launch(never, 1, 32, 0)
refused(Code.FAILED, "cuCtxSynchronize")
"""
    )
    assert report.processes == 1


def test_threads_that_have_ended_are_not_waited_for() -> None:
    run(
        """
[some] = kernels('''extern "C" __global__ void some(int* out) {
  if (threadIdx.x % 2) return;
  __syncthreads();
  atomicAdd(out, 1);
}''', "some")
out = device_memory(4)
put(out, bytes(4))
launch(some, 2, 100, out)
assert ints(out, 1) == [100]
"""
    )


def test_more_shared_memory_than_was_asked_for() -> None:
    run(
        """
[past] = kernels('''extern "C" __global__ void past(int at) {
  extern __shared__ char memory[];
  memory[at] = 1;
}''', "past")
launch(past, 1, 1, c_int(127), shared=128)
cuda.cuCtxSynchronize()
launch(past, 1, 1, c_int(128), shared=128)
refused(Code.ADDRESS, "cuCtxSynchronize")
"""
    )


def test_a_deep_stack_ends_the_kernel_alone() -> None:
    run(
        """
[deep] = kernels('''
__noinline__ int down(volatile int* at, int n) { volatile int a[256]; a[n % 256] = n;
  return n == 0 ? 0 : down(a, n - 1) + a[n % 256]; }
extern "C" __global__ void deep(int* out, int n) { *out = down(out, n); }''', "deep")
out = device_memory(4)
launch(deep, 1, 1, out, c_int(10))
assert ints(out, 1) == [55]
launch(deep, 1, 1, out, c_int(100000))
refused(Code.ADDRESS, "cuCtxSynchronize")
"""
    )


def test_two_kernels_wait_for_each_other() -> None:
    run(
        """
[play] = kernels('''extern "C" __global__ void play(volatile int* mine, volatile int* other) {
  for (int round = 1; round <= 50; ++round) {
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence_system();
      *mine = round;
      while (*other < round) __nanosleep(50);
    }
  }
}''', "play")
a, b = device_memory(4), device_memory(4)
put(a, bytes(4))
put(b, bytes(4))
one, two = stream(1), stream(1)
launch(play, 1, 64, a, b, on=one)
launch(play, 1, 64, b, a, on=two)
cuda.cuCtxSynchronize()
assert ints(a, 1) == ints(b, 1) == [50]
"""
    )


def test_sixteen_bit_floats() -> None:
    """Every number survives; what is between two is rounded as NumPy rounds it."""
    run(
        """
import numpy as np
[through] = kernels('''
#include <cuda_fp16.h>
extern "C" __global__ void through(half* back, half* from, half* rounded, float* wide, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    back[i] = __float2half((float)from[i]);
    rounded[i] = half(wide[i]);
  }
}''', "through")
n = 1 << 16
every = np.arange(n, dtype="uint16")
rng = np.random.default_rng(0)
wide = (rng.standard_normal(n) * 10.0 ** rng.integers(-9, 7, n)).astype("float32")
wide[:4096] = (np.arange(4096, dtype="float32") + 0.5) * 2.0 ** -24
back, source, rounded, numbers = (device_memory(4 * n) for _ in range(4))
put(source, every.tobytes())
put(numbers, wide.tobytes())
launch(through, 1, 64, back, source, rounded, numbers, c_int(n))
found = np.frombuffer(get(back, 2 * n), "uint16")
same = (found == every) | np.isnan(every.view("float16"))
assert same.all(), every[~same]
with np.errstate(over="ignore"):
    expected = wide.astype("float16")
np.testing.assert_array_equal(np.frombuffer(get(rounded, 2 * n), "float16"), expected)
"""
    )


def test_blocks_wait_for_each_other_as_far_as_there_is_room() -> None:
    """The first block waits for the last one; a driver would run both at a time."""
    run(
        """
[meet] = kernels('''extern "C" __global__ void meet(volatile int* all, int* out) {
  __shared__ int mine[32];
  int me = blockIdx.x, n = gridDim.x;
  mine[threadIdx.x] = me * 100 + threadIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    all[n - 1 - me] = 1;
    while (all[me] == 0) __nanosleep(50);
  }
  __syncthreads();
  out[me * 32 + threadIdx.x] = mine[31 - threadIdx.x];
}''', "meet")
n = 40
flags, out = device_memory(4 * n), device_memory(4 * n * 32)
put(flags, bytes(4 * n))
launch(meet, n, 32, flags, out)
expected = [block * 100 + 31 - i for block in range(n) for i in range(32)]
assert ints(out, n * 32) == expected
"""
    )
