# SPDX-License-Identifier: Apache-2.0
"""Move values between the controller and the workers of a session."""

from __future__ import annotations

import ctypes
import itertools
import math
import numbers
from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes  # noqa: F401  registers bfloat16 and others with NumPy
import numpy as np
import numpy.typing as npt
import tvm_ffi
from tvm.runtime import Tensor, disco

from tvm_ipc import arguments
from tvm_ipc.packed_functions import DEVICES
from tvm_ipc.runtime.collectives import Collectives, Scope
from tvm_ipc.runtime.oversized_calls_and_tensors import (
    FETCHED_SEPARATELY,
    READ_IN_PLACE,
    SENT_IN_COMMAND,
    large_tensor,
    tensor_over,
)
from tvm_ipc.runtime.references import DModule, DPackedFunc, DRef, RemoteTensor
from tvm_ipc.runtime.send_commands_and_raise_errors import CommandDispatcher
from tvm_ipc.runtime.session_argument_conversion import (
    as_device,
    as_dtype,
    bytes_of,
    check_reference,
    host_tensor,
    target_of,
)
from tvm_ipc.runtime.team import Team
from tvm_ipc.tvm_private_names import EMPTY, MAKE_TUPLE

_native_expect = tvm_ffi.get_global_func("tvm_ipc.session.expect")
_native_put = tvm_ffi.get_global_func("tvm_ipc.session.put")

_SHAPE: Final = "a sequence of extents, 0 or more, such as (3, 4)"
_FUNCTION: Final = "a function on the workers, from get_global_func or a loaded module"
_ARGUMENT: Final = (
    "a number, a text, a shape (tvm_ffi.Shape), an element type, a device, an array, a reference "
    "to a value on the workers, or a list or tuple with arrays or references in it"
)
_FIELDS: Final = "a list or tuple of values that calls take, which may be lists or tuples again"
#: The copy number of the teams that fetch tensors, which no program uses.
_FETCH_COPY: Final = (1 << 31) - 1
#: Types of arguments that are sent as they are. Exact types are looked up first, for speed.
_PLAIN: Final = frozenset({type(None), bool, float, str, bytes, DRef, DPackedFunc, DModule})
_SENT: Final = (disco.DRef, tvm_ffi.Shape, tvm_ffi.core.DataType, tvm_ffi.core.Device, str, bytes)
#: Keys of values on their way to the controller, and of files; one counter for all sessions.
value_keys = itertools.count(1)


