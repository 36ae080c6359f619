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
import tvm_ffi
from tvm.runtime import Tensor, disco

from tvm_ipc import arguments
from tvm_ipc.contract import DEVICES
from tvm_ipc.runtime.commands import CommandSession, keys
from tvm_ipc.runtime.given import (
    as_device,
    as_dtype,
    bytes_of,
    check_reference,
    host_tensor,
    target_of,
)
from tvm_ipc.runtime.pieces import FETCHED_ALONE, READ_IN_PLACE, large_tensor, tensor_over
from tvm_ipc.runtime.references import DModule, DPackedFunc, DRef
from tvm_ipc.runtime.teams import Team, in_team

_expect = tvm_ffi.get_global_func("tvm_ipc.session.expect")
_put = tvm_ffi.get_global_func("tvm_ipc.session.put")
_team = tvm_ffi.get_global_func("tvm_ipc.session.team")

_SHAPE: Final = "a sequence of extents, 0 or more, such as (3, 4)"
_FUNCTION: Final = "a function on the workers, from get_global_func or a loaded module"
_ARGUMENT: Final = (
    "a number, a text, a shape (tvm_ffi.Shape), an element type, a device, an array, or a "
    "reference to a value on the workers (session.put and session.scatter make one of a list)"
)
#: Tells the teams in which tensors are fetched from those of programs.
_COPY_THAT_FETCHES: Final = (1 << 31) - 1
#: Types of arguments that are sent as they are.
_PLAIN: Final = frozenset({type(None), bool, float, str, bytes, DRef, DPackedFunc, DModule})
_SENT: Final = (disco.DRef, tvm_ffi.Shape, tvm_ffi.core.DataType, tvm_ffi.core.Device, str, bytes)


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
            return as_dtype(name, value)
        if any(hasattr(value, kind) for kind in ("__array__", "__dlpack__")):
            return self._broadcast(host_tensor(name, value), None, in_group=False)
        raise arguments.wrong_type(name, _ARGUMENT, value)

    def _fetch(self, where: str, reference: object, rank: int, rank_name: str) -> Any:
        found = self._fetched(where, reference, rank, rank_name)
        return tensor_over(found) if isinstance(found, np.ndarray) else found

    def _fetched(self, where: str, reference: object, rank: int, rank_name: str) -> Any:
        """Return a value of a worker; of a large tensor of another process an array."""
        check_reference(f"{where}: reference", reference)
        rank = self._rank(f"{where}: {rank_name}", rank)
        if self._device != "cpu":
            return self._expected("fetch", reference, rank)
        found = self._expected("fetch_limited", reference, rank, FETCHED_ALONE)
        large = large_tensor(found)
        if large is None:
            return found
        # The first member of a team of its own broadcasts it: no message of the user's is met.
        array = np.empty(large.shape, np.dtype(str(large.dtype)))
        team = self.team([rank, 0], _COPY_THAT_FETCHES)
        place = self._taken(tensor_over(array), reference)
        self._collective("broadcast_from_worker0", ("src", place), ("dst", place), team)
        del place  # and with it, in the worker, what keeps the array
        self.sync()
        return array

    def _expected(self, function: str, reference: object, rank: int, *more: int) -> Any:
        """Call one of the workers' functions that send a value, and return what it has sent."""
        self._caller()
        fetch = self._get_cached_method(f"tvm_ipc.worker.{function}")
        with self._lock:  # no command comes in between
            self._enter()
            key = next(keys)
            take = _expect(self, key)
            self.call_packed(fetch, reference, rank, key, *more)
        self.sync()
        with self._lock:
            self._check_usable()  # another thread may have closed it
            return take()

    def _taken(self, host: Tensor, otherwise: object = None) -> DRef:
        """Return a tensor of the controller as worker 0's, which is a thread of its process."""
        return self._call_with_host("tvm_ipc.worker.take_from_host", host, otherwise)

    def get(self, reference: DRef, rank: int = 0) -> np.ndarray[Any, Any]:
        """Return a copy of a tensor on one worker, after the commands before it."""
        value = self._fetched("get", reference, rank, "rank")
        if isinstance(value, np.ndarray):
            return value
        if not isinstance(value, Tensor):
            raise TypeError(
                f"rank {rank} holds a {type(value).__name__}, not a tensor; "
                "debug_get_from_remote returns any value"
            )
        return np.asarray(value.numpy())

    def put(self, array: npt.ArrayLike | Tensor) -> DRef:
        """Copy an array to every worker.

        One of more than 64 MB is not copied before, and read when this returns; so are those of
        the other functions here.
        """
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
        element = as_dtype("empty: dtype", dtype)
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
        self._wait_for_reading(value)

    def _wait_for_reading(self, host: Tensor) -> None:
        """Wait until the workers have read a tensor that may be memory of the caller's."""
        if bytes_of(host) > READ_IN_PLACE:
            self.sync()

    def _call_with_host(self, name: str, host: Tensor, *args: Any) -> DRef:
        """Call a function whose first argument is a tensor of the controller, for worker 0."""
        self._check_references(args)
        function = self._get_cached_method(name)
        # A recovery discards what waits for commands that were skipped. None comes in between.
        with self._lock:
            self._enter()
            return self.call_packed(function, _put(self, host), *args)

    def copy_to_worker_0(
        self, host_array: npt.ArrayLike | Tensor, remote_array: DRef | None = None
    ) -> DRef:
        """Copy an array of the controller into worker 0's tensor, made here if not given."""
        host = host_tensor("copy_to_worker_0: host_array", host_array)
        remote = target_of("copy_to_worker_0: remote_array", remote_array)
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
        target = target_of("broadcast: dst", dst)
        target = self.empty(src.shape, src.dtype) if target is None else target
        self.broadcast_from_worker0(self._at_root(src, team), target, in_group)
        self._wait_for_reading(src)
        return target

    def _at_root(self, host: Tensor, team: bool | Team) -> DRef:
        """Return an array as a tensor of the worker from which a team has it."""
        root = team.ranks[0] if isinstance(team, Team) else 0
        if (
            root == 0
            and self._device == "cpu"
            and host.device.dlpack_device_type() == DEVICES["cpu"]
        ):
            return self._taken(host)
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
        target = target_of("scatter: dst", dst)
        target = self.empty(host.shape[1:], host.dtype) if target is None else target
        self.scatter_from_worker0(self._at_root(host, team), target, in_group)
        self._wait_for_reading(host)
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
