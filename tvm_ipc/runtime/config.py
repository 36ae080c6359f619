# SPDX-License-Identifier: Apache-2.0
"""Read the configuration; no other module reads environment variables.

=====================  =====================================================================
`TVM_IPC_TIMEOUT`      seconds after which a wait for a worker ends in an error (default 300)
`TVM_IPC_ARENA_LIMIT`  bytes of shared memory per worker, such as 512M or 2G (default: chosen
                       by the native library from the machine's memory)
`TVM_IPC_ISA`          instruction set of the reductions: auto, avx512bf16, avx512, avx2 or
                       portable; every one gives the same bits (default auto)
`TVM_IPC_LOG`          print the log, from this level on: debug, info, warning or error
                       (default: print nothing)
`TVM_IPC_CACHE`        folder for compiled models (default: tvm_ipc in `XDG_CACHE_HOME`, or in
                       .cache of the home folder); it may be removed at any time
`TVM_IPC_VERIFY_EACH`  1: `get_pipeline` checks after each phase that the module is well-formed
                       (default 0)
=====================  =====================================================================

`TVM_IPC_CUDA_GRAPHS_OF_THREADS` is not a setting of a session, but a guarantee that a program
gives; workers on GPUs read it when they start.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tvm_ipc import arguments
from tvm_ipc.errors import IPCError
from tvm_ipc.this_machine import available_cores

#: The settings; any other variable whose name begins with the prefix is reported as unknown.
SETTINGS: Final = (
    "TVM_IPC_TIMEOUT",
    "TVM_IPC_ARENA_LIMIT",
    "TVM_IPC_ISA",
    "TVM_IPC_LOG",
    "TVM_IPC_CACHE",
    "TVM_IPC_VERIFY_EACH",
    "TVM_IPC_CUDA_GRAPHS_OF_THREADS",
)
_PREFIX: Final = "TVM_IPC_"
#: CUDA's queues for the streams of a process, unless CUDA_DEVICE_MAX_CONNECTIONS is set.
_CUDA_QUEUES: Final = 8
_MOST_CUDA_QUEUES: Final = 32
DEFAULT_TIMEOUT: Final = 300.0
INSTRUCTION_SETS: Final = ("auto", "avx512bf16", "avx512", "avx2", "portable")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_BYTES: Final = "a number of bytes above 0, or a size such as '512M'"
_MAX_BYTES: Final = (1 << 63) - 1
_SIZE: Final = re.compile(r"(\d+)\s*([KMGT]?)(?:I?B)?")
#: Variables of other libraries: for the number of threads, and for what TVM loads.
_THREAD_VARIABLES: Final = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "TVM_BIND_THREADS")
_TVM_VARIABLES: Final = (
    "TVM_USE_RUNTIME_LIB",
    "TVM_DEVICE_BACKEND_AUTOLOAD",
    "TVM_LIBRARY_PATH",
)
#: Variables for the compiler that TVM links with, in order of precedence.
_COMPILER_VARIABLES: Final = ("CXX", "CC")
#: Prefixes of the variables that MPI launchers set for the processes that they start.
_MPI_PREFIXES: Final = (
    "OMPI_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "MPI_LOCAL",
    "HYDRA_",
    "HYDI_",
    "MPIEXEC_",
)
#: The prefix of the variables that configure NCCL.
_NCCL_PREFIX: Final = "NCCL_"
#: The folder in which the workers of an agent keep files; not a setting of users.
_FOLDER: Final = "TVM_IPC_FOLDER_OF_NODE"
#: A program's descriptor for messages to the agent that runs it, and the hosts of the nodes.
_ALLOCATION: Final = "TVM_IPC_ALLOCATION"
#: The unknown variables that a parent process has reported, so that no child reports them again.
_REPORTED: Final = "TVM_IPC_REPORTED_VARIABLES"
#: Variables that are not settings: those above, and those of the build, the tests and CI.
_OTHER_VARIABLES: Final = (_FOLDER, _ALLOCATION, _REPORTED, "TVM_IPC_CUDA")
_TEST_PREFIXES: Final = ("TVM_IPC_TEST_", "TVM_IPC_DOUBLE_")
#: TCP keepalive of Open MPI's daemons, which are not notified of a link that is down: the first
#: probe after 10 s without data, and then every 5 s; after four probes without an answer they end.
_KEEPALIVE: Final = {
    "PRTE_MCA_oob_tcp_keepalive_time": "10",
    "PRTE_MCA_oob_tcp_keepalive_intvl": "5",
    "PRTE_MCA_oob_tcp_keepalive_probes": "4",
}
#: A launcher sets one of these variables for the processes that it starts.
_LAUNCHED: Final = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_STEP_ID")


@dataclass(frozen=True)
class Config:
    """The settings of a session.

    Attributes
    ----------
    timeout : seconds after which a wait for a worker ends in an error.
    arena_limit : the most bytes of shared memory of one worker; None leaves it to the native
        library.
    instruction_set : the instruction set of the reductions.
    """

    timeout: float = DEFAULT_TIMEOUT
    arena_limit: int | None = None
    instruction_set: str = "auto"

    def __post_init__(self) -> None:
        """Check the settings, and convert numbers."""
        timeout = arguments.above_zero("timeout", self.timeout, "a number of seconds above 0")
        object.__setattr__(self, "timeout", timeout)
        if self.arena_limit is not None:
            limit = arguments.integer("arena_limit", self.arena_limit, _BYTES, 1, _MAX_BYTES)
            object.__setattr__(self, "arena_limit", limit)
        arguments.one_of("instruction_set", self.instruction_set, INSTRUCTION_SETS)

    @classmethod
    def from_environment(
        cls, *, timeout: float | None = None, arena_limit: int | str | None = None
    ) -> Config:
        """Read the environment; an argument overrides its variable.

        Unknown variables are reported once as a `UserWarning`.
        """
        for message in unknown_variables():
            # The environment is the cause, so that no line of a program is shown.
            warnings.warn_explicit(message, UserWarning, "tvm_ipc", 0, module="tvm_ipc")
        if timeout is None:
            timeout = _timeout("TVM_IPC_TIMEOUT")
        if arena_limit is None:
            arena_limit = _arena_limit("TVM_IPC_ARENA_LIMIT")
        elif isinstance(arena_limit, str):
            try:
                arena_limit = parse_size(arena_limit)
            except ValueError:
                raise arguments.wrong_value("arena_limit", _BYTES, arena_limit) from None
        return cls(timeout, arena_limit, _instruction_set("TVM_IPC_ISA"))


def parse_size(text: str) -> int:
    """Parse a number of bytes such as 1048576, 512M or 2GiB; the units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is no size; examples: 1048576, 512M, 2G")
    number, unit = match.groups()
    return int(number) << (10 * " KMGT".index(unit or " "))


