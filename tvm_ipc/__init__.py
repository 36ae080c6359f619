# SPDX-License-Identifier: Apache-2.0
"""Makes the released apache-tvm wheel a multi-device engine.

Importing this module is cheap and does not import TVM: `import tvm` calls `_autoload` at its
end, in every process, and a program may also import `tvm_ipc` first. A name that needs TVM
loads it when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tvm_ipc import contract, errors
from tvm_ipc.runtime import pools

if TYPE_CHECKING:
    from tvm_ipc import comm, hf, transform
    from tvm_ipc.calibration import Calibration
    from tvm_ipc.parallel import parallelize
    from tvm_ipc.pipeline import get_pipeline
    from tvm_ipc.runtime.importing import runtime_only
    from tvm_ipc.runtime.session import Session, init_ccl
    from tvm_ipc.runtime.teams import CurrentRank, Team
    from tvm_ipc.weights.load import load_weights

    __version__: str

__all__ = [
    "Calibration",
    "CurrentRank",
    "Session",
    "Team",
    "__version__",
    "comm",
    "contract",
    "errors",
    "get_pipeline",
    "hf",
    "init_ccl",
    "load_weights",
    "parallelize",
    "runtime_only",
    "transform",
]

_MODULES = {"Session": "session", "init_ccl": "session", "CurrentRank": "teams", "Team": "teams"}


def _hosts(where: str, hosts: Any, num_workers: int) -> Any:
    return importlib.import_module("tvm_ipc.nodes.hosts").read(where, hosts, num_workers)


# Sessions know no nodes, which stand above them.
pools.beyond = _hosts


def _autoload() -> None:
    """Entry point in the group `tvm.backends`."""
    from tvm_ipc import runtime

    runtime.ready()


if not TYPE_CHECKING:  # or a type checker would believe that every name exists

    def __getattr__(name: str) -> Any:
        value: Any
        if name in _MODULES:
            from tvm_ipc import runtime

            runtime.ready()
            value = getattr(importlib.import_module(f"tvm_ipc.runtime.{_MODULES[name]}"), name)
        elif name in ("comm", "hf", "transform"):
            value = importlib.import_module(f"tvm_ipc.{name}")
        elif name == "Calibration":
            value = importlib.import_module("tvm_ipc.calibration").Calibration
        elif name == "get_pipeline":
            value = importlib.import_module("tvm_ipc.pipeline").get_pipeline
        elif name == "parallelize":
            value = importlib.import_module("tvm_ipc.parallel").parallelize
        elif name == "load_weights":
            from tvm_ipc import runtime

            runtime.ready()
            value = importlib.import_module("tvm_ipc.weights.load").load_weights
        elif name == "runtime_only":
            value = importlib.import_module("tvm_ipc.runtime.importing").runtime_only
        elif name == "__version__":
            from importlib.metadata import version

            value = version("tvm-ipc")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
