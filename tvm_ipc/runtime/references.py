# SPDX-License-Identifier: Apache-2.0
"""References to values that live on the workers of a `tvm_ipc.Session`.

Disco's own references write to the workers' pipes when they end, and abort the process if a
worker is dead by then. Ours are detached from that: the register they name is put on a list,
and the session frees it before its next command.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm.runtime import Tensor, disco

if TYPE_CHECKING:
    from typing_extensions import Self

    from tvm_ipc.runtime.session import Session


class _Remote:
    """What the references of our sessions do in their own way."""

    __slots__ = ()
    session: Session
    _register: int
    _freed: deque[int]

    def __init__(self, reference: disco.DRef, session: Session, register: int) -> None:
        self.__move_handle_from__(reference)  # type: ignore[attr-defined]
        self.session = session  # type: ignore[misc]  # the slots are those of the subclasses
        self._register = register  # type: ignore[misc]
        self._freed = session._freed  # type: ignore[misc]

    @classmethod
    def of(cls, reference: _Remote) -> Self:
        """Take over a reference, as what it is known to refer to."""
        del reference._freed  # it no longer frees the register; the new one does
        return cls(reference, reference.session, reference._register)

    def __del__(self) -> None:
        # Any thread, any time: only noted here, and freed before the next command.
        with contextlib.suppress(AttributeError):
            self._freed.append(self._register)

    def debug_get_from_remote(self, worker_id: int) -> Any:
        """Return the value on one worker; waits for the commands before it."""
        return self.session._fetch(self, worker_id)

    def debug_copy_from(self, worker_id: int, value: np.ndarray[Any, Any] | Tensor) -> None:
        """Copy an array into the tensor on one worker."""
        self.session._copy_to(self, worker_id, value)


class DRef(_Remote, disco.DRef):  # type: ignore[misc]
    """A value that lives on every worker."""

    __slots__ = ("_freed", "_register", "session")


class DPackedFunc(_Remote, disco.DPackedFunc):  # type: ignore[misc]
    """A function that every worker has."""

    __slots__ = ("_freed", "_register")

    def __call__(self, *args: Any) -> DRef:
        """Call it on every worker; the result stays there."""
        return self.session.call_packed(self, *args)


class DModule(_Remote, disco.DModule):  # type: ignore[misc]
    """A module that every worker loaded."""

    __slots__ = ("_freed", "_register")

    def __getitem__(self, name: str) -> DPackedFunc:
        """Return a function of the module."""
        get_function = self.session._get_cached_method("tvm_ipc.worker.get_function")
        return DPackedFunc.of(get_function(self, name))