def unknown_variables() -> list[str]:
    """Return a message for each variable with our prefix that tvm_ipc does not know.

    Each variable is reported once, by this process or by the process that started it.
    """
    reported = os.environ.get(_REPORTED, "").split()
    unknown = [
        name
        for name in sorted(os.environ)
        if name.startswith(_PREFIX)
        and name not in (*SETTINGS, *_OTHER_VARIABLES, *reported)
        and not name.startswith(_TEST_PREFIXES)
    ]
    if unknown:
        os.environ[_REPORTED] = " ".join([*reported, *unknown])
    return [_explain_unknown(name) for name in unknown]


def _explain_unknown(name: str) -> str:
    import difflib  # most programs do not need it

    names = {setting.removeprefix(_PREFIX): setting for setting in SETTINGS}
    near = difflib.get_close_matches(name.removeprefix(_PREFIX).upper(), names, 1, 0.5)
    hint = f"did you mean {names[near[0]]}?" if near else f"the settings are {', '.join(SETTINGS)}"
    return f"environment: {name} is not a setting of tvm_ipc and has no effect; {hint}"


def log_level() -> int | None:
    """Return the lowest level that is printed; None if the log is not printed."""
    text = os.environ.get("TVM_IPC_LOG", "").strip().lower()
    if not text:
        return None
    if text not in LOG_LEVELS:
        raise IPCError(f"TVM_IPC_LOG is {text!r}; it must be one of {', '.join(LOG_LEVELS)}")
    level: int = getattr(logging, text.upper())
    return level


def verify_each() -> bool:
    """Return whether the pipeline checks after each phase that the module is well-formed."""
    return _flag("TVM_IPC_VERIFY_EACH")


def cache_folder() -> Path:
    """Return the folder for results that take long to compute again."""
    folder = os.environ.get("TVM_IPC_CACHE", "").strip()
    if folder:
        return Path(folder).absolute()
    caches = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        return (Path(caches) if caches else Path.home() / ".cache").absolute() / "tvm_ipc"
    except RuntimeError as error:
        raise IPCError(
            f"there is no home folder to keep compiled models in ({error}); set TVM_IPC_CACHE"
        ) from error


def thread_settings() -> dict[str, str | None]:
    """Return the variables that set the number of threads of TVM and OpenMP."""
    return {name: os.environ.get(name) for name in _THREAD_VARIABLES}


def tvm_settings() -> dict[str, str | None]:
    """Return the variables that select the libraries that TVM loads."""
    return {name: os.environ.get(name) for name in _TVM_VARIABLES}


