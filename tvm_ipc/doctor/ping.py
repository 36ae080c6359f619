# SPDX-License-Identifier: Apache-2.0
"""What workers do for `tvm-ipc doctor --hosts`: messages that go and come back, and a look."""

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
    """Let worker 0 send bytes to a peer and back; worker 0 returns the seconds of each round."""
    rank = _get("runtime.disco.worker_rank")()
    times = np.zeros(rounds)
    if rank in (0, peer):
        send = _get("runtime.disco.send_to_worker")
        receive = _get("runtime.disco.recv_from_worker")
        data = tvm.runtime.empty((size,), "uint8")
        for number in range(rounds):
            start = time.perf_counter()
            if rank == 0:
                send(data, peer)
                receive(data, peer)
            else:
                receive(data, 0)
                send(data, 0)
            times[number] = time.perf_counter() - start
    return tvm.runtime.tensor(times)


@tvm_ffi.register_global_func("tvm_ipc.doctor.congestion", override=True)  # type: ignore[untyped-decorator]
def congestion() -> str:
    """Return how TCP finds out what the network bears, such as "cubic"; "" where nothing says."""
    try:
        return _CONGESTION.read_text().strip()
    except OSError:
        return ""
