# SPDX-License-Identifier: Apache-2.0
"""Where the sessions of tests compute: on CPUs; or, where `TVM_IPC_TEST_BACKEND` is the name of a
backend for GPUs, on GPUs, in turns where there are fewer of them than workers.

    TVM_IPC_TEST_BACKEND=cuda python -m pytest tests/runtime/test_collectives.py
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any, Final

import numpy.typing as npt
import tvm
from tvm_ffi import get_global_func, register_global_func

import tvm_ipc
from tvm_ipc.packed_functions import BACKENDS, DEVICES, backends_of

#: What moves data between the workers, in their processes too.
BACKEND: Final = os.environ.get("TVM_IPC_TEST_BACKEND", "shm")
#: The beginning of the names of its functions.
PREFIX: Final = f"runtime.disco.{BACKEND}."
ON_GPUS: Final = BACKENDS[BACKEND] != "cpu"


#: Of workers' threads: the backends of their sessions, where a test says them. Worker 0 is a thread
#: that Python has not started, which has nothing of `threading.local` from one call to the next.
_unusual: dict[int, str] = {}


@register_global_func("tests.this_session_has", override=True)
def this_session_has(backend: str) -> None:
    """Say which backend the session of the calling worker has; nothing: the usual one."""
    _unusual[threading.get_ident()] = backend


def backend() -> str:
    """The backend of the session that the calling thread works for."""
    serving = backends_of("cpu" if here().dlpack_device_type() == DEVICES["cpu"] else "cuda")
    usual = BACKEND if BACKEND in serving else serving[0]
    return _unusual.get(threading.get_ident()) or usual


def function(name: str) -> Any:
    """The backend's function of Disco with this name, for the rank of the calling thread."""
    return get_global_func(f"runtime.disco.{backend()}.{name}")


def here() -> Any:
    """The device of the rank that the calling thread acts for."""
    return get_global_func("tvm_ipc.worker.device")()


def settle() -> None:
    """Wait until what the calling worker has begun is done: TVM copies on another stream."""
    if here().type != "cpu":
        name = BACKEND if ON_GPUS else "cuda"
        get_global_func(f"runtime.disco.{name}.sync_worker")()


def tensor(values: npt.NDArray[Any]) -> Any:
    """An array on the calling worker's device."""
    return tvm.runtime.tensor(values, here())


def empty(shape: tuple[int, ...], dtype: str) -> Any:
    """Memory on the calling worker's device."""
    return tvm.runtime.empty(shape, dtype, here())


def _put_sessions_on_gpus() -> None:
    """From now on sessions that do not say where they compute do it on GPUs."""
    from tvm_ipc.gpu import discovery
    from tvm_ipc.runtime import patch_disco_error_handling

    devices = len(discovery.find().devices)
    start, init_ccl = tvm_ipc.Session.__init__, patch_disco_error_handling.init_ccl

    @functools.wraps(start)
    def start_on_gpus(self: Any, num_workers: Any = 2, **options: Any) -> None:
        if "device" not in options:
            options["device"] = "cuda"
            options.setdefault("backend", BACKEND)
            options.setdefault("device_ids", [rank % devices for rank in range(num_workers)])
        start(self, num_workers, **options)

    @functools.wraps(init_ccl)
    def init_ccl_on_gpus(session: Any, ccl: str, ids: Any, device: str | None = None) -> None:
        if ccl == "auto" and device is None:
            ccl = BACKEND
        ids = ids or [rank % devices for rank in range(session.num_workers)]
        init_ccl(session, ccl, ids, device)

    tvm_ipc.Session.__init__ = start_on_gpus  # type: ignore[method-assign]
    patch_disco_error_handling.init_ccl = init_ccl_on_gpus


if ON_GPUS:
    _put_sessions_on_gpus()
