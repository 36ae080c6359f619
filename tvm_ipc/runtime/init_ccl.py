# SPDX-License-Identifier: Apache-2.0
"""Start a collective backend in sessions of Disco."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.runtime import disco

from tvm_ipc import arguments
from tvm_ipc.runtime import patch_disco_error_handling
from tvm_ipc.runtime.session import Session


def init_ccl(
    session: disco.Session,
    ccl: str = "auto",
    device_ids: Sequence[int] | None = None,
    device: str | None = None,
) -> None:
    """Start a collective backend in a session of Disco that the user opened.

    Parameters
    ----------
    session : a session of `tvm.runtime.disco`.
    ccl : one of `tvm_ipc.packed_functions.BACKENDS`; "auto", the best for the device that is
        available here; or a backend that another library has registered.
    device_ids : the device of each worker, as in `Session`.
    device : what the workers compute on, "cpu" or "cuda"; by default that of the backend, and
        "cpu" for "auto".

    Examples
    --------
    >>> import tvm_ipc
    >>> from tvm.runtime import disco
    >>> session = disco.ProcessSession(num_workers=2)
    >>> tvm_ipc.init_ccl(session)
    >>> source, target = session.empty((2,), "float32"), session.empty((2,), "float32")
    >>> session.allreduce(source, target)
    >>> session.shutdown()
    """
    if isinstance(session, Session):
        if device is not None:
            arguments.one_of("init_ccl: device", device, (session.device,))
        session.init_ccl(ccl, *(device_ids or ()))
    else:
        patch_disco_error_handling.init_ccl(session, ccl, device_ids, device)
