# SPDX-License-Identifier: Apache-2.0
"""Provide the functions that `tvm-ipc doctor --hosts` runs in its workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

_get = tvm_ffi.get_global_func
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


@tvm_ffi.register_global_func("tvm_ipc.doctor.ping", override=True)  # type: ignore[untyped-decorator]
def ping(peer: int, size: int, rounds: int) -> Any:
    """Send bytes from worker 0 to a peer and back; return the seconds of each round trip."""
    rank = _get("runtime.disco.worker_rank")()
    times = np.zeros(rounds)
    if rank in (0, peer):
        send = _get("runtime.disco.send_to_worker")
        receive = _get("runtime.disco.recv_from_worker")
        data = tvm.runtime.empty((size,), "uint8")
        for round_number in range(rounds):
            start = time.perf_counter()
            if rank == 0:
                send(data, peer)
                receive(data, peer)
            else:
                receive(data, 0)
                send(data, 0)
            times[round_number] = time.perf_counter() - start
    return tvm.runtime.tensor(times)


@tvm_ffi.register_global_func("tvm_ipc.doctor.congestion", override=True)  # type: ignore[untyped-decorator]
def congestion() -> str:
    """Return the TCP congestion control algorithm, such as "cubic"; "" if it is unknown."""
    try:
        return _CONGESTION.read_text().strip()
    except OSError:
        return ""
