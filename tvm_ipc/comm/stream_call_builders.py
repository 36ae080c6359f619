# SPDX-License-Identifier: Apache-2.0
"""Functions for programs that run kernels on several streams of a GPU.

    comm.set_stream(1)    # what follows runs on stream 1 of the rank
    comm.wait_stream(0)   # after everything that is on stream 0 so far
    ...
    comm.set_stream(0)
    comm.wait_stream(1)

The functions return calls of packed functions, for functions that are not pure. CPUs have no
streams; workers on CPUs refuse the calls. Each use of several streams begins and ends on stream 0.
"""

from __future__ import annotations

from typing import Any

from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.comm.packed_call_builder_helpers import packed_call
from tvm_ipc.packed_functions import MAX_STREAMS
from tvm_ipc.packed_functions.program_function_declarations import SET_STREAM, WAIT_STREAM

_STREAM = f"the number of a stream, 0 to {MAX_STREAMS - 1}"


def set_stream(stream: Any) -> relax.Call:
    """Return a call after which kernels run, and requests are started, on another stream.

    Parameters
    ----------
    stream : the number of the stream; 0 is the one on which the program began.

    Returns
    -------
    relax.Call
        The call. The stream does not wait for others: see `wait_stream`.

    Raises
    ------
    ValueError
        There is no stream of this number.

    Examples
    --------
    Two matmuls that run side by side:

    >>> import tvm
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4, 4), "float32"), w: R.Tensor((4, 4), "float32")):
    ...         R.comm.set_stream(1)
    ...         R.comm.wait_stream(0)
    ...         y = R.matmul(x, w)
    ...         R.comm.set_stream(0)
    ...         z = R.matmul(w, x)
    ...         R.comm.wait_stream(1)
    ...         return R.add(y, z)
    ... ''')
    >>> mod.script().count("tvm_ipc.set_stream")
    2
    """
    return _call(SET_STREAM.name, "set_stream: stream", stream)


def wait_stream(stream: Any) -> relax.Call:
    """Return a call after which the current stream waits for everything on another one so far.

    Parameters
    ----------
    stream : the number of the other stream.

    Returns
    -------
    relax.Call
        The call. The host does not wait.

    Raises
    ------
    ValueError
        There is no stream of this number.

    Examples
    --------
    >>> import tvm
    >>> main = tvm.script.from_source('''
    ... @R.function(pure=False)
    ... def main(x: R.Tensor((4,), "float32")):
    ...     R.comm.set_stream(1)
    ...     R.comm.wait_stream(0)
    ...     y = R.exp(x)
    ...     R.comm.set_stream(0)
    ...     R.comm.wait_stream(1)
    ...     return y
    ... ''')
    >>> main.script().count("tvm_ipc.wait_stream")
    2
    """
    return _call(WAIT_STREAM.name, "wait_stream: stream", stream)


def fork(streams: int) -> list[relax.Call]:
    """Return calls after which the streams below a number run beside stream 0, from stream 0."""
    calls = []
    for stream in range(1, streams):
        calls += [set_stream(stream), wait_stream(0)]
    return [*calls, set_stream(0)] if calls else []


def join(streams: int) -> list[relax.Call]:
    """Return calls after which stream 0 is current, and waits for the streams below a number."""
    waits = [wait_stream(stream) for stream in range(1, streams)]
    return [set_stream(0), *waits] if waits else []


def _call(function: str, name: str, stream: Any) -> relax.Call:
    number = arguments.integer(name, stream, _STREAM, 0, MAX_STREAMS - 1)
    return packed_call(function, [number], relax.TupleType([]))