class Values:
    """The values of one session's workers."""

    def __init__(
        self, dispatcher: CommandDispatcher, collectives: Collectives, device: str
    ) -> None:
        self._dispatcher = dispatcher
        self._collectives = collectives
        self._device = device

    # ---- calls ----------------------------------------------------------------------------

    def call(self, function: object, *args: Any) -> DRef:
        """Call a function on every worker, with arguments that may need a conversion."""
        arguments.instance("call_packed: func", function, disco.DRef, _FUNCTION)
        return self._dispatcher.call(
            function,
            *(
                arg
                if type(arg) in _PLAIN
                else self._as_argument(f"argument {position} of a call", arg)
                for position, arg in enumerate(args, 1)
            ),
        )

    def tuple_of(self, name: str, fields: object) -> DRef:
        """Make a tuple of the virtual machine on every worker; see `Session.tuple`."""
        if not isinstance(fields, (list, tuple)):
            raise arguments.wrong_type(name, _FIELDS, fields)
        separator = "" if name.endswith(("fields", "]")) else ", field "
        values = []
        for index, field in enumerate(fields):
            convert = self.tuple_of if isinstance(field, (list, tuple)) else self._as_argument
            values.append(convert(f"{name}{separator}[{index}]", field))
        return self._dispatcher.call(self._dispatcher.function(MAKE_TUPLE), *values)

    def _as_argument(self, name: str, value: Any) -> Any:
        """Return the value that is sent to the workers for an argument of a call."""
        if type(value) in _PLAIN or isinstance(value, _SENT):
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
        if _is_array(value):
            return self.broadcast(host_tensor(name, value), None, False)
        if isinstance(value, (list, tuple)):
            if _has_tensors(value):
                return self.tuple_of(name, value)
            raise TypeError(
                f"{name} is {arguments.quote(value)}, without arrays and references; pass "
                "session.put(...) for a tensor, tvm_ffi.Shape(...) for a shape, or "
                "session.tuple(...) for a tuple"
            )
        raise arguments.wrong_type(name, _ARGUMENT, value)

    def device_on_workers(self, name: str, device: Any) -> Any:
        """Return a device that the workers are about to use."""
        converted = as_device(name, device)
        on_gpu = converted is not None and converted.dlpack_device_type() == DEVICES["cuda"]
        if on_gpu and self._device == "cpu":  # its workers did not initialize CUDA
            self._dispatcher.function("tvm_ipc.cuda.bring_up")()
        return converted

    def empty(
        self,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        device: Any = None,
        worker0_only: bool = False,
        in_group: bool = True,
    ) -> DRef:
        """Allocate a tensor on every worker; see `Session.empty`."""
        extents = arguments.integers("empty: shape", shape, _SHAPE)
        element = as_dtype("empty: dtype", dtype)
        if math.prod(extents) * max(1, element.bits * element.lanes // 8) >= 1 << 63:
            raise ValueError(f"empty: no memory holds a tensor of shape {extents}")
        allocate = self._dispatcher.function(EMPTY)
        reference = allocate(
            tvm_ffi.Shape(extents),
            element,
            self.device_on_workers("empty: device", device),
            arguments.flag("empty: worker0_only", worker0_only),
            arguments.flag("empty: in_group", in_group),
        )
        workers = "the workers"
        if worker0_only:
            workers = "the first worker of each group" if in_group else "worker 0"
        reference._tensor = RemoteTensor(tuple(extents), str(element), workers)
        return reference

    # ---- from a worker to the controller --------------------------------------------------

    def get(self, reference: object, rank: object) -> np.ndarray[Any, Any]:
        """Return a copy of a tensor on one worker."""
        value = self._fetch("get", reference, rank, "rank")
        if isinstance(value, np.ndarray):
            return value
        if not isinstance(value, Tensor):
            raise TypeError(
                f"rank {rank} holds a {type(value).__name__}, not a tensor; "
                "debug_get_from_remote returns any value"
            )
        return np.asarray(value.numpy())

    def fetch(self, where: str, reference: object, rank: object, rank_name: str) -> Any:
        """Return the value on one worker; a tensor as a tensor of the controller."""
        value = self._fetch(where, reference, rank, rank_name)
        return tensor_over(value) if isinstance(value, np.ndarray) else value

    def _fetch(self, where: str, reference: object, rank: object, rank_name: str) -> Any:
        """Return the value on one worker; a large tensor of another process as an array."""
        check_reference(f"{where}: reference", reference)
        rank = self._collectives.rank(f"{where}: {rank_name}", rank)
        if self._device != "cpu":
            return self._receive("fetch", reference, rank)
        value = self._receive("fetch_limited", reference, rank, FETCHED_SEPARATELY)
        large = large_tensor(value)
        if large is None:
            return value
        # The worker broadcasts it in a team of its own, in which the program sends nothing.
        array = np.empty(large.shape, np.dtype(str(large.dtype)))
        team = self._collectives.team([rank, 0], _FETCH_COPY)
        target = self._take(tensor_over(array), reference)
        self._collectives.run("broadcast", team, target, target)
        del target  # frees the worker's reference to the array
        self._dispatcher.sync()
        return array

    def _receive(self, function: str, reference: object, rank: int, *options: int) -> Any:
        """Call a function of the workers that sends a value, and return the value."""
        dispatcher = self._dispatcher
        dispatcher.thread_state()
        send = dispatcher.function(f"tvm_ipc.worker.{function}")
        with dispatcher.lock:  # no recovery may discard the expected value before the call
            dispatcher.check_ready()
            key = next(value_keys)
            take = _native_expect(dispatcher.session, key)
            self.call(send, reference, rank, key, *options)
        dispatcher.sync()
        with dispatcher.lock:
            dispatcher.check_usable()  # another thread may have closed the session
            return take()

    def copy_from_worker_0(self, host_array: object, remote_array: object) -> None:
        """Copy worker 0's tensor into a tensor of the controller, which is written later."""
        if not isinstance(host_array, Tensor):
            raise arguments.wrong_type(
                "copy_from_worker_0: host_array",
                "a tvm.runtime.Tensor, which is written later (`get` returns a NumPy array)",
                host_array,
            )
        check_reference("copy_from_worker_0: remote_array", remote_array)
        self._call_with_host("tvm_ipc.worker.copy_to_host", host_array, remote_array)

    # ---- from the controller to the workers -----------------------------------------------

    def copy_to_worker_0(self, host_array: object, remote_array: DRef | None) -> DRef:
        """Copy an array of the controller into worker 0's tensor, allocated if it is None."""
        host = host_tensor("copy_to_worker_0: host_array", host_array)
        remote = target_of("copy_to_worker_0: remote_array", remote_array)
        if remote is None:
            # Not one tensor for each group: an in-group call would send the others, uninitialized.
            remote = self.empty(host.shape, host.dtype, worker0_only=True, in_group=False)
        self._copy_to_worker(remote, 0, host)
        return remote

    def copy_to_worker(self, reference: object, rank: object, value: object) -> None:
        """Copy an array of the controller into the tensor on one worker."""
        rank = self._collectives.rank("debug_copy_from: worker_id", rank)
        self._copy_to_worker(reference, rank, host_tensor("debug_copy_from: value", value))

    def _copy_to_worker(self, reference: object, rank: int, host: Tensor) -> None:
        self._call_with_host("tvm_ipc.worker.copy_from_host", host, rank, reference)
        self._wait_for_reading(host)

    def broadcast(self, host: Tensor, dst: DRef | None, scope: Scope) -> DRef:
        """Copy a tensor of the controller to every worker of a scope."""
        target = target_of("broadcast: dst", dst)
        if target is None and scope is False and self._fits_in_command(host):
            return self._send_in_command(host)
        target = self.empty(host.shape, host.dtype) if target is None else target
        source = self._at_root(host, scope)
        self._collectives.run("broadcast", scope, source, target)
        self._wait_for_reading(host)
        return target

    def _on_cpus(self, host: Tensor) -> bool:
        return self._device == "cpu" and host.device.dlpack_device_type() == DEVICES["cpu"]

    def _fits_in_command(self, host: Tensor) -> bool:
        has_bytes = tvm_ffi.dtype(host.dtype).bits >= 8 and host.is_contiguous()
        return self._on_cpus(host) and has_bytes and bytes_of(host) <= SENT_IN_COMMAND

    def _send_in_command(self, host: Tensor) -> DRef:
        shape, element = tuple(host.shape), tvm_ffi.dtype(host.dtype)
        reference = self._dispatcher.call(
            self._dispatcher.function("tvm_ipc.worker.tensor_of_bytes"),
            ctypes.string_at(host.data_ptr(), bytes_of(host)),
            tvm_ffi.Shape(shape),
            element,
        )
        reference._tensor = RemoteTensor(shape, str(element), "the workers")
        return reference

    def scatter(self, host: Tensor, dst: DRef | None, scope: Scope) -> DRef:
        """Copy row i of a tensor of the controller to worker i of a scope."""
        workers = len(scope.ranks) if isinstance(scope, Team) else self._collectives.num_workers
        if tuple(host.shape[:1]) != (workers,):
            raise ValueError(
                f"scatter: src has shape {tuple(host.shape)}, but "
                f"{'the team' if isinstance(scope, Team) else 'the session'} has "
                f"{arguments.counted(workers, 'worker')}; pass an array whose first dimension is "
                f"{workers}"
            )
        target = target_of("scatter: dst", dst)
        target = self.empty(host.shape[1:], host.dtype) if target is None else target
        source = self._at_root(host, scope)
        self._collectives.run("scatter", scope, source, target)
        self._wait_for_reading(host)
        return target

    def _at_root(self, host: Tensor, scope: Scope) -> DRef:
        """Return a tensor of the controller as a tensor of the root worker of a scope."""
        root = scope.ranks[0] if isinstance(scope, Team) else 0
        if root == 0 and self._on_cpus(host):
            return self._take(host)
        if not isinstance(scope, Team):
            return self.copy_to_worker_0(host, None)
        remote = self.empty(host.shape, host.dtype)
        self._copy_to_worker(remote, root, host)
        return remote

    def _take(self, host: Tensor, otherwise: object = None) -> DRef:
        """Return a tensor of the controller as worker 0's, which is a thread of its process.

        The reference is to `otherwise` on the other workers.
        """
        return self._call_with_host("tvm_ipc.worker.take_from_host", host, otherwise)

    def _call_with_host(self, name: str, host: Tensor, *args: Any) -> DRef:
        """Call a function whose first argument is, on worker 0, a tensor of the controller."""
        dispatcher = self._dispatcher
        dispatcher.check_references(args)
        function = dispatcher.function(name)
        # A recovery discards the tensors of skipped commands. The lock keeps it from coming
        # between these two calls.
        with dispatcher.lock:
            dispatcher.check_ready()
            return self.call(function, _native_put(dispatcher.session, host), *args)

    def _wait_for_reading(self, host: Tensor) -> None:
        """Wait until the workers have read a tensor that may be the caller's own memory."""
        if bytes_of(host) > READ_IN_PLACE:
            self._dispatcher.sync()


def _is_array(value: Any) -> bool:
    return any(hasattr(value, protocol) for protocol in ("__array__", "__dlpack__"))


def _has_tensors(fields: Sequence[Any]) -> bool:
    """Return whether there is a reference or an array in a list or tuple, at any depth."""
    return any(
        _has_tensors(field)
        if isinstance(field, (list, tuple))
        else isinstance(field, disco.DRef)
        or (_is_array(field) and not isinstance(field, np.generic))
        for field in fields
    )
