# SPDX-License-Identifier: Apache-2.0
"""References to values that live on the workers of a `tvm_ipc.Session`.

A reference may be destroyed in any thread and at any time. The native library records its register
then, and frees it with the session's next command. (Disco's own references write to the workers'
pipes when they are destroyed, and abort the process if a worker is dead.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from tvm.runtime import Tensor, disco

from tvm_ipc import arguments
from tvm_ipc.html_tables import html_table

if TYPE_CHECKING:
    from typing_extensions import Self


class OwningSession(Protocol):
    """The methods that references call on the session that they belong to."""

    def call_packed(self, func: disco.DRef, *args: Any) -> DRef:
        """Call a function on every worker."""

    def _get_cached_method(self, name: str) -> DPackedFunc: ...

    def _fetch(self, where: str, reference: object, rank: int, rank_name: str) -> Any: ...

    def _debug_copy(self, reference: object, rank: int, value: Any) -> None: ...


class RemoteTensor(NamedTuple):
    """The tensors that a reference refers to, as far as the controller knows them."""

    shape: tuple[int, ...]
    dtype: str
    workers: str = "the workers"  #: a phrase for those that have one


class _Remote:
    """The methods in which our references differ from Disco's."""

    __slots__ = ()
    #: The noun for what it refers to, and a phrase for how to use that, in messages.
    _noun = "value"
    _usage = "session.get(reference, rank) returns a worker's tensor as a NumPy array"
    session: OwningSession

    def __init__(self, reference: disco.DRef, session: OwningSession) -> None:
        self.__move_handle_from__(reference)
        self.session = session  # type: ignore[misc]  # the slots are those of the subclasses

    @classmethod
    def of(cls, reference: _Remote) -> Self:
        """Convert a reference to this class; the argument is empty afterwards."""
        return cls(reference, reference.session)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: a {self._noun} on the workers of {self.session!r}>"

    def __array__(self, *_args: Any, **_options: Any) -> np.ndarray[Any, Any]:
        raise TypeError(
            "this is a reference to a value on the workers, and each worker has its own: "
            "session.get(reference, rank) returns one as a NumPy array"
        )

    def __getattr__(self, name: str) -> Any:
        usage = (
            "" if name.startswith("_") else f": its {self._noun} is on the workers; {self._usage}"
        )
        raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}{usage}")

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: its {self._noun} is on the "
            f"workers of this session; {self._usage}"
        )

    def debug_get_from_remote(self, worker_id: int) -> Any:
        """Return the value on one worker, after the commands before it."""
        return self.session._fetch("debug_get_from_remote", self, worker_id, "worker_id")

    def debug_copy_from(self, worker_id: int, value: npt.ArrayLike | Tensor) -> None:
        """Copy an array into the tensor on one worker."""
        self.session._debug_copy(self, worker_id, value)


class DRef(_Remote, disco.DRef):  # type: ignore[misc]
    """A value that lives on every worker."""

    __slots__ = ("_tensor", "session")
    #: Not set if the controller does not know the shape, such as that of a function's result. Each
    #: call makes a reference, and setting a slot takes time.
    _tensor: RemoteTensor

    def __repr__(self) -> str:
        """Return shape, type and workers as far as the session knows them; asks no worker."""
        tensor = self._known_tensor()
        if tensor is None:
            return super().__repr__()
        return (
            f"<DRef: a tensor of shape {tensor.shape} and type {tensor.dtype} on {tensor.workers} "
            f"of {self.session!r}>"
        )

    def _repr_html_(self) -> str:
        """Return the shape, type and workers as a table, for notebooks."""
        tensor = self._known_tensor()
        rows: list[tuple[str, object]] = [("session", repr(self.session))]
        if tensor is not None:
            rows = [
                ("shape", tensor.shape),
                ("type", tensor.dtype),
                ("on", tensor.workers),
                *rows,
            ]
        return html_table("DRef: a tensor" if tensor is not None else "DRef: a value", (), rows)

    def _known_tensor(self) -> RemoteTensor | None:
        """Return shape, type and workers if the controller knows them."""
        return getattr(self, "_tensor", None)


class DPackedFunc(_Remote, disco.DPackedFunc):  # type: ignore[misc]
    """A function that every worker has."""

    __slots__ = ()
    _noun = "function"
    _usage = "function(...) calls it on every worker"

    def __call__(self, *args: Any) -> DRef:
        """Call the function on every worker; the result stays there."""
        return self.session.call_packed(self, *args)


class DModule(_Remote, disco.DModule):  # type: ignore[misc]
    """A module that every worker has loaded."""

    __slots__ = ()
    _noun = "module"
    _usage = "module[name] is one of its functions"

    def __getitem__(self, name: str) -> DPackedFunc:
        """Return a function of the module."""
        arguments.text("module[name]: name", name, "the name of a function")
        get_function = self.session._get_cached_method("tvm_ipc.worker.get_function")
        return DPackedFunc.of(get_function(self, name))