def visible_gpus() -> str | None:
    """Return the variable that hides GPUs from a process; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def compiler_settings() -> dict[str, str | None]:
    """Return the variables that select the compiler that TVM links with."""
    return {name: os.environ.get(name) for name in _COMPILER_VARIABLES}


def queues_for_graphs() -> int:
    """Return how many queues CUDA has for the streams of this process.

    0 if workers that are threads must not capture collectives in CUDA graphs.
    """
    if not _flag("TVM_IPC_CUDA_GRAPHS_OF_THREADS"):
        return 0
    text = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    asked = int(text) if text.isdecimal() else 0
    return min(asked, _MOST_CUDA_QUEUES) if asked > 0 else _CUDA_QUEUES


def threads_per_worker(num_workers: int, cores: int | None = None) -> int:
    """Return the number of threads of each worker, at most one for each core in total."""
    text = os.environ.get("TVM_NUM_THREADS", "").strip()
    if text:
        if not (text.isdecimal() and int(text) > 0):
            raise IPCError(f"TVM_NUM_THREADS is {text!r}; it must be a number of threads above 0")
        return int(text)
    return max(1, (available_cores() if cores is None else cores) // num_workers)


def worker_environment(threads: int, compiler: bool) -> dict[str, str]:
    """Return the environment of a worker process."""
    return {
        **os.environ,
        "TVM_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "TVM_USE_RUNTIME_LIB": "0" if compiler else "1",
    }


def set_where_unset(settings: Mapping[str, str]) -> None:
    """Set variables for other libraries that this process is about to load, unless they are set."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def started_by_launcher() -> str | None:
    """Return the variable that an MPI or Slurm launcher set for this process; None if none did."""
    return next((name for name in _LAUNCHED if name in os.environ), None)


def own_settings() -> dict[str, str]:
    """Return the variables of this package that the user has set."""
    return {
        name: text
        for name, text in os.environ.items()
        if name.startswith(_PREFIX) and name not in (_FOLDER, _ALLOCATION, _REPORTED)
    }


def settings_for_nodes() -> dict[str, str]:
    """Return the variables that are passed to workers on other machines: ours, and NCCL's."""
    nccl_settings = {
        name: text for name, text in os.environ.items() if name.startswith(_NCCL_PREFIX)
    }
    reported = os.environ.get(_REPORTED)
    own = {**own_settings(), **({_REPORTED: reported} if reported else {})}
    return {**nccl_settings, **own}


def with_settings(environment: dict[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return a worker's environment with the result of `settings_for_nodes`.

    A node's own variables for NCCL, such as its network interface, take precedence.
    """
    ours = {name: text for name, text in settings.items() if not name.startswith(_NCCL_PREFIX)}
    return {**settings, **environment, **ours}


def folder_of_node() -> Path | None:
    """Return the folder for files of the agent that started this worker; None if none did."""
    text = os.environ.get(_FOLDER, "")
    return Path(text) if text else None


def allocation() -> tuple[int, tuple[str, ...]] | None:
    """Return the descriptor to the agent that runs this program, and the hosts of all agents."""
    descriptor, _, hosts = os.environ.get(_ALLOCATION, "").partition(" ")
    return (int(descriptor), tuple(hosts.split())) if descriptor else None


def of_allocation(descriptor: int, hosts: list[str]) -> dict[str, str]:
    """Return the environment of a program that an agent runs, which is not an MPI rank."""
    own = without_mpi({name: text for name, text in os.environ.items() if name not in _LAUNCHED})
    return {**own, _ALLOCATION: " ".join([str(descriptor), *hosts])}


def of_launcher(temporary: Path) -> dict[str, str]:
    """Return the environment of an MPI launcher, with a temporary folder for Open MPI's.

    The launcher passes the settings of its daemons on to them.
    """
    return {**_KEEPALIVE, **os.environ, "PRTE_MCA_prte_local_tmpdir_base": str(temporary)}


def folder_of_daemon() -> str:
    """Return the folder of the Open MPI daemon that started this process; "" if none did."""
    return os.environ.get("PMIX_SERVER_TMPDIR", "")


def with_folder(environment: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the environment of a worker that keeps files in a folder."""
    return {**environment, _FOLDER: str(folder)}


def without_mpi(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment without the variables that an MPI launcher set for this process."""
    return {name: text for name, text in environment.items() if not name.startswith(_MPI_PREFIXES)}


def compiler_environment(temporary: str) -> dict[str, str]:
    """Return the environment of a process that compiles, with a folder for its temporary files."""
    return {**os.environ, "TVM_USE_RUNTIME_LIB": "0", "TMPDIR": temporary}


@contextlib.contextmanager
def runtime_alone() -> Iterator[None]:
    """Make an `import tvm` inside the `with` block load only the runtime."""
    previous = os.environ.get("TVM_USE_RUNTIME_LIB")
    os.environ["TVM_USE_RUNTIME_LIB"] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ["TVM_USE_RUNTIME_LIB"]
        else:
            os.environ["TVM_USE_RUNTIME_LIB"] = previous


def _flag(name: str) -> bool:
    text = os.environ.get(name, "").strip()
    if text not in ("", "0", "1"):
        raise IPCError(f"{name} is {text!r}; it must be 0 or 1")
    return text == "1"


def _timeout(name: str) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (0 < seconds < math.inf):
        raise IPCError(f"{name} is {text!r}; it must be a number of seconds above 0, such as 60")
    return seconds


def _arena_limit(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        size = parse_size(text)
    except ValueError:
        size = 0
    if size == 0:
        raise IPCError(f"{name} is {text!r}; it must be a size above 0, such as 512M or 2G")
    return size


def _instruction_set(name: str) -> str:
    text = os.environ.get(name, "").strip().lower() or "auto"
    if text not in INSTRUCTION_SETS:
        raise IPCError(f"{name} is {text!r}; it must be one of {', '.join(INSTRUCTION_SETS)}")
    return text
