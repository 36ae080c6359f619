# SPDX-License-Identifier: Apache-2.0
"""What moves values between the controller and the workers, and among the workers.

These are Disco's methods, typed and with their arguments checked, and `put` and `get`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes  # noqa: F401  makes bfloat16 and others known to NumPy
import numpy as np
import numpy.typing as npt
import tvm
import tvm_ffi
from tvm.runtime import Tensor, disco
from tvm.runtime import tensor as as_tensor

from tvm_ipc import arguments
from tvm_ipc.contract import DEVICES
from tvm_ipc.runtime.commands import CommandSession, keys
from tvm_ipc.runtime.pieces import PIECE, large_tensor
from tvm_ipc.runtime.references import DModule, DPackedFunc, DRef
from tvm_ipc.runtime.teams import Team, in_team

_expect = tvm_ffi.get_global_func("tvm_ipc.session.expect")
_put = tvm_ffi.get_global_func("tvm_ipc.session.put")
_team = tvm_ffi.get_global_func("tvm_ipc.session.team")

_SHAPE: Final = "a sequence of extents, 0 or more, such as (3, 4)"
_DTYPE: Final = "an element type, such as 'float32' or a NumPy dtype"
_DEVICE: Final = "a device, such as tvm.cpu() or 'cpu', or None for the worker's own"
_ARRAY: Final = "an array of numbers"
_REFERENCE: Final = (
    "a reference to a value on the workers, which put, scatter, empty and calls return"
)
_FUNCTION: Final = "a function on the workers, from get_global_func or a loaded module"
_ARGUMENT: Final = (
    "a number, a text, a shape (tvm_ffi.Shape), an element type, a device, an array, or a "
    "reference to a value on the workers (session.put and session.scatter make one of a list)"
)
#: Types of arguments that are sent as they are.
_PLAIN: Final = frozenset({type(None), bool, float, str, bytes, DRef, DPackedFunc, DModule})
_SENT: Final = (disco.DRef, tvm_ffi.Shape, tvm_ffi.core.DataType, tvm_ffi.core.Device, str, bytes)
#: Bits of the elements of types that exist.
_BITS: Final = (1, 2, 4, 6, 8, 16, 32, 64)


class ValueSession(CommandSession):
    """A session whose workers have values."""

    #: The name of what moves data between the workers.
    _backend: str
    #: What its workers compute on.
    _device: str
    #: Its nodes, if it has several.
    _nodes: Any = None

    # ---- one value ------------------------------------------------------------------------

    def call_packed(self, func: DRef, *args: Any) -> DRef:
        """Call a function on every worker; the result stays there.

        Parameters
        ----------
        func : of `get_global_func` or of a module.
        args : numbers, texts, shapes, element types, devices and references. An array is `put`.
        """
        arguments.instance("call_packed: func", func, disco.DRef, _FUNCTION)
        return super().call_packed(
            func, *(a if type(a) in _PLAIN else self._sent(i, a) for i, a in enumerate(args, 1))
        )

    def _sent(self, position: int, value: Any) -> Any:
        """Return what is sent to the workers for an argument of a call."""
        name = f"argument {position} of a call"
        if isinstance(value, _SENT):
            return value
        if isinstance(value, bytearray):
            return bytes(value)
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, numbers.Integral):
            return arguments.integer(
                name, value, "an integer of 64 bits", -(1 << 63), (1 << 63) - 1
            )
        if isinstance(value, numbers.Real):
            return float(value)
        if isinstance(value, (type, np.dtype)):
            return _dtype(name, value)
        if any(hasattr(value, kind) for kind in ("__array__", "__dlpack__")):
            return self._broadcast(host_tensor(name, value), None, in_group=False)
        raise arguments.wrong_type(name, _ARGUMENT, value)

    def _fetch(self, where: str, reference: object, rank: int, rank_name: str = "rank") -> Any:
        check_reference(f"{where}: reference", reference)
        rank = self._rank(f"{where}: {rank_name}", rank)
        if not self._nodes:
            return self._expected("fetch", [(reference, rank)])[0]
        found = self._expected("fetch_limited", [(reference, rank)], PIECE)[0]
        large = large_tensor(found)
        if large is None:
            return found
        starts = range(0, large.nbytes, PIECE)
        pieces = self._expected(
            "fetch_bytes", [(reference, rank, start) for start in starts], PIECE
        )
        return large.joined(pieces)

    def _expected(self, function: str, calls: Sequence[tuple[Any, ...]], *last: int) -> list[Any]:
        """Call one of the workers' functions that send values, and return what they have sent."""
        self._caller()
        fetch = self._get_cached_method(f"tvm_ipc.worker.{function}")
        with self._lock:  # no command comes in between
            self._enter()
            takes = []
            for reference, rank, *more in calls:
                key = next(keys)
                takes.append(_expect(self, key))
                self.call_packed(fetch, reference, rank, key, *more, *last)
        self.sync()
        with self._lock:
            self._check_usable()  # another thread may have closed it
            return [take() for take in takes]

    def get(self, reference: DRef, rank: int = 0) -> np.ndarray[Any, Any]:
        """Return a copy of a tensor on one worker, after the commands before it."""
        value = self._fetch("get", reference, rank)
        if not isinstance(value, Tensor):
            raise TypeError(
                f"rank {rank} holds a {type(value).__name__}, not a tensor; "
                "debug_get_from_remote returns any value"
            )
        return np.array(value.numpy())

    def put(self, array: npt.ArrayLike | Tensor) -> DRef:
        """Copy an array to every worker."""
        return self._broadcast(host_tensor("put: array", array), None, in_group=False)

    def empty(
        self,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        device: Any = None,
        worker0_only: bool = False,
        in_group: bool = True,
    ) -> DRef:
        """Make a tensor on every worker; what is in it is not defined.

        Parameters
        ----------
        shape : its extents.
        dtype : the type of its elements.
        device : by default the worker's own.
        worker0_only : make it on the first worker of each group alone.
        in_group : if False and `worker0_only`, on worker 0 alone.
        """
        extents = arguments.integers("empty: shape", shape, _SHAPE)
        element = _dtype("empty: dtype", dtype)
        if math.prod(extents) * max(1, element.bits * element.lanes // 8) >= 1 << 63:
            raise ValueError(f"empty: no memory holds a tensor of shape {extents}")
        make = self._get_cached_method("runtime.disco.empty")
        return make(
            tvm_ffi.Shape(extents),
            element,
            self._on_device("empty: device", device),
            arguments.flag("empty: worker0_only", worker0_only),
            arguments.flag("empty: in_group", in_group),
        )

    def _on_device(self, name: str, device: Any) -> Any:
        """Return a device that workers are about to use."""
        found = as_device(name, device)
        on_gpu = found is not None and found.dlpack_device_type() == DEVICES["cuda"]
        if on_gpu and self._device == "cpu":  # its workers have left CUDA out
            self._get_cached_method("tvm_ipc.cuda.bring_up")()
        return found

    def _debug_copy(self, reference: object, rank: int, value: npt.ArrayLike | Tensor) -> None:
        rank = self._rank("debug_copy_from: worker_id", rank)
        self._copy_to(reference, rank, host_tensor("debug_copy_from: value", value))

    def _copy_to(self, reference: object, rank: int, value: Tensor) -> None:
        self._call_with_host("tvm_ipc.worker.copy_from_host", value, rank, reference)

    def _call_with_host(self, name: str, host: Tensor, *args: Any) -> None:
        """Call a function whose first argument is a tensor of the controller, for worker 0."""
        self._check_references(args)
        function = self._get_cached_method(name)
        # A recovery discards what waits for commands that were skipped. None comes in between.
        with self._lock:
            self._enter()
            self.call_packed(function, _put(self, host), *args)

    def copy_to_worker_0(
        self, host_array: npt.ArrayLike | Tensor, remote_array: DRef | None = None
    ) -> DRef:
        """Copy an array of the controller into worker 0's tensor, made here if not given."""
        host = host_tensor("copy_to_worker_0: host_array", host_array)
        remote = _target("copy_to_worker_0: remote_array", remote_array)
        if remote is None:
            # Not one for each group: those would hold nothing, and be sent by an in-group call.
            remote = self.empty(host.shape, host.dtype, worker0_only=True, in_group=False)
        self._copy_to(remote, 0, host)
        return remote

    def copy_from_worker_0(self, host_array: Tensor, remote_array: DRef) -> None:
        """Copy worker 0's tensor into a tensor of the controller; `sync` before reading it."""
        if not isinstance(host_array, Tensor):
            raise arguments.wrong_type(
                "copy_from_worker_0: host_array",
                "a tvm.runtime.Tensor, which is written later (`get` returns a NumPy array)",
                host_array,
            )
        check_reference("copy_from_worker_0: remote_array", remote_array)
        self._call_with_host("tvm_ipc.worker.copy_to_host", host_array, remote_array)

    # ---- from and to the first worker -----------------------------------------------------

    def broadcast(
        self,
        src: npt.ArrayLike | Tensor,
        dst: DRef | None = None,
        in_group: bool | Team = True,
    ) -> DRef:
        """Copy an array to every worker, into `dst` if that is given."""
        return self._broadcast(host_tensor("broadcast: src", src), dst, in_group)

    def _broadcast(self, src: Tensor, dst: DRef | None, in_group: bool | Team) -> DRef:
        team = in_team("broadcast: in_group", in_group, self._name)
        target = _target("broadcast: dst", dst)
        target = self.empty(src.shape, src.dtype) if target is None else target
        self.broadcast_from_worker0(self._copy_to_root(src, team), target, in_group)
        return target

    def _copy_to_root(self, host: Tensor, team: bool | Team) -> DRef:
        """Copy an array to the worker from which a team has it."""
        if not isinstance(team, Team):
            return self.copy_to_worker_0(host)
        remote = self.empty(host.shape, host.dtype)
        self._copy_to(remote, team.ranks[0], host)
        return remote

    def scatter(
        self,
        src: npt.ArrayLike | Tensor,
        dst: DRef | None = None,
        in_group: bool | Team = True,
    ) -> DRef:
        """Give `src[i]` to worker i, in `dst` if that is given."""
        host = host_tensor("scatter: src", src)
        team = in_team("scatter: in_group", in_group, self._name)
        workers = len(team.ranks) if isinstance(team, Team) else self.num_workers
        if tuple(host.shape[:1]) != (workers,):
            raise ValueError(
                f"scatter gives src[i] to worker i, so an array for {workers} workers has "
                f"{workers} rows; this one's shape is {tuple(host.shape)}"
            )
        target = _target("scatter: dst", dst)
        target = self.empty(host.shape[1:], host.dtype) if target is None else target
        self.scatter_from_worker0(self._copy_to_root(host, team), target, in_group)
        return target

    def broadcast_from_worker0(self, src: DRef, dst: DRef, in_group: bool | Team = True) -> None:
        """Copy the first worker's `src` to every worker's `dst`."""
        self._collective("broadcast_from_worker0", ("src", src), ("dst", dst), in_group)

    def scatter_from_worker0(
        self, from_array: DRef, to_array: DRef, in_group: bool | Team = True
    ) -> None:
        """Give each worker's `to_array` its part of the first worker's `from_array`."""
        given = ("from_array", from_array), ("to_array", to_array)
        self._collective("scatter_from_worker0", *given, in_group)

    def gather_to_worker0(
        self, from_array: DRef, to_array: DRef, in_group: bool | Team = True
    ) -> None:
        """Put all workers' `from_array` one after the other into the first worker's `to_array`."""
        given = ("from_array", from_array), ("to_array", to_array)
        self._collective("gather_to_worker0", *given, in_group)

    # ---- teams -----------------------------------------------------------------------------

    def team(self, ranks: Sequence[int], copy: int = 0) -> Team:
        """Return the team of some workers, for which `in_group` of the collectives is a place.

        A collective over it is done by its workers; the others have no part in it.

        Parameters
        ----------
        ranks : its workers, in its order.
        copy : another number is another team of the same workers, so that two threads of each can
            be in collectives at once.
        """
        workers = f"ranks of workers, each 0 to {self.num_workers - 1} and once, such as [0, 1]"
        members = arguments.integers("team: ranks", ranks, workers, 0, self.num_workers - 1)
        if not members or len(set(members)) != len(members):
            raise arguments.wrong_value("team: ranks", workers, ranks)
        most = (1 << 31) - 1
        copy = arguments.integer("team: copy", copy, f"a number from 0 to {most}", 0, most)
        self._caller()
        with self._lock:
            self._enter()
            team = int(_team(self, tvm_ffi.Shape(members), copy))
        return Team(members, copy, team, self._name)

    def _collective(
        self,
        name: str,
        send: tuple[str, object],
        receive: tuple[str, object],
        in_group: bool | Team,
        *kind: tvm_ffi.Shape,
    ) -> None:
        source, target = (check_reference(f"{name}: {what}", one) for what, one in (send, receive))
        team = in_team(f"{name}: in_group", in_group, self._name)
        if not isinstance(team, Team):
            self._get_cached_method(f"runtime.disco.{name}")(source, *kind, team, target)
            return
        # Disco knows no teams: what its function would call is called, in the team's workers alone.
        function = self._get_cached_method(f"runtime.disco.{self._backend}.{name}")
        call = self._get_cached_method("tvm_ipc.worker.call_in_team")
        numbers = [int(extents[0]) for extents in kind]
        call(function, team.id, source, *numbers, team.id, target)

    def _rank(self, name: str, rank: object) -> int:
        wanted = f"the rank of a worker, 0 to {self.num_workers - 1}"
        return arguments.integer(name, rank, wanted, 0, self.num_workers - 1)


def host_tensor(name: str, value: object) -> Tensor:
    """Return an array of the controller as a tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, disco.DRef):
        raise arguments.wrong_type(
            name, "an array of the controller, which session.get returns of a reference", value
        )
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError(
            f"{name} has masked elements, which tensors have not: give it array.filled(number)"
        )
    try:
        array = np.asarray(value, order="C")
        tensor = as_tensor(array.astype(array.dtype.newbyteorder("="), copy=False))
    except Exception as error:
        raise TypeError(f"{name} is {_ARRAY}, not {arguments.show(value)}: {error}") from error
    if tvm_ffi.dtype(tensor.dtype).bits not in _BITS:
        wanted = f"{_ARRAY} of a type that workers know"
        raise arguments.wrong_type(name, wanted, value)
    return tensor


def as_device(name: str, device: Any) -> Any:
    """Return a device, from its name too; None stands for the worker's own."""
    if device is None or isinstance(device, tvm_ffi.core.Device):
        return device
    if not isinstance(device, str):
        raise arguments.wrong_type(name, _DEVICE, device)
    try:
        return tvm.runtime.device(device)
    except (RuntimeError, ValueError):
        raise arguments.wrong_value(name, _DEVICE, device) from None


def _dtype(name: str, dtype: Any) -> Any:
    """Return an element type, from its name, a NumPy dtype or a type such as np.float32."""
    try:
        if isinstance(dtype, type):
            dtype = np.dtype(dtype)
        found = tvm_ffi.dtype(dtype)
    except (TypeError, ValueError):
        found = None
    if found is not None and found.bits in _BITS:
        return found
    wrong = arguments.wrong_value if isinstance(dtype, str) else arguments.wrong_type
    raise wrong(name, _DTYPE, dtype)


def check_reference(name: str, value: object) -> object:
    """Return it, which must be a reference."""
    arguments.instance(name, value, disco.DRef, _REFERENCE)
    return value


def _target(name: str, value: DRef | None) -> DRef | None:
    """Return where a result is to be, or None: a new tensor."""
    if value is not None:
        check_reference(name, value)
    return value
