# SPDX-License-Identifier: Apache-2.0
"""Hold what other folders register with the runtime, which imports none of them.

`tvm_ipc/__init__.py` fills `modules` and `hosts_module`; modules fill the rest when they are
imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

#: Modules that `runtime.ready` imports first. They register packed functions, and fill the rest.
modules: list[str] = []
#: The module whose function `read` returns the `Hosts` for the argument `hosts=` of a session. A
#: session with that argument imports it.
hosts_module = ""
#: Functions that `runtime.ready` calls once Disco is patched, before it loads the native library.
on_ready: list[Callable[[], None]] = []


class RequireDevices(Protocol):
    """The check that this machine has the devices with some numbers."""

    def __call__(self, where: str, ids: Sequence[int], *, given: bool, share: bool = True) -> None:
        """Raise if this machine lacks a device with one of these numbers."""


#: The checks, by the kind of device.
require_devices: dict[str, RequireDevices] = {}
