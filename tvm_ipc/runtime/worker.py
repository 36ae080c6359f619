# SPDX-License-Identifier: Apache-2.0
"""The program that a worker process of `tvm_ipc.Session` runs."""

from __future__ import annotations


def main(worker_id: int, num_workers: int, num_groups: int, read_fd: int, write_fd: int) -> None:
    """Serve the controller until it shuts the session down or ends."""
    import logging

    from tvm_ipc.runtime import standard_fd_reservation

    standard_fd_reservation.fill()
    from tvm_ipc.runtime.import_tvm_without_compiler import without_torch

    with without_torch():  # its import would take most of a worker's start
        import tvm_ffi
    from tvm_ipc import runtime
    from tvm_ipc.runtime import log, shared_libraries
    from tvm_ipc.tvm_private_names import WORKER_MAIN_LOOP

    shared_libraries.leave_cuda_out()
    log.start(f"rank {worker_id}")
    logger = logging.getLogger(__name__)
    logger.debug("starts; workers: %d, groups: %d", num_workers, num_groups)
    runtime.ready()
    serve = tvm_ffi.get_global_func(WORKER_MAIN_LOOP)
    logger.debug("waits for commands")
    serve(worker_id, num_workers, num_groups, read_fd, write_fd)
    logger.debug("ends, as the controller asked")
