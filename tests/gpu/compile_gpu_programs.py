# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs of the kit, on a machine that needs no GPU and no CUDA toolkit.

    python tests/gpu/compile_gpu_programs.py FOLDER [cpu] [sm_90] ...

It wants the extra `dev`. TVM compiles for GPUs only where its library for them is loaded, and that
wants NVIDIA's driver; where there is none, an empty library takes its place.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # not there by itself with `-P`
import gpu_programs as programs

#: What TVM's library for GPUs takes from the driver.
_DRIVER = (
    *("cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString"),
    *("cuLaunchKernelEx", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload"),
    "cuTensorMapEncodeTiled",
)


def stand_in_for_the_driver() -> None:
    """Load a libcuda.so.1 that has these names, and ends the process if one is called."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libcuda.so.1")
        code = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in _DRIVER)
        subprocess.run(
            [*("gcc", "-shared", "-fPIC", "-xc", "-"), "-Wl,-soname,libcuda.so.1", "-o", library],
            input=code,
            text=True,
            check=True,
        )
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def compiled(program: programs.Program, name: str) -> Any:
    """What TVM and our pipeline make of a program for a target of the kit."""
    import tvm

    import tvm_ipc

    if name == "cpu":
        target = tvm.target.Target("llvm")
    else:
        target = tvm.target.Target({"kind": "cuda", "arch": name}, host={"kind": "llvm"})
    graph = {"relax.backend.use_cuda_graph": program.graph and name != "cpu"}
    with target, tvm.transform.PassContext(opt_level=3, config=graph):
        pipeline = tvm_ipc.get_pipeline(target, world_size=programs.RANKS, blas=False)
        made = tvm.compile(programs.source(program.name), target=target, relax_pipeline=pipeline)
    if name != "cpu":
        assert "cuda" in kinds(made.mod), (
            "TVM left the kernels out: its library for GPUs is missing"
        )
    return made


def kinds(module: Any) -> set[str]:
    """The kinds of a module and of all that it imports."""
    return {module.kind}.union(*(kinds(one) for one in module.imports))


def main(folder: Path, targets: list[str]) -> None:
    """Write `<program>.<target>.so` for each of them."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        stand_in_for_the_driver()
    folder.mkdir(parents=True, exist_ok=True)
    for target in targets:
        for program in programs.PROGRAMS.values():
            if program.graph and target == "cpu":
                continue
            compiled(program, target).export_library(str(folder / f"{program.name}.{target}.so"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(programs.TARGETS))
