# SPDX-License-Identifier: Apache-2.0
"""The program that a worker process of `tvm_ipc.Session` runs."""

from __future__ import annotations

import sys


def main(worker_id: int, num_workers: int, num_groups: int, read_fd: int, write_fd: int) -> None:
    """Serve the controller until it shuts the session down or is gone."""
    import logging

    import_without_torch()
    from tvm_ipc import runtime
    from tvm_ipc.runtime import library, log

    library.leave_cuda_out()
    log.start(f"rank {worker_id}")
    logger = logging.getLogger(__name__)
    logger.debug("a worker of %d in %d groups starts", num_workers, num_groups)
    runtime.ready()
    import tvm_ffi

    serve = tvm_ffi.get_global_func("runtime.disco.WorkerProcess")
    logger.debug("waits for commands")
    serve(worker_id, num_workers, num_groups, read_fd, write_fd)
    logger.debug("ends, as the controller asked")


def import_without_torch() -> None:
    """Import TVM's FFI, which imports PyTorch where it is installed, most of a worker's start.

    What wants PyTorch in a worker imports it there, and its tensors are taken as anywhere;
    a `torch.dtype` is not, for which TVM looks as it is imported: give "float32".
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it is an ImportError
    try:
        import tvm_ffi  # noqa: F401
    finally:
        del sys.modules["torch"]
