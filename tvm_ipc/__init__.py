# SPDX-License-Identifier: Apache-2.0
"""Run Relax programs on several workers with the released apache-tvm wheel.

Importing this module is cheap and does not import TVM: `import tvm` calls `_autoload` at its
end, in every process, and a program may also import `tvm_ipc` first. A name that needs TVM
imports it on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_ipc import errors, packed_functions, script_namespace
from tvm_ipc.lazy_exports import export_on_first_use
from tvm_ipc.runtime import startup_hooks

if TYPE_CHECKING:
    from tvm_ipc import comm, cpu, gpu, models, spmd, transform
    from tvm_ipc.calibration import Calibration
    from tvm_ipc.cpu.host_cpu_target import cpu_target
    from tvm_ipc.models.weights.load import load_weights
    from tvm_ipc.pipeline import get_pipeline
    from tvm_ipc.runtime.current_rank import CurrentRank
    from tvm_ipc.runtime.import_tvm_without_compiler import runtime_only
    from tvm_ipc.runtime.init_ccl import init_ccl
    from tvm_ipc.runtime.session import Session
    from tvm_ipc.runtime.team import Team
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


# The runtime imports no other folder, so they are registered with it here.
startup_hooks.hosts_module = "tvm_ipc.nodes.session_hosts_argument"
startup_hooks.modules += [
    "tvm_ipc.cpu.openblas_discovery",
    "tvm_ipc.gpu.patch_cuda_header_search",
    "tvm_ipc.gpu.discovery",
]
startup_hooks.on_ready.append(script_namespace.install)


def _autoload() -> None:
    """Set up the runtime; `import tvm` calls this entry point of the group `tvm.backends`."""
    from tvm_ipc import runtime

    runtime.ready()


#: Names whose modules need Disco and the native library when they are imported.
_NEEDS_RUNTIME = ("CurrentRank", "Session", "Team", "init_ccl", "load_weights")

if not TYPE_CHECKING:  # a type checker would take every name for defined
    _import_name, __dir__ = export_on_first_use(
        __name__,
        {
            "Calibration": "calibration",
            "CurrentRank": "runtime.current_rank",
            "Session": "runtime.session",
            "Team": "runtime.team",
            "cpu_target": "cpu.host_cpu_target",
            "get_pipeline": "pipeline",
            "init_ccl": "runtime.init_ccl",
            "load_weights": "models.weights.load",
            "parallelize": "spmd.parallelize_model",
            "runtime_only": "runtime.import_tvm_without_compiler",
        },
        submodules=("comm", "cpu", "gpu", "models", "spmd", "transform"),
    )

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            from tvm_ipc.pip_install_commands import DISTRIBUTION

            return globals().setdefault(name, version(DISTRIBUTION))
        if name in _NEEDS_RUNTIME:
            from tvm_ipc import runtime

            runtime.ready()
        return _import_name(name)
