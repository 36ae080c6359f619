# SPDX-License-Identifier: Apache-2.0
"""Provide `tvm_ipc.Session`, the session that users open."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from tvm.runtime import Tensor, disco

from tvm_ipc import arguments
from tvm_ipc.html_tables import html_table
from tvm_ipc.packed_functions import BACKENDS, MODULE_CHECK
from tvm_ipc.packed_functions.generate_collective_functions import define_session_methods
from tvm_ipc.runtime import (
    device_and_backend_assignment,
    log,
    standard_fd_reservation,
)
from tvm_ipc.runtime.collectives import Collectives
from tvm_ipc.runtime.defer_sigint import defer_sigint
from tvm_ipc.runtime.export_library import library_of
from tvm_ipc.runtime.references import DModule, DPackedFunc, DRef
from tvm_ipc.runtime.send_commands_and_raise_errors import CommandDispatcher
from tvm_ipc.runtime.send_library_to_nodes import distribute_module
from tvm_ipc.runtime.session_argument_conversion import host_tensor
from tvm_ipc.runtime.session_start import SessionStart, StartOptions
from tvm_ipc.runtime.shutdown import Shutdown
from tvm_ipc.runtime.team import Team
from tvm_ipc.runtime.value_transfer import Values, value_keys
from tvm_ipc.tvm_private_names import IMPORT_PYTHON_MODULE, LOAD_VM_MODULE

if TYPE_CHECKING:
    from typing_extensions import Self

_log: Final = logging.getLogger("tvm_ipc.session")


if TYPE_CHECKING:
    from tvm_ipc.packed_functions.generated_collective_functions import SessionCollectives
else:
    SessionCollectives = define_session_methods(
        {"__name__": __name__, "DRef": DRef, "Sequence": Sequence, "Team": Team}
    )


class Session(SessionCollectives, disco.Session):  # type: ignore[misc]
    """A Disco session whose workers share memory, and whose errors are Python exceptions.

    All methods of Disco's sessions are supported. Commands are asynchronous. An error is raised by
    the next `sync`, `get` or `close`, by another command that has to wait for the workers, or by
    leaving the `with` block.

    Any thread may use a session, and each thread's commands keep their order. After an error, any
    command that was in flight may not have run. Every thread that had commands in flight therefore
    gets the error once, at its next command, `sync`, `get` or `close`. A thread without commands in
    flight gets the error only if its own call discovers it.

    By default a collective runs separately in each group of workers. With `in_group=False` it runs
    among all workers. With `team=`, it runs among the workers of a team that the method `team`
    returned. A collective returns its target (the reference that you pass, or a new tensor), except
    `broadcast_from_worker0` and `scatter_from_worker0`, which return None.

    Parameters
    ----------
    num_workers : the number of workers, 1 to 64. Worker 0 is a thread of this process.
    num_groups : the number of groups of equal size; each group is a range of consecutive workers.
    threads : make the other workers threads of this process too, instead of processes.
    compiler : load all of TVM in worker processes. By default they load only TVM's runtime, which
        takes half the time and memory, but lacks the functions that need the compiler.
    timeout : seconds after which a wait for a worker ends in a `DeadlineError`; by default
        `TVM_IPC_TIMEOUT`, or 300.
    arena_limit : the maximum size of the memory that each worker shares with the others, in bytes
        or as "512M". The default is `TVM_IPC_ARENA_LIMIT`. If that is not set, it is half the
        machine's memory divided by the number of workers; on GPUs it depends on the backend, and is
        at most 1 GiB for "cuda".
    device : the devices that the workers compute on, and that their tensors are allocated on:
        "cpu", or "cuda" for NVIDIA GPUs.
    device_ids : the number of each worker's device on its machine; by default 0, 1, 2, ... on each
        machine, one GPU for each worker. If a number is repeated, workers share that GPU, which
        the backend "nccl" does not support. Ignored for workers on CPUs.
    backend : the library that moves data between the workers. "auto" selects the best available
        backend for the device; the log reports which one, and why. The names of all backends are
        in `tvm_ipc.packed_functions.BACKENDS`.
    hosts : the names of machines, this one first. Workers are distributed over them in order. A
        number simulates that many nodes on this machine, which share nothing but the network.
        Nodes are started through MPI, which the extra `mpi` installs. In a program that
        `tvm-ipc node` runs, "allocation" selects all nodes of the launcher's allocation.
    order : the order of additions in sums across nodes. "nodes" computes the sum of each node
        first, and then adds these sums in the order of the nodes. "flat" adds the values of all
        workers in their order. It gives the same bits as on one machine, but moves more data. On
        one machine, and for "tree_sum", there is no difference.

    Examples
    --------
    >>> import numpy as np
    >>> import tvm_ipc
    >>> with tvm_ipc.Session(num_workers=2) as session:
    ...     x = session.scatter(np.array([[1, 2], [3, 4]], "float32"))  # a row for each worker
    ...     y = session.allreduce(x)
    ...     session.get(y, rank=1).tolist()
    [4.0, 6.0]
    """

    __slots__ = ("__dict__", "__weakref__")

    def __init__(
        self,
        num_workers: int = 2,
        *,
        num_groups: int = 1,
        threads: bool = False,
        compiler: bool = False,
        timeout: float | None = None,
        arena_limit: int | str | None = None,
        device: str = "cpu",
        device_ids: Sequence[int] | None = None,
        backend: str = "auto",
        hosts: int | str | Sequence[str] | None = None,
        order: str = "nodes",
    ) -> None:
        options = StartOptions.from_arguments(
            num_workers=num_workers,
            num_groups=num_groups,
            threads=threads,
            compiler=compiler,
            timeout=timeout,
            arena_limit=arena_limit,
            device=device,
            device_ids=device_ids,
            backend=backend,
            hosts=hosts,
            order=order,
        )
        standard_fd_reservation.fill()  # the program may have closed one since `runtime.ready`
        log.start()
        self._description = options.describe()
        self._device = options.assignment.device
        self._dispatcher = CommandDispatcher(self, options.settings.timeout)
        self._collectives = Collectives(
            self._dispatcher,
            options.num_workers,
            options.num_groups,
            options.assignment.backend,
        )
        self._values = Values(self._dispatcher, self._collectives, self._device)
        self._shutdown = Shutdown(self._dispatcher)
        start = SessionStart(self, options, self._dispatcher, self._shutdown)
        defer_sigint(start.run, start.interrupt)
        self._collectives.backend = start.backend
        self._nodes = start.nodes
        self._description += start.memory

    # ---- properties -----------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """The backend between the workers: one of `tvm_ipc.packed_functions.BACKENDS`."""
        return self._collectives.backend

    @property
    def device(self) -> str:
        """The kind of device that the workers compute on: "cpu" or "cuda"."""
        return self._device

    @property
    def nodes(self) -> tuple[dict[str, Any], ...]:
        """The nodes of a session with `hosts`: "host", "address", "cores" and "ranks" of each."""
        return getattr(self._dispatcher.pool, "facts", ())

    @property
    def pids(self) -> tuple[int, ...]:
        """The process of each worker."""
        return self._dispatcher.pids

    @property
    def timeout(self) -> float:
        """Seconds after which a wait for a worker ends in a `DeadlineError`."""
        return self._dispatcher.timeout

    @property
    def usable(self) -> bool:
        """True while commands can be sent: not closed, no worker died, no deadline passed."""
        return not (self._dispatcher.closed or self._dispatcher.unusable_reason)

    def __repr__(self) -> str:
        """Return the kind and number of workers, and whether the session is usable."""
        workers = self.__dict__.get("_description", "no workers")
        return f"<tvm_ipc.Session: {workers}, {self._state()}>"

    def _repr_html_(self) -> str:
        """Return the workers and the state of the session as a table, for notebooks."""
        dispatcher = self.__dict__.get("_dispatcher")
        collectives = self.__dict__.get("_collectives")
        rows = [
            ("workers", self.__dict__.get("_description", "no workers")),
            ("backend", getattr(collectives, "backend", "")),
            ("processes", ", ".join(map(str, getattr(dispatcher, "pids", ())))),
            ("state", self._state()),
            ("reason", getattr(dispatcher, "unusable_reason", "")),
        ]
        return html_table("tvm_ipc.Session", (), [row for row in rows if row[1]])

    def _state(self) -> str:
        """Return a phrase for the state, also of a session that did not start."""
        dispatcher = self.__dict__.get("_dispatcher")
        if dispatcher is None or dispatcher.closed:
            return "closed"
        return "not usable" if dispatcher.unusable_reason else "open"

    # ---- functions and modules ------------------------------------------------------------

    def get_global_func(self, name: str) -> DPackedFunc:
        """Return the function `name` of every worker; the next sync raises if one lacks it."""
        arguments.text("get_global_func: name", name, "the name of a function")
        return DPackedFunc.of(self._get_cached_method("tvm_ipc.worker.get_global_func")(name))

    def call_packed(self, func: DRef, *args: Any) -> DRef:
        """Call a function on every worker, and return a reference to the results, which stay there.

        Parameters
        ----------
        func : a function from `get_global_func` or from a module.
        *args : numbers, texts, shapes, element types, devices and references. Arrays are sent to
            every worker, as `put` does. Lists and tuples that contain references or arrays are made
            tuples of the virtual machine, as `tuple` does.
        """
        return self._values.call(func, *args)

    def import_python_module(self, module_name: str) -> None:
        """Import the module `module_name` in every worker, to register the functions it defines."""
        expected = "the name of a module as in an import statement"
        arguments.text("import_python_module: module_name", module_name, expected)
        self._get_cached_method(IMPORT_PYTHON_MODULE)(module_name)

    def load_vm_module(self, path: Any, device: Any = None) -> DModule:
        """Load a compiled module in every worker, and return a reference to it.

        Nodes that do not have the file receive it. An error is raised if the module has collectives
        and `get_pipeline` compiled it for another number of workers or groups.

        Parameters
        ----------
        path : the path of a library that `export_library` wrote, or a compiled executable itself.
        device : by default the worker's own device.
        """
        self._dispatcher.check_usable()
        device = self._values.device_on_workers("load_vm_module: device", device)
        library = library_of(
            path, lambda: self._shutdown.scratch_dir.path() / f"module-{next(value_keys)}.so"
        )
        _log.debug("%s: loads %s", self._dispatcher.name, library)
        if self._nodes is None:
            load = self._get_cached_method(LOAD_VM_MODULE)
            module = DModule.of(load(str(library), device))
        else:
            digest = distribute_module(self, library, self._nodes.first_ranks)
            load = self._get_cached_method("tvm_ipc.worker.load_library")
            module = DModule.of(load(str(library), digest, device))
        check = self._get_cached_method("tvm_ipc.worker.call_if_present")
        check(module, MODULE_CHECK)
        return module

    def init_ccl(self, ccl: str, *device_ids: int) -> None:
        """Check that `ccl` is the name of this session's backend, or "auto".

        Programs that were written for Disco's sessions call this to start the backend. Here it is
        running already, so there is nothing else to do. `device_ids` have no effect.
        """
        names = ("auto", *BACKENDS)
        if arguments.one_of("init_ccl: ccl", ccl, names) not in ("auto", self.backend):
            raise ValueError(
                f"init_ccl: ccl is {ccl!r}, and this session was opened with the backend "
                f"{self.backend!r}: open one with Session(..., device={BACKENDS[ccl]!r}, "
                f"backend={ccl!r})"
            )
        device_and_backend_assignment.numbers(
            "init_ccl: device_ids", device_ids, "numbers of devices"
        )

    # ---- waiting and closing --------------------------------------------------------------

    def sync(self) -> None:
        """Wait until every worker has done every command; raise what went wrong.

        Every thread that had commands in flight gets an error once, at its next command, `sync`,
        `get` or `close`. A thread without commands in flight gets the error only if its own call
        discovers it.
        """
        self._dispatcher.sync()

    def close(self) -> None:
        """End the workers, and raise the errors that they reported since the last sync.

        The workers end even if an error is raised. Closing a session twice has no effect.
        """
        self._shutdown.close()

    def shutdown(self) -> None:
        """Close the session, as `close` does."""
        self.close()

    def __enter__(self) -> Self:
        """Return the session."""
        self._dispatcher.check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the session.

        If the block raised an exception, do not wait for commands in flight. The exception
        propagates unchanged.
        """
        if error is None:
            self.close()
        else:
            self._shutdown.close_after_exception()

    def __del__(self) -> None:
        """Close the session if the program did not."""
        shutdown: Shutdown | None = self.__dict__.get("_shutdown")
        if shutdown is not None:
            shutdown.close_garbage()

    # ---- values ---------------------------------------------------------------------------

    def put(self, array: npt.ArrayLike | Tensor) -> DRef:
        """Copy `array` to every worker, and return a reference to the copies.

        Arrays above 64 MB are sent without a staging copy; `put` returns once the workers have
        read them. The same holds for the other methods that send arrays.
        """
        return self._values.broadcast(host_tensor("put: array", array), None, False)

    def get(self, reference: DRef, rank: int = 0) -> np.ndarray[Any, Any]:
        """Return a copy of the value of `reference` on worker `rank`, after earlier commands."""
        return self._values.get(reference, rank)

    def tuple(self, fields: Sequence[Any]) -> DRef:
        """Make a tuple of the virtual machine on every worker, and return a reference to it.

        Compiled functions take it for a parameter of type `R.Tuple`, such as packed parameters.
        A call also makes tuples of lists that you pass to it. To pass the same tuple often, make it
        once.

        Parameters
        ----------
        fields : a list or tuple of references, arrays and other values that calls take. Lists and
            tuples in it become tuples too. Arrays are sent to every worker, as `put` does.

        Examples
        --------
        >>> import numpy as np
        >>> import tvm_ipc
        >>> with tvm_ipc.Session(2) as session:
        ...     weights = session.tuple([session.put(np.ones(3)), session.scatter(np.eye(2))])
        ...     second = session.get_global_func("vm.builtin.tuple_getitem")(weights, 1)
        ...     session.get(second, rank=1).tolist()
        [0.0, 1.0]
        """
        return self._values.tuple_of("tuple: fields", fields)

    def empty(
        self,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        device: Any = None,
        worker0_only: bool = False,
        in_group: bool = True,
    ) -> DRef:
        """Allocate an uninitialized tensor on every worker, and return a reference to it.

        Parameters
        ----------
        shape : the extents of the tensor.
        dtype : the type of its elements.
        device : by default the worker's own device.
        worker0_only : allocate only on the first worker of each group.
        in_group : if False and `worker0_only`, allocate only on worker 0.
        """
        return self._values.empty(shape, dtype, device, worker0_only, in_group)

    def copy_to_worker_0(
        self, host_array: npt.ArrayLike | Tensor, remote_array: DRef | None = None
    ) -> DRef:
        """Copy `host_array` to worker 0, into `remote_array` or a new tensor, and return that."""
        return self._values.copy_to_worker_0(host_array, remote_array)

    def copy_from_worker_0(self, host_array: Tensor, remote_array: DRef) -> None:
        """Copy worker 0's `remote_array` into `host_array`; call `sync` before you read it."""
        self._values.copy_from_worker_0(host_array, remote_array)

    # ---- teams and collectives ------------------------------------------------------------

    def team(self, ranks: Sequence[int], copy: int = 0) -> Team:
        """Return a team of workers, which you can pass to collectives as `team`.

        Only the workers of the team take part in such a collective.

        Parameters
        ----------
        ranks : the workers, in the order of the team.
        copy : a number that tells teams of the same workers apart: each value of `copy` is a team
            of its own. Two threads of a worker cannot run collectives of one team at the same time,
            but they can use two teams with different `copy`.
        """
        return self._collectives.team(ranks, copy)

    def broadcast(
        self,
        src: npt.ArrayLike | Tensor,
        dst: DRef | None = None,
        in_group: bool = True,
        *,
        team: Team | None = None,
    ) -> DRef:
        """Copy the array `src` to every worker, into `dst` or a new tensor, and return that."""
        host = host_tensor("broadcast: src", src)
        return self._values.broadcast(
            host, dst, self._collectives.scope("broadcast", in_group, team)
        )

    def scatter(
        self,
        src: npt.ArrayLike | Tensor,
        dst: DRef | None = None,
        in_group: bool = True,
        *,
        team: Team | None = None,
    ) -> DRef:
        """Copy `src[i]` to worker i, into `dst` or a new tensor, and return that."""
        host = host_tensor("scatter: src", src)
        return self._values.scatter(host, dst, self._collectives.scope("scatter", in_group, team))

    def emulate_link(
        self, latency: float = 0.0, bandwidth: float = 0.0, jitter: float = 0.0
    ) -> None:
        """Delay the data that workers receive, as if it came over a link of the given speed.

        A worker sleeps during the delay and uses no core. With the defaults there is no delay.

        Parameters
        ----------
        latency : seconds by which data arrives later than it would without the emulated link.
        bandwidth : bytes per second that a worker receives; 0 means no limit.
        jitter : the maximum of a random delay in seconds that is added.
        """
        if self._device != "cpu":
            raise ValueError(
                "emulate_link: links are emulated between workers on CPUs, and those of this "
                f"session are on {self._device}"
            )
        self._collectives.emulate_link(latency, bandwidth, jitter)

    # ---- hooks of Disco and of references -------------------------------------------------

    def _get_cached_method(self, name: str) -> DPackedFunc:
        return self._dispatcher.function(name)

    def _sync_worker(self, worker_id: int) -> None:
        self.sync()

    def _sync_all(self) -> None:
        self.sync()

    def _fetch(self, where: str, reference: object, rank: int, rank_name: str) -> Any:
        return self._values.fetch(where, reference, rank, rank_name)

    def _debug_copy(self, reference: object, rank: int, value: Any) -> None:
        self._values.copy_to_worker(reference, rank, value)
