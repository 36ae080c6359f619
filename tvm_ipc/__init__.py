# SPDX-License-Identifier: Apache-2.0
"""Run Relax programs on several workers with the released apache-tvm wheel.

Importing this module is cheap and does not import TVM: `import tvm` calls `_autoload` at its
end, in every process, and a program may also import `tvm_ipc` first. A name that needs TVM
imports it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tvm_ipc import errors, packed_functions, script_namespace
from tvm_ipc.runtime import ready_hooks, worker_pool_interface

if TYPE_CHECKING:
    from tvm_ipc import comm, cpu, gpu, models, spmd, transform
    from tvm_ipc.calibration import Calibration
    from tvm_ipc.cpu.target import cpu_target
    from tvm_ipc.models.weights.load import load_weights
    from tvm_ipc.pipeline import get_pipeline
    from tvm_ipc.runtime.session import Session, init_ccl
    from tvm_ipc.runtime.teams import CurrentRank, Team
    from tvm_ipc.runtime.tvm_import import runtime_only
    from tvm_ipc.spmd import parallelize

    __version__: str

__all__ = [
    "Calibration",
    "CurrentRank",
    "Session",
    "Team",
    "__version__",
    "comm",
    "cpu",
    "cpu_target",
    "errors",
    "get_pipeline",
    "gpu",
    "init_ccl",
    "load_weights",
    "models",
    "packed_functions",
    "parallelize",
    "runtime_only",
    "spmd",
    "transform",
]

_RUNTIME_MODULES = {
    "Session": "session",
    "init_ccl": "session",
    "CurrentRank": "teams",
    "Team": "teams",
}


def _start_node_pool(where: str, hosts: Any, num_workers: int) -> Any:
    return importlib.import_module("tvm_ipc.nodes.hosts_argument").read(where, hosts, num_workers)


# The runtime imports no other folder, so they are registered with it here.
worker_pool_interface.node_pool_factory = _start_node_pool
ready_hooks.modules += [
    "tvm_ipc.cpu.openblas_discovery",
    "tvm_ipc.gpu.patch_cuda_headers",
    "tvm_ipc.gpu.discovery",
]
ready_hooks.on_ready.append(script_namespace.install)


def _autoload() -> None:
    """Set up the runtime; `import tvm` calls this entry point of the group `tvm.backends`."""
    from tvm_ipc import runtime

    runtime.ready()


if not TYPE_CHECKING:  # a type checker would take every name for defined

    def __getattr__(name: str) -> Any:
        value: Any
        if name in _RUNTIME_MODULES:
            from tvm_ipc import runtime

            runtime.ready()
            value = getattr(
                importlib.import_module(f"tvm_ipc.runtime.{_RUNTIME_MODULES[name]}"), name
            )
        elif name in ("comm", "cpu", "gpu", "models", "spmd", "transform"):
            value = importlib.import_module(f"tvm_ipc.{name}")
        elif name == "Calibration":
            value = importlib.import_module("tvm_ipc.calibration").Calibration
        elif name == "get_pipeline":
            value = importlib.import_module("tvm_ipc.pipeline").get_pipeline
        elif name == "cpu_target":
            value = importlib.import_module("tvm_ipc.cpu.target").cpu_target
        elif name == "parallelize":
            value = importlib.import_module("tvm_ipc.spmd").parallelize
        elif name == "load_weights":
            from tvm_ipc import runtime

            runtime.ready()
            value = importlib.import_module("tvm_ipc.models.weights.load").load_weights
        elif name == "runtime_only":
            value = importlib.import_module("tvm_ipc.runtime.tvm_import").runtime_only
        elif name == "__version__":
            from importlib.metadata import version

            from tvm_ipc.installation import DISTRIBUTION

            value = version(DISTRIBUTION)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
